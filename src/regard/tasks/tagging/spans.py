"""Tags that mark spans (BIO, BIOES): which may follow which, the spans of a sequence, F1 as CoNLL's script counts."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

PREFIXES = ("B", "I", "E", "S")


class Span(NamedTuple):
    """Words from one to before another, and what they are."""

    label: str
    first: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """`B-NP` as (B, NP), as the script does; a tag without a hyphen has no label."""
    prefix, _, label = tag.partition("-")
    return prefix, label


def mark_spans(tags: Sequence[str]) -> bool:
    """Whether all tags are of BIO or BIOES."""
    return all(tag == "O" or ("-" in tag and split_tag(tag)[0] in PREFIXES) for tag in tags) and set(tags) != {"O"}


def is_closed(tags: Sequence[str]) -> bool:
    """Whether the tags are BIOES, in which a span must be ended."""
    return any(split_tag(tag)[0] in ("E", "S") for tag in tags if "-" in tag)


def may_follow(before: str | None, tag: str | None, closed: bool) -> bool:
    """Whether a tag may follow another; None is the edge of a sentence. In BIOES (`closed`), what was begun must go on
    until it is ended."""
    left, label = split_tag(before) if before else ("O", "")
    right, other = split_tag(tag) if tag else ("O", "")
    goes_on = right in ("I", "E")
    if left in ("B", "I"):
        return label == other if goes_on else not closed
    return not goes_on


def read_spans(tags: Sequence[str]) -> list[Span]:
    """The spans of a sequence, by the rules of CoNLL's script: what continues nothing begins a span."""
    spans: list[Span] = []
    first, label = -1, ""
    before = ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        prefix, kind = now = split_tag(tag)
        changes = before[1] != kind
        ends = before[0] in ("E", "S") or prefix in ("B", "S", "O") or changes
        if ends and first >= 0:
            spans.append(Span(label, first, place))
            first = -1
        if prefix != "O" and first < 0:
            first, label = place, kind
        before = now
    return spans


class Count(NamedTuple):
    """Spans of one label, or of all: how many are right, given and wanted."""

    right: int
    given: int
    wanted: int

    def figures(self) -> dict[str, float]:
        """Precision, recall and their harmonic mean, in percent."""
        precision = 100 * self.right / self.given if self.given else 0.0
        recall = 100 * self.right / self.wanted if self.wanted else 0.0
        both = precision + recall
        return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / both if both else 0.0}


def count_spans(given: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> dict[str, Count]:
    """Of taggings and the right ones, the counts of spans by label; "" stands for all."""
    return count_by_label([set(read_spans(tags)) for tags in given], [set(read_spans(tags)) for tags in wanted])


def count_tags(given: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> dict[str, Count]:
    """The same of single tags."""

    def spans(tags: Sequence[str]) -> set[Span]:
        return {Span(tag, place, place + 1) for place, tag in enumerate(tags)}

    return count_by_label([spans(tags) for tags in given], [spans(tags) for tags in wanted])


def count_by_label(given: Sequence[set[Span]], wanted: Sequence[set[Span]]) -> dict[str, Count]:
    """Counts of spans, sentence by sentence, by label."""
    counters = right, found, needed = Counter[str](), Counter[str](), Counter[str]()
    for spans, gold in zip(given, wanted, strict=True):
        for counter, some in zip(counters, (spans & gold, spans, gold), strict=True):
            counter.update(span.label for span in some)
            counter[""] += len(some)
    labels = ["", *sorted({*found, *needed} - {""})]
    return {label: Count(right[label], found[label], needed[label]) for label in labels}
