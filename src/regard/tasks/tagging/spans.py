"""Tags that mark spans (BIO, BIOES): which may follow which, the spans of a sequence, and F1 as CoNLL's script counts."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

BEGIN, END = "BS", "ES"
"""First letters of tags that begin, or end, a span whatever stands beside them."""


class Span(NamedTuple):
    """Words from one to before another, and what they are."""

    label: str
    first: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """`B-NP` as (B, NP); a tag without a hyphen marks nothing but itself."""
    prefix, hyphen, label = tag.partition("-")
    return (prefix, label) if hyphen else (tag[:1], tag[1:] if tag[:1] in "BIESO" else "")


def follows(before: str | None, tag: str | None) -> bool:
    """Whether a tag may follow another in BIO or BIOES; None is the edge of a sentence."""
    left, label = split_tag(before) if before else ("O", "")
    right, other = split_tag(tag) if tag else ("O", "")
    open_left = left in "BI" and bool(before)
    if right in "IE" and tag:
        return open_left and label == other
    return True


def is_closed(tags: Sequence[str]) -> bool:
    """Whether the tags are BIOES, in which a span must be ended."""
    return any(split_tag(tag)[0] in ("E", "S") for tag in tags if "-" in tag)


def may_follow(before: str | None, tag: str | None, closed: bool) -> bool:
    """As `follows`; in BIOES (`closed`), what was begun must go on until it is ended."""
    if not follows(before, tag):
        return False
    left, label = split_tag(before) if before else ("O", "")
    right, other = split_tag(tag) if tag else ("O", "")
    unfinished = closed and before is not None and "-" in before and left in "BI"
    return not unfinished or (tag is not None and right in "IE" and label == other)


def read_spans(tags: Sequence[str]) -> list[Span]:
    """The spans of a sequence, by the rules of CoNLL's script: what continues nothing begins a span."""
    spans: list[Span] = []
    first, label = -1, ""
    before = ("O", "")
    for place, tag in enumerate([*tags, "O"]):
        prefix, kind = now = split_tag(tag)
        changes = before[1] != kind
        ends = before[0] != "O" and (before[0] in END or prefix in ("B", "S", "O") or changes)
        if ends and first >= 0:
            spans.append(Span(label, first, place))
            first = -1
        if prefix != "O" and (prefix in BEGIN or before[0] in ("E", "S", "O") or changes or first < 0):
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
    """Of taggings and the right ones, the counts by label; "" stands for all."""
    right, found, right_ones = Counter[str](), Counter[str](), Counter[str]()
    for one, other in zip(given, wanted, strict=True):
        spans, gold = set(read_spans(one)), set(read_spans(other))
        for counter, some in ((right, spans & gold), (found, spans), (right_ones, gold)):
            counter.update(span.label for span in some)
            counter[""] += len(some)
    labels = ["", *sorted({*found, *right_ones} - {""})]
    return {label: Count(right[label], found[label], right_ones[label]) for label in labels}
