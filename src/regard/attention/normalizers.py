"""Normalizers: scores (.., query, key) and a mask -> weights of the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor

Normalize = Callable[[Tensor, Tensor | None], Tensor]


def softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the keys that may be seen; a query that may look at nothing gets zeros and finite gradients."""
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask
