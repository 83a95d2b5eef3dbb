"""Examples, with a ledger of what became of every line.

Nothing is dropped in silence: the ledger says how many examples were read, kept and dropped, why, and at which lines.
Blank lines at the end are no examples; a blank side anywhere else is dropped as `empty` (but a text may have no label
where it may have several); a line that is not UTF-8 is dropped as `undecodable`, one whose JSON spells half a
character (a lone surrogate) as `not valid Unicode`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.config.data import DocumentData, FileData, GeneratedData
from regard.data.files import Example, lines, pairs
from regard.data.vocabulary import clean
from regard.errors import DataError


@dataclass
class Ledger:
    """What became of every example."""

    read: int = 0
    kept: int = 0
    cut: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> where."""

    def drop(self, reason: str, where: str) -> None:
        self.dropped.setdefault(reason, []).append(where)

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


def remedy(settings: FileData | GeneratedData, name: str) -> str:
    """The settings that give a split its examples."""
    return f"data.{name} or data.{f'{name}_share' if isinstance(settings, DocumentData) else f'cut_{name}'}"


def read_files(settings: FileData, unlabelled: bool = False) -> Splits:
    """Read the files of all splits; cut validation and test from training where they are missing. An empty target is
    dropped, unless examples may be `unlabelled`."""
    splits: dict[str, list[Example]] = {}
    ledgers: dict[str, Ledger] = {}
    alone = isinstance(settings, DocumentData)
    for name in ("train", "valid", "test"):
        ledgers[name] = Ledger()
        files = getattr(settings, name)
        splits[name] = list(kept(pairs(settings, files), ledgers[name], alone, unlabelled)) if files else []
    if not any(getattr(settings, name) for name in splits):
        raise DataError(
            "this run has no data, as one that was imported: give files, as with --set 'data.test=[\"my.txt\"]'."
        )
    if settings.train and not splits["train"]:  # type: ignore[attr-defined]
        raise DataError(f"the training data holds no example. {'; '.join(ledgers['train'].lines())}")
    if isinstance(settings, DocumentData):
        shared(settings, splits, ledgers)
    for name, count in (("valid", settings.cut_valid), ("test", settings.cut_test)):
        if count and not getattr(settings, name):
            splits["train"], splits[name] = cut(splits["train"], count, name)
            ledgers[name].read = ledgers[name].kept = len(splits[name])
            ledgers["train"].kept -= len(splits[name])
            ledgers["train"].read -= len(splits[name])
    return Splits(splits["train"], splits["valid"], splits["test"], ledgers)


def read_raw(paths: Iterable[str], obtain: str, ledger: Ledger) -> list[str]:
    """The lines of plain text files; blank ones say nothing, and what is not UTF-8 is dropped."""
    found = []
    for path in paths:
        for number, line in enumerate(lines(path, obtain), 1):
            if line is None:
                ledger.drop("undecodable", f"{path}:{number}")
            elif line.strip():
                found.append(line)
    ledger.kept = len(found)
    ledger.read = ledger.kept + sum(map(len, ledger.dropped.values()))
    return found


def shared(settings: DocumentData, splits: dict[str, list[Example]], ledgers: dict[str, Ledger]) -> None:
    """Cut the end off the training text for validation and test, by their shares of its characters."""
    shares = [(name, getattr(settings, f"{name}_share")) for name in ("test", "valid")]
    total, documents = sum(len(example.target) for example in splits["train"]), len(splits["train"])
    for name, share in shares:
        wanted = 0 if getattr(settings, name) else int(total * share)
        taken_off: list[Example] = []
        while wanted and splits["train"]:
            last = splits["train"].pop()
            taken = last.target[-wanted:]
            taken_off.append(last._replace(target=taken))
            if left := last.target[: len(last.target) - len(taken)]:
                splits["train"].append(last._replace(target=left))
            wanted -= len(taken)
        splits[name] += reversed(taken_off)
        if splits[name] and not getattr(settings, name):
            ledgers[name].read = ledgers[name].kept = len(splits[name])
    ledgers["train"].kept -= documents - len(splits["train"])  # one that was cut in two is in both
    ledgers["train"].read -= documents - len(splits["train"])


def cut(examples: list[Example], count: int, name: str) -> tuple[list[Example], list[Example]]:
    """Cut all examples of `count` distinct sources off, chosen by the hash of their text: the same ones on every
    machine, whatever the order of the file. Returns (the rest, the cut)."""
    sources = {example.source for example in examples}
    if len(sources) <= count:
        raise DataError(f"cannot cut {count:,} sources for {name}: the training data has {len(sources):,} in all.")
    chosen = set(sorted(sources, key=lambda text: fingerprint(f"{name}\t{text}"))[:count])
    rest = [example for example in examples if example.source not in chosen]
    return rest, [example for example in examples if example.source in chosen]


def fingerprint(text: str) -> str:
    """A hash of a text that no process salts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def kept(
    examples: Iterable[Example | tuple[str, str]], ledger: Ledger, alone: bool = False, unlabelled: bool = False
) -> Iterator[Example]:
    """Pass on what is whole; what is not comes as (reason, where) or has an empty side, and goes into the ledger. A
    target that stands `alone`, a document, has no source; a text that may be `unlabelled` needs no target."""
    for example in examples:
        ledger.read += 1
        if not isinstance(example, Example):
            ledger.drop(*example)
        elif not (unlabelled or example.target.strip()) or not (alone or example.source.strip()):
            ledger.drop("empty", example.where)
        elif any(clean(side) != side for side in (example.source, example.target)):  # JSON can spell lone surrogates
            ledger.drop("not valid Unicode", example.where)
        else:
            ledger.kept += 1
            yield example if example.target.strip() else example._replace(target="")
