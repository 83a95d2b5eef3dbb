"""The form of what was looked at (docs/maps.md): tokens, maps, and how they are packed into JSON and into a page."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.positions import alibi
from regard.attention.scores import dot
from regard.nn.attention import Additive, Attention, Axes
from regard.tasks.axes import Piece

LARGEST = 48
"""Rows and columns of a map that is only to be recognised, not read."""
STUDIO = Path(__file__).parent.parent / "server" / "studio"


def show_piece(piece: Piece) -> str:
    """A token's own name: its letters, or a dot for white space and for what is not a letter by itself."""
    return piece.text.strip() or "·"


def find_word(text: str, piece: Piece) -> int | None:
    """The number of the word, parted by white space, that a token is in; none for a special one."""
    letters = [place for place in range(piece.start, piece.end) if not text[place].isspace()]
    return len(text[: letters[0] + 1].split()) - 1 if letters else None


class Map(NamedTuple):
    """One attention: where each row looked."""

    name: str
    kind: str
    axes: Axes
    layer: int
    weights: Tensor  # (heads, query, key)

    @property
    def rows(self) -> str:
        """Which tokens its rows are."""
        return self.axes.rows

    @property
    def columns(self) -> str:
        """Which tokens its columns are."""
        return self.axes.columns

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

    def tree(self, *, packed: bool, full: bool) -> dict[str, Any]:
        """What docs/maps.md says of a map; `packed` as bytes in base64 instead of numbers, and not `full`, only a small
        picture of it."""
        entry = {
            "name": self.name,
            "kind": self.kind,
            "layer": self.layer,
            "rows": self.rows,
            "columns": self.columns,
            "shape": list(self.weights.shape),
            "entropy": round_all(self.entropy()),
            "distance": None if self.kind != "self" else round_all(self.distance() or []),
        }
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
    rows, columns = weights.shape[1:]
    small = (min(rows, LARGEST), min(columns, LARGEST))
    if whole or small == (rows, columns):
        pooled = None
    else:
        weights, pooled = F.adaptive_max_pool2d(weights, small), list(small)
    bytes_ = (weights * 255).round().clamp(0, 255).to(torch.uint8)
    return {"packed": [base64.b64encode(head.numpy().tobytes()).decode() for head in bytes_], "pooled": pooled}


def pack_vectors(given: Vectors, causal: bool) -> dict[str, Any]:
    """The vectors behind a map, float32 in base64."""

    def coded(tensor: Tensor) -> str:
        return base64.b64encode(tensor.detach().float().contiguous().numpy().tobytes()).decode()

    attention = given.attention
    additive = isinstance(attention.score, Additive)
    slopes = alibi(attention.heads, torch.ones(1, 1))[:, 0, 0].tolist() if attention.positions == "alibi" else None
    return {
        "score": "additive" if additive else "dot" if attention.score is dot else "scaled dot",
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
