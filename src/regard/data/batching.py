"""Rows of token ids -> padded batches: the only place where lengths meet tensors.

An epoch is a pure function of the seed and its number, so a run that is resumed sees what it would have seen.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from regard.config.run import TrainConfig
from regard.data.encoding import Picture, stack_pictures
from regard.data.vocabulary import BOS, EOS, PAD


class Row(NamedTuple):
    """One training example as ids. A target that is a sequence has neither <bos> nor <eos>, a batch puts them there;
    one that is not (labels, the ends of a span) is taken as it is."""

    source: Sequence[int]  # of an image, a `Picture`
    target: list[int]
    sequence: bool = True


class Batch(NamedTuple):
    """Padded ids, batch first. `target` holds what is fed (<bos> a b), `answer` what is wanted (a b <eos>)."""

    source: Tensor  # (batch, source); of images, pixels (batch, 3, size, size) or features (batch, cells, depth)
    lengths: Tensor  # (batch,) tokens of each source
    target: Tensor  # (batch, target)
    answer: Tensor  # (batch, target), PAD beyond the end
    rewards: Tensor | None = None  # (batch,) how much better than expected each answer is, where they were sampled

    @property
    def tokens(self) -> int:
        """Wanted tokens; a row that wants none, a text without labels, counts as one."""
        return int((self.answer != PAD).sum(1).clamp(min=1).sum())

    def select(self, rows: slice) -> "Batch":
        """Some of its rows."""
        return Batch(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device."""
        moved = [tensor.to(device) for tensor in self if tensor is not None]
        return Batch(*moved)


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids as one tensor (batch, longest), PAD at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def pad_sources(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Padded sources (batch, source) and their lengths (batch,); images as `stack_pictures` has them, whose lengths are
    the cells of their grids."""
    pictures = [row for row in rows if isinstance(row, Picture)]
    found = stack_pictures(pictures) if pictures else pad(rows)
    return found, torch.tensor([len(row) for row in rows])


def collate(rows: Sequence[Row]) -> Batch:
    """Rows as one batch."""
    source, lengths = pad_sources([row.source for row in rows])
    if not rows[0].sequence:
        answer = pad([row.target for row in rows])
        return Batch(source, lengths, answer, answer)
    target = pad([[BOS, *row.target] for row in rows])
    return Batch(source, lengths, target, pad([[*row.target, EOS] for row in rows]))


def plan_epoch(rows: Sequence[Row], budget: int, seed: int, number: int) -> list[list[int]]:
    """Indices of the batches of epoch `number`: rows of like lengths together, rows times the longer side's longest
    within the budget, in an order that only the seed and the number decide."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    noise = torch.rand(len(rows), generator=generator).tolist()

    def place(index: int) -> tuple[int, int, float]:
        """By the target's length, then the source's, there and back again: neighbours are alike on both sides."""
        source, target = len(rows[index].source), len(rows[index].target)
        return target, source if target % 2 else -source, noise[index]

    order = sorted(range(len(rows)), key=place)
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        size = max(len(rows[index].source), len(rows[index].target) + 1)
        longest = max(longest, size)
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = size
        batches[-1].append(index)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def iterate_updates(rows: Sequence[Row], config: TrainConfig, start: int) -> Iterator[list[Batch]]:
    """Endless updates, each of `accumulate` batches, from update `start` on, as if the first had been drawn too."""
    return ([collate(batch) for batch in update] for update in draw_updates(rows, config, start))


def draw_updates(rows: Sequence[Row], config: TrainConfig, start: int) -> Iterator[list[list[Row]]]:
    """As `iterate_updates`: the rows of every batch."""
    epochs = (plan_epoch(rows, config.batch_tokens, config.seed, number) for number in itertools.count())
    batches = itertools.islice(itertools.chain.from_iterable(epochs), start * config.accumulate, None)
    while True:
        yield [[rows[i] for i in batch] for batch in itertools.islice(batches, config.accumulate)]


def plan_windows(tokens: int, width: int, budget: int) -> tuple[int, int]:
    """The rows of every batch, and the batches of an epoch, of a text that is read in windows of at most `width`
    tokens."""
    width = min(width, tokens - 1)
    rows = max(1, min(budget // width, (tokens - 1) // width))
    return rows, math.ceil(math.ceil(tokens / rows) / width)


def read_windows(stream: Sequence[int], width: int, config: TrainConfig, start: int) -> Iterator[list[Batch]]:
    """Endless updates over one long text, from update `start` on: each row of a batch goes on where that of the batch
    before ended, at most `width` tokens at a time, so an epoch reads every token once. Where the rows begin is drawn
    anew for every epoch; all of it is a pure function of the seed and the update's number."""
    text = torch.from_numpy(numpy.array(stream))  # several times as fast as torch.tensor
    rows, each = plan_windows(len(text), width, config.batch_tokens)
    length = math.ceil(len(text) / rows)
    edges = torch.arange(rows + 1)[:, None] * len(text) // rows  # rows are as long as others, or one token shorter

    @functools.lru_cache(1)
    def shift(turn: int) -> int:
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + turn)
        return int(torch.randint(len(text), (), generator=generator))

    def read(number: int) -> Batch:
        turn, place = divmod(number, each)
        places = edges[:-1] + torch.arange(length * place // each, length * (place + 1) // each + 1)
        ids = text[(places + shift(turn)) % len(text)]
        left_out = (ids[:, 1:] == BOS) | (
            places[:, :-1] >= edges[1:]
        )  # nobody writes <bos>; the next row reads the end
        answer = ids[:, 1:].masked_fill(left_out, PAD)
        return Batch(ids[:, :0], torch.zeros(rows, dtype=torch.long), ids[:, :-1], answer)

    for first in itertools.count(start * config.accumulate, config.accumulate):
        yield [read(number) for number in range(first, first + config.accumulate)]


def padding_share(rows: Sequence[Row], batches: Sequence[Sequence[int]]) -> float:
    """The share of cells, on both sides, that hold nothing."""
    cells = tokens = 0
    for batch in batches:
        for lengths in ([len(rows[i].source) for i in batch], [len(rows[i].target) + 1 for i in batch]):
            cells += max(lengths) * len(lengths)
            tokens += sum(lengths)
    return 1 - tokens / cells
