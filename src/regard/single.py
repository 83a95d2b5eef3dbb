"""One sentence, written quickly: the numbers of `transformer.Block`, in half the operations.

With one row or a few, a step takes as long as what happens between its products (docs/log.md), so less does here. The
hypotheses of a sentence are queries that look at one pool of keys, each at those of its own past: nothing is
re-ordered. And what a source makes of any query is multiplied out beforehand, for products are associative:

    softmax(x Q (S K)') (S V) O  =  softmax(x A) B      with A = Q (S K)' and B = (S V) O, by head
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Memory, scaled_dot
from regard.position import rotary

Part = Callable[[Tensor], Tensor]


class Source(NamedTuple):
    """What a block's cross-attention makes of a query, given one source."""

    bias: Tensor  # (heads * source,)
    scores: Tensor  # (size, heads * source) to the scores, by head, of the source's places
    values: Tensor  # (heads * source, size) from their weights, with the bias: the weights of each head sum to 1


class Block(NamedTuple):
    """A decoder's block."""

    norms: Sequence[Part]
    three: Part  # to queries, keys and values
    joined: Part
    source: Source | None
    feedforward: Part


class Form(NamedTuple):
    """What all blocks have in common."""

    before: bool  # whether norms come before the parts
    heads: int
    key_heads: int
    base: float | None  # of rotary positions


class Pool:
    """What the hypotheses have read: keys and values of every token, in the order they came."""

    def __init__(self, kept: Tensor, room: int) -> None:
        """With what is kept (blocks, 2, heads, tokens, head) of another, and room for so many tokens in all."""
        *some, self.filled, head = kept.shape
        self.both = kept.new_empty(*some, room, head)
        self.both[..., : self.filled, :] = kept
        self.blocks = [(both, *both.split(1)) for both in self.both]
        """Of each block both, the keys and the values (1, heads, room, head)."""


class Past(NamedTuple):
    """What the hypotheses of one sentence look at. Rows are hypotheses."""

    blocks: Sequence[Block]
    form: Form
    pool: Pool
    read: int = 0  # how many tokens of the pool there are
    start: int = 0  # where the next tokens stand
    sees: Tensor | None = None  # (rows, read) 0: the row has read the token; -inf: it has not. None: one row, all read

    def chosen(self, index: Tensor) -> "Past":
        """These hypotheses; the pool is the same for all."""
        if self.sees is None:
            alone = len(index) == 1
            return self if alone else self._replace(sees=self.pool.both.new_zeros(len(index), self.read))
        return self._replace(sees=self.sees.index_select(0, index))

    def latest(self, count: int) -> "Past":
        """The past in which every row sees no more than so many tokens, the last that it has read."""
        if self.start <= count:
            return self
        sees = self.pool.both.new_zeros(1, self.read) if self.sees is None else self.sees
        old = (sees == 0).flip(1).cumsum(1).flip(1) > count
        return self._replace(sees=sees.masked_fill(old, -torch.inf))

    def grown(self, rows: int) -> "Past":
        """The past in which every row has read one token more, with room for them in the pool. Whoever holds the past
        that fills it may write behind it; for all others, who would write over that, it is copied, without what nobody
        sees any more."""
        pool, before, sees = self.pool, self.read, self.sees
        if pool.filled != before or before + rows > pool.both.shape[3]:
            kept = pool.both[..., :before, :]
            if sees is not None:
                seen = (sees == 0).any(0)
                kept, sees = kept[..., seen, :], sees[:, seen]
            before = kept.shape[3]
            pool = Pool(kept, max(64, 2 * (before + rows)))
        pool.filled = before + rows
        if sees is not None or rows > 1:
            old = pool.both.new_empty(rows, 0) if sees is None else sees
            sees = torch.cat([old, apart(rows, old.dtype)], dim=1)
        return Past(self.blocks, self.form, pool, before + rows, self.start + 1, sees)


