"""What a task gives: answers with what only its own have, how they are measured, and what its models are to others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Table = list[dict[str, Any]]
"""Rows of an evaluation beside its metrics: column -> value."""


class Token(NamedTuple):
    """One token of an answer and its log-probability, if that was asked for; the last of a written text is <eos>."""

    text: str
    logprob: float | None
    id: int


class Answer(NamedTuple):
    """One answer to a source."""

    text: str
    score: float  # what answers are ranked by: the log-probability, of a written text over the length penalty
    tokens: Sequence[Token] = ()  # of a text that was written; or the labels
    details: Mapping[str, Any] = {}  # what only this task's answers have, as JSON: a probability, a span, ...
    flags: Sequence[str] = ()  # what is suspicious about it, in words

    def tree(self) -> dict[str, Any]:
        """For machines."""
        tokens = [token._asdict() for token in self.tokens]
        return {"text": self.text, "score": self.score, "tokens": tokens, **self.details}


class Metric(NamedTuple):
    """A metric of a task's own: answers and their references -> a figure."""

    name: str
    compute: Callable[[Sequence[Answer], Sequence[Sequence[str]]], float]
    smaller_is_better: bool = False


class Bounds(NamedTuple):
    """Between what lengths a written answer is not suspicious, in tokens."""

    least: float
    most: int


class Architecture(NamedTuple):
    """A Transformer as other libraries know it: an encoder, a decoder, or both."""

    encoder: bool
    decoder: bool
