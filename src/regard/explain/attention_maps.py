"""The form of what was looked at (docs/maps.md): tokens, maps, and how they are packed into JSON and into a page."""

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.positions import linear_bias
from regard.data.batching import Framed
from regard.data.vocabulary import EOS, SPECIAL, UNK, Vocabulary
from regard.nn.attention import Additive, Attention, dot

LARGEST = 48
"""Rows and columns of a map that is only to be recognised, not read."""
STUDIO = Path(__file__).parent.parent / "server" / "studio"


class Piece(NamedTuple):
    """A token and the characters it came from; a special one came from none."""

    text: str
    start: int
    end: int


def read(source: Framed) -> list[Piece]:
    """A text's tokens; special ones by their names."""
    pairs = zip(source.ids, source.offsets, strict=True)
    return [Piece(SPECIAL[i] if i <= EOS and i != UNK else source.text[a:b], a, b) for i, (a, b) in pairs]


def sentences(source: Framed) -> list[Piece]:
    """A question and the sentences of its context, the latest first, as a reader of whole sentences sees them."""
    ends = [place for place, i in enumerate(source.ids) if i == EOS]
    found = []
    for first, last in itertools.pairwise([-1, *ends]):
        start, end = source.offsets[first + 1 + (first < 0)][0], source.offsets[last][1]
        found.append(Piece(source.text[start:end], start, end))
    return [found[0], *reversed(found[1:])]


def shown(piece: Piece) -> str:
    """A token's own name: its letters, or a dot for white space and for what is not a letter by itself."""
    return piece.text.strip() or "·"


def word_at(text: str, piece: Piece) -> int | None:
    """The number of the word, parted by white space, that a token is in; none for a special one."""
    letters = [place for place in range(piece.start, piece.end) if not text[place].isspace()]
    return len(text[: letters[0] + 1].split()) - 1 if letters else None


def pieces(vocabulary: Vocabulary, ids: list[int], text: str, prompt: Sequence[int] = ()) -> list[Piece]:
    """The characters that each token of an output brought; one that does not complete a character brought none."""
    ends = [0]
    for count in range(1, len(ids) + 1):
        begun = vocabulary.continued(prompt, ids[:count])
        while not text.startswith(begun):
            begun = begun[:-1]
        ends.append(max(ends[-1], len(begun)))
    return [Piece(text[start:end], start, end) for start, end in itertools.pairwise(ends)]


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

    def tree(self, *, packed: bool, full: bool) -> dict[str, Any]:
        """What docs/maps.md says of a map; `packed` as bytes in base64 instead of numbers, and not `full`, only a small
        picture of it."""
        entry = {
            "name": self.name,
            "kind": self.kind,
            "side": self.side,
            "layer": self.layer,
            "rows": self.rows,
            "columns": self.columns,
            "shape": list(self.weights.shape),
            "entropy": rounded(self.entropy()),
            "distance": None if self.kind != "self" else rounded(self.distance() or []),
        }
        if packed:
            return entry | packing(self.weights, full)
        return entry | {"heads": [[rounded(row, 6) for row in head] for head in self.weights.tolist()]}


def described(name: str, weights: Tensor) -> Map:
    """A map with what its module path says of it."""
    parts = name.removeprefix("others.").split(".")  # a classifier's members have the same parts
    layer = int(parts[parts.index("blocks") + 1]) if "blocks" in parts else 0
    kind: Literal["self", "cross"] = "self" if "self" in name else "cross"
    return Map(name, kind, "encoder" if "encoder" in parts else "decoder", layer, weights)


class Calculation(NamedTuple):
    """B8, for one query and one head: every number between the vectors and what came out."""

    query: Tensor  # (size,)
    keys: Tensor  # (key, size)
    values: Tensor  # (key, size)
    scores: Tensor  # (key,) query and key compared
    scaled: Tensor  # (key,) and divided by the root of the size, or what else the model does
    seen: Tensor  # (key,) whether it may look there
    weights: Tensor  # (key,) softmax over what it sees
    context: Tensor  # (size,) the sum of weights times values


class Asked(NamedTuple):
    """What one attention was given."""

    attention: Attention
    queries: Tensor  # (heads, query, size)
    keys: Tensor  # (heads, key, size)
    values: Tensor  # (heads, key, size)
    seen: Tensor  # (query, key) whether it may look there


def times(name: str, uses: int) -> list[str]:
    """The names of one attention's maps: an encoder's block that was used several times has as many."""
    return [name] if uses == 1 or not name.startswith("encoder.") else [f"{name}#{layer}" for layer in range(uses)]


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


def vectored(asked: Asked, causal: bool) -> dict[str, Any]:
    """The vectors behind a map, float32 in base64."""

    def coded(tensor: Tensor) -> str:
        return base64.b64encode(tensor.detach().float().contiguous().numpy().tobytes()).decode()

    attention = asked.attention
    additive = isinstance(attention.score, Additive)
    slopes = linear_bias(attention.heads, torch.ones(1, 1))[:, 0, 0].tolist() if attention.order == "linear" else None
    return {
        "score": "additive" if additive else "dot" if attention.score is dot else "scaled dot",
        "size": asked.queries.shape[-1],
        "slopes": slopes,
        "causal": causal,
        "hidden": (~asked.seen.any(0)).nonzero().flatten().tolist(),
        "vector": coded(attention.score.vector) if isinstance(attention.score, Additive) else None,
        "queries": coded(asked.queries),
        "keys": coded(asked.keys),
        "values": coded(asked.values),
    }


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
