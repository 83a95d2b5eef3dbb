"""The form of what was looked at (docs/maps.md): tokens, maps, and how they are packed into JSON and into a page.

A map is made strip by strip, and a file holds as much of it as there is room for: all weights; or the largest of each
row, and what is left out; or a picture of tiles alone.
"""

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.attention.positions import alibi
from regard.explain.strips import (
    TILES,
    TOP,
    Blocks,
    Strip,
    Summary,
    encode,
    pool_tiles,
    round_all,
    summarize,
    tile_size,
)
from regard.nn.attention import Additive, Attention, looks_at_itself

STUDIO = Path(__file__).parent.parent / "server" / "studio"
DENSE = 2**22
"""Weights of a map that is one tensor at most; of a longer one, there are only strips."""
LARGEST = 48
"""Rows and columns of a picture that is only to be recognised."""


class Form(NamedTuple):
    """How much of a map is given."""

    kind: Literal["whole", "top", "picture"]
    most: int = 0  # of the weights of each row


WHOLE, PICTURE = Form("whole"), Form("picture")
TOPS = [Form("top", count) for count in (TOP, 16, 8, 4)]
"""As many of the largest as there is room for."""


@dataclass(frozen=True)
class Map:
    """One attention: where each row looked, made when it is asked for, strip by strip."""

    name: str
    kind: str
    layer: int
    rows: str  # which tokens they are
    columns: str
    whole: tuple[int, int, int]  # all heads, rows, columns
    make: Callable[[slice], Iterable[Strip]]  # the strips of some heads
    blocks: Blocks | None = None  # which weights are seen, if not all
    sparse: bool = False  # whether strips hold the blocks that are seen and nothing else
    heads: slice = field(default_factory=lambda: slice(None))  # of which it is

    @classmethod
    def of(cls, name: str, kind: str, layer: int, rows: str, columns: str, weights: Tensor) -> "Map":
        """A map whose weights (heads, query, key) are there."""
        heads, high, wide = weights.shape
        return cls(name, kind, layer, rows, columns, (heads, high, wide), lambda heads: [Strip(weights[heads])])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and columns."""
        heads, rows, columns = self.whole
        return len(range(heads)[self.heads]), rows, columns

    @property
    def is_long(self) -> bool:
        """Whether it has more weights than are kept in one tensor."""
        return math.prod(self.shape) > DENSE

    @property
    def gathered(self) -> bool:
        """Whether it is given as blocks, not as all rows and columns."""
        return self.sparse and self.is_long

    @cached_property
    def weights(self) -> Tensor:
        """All weights as one tensor (heads, rows, columns), whatever room that takes."""
        with torch.inference_mode():
            return torch.cat([strip.dense(self.shape[2]) for strip in self.make(self.heads)], 1)

    def strips(self) -> Iterable[Strip]:
        """The weights: of a long map made anew."""
        return self.make(self.heads) if self.is_long else [Strip(self.weights)]

    @cached_property
    def summary(self) -> Summary:
        """All that can be said of it in one pass."""
        with torch.inference_mode():
            return summarize(self.strips(), self.shape)

    def is_self(self) -> bool:
        """Whether a text looks at itself."""
        return looks_at_itself(self.kind, (self.rows, self.columns))

    def entropy(self) -> list[float]:
        """How widely each head looks, in bits: the mean over its rows."""
        return self.summary.entropy

    def distance(self) -> list[float] | None:
        """How far each head looks, in tokens: the mean over its rows; of self-attention only."""
        return self.summary.distance if self.is_self() else None

    def align(self) -> list[int]:
        """The column that each row looks at most, in the mean of all heads."""
        found: list[int] = []
        with torch.inference_mode():
            for weights, places in self.strips():
                best = weights.mean(0).argmax(-1, keepdim=True)
                found += (best if places is None else places.gather(-1, best))[:, 0].tolist()
        return found

    def tile(self, most: int) -> list[int]:
        """How many rows and columns a tile has, of which there are at most `most` on a side."""
        fine = [tile_size(side, TILES) for side in self.shape[1:]]
        times = [tile_size(-(-side // one), most) for side, one in zip(self.shape[1:], fine, strict=True)]
        return [min(one * more, side) for one, more, side in zip(fine, times, self.shape[1:], strict=True)]

    def tiles(self, most: int) -> Tensor:
        """The largest weights of tiles: (heads, tiles, tiles)."""
        return pool_tiles(self.summary.picture, most)

    @property
    def drawn_tile(self) -> list[int]:
        """The tile that a cell of a drawing stands for: one weight, unless it is long."""
        return self.tile(LARGEST) if self.is_long else [1, 1]

    def drawing(self) -> Tensor:
        """What is drawn of it (heads, rows, columns): the weights, or of a long map its tiles."""
        return self.tiles(LARGEST) if self.is_long else self.weights

    def count(self) -> int:
        """How many weights it has; of blocks, those that are seen."""
        return self.shape[0] * self.blocks.count() if self.blocks and self.gathered else math.prod(self.shape)

    def forms(self) -> Iterator[Form]:
        """How it can be given, from all of it to the least."""
        yield WHOLE
        yield from (form for form in TOPS if form.most < self.shape[2])
        yield PICTURE

    def measure(self, form: Form, packed: bool) -> int:
        """How many bytes of base64 a form of it takes, or how many numbers."""
        heads, rows, columns = self.shape
        size = self.count() if form.kind == "whole" else 0
        if form.kind == "top":
            place, weight = (2 if columns <= 2**16 else 4, 2) if packed else (1, 1)
            size = heads * rows * (form.most * (place + weight) + weight)
        if form.kind != "whole" or self.gathered:
            tile = self.tile(TILES if form.kind == "top" else LARGEST)
            size += heads * math.prod(-(-side // one) for side, one in zip(self.shape[1:], tile, strict=True))
        return size * 4 // 3 if packed else size

    def describe(self) -> dict[str, Any]:
        """What docs/maps.md says of a map, without weights."""
        names = ("name", "kind", "layer", "rows", "columns")
        entry = {name: getattr(self, name) for name in names} | {"shape": list(self.shape)}
        distance = self.distance()
        entry["entropy"] = round_all(self.entropy())
        entry["distance"] = None if distance is None else round_all(distance)
        return entry if self.blocks is None else entry | {"blocks": self.blocks.tree()}

    def tree(self, *, packed: bool, form: Form = WHOLE) -> dict[str, Any]:
        """What docs/maps.md says of a map; `packed` in base64 instead of numbers."""
        entry, scale = self.describe(), self.summary.picture.amax((1, 2)).clamp(min=1e-6)
        if packed:
            entry["scale"] = [float(f"{top:.6g}") for top in scale.tolist()]
            scale = torch.tensor(entry["scale"])
        if form.kind == "whole" and not self.gathered:
            return entry | self.write_all(scale, packed) | {"pooled": None}
        if form.kind == "whole":
            entry["blocks"]["weights"] = next(iter(self.write_all(scale, packed).values()))
        if form.kind == "top":
            entry["top"] = self.write_top(form.most, scale, packed)
        return entry | self.write_picture(TILES if form.kind == "top" else LARGEST, scale, packed)

    def write_picture(self, most: int, scale: Tensor, packed: bool) -> dict[str, Any]:
        """The largest weights of tiles, and the size of a tile."""
        pixels = self.tiles(most)
        return write_weights(pixels, scale, packed) | {"pooled": list(pixels.shape[1:]), "tile": self.tile(most)}

    def write_top(self, count: int, scale: Tensor, packed: bool) -> dict[str, Any]:
        """The largest weights of each row, their columns, and which share of the row is left out."""
        columns, weights = self.summary.columns[..., :count], self.summary.weights[..., :count]
        left = (1 - weights.sum(-1) / self.summary.sums.clamp(min=1e-30)).clamp(0, 1)
        top: dict[str, Any] = {"count": weights.shape[-1]}
        if not packed:
            numbers = [[round_all(row, 8) for row in head] for head in weights.tolist()]
            return top | {"columns": columns.tolist(), "weights": numbers, "left": list(map(round_all, left.tolist()))}
        shares = (weights / scale[:, None, None] * 65535).round().clamp(0, 65535)
        top["columns"] = [encode(head, "<u2" if self.shape[2] <= 2**16 else "<u4") for head in columns]
        top["weights"] = [encode(head, "<u2") for head in shares]
        return top | {"left": [encode(head, "<u2") for head in (left * 65535).round()]}

    def write_all(self, scale: Tensor, packed: bool) -> dict[str, Any]:
        """Every row, of blocks the columns that are seen: a string for each head, or a list for each row of it."""
        rows: list[list[Any]] = [[] for _ in range(self.shape[0])]
        with torch.inference_mode():
            for weights, places in self.strips():
                kept = torch.ones_like(weights[0], dtype=torch.bool) if places is None else places >= 0
                for head, own in enumerate(weights):
                    if packed:
                        rows[head].append((own[kept] / scale[head] * 255).round().clamp(0, 255).to(torch.uint8))
                    else:
                        parts = own[kept].split(kept.sum(-1).tolist())
                        rows[head] += [round_all(part.tolist(), 8) for part in parts]
        return {"packed": [encode(torch.cat(head), "u1") for head in rows]} if packed else {"heads": rows}


def write_weights(weights: Tensor, scale: Tensor, packed: bool) -> dict[str, Any]:
    """Weights (heads, query, key) as a byte each, of which 255 is the scale of its head; or as numbers."""
    if packed:
        parts = (weights / scale[:, None, None] * 255).round().clamp(0, 255)
        return {"packed": [encode(head, "u1") for head in parts]}
    return {"heads": [[round_all(row, 6) for row in head] for head in weights.tolist()]}


def rank_maps(maps: Iterable[Map]) -> list[Map]:
    """Those that get their room first: from answer to source, then the later ones."""
    return sorted(reversed(list(maps)), key=Map.is_self)


def choose_forms(maps: Collection[Map], wanted: Callable[[str], bool], room: int, packed: bool) -> dict[str, Form]:
    """The form of every map, by name, so that all have room: bytes, or numbers. As much as fits of those that are
    wanted; the others as pictures."""
    chosen = {one.name: PICTURE for one in maps}
    left = room - sum(one.measure(PICTURE, packed) for one in maps)
    for one in rank_maps(one for one in maps if wanted(one.name)):
        least = one.measure(PICTURE, packed)
        sizes = {form: one.measure(form, packed) - least for form in one.forms()}
        chosen[one.name] = next((form for form, size in sizes.items() if size <= left), PICTURE)
        left -= sizes[chosen[one.name]]
    return chosen


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


def pack_vectors(given: Vectors, causal: bool, hidden: list[int]) -> dict[str, Any]:
    """The vectors behind a map, float32 in base64; `hidden` are the columns that no row sees."""
    attention = given.attention
    slopes = alibi(attention.heads, torch.ones(1, 1))[:, 0, 0].tolist() if attention.positions == "alibi" else None
    return {
        "score": name_function(attention.score),
        "normalizer": name_function(attention.normalize),
        "size": given.queries.shape[-1],
        "slopes": slopes,
        "causal": causal,
        "hidden": hidden,
        "vector": encode(attention.score.vector, "<f4") if isinstance(attention.score, Additive) else None,
        "queries": encode(given.queries, "<f4"),
        "keys": encode(given.keys, "<f4"),
        "values": encode(given.values, "<f4"),
    }


def make_page(tree: dict[str, Any]) -> str:
    """One HTML file around a packed tree: no request leaves it, and no text in it can end a script."""
    data = json.dumps(tree, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    names = ("style.css", "maps.js", "image.js", "view.js")
    style, *scripts = ((STUDIO / name).read_text(encoding="utf-8") for name in names)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f'<title>regard</title>\n<style>\n{style}</style>\n<main id="view"></main>\n'
        f'<script type="application/json" id="tree">{data}</script>\n<script>\n{"".join(scripts)}</script>\n</html>\n'
    )
