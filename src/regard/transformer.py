"""The Transformer: blocks, encoder, decoder (Vaswani 2017; pre-norm as Xiong 2020)."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention, Memory, multi_head
from regard.config import TransformerConfig
from regard.layers import Dropout, LayerNorm, Linear
from regard.mask import causal
from regard.position import Learned, Sinusoidal

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Position-wise: widen, bend, narrow."""

    def __init__(self, size: int, inner: int, activation: str) -> None:
        super().__init__()
        self.widen, self.narrow = Linear(size, inner), Linear(inner, size)
        self.activation = ACTIVATIONS[activation]
        for part in (self.widen, self.narrow):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(.., size) -> (.., size)."""
        return self.narrow(self.activation(self.widen(x)))

    __call__ = forward


class Residual(nn.Module):
    """Add & norm around a part, before it (pre) or after (post)."""

    def __init__(self, size: int, dropout: float, where: Literal["pre", "post"]) -> None:
        super().__init__()
        self.norm, self.dropout, self.where = LayerNorm(size), Dropout(dropout), where

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x (.., size) -> (.., size)."""
        pre = self.where == "pre"
        x = x + self.dropout(part(self.norm(x) if pre else x))
        return x if pre else self.norm(x)

    __call__ = forward


class Block(nn.Module):
    """D1: self-attention, cross-attention if there is something to look at, feed-forward."""

    def __init__(self, config: TransformerConfig, *, cross: bool) -> None:
        super().__init__()
        size = config.size
        order = config.positions if config.positions in ("rotary", "linear") else "none"
        self.self_attention = multi_head(size, config.heads, bias=config.bias, order=order)
        self.cross_attention = multi_head(size, config.heads, bias=config.bias) if cross else None
        self.feedforward = FeedForward(size, config.feedforward, config.activation)
        self.residuals = nn.ModuleList(Residual(size, config.dropout, config.norm) for _ in range(3 if cross else 2))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        source: Memory | None = None,
        source_mask: Tensor | None = None,
        past: Memory | None = None,
    ) -> tuple[Tensor, Memory]:
        """x (batch, query, size) -> the same shape, and what later queries may look at: `past` and x together."""
        first, *middle, last = self.residuals
        memory: Memory | None = None

        def look_at_self(inputs: Tensor) -> Tensor:
            nonlocal memory
            queries, memory = self.self_attention.both(inputs, past)
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


def positions(config: TransformerConfig, longest: int) -> nn.Module | None:
    """What is added to the embeddings, if anything."""
    match config.positions:
        case "sinusoidal":
            return Sinusoidal(config.size)
        case "learned":
            return Learned(config.size, longest)
    return None


class Stack(nn.Module):
    """Blocks on top of each other, weights not shared; pre-norm ends with a norm."""

    def __init__(self, config: TransformerConfig, layers: int, longest: int, *, cross: bool) -> None:
        super().__init__()
        self.size = config.size
        self.positions = positions(config, longest)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, cross=cross) for _ in range(layers))
        self.norm = LayerNorm(config.size) if config.norm == "pre" else nn.Identity()

    def prepare(self, x: Tensor, start: int = 0) -> Tensor:
        """Embeddings (batch, query, size) scaled as published, with positions and dropout."""
        x = x * self.size**0.5
        dropped: Tensor = self.dropout(x if self.positions is None else self.positions(x, start))
        return dropped


class Encoder(Stack):
    """D2: every token looks at every token."""

    def __init__(self, config: TransformerConfig, longest: int) -> None:
        super().__init__(config, config.encoder_layers, longest, cross=False)

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
    mask: Tensor | None


class Decoder(Stack):
    """D4's right half: masked self-attention, cross-attention, feed-forward."""

    def __init__(self, config: TransformerConfig, longest: int) -> None:
        super().__init__(config, config.decoder_layers, longest, cross=True)

    def remember(self, states: Tensor, mask: Tensor | None) -> Source:
        """Project the encoder's states (batch, source, size) once for every block."""
        crosses: list[Attention] = [block.cross_attention for block in self.blocks]  # type: ignore[misc]
        return Source(tuple(cross.remember(states) for cross in crosses), mask)

    def forward(
        self, x: Tensor, source: Source, past: Sequence[Memory] | None = None
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        """Embeddings (batch, query, size) -> states, and the past with these inputs behind it."""
        start = past[0].keys.shape[-2] if past else 0
        mask = causal(x.shape[1], start + x.shape[1], x.device) if x.shape[1] > 1 else None
        x = self.prepare(x, start)
        memories = []
        for number, (block, memory) in enumerate(zip(self.blocks, source.memories, strict=True)):
            x, kept = block(x, mask, memory, source.mask, past[number] if past else None)
            memories.append(kept)
        return self.norm(x), tuple(memories)

    __call__ = forward
