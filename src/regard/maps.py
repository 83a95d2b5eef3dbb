"""The form of what was looked at (docs/maps.md): tokens, maps, and how they are packed into JSON and into a page."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 48
"""Rows and columns of a map that is only to be recognised, not read."""
STUDIO = Path(__file__).parent / "studio"


class Piece(NamedTuple):
    """A token and the characters it came from; a special one came from none."""

    text: str
    start: int
    end: int


class Map(NamedTuple):
    """One attention: where each row looked."""

    name: str
    kind: Literal["self", "cross"]
    side: Literal["encoder", "decoder"]
    layer: int
    weights: Tensor  # (heads, query, key)

    @property
    def rows(self) -> str:
        """Which tokens its rows are."""
        return "key" if self.side == "encoder" else "query"

    @property
    def columns(self) -> str:
        """Which tokens its columns are."""
        return "key" if self.side == "encoder" or self.kind == "cross" else "input"

    def entropy(self) -> list[float]:
        """How widely each head looks, in bits: the mean over its rows."""
        bits = torch.special.entr(self.weights).sum(-1).mean(-1) / torch.log(torch.tensor(2.0))
        return [float(value) for value in bits]

    def distance(self) -> list[float] | None:
        """How far each head looks, in tokens: the mean over its rows; of self-attention only."""
        if self.kind != "self":
            return None
        places = torch.arange(self.weights.shape[-1])
        far = (places - torch.arange(self.weights.shape[-2])[:, None]).abs()
        return [float(value) for value in (self.weights * far).sum(-1).mean(-1)]


def described(name: str, weights: Tensor) -> Map:
    """A map with what its module path says of it."""
    parts = name.split(".")
    layer = next((int(part) for part in parts if part.isdigit()), 0)
    kind: Literal["self", "cross"] = "self" if "self" in name else "cross"
    return Map(name, kind, "encoder" if parts[0] == "encoder" else "decoder", layer, weights)


def rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    """Numbers with as many digits as anybody reads."""
    return [round(value, digits) for value in values]


def packing(weights: Tensor, whole: bool) -> dict[str, Any]:
    """Weights (heads, query, key) as a byte each; one that is not wanted whole is pooled to a small picture."""
    rows, columns = weights.shape[1:]
    small = (min(rows, LARGEST), min(columns, LARGEST))
    if whole or small == (rows, columns):
        pooled = None
    else:
        weights, pooled = F.adaptive_max_pool2d(weights, small), list(small)
    bytes_ = (weights * 255).round().clamp(0, 255).to(torch.uint8)
    return {"packed": [base64.b64encode(head.numpy().tobytes()).decode() for head in bytes_], "pooled": pooled}


def page(tree: dict[str, Any]) -> str:
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
