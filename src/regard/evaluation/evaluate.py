"""Scores of a run on a split: over all examples, by the length of the source, and by the file it came from."""

import copy
import itertools
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.config.run import EvaluateConfig
from regard.config.toml import Warn
from regard.data.examples import Example, Ledger, Source
from regard.errors import DataError
from regard.evaluation.metrics import OF_PROBABILITIES, confusion_table, corpus_score, score_answers
from regard.inference.predictor import Predictor
from regard.tasks.task import Answer, Table
from regard.training.prepare import check_metrics, find_seen


class Evaluation(NamedTuple):
    """What was measured, and on what."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    buckets: list[dict[str, Any]]
    examples: int
    outputs: list[str]
    sources: list[Source]
    references: list[list[str]]
    files: Sequence[dict[str, Any]] = ()  # as `buckets`, by the file that examples came from, if there are several
    confusion: dict[str, dict[str, int]] | None = None
    """Of labels, where a text has one: how often each (first) was taken for each (second)."""
    cut: int = 0  # sources that were longer than the model takes, and cut
    seen: int = 0  # examples whose source is in the training data
    unscored: int = 0  # examples whose target the model cannot give, which perplexity leaves out
    tables: Mapping[str, Table] = {}  # of the task's own, by their titles

    def tree(self) -> dict[str, Any]:
        """For machines: without the texts."""
        names = ["examples", "metrics", "signatures", "buckets", "cut", "seen", "unscored"]
        names += [name for name in ("files", "confusion", "tables") if getattr(self, name)]
        return {name: getattr(self, name) for name in names}


class Item(NamedTuple):
    """Something to evaluate on: a source, all of its references, the file it came from, and its examples' numbers."""

    source: Source
    references: list[str]
    file: str
    examples: list[int]


class Nats(NamedTuple):
    """What perplexity is made of, example by example: measured once, then added up for any part of a split."""

    nats: Tensor  # (examples,)
    tokens: Tensor  # (examples,)
    bytes: list[int]
    unscored: int = 0  # examples whose target the model cannot give

    def figures(self, examples: Sequence[int]) -> dict[str, float]:
        """nats and perplexity a token, and bits a byte, which can be compared between vocabularies."""
        inside = torch.tensor(examples)
        total, tokens = float(self.nats[inside].sum()), int(self.tokens[inside].sum())
        mean = total / tokens if tokens else math.nan
        size = sum(self.bytes[i] for i in examples)
        bits = total / math.log(2) / size if size else math.nan
        return {"nats": mean, "perplexity": math.exp(min(mean, 700.0)), "bpb": bits}


def evaluate(
    predictor: Predictor,
    examples: Sequence[Example | tuple[Source, str]],
    settings: EvaluateConfig | None = None,
    report: Callable[[int, int], None] = lambda done, of: None,
    warn: Warn = warnings.warn,
) -> Evaluation:
    """Answer every source and score the answers against its target, or all of its targets if they are references. A
    text without a source (a language model's) has no answer: it is scored itself. Sources that the run learned from are
    counted, and left out (evaluate.unseen) or said. The settings are the run's own unless others are given."""
    settings, chosen = settings or predictor.config.evaluate, list(map(make_example, itertools.count(1), examples))
    known = find_seen(predictor.run, chosen) if predictor.run else [False] * len(chosen)
    if settings.unseen and chosen and all(known):
        raise DataError(f"all {len(chosen):,} examples are in the training data: evaluate.unseen leaves none.")
    if settings.unseen:
        chosen = [example for example, seen in zip(chosen, known, strict=True) if not seen]
    elif any(known):
        counts = f"{sum(known):,} of {len(chosen):,} sources are in the training data"
        warn(f"{counts}: new ones will score worse. Leave them out with evaluate.unseen=true.")
    return score_examples(predictor, chosen, settings, report, warn)._replace(seen=sum(known))


