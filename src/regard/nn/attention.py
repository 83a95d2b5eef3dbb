"""One equation. Everything in this package that is called attention is `attend` with other arguments:

    weights = normalize(score(query, keys), mask)        # (batch, heads, query, key)
    context = weights @ values

Scores and normalizers are functions; projections make a general score, several heads, self- and cross-attention of
them. Project first, score after: then there are two primitive scores, dot and additive.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import causal, distance
from regard.attention.positions import Start, linear_bias, rotary
from regard.nn.layers import Linear, Map

Score = Callable[[Tensor, Tensor], Tensor]
Normalize = Callable[[Tensor, Tensor | None], Tensor]
Turn = Callable[[Tensor], Tensor]


class Attended(NamedTuple):
    """What came out, and why."""

    context: Tensor  # (batch, heads, query, size)
    weights: Tensor  # (batch, heads, query, key)


class Memory(NamedTuple):
    """What can be looked at: projected once, looked at often."""

    keys: Tensor  # (batch, heads, key, size)
    values: Tensor  # (batch, heads, key, size)

    def grown(self, keys: Tensor, values: Tensor) -> "Memory":
        """This memory with others behind it."""
        return Memory(torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2))


# --- scores ----------------------------------------------------------------------------------------------------------


def dot(query: Tensor, keys: Tensor) -> Tensor:
    """(.., query, size), (.., key, size) -> (.., query, key)."""
    return query @ keys.mT


def scaled_dot(query: Tensor, keys: Tensor) -> Tensor:
    """The dot product over the root of its size: its variance stays 1, so the softmax does not peak (B5)."""
    return dot(query / math.sqrt(query.shape[-1]), keys)


class Additive(nn.Module):
    """v . tanh(query + key): Bahdanau 2015, with the projections W and U made beforehand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(.., query, size), (.., key, size) -> (.., query, key)."""
        return (query.unsqueeze(-2) + keys.unsqueeze(-3)).tanh() @ self.vector


def biased(score: Score, bias: Tensor) -> Score:
    """A score plus a bias that broadcasts against (batch, heads, query, key)."""
    return lambda query, keys: score(query, keys) + bias.to(query.dtype)


# --- normalizers -----------------------------------------------------------------------------------------------------


def softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the keys that may be seen; a query that may look at nothing gets zeros and finite gradients."""
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask


# --- the equation ----------------------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    score: Score = scaled_dot,
    normalize: Normalize = softmax,
) -> Attended:
    """query (.., query, size), keys (.., key, size), values (.., key, size'), mask broadcasting to (.., query, key)."""
    weights = normalize(score(query, keys), mask)
    return Attended(weights @ values, weights)


def context(query: Tensor, memory: Memory, mask: Tensor | None, score: Score) -> Tensor:
    """The context alone, by whichever equal form is faster. This is the one place that chooses (docs/log.md has the
    figures). Not all forms of the fused kernel give a blind query zeros, so those are blanked after it."""
    if score is scaled_dot and fused_is_faster(query):
        size = query.shape[-2]
        if size == memory.keys.shape[-2] and mask is causal(size, size, query.device):
            # the kernel knows this mask itself, and it leaves no query blind
            return F.scaled_dot_product_attention(query, memory.keys, memory.values, is_causal=True)
        fused = F.scaled_dot_product_attention(query, memory.keys, memory.values, mask)
        if mask is None:
            return fused
        sees = mask.any(-1, keepdim=True)
        everybody = query.is_cpu and bool(
            sees.all()
        )  # asking is cheaper than blanking nobody, where it is no round trip
        return fused if everybody else torch.where(sees, fused, 0.0)
    return attend(query, memory.keys, memory.values, mask, score=score).context


def fused_is_faster(query: Tensor) -> bool:
    """Whether torch's fused kernel beats the plain product for queries (batch, heads, query, size): on a CPU neither
    in bfloat16, where its backward is slow, nor where something is learned of one query in each of many rows."""
    if not query.is_cpu:
        return True
    alone = torch.is_grad_enabled() and query.shape[-2] == 1 and len(query) >= 128
    return query.dtype != torch.bfloat16 and not alone


# --- with weights ----------------------------------------------------------------------------------------------------


class Joint(Linear):
    """The maps of queries, keys and values as one matrix: whoever needs several of them makes one product. Keys and
    values may have fewer heads than queries (Ainslie 2023)."""

    def __init__(self, size: int, heads: int = 1, key_heads: int | None = None, *, bias: bool = True) -> None:
        self.head = size // heads
        self.groups = [heads, key_heads or heads, key_heads or heads]
        self.parts: dict[int, Map] = {}
        super().__init__(size, sum(self.groups) * self.head, bias=bias)
        for part in torch.split(self.weight.data, [count * self.head for count in self.groups]):
            nn.init.xavier_uniform_(part)
        if bias:
            nn.init.zeros_(self.bias)

    def part(self, parts: slice) -> Map:
        """Some of a matrix that is laid out anew, laid out themselves when they are first wanted."""
        part = self.parts.get(parts.start)
        if part is None:
            part = Map()
            part.weight, part.bias = self.some(parts)
            part.lay_out(packed=self.packed is not None, strips=self.strips is not None)
            self.parts[parts.start] = part
        return part

    def some(self, parts: slice) -> tuple[Tensor, Tensor | None]:
        """The matrix and the bias of those of (queries, keys, values) that are asked for."""
        rows = slice(*(sum(self.groups[:part]) * self.head for part in (parts.start, parts.stop)))
        return self.weight[rows], None if self.bias is None else self.bias[rows]

    def of(self, inputs: Tensor, parts: slice, heads: int, turn: Turn | None = None) -> tuple[Tensor, ...]:
        """inputs (batch, n, size) -> those of (queries, keys, values) that are asked for, by head; `turn` turns queries
        and keys together."""
        groups = self.groups[parts]
        if parts is ALL:
            mapped = self(inputs)
        elif self.quick(inputs):
            mapped = self.part(parts)(inputs)
        else:
            mapped = F.linear(inputs, *self.some(parts))
        mapped = mapped.view(*inputs.shape[:-1], sum(groups), self.head)
        if turn is None:
            return tuple(part.transpose(1, 2) for part in mapped.split_with_sizes(groups, dim=2))
        *turned, last = groups
        both, values = mapped.split_with_sizes([sum(turned), last], dim=2)
        return *turn(both.transpose(1, 2)).split_with_sizes(turned, dim=1), values.transpose(1, 2)


