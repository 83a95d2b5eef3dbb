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
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

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
    own, keys, values = (split_blocks(part, pattern.block) for part in (query, *kv))
    count = len(own) // batch

    def attend_from(first: int, blocks: Tensor, pattern: Pattern) -> Tensor:
        """What blocks of queries, from the first one on, see of their blocks of keys (batch or 1, blocks, slots)."""
        mask = block_mask(pattern, blocks, first, n, lengths, bias, query.dtype).expand(batch, -1, -1, -1, -1)
        rows = blocks.clamp(min=0) + count * torch.arange(batch, device=query.device)[:, None, None]
        queries = own.view(batch, count, *own.shape[1:])[:, first : first + blocks.shape[1]].flatten(0, 1)
        seen = attend_gathered(queries, keys, values, rows.flatten(0, 1), mask.flatten(0, 1))
        return seen.transpose(1, 2).reshape(batch, -1, heads, size)

    leading = 0 if pattern.causal else min(count, pattern.first)  # a causal one has no more to see
    found = []
    if leading:
        everything = torch.arange(count, device=query.device).expand(1, leading, -1)
        found.append(attend_from(0, everything, pattern._replace(width=None)))
    if leading < count:
        found.append(attend_from(leading, batch_blocks(pattern, n, lengths).to(query.device)[:, leading:], pattern))
    return torch.cat(found, dim=1)[:, :n].transpose(1, 2)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """(batch, heads, n, size) -> (batch * blocks, heads, block, size), the last block filled up with zeros."""
    if missing := -x.shape[2] % block:
        x = F.pad(x, (0, 0, 0, missing))
    blocks = x.reshape(*x.shape[:2], -1, block, x.shape[3]).transpose(1, 2).flatten(0, 1)
    return blocks.contiguous()  # or every gathering would copy all


def attend_gathered(own: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Blocks of queries attend to the blocks of keys that are gathered for them. Queries, keys and values are in blocks
    (count, heads, block, size), `rows` are the numbers of the blocks of keys for each block of queries (count, slots),
    and `mask` says which of those keys are seen, or what is added to their scores (count, heads or 1, block or 1,
    slots * block) -> the context (count, heads, block, size)."""
    plain = own.device.type == "cpu" and own.dtype in (torch.float32, torch.float64)
    if not plain or torch.is_autocast_enabled("cpu"):
        return attend_fused(own, keys, values, rows, mask)
    context: Tensor = GatheredAttention.apply(own, keys, values, rows, mask)  # type: ignore[no-untyped-call]
    return context


def attend_fused(own: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """`attend_gathered` by torch's fused kernel; the gradient gathers again."""
    places = number_heads(rows, own.shape[1])

    def attend(some: slice) -> Tensor:
        near, far = (gather(part, places[some]) for part in (keys, values))
        return F.scaled_dot_product_attention(own[some], near, far, attn_mask=mask[some])

    chunks = split_chunks(own, rows, MANY)
    if not torch.is_grad_enabled():
        return torch.cat([attend(some) for some in chunks])
    return torch.cat([checkpoint(attend, some, use_reentrant=False) for some in chunks])


class GatheredAttention(torch.autograd.Function):
    """`attend_gathered` on a CPU, a few blocks at a time, so that what is gathered and compared stays in the cache; the
    gradient gathers and compares again. Faster than the fused kernel on keys gathered at once (docs/log.md)."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, keys: Tensor, values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        own, places = own * own.shape[-1] ** -0.5, number_heads(rows, own.shape[1])
        context = torch.empty_like(own)
        for some in split_chunks(own, rows, GATHERED):
            weights = weigh(own[some], gather(keys, places[some]), mask[some])
            torch.matmul(weights, gather(values, places[some]), out=context[some])
        ctx.save_for_backward(own, keys, values, places, mask, context)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        own, keys, values, places, mask, context = ctx.saved_tensors
        slope, of_own = slope.contiguous(), torch.empty_like(own)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        mean = (slope * context).sum(-1, keepdim=True)  # of the slopes of a row's weights, each as often as it weighs
        for some in split_chunks(own, places[:, 0], GATHERED):
            near, far = (gather(part, places[some]) for part in (keys, values))
            weights = weigh(own[some], near, mask[some])
            scatter(of_values, places[some], weights.mT @ slope[some])
            scores = (slope[some] @ far.mT).sub_(mean[some]).mul_(weights)
            torch.matmul(scores, near, out=of_own[some])
            scatter(of_keys, places[some], scores.mT @ own[some])
        return of_own.mul_(own.shape[-1] ** -0.5), of_keys, of_values, None, None


GATHERED, MANY = 2**19, 2**22
"""Numbers of keys that are gathered at a time, at most: what stays in a cache, and what a kernel is called for."""


def split_chunks(own: Tensor, rows: Tensor, most: int) -> Iterator[slice]:
    """The blocks of queries (count, heads, block, size) that are worked on together, if each sees the blocks of keys
    that `rows` (count, slots) has."""
    count = max(1, most // max(1, rows.shape[1] * own[0].numel()))
    return (slice(first, first + count) for first in range(0, len(own), count))


def weigh(scaled: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """The weights (rows, heads, block, slots * block) of gathered keys, of queries that are divided by the root of
    their size; `mask` as of `attend_gathered`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scaled.dtype).masked_fill_(~mask, -torch.inf)  # quicker than of all scores
    scores = (scaled @ keys.mT).add_(mask)
    return torch.softmax(scores, -1, out=scores)


