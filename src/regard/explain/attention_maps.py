"""The form of what was looked at (docs/maps.md): tokens, maps, and how they are packed into JSON and into a page."""

import base64
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.positions import alibi
from regard.nn.attention import Additive, Attention, looks_at_itself

LARGEST = 48
"""Rows and columns of a map that is only to be recognised, not read."""
STUDIO = Path(__file__).parent.parent / "server" / "studio"


class Map(NamedTuple):
    """One attention: where each row looked."""

    name: str
    kind: str
    layer: int
    rows: str  # which tokens they are
    columns: str
    weights: Tensor  # (heads, query, key)

    def entropy(self) -> list[float]:
        """How widely each head looks, in bits: the mean over its rows."""
        bits: list[float] = (torch.special.entr(self.weights).sum(-1).mean(-1) / math.log(2)).tolist()
        return bits

    def is_self(self) -> bool:
        """Whether a text looks at itself."""
        return looks_at_itself(self.kind, (self.rows, self.columns))

    def distance(self) -> list[float] | None:
        """How far each head looks, in tokens: the mean over its rows; of self-attention only."""
        if not self.is_self():
            return None
        rows, columns = map(torch.arange, self.weights.shape[-2:])
        tokens: list[float] = (self.weights * (columns - rows[:, None]).abs()).sum(-1).mean(-1).tolist()
        return tokens

    def tree(self, *, packed: bool, full: bool) -> dict[str, Any]:
        """What docs/maps.md says of a map; `packed` as bytes in base64 instead of numbers, and not `full`, only a small
        picture of it."""
        entry, distance = self._asdict(), self.distance()
        del entry["weights"]
        entry |= {"shape": list(self.weights.shape), "entropy": round_all(self.entropy())}
        entry["distance"] = None if distance is None else round_all(distance)
        if packed:
            return entry | pack_weights(self.weights, full)
        return entry | {"heads": [[round_all(row, 6) for row in head] for head in self.weights.tolist()]}


class Calculation(NamedTuple):
    """For one query and one head, every number between the vectors and what came out."""

    query: Tensor  # (size,)
    keys: Tensor  # (key, size)
    values: Tensor  # (key, size)
    scores: Tensor  # (key,) query and key compared
    scaled: Tensor  # (key,) and divided by the root of the size, or what else the model does
    seen: Tensor  # (key,) whether it may look there
    weights: Tensor  # (key,) softmax over what it sees
    context: Tensor  # (size,) the sum of weights times values


class Vectors(NamedTuple):
    """The vectors that one attention was given."""

    attention: Attention
    queries: Tensor  # (heads, query, size)
    keys: Tensor  # (heads, key, size)
    values: Tensor  # (heads, key, size)
    seen: Tensor  # (query, key) whether it may look there


def round_all(values: Iterable[float], digits: int = 4) -> list[float]:
    """Numbers with as many digits as anybody reads."""
    return [round(value, digits) for value in values]


def pack_weights(weights: Tensor, whole: bool) -> dict[str, Any]:
    """Weights (heads, query, key) as a byte each; one that is not wanted whole is pooled to a small picture."""
    small = [min(side, LARGEST) for side in weights.shape[1:]]
    pooled = None if whole or small == list(weights.shape[1:]) else small
    if pooled:
        weights = F.adaptive_max_pool2d(weights, pooled)
    bytes_ = (weights * 255).round().clamp(0, 255).to(torch.uint8)
    return {"packed": [base64.b64encode(head.numpy().tobytes()).decode() for head in bytes_], "pooled": pooled}


def name_function(function: Any) -> str:
    """A score's or normalizer's own name, in words: of a partial, the function's and its numbers; of a lambda, that of
    the function that made it; of an object, its class's."""
    if isinstance(function, functools.partial):
        given = [("", value) for value in function.args]
        given += [(f"{name}=", value) for name, value in function.keywords.items()]
        shown = (f"{name}{value if isinstance(value, int | float | str) else '..'}" for name, value in given)
        return " ".join([name_function(function.func), *shown])
    name = getattr(function, "__qualname__", type(function).__name__).removesuffix(".<locals>.<lambda>")
    return name.rpartition(".")[2].strip("<>").replace("_", " ").lower()


def pack_vectors(given: Vectors, causal: bool) -> dict[str, Any]:
    """The vectors behind a map, float32 in base64."""

    def coded(tensor: Tensor) -> str:
        return base64.b64encode(tensor.detach().float().contiguous().numpy().tobytes()).decode()

    attention = given.attention
    slopes = alibi(attention.heads, torch.ones(1, 1))[:, 0, 0].tolist() if attention.positions == "alibi" else None
    return {
        "score": name_function(attention.score),
        "normalizer": name_function(attention.normalize),
        "size": given.queries.shape[-1],
        "slopes": slopes,
        "causal": causal,
        "hidden": (~given.seen.any(0)).nonzero().flatten().tolist(),
        "vector": coded(attention.score.vector) if isinstance(attention.score, Additive) else None,
        "queries": coded(given.queries),
        "keys": coded(given.keys),
        "values": coded(given.values),
    }


def make_page(tree: dict[str, Any]) -> str:
    """One HTML file around a packed tree: no request leaves it, and no text in it can end a script."""
    data = json.dumps(tree, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    style, script = ((STUDIO / name).read_text(encoding="utf-8") for name in ("style.css", "view.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f'<title>regard</title>\n<style>\n{style}</style>\n<main id="view"></main>\n'
        f'<script type="application/json" id="tree">{data}</script>\n<script>\n{script}</script>\n</html>\n'
    )
