"""Scores: how well a key answers a query. (.., query, size), (.., key, size) -> (.., query, key).

Project first, score after: then dot and additive are the only primitives; Luong's general score is a dot product with
projected keys. The additive score and the cosine have weights, so they are in `nn/attention.py`.
"""

import math
from collections.abc import Callable

from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]


def dot(query: Tensor, keys: Tensor) -> Tensor:
    """The dot product."""
    return query @ keys.mT


def scaled_dot(query: Tensor, keys: Tensor) -> Tensor:
    """The dot product over the root of its size: its variance stays 1, so the softmax does not peak."""
    return dot(query / math.sqrt(query.shape[-1]), keys)


def biased(score: Score, bias: Tensor) -> Score:
    """A score plus a bias that broadcasts against (batch, heads, query, key)."""
    return lambda query, keys: score(query, keys) + bias.to(query.dtype)
