"""Normalizers: scores (.., query, key) and a mask -> weights of the same shape.

Softmax chooses one key for each query, whatever the others choose. The structured ones are expectations under a
distribution over whole structures (Kim 2017): a weight is the marginal of its arc. A matching alone is balanced instead
(`attention/matching.py`). Segments have weights of their own, so they are in `nn/attention.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention.matching import sinkhorn
from regard.attention.trees import projective_marginals, tree_marginals

Normalize = Callable[[Tensor, Tensor | None], Tensor]


def softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the keys that may be seen; a query that may look at nothing gets zeros and finite gradients."""
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask


def soft_parents(marginals: Callable[[Tensor, Tensor], Tensor], scores: Tensor, mask: Tensor | None) -> Tensor:
    """Marginals of the trees of every text and head: scores (.., word, word) -> how likely each key is the parent of
    each query; the root is its own. The mask may say which words are real, the first ones of each text, and no more."""
    words = scores.shape[-1]
    if scores.shape[-2] != words:
        raise ValueError(f"a tree is of one text, but {scores.shape[-2]} queries look at {words} keys")
    real = torch.ones_like(scores[..., 0, :], dtype=torch.bool)
    if mask is not None:
        real = mask.any(-2).expand(real.shape)
        if mask.shape[-2] > 1 and not torch.equal(mask.expand(scores.shape), real[..., None] & real[..., None, :]):
            raise ValueError("a tree is of all words of a text: no mask but that of padding is possible")
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -3)
    return marginals(wide, real.flatten(0, -2).sum(-1)).view(scores.shape).to(scores.dtype)


def projective_trees(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Soft parents in trees whose arcs do not cross."""
    return soft_parents(projective_marginals, scores, mask)


def nonprojective_trees(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Soft parents in any trees."""
    return soft_parents(tree_marginals, scores, mask)


def matching(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every query its own key: rows and columns sum to 1. Of padding, the mask must say both sides: which pairs of a
    query and a key there are."""
    return sinkhorn(scores, mask).weights


NORMALIZERS: dict[str, Normalize] = {
    "softmax": softmax,
    "projective trees": projective_trees,
    "nonprojective trees": nonprojective_trees,
    "matching": matching,
}
"""By `model.normalize`."""
