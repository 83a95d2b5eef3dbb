"""Scores of a run on a split, over all examples and by the length of the source."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from regard.batch import Batch, collate, encode, epoch
from regard.config import EvaluateConfig, Metric
from regard.data import Example, Ledger
from regard.errors import DataError
from regard.loss import cross_entropy
from regard.metrics import corpus, score
from regard.models import Seq2Seq
from regard.predict import Predictor


class Evaluation(NamedTuple):
    """What was measured, and on what."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    buckets: list[dict[str, Any]]
    examples: int
    outputs: list[str]
    sources: list[str]
    references: list[list[str]]

    def tree(self) -> dict[str, Any]:
        """For machines: without the texts."""
        return {
            "examples": self.examples,
            "metrics": self.metrics,
            "signatures": self.signatures,
            "buckets": self.buckets,
        }


def evaluate(
    predictor: Predictor,
    examples: Sequence[Example],
    settings: EvaluateConfig,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """Decode every source and score the outputs against its target, or all of its targets if they are grouped."""
    if not examples:
        raise DataError("there is nothing to evaluate on: this split has no examples. Set data.test or data.cut_test.")
    sources, references = [example.source for example in examples], [[example.target] for example in examples]
    if settings.group:
        wanted: dict[str, list[str]] = {}
        for example in examples:
            wanted.setdefault(example.source, []).append(example.target)
        sources, references = list(wanted), list(wanted.values())
    outputs: list[str] = []
    for start in range(0, len(sources), 256):
        outputs += predictor(sources[start : start + 256])
        report(len(outputs), len(sources))
    metrics, signatures = measured(settings.metrics, predictor, outputs, sources, references)
    lengths = [len(tokens.ids) for tokens in predictor.source.encode_all(sources)]
    buckets = []
    for low, high in zip([0, *settings.buckets], [*settings.buckets, math.inf], strict=True):
        inside = [i for i, length in enumerate(lengths) if low < length <= high]
        if inside:
            parts = [[column[i] for i in inside] for column in (outputs, sources, references)]
            figures, _ = measured(settings.metrics, predictor, *parts)  # type: ignore[arg-type]
            name = f"{low + 1}-{high}" if high < math.inf else f"{low + 1}+"
            buckets.append({"length": name, "examples": len(inside), **figures})
    return Evaluation(metrics, signatures, buckets, len(sources), outputs, sources, references)


def measured(
    metrics: Sequence[Metric],
    predictor: Predictor,
    outputs: Sequence[str],
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
) -> tuple[dict[str, float], dict[str, str]]:
    """Every metric of some outputs, and the signatures of those that have one."""
    figures: dict[str, float] = {}
    signatures: dict[str, str] = {}
    for metric in metrics:
        if metric == "perplexity":
            pairs = [Example(s, t, "") for s, wanted in zip(sources, references, strict=True) for t in wanted]
            figures[metric] = perplexity(predictor, pairs)
        elif metric in ("bleu", "chrf", "ter"):
            figures[metric], signatures[metric] = corpus(metric, outputs, references)
        else:
            figures[metric] = score(metric, outputs, references)
    return figures, signatures


def perplexity(predictor: Predictor, examples: Sequence[Example]) -> float:
    """exp of the mean surprise, in nats a token, of the targets (their <eos> counts)."""
    text = predictor.config.text.model_copy(update={"longer": "cut"})
    pairs = encode(examples, predictor.source, predictor.target, text, Ledger())
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for indices in epoch(pairs, predictor.config.train.batch_tokens, 0, 0):
            nats, count = surprise(predictor.model, collate([pairs[i] for i in indices]))
            total += nats
            tokens += count
    return math.exp(total / tokens)


def surprise(model: Seq2Seq, batch: Batch) -> tuple[float, int]:
    """The sum of the answers' surprise in nats, and their tokens."""
    device = next(model.parameters()).device
    batch = Batch(*(tensor.to(device) for tensor in batch))
    loss = cross_entropy(model.hidden(batch), model.output.weight, model.output.bias, batch.answer)
    return float(loss.plain), loss.tokens
