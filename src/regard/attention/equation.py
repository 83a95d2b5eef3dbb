"""One equation. Everything in this package that is called attention is `attend` with other arguments:

weights = normalize(score(query, keys), mask)        # (batch, heads, query, key)
context = weights @ values
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.masks import causal
from regard.attention.normalizers import Normalize, softmax
from regard.attention.scores import Score, scaled_dot


class Attended(NamedTuple):
    """What came out, and why."""

    context: Tensor  # (batch, heads, query, size)
    weights: Tensor  # (batch, heads, query, key)


class KeyValues(NamedTuple):
    """What can be attended to: projected once, read often."""

    keys: Tensor  # (batch, heads, key, size)
    values: Tensor  # (batch, heads, key, size)

    def append(self, keys: Tensor, values: Tensor) -> "KeyValues":
        """These keys and values with others behind them."""
        return KeyValues(torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2))

    def repeat_heads(self, heads: int) -> "KeyValues":
        """Grouped-query attention: every head of keys and values as often as heads of queries share it."""
        times = heads // self.keys.shape[1]
        if times == 1:
            return self
        return KeyValues(self.keys.repeat_interleave(times, dim=1), self.values.repeat_interleave(times, dim=1))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    score: Score = scaled_dot,
    normalize: Normalize = softmax,
) -> Attended:
    """query (.., query, size), keys (.., key, size), values (.., key, size'), mask broadcasting to (.., query, key)."""
    weights = normalize(score(query, keys), mask)
    return Attended(weights @ values, weights)


def attend_fast(
    query: Tensor, kv: KeyValues, mask: Tensor | None, *, score: Score, normalize: Normalize, is_causal: bool = False
) -> Tensor:
    """The context alone, by whichever equal form is faster. This is the one place that chooses (docs/log.md has the
    figures). `is_causal` stands for the causal mask of as many queries as keys, which the fused kernel knows itself:
    it makes no tensor of queries times keys. Not all of its forms give a blind query zeros, so those are blanked."""
    size = query.shape[-2]
    if score is not scaled_dot or normalize is not softmax or not fused_is_faster(query, kv.keys.shape[-2]):
        mask = causal(size, size, query.device) if is_causal else mask
        return attend(query, kv.keys, kv.values, mask, score=score, normalize=normalize).context
    fused = F.scaled_dot_product_attention(query, kv.keys, kv.values, mask, is_causal=is_causal)
    if mask is None:
        return fused
    sees = mask.any(-1, keepdim=True)
    if query.is_cpu and bool(sees.all()):  # asking is cheaper than blanking nobody, where it is no round trip
        return fused
    return torch.where(sees, fused, 0.0)


LARGEST = 2**22
"""Queries times keys from which on a map is not kept for the gradient, whatever is faster."""


def fused_is_faster(query: Tensor, keys: int) -> bool:
    """Whether torch's fused kernel beats the plain product for queries (batch, heads, query, size) and so many keys: on
    a CPU neither in bfloat16, where its backward is slow, nor where something is learned of one query in each of many
    rows. Of long texts, the plain product's maps would not fit into memory."""
    if not query.is_cpu or query.shape[-2] * keys >= LARGEST:
        return True
    alone = torch.is_grad_enabled() and query.shape[-2] == 1 and len(query) >= 128
    return query.dtype != torch.bfloat16 and not alone
