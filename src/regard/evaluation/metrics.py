"""Numbers to trust: each names what it measures, and a larger or smaller one is better by definition here."""

import itertools
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from regard.tasks.task import Answer, Metric, Task
from regard.tasks.vision.caption_metrics import References, score_bleu, score_cider, score_rouge_l

OF_PROBABILITIES = ("perplexity", "nats", "bpb")
"""Metrics that are made of a model's probabilities of the right answers, not of its own answers."""
SMALLER_IS_BETTER = (*OF_PROBABILITIES, "ter", "error", "wer", "cer", "per", "ece")


def better(task: Task, metric: str) -> Callable[[float, float], bool]:
    """Whether a first value of a metric is better than a second."""
    own = [one.smaller_is_better for one in task.metrics if isinstance(one, Metric) and one.name == metric]
    smaller = own[0] if own else metric in SMALLER_IS_BETTER
    return (lambda new, old: new < old) if smaller else (lambda new, old: new > old)


def score_answers(task: Task, metric: str, answers: Sequence[Answer], references: References) -> float:
    """A metric of answers: the task's own, or one of this file."""
    for own in task.metrics:
        if isinstance(own, Metric) and own.name == metric:
            return own.compute(answers, references)
    texts = [answer.text for answer in answers]
    if metric == "ece":
        return 100 * calibration_error([math.exp(answer.score) for answer in answers], texts, references)
    return score(metric, texts, references, task.separator)


def score(metric: str, outputs: Sequence[str], references: References, separator: str | None = None) -> float:
    """A metric of outputs, in percent (bleu, chrf and ter as sacreBLEU prints them). Outputs that are labels come with
    their `separator` ("" if each is one label): then only a whole output is accurate, else every token counts."""
    match metric:
        case "bleu" | "chrf" | "ter":
            return corpus_score(metric, outputs, references)[0]
        case "accuracy" if separator is None:
            return 100 * token_accuracy(outputs, references)
        case "exact" | "accuracy":
            return 100 * mean([output in wanted for output, wanted in zip(outputs, references, strict=True)])
        case "prefix":
            return 100 * best_mean(shared_prefix, outputs, references)
        case "error":
            return 100 - score("exact", outputs, references)
        case "wer" | "per":
            return 100 * error_rate(outputs, references, str.split)
        case "cer":
            return 100 * error_rate(outputs, references, list)
        case "f1":
            return 100 * macro_f1(outputs, references, separator or "")
        case "bleu1" | "bleu2" | "bleu3" | "bleu4":
            return 100 * score_bleu(outputs, references, int(metric[-1])).corpus
        case "cider":
            return 100 * score_cider(outputs, references).corpus
        case "coco_rougel":
            return 100 * score_rouge_l(outputs, references).corpus
        case "rouge1" | "rouge2" | "rougel":
            return 100 * rouge(metric, outputs, references)
        case "span_exact" | "span_f1":  # as in SQuAD's script: nothing is right only where no reference says something
            given = [normalize_answer(output) for output in outputs]
            right = [list(filter(None, map(normalize_answer, wanted))) or [""] for wanted in references]
            return score("exact", given, right) if metric == "span_exact" else 100 * best_mean(word_f1, given, right)
    raise ValueError(f"{metric} is not made of outputs alone")


def best_mean(compare: Callable[[str, str], float], outputs: Sequence[str], references: References) -> float:
    """The mean over outputs of a comparison with the reference that fits best."""
    pairs = zip(outputs, references, strict=True)
    return mean([max(compare(output, one) for one in wanted) for output, wanted in pairs])


def corpus_score(metric: str, outputs: Sequence[str], references: References) -> tuple[float, str]:
    """sacreBLEU's figure and the signature that says how it was made."""
    from sacrebleu import metrics

    measure: Any = getattr(metrics, metric.upper())()
    streams = [list(stream) for stream in itertools.zip_longest(*references)]
    return float(measure.corpus_score(list(outputs), streams).score), str(measure.get_signature())


def mean(values: Sequence[float | bool]) -> float:
    """The mean; of nothing it is not a number."""
    return sum(values) / len(values) if values else math.nan


