"""The equation with weights: projections of queries, keys and values, heads, and what mixes them.

Attention modules say themselves what they are (`kind`, `normalize`) and what stands on the two sides of their map
(`axes`): whoever looks at them does not have to guess.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.chain import segment_marginals
from regard.attention.equation import KeyValues, attend_fast
from regard.attention.linformer import project_sequence
from regard.attention.masks import distance
from regard.attention.normalizers import NORMALIZERS, Normalize, softmax
from regard.attention.positions import Start, alibi, rotate
from regard.attention.scores import Score, biased, dot, scaled_dot
from regard.attention.sparse import Pattern, attend_blocks, batch_mask, list_blocks

Kind = Literal["self", "cross", "spatial", "chain", "tree", "matching"]
Rotate = Callable[[Tensor], Tensor]


class Axes(NamedTuple):
    """What the rows and the columns of an attention's map are: the source (`key`), what is written (`query`), or what
    a decoder has read (`input`). They are the names of docs/maps.md."""

    rows: str
    columns: str


SOURCE, TARGET, CROSS = Axes("key", "key"), Axes("query", "input"), Axes("query", "key")


def looks_at_itself(kind: str, axes: tuple[str, str]) -> bool:
    """Whether rows and columns of a map of this kind are the same text; of a structure, its axes tell."""
    return kind == "self" or (
        kind in ("spatial", "chain", "tree", "matching") and (axes[0] == axes[1] or axes == TARGET)
    )


class Additive(nn.Module):
    """v . tanh(query + key): Eq. 7, Bahdanau 2015, with the projections W and U made beforehand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(.., query, size), (.., key, size) -> (.., query, key)."""
        return (query.unsqueeze(-2) + keys.unsqueeze(-3)).tanh() @ self.vector


class Cosine(nn.Module):
    """The cosine of query and key over a learned temperature, which begins at 1/10."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor([math.log(10.0)]))
        """The logarithm of one over the temperature: no step makes it negative."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(.., query, size), (.., key, size) -> (.., query, key)."""
        return dot(F.normalize(query, dim=-1), F.normalize(keys, dim=-1)) * self.sharpness.exp()


