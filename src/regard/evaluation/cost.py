"""What layers cost, measured: time and memory by length, steps that wait for each other, and how far a layer reaches.

Recurrent, convolution, window, self-attention, Linformer and BigBird layers of one size read the same random states.
Nothing is recited: exponents are fitted to the times, steps are counted on the graph of the computation, and reach is
where a gradient arrives.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.sparse import Pattern
from regard.errors import InputError
from regard.nn.attention import SOURCE, Slots, multi_head_attention
from regard.training.memory import TensorBytes


class Sizes(NamedTuple):
    """What the measured layers are made with."""

    size: int = 256
    heads: int = 4
    kernel: int = 7  # tokens of a convolution
    window: int = 128  # tokens on either side
    slots: int = 256
    block: int = 64
    global_blocks: int = 1
    random_blocks: int = 3


class Recurrent(nn.LSTM):
    """An LSTM as a layer: states (batch, n, size) -> the same shape."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x)[0]
        return found


class Convolution(nn.Conv1d):
    """A convolution as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class SelfAttention(nn.Module):
    """Multi-head self-attention as a layer; `own` are arguments of `Attention`."""

    def __init__(self, sizes: Sizes, **own: Any) -> None:
        super().__init__()
        self.attention = multi_head_attention(sizes.size, sizes.heads, kind="self", axes=SOURCE, **own)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.attention(*self.attention.project_qkv(x))
        return seen


class Layer(NamedTuple):
    """A kind of layer: how it is made for n tokens, and what the books say of it."""

    make: Callable[[Sizes, int], nn.Module]
    work: str
    steps: str
    path: str
    exponent: int  # of n in its time


def make_slots(sizes: Sizes, n: int) -> nn.Module:
    return SelfAttention(sizes, slots=Slots(n, min(n, sizes.slots), None, shared=True))


def make_bigbird(sizes: Sizes, n: int) -> nn.Module:
    return SelfAttention(sizes, pattern=Pattern(sizes.block, 1, None, sizes.global_blocks, sizes.random_blocks))


LAYERS: dict[str, Layer] = {
    "recurrent": Layer(lambda own, n: Recurrent(own.size, own.size, batch_first=True), "n d^2", "n", "n", 1),
    "convolution": Layer(
        lambda own, n: Convolution(own.size, own.size, own.kernel, padding=own.kernel // 2), "k n d^2", "1", "n / k", 1
    ),
    "window": Layer(
        lambda own, n: SelfAttention(own, pattern=Pattern(own.window, width=own.window)), "n w d", "1", "n / w", 1
    ),
    "self-attention": Layer(lambda own, n: SelfAttention(own), "n^2 d", "1", "1", 2),
    "linformer": Layer(make_slots, "n k d", "1", "1", 1),
    "bigbird": Layer(make_bigbird, "n b d", "1", "2", 1),
}


class Cost(NamedTuple):
    """One layer at one length."""

    layer: str
    n: int
    forward: float  # seconds
    both: float  # seconds, forward and backward
    memory: int  # bytes of tensors that are alive at the same time at most, forward and backward


def time_layer(layer: nn.Module, x: Tensor, *, learn: bool, least: float = 0.2) -> float:
    """The fastest of several runs that take `least` seconds together, at least two."""
    found: list[float] = []
    while len(found) < 2 or sum(found) < least:
        begin = time.perf_counter()
        run_layer(layer, x, learn=learn)
        found.append(time.perf_counter() - begin)
    return min(found)


def run_layer(layer: nn.Module, x: Tensor, *, learn: bool) -> None:
    """Forward; with `learn`, and backward to the input and all weights."""
    with torch.set_grad_enabled(learn):
        found = layer(x)
        if learn:
            torch.autograd.grad(found.sum(), [x, *layer.parameters()])


def measure_memory(layer: nn.Module, x: Tensor) -> int:
    """Bytes of tensors that are alive at once at most, forward and backward, beside the weights."""
    with TensorBytes() as counted:
        run_layer(layer, x, learn=True)
    return int(counted.most)


def measure_costs(
    lengths: Sequence[int], sizes: Sizes, names: Sequence[str], limit: float, memory: int
) -> Iterator[Cost | str]:
    """Costs, layer by layer; in the place of lengths that would take more than `limit` seconds or `memory` bytes, as
    the lengths before tell, a sentence that says so."""
    for name in names:
        if name not in LAYERS:
            raise InputError(f"unknown layer {name!r}, expected {', '.join(LAYERS)}.")
        before: Cost | None = None
        for n in sorted(lengths):
            if before is not None and (too_much := exceeds(before, n, limit, memory)):
                yield f"{name} stops before {n:,} tokens: {too_much}."
                break
            layer, x = LAYERS[name].make(sizes, n), torch.randn(1, n, sizes.size, requires_grad=True)
            run_layer(layer, x, learn=True)  # what is made once is made now
            before = Cost(
                name, n, time_layer(layer, x, learn=False), time_layer(layer, x, learn=True), measure_memory(layer, x)
            )
            yield before


def exceeds(before: Cost, n: int, limit: float, memory: int) -> str:
    """What would be too much at a length, by the cost at one before; nothing, if it is not."""
    times = n / before.n
    seconds, size = before.both * times ** LAYERS[before.layer].exponent, before.memory * times
    if seconds > limit:
        return f"{seconds:,.0f} seconds expected, {limit:,.0f} allowed (--limit)"
    return f"{size / 1e9:,.1f} GB expected, {memory / 1e9:,.1f} free" if size > memory else ""


def fit_exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of logarithms: what power of n a cost grows with."""
    across, up = ([math.log(value) for value in side] for side in (lengths, values))
    middle, height = sum(across) / len(across), sum(up) / len(up)
    spread = sum((one - middle) ** 2 for one in across)
    return sum((one - middle) * (other - height) for one, other in zip(across, up, strict=True)) / spread


