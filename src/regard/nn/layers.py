"""Small parts that every family uses: norms, dropout, embeddings, positions that are added, the output layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.positions import Start, last_start, sinusoidal, table_rows
from regard.errors import InputError


def make_norm(size: int, kind: str = "layer", epsilon: float = 1e-5) -> nn.LayerNorm | nn.RMSNorm:
    """A norm over the last dimension."""
    return nn.LayerNorm(size, eps=epsilon) if kind == "layer" else nn.RMSNorm(size, eps=epsilon)


class Dropout(nn.Module):
    """Dropout. On a CPU one 64-bit random number decides eight elements, which is several times as fast (docs/log.md);
    then the probability is a multiple of 1/256, so only where one is near. What is kept is scaled by the share kept."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability, self.threshold = probability, round(probability * 256)
        self.near = abs(self.threshold / 256 - probability) < 0.02 * min(probability, 1 - probability)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or not self.probability:
            return x
        if not x.is_cpu or not self.near:
            return F.dropout(x, self.probability)
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        keep = (draws.view(torch.uint8)[: x.numel()] >= self.threshold).view(x.shape)
        return x * (keep.to(x.dtype) * (256 / (256 - self.threshold)))


def widen(logits: Tensor) -> Tensor:
    """At least 32 bits, in which losses and probabilities are made."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def make_embedding(vocab: int, size: int) -> nn.Embedding:
    """A random embedding whose rows have a length of about 1."""
    table = nn.Embedding(vocab, size)
    nn.init.normal_(table.weight, std=size**-0.5)
    return table


class OutputLayer(nn.Module):
    """The last layer: hidden (.., size) -> logits (.., vocab). With `tied`, its matrix is that embedding's."""

    def __init__(self, vocab: int, size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.weight = make_embedding(vocab, size).weight if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, hidden: Tensor) -> Tensor:
        """(.., size) -> (.., vocab)."""
        return F.linear(hidden, self.weight, self.bias)


class SinusoidalPositions(nn.Module):
    """Adds sinusoidal positions; works at any length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.table: Tensor
        self.register_buffer("table", sinusoidal(torch.arange(512), size), persistent=False)

    def forward(self, x: Tensor, start: Start = 0) -> Tensor:
        """x (batch, query, size), whose first row stands at `start`."""
        end = last_start(start) + x.shape[1]
        if end > len(self.table):
            self.table = sinusoidal(torch.arange(2 * end, device=x.device), self.size).to(self.table)
        return x + table_rows(self.table, start, x.shape[1])


class LearnedPositions(nn.Module):
    """Adds a learned vector per position; a longer input is an error. They start as long as embeddings, whose rows have
    a length of about `scale`: shorter ones are hardly seen, and learned late."""

    def __init__(self, size: int, longest: int, scale: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(longest, size) * (scale * size**-0.5))

    def forward(self, x: Tensor, start: Start = 0) -> Tensor:
        """x (batch, query, size), whose first row stands at `start`."""
        end = last_start(start) + x.shape[1]
        if end > len(self.table):
            raise InputError(
                f"an input of {end:,} positions came, but this model learned {len(self.table):,}. "
                "Shorten it, or train with sinusoidal, rotary or alibi positions."
            )
        return x + table_rows(self.table, start, x.shape[1])
