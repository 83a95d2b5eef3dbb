"""The Transformer: blocks, encoder, decoder (Vaswani 2017; pre-norm as Xiong 2020)."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import causal
from regard.attention.positions import Learned, Sinusoidal, Start
from regard.config.config import BlockConfig
from regard.nn import pool
from regard.nn.attention import Attention, Memory, multi_head
from regard.nn.layers import Dropout, Linear, norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Position-wise: widen, bend, narrow. With a gate, what is bent multiplies a second widened input."""

    def __init__(self, size: int, inner: int, activation: str, *, gated: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.widen, self.narrow = Linear(size, inner, bias=bias), Linear(inner, size, bias=bias)
        self.gate = Linear(size, inner, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]
        for part in (self.widen, self.narrow, *([self.gate] if self.gate else [])):
            nn.init.xavier_uniform_(part.weight)
            if bias:
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(.., size) -> (.., size)."""
        if self.gate is not None:
            return self.narrow(self.activation(self.gate(x)) * self.widen(x))
        return self.narrow(self.activation(self.widen(x)))

    __call__ = forward


class Residual(nn.Module):
    """Add & norm around a part, before it (pre) or after (post)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm = norm(config.size, config.norm_kind, config.epsilon)
        self.dropout, self.where = Dropout(config.dropout), config.norm

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x (.., size) -> (.., size)."""
        pre = self.where == "pre"
        x = x + self.dropout(part(self.norm(x) if pre else x))
        return x if pre else self.norm(x)

    __call__ = forward


class Block(nn.Module):
    """D1: self-attention, cross-attention if there is something to look at, feed-forward."""

    def __init__(self, config: BlockConfig, *, cross: bool = False) -> None:
        super().__init__()
        heads = functools.partial(
            multi_head, config.size, config.heads, key_heads=config.key_heads, bias=config.bias, base=config.rotary_base
        )
        self.self_attention = heads(order=config.positions if config.positions in ("rotary", "linear") else "none")
        self.cross_attention = heads() if cross else None
        self.feedforward = FeedForward(
            config.size, config.feedforward, config.activation, gated=config.gated, bias=config.bias
        )
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3 if cross else 2))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        source: Memory | None = None,
        source_mask: Tensor | None = None,
        past: Memory | None = None,
        start: Start = 0,
    ) -> tuple[Tensor, Memory]:
        """x (batch, query, size) that stands at `start` -> the same shape, and what later queries may look at: `past`
        and x together."""
        first, *middle, last = self.residuals
        memory: Memory | None = None

        def look_at_self(inputs: Tensor) -> Tensor:
            nonlocal memory
            queries, memory = self.self_attention.both(inputs, past, start)
            looked: Tensor = self.self_attention(queries, memory, mask)
            return looked

        x = first(x, look_at_self)
        if self.cross_attention is not None and source is not None:
            cross = self.cross_attention
            x = middle[0](x, lambda inputs: folded(cross, inputs, source, source_mask))
        x = last(x, self.feedforward)
        assert memory is not None
        return x, memory

    __call__ = forward


def folded(attention: Attention, inputs: Tensor, source: Memory, mask: Tensor | None) -> Tensor:
    """Several hypotheses (rows) of one sentence look at the same source: as its queries, not as copies of it."""
    sentences = source.keys.shape[0]
    looked: Tensor = attention(attention.ask(inputs.reshape(sentences, -1, inputs.shape[-1])), source, mask)
    return looked.view(inputs.shape)


def positions(config: BlockConfig, longest: int) -> nn.Module | None:
    """What is added to the embeddings, if anything."""
    match config.positions:
        case "sinusoidal":
            return Sinusoidal(config.size)
        case "learned":
            return Learned(config.size, longest, config.size**0.5 if config.embedding_scale else 1.0)
    return None


class Stack(nn.Module):
    """Blocks on top of each other, weights not shared; pre-norm ends with a norm."""

    def __init__(self, config: BlockConfig, layers: int, longest: int, *, cross: bool = False) -> None:
        super().__init__()
        self.scale = config.size**0.5 if config.embedding_scale else 1.0
        self.positions = positions(config, longest)
        normed = norm(config.size, config.norm_kind, config.epsilon)
        self.embedding_norm = normed if config.embedding_norm else None
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, cross=cross) for _ in range(layers))
        self.norm = norm(config.size, config.norm_kind, config.epsilon) if config.norm == "pre" else nn.Identity()

    def prepare(self, x: Tensor, start: Start = 0) -> Tensor:
        """Embeddings (batch, query, size) scaled as published, with positions, norm and dropout by setting."""
        x = x if self.scale == 1 else x * self.scale
        x = x if self.positions is None else self.positions(x, start)
        dropped: Tensor = self.dropout(x if self.embedding_norm is None else self.embedding_norm(x))
        return dropped


class Encoder(Stack):
    """D2: every token looks at every token."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Embeddings (batch, source, size) -> states of the same shape; mask (batch, 1, 1, source)."""
        x = self.prepare(x)
        for block in self.blocks:
            x, _ = block(x, mask)
        normed: Tensor = self.norm(x)
        return normed


class Source(NamedTuple):
    """What a decoder looks at: each block's memory of the encoder's last layer. Rows are sentences."""

    memories: tuple[Memory, ...]
    mask: Tensor | None  # (sentences, 1, 1, source) None: there is no padding


def together(sources: Sequence[Source], mask: Tensor) -> Source:
    """One source of several, whose sentences have this mask together; shorter ones are filled up."""
    size = max(source.memories[0].keys.shape[2] for source in sources)

    def filled(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([F.pad(part, (0, 0, 0, size - part.shape[2])) for part in parts])

    columns = zip(*(source.memories for source in sources), strict=True)  # of each block, those of all sources
    memories = tuple(Memory(*map(filled, zip(*column, strict=True))) for column in columns)
    return Source(memories, F.pad(mask, (0, size - mask.shape[-1])))


class Cache(NamedTuple):
    """What a decoder has read. Rows are hypotheses."""

    memories: tuple[Memory, ...]
    start: Start = 0  # where the next token stands; (rows,) where that differs
    real: Tensor | None = None  # (rows, key) the keys that are of the row's own text; None: all

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.memories[0].keys.shape[-2] if self.memories else 0

    def latest(self, count: int) -> "Cache":
        """With no more keys than so many, the last."""
        if self.keys <= count:
            return self
        kept = slice(self.keys - count, None)
        memories = tuple(Memory(one.keys[..., kept, :], one.values[..., kept, :]) for one in self.memories)
        return self._replace(memories=memories, real=None if self.real is None else self.real[:, kept])


class Decoder(Stack):
    """D3, and D4's right half: masked self-attention, cross-attention if there is a source, feed-forward."""

    def remember(self, states: Tensor, mask: Tensor | None) -> Source:
        """Project the encoder's states (batch, source, size) once for every block."""
        crosses: list[Attention] = [block.cross_attention for block in self.blocks]  # type: ignore[misc]
        memories = [cross.remember(states) for cross in crosses]
        if torch.is_grad_enabled():
            return Source(tuple(memories), mask)
        # they will be looked at many times, which is quicker if heads lie together and keys are not too few
        many = len(states) > 1 and all(map(pool.quiet, self.blocks))
        room = max(0, pool.WIDE - states.shape[1]) if many else 0
        memories = [Memory(*(F.pad(part, (0, 0, 0, room)).contiguous() for part in one)) for one in memories]
        if room:
            real = states.new_ones(states.shape[:2], dtype=torch.bool)[:, None, None] if mask is None else mask
            mask = F.pad(real, (0, room))
        return Source(tuple(memories), mask)

    def begun(
        self, rows: int, sources: tuple[Memory, ...], mask: Tensor | None, past: Cache | None
    ) -> Cache | pool.Past | None:
        """The past of rows that go on token by token: a pool, where it is possible."""
        read = past or Cache(())
        known = (sources or read.memories)[:1]
        alone = bool(known) and len(known[0].keys) == rows  # one hypothesis a sentence
        return (pool.begin(self.blocks, sources, mask, *read) if alone else None) or past

    def forward(
        self,
        x: Tensor,
        source: Source | None = None,
        past: Cache | pool.Past | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Cache | pool.Past]:
        """Embeddings (batch, query, size) that stand behind the past -> states, and the past with them behind it;
        `real` (batch, query) leaves out inputs that are padding."""
        memories, source_mask = source or ((), None)
        if x.shape[1] == 1 and real is None and not isinstance(past, pool.Past):
            past = self.begun(len(x), memories, source_mask, past)
        if isinstance(past, pool.Past):
            x, past = pool.step(self.prepare(x, past.start)[:, 0], past, memories, source_mask)
            return self.norm(x)[:, None], past
        past = past or Cache(())
        count, before = x.shape[1], past.keys
        if real is not None or past.real is not None:
            new = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
            real = new if past.real is None else torch.cat([past.real, new], dim=1)
        mask = causal(count, before + count, x.device) if count > 1 else None
        if real is not None:
            mask = real[:, None, None] if mask is None else mask & real[:, None, None]
        x = self.prepare(x, past.start)
        kept = []
        for number, block in enumerate(self.blocks):
            looked = (memories[number], source_mask) if memories else (None, None)
            x, memory = block(x, mask, *looked, past.memories[number] if past.memories else None, past.start)
            kept.append(memory)
        return self.norm(x), Cache(tuple(kept), past.start + count, real)

    __call__ = forward
