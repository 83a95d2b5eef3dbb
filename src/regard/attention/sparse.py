"""Attention of linear cost: every query sees a few blocks of keys, which are gathered; no (query, key) tensor is made.

A pattern says which blocks those are: a window around the query's own (words, or whole blocks), the first blocks of
all, which also see everything (global), and some drawn at random (BigBird, Zaheer 2020). `sparse_mask` is the same
pattern as a dense mask.
"""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.equation import KeyValues
from regard.attention.masks import padding

Bias = Callable[[Tensor], Tensor]
"""What is added to scores, by how far ahead of its query a key is: (.., 1, query, key) -> (.., heads, query, key)."""


class Pattern(NamedTuple):
    """Which keys a query sees. Blocks are counted from the first token of a sequence."""

    block: int  # tokens of a block
    window: int = 1  # blocks on either side of the query's own
    width: int | None = None  # of the window, tokens on either side at most; None: whole blocks
    first: int = 0  # blocks at the beginning that see everything, and that everybody sees (global)
    random: int = 0  # blocks drawn at random, for each block of queries
    seed: int = 0
    causal: bool = False


@functools.lru_cache(maxsize=256)
def list_blocks(pattern: Pattern, count: int) -> Tensor:
    """The blocks of keys that each of `count` blocks of queries sees: (count, slots), its own in the first slot, and -1
    in slots that hold none; global blocks of queries see more than these. A causal pattern shows a block the same
    however many there are."""
    rows = []
    for own in range(count):
        ahead = own if pattern.causal else count
        near = [one for one in range(own - pattern.window, own + pattern.window + 1) if 0 <= one < ahead and one != own]
        near += [one for one in range(min(pattern.first, ahead)) if one not in (own, *near)]
        others = [one for one in range(ahead) if one not in {own, *near}] if pattern.random else []
        draw = random.Random(f"{pattern.seed} {own} {0 if pattern.causal else count}")
        rows.append([own, *near, *sorted(draw.sample(others, min(pattern.random, len(others))))])
    slots = max(map(len, rows), default=1)
    with torch.inference_mode(False):  # it serves training too
        return torch.tensor([row + [-1] * (slots - len(row)) for row in rows]).view(count, slots)


