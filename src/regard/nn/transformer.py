"""The Transformer: blocks, encoder, decoder (Vaswani 2017; pre-norm as Xiong 2020)."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention.equation import KeyValues
from regard.attention.masks import causal
from regard.attention.positions import Start
from regard.attention.sparse import Pattern, sparse_mask
from regard.config.model import WHOLE, BlockConfig
from regard.nn.attention import (
    CROSS,
    SOURCE,
    TARGET,
    Attention,
    Axes,
    Kind,
    Slots,
    choose_normalizer,
    multi_head_attention,
)
from regard.nn.kv_cache import KVCache
from regard.nn.layers import Dropout, LearnedPositions, SinusoidalPositions, make_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward: project up, activate, project down. With a gate (GLU), the activated gate multiplies
    the projection up."""

    def __init__(self, size: int, inner: int, activation: str, *, gated: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner, bias=bias), nn.Linear(inner, size, bias=bias)
        self.gate = nn.Linear(size, inner, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]
        for part in (self.up, self.down, *([self.gate] if self.gate else [])):
            nn.init.xavier_uniform_(part.weight)
            if bias:
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(.., size) -> (.., size)."""
        up = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        down: Tensor = self.down(up)
        return down


class Residual(nn.Module):
    """Add & norm around a part, before it (pre-norm) or after (post-norm)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm = make_norm(config.size, config.norm_kind, config.norm_epsilon)
        self.dropout, self.pre = Dropout(config.dropout), config.norm == "pre"

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x (.., size) -> (.., size)."""
        x = x + self.dropout(part(self.norm(x) if self.pre else x))
        return x if self.pre else self.norm(x)


class Block(nn.Module):
    """Self-attention, cross-attention if there is a source, feed-forward; a residual and a norm around each."""

    def __init__(
        self, config: BlockConfig, axes: Axes, layer: int = 0, *, cross: Kind | None = None, slots: Slots | None = None
    ) -> None:
        """`cross` is the kind of attention to a source, if there is one."""
        super().__init__()
        heads = functools.partial(
            multi_head_attention, config.size, config.heads, layer=layer, kv_heads=config.kv_heads, bias=config.bias
        )
        inside = config.positions if config.positions in ("rotary", "alibi") else "none"
        rows = "softmax" if config.normalize in WHOLE else config.normalize  # what a row can do by itself
        own = choose_normalizer(config.normalize if axes is SOURCE else rows, "self")
        own |= {"pattern": make_pattern(config, layer, causal=axes is TARGET), "slots": slots}
        own["causal"] = axes is TARGET
        self.self_attention = heads(axes=axes, positions=inside, rotary_base=config.rotary_base, **own)
        self.cross_attention = heads(axes=CROSS, **choose_normalizer(rows, cross)) if cross else None
        self.feedforward = FeedForward(
            config.size, config.feedforward, config.activation, gated=config.gated, bias=config.bias
        )
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3 if cross else 2))
        self.checkpoint_activations = False

    def project_source(self, states: Tensor) -> KeyValues:
        """An encoder's states (batch, source, size) as the keys and values of this block's cross-attention."""
        assert self.cross_attention is not None
        return self.cross_attention.project_kv(states)

    def forward(self, x: Tensor, *inputs: Any) -> tuple[Tensor, KeyValues]:
        """As `compute`; where activations are checkpointed, its inside is forgotten and computed again for the
        gradient."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            again: tuple[Tensor, KeyValues] = checkpoint(self.compute, x, *inputs, use_reentrant=False)
            return again
        return self.compute(x, *inputs)

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        source: Tensor | KeyValues | None = None,
        source_mask: Tensor | None = None,
        past: KeyValues | None = None,
        start: Start = 0,
    ) -> tuple[Tensor, KeyValues]:
        """x (batch, query, size) that stands at `start` -> the same shape, and its keys and values behind the past.
        `source` are an encoder's states (batch, source, size), or their keys and values where those were projected."""
        first, *middle, last = self.residuals
        kv: KeyValues | None = None

        def attend_self(inputs: Tensor) -> Tensor:
            nonlocal kv
            queries, kv = self.self_attention.project_qkv(inputs, past, start)
            seen: Tensor = self.self_attention(queries, kv, mask)
            return seen

        x = first(x, attend_self)
        if self.cross_attention is not None and source is not None:
            cross = self.cross_attention
            memory = source if isinstance(source, KeyValues) else cross.project_kv(source)
            x = middle[0](x, lambda inputs: cross.attend_source(inputs, memory, source_mask))
        x = last(x, self.feedforward)
        assert kv is not None
        return x, kv


def make_pattern(config: BlockConfig, layer: int, *, causal: bool) -> Pattern | None:
    """Which keys a token sees, where not all."""
    match config.attention:
        case "window":
            return Pattern(config.window_size, width=config.window_size, causal=causal)
        case "bigbird":
            seed = config.pattern_seed + 1_000_003 * layer
            blocks = (config.near_blocks, None, config.global_blocks, config.random_blocks)
            return Pattern(config.block, *blocks, seed, causal)
    return None


def make_slots(config: BlockConfig, layers: int, longest: int) -> list[Slots | None]:
    """Linformer's projections for each layer of an encoder, by what shares them."""
    if config.attention != "linformer":
        return [None] * layers
    shared = config.share_slots in ("keys and values", "layers")
    heads = config.heads if config.share_slots == "nothing" else None
    make = functools.partial(Slots, longest, config.slots, heads, shared=shared)
    return [make()] * layers if config.share_slots == "layers" else [make() for _ in range(layers)]


