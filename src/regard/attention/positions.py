"""Order: attention alone cannot tell 'I ate lunch' from 'lunch ate I'. Sinusoids, rotary angles, ALiBi."""

import functools
import math

import torch
from torch import Tensor


def sinusoidal(positions: Tensor, size: int) -> Tensor:
    """Section 3.5, Vaswani 2017: positions (n,) -> (n, size), sin at even and cos at odd channels."""
    rates = torch.exp(torch.arange(0, size, 2, device=positions.device) * (-math.log(10_000) / size))
    angles = positions[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[:, :size]


Start = int | Tensor
"""Where the first row of an input stands: the same for the whole batch, or a place (batch,) for each."""


def positions_from(start: Start, count: int, device: torch.device) -> Tensor:
    """The positions of `count` rows from `start` on: (count,), or (batch, count). What stands before the beginning is
    padding, and counts as 0."""
    steps = torch.arange(count, device=device)
    return (start[:, None] + steps).clamp(min=0) if isinstance(start, Tensor) else start + steps


def last_start(start: Start) -> int:
    """The largest of the starts."""
    return int(start.max()) if isinstance(start, Tensor) else start


def table_rows(table: Tensor, start: Start, count: int) -> Tensor:
    """The rows of a table (position, size) that `count` positions from `start` on want."""
    return (
        table[positions_from(start, count, table.device)] if isinstance(start, Tensor) else table[start : start + count]
    )


def rotate(x: Tensor, start: Start = 0, base: float = 10_000.0) -> Tensor:
    """RoPE, Su 2021: rotate the pairs (i, i + size/2) of queries or keys (batch, heads, n, size) by an angle that grows
    with the position, so that a dot product depends on the distance alone. The first row stands at `start`."""
    half = x.shape[-1] // 2
    if isinstance(start, Tensor):
        sin, cos = rotary_angles(positions_from(start, x.shape[-2], x.device), half, base, x.dtype)
    else:
        end = start + x.shape[-2]
        most = max(512, 1 << (end - 1).bit_length())
        table = rotary_table(most, half, base, x.dtype, x.device, torch.is_inference_mode_enabled())
        sin, cos = (part[start:end] for part in table)
    return torch.addcmul(x * cos, x.roll(half, -1), sin)


def rotary_angles(positions: Tensor, half: int, base: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sine and cosine of every pair's angle at positions (n,) or (batch, n): (n, 2 * half), or (batch, 1, n, 2 * half),
    once for each of the pair; the first one's sine with its sign turned, by which it is multiplied with the other."""
    wide = torch.promote_types(kind, torch.float32)
    rates = torch.exp(torch.arange(half, device=positions.device, dtype=wide) * (-math.log(base) / half))
    angles = positions.to(wide)[..., None] * rates
    angles = angles[:, None] if angles.dim() == 3 else angles
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([-sin, sin], dim=-1).to(kind), torch.cat([cos, cos], dim=-1).to(kind)


@functools.lru_cache(maxsize=4)
def rotary_table(
    most: int, half: int, base: float, kind: torch.dtype, device: torch.device, inference: bool
) -> tuple[Tensor, Tensor]:
    """As `rotary_angles`, of the first positions; what was made in inference mode is of no use while training."""
    return rotary_angles(torch.arange(most, device=device), half, base, kind)


def alibi(heads: int, distance: Tensor) -> Tensor:
    """ALiBi, Press 2022: each head's own slope times how far away a key stands: (query, key) -> (heads, query, key).
    Heads beyond a power of two take every other slope of twice as many, as in the authors' code."""
    power = 1 << (heads.bit_length() - 1)
    places = torch.cat([torch.arange(1, power + 1), torch.arange(heads - power) + 0.5])
    slopes = 2.0 ** (-8.0 / power * places.to(distance.device))
    return -slopes[:, None, None] * distance.abs()