def number_heads(rows: Tensor, heads: int) -> Tensor:
    """Numbers of blocks (count, slots) -> where the same blocks of every head are, (count, heads, slots)."""
    return rows[:, None] * heads + torch.arange(heads, device=rows.device)[:, None]


def gather(blocks: Tensor, places: Tensor) -> Tensor:
    """Blocks (count, heads, block, size) from places (rows, heads, slots) -> (rows, heads, slots * block, size)."""
    gathered = blocks.flatten(0, 1).index_select(0, places.flatten())
    return gathered.view(*places.shape[:2], places.shape[2] * blocks.shape[2], blocks.shape[3])


def scatter(blocks: Tensor, places: Tensor, gathered: Tensor) -> None:
    """Add what was gathered back to the blocks it came from, shapes as of `gather`."""
    shape = (-1, *blocks.shape[-2:])
    blocks.view(shape).index_add_(0, places.flatten(), gathered.reshape(shape))


def batch_blocks(pattern: Pattern, n: int, lengths: Tensor | None) -> Tensor:
    """The blocks that each block of queries sees, (batch or 1, blocks, slots), by the length of each row."""
    count = -(-n // pattern.block)
    if lengths is None or pattern.causal:
        return list_blocks(pattern, count)[None]
    own = [list_blocks(pattern, -(-length // pattern.block)) for length in lengths.tolist()]
    slots = max(part.shape[1] for part in own)
    return torch.stack([F.pad(part, (0, slots - part.shape[1], 0, count - len(part)), value=-1) for part in own])


def block_mask(
    pattern: Pattern, blocks: Tensor, first: int, n: int, lengths: Tensor | None, bias: Bias | None, dtype: torch.dtype
) -> Tensor:
    """Which of the gathered keys are seen by blocks of queries from the first one on, or what is added to their scores:
    (batch or 1, blocks, heads or 1, block or 1, slots * block)."""
    inside = torch.arange(pattern.block, device=blocks.device)
    places = (blocks[..., None] * pattern.block + inside).flatten(-2)[:, :, None, None]
    seen = (places >= 0) & (places < (n if lengths is None else lengths[:, None, None, None, None]))
    far = torch.zeros_like(places)
    if pattern.causal or pattern.width is not None or bias is not None:  # it makes a mask for every query
        own = torch.arange(first, first + blocks.shape[1], device=blocks.device)
        queries = own[:, None] * pattern.block + inside
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
