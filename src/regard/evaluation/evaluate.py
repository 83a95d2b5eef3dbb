"""Scores of a run on a split: over all examples, by the length of the source, and by the file it came from."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch

from regard.config.config import ClassifierConfig, EvaluateConfig, LanguageConfig, Metric, Model, ReaderConfig
from regard.config.data import Data
from regard.data.batching import Batch, collate, encode, epoch, joined, known_labels, padded
from regard.data.files import Example
from regard.data.splits import Ledger, remedy
from regard.data.vocabulary import BOS, PAD
from regard.errors import DataError
from regard.evaluation.metrics import calibration_error, confusion, corpus, score
from regard.inference.predictor import Output, Predictor
from regard.tasks.encoders import LABELS, Classifier, TextEncoder, judged, several


class Evaluation(NamedTuple):
    """What was measured, and on what."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    buckets: list[dict[str, Any]]
    examples: int
    outputs: list[str]
    sources: list[str]
    references: list[list[str]]
    files: Sequence[dict[str, Any]] = ()
    """As `buckets`, by the file that examples came from, if there are several."""
    confusion: dict[str, dict[str, int]] | None = None
    """Of labels, where a text has one: how often each (first) was taken for each (second)."""
    cut: int = 0
    """Sources that were longer than the model takes, and cut."""

    def tree(self) -> dict[str, Any]:
        """For machines: without the texts."""
        found: dict[str, Any] = {
            "examples": self.examples,
            "metrics": self.metrics,
            "signatures": self.signatures,
            "buckets": self.buckets,
            "cut": self.cut,
        }
        return (
            found
            | ({"files": self.files} if self.files else {})
            | ({"confusion": self.confusion} if self.confusion else {})
        )


class Asked(NamedTuple):
    """Something to evaluate on: a source, all of its right answers, and the file it came from."""

    source: str
    wanted: list[str]
    file: str


