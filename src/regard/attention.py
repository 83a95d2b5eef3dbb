"""One equation. Everything in this package that is called attention is `attend` with other arguments:

    weights = normalize(score(query, keys), mask)        # (batch, heads, query, key)
    context = weights @ values

Scores and normalizers are functions; projections make a general score, several heads, self- and cross-attention of
them. Project first, score after: then there are two primitive scores, dot and additive.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.layers import Linear
from regard.mask import distance
from regard.position import linear_bias, rotary

Score = Callable[[Tensor, Tensor], Tensor]
Normalize = Callable[[Tensor, Tensor | None], Tensor]


class Attended(NamedTuple):
    """What came out, and why."""

    context: Tensor  # (batch, heads, query, size)
    weights: Tensor  # (batch, heads, query, key)


class Memory(NamedTuple):
    """What can be looked at: projected once, looked at often."""

    keys: Tensor  # (batch, heads, key, size)
    values: Tensor  # (batch, heads, key, size)


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
        fused = F.scaled_dot_product_attention(query, *memory, mask)
        return fused if mask is None else torch.where(mask.any(-1, keepdim=True), fused, 0.0)
    return attend(query, *memory, mask, score=score).context


def fused_is_faster(query: Tensor) -> bool:
    """Whether torch's fused kernel beats the plain product for queries (batch, heads, query, size): on a CPU neither
    in bfloat16, where its backward is slow, nor for one query in each of many rows, as in a wide beam."""
    if not query.is_cpu:
        return True
    return query.dtype != torch.bfloat16 and (query.shape[-2] > 1 or len(query) < 128)


# --- with weights ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """The equation with its projections and heads. Queries come from one sequence, keys and values from the same or
    another, remembered beforehand; `Identity` stands where a model has no projection."""

    def __init__(
        self,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        output: nn.Module,
        *,
        heads: int = 1,
        score: Score = scaled_dot,
        order: Literal["none", "rotary", "linear"] = "none",
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = query, key, value, output
        self.heads, self.score, self.order = heads, score, order

    def remember(self, inputs: Tensor, start: int = 0) -> Memory:
        """inputs (batch, key, size), whose first stands at `start` -> keys and values by head."""
        keys, values = split(self.key(inputs), self.heads), split(self.value(inputs), self.heads)
        return Memory(rotary(keys, start) if self.order == "rotary" else keys, values)

    def ask(self, inputs: Tensor, memory: Memory) -> tuple[Tensor, Score]:
        """inputs (batch, query, size) -> queries by head, and the score that compares them with the memory."""
        queries = split(self.query(inputs), self.heads)
        start = memory.keys.shape[-2] - queries.shape[-2]
        if self.order == "rotary":
            return rotary(queries, start), self.score
        if self.order == "linear":
            far = distance(queries.shape[-2], memory.keys.shape[-2], inputs.device)
            return queries, biased(self.score, linear_bias(self.heads, far))
        return queries, self.score

    def forward(self, inputs: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        """inputs (batch, query, size) look at the memory -> (batch, query, size). With `order`, the last query stands
        at the last key."""
        queries, score = self.ask(inputs, memory)
        mixed = context(queries, memory, mask, score)
        joined: Tensor = self.output(mixed.transpose(-3, -2).flatten(-2))
        return joined

    def weights(self, inputs: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        """The map that `forward` used, exactly: (batch, heads, query, key)."""
        queries, score = self.ask(inputs, memory)
        return softmax(score(queries, memory.keys), mask)


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, n, size) -> (batch, heads, n, size / heads)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)


def multi_head(
    size: int, heads: int, *, bias: bool = True, order: Literal["none", "rotary", "linear"] = "none"
) -> Attention:
    """B4: projections of all heads at once, joined and mixed by an output matrix."""
    parts = [Linear(size, size, bias=bias) for _ in range(4)]
    for part in parts:
        nn.init.xavier_uniform_(part.weight)
        if bias:
            nn.init.zeros_(part.bias)
    return Attention(*parts, heads=heads, order=order)


def one_head(size: int, score: Literal["dot", "scaled dot", "general", "additive"]) -> Attention:
    """A2: a decoder's state looks at the encoder's states, which are their own values."""
    same = nn.Identity()
    match score:
        case "dot":
            return Attention(same, same, same, same, score=dot)
        case "scaled dot":
            return Attention(same, same, same, same)
        case "general":
            return Attention(same, Linear(size, size, bias=False), same, same, score=dot)
        case "additive":
            query, key = Linear(size, size), Linear(size, size, bias=False)
            return Attention(query, key, same, same, score=Additive(size))
