"""Numbers to trust: each names what it measures, and a larger or smaller one is better by definition here."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from regard.config import Metric

SMALLER_IS_BETTER = ("ter", "wer", "per", "perplexity")

References = Sequence[Sequence[str]]
"""Of every output, one or more right answers."""


def better(metric: Metric) -> Callable[[float, float], bool]:
    """Whether a first value of a metric is better than a second."""
    return (lambda new, old: new < old) if metric in SMALLER_IS_BETTER else (lambda new, old: new > old)


def score(metric: Metric, outputs: Sequence[str], references: References) -> float:
    """A metric of outputs, in percent (bleu, chrf and ter as sacreBLEU prints them)."""
    match metric:
        case "bleu" | "chrf" | "ter":
            return corpus(metric, outputs, references)[0]
        case "exact":
            return 100 * mean([output in wanted for output, wanted in zip(outputs, references, strict=True)])
        case "wer":
            return 100 - score("exact", outputs, references)
        case "per":
            return 100 * error_rate(outputs, references)
        case "accuracy":
            return 100 * token_accuracy(outputs, references)
        case "perplexity":
            raise ValueError("perplexity is made of a model's loss, not of outputs")


def corpus(metric: Metric, outputs: Sequence[str], references: References) -> tuple[float, str]:
    """sacreBLEU's figure and the signature that says how it was made."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    kinds = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
    most = max(map(len, references))
    streams = [[wanted[i] if i < len(wanted) else None for wanted in references] for i in range(most)]
    measure: Any = kinds[metric]()
    figure = measure.corpus_score(list(outputs), streams)
    return float(figure.score), str(measure.get_signature())


def mean(values: Sequence[float | bool]) -> float:
    """The mean; of nothing it is not a number."""
    return sum(values) / len(values) if values else math.nan


def token_accuracy(outputs: Sequence[str], references: References) -> float:
    """The share of places where the output has the reference's token (tokens are what white space separates; a
    missing or additional token is wrong), by the reference that fits best."""
    right = places = 0
    for output, wanted in zip(outputs, references, strict=True):
        found = output.split()
        choices = []
        for reference in wanted:
            tokens = reference.split()
            same = sum(a == b for a, b in zip(found, tokens, strict=False))
            choices.append((same / max(1, len(found), len(tokens)), same, max(len(found), len(tokens))))
        _, same, length = max(choices)
        right += same
        places += length
    return right / places if places else math.nan


def error_rate(outputs: Sequence[str], references: References) -> float:
    """Edits per reference token, by the reference that needs the fewest: the phoneme error rate when tokens are
    phonemes, the word error rate of speech recognition when they are words."""
    edits = length = 0
    for output, wanted in zip(outputs, references, strict=True):
        found = output.split()
        fewest, size = min((edit_distance(found, reference.split()), len(reference.split())) for reference in wanted)
        edits += fewest
        length += size
    return edits / length if length else math.nan


def edit_distance(left: Sequence[str], right: Sequence[str]) -> int:
    """Insertions, deletions and substitutions from one sequence to another (Levenshtein)."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]