def token_accuracy(outputs: Sequence[str], references: References) -> float:
    """The share of places where the output has the reference's token (tokens are what white space separates; a
    missing or additional token is wrong), by the reference that fits best."""
    right = places = 0
    for output, wanted in zip(outputs, references, strict=True):
        choices, found = [], output.split()
        for tokens in map(str.split, wanted):
            length = max(len(found), len(tokens))
            same = sum(a == b for a, b in zip(found, tokens, strict=False))
            choices.append((same / max(1, length), same, length))
        _, same, length = max(choices)
        right += same
        places += length
    return right / places if places else math.nan


def shared_prefix(output: str, reference: str) -> float:
    """The share of the reference's tokens before the first error."""
    tokens, found = reference.split(), output.split()
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, found, strict=False))
    return sum(1 for _ in right) / len(tokens) if tokens else float(not found)


def error_rate(outputs: Sequence[str], references: References, cut: Callable[[str], list[str]]) -> float:
    """Edits per unit of the reference, by the reference that needs the fewest: the word, phoneme or character error
    rate, by the units that a text is cut into."""
    edits = length = 0
    for output, wanted in zip(outputs, references, strict=True):
        found = cut(output)
        fewest, size = min((edit_distance(found, units), len(units)) for units in map(cut, wanted))
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


def confusion_table(outputs: Sequence[str], references: References) -> dict[str, dict[str, int]]:
    """How often each right label (first) was taken for each label (second)."""
    right = [meant(*pair) for pair in zip(outputs, references, strict=True)]
    names = sorted({*right, *outputs})
    table = {name: dict.fromkeys(names, 0) for name in sorted(set(right))}
    for output, wanted in zip(outputs, right, strict=True):
        table[wanted][output] += 1
    return table


def meant(output: str, wanted: Sequence[str]) -> str:
    """The right answer that an output is compared with: itself, if it is one of them."""
    return output if output in wanted else wanted[0]


def macro_f1(outputs: Sequence[str], references: References, separator: str = "") -> float:
    """The mean over the labels of the harmonic mean of precision and recall; a label nobody wanted or gave has none. A
    whole text is one label, or several with a `separator` between them."""
    right, both = Counter[str](), Counter[str]()
    for output, wanted in zip(outputs, references, strict=True):
        given, labels = split(output, separator), split(meant(output, wanted), separator)
        right.update(given & labels)
        both.update([*given, *labels])
    return mean([2 * right[name] / count for name, count in sorted(both.items())])


def split(labels: str, separator: str) -> set[str]:
    """The labels in a text."""
    parts = labels.split(separator) if separator else [labels]
    return {label.strip() for label in parts if label.strip()}


def calibration_error(sure: Sequence[float], outputs: Sequence[str], references: References, bins: int = 15) -> float:
    """ECE (Guo 2017): how far, on average, the probability of an answer is from the share of right ones among those of
    like probability."""
    groups: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for probability, output, wanted in zip(sure, outputs, references, strict=True):
        groups[min(bins - 1, int(probability * bins))].append((probability, output in wanted))
    gaps = [abs(sum(p - right for p, right in group)) for group in groups]
    return sum(gaps) / max(1, len(outputs))


class Words:
    """ROUGE's tokens: runs of letters, their marks, and digits of any script, in small letters."""

    def tokenize(self, text: str) -> list[str]:
        def inside(sign: str) -> bool:
            return sign.isalnum() or sign == "_" or unicodedata.category(sign)[0] == "M"

        found = "".join(sign if inside(sign) else " " for sign in text.lower()).split()
        return [word for word in found if any(sign.isalnum() or sign == "_" for sign in word)]


def rouge(metric: str, outputs: Sequence[str], references: References) -> float:
    """The mean F of rouge-score, by the reference that fits best; words of any script count, and are not stemmed."""
    from rouge_score.rouge_scorer import RougeScorer

    name = {"rougel": "rougeL"}.get(metric, metric)
    scorer = RougeScorer([name], tokenizer=Words())
    return best_mean(lambda output, wanted: scorer.score(wanted, output)[name].fmeasure, outputs, references)


def normalize_answer(text: str) -> str:
    """An answer as SQuAD's rules compare it: small letters, without punctuation, English articles and wide spaces."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def word_f1(output: str, wanted: str) -> float:
    """F1 of the words that two answers share, by SQuAD's rules."""
    left, right = normalize_answer(output).split(), normalize_answer(wanted).split()
    if not left or not right:
        return float(left == right)
    same = sum((Counter(left) & Counter(right)).values())
    return 2 * same / (len(left) + len(right))
