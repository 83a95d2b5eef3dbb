"""What tasks that write their answers token by token share: translation, summaries, continuations."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.config.run import DecodeConfig
from regard.data.batching import Batch, Row, collate
from regard.data.encoding import Encoded
from regard.data.vocabulary import EOS, PAD
from regard.nn.layers import OutputLayer, widen
from regard.nn.loss import Loss, Surprise, Trainable, cross_entropy, token_surprise
from regard.nn.state import Hypothesis, State
from regard.tasks.task import Answer, Answered, Generate, Metric, Task, Token

WRITTEN: tuple[str | Metric, ...] = (
    "bleu", "chrf", "ter", "exact", "prefix", "error", "accuracy", "wer", "cer", "per", "perplexity", "rouge1",
    "rouge2", "rougel", "span_exact", "span_f1",
)  # fmt: skip


class Writer(Trainable):
    """A model that writes: what it makes of a batch becomes the next tokens' logits, and they should be the answer."""

    output: OutputLayer

    def hidden(self, batch: Batch) -> Tensor:
        """What the output layer sees: (batch, target, width)."""
        raise NotImplementedError

    def logits(self, batch: Batch) -> Tensor:
        """Logits (batch, target, vocab) of the answer, given what comes before."""
        logits: Tensor = self.output(self.hidden(batch))
        return logits

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        return cross_entropy(self.hidden(batch), self.output.weight, self.output.bias, batch.answer, label_smoothing)

    def surprise(self, batch: Batch) -> Surprise:
        """The negative log-probability of every row's answer."""
        return token_surprise(widen(self.logits(batch)), batch.answer)


class EncoderDecoder(Writer):
    """A writer that reads its source first, as a whole."""

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        """Read the sources; nothing is written yet."""
        raise NotImplementedError

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """Tokens (rows, target) after the state -> hidden states (rows, target, width), and the state after them."""
        raise NotImplementedError

    def encoder_states(self, source: Tensor, lengths: Tensor) -> Tensor:
        """The encoder's states (batch, source, size)."""
        raise NotImplementedError

    def hidden(self, batch: Batch) -> Tensor:
        return self.decode(batch.target, self.encode(batch.source, batch.lengths))[0]

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Read sources (sentences, source) of some lengths (sentences,)."""
        return self.encode(source, lengths)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens (rows,) -> log-probabilities of the next ones (rows, vocab), and the state after them."""
        hidden, state = self.decode(tokens[:, None], state)
        return widen(self.output(hidden[:, 0])).log_softmax(-1), state


class GenerationTask(Task):
    """A task whose answers are written: its model has `start` and `step`."""

    metrics: ClassVar[tuple[str | Metric, ...]] = WRITTEN

    def make_row(self, source: Sequence[int], wanted: list[int]) -> Row:
        return Row(source, wanted)

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        for one in generate(sources):
            yield one and (one[0], [self.make_answer(sources[one[0]], found) for found in one[1]])

    def make_answer(self, source: Encoded, hypothesis: Hypothesis) -> Answer:
        """A hypothesis as text, which goes on where its continuation does."""
        ids = [*hypothesis.tokens, EOS]
        logprobs: Iterable[float | None] = hypothesis.logprobs or [None] * len(ids)
        tokens = [Token(self.target.spelled(i), logprob, i) for i, logprob in zip(ids, logprobs, strict=True)]
        text = self.target.continued(self.continuation(source), hypothesis.tokens)
        return Answer(text, hypothesis.score, tokens)

    def score(self, model: Any, sources: Sequence[Encoded], outputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """The model's log-probabilities of the tokens of outputs, and of <eos> behind them, by one pass."""
        device = next(model.parameters()).device
        batch = self.replay_all(sources, outputs).to(device)
        with torch.inference_mode():
            logprobs = widen(model.logits(batch)).log_softmax(-1).gather(-1, batch.answer[..., None])[..., 0]
        ends = (batch.answer != PAD).sum(1).tolist()
        rows = zip(logprobs.tolist(), outputs, ends, strict=True)
        return [row[end - len(output) - 1 : end] for row, output, end in rows]

    def replay_all(self, sources: Sequence[Encoded], outputs: Sequence[Sequence[int]]) -> Batch:
        """Outputs as if they were to be learned."""
        return collate([Row(source.ids, list(ids)) for source, ids in zip(sources, outputs, strict=True)])

    def replay(self, source: Encoded, answer: Answer) -> Batch:
        return self.replay_all([source], [[token.id for token in answer.tokens[:-1]]])

    def prefix_ids(self, source: Encoded, prefix: str) -> list[int]:
        return self.target.encode(prefix).ids

    def continuation(self, source: Encoded) -> list[int]:
        return []

    def output_limit(self, length: int, settings: DecodeConfig) -> int | None:
        return 2 * self.config.text.max_length
