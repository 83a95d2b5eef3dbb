"""The examples of a run, split by split, from files or from a generator; and plain text."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard.config.data import FileData, GeneratedData
from regard.data.examples import Dropped, Example, Ledger, Splits
from regard.data.files import read_lines
from regard.data.formats import FORMATS
from regard.data.synthetic import GENERATORS
from regard.errors import DataError

SPLITS = ("train", "valid", "test")
Accept = Callable[[Example], Example | Dropped]
"""What a task makes of an example: the same, in its own form, or why it cannot be used."""


def read_splits(data: FileData | GeneratedData, seed: int, accept: Accept, only: str | None = None) -> Splits:
    """The examples of `[data]`; where `only` one split is wanted that has files of its own, no others are read."""
    return generate(data, seed, accept) if isinstance(data, GeneratedData) else read_files(data, accept, only)


def read_files(data: Any, accept: Accept, only: str | None) -> Splits:
    """Read the files of all splits; validation and test are cut from training where they are missing."""
    if only in ("valid", "test") and getattr(data, only):
        others = {name: () for name in SPLITS if name != only}
        data = data.model_copy(update={**others, "cut_valid": 0, "cut_test": 0})
    form, files = FORMATS[data.kind], {name: getattr(data, name) for name in SPLITS}
    if not any(files.values()):
        raise DataError(
            "this run has no data, as one that was imported: give files, as with --set 'data.test=[\"my.txt\"]'."
        )
    splits = keep_all({name: form.read(data, paths) if paths else () for name, paths in files.items()}, accept)
    kept, ledgers = len(splits.train), splits.ledgers
    form.cut(data, splits)
    ledgers["train"].kept -= kept - len(splits.train)  # a text that was cut in two is in both
    ledgers["train"].read -= kept - len(splits.train)
    if most := getattr(data, "join_bytes", 0):
        for split in (splits.train, splits.valid, splits.test):
            split[:] = join_sources(split, most)
    for name in ("valid", "test"):
        if not files[name]:
            ledgers[name].read = ledgers[name].kept = len(getattr(splits, name))
    return splits


def join_sources(examples: Iterable[Example], most: int) -> list[Example]:
    """Examples of one target as one, whose source has theirs on its lines, of at most so many bytes if there are
    several; it has the place of the first, and every target its own."""
    open_ones: dict[str, list[Example]] = {}
    sizes: dict[str, int] = {}
    done: list[list[Example]] = []
    for example in examples:
        parts, size = open_ones.setdefault(example.target, []), len(str(example.source).encode("utf-8")) + 1
        if parts and sizes[example.target] + size > most + 1:  # the last line needs no break
            done.append(parts[:])
            parts.clear()
        sizes[example.target] = size + (sizes[example.target] if parts else 0)
        parts.append(example)
    done += open_ones.values()
    return [parts[0]._replace(source="\n".join(str(part.source) for part in parts)) for parts in done]


def generate(data: Any, seed: int, accept: Accept) -> Splits:
    """Generate all splits, and name every example's place: its split, or the part of it that is scored apart."""
    made = zip(SPLITS, GENERATORS[data.kind](data, seed), strict=True)
    found = {}
    for name, pairs in made:
        named = enumerate(((*pair, name) for pair in pairs), 1)
        found[name] = [Example(source, target, f"{part}:{number}") for number, (source, target, part, *_) in named]
    return keep_all(found, accept)


def keep_all(found: Mapping[str, Iterable[Example | Dropped]], accept: Accept) -> Splits:
    """What a task accepts of every split; training data of which nothing is left is refused."""
    ledgers = {name: Ledger() for name in SPLITS}
    train, valid, test = (list(keep(found[name], ledgers[name], accept)) for name in SPLITS)
    if found["train"] and not train:
        raise DataError(f"the training data holds no example. {'; '.join(ledgers['train'].lines())}")
    return Splits(train, valid, test, ledgers)


def keep(examples: Iterable[Example | Dropped], ledger: Ledger, accept: Accept) -> Iterable[Example]:
    """Pass on what a task accepts; everything else goes into the ledger."""
    for example in examples:
        ledger.read += 1
        accepted = accept(example) if isinstance(example, Example) else example
        if isinstance(accepted, Dropped):
            ledger.drop(*accepted)
        else:
            ledger.kept += 1
            yield accepted


def read_raw(paths: Iterable[str], obtain: str, ledger: Ledger) -> list[str]:
    """The lines of plain text files; blank ones say nothing, and what is not UTF-8 is dropped."""
    found = []
    for path in paths:
        for number, line in enumerate(read_lines(path, obtain), 1):
            if line is None:
                ledger.drop("undecodable", f"{path}:{number}")
            elif line.strip():
                found.append(line)
    ledger.kept = len(found)
    ledger.read = ledger.kept + sum(map(len, ledger.dropped.values()))
    return found