@functools.lru_cache(maxsize=32)
def apart(rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, rows) Each has read its own token alone."""
    with torch.inference_mode(False):
        return torch.full((rows, rows), -torch.inf, dtype=dtype).fill_diagonal_(0)


# --- before the first step -------------------------------------------------------------------------------------------


def begin(
    blocks: Sequence[Any] | nn.ModuleList,
    sources: Sequence[Memory] = (),
    mask: Tensor | None = None,
    memories: Sequence[Memory] = (),
    start: int = 0,
) -> Past | None:
    """The past of one sentence, whose source the blocks have remembered, if it has one, or what stands before `start`;
    None where this way is not open: for several sentences, for long sources, while something is learned or looked at,
    and for blocks of another form."""
    keys = (sources or memories)[0].keys
    alone = len(keys) == 1 and keys.is_cpu and not torch.is_grad_enabled() and (mask is None or bool(mask.all()))
    if not alone or not all(map(fits, blocks)) or (sources and keys.shape[-2] > keys.shape[-1]):
        return None
    first: Any = blocks[0]
    own = first.self_attention
    heads, key_heads, _ = own.maps.groups
    if memories:
        kept = torch.stack([torch.cat([one.keys, one.values]) for one in memories])
    else:
        kept = keys.new_empty(len(blocks), 2, key_heads, 0, own.maps.head)
    form = Form(first.residuals[0].where == "pre", heads, key_heads, own.base if own.order == "rotary" else None)
    written = [written_out(block, sources[number] if sources else None) for number, block in enumerate(blocks)]
    tokens = kept.shape[3]
    return Past(written, form, Pool(kept, max(64, 2 * tokens)), tokens, start)


def fits(block: Any) -> bool:
    """Whether it is of the form that is written out here, and nobody looks at it."""
    own, cross = block.self_attention, block.cross_attention
    return not block.training and all(
        attention.score is scaled_dot
        and attention.order in orders
        and (attention is own or (len(set(attention.maps.groups)) == 1 and attention.maps.bias is not None))
        and not attention._forward_hooks
        for attention, orders in ((own, ("none", "rotary")), (cross, ("none",)))
        if attention is not None
    )


def written_out(block: Any, memory: Memory | None) -> Block:
    """A block whose cross-attention's maps, if it has one, are multiplied with what it remembers: (1, heads, source,
    head)."""
    norms = [residual.norm for residual in block.residuals]
    own, source = block.self_attention, None
    if memory is not None:
        _, heads, _, head = memory.keys.shape
        cross, size = block.cross_attention, heads * head
        keys = memory.keys[0] * head**-0.5
        asked, bias = (part[:size].view(heads, head, -1) for part in (cross.maps.weight, cross.maps.bias))
        values = (memory.values[0] @ cross.output.weight.t().reshape(heads, head, -1)).flatten(0, 1)
        values += cross.output.bias / heads
        source = Source((keys @ bias).flatten(), (keys @ asked).flatten(0, 1).t(), values)
    return Block(norms, own.maps, own.output, source, block.feedforward)


# --- a step ----------------------------------------------------------------------------------------------------------


def step(x: Tensor, past: Past) -> tuple[Tensor, Past]:
    """Tokens (rows, size), one of each hypothesis, prepared -> what the last block makes of them, and the past with
    them."""
    rows, size = x.shape
    place = past.start
    past = past.grown(rows)
    (pre, heads, groups, base), after, before = past.form, past.read, past.read - rows
    times, head = heads // groups, size // heads
    parts = [size, 2 * groups * head]
    sees = past.sees if past.sees is None or times == 1 else past.sees.repeat(times, 1)
    for block, (pool, keys, values) in zip(past.blocks, past.pool.blocks, strict=True):
        (first, *middle, last), three, joined, source, feedforward = block

        mapped = three(first(x) if pre else x)
        if base is not None:
            turned = mapped.view(rows, -1, 1, head).narrow(1, 0, heads + groups)
            turned.copy_(rotary(turned, place, base))
        asked, new = mapped.split_with_sizes(parts, 1)
        pool.narrow(2, before, rows).copy_(new.view(rows, 2, groups, head).permute(1, 2, 0, 3))
        # heads that share keys are queries of them, as hypotheses are
        asked = asked.view(rows, groups, times, head).permute(1, 2, 0, 3).reshape(1, groups, -1, head)
        seen = F.scaled_dot_product_attention(asked, keys.narrow(2, 0, after), values.narrow(2, 0, after), sees)
        x = joined(seen.view(groups, times, rows, head).permute(2, 0, 1, 3).reshape(rows, size)).add_(x)
        x = x if pre else first(x)

        if source is not None:
            (two,) = middle
            score = torch.addmm(source.bias, two(x) if pre else x, source.scores)
            x = torch.addmm(x, score.view(rows, heads, -1).softmax(-1).view(score.shape), source.values)
            x = x if pre else two(x)

        x = feedforward(last(x) if pre else x).add_(x)
        x = x if pre else last(x)
    return x, past
