"""A token a step, quickly: the numbers of `transformer.Block`, in fewer operations.

The hypotheses of a sentence are queries that look at one pool of keys, each at those of its own past: nothing is
re-ordered when they are. With one row or a few, a step takes as long as what happens between its products
(docs/log.md), so less does here. And what a single source makes of any query is multiplied out beforehand, for
products are associative:

    softmax(x Q (S K)') (S V) O  =  softmax(x A) B      with A = Q (S K)' and B = (S V) O, by head
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.positions import Start, last, rotary
from regard.nn.attention import Attention, Memory, scaled_dot, shared

Part = Callable[[Tensor], Tensor]
MANY, WIDE = 16, 16
"""From so many queries on, two products and a softmax are quicker than torch's fused kernel; and with fewer keys than
so many, torch makes a softmax number by number, which takes ten times as long (docs/log.md)."""


class Single(NamedTuple):
    """What a block's cross-attention makes of a query, given one source."""

    bias: Tensor  # (heads * source,)
    scores: Tensor  # (size, heads * source) to the scores, by head, of the source's places
    values: Tensor  # (heads * source, size) from their weights, with the bias: the weights of each head sum to 1


class Block(NamedTuple):
    """A decoder's block."""

    norms: Sequence[Part]
    three: Part  # to queries, keys and values
    joined: Part
    cross: Attention | Single | None
    feedforward: Part


class Form(NamedTuple):
    """What all blocks have in common."""

    before: bool  # whether norms come before the parts
    heads: int
    key_heads: int
    base: float | None  # of rotary positions


class Pool:
    """What the hypotheses of each sentence have read: keys and values of every token, in the order they came."""

    def __init__(self, both: Tensor, filled: int) -> None:
        """Keys and values (blocks, 2, sentences, heads, room, head) of so many tokens, and room behind them."""
        self.both, self.filled = both, filled
        self.blocks = [(part, *part.unbind()) for part in both]
        """Of each block both, the keys and the values (sentences, heads, room, head)."""


