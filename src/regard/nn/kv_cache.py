"""The KV cache: keys and values of the tokens that a decoder has read, block by block."""

from typing import NamedTuple

from torch import Tensor

from regard.attention.equation import KeyValues
from regard.attention.positions import Start


class KVCache(NamedTuple):
    """What a decoder has read. Rows are hypotheses."""

    blocks: tuple[KeyValues, ...] = ()  # of each block: (rows, heads, key, size)
    start: Start = 0  # where the next token stands; (rows,) where that differs
    real: Tensor | None = None  # (rows, key) the keys that are of the row's own text, not padding; None: all

    @property
    def length(self) -> int:
        """How many keys there are."""
        return self.blocks[0].keys.shape[-2] if self.blocks else 0

    def keep_latest(self, count: int) -> "KVCache":
        """With no more keys than so many, the last: how a context slides."""
        if self.length <= count:
            return self
        kept = slice(self.length - count, None)
        blocks = tuple(KeyValues(one.keys[..., kept, :], one.values[..., kept, :]) for one in self.blocks)
        return self._replace(blocks=blocks, real=None if self.real is None else self.real[:, kept])
