"""One sentence, decoded quickly: the numbers of `transformer.Block`, in half the operations.

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

Part = Callable[[Tensor], Tensor]
Map = tuple[Tensor, Tensor]
"""A bias (out,) and a matrix (in, out)."""


class Block(NamedTuple):
    """A decoder's block that looks at one source."""

    norms: Sequence[Part]
    three: Part  # to queries, keys and values
    joined: Part
    scores: Map  # to the scores, by head, of the source's places
    values: Tensor  # (heads * source, size) from their weights, with the bias: the weights of each head sum to 1
    feedforward: Part


class Pool:
    """What the hypotheses have read: queries, keys and values of every token, in the order they came."""

    def __init__(self, heads: int, kept: Tensor, room: int) -> None:
        """With what is kept (blocks, tokens, 3 * size) of another, and room for so many tokens in all."""
        blocks, self.filled, width = kept.shape
        self.heads, self.mapped = heads, kept.new_empty(blocks, room, width)
        self.mapped[:, : self.filled] = kept
        by_head = self.mapped.view(blocks, 1, room, 3, heads, -1).permute(0, 3, 1, 4, 2, 5)
        self.blocks = [(self.mapped[number], *by_head[number].unbind()) for number in range(blocks)]
        """Of each block the maps (room, 3 * size), and in them the queries, keys and values (1, heads, room, head)."""


class Past(NamedTuple):
    """What the hypotheses of one sentence look at. Rows are hypotheses."""

    blocks: Sequence[Block]
    before: bool  # whether norms come before the parts
    pool: Pool
    read: int = 0  # how many tokens of the pool there are
    start: int = 0  # where the next tokens stand
    sees: Tensor | None = None  # (rows, read) 0: the row has read the token; -inf: it has not. None: one row, all read

    def chosen(self, index: Tensor) -> "Past":
        """These hypotheses; the pool is the same for all."""
        if self.sees is None:
            alone = len(index) == 1
            return self if alone else self._replace(sees=self.pool.mapped.new_zeros(len(index), self.read))
        return self._replace(sees=self.sees.index_select(0, index))

    def grown(self, rows: int) -> "Past":
        """The past in which every row has read one token more, with room for them in the pool. Whoever holds the past
        that fills it may write behind it; for all others, who would write over that, it is copied, without what nobody
        sees any more."""
        pool, before, sees = self.pool, self.read, self.sees
        if pool.filled != before or before + rows > pool.mapped.shape[1]:
            kept = pool.mapped[:, :before]
            if sees is not None:
                seen = (sees == 0).any(0)
                kept, sees = kept[:, seen], sees[:, seen]
            before = kept.shape[1]
            pool = Pool(pool.heads, kept, max(64, 2 * (before + rows)))
        pool.filled = before + rows
        if sees is not None or rows > 1:
            old = pool.mapped.new_empty(rows, 0) if sees is None else sees
            sees = torch.cat([old, apart(rows, old.dtype)], dim=1)
        return Past(self.blocks, self.before, pool, before + rows, self.start + 1, sees)


@functools.lru_cache(maxsize=32)
def apart(rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, rows) Each has read its own token alone."""
    with torch.inference_mode(False):
        return torch.full((rows, rows), -torch.inf, dtype=dtype).fill_diagonal_(0)


# --- before the first step -------------------------------------------------------------------------------------------


def begin(blocks: Sequence[Any] | nn.ModuleList, memories: Sequence[Memory], mask: Tensor | None) -> Past | None:
    """The empty past of one sentence whose source the blocks have remembered; None where this way is not open: for
    several sentences, for long ones, while something is learned or looked at, and for blocks of another form."""
    keys = memories[0].keys
    alone = len(keys) == 1 and keys.is_cpu and keys.shape[-2] <= keys.shape[-1] and not torch.is_grad_enabled()
    if not alone or not all(map(fits, blocks)) or not (mask is None or mask.all()):
        return None
    written = [written_out(block, memory) for block, memory in zip(blocks, memories, strict=True)]
    first: Any = blocks[0]
    nothing = keys.new_empty(len(blocks), 0, 3 * first.self_attention.maps.in_features)
    return Past(written, first.residuals[0].where == "pre", Pool(keys.shape[1], nothing, 64))


def fits(block: Any) -> bool:
    """Whether it is of the form that is written out here, and nobody looks at it."""
    return not block.training and all(
        attention.score is scaled_dot
        and attention.order == "none"
        and len(set(attention.maps.groups)) == 1
        and attention.maps.bias is not None
        and not attention._forward_hooks
        for attention in (block.self_attention, block.cross_attention)
    )


def written_out(block: Any, memory: Memory) -> Block:
    """A block whose cross-attention's maps are multiplied with what it remembers: (1, heads, source, head)."""
    _, heads, _, head = memory.keys.shape
    cross, size = block.cross_attention, heads * head
    keys = memory.keys[0] * head**-0.5
    asked, bias = (part[:size].view(heads, head, -1) for part in (cross.maps.weight, cross.maps.bias))
    scores = (keys @ bias).flatten(), (keys @ asked).flatten(0, 1).t()
    values = (memory.values[0] @ cross.output.weight.t().reshape(heads, head, -1)).flatten(0, 1)
    values += cross.output.bias / heads
    norms = [residual.norm for residual in block.residuals]
    return Block(norms, block.self_attention.maps, block.self_attention.output, scores, values, block.feedforward)


# --- a step ----------------------------------------------------------------------------------------------------------


def step(x: Tensor, past: Past) -> tuple[Tensor, Past]:
    """Tokens (rows, size), one of each hypothesis, prepared -> what the last block makes of them, and the past with
    them."""
    rows, size = x.shape
    past = past.grown(rows)
    pre, after, before = past.before, past.read, past.read - rows
    heads = past.pool.heads
    for block, (mapped, queries, keys, values) in zip(past.blocks, past.pool.blocks, strict=True):
        (one, two, last), three, joined, scores, looked, feedforward = block

        mapped.narrow(0, before, rows).copy_(three(one(x) if pre else x))
        asked, known, given = queries.narrow(2, before, rows), keys.narrow(2, 0, after), values.narrow(2, 0, after)
        seen = F.scaled_dot_product_attention(asked, known, given, past.sees)
        x = joined(seen.transpose(1, 2).reshape(rows, size)).add_(x)
        x = x if pre else one(x)

        score = torch.addmm(scores[0], two(x) if pre else x, scores[1])
        x = torch.addmm(x, score.view(rows, heads, -1).softmax(-1).view(score.shape), looked)
        x = x if pre else two(x)

        x = feedforward(last(x) if pre else x).add_(x)
        x = x if pre else last(x)
    return x, past
