"""What belongs together in a run: fingerprints of its settings, vocabularies and data, written once when it begins.

    manifest.json    {"[train] of config.toml": "..", "tokenizer.json": "..", "the training data": "..", ..}

Weights and states carry the fingerprint of the manifest. Using a run needs its vocabularies as they were, resuming it
everything. Where the data lies may change: [data] is left out, the examples themselves count.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.data.examples import Example, Splits, fingerprint
from regard.errors import RunError

GROUPS = ("text", "model", "train", "decode", "evaluate")
TOKENIZERS = ("tokenizer.json", "tokenizer.target.json")
Fingerprints = dict[str, str]
"""What -> its fingerprint; "" of what is not there."""


def fingerprint_settings(text: str) -> Fingerprints:
    """Of the groups of a config.toml, however it is written."""
    tree = tomllib.loads(text)
    return {f"[{name}] of config.toml": fingerprint(json.dumps(tree.get(name), sort_keys=True)) for name in GROUPS}


def fingerprint_tokenizers(run: Path) -> Fingerprints:
    """Of the vocabularies of a run."""
    files = {name: run / name for name in TOKENIZERS}
    return {name: fingerprint(path.read_text("utf-8")) if path.exists() else "" for name, path in files.items()}


def fingerprint_examples(splits: Splits) -> Fingerprints:
    """Of what is learned, and of what chooses the best weights."""
    parts = {"the training data": splits.train, "the validation data": splits.valid}
    return {
        name: fingerprint("\n".join(f"{example.source}\t{example.target}" for example in examples))
        for name, examples in parts.items()
    }


def hash_sources(examples: Sequence[Example]) -> Tensor:
    """A number for the source of every example (examples,); of a document, which has none, for the document."""
    hashes = [int(fingerprint(str(example.source or example.target)), 16) - 2**63 for example in examples]
    return torch.tensor(hashes, dtype=torch.int64)


def identify(run: Path) -> str:
    """The fingerprint of a run's manifest, by which weights and states know that they are of this run; "" without."""
    path = run / "manifest.json"
    return fingerprint(path.read_text("utf-8", "replace")) if path.exists() else ""


def check_manifest(run: Path, found: Fingerprints) -> None:
    """Refuse what is not as it was when a run began; a run without a manifest says nothing."""
    path = run / "manifest.json"
    if not path.exists():
        return
    try:
        known = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}. Put another copy of it there.") from error
    if wrong := [name for name, mark in found.items() if known.get(name, "") != mark]:
        raise RunError(
            f"{' and '.join(wrong)} {'are' if len(wrong) > 1 else 'is'} not what {run} began with (manifest.json): it "
            "would not be the same run. Put back what it began with, or start another."
        )
