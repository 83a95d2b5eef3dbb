"""Attention of linear cost: every query sees a few blocks of keys, which are gathered; no (query, key) tensor is made.

A pattern says which blocks those are: a window around the query's own (words, or whole blocks), the first blocks of
all, which also see everything (global), and some drawn at random (BigBird, Zaheer 2020). `sparse_mask` is the same
pattern as a dense mask.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.equation import KeyValues
from regard.attention.masks import padding
from regard.attention.normalizers import softmax
from regard.attention.scores import scaled_dot

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


def batch_mask(pattern: Pattern, n: int, lengths: Tensor, queries: slice = slice(None)) -> Tensor:
    """The patterns of rows of these lengths as a mask (batch, 1, query, key), of all queries or of some; padding is not
    seen."""
    places = torch.arange(n, device=lengths.device)
    masks = [sparse_mask(pattern, places[queries], places, max(1, length)) for length in lengths.tolist()]
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
    own, keys, values = (split_blocks(part, pattern.block) for part in (query, *kv))
    seen = attend_gathered(own, keys, values, rows.flatten(0, 1), mask)
    context = seen.reshape(batch, -1, heads, size)[:, :n].transpose(1, 2)
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
    x = x.transpose(1, 2)
    if missing := -x.shape[1] % block:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.reshape(-1, block, *x.shape[2:])


KEPT, GATHERED = 2**25, 2**22
"""Numbers of gathered keys that are kept for the gradient, and that are gathered at a time, at most."""


def attend_gathered(own: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Blocks of queries attend to the blocks of keys that are gathered for them. Queries, keys and values are in blocks
    (count, block, heads, size), `rows` are the numbers of the blocks of keys for each block of queries (count, slots),
    and `mask` says which of those keys are seen (count, heads or 1, block or 1, slots * block) -> the context (count,
    block, heads, size)."""
    if own.requires_grad and rows.numel() * own[0].numel() <= KEPT:  # faster than gathering them once more
        return attend_chunk(own, gather(keys, rows), gather(values, rows), mask)
    context: Tensor = GatheredAttention.apply(own, keys, values, rows, mask)  # type: ignore[no-untyped-call]
    return context


class GatheredAttention(torch.autograd.Function):
    """`attend_gathered`, some blocks at a time, so that what is gathered stays in the cache and is forgotten; the
    gradient gathers it again (docs/log.md has the figures)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(own, keys, values, rows, mask)
        context = torch.empty_like(own, memory_format=torch.contiguous_format)
        for some in split_chunks(own, rows):
            context[some] = attend_chunk(own[some], gather(keys, rows[some]), gather(values, rows[some]), mask[some])
        return context

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        own, keys, values, rows, mask = ctx.saved_tensors
        slopes = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in (own, keys, values)]
        for some in split_chunks(own, rows):
            with torch.enable_grad():
                queries = own[some].detach().requires_grad_()
                near, far = (gather(part, rows[some]).detach().requires_grad_() for part in (keys, values))
                context = attend_chunk(queries, near, far, mask[some])
            slopes[0][some], *gathered = torch.autograd.grad(context, [queries, near, far], slope[some])
            for whole, part in zip(slopes[1:], gathered, strict=True):
                whole.index_add_(0, rows[some].flatten(), part.reshape(-1, *whole.shape[1:]))
        return *slopes, None, None


def split_chunks(own: Tensor, rows: Tensor) -> Iterator[slice]:
    """The blocks of queries that are worked on together."""
    count = max(1, GATHERED // max(1, rows.shape[1] * own[0].numel()))
    return (slice(first, first + count) for first in range(0, len(own), count))


def gather(blocks: Tensor, rows: Tensor) -> Tensor:
    """Blocks (count, block, heads, size) by their numbers (rows, slots) -> (rows, slots * block, heads, size)."""
    return blocks.index_select(0, rows.flatten()).view(len(rows), -1, *blocks.shape[2:])


def attend_chunk(own: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """queries (rows, block, heads, size) attend to keys and values (rows, slots * block, heads, size) -> as queries."""
    queries, keys, values = (part.transpose(1, 2) for part in (own, keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2)


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


def weigh_blocks(
    query: Tensor, keys: Tensor, pattern: Pattern, part: slice, bias: Bias | None = None
) -> tuple[Tensor, Tensor]:
    """The weights behind `attend_blocks`, of one text and of some blocks of its queries, by their numbers: queries and
    keys (heads, n, size) -> weights (heads, rows, gathered), and the key (rows, gathered) that each of them is of, in
    their order; -1, with weight 0, is of none. Global blocks of a bidirectional pattern see more than these."""
    n, block = query.shape[-2], pattern.block
    own = torch.arange(-(-n // block), device=query.device)[part]
    seen = list_blocks(pattern, -(-n // block)).to(query.device)[part].sort(-1).values
    inside = torch.arange(block, device=query.device)
    rows, places = own[:, None] * block + inside, (seen[..., None] * block + inside).flatten(-2)
    places = places.where((places >= 0) & (places < n), -1)
    far = places[:, None] - rows[..., None]
    mask = (places >= 0)[:, None] & torch.ones_like(rows, dtype=torch.bool)[..., None]
    mask = mask & (far <= 0) if pattern.causal else mask
    mask = mask if pattern.width is None else mask & (far.abs() <= pattern.width)
    scores = scaled_dot(query[:, rows.clamp(max=n - 1)], keys[:, places.clamp(min=0)])
    scores = scores if bias is None else scores + bias(far[:, None]).transpose(0, 1).to(scores.dtype)
    real = rows.flatten() < n
    return softmax(scores, mask).flatten(1, 2)[:, real], places.repeat_interleave(block, 0)[real]