def shared(memory: Memory, heads: int) -> Memory:
    """A memory whose heads are each looked at by several heads of queries, as if each had its own."""
    times = heads // memory.keys.shape[1]
    if times == 1:
        return memory
    return Memory(memory.keys.repeat_interleave(times, dim=1), memory.values.repeat_interleave(times, dim=1))


class Separate(nn.Module):
    """The maps of queries, keys and values one by one; `Identity` stands where a model has none."""

    def __init__(self, query: nn.Module, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    def of(self, inputs: Tensor, parts: slice, heads: int, turn: Turn | None = None) -> tuple[Tensor, ...]:
        """As `Joint.of`; nothing is turned."""
        maps: tuple[nn.Module, ...] = (self.query, self.key, self.value)
        mapped: list[Tensor] = [part(inputs) for part in maps[parts]]
        return tuple(x.view(*x.shape[:-1], heads, -1).transpose(-3, -2) for x in mapped)


QUERY, MEMORY, ALL = slice(0, 1), slice(1, 3), slice(0, 3)


class Attention(nn.Module):
    """The equation with its maps and heads. Queries come from one sequence, keys and values from the same or another:
    `ask` and `remember` them, or `both` at once of one sequence, then call."""

    def __init__(
        self,
        maps: Joint | Separate,
        output: nn.Module,
        *,
        heads: int = 1,
        score: Score = scaled_dot,
        order: Literal["none", "rotary", "linear"] = "none",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.maps, self.output = maps, output
        self.heads, self.score, self.order, self.base = heads, score, order, base

    def ask(self, inputs: Tensor) -> Tensor:
        """inputs (batch, query, size) -> queries by head."""
        return self.maps.of(inputs, QUERY, self.heads)[0]

    def remember(self, inputs: Tensor) -> Memory:
        """inputs (batch, key, size) -> keys and values by head."""
        keys, values = self.maps.of(inputs, MEMORY, self.heads)
        return Memory(keys, values)

    def both(self, inputs: Tensor, past: Memory | None = None, start: Start | None = None) -> tuple[Tensor, Memory]:
        """inputs (batch, n, size) that stand behind the past, or at `start` -> their queries, and the past with them
        behind it."""
        if start is None:
            start = 0 if past is None else past.keys.shape[-2]
        turn = functools.partial(rotary, start=start, base=self.base) if self.order == "rotary" else None
        queries, keys, values = self.maps.of(inputs, ALL, self.heads, turn)
        if past is None:
            return queries, Memory(keys, values)
        return queries, past.grown(keys, values)

    def scored(self, queries: Tensor, memory: Memory, heads: slice = slice(None)) -> Score:
        """The score that compares these queries with the memory; with an `order`, the last query stands at the last
        key."""
        if self.order != "linear":
            return self.score
        far = distance(queries.shape[-2], memory.keys.shape[-2], queries.device)
        return biased(self.score, linear_bias(self.heads, far)[heads])

    def forward(self, queries: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        """queries (batch, heads, query, size) look at the memory -> (batch, query, size)."""
        mixed = context(queries, shared(memory, self.heads), mask, self.scored(queries, memory))
        joined: Tensor = self.output(mixed.transpose(-3, -2).flatten(-2))
        return joined

    def weights(
        self, queries: Tensor, memory: Memory, mask: Tensor | None = None, heads: slice = slice(None)
    ) -> Tensor:
        """The map that `forward` used, exactly: (batch, heads, query, key), of all heads or of some."""
        score = self.scored(queries, memory, heads)
        return softmax(score(queries[:, heads], shared(memory, self.heads).keys[:, heads]), mask)


def multi_head(
    size: int,
    heads: int,
    *,
    key_heads: int | None = None,
    bias: bool = True,
    order: Literal["none", "rotary", "linear"] = "none",
    base: float = 10_000.0,
) -> Attention:
    """B4: all heads' maps in one matrix, what they saw joined and mixed by another."""
    output = Linear(size, size, bias=bias)
    nn.init.xavier_uniform_(output.weight)
    if bias:
        nn.init.zeros_(output.bias)
    return Attention(Joint(size, heads, key_heads, bias=bias), output, heads=heads, order=order, base=base)


def one_head(size: int, score: Literal["dot", "scaled dot", "general", "additive"]) -> Attention:
    """A2: a decoder's state looks at the encoder's states, which are their own values."""
    same = nn.Identity()
    match score:
        case "dot":
            return Attention(Separate(same, same, same), same, score=dot)
        case "scaled dot":
            return Attention(Separate(same, same, same), same)
        case "general":
            return Attention(Separate(same, Linear(size, size, bias=False), same), same, score=dot)
        case "additive":
            query, key = Linear(size, size), Linear(size, size, bias=False)
            return Attention(Separate(query, key, same), same, score=Additive(size))