class Segments(nn.Module):
    """Segment attention, section 3.1 of Kim 2017: every key is chosen or not, as a chain of two tags (a linear-chain
    CRF) over the keys that may be seen; its weight is how likely it is chosen. A row sums to how many are expected."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(2, 2))
        """From not chosen (0) or chosen (1) to either; all zeros: every key decides for itself."""

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """scores (.., query, key) -> weights of the same shape."""
        return segment_marginals(scores.double(), self.transitions.double(), mask).to(scores.dtype)


class Slots(nn.Module):
    """Linformer's projections of keys and of values along the sequence, from `longest` tokens to `count` slots: of all
    heads, or each its own; of both, or each its own."""

    def __init__(self, longest: int, count: int, heads: int | None, *, shared: bool) -> None:
        super().__init__()
        shape = (longest, count) if heads is None else (heads, longest, count)
        self.keys = nn.Parameter(torch.randn(shape) / longest**0.5)
        self.values = None if shared else nn.Parameter(torch.randn(shape) / longest**0.5)

    def forward(self, kv: KeyValues, lengths: Tensor | None) -> KeyValues:
        """Keys and values (batch, heads, n, size) -> (batch, heads, slots, size)."""
        values = self.keys if self.values is None else self.values
        return KeyValues(project_sequence(kv.keys, self.keys, lengths), project_sequence(kv.values, values, lengths))

    def shares(self, n: int, mask: Tensor | None) -> Tensor:
        """What the slots of values gather: (batch or 1, heads or 1, slots, n), of each slot the share of every token by
        the size of its weight, sum 1."""
        sizes = (self.keys if self.values is None else self.values)[..., :n, :].abs().mT
        sizes = sizes.expand(1, -1, -1, -1) if sizes.dim() > 2 else sizes[None, None]
        sizes = sizes if mask is None else sizes * mask
        return sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)


KINDS: dict[str, Kind] = {
    "segments": "chain",
    "projective trees": "tree",
    "nonprojective trees": "tree",
    "matching": "matching",
}
"""By `model.normalize`: kinds of attention that are told by their structure, not by what they look at."""


def choose_normalizer(name: str, kind: Kind) -> dict[str, Any]:
    """The normalizer and the kind of an attention, as arguments of `Attention`; `kind` is what softmax makes it."""
    return {"normalize": Segments() if name == "segments" else NORMALIZERS[name], "kind": KINDS.get(name, kind)}


QUERY, KEY, KEY_VALUE, ALL = slice(0, 1), slice(1, 2), slice(1, 3), slice(0, 3)
"""Which of (queries, keys, values) are projected."""


class JointProjection(nn.Linear):
    """The projections of queries, keys and values as one matrix: whoever needs several of them makes one product. Keys
    and values may have fewer heads than queries (grouped-query attention, Ainslie 2023)."""

    def __init__(self, size: int, heads: int = 1, kv_heads: int | None = None, *, bias: bool = True) -> None:
        self.head = size // heads
        self.groups = [heads, kv_heads or heads, kv_heads or heads]
        super().__init__(size, sum(self.groups) * self.head, bias=bias)
        for part in torch.split(self.weight.data, [count * self.head for count in self.groups]):
            nn.init.xavier_uniform_(part)
        if bias:
            nn.init.zeros_(self.bias)

    def project(self, inputs: Tensor, parts: slice, heads: int, rotate: Rotate | None = None) -> tuple[Tensor, ...]:
        """inputs (batch, n, size) -> those of (queries, keys, values) that are asked for, by head; `rotate` is applied
        to queries and keys together."""
        groups = self.groups[parts]
        if parts == ALL:
            mapped = self(inputs)
        else:
            rows = slice(*(sum(self.groups[:part]) * self.head for part in (parts.start, parts.stop)))
            mapped = F.linear(inputs, self.weight[rows], None if self.bias is None else self.bias[rows])
        mapped = mapped.view(*inputs.shape[:-1], sum(groups), self.head)
        if rotate is None:
            return tuple(part.transpose(1, 2) for part in mapped.split_with_sizes(groups, dim=2))
        *rotated, last = groups
        both, values = mapped.split_with_sizes([sum(rotated), last], dim=2)
        return *rotate(both.transpose(1, 2)).split_with_sizes(rotated, dim=1), values.transpose(1, 2)


class SeparateProjections(nn.Module):
    """The projections of queries, keys and values one by one; `Identity` stands where a model has none."""

    def __init__(self, query: nn.Module, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    def project(self, inputs: Tensor, parts: slice, heads: int, rotate: Rotate | None = None) -> tuple[Tensor, ...]:
        """As `JointProjection.project`; nothing is rotated."""
        every: tuple[nn.Module, ...] = (self.query, self.key, self.value)
        mapped: list[Tensor] = [part(inputs) for part in every[parts]]
        return tuple(x.view(*x.shape[:-1], heads, -1).transpose(-3, -2) for x in mapped)


class Attention(nn.Module):
    """The equation with its projections and heads. Queries come from one sequence, keys and values from the same or
    another: project them, then call."""

    def __init__(
        self,
        projection: JointProjection | SeparateProjections,
        output: nn.Module,
        *,
        kind: Kind,
        axes: Axes,
        heads: int = 1,
        layer: int = 0,
        score: Score = scaled_dot,
        normalize: Normalize = softmax,
        positions: Literal["none", "rotary", "alibi"] = "none",
        rotary_base: float = 10_000.0,
        causal: bool = False,
        pattern: Pattern | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.projection, self.output = projection, output
        self.kind, self.axes, self.heads, self.layer = kind, axes, heads, layer
        self.score, self.normalize = score, normalize
        self.positions, self.rotary_base = positions, rotary_base
        self.causal, self.pattern, self.slots = causal, pattern, slots

    @property
    def is_self(self) -> bool:
        """Whether a text looks at itself, whatever the structure of its weights."""
        return looks_at_itself(self.kind, self.axes)

    def project_query(self, inputs: Tensor) -> Tensor:
        """inputs (batch, query, size) -> queries by head."""
        return self.projection.project(inputs, QUERY, self.heads)[0]

    def project_kv(self, inputs: Tensor) -> KeyValues:
        """inputs (batch, key, size) -> keys and values by head."""
        return KeyValues(*self.projection.project(inputs, KEY_VALUE, self.heads))

    def project_qkv(
        self, inputs: Tensor, past: KeyValues | None = None, start: Start | None = None
    ) -> tuple[Tensor, KeyValues]:
        """inputs (batch, n, size) that stand behind the past, or at `start` -> their queries, and the past with their
        keys and values behind it."""
        if start is None:
            start = 0 if past is None else past.keys.shape[-2]
        rotary = self.positions == "rotary"
        turn = functools.partial(rotate, start=start, base=self.rotary_base) if rotary else None
        queries, keys, values = self.projection.project(inputs, ALL, self.heads, turn)
        return queries, KeyValues(keys, values) if past is None else past.append(keys, values)

    def score_with_positions(
        self, queries: Tensor, kv: KeyValues, heads: slice = slice(None), rows: slice = slice(None)
    ) -> Score:
        """The score that compares these queries, or some rows of them, with the keys; with ALiBi, the last query stands
        at the last key."""
        if self.positions != "alibi":
            return self.score
        far = distance(queries.shape[-2], kv.keys.shape[-2], queries.device, rows)
        return biased(self.score, alibi(self.heads, far)[heads])

    def attend_source(self, inputs: Tensor, source: KeyValues, mask: Tensor | None) -> Tensor:
        """inputs (rows, .., size) attend to a source. Several hypotheses (rows) of one sentence are its queries: the
        source is not copied for each."""
        queries = self.project_query(inputs.reshape(len(source.keys), -1, inputs.shape[-1]))
        seen: Tensor = self(queries, source, mask)
        return seen.reshape(inputs.shape)

    def forward(self, queries: Tensor, kv: KeyValues, mask: Tensor | None = None) -> Tensor:
        """queries (batch, heads, query, size) attend to keys and values -> (batch, query, size). With a pattern or with
        slots, the mask may say which tokens are real, the first ones of each text (batch, 1, 1, key); a mask with a row
        for each query has the pattern in it already. Without a mask, a causal one lets whole texts see what came
        before."""
        kv = kv.repeat_heads(self.heads)
        if self.slots is not None:
            kv, mask = self.slots(kv, get_lengths(mask)), None
        if self.pattern is not None and self.is_sparse(queries, kv, mask):
            bias = functools.partial(alibi, self.heads) if self.positions == "alibi" else None
            mixed = attend_blocks(queries, kv, self.pattern, get_lengths(mask), bias)
        else:
            is_causal, score = self.is_whole(queries, kv, mask), self.score_with_positions(queries, kv)
            mask = None if is_causal else self.fill_mask(queries, kv, mask)
            mixed = attend_fast(queries, kv, mask, score=score, normalize=self.normalize, is_causal=is_causal)
        joined: Tensor = self.output(mixed.transpose(-3, -2).flatten(-2))
        return joined

    def is_whole(self, queries: Tensor, kv: KeyValues, mask: Tensor | None) -> bool:
        """Whether these are whole texts, whose mask is the causal one."""
        return self.causal and self.pattern is None and mask is None and queries.shape[-2] == kv.keys.shape[-2]

    def is_sparse(self, queries: Tensor, kv: KeyValues, mask: Tensor | None) -> bool:
        """Whether gathering blocks saves work: for whole texts that are longer than what the pattern shows of them."""
        assert self.pattern is not None
        n = queries.shape[-2]
        if n != kv.keys.shape[-2] or (mask is not None and mask.shape[-2] > 1):
            return False
        return n > self.pattern.block * list_blocks(self.pattern, -(-n // self.pattern.block)).shape[1]

    def fill_mask(
        self, queries: Tensor, kv: KeyValues, mask: Tensor | None, rows: slice = slice(None)
    ) -> Tensor | None:
        """The mask with the pattern in it, of all queries or of some rows of them: of whole texts, if there is one."""
        n = queries.shape[-2]
        if self.is_whole(queries, kv, mask):
            return distance(n, n, queries.device, rows) <= 0
        if self.pattern is None or n != kv.keys.shape[-2] or (mask is not None and mask.shape[-2] > 1):
            return mask if mask is None or mask.shape[-2] == 1 or rows == slice(None) else mask[..., rows, :]
        lengths = torch.tensor([n], device=queries.device) if mask is None else get_lengths(mask)
        assert lengths is not None
        return batch_mask(self.pattern, n, lengths, rows)

    def weights(
        self,
        queries: Tensor,
        kv: KeyValues,
        mask: Tensor | None = None,
        heads: slice = slice(None),
        rows: slice = slice(None),
    ) -> Tensor:
        """The map that `forward` used, exactly: (batch, heads, query, key), of all heads and rows or of some; with
        slots, (batch, heads, query, slots). A tree or a matching is of all its rows."""
        kv = kv.repeat_heads(self.heads)
        if self.slots is not None:
            kv, mask = self.slots(kv, get_lengths(mask)), None
        score, mask = self.score_with_positions(queries, kv, heads, rows), self.fill_mask(queries, kv, mask, rows)
        return self.normalize(score(queries[:, heads, rows], kv.keys[:, heads]), mask)


def get_lengths(mask: Tensor | None) -> Tensor | None:
    """The lengths (batch,) of texts of which a mask (batch, 1, 1, key) says which tokens are real."""
    return None if mask is None else mask.flatten(1).sum(-1)


def multi_head_attention(
    size: int, heads: int, *, kv_heads: int | None = None, bias: bool = True, **own: Any
) -> Attention:
    """All heads' projections in one matrix; what they saw is joined and mixed by another. `own` are the other arguments
    of `Attention`."""
    output = nn.Linear(size, size, bias=bias)
    nn.init.xavier_uniform_(output.weight)
    if bias:
        nn.init.zeros_(output.bias)
    return Attention(JointProjection(size, heads, kv_heads, bias=bias), output, heads=heads, **own)


def single_head_attention(
    size: int,
    score: Literal["dot", "scaled dot", "cosine", "general", "additive"],
    normalize: str = "softmax",
    kind: Kind = "cross",
) -> Attention:
    """A recurrent decoder's state attends to the encoder's states, which are their own values (Bahdanau, Luong)."""
    same = nn.Identity()
    query, key, chosen = same, same, dot  # type: tuple[nn.Module, nn.Module, Score]
    match score:
        case "scaled dot":
            chosen = scaled_dot
        case "cosine":
            chosen = Cosine()
        case "general":
            key = nn.Linear(size, size, bias=False)
        case "additive":
            query, key, chosen = nn.Linear(size, size), nn.Linear(size, size, bias=False), Additive(size)
    projections = SeparateProjections(query, key, same)
    return Attention(projections, same, axes=CROSS, score=chosen, **choose_normalizer(normalize, kind))