def count_steps(name: str, n: int, sizes: Sizes) -> int:
    """Operations that wait for each other in one layer: the longest chain in the graph of its computation."""
    x = torch.randn(1, n, sizes.size, dtype=torch.float64, requires_grad=True)  # oneDNN hides steps of float32
    found = LAYERS[name].make(sizes, n).double()(x)
    depths: dict[Any, int] = {}
    waiting = [found.grad_fn]
    while waiting:
        node = waiting[-1]
        inner = [one for one, _ in node.next_functions if one is not None]
        if missing := [one for one in inner if one not in depths]:
            waiting += missing
        else:
            depths[node] = 1 + max((depths[one] for one in inner), default=0)
            waiting.pop()
    return depths[found.grad_fn]


def count_layers(name: str, n: int, sizes: Sizes) -> int:
    """Layers on top of each other until the last token feels all others: where its gradient is not zero. 0: never."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = LAYERS[name].make(sizes, n).double()
        x = torch.randn(1, n, sizes.size, dtype=torch.float64, requires_grad=True)
        state = x
        for count in itertools.count(1):
            state = torch.tanh(layer(state))
            (slope,) = torch.autograd.grad(state[0, -1].sum(), x, retain_graph=True)
            if bool((slope[0] != 0).any(-1).all()):
                return count
            if count > n:
                break
    return 0


def find_crossing(costs: Sequence[Cost], name: str) -> int | None:
    """The shortest measured length from which on a layer is faster than self-attention, forward and backward."""
    full = {cost.n: cost.both for cost in costs if cost.layer == "self-attention"}
    own = {cost.n: cost.both for cost in costs if cost.layer == name and cost.n in full}
    slower = [n for n, seconds in own.items() if seconds >= full[n]]
    return next((n for n in sorted(own) if n > max(slower, default=0)), None)


SMALL = Sizes(size=8, heads=2, window=8, block=4, slots=16)
"""Sizes that show in short texts what happens in long ones."""
