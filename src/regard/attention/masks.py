"""Who may look where: boolean tensors, True = may look, joined with `&` and `|`.

All broadcast against scores of shape (batch, heads, query, key).
"""

import functools

import torch
from torch import Tensor


def padding(lengths: Tensor, size: int) -> Tensor:
    """Keys that exist: lengths (batch,) -> (batch, 1, 1, key)."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None]


@functools.lru_cache(maxsize=8)
def causal(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Keys that are not ahead: (query, key). The last query stands at the last key. The same object for the same sizes,
    so that whoever gets it can know it; it must not be changed."""
    with torch.inference_mode(False):  # it serves training too
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window(queries: int, keys: int, width: int, device: torch.device | None = None) -> Tensor:
    """Keys at most `width` positions away on either side: (query, key)."""
    return distance(queries, keys, device).abs() <= width


def distance(queries: int, keys: int, device: torch.device | None = None, rows: slice = slice(None)) -> Tensor:
    """How far ahead of its query a key stands: (query, key), of all queries or of some rows of them. The last query
    stands at the last key."""
    return torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[rows, None]
