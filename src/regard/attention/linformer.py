"""Linformer, Wang 2020: keys and values are projected along the sequence to a fixed number of slots, O(n k)."""

from torch import Tensor

from regard.attention.masks import padding


def project_sequence(x: Tensor, projection: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Keys or values (batch, heads, n, size) -> (batch, heads, slots, size), by a projection (longest, slots) or
    (heads, longest, slots) of which the first n rows are used. `lengths` (batch,) are those of rows without the padding
    at their end, which adds nothing. A shorter text has fewer terms, so its sums are scaled to those of the longest:
    what is the same at every token is the same in every slot, however long a text is."""
    longest, n = projection.shape[-2], x.shape[-2]
    if lengths is None:
        return projection[..., :n, :].mT @ x * (longest / n)
    scale = longest / lengths.clamp(min=1).to(x.dtype)[:, None, None, None]
    return projection[..., :n, :].mT @ (x * padding(lengths, n).mT) * scale
