"""A task that the package does not have: a text gets a number. `register(RatingTask)` is all that it takes."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config.model import EncoderConfig
from regard.data.batching import Batch, Row, pad_sources
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import DataError
from regard.nn.attention import CROSS, multi_head_attention
from regard.nn.loss import Loss
from regard.tasks.axes import Piece
from regard.tasks.encoder import EncoderTask, TextEncoder
from regard.tasks.task import Answer, Answered, Metric


class RatingConfig(EncoderConfig):
    """Encoder and one query that attends to the text and gives it a number."""

    kind: Literal["rating"]
    spread: float = 1.0
    """The standard deviation that a number is predicted with."""


class Rater(TextEncoder):
    """A learned query attends to the text; what it saw is the number."""

    def __init__(self, config: RatingConfig, vocab: int, longest: int) -> None:
        super().__init__(config, vocab, longest)
        self.query = nn.Parameter(torch.randn(1, config.size))
        self.attention = multi_head_attention(config.size, config.heads, kind="cross", axes=CROSS)
        self.number = nn.Linear(config.size, 1)

    def logits(self, batch: Batch) -> Tensor:
        """The numbers (batch,)."""
        states, mask = self.states(batch.source, batch.lengths)
        queries = self.attention.project_query(self.query.expand(len(states), -1, -1))
        return self.number(self.attention(queries, self.attention.project_kv(states), mask))[:, 0, 0]

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        total = F.mse_loss(self.logits(batch), batch.answer[:, 0].float(), reduction="sum")
        return Loss(total, total.detach(), len(batch.answer))


def mean_absolute_error(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> float:
    """How far answers are from the number that was wanted."""
    pairs = zip(answers, references, strict=True)
    return sum(abs(answer.details["value"] - float(wanted[0])) for answer, wanted in pairs) / len(answers)


class RatingTask(EncoderTask):
    """The number of a text."""

    kinds = (RatingConfig,)
    verb = "rate"
    metrics = (Metric("mae", mean_absolute_error, smaller_is_better=True),)

    @classmethod
    def learn_vocabularies(cls, config, examples, raw) -> Vocabularies:
        vocabulary = Vocabulary.learn([str(example.source) for example in examples], config.text.source)
        return Vocabularies(vocabulary, vocabulary)

    def encode_targets(self, examples, sources) -> Iterator[list[float]]:
        for example in examples:
            try:
                yield [float(example.target)]
            except ValueError as error:
                raise DataError(f"{example.where}: {example.target!r} is not a number.") from error

    def make_row(self, source, wanted) -> Row:
        return Row(source, wanted, sequence=False)

    def build(self) -> Rater:
        return Rater(self.config.model, self.source.size, self.config.text.max_length + 2)

    def answer(self, model, sources, best, generate) -> Iterator[Answered]:
        ids, lengths = pad_sources([one.ids for one in sources])
        with torch.inference_mode():
            values = model.logits(Batch(ids, lengths, ids, ids)).tolist()
        yield from enumerate([Answer(f"{value:.1f}", 0.0, details={"value": value})] for value in values)

    def query_pieces(self) -> list[Piece]:
        return [Piece("number", 0, 0)]
