"""Validation and test examples that are cut from the training data."""

from typing import Any

from regard.data.examples import Example, Splits, fingerprint
from regard.errors import DataError


def cut_sources(settings: Any, splits: Splits) -> None:
    """Cut distinct sources off the training examples where a split has no files of its own."""
    for name, count in (("valid", settings.cut_valid), ("test", settings.cut_test)):
        if count and not getattr(settings, name):
            splits.train[:], getattr(splits, name)[:] = cut(splits.train, count, name)


def cut_shares(settings: Any, splits: Splits) -> None:
    """Cut the end off the training text for validation and test, by their shares of its characters."""
    total = sum(len(example.target) for example in splits.train)
    for name in ("test", "valid"):
        if getattr(settings, name):
            continue
        wanted = int(total * getattr(settings, f"{name}_share"))
        while wanted and splits.train:
            last = splits.train.pop()
            taken = last.target[-wanted:]
            getattr(splits, name).append(last._replace(target=taken))
            if left := last.target[: len(last.target) - len(taken)]:
                splits.train.append(last._replace(target=left))
            wanted -= len(taken)
        getattr(splits, name).reverse()


def cut(examples: list[Example], count: int, name: str) -> tuple[list[Example], list[Example]]:
    """Cut all examples of `count` distinct sources off, chosen by the hash of their text: the same ones on every
    machine, whatever the order of the file. Returns (the rest, the cut)."""
    sources = {example.source for example in examples}
    if len(sources) <= count:
        raise DataError(
            f"data.cut_{name} = {count:,} is too much: the training data has {len(sources):,} different sources in all."
            f" Lower it, or give files of their own in data.{name}."
        )
    chosen = set(sorted(sources, key=lambda text: fingerprint(f"{name}\t{text}"))[:count])
    rest = [example for example in examples if example.source not in chosen]
    return rest, [example for example in examples if example.source in chosen]