def score_examples(
    predictor: Predictor,
    examples: Sequence[Example],
    settings: EvaluateConfig,
    report: Callable[[int, int], None],
    warn: Warn,
) -> Evaluation:
    """As `evaluate`, of all examples."""
    task = predictor.task
    if not examples:
        missing = [f"{task.config.data.remedy(name)} for {name}" for name in task.config.data.missing()]
        hint = f" Set {', '.join(missing)}." if missing else ""
        raise DataError(f"there is nothing to evaluate on: this split has no examples.{hint}")
    check_metrics(task.config.model_copy(update={"evaluate": settings}))
    task.check_examples(examples)
    predictor = copy.copy(predictor)
    predictor.longer, predictor.cut = "cut", 0  # what is too long is cut, and counted: a score is over all examples
    task.warm(predictor.model, examples, report)
    items = make_items(examples, settings.multi_reference or task.multi_reference)
    nats = measure_nats(predictor, examples, warn) if set(settings.metrics) & set(OF_PROBABILITIES) else None
    answered = any(item.source for item in items) or not set(settings.metrics) <= set(OF_PROBABILITIES)
    asked = items if answered else []
    sources, references = [item.source for item in asked], [item.references for item in asked]
    answers = answer_all(predictor, sources, report)
    outputs = [answer.text for answer in answers]
    given = [answer._replace(text=text) for answer, text in zip(answers, task.canonical(compose(outputs)), strict=True)]
    right = [task.canonical(compose(wanted)) for wanted in references]
    signatures: dict[str, str] = {}

    def measure(inside: Sequence[int]) -> dict[str, float]:
        some, wanted = [given[i] for i in inside], [right[i] for i in inside]
        chosen = [number for item in ([items[i] for i in inside] or items) for number in item.examples]
        figures = {} if nats is None else nats.figures(chosen)
        for metric in settings.metrics:
            if metric in ("bleu", "chrf", "ter"):
                figures[metric], signatures[metric] = corpus_score(metric, [one.text for one in some], wanted)
            elif metric not in OF_PROBABILITIES:
                figures[metric] = score_answers(task, metric, some, wanted)
        return {metric: figures[metric] for metric in settings.metrics}

    def measure_parts(name: str, groups: dict[str, list[int]]) -> list[dict[str, Any]]:
        return [{name: group, "examples": len(inside), **measure(inside)} for group, inside in groups.items()]

    whole = measure(range(len(asked)))
    buckets = measure_parts("length", group_by_size(task.source_lengths(sources), settings.buckets))
    files = group_by_file(asked)
    parts = measure_parts("file", files) if len(files) > 1 else []
    table = confusion_table([one.text for one in given], right) if task.separator == "" else None
    figures = (whole, signatures, buckets, len(items), outputs, sources, references, parts, table, predictor.cut)
    tables = task.tabulate(given, right)
    return Evaluation(*figures, unscored=nats.unscored if nats else 0, tables=tables)


def make_example(number: int, given: Any) -> Example:
    """An example, also of a source and its target."""
    if isinstance(given, Example):
        return given
    if type(given) not in (tuple, list) or len(given) != 2 or not isinstance(given[1], str):
        shown = "('two dogs', 'zwei Hunde')"
        raise DataError(f"example {number} is {given!r:.80}, expected a source and its target, as {shown}.")
    source, target = given
    return Example(source, target, f"examples:{number}")


def compose(texts: Iterable[str]) -> list[str]:
    """Texts in one form of Unicode (NFC), so that they can be compared: files from a Mac may have another (NFD)."""
    return [unicodedata.normalize("NFC", text) for text in texts]


def answer_all(predictor: Predictor, sources: Sequence[Source], report: Callable[[int, int], None]) -> list[Answer]:
    """The best answer to every source."""
    answers: list[Answer] = []
    for start in range(0, len(sources), 256):
        answers += [best[0] for best in predictor.predict(sources[start : start + 256])]
        report(len(answers), len(sources))
    return answers


def make_items(examples: Sequence[Example], multi_reference: bool) -> list[Item]:
    """Examples, each by itself; or every source once, with the references of all examples that have it."""
    items: dict[Any, Item] = {}
    for number, example in enumerate(examples):
        file = example.where.rpartition(":")[0]
        key = example.source if multi_reference and example.source else number
        item = items.setdefault(key, Item(example.source, [], file, []))
        item.references.append(example.target)
        item.examples.append(number)
    return list(items.values())


def group_by_size(lengths: Sequence[int], edges: Sequence[int]) -> dict[str, list[int]]:
    """The numbers of those whose length is above one edge and at most the next, by the name of that range."""
    groups = {}
    for low, high in zip([0, *edges], [*edges, math.inf], strict=True):
        inside = [i for i, length in enumerate(lengths) if low < length <= high]
        if inside:
            groups[f"{low + 1}-{high}" if high < math.inf else f"{low + 1}+"] = inside
    return groups


def group_by_file(items: Sequence[Item]) -> dict[str, list[int]]:
    """The numbers of those that came from each file."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.file, []).append(number)
    return groups


def measure_nats(predictor: Predictor, examples: Sequence[Example], warn: Warn = warnings.warn) -> Nats:
    """The surprise of every example's target under the model, in nats (its <eos> counts), and its tokens. What the
    model cannot give at all is left out, and said."""
    device, ledger = next(predictor.model.parameters()).device, Ledger()
    nats, tokens = torch.zeros(len(examples), dtype=torch.float64), torch.zeros(len(examples), dtype=torch.long)
    with torch.inference_mode():
        for batch, numbers in predictor.task.scoring_batches(examples, ledger):
            found = predictor.task.surprise(predictor.model, batch.to(device))
            nats.index_add_(0, torch.tensor(numbers), found.nats.double().cpu())
            tokens.index_add_(0, torch.tensor(numbers), found.tokens.cpu())
    targets = compose(example.target for example in examples)
    unscored = sum(map(len, ledger.dropped.values()))
    if unscored:
        counts, reasons = f"{len(examples) - unscored:,} of {len(examples):,}", map(str.strip, ledger.lines()[1:])
        warn(
            f"perplexity is that of {counts} examples: the model cannot give the other answers ({'; '.join(reasons)})."
        )
    return Nats(nats, tokens, [len(target.encode("utf-8", "surrogatepass")) for target in targets], unscored)
