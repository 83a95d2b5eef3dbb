"""The examples of a run, split by split, from files or from a generator; and plain text."""

from collections.abc import Callable, Iterable
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
    return READERS[data.kind](data, seed, accept, only)  # type: ignore[union-attr]


def read_files(data: Any, seed: int, accept: Accept, only: str | None) -> Splits:
    """Read the files of all splits; validation and test are cut from training where they are missing."""
    if only in ("valid", "test") and getattr(data, only):
        others = {name: () for name in SPLITS if name != only}
        data = data.model_copy(update={**others, "cut_valid": 0, "cut_test": 0})
    form = FORMATS[data.kind]
    ledgers = {name: Ledger() for name in SPLITS}
    splits = {
        name: list(keep(form.read(data, files), ledgers[name], accept)) if (files := getattr(data, name)) else []
        for name in SPLITS
    }
    if not any(getattr(data, name) for name in splits):
        raise DataError(
            "this run has no data, as one that was imported: give files, as with --set 'data.test=[\"my.txt\"]'."
        )
    if data.train:
        require_training(splits["train"], ledgers["train"])
    form.cut(data, splits, ledgers)
    return Splits(splits["train"], splits["valid"], splits["test"], ledgers)


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


def require_training(examples: list[Example], ledger: Ledger) -> None:
    """Refuse training data of which nothing is left."""
    if not examples:
        raise DataError(f"the training data holds no example. {'; '.join(ledger.lines())}")


def generate(data: Any, seed: int, accept: Accept, only: str | None) -> Splits:
    """Generate all splits."""
    made, ledgers = GENERATORS[data.kind](data, seed), {name: Ledger() for name in SPLITS}
    train, valid, test = (list(keep(getattr(made, name), ledgers[name], accept)) for name in SPLITS)
    require_training(train, ledgers["train"])
    return Splits(train, valid, test, ledgers)


READERS: dict[str, Callable[[Any, int, Accept, str | None], Splits]] = {
    **dict.fromkeys(FORMATS, read_files),
    **dict.fromkeys(GENERATORS, generate),
}
"""By `data.kind`."""


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
