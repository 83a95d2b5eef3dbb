"""Examples -> tensors: the only place where lengths meet tensors.

An epoch is a pure function of the seed and its number, so a run that is resumed sees what it would have seen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.config import TextConfig
from regard.data import Example, Ledger
from regard.errors import DataError
from regard.text import BOS, EOS, PAD, Vocabulary


class Pair(NamedTuple):
    """One example as ids: the source ends in <eos>; the target has neither <bos> nor <eos>."""

    source: list[int]
    target: list[int]


class Batch(NamedTuple):
    """Padded ids, batch first. `target` holds what is fed (<bos> a b), `answer` what is wanted (a b <eos>)."""

    source: Tensor  # (batch, source)
    lengths: Tensor  # (batch,) tokens of each source
    target: Tensor  # (batch, target)
    answer: Tensor  # (batch, target), PAD beyond the end

    @property
    def tokens(self) -> int:
        """Wanted tokens."""
        return int((self.answer != PAD).sum())


def encode(
    examples: Sequence[Example], source: Vocabulary, target: Vocabulary, text: TextConfig, ledger: Ledger
) -> list[Pair]:
    """Turn examples into ids; what is too long is dropped, cut or an error, and counted."""
    sources = source.encode_all([example.source for example in examples])
    targets = target.encode_all([example.target for example in examples])
    pairs = []
    for example, left, right in zip(examples, sources, targets, strict=True):
        longest = max(len(left.ids), len(right.ids))
        if longest > text.max_length:
            if text.longer == "error":
                raise DataError(
                    f"{example.where} has {longest:,} tokens, at most {text.max_length:,} fit (text.max_length). "
                    "Set text.longer to drop or cut."
                )
            if text.longer == "drop":
                ledger.drop("too long", example.where)
                ledger.kept -= 1
                continue
            ledger.cut += 1
        pairs.append(Pair([*left.ids[: text.max_length], EOS], right.ids[: text.max_length]))
    return pairs


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids as one tensor (batch, longest), PAD at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def source_batch(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Padded sources (batch, source) and their lengths (batch,)."""
    return padded(rows), torch.tensor([len(row) for row in rows])


def collate(pairs: Sequence[Pair]) -> Batch:
    """Pairs as one batch."""
    source, lengths = source_batch([pair.source for pair in pairs])
    target = padded([[BOS, *pair.target] for pair in pairs])
    return Batch(source, lengths, target, padded([[*pair.target, EOS] for pair in pairs]))


def epoch(pairs: Sequence[Pair], budget: int, seed: int, number: int) -> list[list[int]]:
    """Indices of the batches of epoch `number`: pairs of like lengths together, rows times the longer side's longest
    within the budget, in an order that only the seed and the number decide."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    noise = torch.rand(len(pairs), generator=generator).tolist()

    def place(index: int) -> tuple[int, int, float]:
        """By the target's length, then the source's, there and back again: neighbours are alike on both sides."""
        source, target = len(pairs[index].source), len(pairs[index].target)
        return target, source if target % 2 else -source, noise[index]

    order = sorted(range(len(pairs)), key=place)
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        size = max(len(pairs[index].source), len(pairs[index].target) + 1)
        longest = max(longest, size)
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = size
        batches[-1].append(index)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def padding_share(pairs: Sequence[Pair], batches: Sequence[Sequence[int]]) -> float:
    """The share of cells, on both sides, that hold nothing."""
    cells = tokens = 0
    for batch in batches:
        for lengths in ([len(pairs[i].source) for i in batch], [len(pairs[i].target) + 1 for i in batch]):
            cells += max(lengths) * len(lengths)
            tokens += sum(lengths)
    return 1 - tokens / cells