class Past(NamedTuple):
    """What the hypotheses of some sentences look at, every sentence with as many, one after the other."""

    blocks: Sequence[Block]
    form: Form
    pool: Pool
    read: int  # how many tokens of the pool there are
    start: Start  # where the next tokens stand; (rows,) where that differs
    sees: Tensor | None  # (sentences, hypotheses, read) 0: has read it, -inf: has not. None: one has read everything
    places: Tensor | None = None  # (sentences,) of each in the pool; None: there are no others in it

    @property
    def sentences(self) -> int:
        """How many there are."""
        return self.pool.both.shape[2] if self.places is None else len(self.places)

    def chosen(self, index: Tensor) -> "Past":
        """These rows; those of a sentence stay together. The pool stays the same until a quarter of its sentences has
        gone."""
        sentences, count = self.sentences, 1 if self.sees is None else self.sees.shape[1]
        kept = [0] if sentences == 1 else list(dict.fromkeys((index // count).tolist()))
        start = self.start[index] if isinstance(self.start, Tensor) else self.start
        sees = self.sees
        if sees is None and len(index) > len(kept):
            sees = self.pool.both.new_zeros(sentences, 1, self.read)
        if sees is not None:
            sees = sees.flatten(0, 1).index_select(0, index).view(len(kept), -1, self.read)
        past = self._replace(start=start, sees=sees)
        if kept == list(range(sentences)):
            return past
        places = torch.tensor(kept, device=index.device)
        past = past._replace(places=places if self.places is None else self.places[places])
        return past if 4 * len(kept) > 3 * self.pool.both.shape[2] else past.copied()

    def copied(self, more: int = 0) -> "Past":
        """With a pool of its own, in which there is room for so many more, and nothing that nobody sees any more."""
        both, sees, read = self.pool.both, self.sees, self.read
        blocks, two, owners, heads, room, head = both.shape
        numbers = torch.arange(owners, device=both.device) if self.places is None else self.places
        order = torch.arange(read, device=both.device).expand(len(numbers), -1)
        if sees is not None:
            seen = (sees == 0).any(1)
            read = int(seen.sum(1).max())
            order = seen.byte().argsort(dim=1, descending=True, stable=True)[:, :read]
            sees = sees.gather(2, order[:, None].expand(-1, sees.shape[1], -1))
        order = F.pad(order, (0, roomy(read + more) - read))  # what is behind them does not matter
        tables = torch.arange(blocks * two, device=both.device)[:, None, None, None] * owners
        by_head = (tables + numbers[:, None, None]) * heads + torch.arange(heads, device=both.device)[:, None]
        rows = (by_head * room + order[:, None]).flatten()
        kept = both.view(-1, head).index_select(0, rows).view(blocks, two, len(numbers), heads, -1, head)
        return self._replace(pool=Pool(kept, read), read=read, sees=sees, places=None)

    def placed(self, x: Tensor) -> Tensor:
        """Rows of the sentences (sentences, ..) where they are in the pool; others have whatever there is."""
        if self.places is None:
            return x
        return x.new_empty(self.pool.both.shape[2], *x.shape[1:]).index_copy_(0, self.places, x)

    def latest(self, count: int) -> "Past":
        """The past in which every row sees no more than so many tokens, the last that it has read."""
        if last(self.start) <= count:
            return self
        sees = self.pool.both.new_zeros(self.sentences, 1, self.read) if self.sees is None else self.sees
        old = (sees == 0).flip(2).cumsum(2).flip(2) > count
        return self._replace(sees=sees.masked_fill(old, -torch.inf))

    def grown(self, count: int) -> "Past":
        """The past in which each of so many hypotheses has read one token more, with room for them in the pool. Whoever
        holds the past that fills it may write behind it; for all others, who would write over that, it is copied."""
        full = self.read + count > self.pool.both.shape[4]
        past = self.copied(more=count) if full or self.pool.filled != self.read else self
        pool, sees = past.pool, past.sees
        pool.filled = past.read + count
        if sees is not None:
            own = apart(count, sees.dtype, sees.device)
            sees = torch.cat([sees, own.expand(len(sees), count, count)], dim=2)
        return past._replace(read=pool.filled, start=self.start + 1, sees=sees)


def roomy(tokens: int) -> int:
    """For how many tokens there is room in a pool that must have some for so many."""
    return max(64, 2 * tokens)


@functools.lru_cache(maxsize=32)
def apart(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count, count) Each has read its own token alone."""
    with torch.inference_mode(False):
        return torch.full((count, count), -torch.inf, dtype=dtype, device=device).fill_diagonal_(0)


# --- before the first step -------------------------------------------------------------------------------------------


def begin(
    blocks: Sequence[Any] | nn.ModuleList,
    sources: Sequence[Memory] = (),
    mask: Tensor | None = None,
    memories: Sequence[Memory] = (),
    start: Start = 0,
    real: Tensor | None = None,
) -> Past | None:
    """The past of some sentences, one hypothesis each: the sources that the blocks have remembered, if there are any,
    and what was read before `start`, if anything. `mask` (sentences, 1, 1, source) and `real` (sentences, key) leave
    out what is padding. None where this way is not open: while something is learned or looked at, and for blocks of
    another form."""
    if not all(map(fits, blocks)):
        return None
    first: Any = blocks[0]
    own = first.self_attention
    heads, key_heads, _ = own.maps.groups
    sentences, read = len((sources or memories)[0].keys), memories[0].keys.shape[-2] if memories else 0
    both = own.maps.weight.new_empty(len(blocks), 2, sentences, key_heads, roomy(read), own.maps.head)
    for part, memory in zip(both, memories, strict=False):
        part[..., :read, :] = torch.stack([memory.keys, memory.values])
    sees = None if real is None else both.new_zeros(real.shape).masked_fill_(~real, -torch.inf)[:, None]
    form = Form(first.residuals[0].where == "pre", heads, key_heads, own.base if own.order == "rotary" else None)
    single = bool(sources) and len(sources[0].keys) == 1 and (mask is None or bool(mask.all()))
    written = [written_out(block, sources[number] if single else None) for number, block in enumerate(blocks)]
    return Past(written, form, Pool(both, read), read, start, sees)


def quiet(block: Any) -> bool:
    """Whether nobody learns or looks, so that what a block makes may be made in another way."""
    looked_at = any(part is not None and part._forward_hooks for part in (block.self_attention, block.cross_attention))
    return not (looked_at or block.training or torch.is_grad_enabled())


def fits(block: Any) -> bool:
    """Whether it is of the form that is written out here, and nobody looks at it."""
    own = block.self_attention
    return own.score is scaled_dot and own.order in ("none", "rotary") and quiet(block)


def written_out(block: Any, memory: Memory | None) -> Block:
    """A block by its parts. If it looks at a single source, which is no longer than a head is wide, the maps of its
    cross-attention are multiplied with what it remembers: (1, heads, source, head)."""
    own, cross = block.self_attention, block.cross_attention
    norms = [residual.norm for residual in block.residuals]
    if memory is not None and memory.keys.shape[-2] <= memory.keys.shape[-1]:
        _, heads, _, head = memory.keys.shape
        if cross.heads == heads and cross.maps.bias is not None:
            keys, size = memory.keys[0] * head**-0.5, heads * head
            asked, bias = (part[:size].view(heads, head, -1) for part in (cross.maps.weight, cross.maps.bias))
            values = (memory.values[0] @ cross.output.weight.t().reshape(heads, head, -1)).flatten(0, 1)
            values += cross.output.bias / heads
            cross = Single((keys @ bias).flatten(), (keys @ asked).flatten(0, 1).t(), values)
    return Block(norms, own.maps, own.output, cross, block.feedforward)


def looked(queries: Tensor, keys: Tensor, values: Tensor, sees: Tensor | None) -> Tensor:
    """What queries (sentences, heads, query, head) see of keys and values (sentences, heads, key, head), to whose
    scores `sees` (sentences, 1, 1 or query, key) is added, by whichever equal form is faster."""
    sentences, heads, count, head = queries.shape
    few = sentences * count < MANY or (count == 1 and sees is None)
    if few or not queries.is_cpu:
        return F.scaled_dot_product_attention(queries, keys, values, sees)
    asked, keys, scale = queries.reshape(-1, count, head), keys.flatten(0, 1).mT, head**-0.5
    if sees is None:
        scores = torch.bmm(asked * scale, keys)
    else:
        scores = sees.expand(-1, heads, count, -1).clone(memory_format=torch.contiguous_format).flatten(0, 1)
        scores.baddbmm_(asked, keys, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values.flatten(0, 1)).view(queries.shape)


# --- a step ----------------------------------------------------------------------------------------------------------


def step(x: Tensor, past: Past, sources: Sequence[Memory] = (), mask: Tensor | None = None) -> tuple[Tensor, Past]:
    """Tokens (rows, size), one of each hypothesis, prepared -> what the last block makes of them, and the past with
    them. `mask` (sentences, 1, 1, source) leaves out what is padding in the sources."""
    rows, size = x.shape
    sentences, place = past.sentences, past.start
    count = rows // sentences
    past = past.grown(count)
    (pre, heads, groups, base), after, before = past.form, past.read, past.read - count
    times, head = heads // groups, size // heads
    parts = [size, 2 * groups * head]
    sees = past.sees
    if sees is not None:
        sees = past.placed((sees if times == 1 else sees.repeat(1, times, 1))[:, None])
    visible = None if mask is None else torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, -torch.inf)
    for number, (block, (both, keys, values)) in enumerate(zip(past.blocks, past.pool.blocks, strict=True)):
        (first, *middle, final), three, joined, cross, feedforward = block

        mapped = three(first(x) if pre else x)
        if base is not None:
            turned = mapped.view(rows, -1, 1, head).narrow(1, 0, heads + groups)
            turned.copy_(rotary(turned, place, base))
        asked, new = mapped.split_with_sizes(parts, 1)
        new = new.view(sentences, count, 2, groups, head).permute(2, 0, 3, 1, 4)
        room = both.narrow(3, before, count)
        room.copy_(new) if past.places is None else room.index_copy_(1, past.places, new)
        # heads that share keys are queries of them, as hypotheses are
        asked = asked.view(sentences, count, groups, times, head).permute(0, 2, 3, 1, 4)
        asked = past.placed(asked.reshape(sentences, groups, times * count, head))
        seen = looked(asked, keys.narrow(2, 0, after), values.narrow(2, 0, after), sees)
        seen = seen if past.places is None else seen.index_select(0, past.places)
        seen = seen.view(sentences, groups, times, count, head).permute(0, 3, 1, 2, 4)
        x = joined(seen.reshape(rows, size)).add_(x)
        x = x if pre else first(x)

        if cross is not None:
            (second,) = middle
            asking = second(x) if pre else x
            if isinstance(cross, Single):
                score = torch.addmm(cross.bias, asking, cross.scores)
                x = torch.addmm(x, score.view(rows, heads, -1).softmax(-1).view(score.shape), cross.values)
            else:
                queries, (keys, values) = cross.ask(asking.view(sentences, count, size)), shared(sources[number], heads)
                seen = looked(queries, keys, values, visible)
                x = cross.output(seen.transpose(1, 2).reshape(rows, size)).add_(x)
            x = x if pre else second(x)

        x = feedforward(final(x) if pre else x).add_(x)
        x = x if pre else final(x)
    return x, past
