"""What an attention was given in a pass of the model, and the maps that follow from it."""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.attention.equation import KeyValues
from regard.attention.positions import alibi
from regard.attention.scores import dot, scaled_dot
from regard.attention.sparse import weigh_blocks
from regard.explain.attention_maps import Calculation, Map, Vectors
from regard.explain.strips import Blocks, Strip
from regard.nn.attention import Attention, get_lengths

STRIP = 2**22
"""Weights of a strip at most, if one row has no more."""


class Use:
    """One use of an attention in a forward pass: what it was given. Of those that were used one after another (a
    recurrent decoder's), the queries stand below each other."""

    def __init__(self, attention: Attention, queries: Tensor, kv: KeyValues, mask: Tensor | None) -> None:
        self.attention, self.kv, self.queries, self.masks = attention, kv, [queries], [mask]

    def extend(self, other: "Use") -> None:
        """Let more queries follow."""
        self.queries += other.queries
        self.masks += other.masks

    @property
    def tokens(self) -> int:
        """How many tokens can be looked at, or are gathered in slots."""
        return self.kv.keys.shape[-2]

    @property
    def slots(self) -> int:
        """How many slots the tokens are gathered in, if they are."""
        return 0 if self.attention.slots is None else self.attention.slots.keys.shape[-1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and columns of the map."""
        return self.attention.heads, sum(queries.shape[-2] for queries in self.queries), self.slots or self.tokens

    @property
    def blocks(self) -> Blocks | None:
        """Which blocks its rows see, if it is a text that looks at itself by a pattern."""
        pattern, (_, rows, columns) = self.attention.pattern, self.shape
        return None if pattern is None or rows != columns else Blocks(pattern, rows)

    @property
    def is_sparse(self) -> bool:
        """Whether its blocks are gathered."""
        pattern, (queries, *_), (mask, *_) = self.attention.pattern, self.queries, self.masks
        return pattern is not None and self.attention.is_sparse(queries, self.kv, mask)

    def parts(self, rows: slice) -> Iterator[tuple[Tensor, Tensor | None, slice]]:
        """The queries and the mask of every call that some rows are of, and which of its rows these are."""
        start, stop, _ = rows.indices(self.shape[1])
        ends = itertools.accumulate(queries.shape[-2] for queries in self.queries)
        for queries, mask, end in zip(self.queries, self.masks, ends, strict=True):
            first = end - queries.shape[-2]
            if start < end and stop > first:
                yield queries, mask, slice(max(0, start - first), min(end, stop) - first)

    def weights(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """The map (heads, query, key), of all heads and rows or of some."""
        made = [self.weigh_rows(queries, mask, heads, own) for queries, mask, own in self.parts(rows)]
        return torch.cat(made, dim=-2).float().cpu()

    def weigh_rows(self, queries: Tensor, mask: Tensor | None, heads: slice, rows: slice) -> Tensor:
        """Some rows of one call; of a structure that is of all rows, these are made and then dropped."""
        if self.attention.kind in ("tree", "matching"):
            return self.attention.weights(queries, self.kv, mask, heads)[0, :, rows]
        return self.attention.weights(queries, self.kv, mask, heads, rows)[0]

    def strips(self, heads: slice = slice(None)) -> Iterator[Strip]:
        """The map strip by strip; of a pattern, its blocks."""
        count, rows, columns = len(range(self.attention.heads)[heads]), *self.shape[1:]
        step = rows if self.attention.kind in ("tree", "matching") else max(1, STRIP // (count * columns))
        leading = rows
        if self.is_sparse:
            assert self.attention.pattern is not None
            pattern = self.attention.pattern
            leading = 0 if pattern.causal else min(rows, pattern.first * pattern.block)  # these see everything
        for start in range(0, leading, step):
            yield Strip(self.weights(heads, slice(start, min(start + step, leading))))
        if leading < rows:
            yield from self.block_strips(heads, leading)

    def block_strips(self, heads: slice, leading: int) -> Iterator[Strip]:
        """The rows behind the leading ones, with the blocks that they see."""
        pattern, attention, (_, rows, _) = self.attention.pattern, self.attention, self.shape
        assert pattern is not None
        keys = self.kv.repeat_heads(attention.heads).keys[0, heads]
        queries, total = self.queries[0][0, heads], -(-rows // pattern.block)
        bias = None
        if attention.positions == "alibi":
            bias = functools.partial(slope_heads, attention.heads, heads)
        gathered = pattern.block * max(map(len, Blocks(pattern, rows).seen()[leading // pattern.block :]))
        step = max(1, STRIP // (len(queries) * pattern.block * gathered))
        for start in range(leading // pattern.block, total, step):
            weights, places = weigh_blocks(queries, keys, pattern, slice(start, min(start + step, total)), bias)
            yield Strip(weights.float().cpu(), places.cpu())

    def share_strips(self, heads: slice) -> Iterator[Strip]:
        """What each slot gathers: (heads or 1, slots, key) in one strip."""
        assert self.attention.slots is not None
        yield Strip(self.attention.slots.shares(self.tokens, self.masks[0])[0, heads].float().cpu())

    def outlines(self, name: str) -> Iterator[Map]:
        """The maps that follow from it, of which no weight is made yet: with slots, what they gather and which of them
        are looked at; else one."""
        attention, (rows, columns) = self.attention, self.attention.axes
        layer = attention.layer + int(name.partition("#")[2] or 0)  # of the uses of one block
        if attention.slots is not None:
            heads = self.attention.heads if attention.slots.keys.dim() > 2 else 1
            shape = heads, self.slots, self.tokens
            yield Map(f"{name}.slots", "gathered", layer, "slot", columns, shape, self.share_strips)
            yield Map(name, "slots", layer, rows, "slot", self.shape, self.strips)
            return
        kept = self.blocks, self.is_sparse
        yield Map(name, attention.kind, layer, rows, columns, self.shape, self.strips, *kept)

    def seen(self, rows: slice = slice(None)) -> Tensor:
        """Whether rows may look at columns: (query, key), of all rows or of some."""
        made = []
        for queries, mask, own in self.parts(rows):
            allowed = None if self.slots else self.attention.fill_mask(queries, self.kv, mask, own)
            allowed = torch.ones(1, dtype=torch.bool) if allowed is None else allowed.cpu()
            made.append(allowed.expand(1, 1, own.stop - own.start, self.shape[2])[0, 0])
        return torch.cat(made)

    def hidden(self) -> list[int]:
        """The columns that no row sees."""
        if self.slots or any(mask is None for mask in self.masks):
            return []
        seen = torch.stack([mask.flatten(0, -2).any(0).cpu() for mask in self.masks if mask is not None]).any(0)
        return (~seen).nonzero().flatten().tolist()

    @torch.inference_mode()
    def vectors(self) -> Vectors:
        """What the map was made of."""
        kv = KeyValues(self.kv.keys[:1], self.kv.values[:1]).repeat_heads(self.attention.heads)
        if self.attention.slots is not None:
            kv = self.attention.slots(kv, get_lengths(self.masks[0]))
        given = torch.cat([queries[0] for queries in self.queries], dim=-2)
        return Vectors(self.attention, *(part.float().cpu() for part in (given, kv.keys[0], kv.values[0])))

    @torch.inference_mode()
    def calculate(self, row: int, head: int) -> Calculation:
        """The numbers behind one row of one head."""
        given, attention, only = self.vectors(), self.attention, slice(row, row + 1)
        query, keys, values = given.queries[head, row], given.keys[head], given.values[head]
        plain = dot if attention.score is scaled_dot else attention.score
        scores, scaled = (score(query[None], keys)[0] for score in (plain, attention.score))
        if attention.positions == "alibi":
            scaled = scaled + alibi(attention.heads, (torch.arange(len(keys)) - row)[None])[head, 0]
        weights = self.weights(slice(head, head + 1), only)[0, 0]
        return Calculation(query, keys, values, scores, scaled, self.seen(only)[0], weights, weights @ values)


def slope_heads(count: int, heads: slice, distance: Tensor) -> Tensor:
    """ALiBi's bias (.., heads, query, key) of some of the heads, by distances (.., 1, query, key)."""
    return alibi(count, distance)[..., heads, :, :]
