"""Validation and test examples that are cut from the training data."""

from typing import Any

from regard.data.examples import Example, Ledger, fingerprint
from regard.errors import DataError


def cut_sources(settings: Any, splits: dict[str, list[Example]], ledgers: dict[str, Ledger]) -> None:
    """Cut distinct sources off the training examples where a split has no files of its own."""
    for name, count in (("valid", settings.cut_valid), ("test", settings.cut_test)):
        if count and not getattr(settings, name):
            splits["train"], splits[name] = cut(splits["train"], count, name)
            ledgers[name].read = ledgers[name].kept = len(splits[name])
            ledgers["train"].kept -= len(splits[name])
            ledgers["train"].read -= len(splits[name])


def cut_shares(settings: Any, splits: dict[str, list[Example]], ledgers: dict[str, Ledger]) -> None:
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