def sparse_mask(pattern: Pattern, queries: Tensor, keys: Tensor, length: int) -> Tensor:
    """The pattern of a sequence of so many tokens as a mask (.., query, key), of queries (.., query) and keys (.., key)
    that stand at these places: for a step of decoding, for a map, and as an oracle."""
    blocks = list_blocks(pattern, -(-length // pattern.block)).to(queries.device)
    seen = torch.zeros(len(blocks), len(blocks) + 1, dtype=torch.bool, device=queries.device)
    seen = seen.scatter_(1, blocks % (len(blocks) + 1), 1)[:, :-1]  # -1 has gone into the last column
    seen[: pattern.first] = True
    far = keys[..., None, :] - queries[..., None]
    rows, columns = (places.clamp(0, length - 1) // pattern.block for places in (queries, keys))
    mask = seen[rows[..., None], columns[..., None, :]]
    if pattern.width is not None:
        mask &= far.abs() <= pattern.width
    return mask & (far <= 0) if pattern.causal else mask


def batch_mask(pattern: Pattern, n: int, lengths: Tensor) -> Tensor:
    """The patterns of rows of these lengths as a mask (batch, 1, query, key); padding is not seen."""
    places = torch.arange(n, device=lengths.device)
    masks = [sparse_mask(pattern, places, places, max(1, length)) for length in lengths.tolist()]
    return torch.stack(masks)[:, None] & padding(lengths, n)


def attend_blocks(
    query: Tensor, kv: KeyValues, pattern: Pattern, lengths: Tensor | None = None, bias: Bias | None = None
) -> Tensor:
    """queries (batch, heads, n, size) attend to the keys of the same n tokens that the pattern shows them -> the
    context (batch, heads, n, size). `lengths` (batch,) are those of the rows without the padding at their end: each has
    the pattern of its own length, and what its padding sees means nothing. `bias` is added to the scores."""
    batch, heads, n, size = query.shape
    blocks = batch_blocks(pattern, n, lengths).to(query.device)
    mask = block_mask(pattern, blocks, n, lengths, bias, query.dtype).expand(batch, -1, -1, -1, -1).flatten(0, 1)
    rows = blocks.clamp(min=0) + blocks.shape[1] * torch.arange(batch, device=query.device)[:, None, None]
    own = split_blocks(query, pattern.block).transpose(1, 2)
    keys, values = (gather_blocks(split_blocks(part, pattern.block), rows.flatten(0, 1)) for part in kv)
    seen = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask)
    context = seen.transpose(1, 2).reshape(batch, -1, heads, size)[:, :n].transpose(1, 2)
    leading = 0 if pattern.causal else min(n, pattern.first * pattern.block)  # a causal one has no more to see
    if not leading:
        return context
    whole = None if lengths is None else padding(lengths, n)
    if bias is not None:
        far = torch.arange(n, device=query.device) - torch.arange(leading, device=query.device)[:, None]
        added = bias(far).to(query.dtype)  # the kernel takes no other type, and does not say so
        whole = added if whole is None else torch.where(whole, added, -torch.inf)
    everything = F.scaled_dot_product_attention(query[:, :, :leading], kv.keys, kv.values, attn_mask=whole)
    return torch.cat([everything, context[:, :, leading:]], dim=2)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """(batch, heads, n, size) -> (batch * blocks, block, heads, size), the last block filled up with zeros."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, -x.shape[2] % block))
    return x.reshape(-1, block, *x.shape[2:])


def gather_blocks(x: Tensor, rows: Tensor) -> Tensor:
    """Blocks (count, block, heads, size) by their numbers (rows, slots) -> (rows, heads, slots * block, size)."""
    found = x.index_select(0, rows.flatten())
    return found.view(len(rows), -1, *x.shape[2:]).transpose(1, 2)


def batch_blocks(pattern: Pattern, n: int, lengths: Tensor | None) -> Tensor:
    """The blocks that each block of queries sees, (batch or 1, blocks, slots), by the length of each row."""
    count = -(-n // pattern.block)
    if lengths is None or pattern.causal:
        return list_blocks(pattern, count)[None]
    own = [list_blocks(pattern, -(-length // pattern.block)) for length in lengths.tolist()]
    slots = max(part.shape[1] for part in own)
    return torch.stack([F.pad(part, (0, slots - part.shape[1], 0, count - len(part)), value=-1) for part in own])


def block_mask(
    pattern: Pattern, blocks: Tensor, n: int, lengths: Tensor | None, bias: Bias | None, dtype: torch.dtype
) -> Tensor:
    """Which of the gathered keys are seen, or what is added to their scores: (batch or 1, blocks, heads or 1, block or
    1, slots * block)."""
    inside = torch.arange(pattern.block, device=blocks.device)
    places = (blocks[..., None] * pattern.block + inside).flatten(-2)[:, :, None, None]
    seen = (places >= 0) & (places < (n if lengths is None else lengths[:, None, None, None, None]))
    far = torch.zeros_like(places)
    if pattern.causal or pattern.width is not None or bias is not None:  # it makes a mask for every query
        queries = torch.arange(blocks.shape[1], device=blocks.device)[:, None] * pattern.block + inside
        far = places - queries[:, None, :, None]
    if pattern.causal:
        seen = seen & (far <= 0)
    if pattern.width is not None:
        seen = seen & (far.abs() <= pattern.width)
    seen = seen | ~seen.any(-1, keepdim=True)  # padding sees something, so that nothing is divided by zero
    return seen if bias is None else torch.where(seen, bias(far).to(dtype), -torch.inf)
