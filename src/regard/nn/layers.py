"""Small parts that every family uses: linear maps, norms, dropout, embeddings, the output."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkl, mkldnn

LARGE, STRIP, PACKED, STRIPED = 2**16, 32, 2**26, 2**28
"""How large a matrix is laid out anew, and how many of its outputs make a strip (docs/log.md has the figures); and how
many numbers a model may have to be packed, for oneDNN rounds more, which adds up in deep ones, and to be cut in strips,
for each time they are kept once more."""
ROWS = [
    *range(2, 8),
    *range(8, 16, 2),
    *range(16, 32, 4),
    *range(32, 64, 8),
    *range(64, 512, 16),
    *range(512, 1025, 64),
]
"""The numbers of rows that packed matrices are asked for: oneDNN keeps a program for each, about a megabyte."""


class Map(nn.Module):
    """A matrix (out, in) and a bias (out,) that multiply rows. In a model that is only used, a large one is also laid
    out in two other orders: packed, in which oneDNN multiplies many rows, and in strips of some outputs each, which
    multiply one row as fast as they are read."""

    weight: Tensor
    bias: Any  # None: there is none
    packed: Tensor | None = None
    strips: Tensor | None = None
    """(strips, in, STRIP); the last one is filled up."""
    edges: Tensor
    """The bias, or zeros, of the strips (strips, 1, STRIP)."""

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out)."""
        if not self.quick(x):
            return F.linear(x, self.weight, self.bias)
        width = x.shape[-1]
        rows = x.numel() // width
        if rows == 1 and self.strips is not None:
            strips = self.strips
            made = torch.baddbmm(self.edges, x.reshape(1, 1, width).expand(len(strips), 1, width), strips)
            return made.view(-1).narrow(0, 0, len(self.weight)).view(*x.shape[:-1], -1)
        if self.packed is None or not 1 < rows <= ROWS[-1]:
            return F.linear(x, self.weight, self.bias)
        wanted = ROWS[bisect.bisect_left(ROWS, rows)]
        if wanted == rows:
            return self.product(x)
        more = F.pad(x.reshape(rows, width), (0, 0, 0, wanted - rows))
        return self.product(more)[:rows].view(*x.shape[:-1], -1)

    __call__ = forward

    def quick(self, x: Tensor) -> bool:
        """Whether another order serves this input."""
        laid_out = self.packed is not None or self.strips is not None
        return laid_out and not torch.is_grad_enabled() and x.dtype == torch.float32 and x.is_cpu

    def product(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out), by the packed matrix."""
        return one_dnn()(x, self.packed, self.bias, "none", [], "")

    def lay_out(self, *, packed: bool, strips: bool) -> None:
        """Lay the matrix out anew, where there is a library that multiplies it so. From then on it must not change."""
        weight = self.weight.data
        if not weight.is_cpu or weight.dtype != torch.float32:
            return
        if packed and mkldnn.is_available():  # type: ignore[no-untyped-call]
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        if strips and mkl.is_available():  # type: ignore[no-untyped-call]
            room, bias = -len(weight) % STRIP, weight.new_zeros(len(weight)) if self.bias is None else self.bias.data
            self.strips = F.pad(weight, (0, 0, 0, room)).view(-1, STRIP, weight.shape[1]).transpose(1, 2).contiguous()
            self.edges = F.pad(bias, (0, room)).view(-1, 1, STRIP)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied: all but the other orders, so that a copy may change again."""
        state = {name: value for name, value in vars(self).items() if name not in ("packed", "strips", "edges")}
        return state | ({"parts": {}} if "parts" in state else {})


@functools.cache
def one_dnn() -> Callable[..., Tensor]:
    """oneDNN's product with a packed matrix."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


class Linear(Map, nn.Linear):
    """A linear map that is called directly: torch's way through hooks costs more than the product of one row."""


class RMSNorm(nn.RMSNorm):
    """A norm by the root of the mean square alone (Zhang 2019), called directly, as `Linear`."""

    __call__ = nn.RMSNorm.forward


class LayerNorm(nn.LayerNorm):
    """A layer norm that is called directly, as `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in the size -> the same shape."""
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, False)

    __call__ = forward


def norm(size: int, kind: str = "layer", epsilon: float = 1e-5) -> LayerNorm | RMSNorm:
    """A norm over the last dimension."""
    return LayerNorm(size, eps=epsilon) if kind == "layer" else RMSNorm(size, eps=epsilon)


def settle(model: nn.Module) -> None:
    """Make a model that will only be used, not changed any more, quick on the CPU it is on; its numbers stay the same
    but for rounding. Large matrices are laid out anew, and parts become plain attributes, which torch looks up
    slowly."""
    maps = [module for module in model.modules() if isinstance(module, Map)]
    numbers = sum(part.weight.numel() for part in maps)
    for part in maps:
        if part.weight.numel() >= LARGE:
            part.lay_out(packed=numbers <= PACKED, strips=numbers <= STRIPED)
    for module in model.modules():
        vars(module).update(module._modules | module._parameters)


class Dropout(nn.Module):
    """Dropout whose probability is a multiple of 1/256: one 64-bit random number decides eight elements, which is
    several times as fast on a CPU (docs/log.md). What is kept is scaled by the share that is kept."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.threshold = min(255, max(1, round(probability * 256))) if probability else 0

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or not self.threshold:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.threshold / 256)
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        keep = (draws.view(torch.uint8)[: x.numel()] >= self.threshold).view(x.shape)
        return x * (keep.to(x.dtype) * (256 / (256 - self.threshold)))

    __call__ = forward


def wide(logits: Tensor) -> Tensor:
    """At least 32 bits, in which losses and probabilities are made."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (rows, vocab) of logits, which are not needed any more: where nothing is learned they are
    written over, for a large table takes long to write anew."""
    logits = wide(logits)
    return logits.log_softmax(-1) if torch.is_grad_enabled() else torch.log_softmax(logits, -1, out=logits)


def embedding(vocab: int, size: int) -> nn.Embedding:
    """A random embedding whose rows have a length of about 1."""
    table = nn.Embedding(vocab, size)
    nn.init.normal_(table.weight, std=size**-0.5)
    return table


class Output(Map):
    """The last layer: hidden (.., size) -> logits (.., vocab). With `tied`, its matrix is that embedding's."""

    def __init__(self, vocab: int, size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.weight = embedding(vocab, size).weight if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(vocab))