def evaluate(
    predictor: Predictor,
    examples: Sequence[Example],
    settings: EvaluateConfig,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """Answer every source and score the outputs against its target, or all of its targets if they are grouped. Of a
    language model, the texts themselves are scored."""
    if not examples:
        raise DataError(f"there is nothing to evaluate on: this split has no examples.{hint(predictor.config.data)}")
    refuse_unfit(settings.metrics, predictor.config.model)
    if isinstance(predictor.config.model, LanguageConfig):
        return Evaluation(modelled(predictor, examples, settings.metrics), {}, [], len(examples), [], [], [])
    if labels(predictor):
        known_labels(examples, predictor.target)
    predictor = cutting(predictor)
    asked = [Asked(example.source, [example.target], example.where.rpartition(":")[0]) for example in examples]
    asked = together(asked) if settings.group else asked
    sources = [one.source for one in asked]
    outputs = answered(predictor, sources, report)
    given, right = compared(predictor, outputs, asked)

    def part(inside: Sequence[int]) -> tuple[dict[str, float], dict[str, str]]:
        return measured(settings.metrics, predictor, [given[i] for i in inside], [right[i] for i in inside])

    def parts(name: str, groups: dict[str, list[int]]) -> list[dict[str, Any]]:
        return [{name: group, "examples": len(inside), **part(inside)[0]} for group, inside in groups.items()]

    lengths = [len(tokens.ids) for tokens in predictor.source.encode_all(sources)]
    files = by_file(asked)
    return Evaluation(
        *part(range(len(asked))),
        parts("length", by_length(lengths, settings.buckets)),
        len(asked),
        [output.text for output in outputs],
        sources,
        [one.wanted for one in asked],
        parts("file", files) if len(files) > 1 else [],
        confusion([one.text for one in given], [one.wanted for one in right]) if single(predictor) else None,
        predictor.cut,
    )


def cutting(predictor: Predictor) -> Predictor:
    """The same, but what is too long is cut, and counted: a score is over all examples."""
    predictor = copy.copy(predictor)
    text = predictor.config.text.model_copy(update={"longer": "cut"})
    predictor.config, predictor.cut = predictor.config.model_copy(update={"text": text}), 0
    return predictor


def hint(data: Data) -> str:
    """What to set for the splits that a run does not have."""
    names = ("valid", "test")
    missing = [n for n in names if not any(getattr(data, key, 0) for key in (n, f"cut_{n}", f"{n}_share"))]
    return f" Set {', '.join(f'{remedy(data, name)} for {name}' for name in missing)}." if missing else ""


def answered(predictor: Predictor, sources: Sequence[str], report: Callable[[int, int], None]) -> list[Output]:
    """The best answer to every source."""
    outputs: list[Output] = []
    for start in range(0, len(sources), 256):
        outputs += [answers[0] for answers in predictor.predict(sources[start : start + 256])]
        report(len(outputs), len(sources))
    return outputs


def fitting(model: Model) -> list[Metric]:
    """The metrics that a model of these settings has."""
    modelled: list[Metric] = ["nats", "perplexity", "bpb"]
    if isinstance(model, LanguageConfig):
        return modelled
    chosen = isinstance(model, ClassifierConfig) or (isinstance(model, ReaderConfig) and model.answer == "word")
    unfit = ("nats", "bpb") if chosen else ("nats", "bpb", "f1", "ece")
    return [metric for metric in get_args(Metric) if metric not in unfit]


def refuse_unfit(metrics: Sequence[Metric], model: Model) -> None:
    """Refuse a metric that a model does not have."""
    known = fitting(model)
    for metric in metrics:
        if metric not in known:
            name = "language model" if isinstance(model, LanguageConfig) else f"model of kind {model.kind}"
            raise DataError(f"a {name} has no {metric}: set evaluate.metrics to some of {', '.join(known)}.")


def together(asked: Sequence[Asked]) -> list[Asked]:
    """Every source once, with the right answers of all that have it."""
    merged: dict[str, Asked] = {}
    for one in asked:
        merged.setdefault(one.source, one._replace(wanted=[])).wanted.extend(one.wanted)
    return list(merged.values())


def by_length(lengths: Sequence[int], edges: Sequence[int]) -> dict[str, list[int]]:
    """The numbers of those whose length is above one edge and at most the next, by the name of that range."""
    groups = {}
    for low, high in zip([0, *edges], [*edges, math.inf], strict=True):
        inside = [i for i, length in enumerate(lengths) if low < length <= high]
        if inside:
            groups[f"{low + 1}-{high}" if high < math.inf else f"{low + 1}+"] = inside
    return groups


def by_file(asked: Sequence[Asked]) -> dict[str, list[int]]:
    """The numbers of those that came from each file."""
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(asked):
        groups.setdefault(one.file, []).append(number)
    return groups


def labels(predictor: Predictor) -> bool:
    """Whether answers are names of classes."""
    return isinstance(predictor.model, TextEncoder) and predictor.target is not predictor.source


def single(predictor: Predictor) -> bool:
    """Whether every answer is the name of one class."""
    return labels(predictor) and not (isinstance(predictor.model, Classifier) and predictor.model.multiple)


def separator(predictor: Predictor) -> str | None:
    """What stands between several labels of one answer; None if answers are not labels."""
    target = predictor.config.text.target
    return target.separator if target and labels(predictor) else None


def compared(
    predictor: Predictor, outputs: Sequence[Output], asked: Sequence[Asked]
) -> tuple[Sequence[Output], Sequence[Asked]]:
    """Outputs and right answers as they can be compared: the order of labels says nothing."""
    if not labels(predictor):
        return outputs, asked
    texts = named(predictor, [output.text for output in outputs])
    return (
        [output._replace(text=text) for output, text in zip(outputs, texts, strict=True)],
        [one._replace(wanted=named(predictor, one.wanted)) for one in asked],
    )


def named(predictor: Predictor, texts: Sequence[str]) -> list[str]:
    """Labels as they can be compared: each as the vocabulary writes it, once, and in the order of the alphabet."""
    between = separator(predictor) or ""
    names = ({predictor.target.token(i) for i in tokens.ids} for tokens in predictor.target.encode_all(texts))
    return [between.join(sorted(several)) for several in names]


def measured(
    metrics: Sequence[Metric], predictor: Predictor, outputs: Sequence[Output], asked: Sequence[Asked]
) -> tuple[dict[str, float], dict[str, str]]:
    """Every metric of some outputs, and the signatures of those that have one."""
    figures: dict[str, float] = {}
    signatures: dict[str, str] = {}
    texts, references = [output.text for output in outputs], [one.wanted for one in asked]
    for metric in metrics:
        if metric == "perplexity":
            figures[metric] = perplexity(predictor, [Example(one.source, t, "") for one in asked for t in one.wanted])
        elif metric == "ece":
            sure = [math.exp(output.score) for output in outputs]
            figures[metric] = 100 * calibration_error(sure, texts, references)
        elif metric in ("bleu", "chrf", "ter"):
            figures[metric], signatures[metric] = corpus(metric, texts, references)
        else:
            figures[metric] = score(metric, texts, references, separator(predictor))
    return figures, signatures


def perplexity(predictor: Predictor, examples: Sequence[Example]) -> float:
    """exp of the mean surprise, in nats a token, of the targets (their <eos> counts); nan if none can be given."""
    nats, _ = surprise(predictor, batches(predictor, examples))
    return math.exp(min(nats, 700.0))


def batches(predictor: Predictor, examples: Sequence[Example]) -> Iterator[Batch]:
    """Examples as batches where the model is; what is too long is cut."""
    config, device = predictor.config, next(predictor.model.parameters()).device
    text = config.text.model_copy(update={"longer": "cut"})
    pairs = encode(examples, predictor.source, predictor.target, text, Ledger(), config.model)
    for indices in epoch(pairs, config.train.batch_tokens, 0, 0):
        yield Batch(*(tensor.to(device) for tensor in collate([pairs[i] for i in indices])))


def surprise(predictor: Predictor, batches: Iterable[Batch]) -> tuple[float, int]:
    """The mean surprise of all answers in nats, and their number."""
    device = next(predictor.model.parameters()).device
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in batches:
            loss = predictor.model.loss(Batch(*(tensor.to(device) for tensor in batch)))
            total += float(loss.plain)
            count += loss.tokens
    return total / count if count else math.nan, count


def temperature(predictor: Predictor, examples: Sequence[Example]) -> float:
    """What logits are best divided by: of two hundred numbers between 1/2 and 8, the one with the least surprise.
    None is smaller: few examples that are all right would make it sure of everything."""
    with torch.inference_mode():
        found = [(predictor.model(batch).float(), batch.answer) for batch in batches(predictor, examples)]

    def surprise(choice: float) -> float:
        if single(predictor):
            return sum(float(judged(logits / choice, answer[:, 0] - LABELS, 0).plain) for logits, answer in found)
        return sum(float(several(logits / choice, answer)) for logits, answer in found)

    choices: list[float] = torch.logspace(-1, 3, 201, base=2.0).tolist()
    return min(choices, key=surprise)


def modelled(predictor: Predictor, examples: Sequence[Example], metrics: Sequence[Metric]) -> dict[str, float]:
    """How well a language model foresees texts, read in windows of its context that do not overlap: nats and perplexity
    a token, and bits a byte of the text, which can be compared between vocabularies."""
    config = predictor.config
    assert isinstance(config.model, LanguageConfig)
    pairs = encode(examples, predictor.source, predictor.target, config.text, Ledger(), config.model)
    stream = joined(pairs, config.model.begin)
    if not config.model.begin:
        stream = stream[:-1]  # the text ends where the split does, not where the author ended it
    width = config.text.max_length
    rows = [stream[start : start + width + 1] for start in range(0, len(stream) - 1, width)]
    made = []
    most = max(1, min(32, config.train.batch_tokens // width))
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        fed, wanted = padded([row[:-1] for row in part]), padded([row[1:] for row in part])
        wanted = wanted.masked_fill(wanted == BOS, PAD)  # nobody writes it: foreseeing it is no merit
        made.append(Batch(fed[:, :0], torch.zeros(len(part), dtype=torch.long), fed, wanted))
    nats, count = surprise(predictor, made)
    size = sum(len(example.target.encode("utf-8", "surrogatepass")) for example in examples)
    figures = {"nats": nats, "perplexity": math.exp(min(nats, 700.0)), "bpb": nats * count / math.log(2) / size}
    return {metric: figures[metric] for metric in metrics}