def make_positions(config: BlockConfig, longest: int) -> nn.Module | None:
    """What is added to the embeddings, if anything."""
    match config.positions:
        case "sinusoidal":
            return SinusoidalPositions(config.size)
        case "learned":
            return LearnedPositions(config.size, longest, config.size**0.5 if config.embedding_scale else 1.0)
    return None


class Stack(nn.Module):
    """Blocks on top of each other, weights not shared; pre-norm ends with a norm."""

    axes: Axes  # of the maps of self-attention

    def __init__(self, config: BlockConfig, layers: int, longest: int, *, cross: Kind | None = None) -> None:
        super().__init__()
        self.scale = config.size**0.5 if config.embedding_scale else 1.0
        self.positions = make_positions(config, longest)
        norm = functools.partial(make_norm, config.size, config.norm_kind, config.norm_epsilon)
        self.embedding_norm = norm() if config.embedding_norm else None
        self.dropout = Dropout(config.dropout)
        slots = make_slots(config, layers, longest) if self.axes is SOURCE else [None] * layers
        self.blocks = nn.ModuleList(
            Block(config, self.axes, layer, cross=cross, slots=own) for layer, own in enumerate(slots)
        )
        self.norm = norm() if config.norm == "pre" else nn.Identity()
        self.whole, self.sparse = config.normalize in WHOLE, config.attention in ("window", "bigbird")

    def prepare(self, x: Tensor, start: Start = 0) -> Tensor:
        """Embeddings (batch, query, size) scaled as published, with positions, norm and dropout by setting."""
        x = x if self.scale == 1 else x * self.scale
        x = x if self.positions is None else self.positions(x, start)
        dropped: Tensor = self.dropout(x if self.embedding_norm is None else self.embedding_norm(x))
        return dropped


class Encoder(Stack):
    """Every token attends to every token."""

    axes = SOURCE

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Embeddings (batch, source, size) -> states of the same shape; mask (batch, 1, 1, source)."""
        x = self.prepare(x)
        if mask is not None and self.whole:
            mask = mask & mask.mT  # padding is no part of a structure, neither as a key nor as a query
        for block in self.blocks:
            x, _ = block(x, mask)
        normed: Tensor = self.norm(x)
        return normed


class EncodedSource(NamedTuple):
    """What a decoder attends to. Rows are sentences."""

    states: Tensor  # (sentences, source, size)
    mask: Tensor | None  # (sentences, 1, 1, source) None: there is no padding
    projected: tuple[KeyValues, ...] = ()  # their keys and values in each block, where they are read many times


class Decoder(Stack):
    """Causal self-attention, cross-attention if there is a source, feed-forward."""

    axes = TARGET

    def project_source(self, source: EncodedSource) -> EncodedSource:
        """The source with its keys and values in every block: prefill, before it is decoded token by token."""
        blocks: Iterable[Block] = self.blocks  # type: ignore[assignment]
        projected = tuple(block.project_source(source.states) for block in blocks)
        if not torch.is_grad_enabled():  # they are read at every step: let each head lie together
            projected = tuple(KeyValues(kv.keys.contiguous(), kv.values.contiguous()) for kv in projected)
        return source._replace(projected=projected)

    def forward(
        self, x: Tensor, source: EncodedSource | None = None, cache: KVCache | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """Embeddings (batch, query, size) that stand behind the cache -> states, and the cache with them behind it;
        `real` (batch, query) leaves out inputs that are padding."""
        cache = cache or KVCache()
        count = x.shape[1]
        if real is not None or cache.real is not None:
            new = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real
            real = new if cache.real is None else torch.cat([cache.real, new], dim=1)
        masks = self.make_masks(count, cache, real, x.device)
        x = self.prepare(x, cache.start)
        states, source_mask, projected = source or (None, None, ())
        kept = []
        for number, (block, mask) in enumerate(zip(self.blocks, masks, strict=True)):
            past = cache.blocks[number] if cache.blocks else None
            seen = projected[number] if projected else states
            x, kv = block(x, mask, seen, source_mask, past, cache.start)
            kept.append(kv)
        return self.norm(x), KVCache(tuple(kept), cache.start + count, real)

    def make_masks(
        self, count: int, cache: KVCache, real: Tensor | None, device: torch.device
    ) -> Sequence[Tensor | None]:
        """The mask of every block for `count` inputs behind the cache. A whole text, from its beginning, needs none:
        blocks are causal themselves."""
        before, blocks = cache.length, len(self.blocks)
        if real is None and before == 0:
            return [None] * blocks
        if not self.sparse:
            mask = causal(count, before + count, device) if count > 1 else None
            if real is not None:
                mask = real[:, None, None] if mask is None else mask & real[:, None, None]
            return [mask] * blocks
        places = torch.arange(before + count, device=device) - before
        places = places + (cache.start if isinstance(cache.start, int) else cache.start[:, None])
        masks: list[Tensor | None] = []
        for block in self.blocks:
            attention: Attention = block.self_attention  # type: ignore[assignment]
            assert attention.pattern is not None
            length = int(places.max()) + 1
            mask = sparse_mask(attention.pattern, places[..., before:], places, length)
            mask = mask[:, None] if mask.dim() > 2 else mask
            masks.append(mask if real is None else mask & real[:, None, None])
        return masks
