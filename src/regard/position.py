"""Order: attention alone cannot tell 'I ate lunch' from 'lunch ate I'. Four ways to tell it."""

import math

import torch
from torch import Tensor, nn

from regard.errors import InputError


def sinusoidal(positions: Tensor, size: int) -> Tensor:
    """Section 3.5, Vaswani 2017: positions (n,) -> (n, size), sin at even and cos at odd channels."""
    rates = torch.exp(torch.arange(0, size, 2, device=positions.device) * (-math.log(10_000) / size))
    angles = positions[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[:, :size]


class Sinusoidal(nn.Module):
    """Adds sinusoidal positions; works at any length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.table: Tensor
        self.register_buffer("table", sinusoidal(torch.arange(512), size), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (batch, query, size), whose first row stands at `start`."""
        end = start + x.shape[1]
        if end > len(self.table):
            self.table = sinusoidal(torch.arange(2 * end, device=x.device), self.size).to(self.table)
        return x + self.table[start:end]

    __call__ = forward


class Learned(nn.Module):
    """Adds a learned vector per position; a longer input is an error."""

    def __init__(self, size: int, longest: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(longest, size) * size**-0.5)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (batch, query, size), whose first row stands at `start`."""
        end = start + x.shape[1]
        if end > len(self.table):
            raise InputError(
                f"an input of {end:,} positions came, but this model learned {len(self.table):,}. "
                "Shorten it, or train with sinusoidal, rotary or linear positions."
            )
        return x + self.table[start:end]

    __call__ = forward


def rotary(x: Tensor, start: int = 0) -> Tensor:
    """Su 2021: turn the pairs (i, i + size/2) of queries or keys (batch, heads, n, size) by an angle that grows with
    the position, so that a dot product depends on the distance alone. The first row stands at `start`."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    positions = torch.arange(start, start + x.shape[-2], device=x.device, dtype=wide)
    rates = torch.exp(torch.arange(half, device=x.device, dtype=wide) * (-math.log(10_000) / half))
    angles = positions[:, None] * rates
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def linear_bias(heads: int, distance: Tensor) -> Tensor:
    """Press 2022: each head's own slope times how far away a key stands: (query, key) -> (heads, query, key)."""
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=distance.device))
    return -slopes[:, None, None] * distance.abs()
