"""One example, and a ledger of what became of every one that was read.

Nothing is dropped in silence: the ledger says how many examples were read, kept and dropped, why, and at which lines.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Question(NamedTuple):
    """What question answering reads: a question and the context that holds the answer."""

    question: str
    context: str

    def __str__(self) -> str:
        return f"{self.question}\t{self.context}"

    def strip(self) -> str:
        """As of a text: without white space around it, so that it is false where nothing is asked."""
        return str(self).strip()


class Words(NamedTuple):
    """What a tagger reads: the words of a sentence, and what further columns say of each."""

    words: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return " ".join(self.words)

    def strip(self) -> str:
        """As of a text."""
        return str(self).strip()


class Box(NamedTuple):
    """Where in an image something is that words name, the last of them most: in shares of its width and height."""

    words: str
    left: float
    top: float
    right: float
    bottom: float


class Image(NamedTuple):
    """What a model of images reads: the name of an image, and where its file is."""

    name: str
    place: str = ""  # the folder or zip archive that it is in; "": its name is the path of a file
    data: bytes = b""  # the bytes of its file, where they are at hand
    boxes: tuple[Box, ...] = ()  # what is known to be where

    def __str__(self) -> str:
        return self.name

    def strip(self) -> str:
        """As of a text: false where neither a name nor bytes came."""
        return self.name.strip() or ("image" if self.data else "")


Source = str | Question | Words | Image
"""What a model is asked with."""


class Example(NamedTuple):
    """A source, its target, and where they came from (`file:line`)."""

    source: Source
    target: str
    where: str
    start: int | None = None  # of an answer that is a span: its place in the context


class Dropped(NamedTuple):
    """Something that was read and is no example."""

    reason: str
    where: str


@dataclass
class Ledger:
    """What became of every example."""

    read: int = 0
    kept: int = 0
    cut: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)  # reason -> where

    def drop(self, reason: str, where: str) -> None:
        """Count something that was never kept."""
        self.dropped.setdefault(reason, []).append(where)

    def discard(self, reason: str, where: str) -> None:
        """Count something that had been kept until now."""
        self.drop(reason, where)
        self.kept -= 1

    def lines(self, shown: int = 5) -> list[str]:
        """The ledger for people."""
        count = sum(map(len, self.dropped.values()))
        total = f"read {self.read:,}, kept {self.kept:,}, dropped {count:,}"
        out = [total + (f", cut to length {self.cut:,}" if self.cut else "")]
        for reason, places in self.dropped.items():
            more = f" and {len(places) - shown:,} more" if len(places) > shown else ""
            out.append(f"  {reason}: {len(places):,} ({', '.join(places[:shown])}{more})")
        return out

    def tree(self) -> dict[str, Any]:
        """The ledger for machines."""
        return {"read": self.read, "kept": self.kept, "cut": self.cut, "dropped": self.dropped}


class Splits(NamedTuple):
    """The examples of a run and what was left out; a split that has none is empty."""

    train: list[Example]
    valid: list[Example]
    test: list[Example]
    ledgers: dict[str, Ledger]


def fingerprint(text: str) -> str:
    """A hash of a text that no process salts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
