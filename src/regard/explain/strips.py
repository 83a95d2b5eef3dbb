"""Maps in strips of rows: what remains of a map of any length when none of its tensors is queries times keys."""

import base64
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.sparse import Pattern, list_blocks

TILES = 128
"""Tiles on a side of the picture of a map, at most."""
TOP = 32
"""How many weights of a row are kept where not all are."""


class Strip(NamedTuple):
    """Some rows of a map, one below the other."""

    weights: Tensor  # (heads, rows, gathered)
    places: Tensor | None = None  # (rows, gathered) the column of each, in order; -1 for none. None: all columns

    def dense(self, columns: int) -> Tensor:
        """The same with all columns (heads, rows, columns): zeros where nothing is seen."""
        if self.places is None:
            return self.weights
        found = self.weights.new_zeros(*self.weights.shape[:2], columns + 1)
        places = (self.places % (columns + 1)).expand_as(self.weights)  # -1 goes into one column more
        return found.scatter_(2, places, self.weights)[..., :columns]


@dataclass(frozen=True)
class Blocks:
    """What a text of so many tokens sees of itself by a pattern."""

    pattern: Pattern
    length: int

    def seen(self) -> list[list[int]]:
        """The blocks of keys that each block of queries sees, in order."""
        count = -(-self.length // self.pattern.block)
        rows = [sorted(one for one in row if one >= 0) for row in list_blocks(self.pattern, count).tolist()]
        if not self.pattern.causal:  # global blocks see everything
            rows[: self.pattern.first] = [list(range(count)) for _ in rows[: self.pattern.first]]
        return rows

    def count(self) -> int:
        """How many weights there are in the blocks that are seen."""
        block, last = self.pattern.block, (self.length - 1) // self.pattern.block
        sizes = [block] * last + [self.length - last * block]
        return sum(size * sum(sizes[one] for one in row) for size, row in zip(sizes, self.seen(), strict=True))

    def mask(self, high: int = 1, wide: int = 1) -> Tensor:
        """Whether anything is seen in each tile (tiles, tiles) of so many rows and columns."""
        n, pattern, block = self.length, self.pattern, self.pattern.block
        top, left = torch.arange(0, n, high)[:, None], torch.arange(0, n, wide)
        bottom, right = (top + high).clamp(max=n) - 1, (left + wide).clamp(max=n) - 1
        mask = torch.zeros(len(top), len(left), dtype=torch.bool)
        for own, row in enumerate(self.seen()):
            rows = slice(own * block // high, (min(n, (own + 1) * block) - 1) // high + 1)
            for one in row:
                mask[rows, one * block // wide : (min(n, (one + 1) * block) - 1) // wide + 1] = True
        mask = mask & (left <= bottom) if pattern.causal else mask
        return mask if pattern.width is None else mask & (torch.maximum(left - bottom, top - right) <= pattern.width)

    def tree(self) -> dict[str, Any]:
        """As docs/maps.md has it, without weights."""
        pattern = self.pattern
        return {"size": pattern.block, "seen": self.seen(), "width": pattern.width, "causal": pattern.causal}


class Summary(NamedTuple):
    """What remains of a map when its strips are gone."""

    entropy: list[float]  # of each head, in bits
    distance: list[float]  # of each head, in tokens
    picture: Tensor  # (heads, tiles, tiles): the largest weight of each tile
    columns: Tensor  # (heads, rows, count): of the largest weights of each row
    weights: Tensor  # (heads, rows, count): these, largest first
    sums: Tensor  # (heads, rows): of all weights


def round_all(values: Iterable[float], digits: int = 4) -> list[float]:
    """Numbers with as many digits as anybody reads."""
    return [round(value, digits) for value in values]


def encode(tensor: Tensor, kind: str) -> str:
    """Numbers in base64, little endian, of a type by its name in NumPy."""
    return base64.b64encode(tensor.detach().cpu().numpy().astype(kind).tobytes()).decode()


def tile_size(side: int, most: int) -> int:
    """How many rows or columns a tile has, if there are to be at most `most` tiles."""
    return -(-side // most)


def pool_tiles(weights: Tensor, most: int) -> Tensor:
    """The largest weight of each tile (heads, tiles, tiles) of weights (heads, query, key)."""
    return F.max_pool2d(weights, [tile_size(side, most) for side in weights.shape[1:]], ceil_mode=True)


def pool_columns(strip: Strip, columns: int) -> Tensor:
    """The largest weight of each tile of columns: (heads, rows, tiles)."""
    (weights, places), wide = strip, tile_size(columns, TILES)
    count = -(-columns // wide)
    if places is None:
        return F.pad(weights, (0, count * wide - columns)).view(*weights.shape[:2], count, wide).amax(-1)
    tiles = (places.clamp(min=0) // wide).expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], count).scatter_reduce_(2, tiles, weights, "amax")


def total_product(weights: Tensor, values: Tensor) -> Tensor:
    """The sums (heads,) of weights (heads, rows, columns) times values, of each head or of all."""
    return (weights * values).sum(-1).double().sum(-1)


def summarize(strips: Iterable[Strip], shape: tuple[int, int, int]) -> Summary:
    """One pass over the strips of a map."""
    heads, rows, columns = shape
    high, wide, most = tile_size(rows, TILES), tile_size(columns, TILES), min(TOP, columns)
    picture = torch.zeros(heads, -(-rows // high), -(-columns // wide))
    bits, far = torch.zeros(2, heads, dtype=torch.float64)
    # made beforehand: what is kept of a strip must not lie among what is freed, or no memory is given back
    kept, top = torch.zeros(heads, rows, most, dtype=torch.int32), torch.zeros(heads, rows, most)
    sums = torch.zeros(heads, rows)
    first = 0
    for strip in strips:
        (weights, places), last = strip, first + strip.weights.shape[1]
        lines = torch.arange(first, last)
        bits -= total_product(weights, weights.clamp(min=1e-30).log_()) / math.log(2)
        at = torch.arange(columns)[None] if places is None else places
        far += total_product(weights, (at - lines[:, None]).abs_().to(weights.dtype))
        found = weights.topk(min(most, weights.shape[-1]))
        of = found.indices if places is None else places.expand_as(weights).gather(-1, found.indices)
        kept[:, first:last, : of.shape[-1]], top[:, first:last, : of.shape[-1]] = of.clamp(min=0), found.values
        sums[:, first:last] = weights.sum(-1)
        pooled = pool_columns(strip, columns)
        picture.scatter_reduce_(1, (lines // high)[None, :, None].expand_as(pooled), pooled, "amax")
        first = last
    return Summary((bits / rows).tolist(), (far / rows).tolist(), picture, kept, top, sums)


def name_tiles(side: int, size: int) -> list[str]:
    """The number of the token that each tile of a side begins with, from 0."""
    return [str(start) for start in range(0, side, size)]
