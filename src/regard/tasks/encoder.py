"""The text encoder that classifiers, readers and embeddings share, its pretrained runs, and answers that are labels.

Alone, an encoder has nothing to answer: it gives texts and tokens their vectors.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import padding
from regard.config.model import BlockConfig, EncoderConfig, ModelConfig
from regard.config.run import Config
from regard.data.batching import Batch, Row, pad_sources
from regard.data.encoding import Encoded
from regard.data.examples import Example
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, UNK, Vocabularies, Vocabulary
from regard.errors import ConfigError, DataError
from regard.nn.layers import Dropout, make_embedding
from regard.nn.loss import Trainable
from regard.nn.transformer import Encoder
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Answered, Architecture, Embedded, Generate, Metric, Task, Token

LABELS = len(SPECIAL)
"""The first class's id in the vocabulary of labels."""


class TextEncoder(Trainable):
    """Tokens -> states."""

    def __init__(self, config: EncoderConfig, vocab: int, longest: int) -> None:
        super().__init__()
        self.source_embedding = make_embedding(vocab, config.size)
        self.encoder = Encoder(config, config.layers, longest)
        self.word_dropout = config.word_dropout
        width = 2 * config.conv_window + 1
        self.convolution = (
            nn.Conv1d(config.size, config.size, width, padding=config.conv_window) if config.conv_window else None
        )
        self.convolution_dropout = Dropout(config.dropout)

    def states(self, source: Tensor, lengths: Tensor, more: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """source (batch, source) -> states (batch, source, size), and which of them are real (batch, 1, 1, source).
        `more` (batch, source, size) is added to the embeddings."""
        source = self.hide_words(source)
        mask = padding(lengths, source.shape[1])
        full = bool((lengths == source.shape[1]).all())
        return self.encoder(self.convolve(self.source_embedding(source) + more, mask), None if full else mask), mask

    def convolve(self, x: Tensor, mask: Tensor) -> Tensor:
        """Embeddings (batch, source, size), each with what its window says; padding says nothing."""
        if self.convolution is None:
            return x
        scaled = self.convolution_dropout(x * mask[:, 0, 0, :, None] * self.encoder.scale)
        return x + F.relu(self.convolution(scaled.mT).mT) / self.encoder.scale

    def hide_words(self, source: Tensor) -> Tensor:
        """Word dropout: while training, ids (batch, source) with a share of the words replaced by <unk>."""
        if not self.training or not self.word_dropout:
            return source
        hidden = torch.rand(source.shape, device=source.device) < self.word_dropout
        return source.masked_fill(hidden & (source > EOS), UNK)

    def logits(self, batch: Batch) -> Tensor:
        """The states (batch, source, size): there is nothing behind the encoder."""
        return self.states(batch.source, batch.lengths)[0]


def mean_states(states: Tensor, mask: Tensor) -> Tensor:
    """The mean (batch, size) of states (batch, source, size) that are real: mask (batch, 1, 1, source)."""
    real = mask[:, 0, 0, :, None].to(states.dtype)
    return (states * real).sum(1) / real.sum(1).clamp(min=1)


class EncoderTask(Task):
    """A task whose model is an encoder and something behind it. Sources begin with <bos> and end with <eos>."""

    extra_tokens = 0
    """Special tokens that its rows have beside <bos> and <eos>."""

    def frame(self) -> tuple[list[int], list[int]]:
        return [BOS], [EOS]

    @classmethod
    def pretrained_run(cls, config: Config) -> Path | None:
        assert isinstance(config.model, EncoderConfig)
        return Path(config.model.pretrained) if config.model.pretrained else None

    @classmethod
    def adopt(cls, config: Config, pretrained: Config) -> Config:
        """The same settings, with the form of a pretrained encoder and at most its length."""
        form = pretrained.model
        if type(form) is not EncoderConfig:
            raise ConfigError(
                f"model.pretrained is a run of kind {form.kind}, expected encoder, as `regard import` makes."
            )
        taken = {name: getattr(form, name) for name in (*BlockConfig.model_fields, "layers")}
        for own in ("kind", "dropout"):
            del taken[own]
        room = pretrained.text.max_length - cls.extra_tokens
        text = {"source": pretrained.text.source, "max_length": min(config.text.max_length, room), "raw": ()}
        return config.model_copy(
            update={"model": config.model.model_copy(update=taken), "text": config.text.model_copy(update=text)}
        )

    def embeddings(self, model: Any) -> list[Embedded]:
        raw = bool(self.config.text.raw)
        return [Embedded("source", model.source_embedding, self.source, self.settings.source_vectors, raw)]

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return model.states(ids, lengths)[0], lengths


def learn_label_vocabularies(config: Config, sources: Sequence[str], targets: Sequence[str]) -> Vocabularies:
    """A vocabulary of texts and one of labels, of which there must be two at least."""
    assert config.text.target is not None
    target = Vocabulary.learn(targets, config.text.target)
    if target.size < LABELS + 2 and all(targets):
        raise DataError(
            f"all {len(targets):,} training examples have the label {targets[0]!r}: there is nothing to tell apart. "
            f"Give examples of at least two labels."
        )
    return Vocabularies(Vocabulary.learn(sources, config.text.source), target)


class LabelTask(Task):
    """A task that chooses among classes."""

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Refuse a label that training never saw: it would be wrong whatever the model says."""
        for example, tokens in zip(examples, self.target.encode_all([one.target for one in examples]), strict=True):
            if UNK in tokens.ids:
                known = ", ".join(self.target.token(i) for i in range(LABELS, min(self.target.size, 24)))
                raise DataError(
                    f"{example.where} has the label {example.target!r}, which training never saw. Known: {known}."
                )

    def make_row(self, source: Sequence[int], wanted: list[int]) -> Row:
        return Row(source, wanted or [PAD], sequence=False)

    def canonical(self, texts: Sequence[str]) -> list[str]:
        """Labels as they can be compared: each as the vocabulary writes it, once, and in the order of the alphabet."""
        names = ({self.target.token(i) for i in tokens.ids} for tokens in self.target.encode_all(texts))
        return [(self.separator or "").join(sorted(labels)) for labels in names]

    @property
    def separator(self) -> str | None:
        return self.config.text.target.separator if self.config.text.target else ""

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        ids, lengths = pad_sources([one.ids for one in sources])
        batch = Batch(ids, lengths, ids, ids).to(next(model.parameters()).device)
        with torch.inference_mode():
            found = model.probabilities(batch).cpu()
        yield from enumerate(self.choose(row, best) for row in found)

    def choose(self, probabilities: Tensor, best: int) -> list[Answer]:
        """The likeliest classes, by their probabilities (classes,)."""
        return [
            Answer(token.text, token.logprob or 0.0, [token], {"probability": probability})
            for token, probability in self.rank(probabilities)[:best]
        ]

    def rank(self, probabilities: Tensor) -> list[tuple[Token, float]]:
        """Every class and its probability, likeliest first."""
        order = probabilities.argsort(descending=True, stable=True).tolist()
        chances, sure = probabilities.tolist(), probabilities.clamp(min=1e-30).log().tolist()
        return [(Token(self.target.token(i + LABELS), sure[i], i + LABELS), chances[i]) for i in order]


class EmbeddingTask(EncoderTask):
    """Vectors of texts."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (EncoderConfig,)
    settings: EncoderConfig
    verb = "embed"
    metrics: ClassVar[tuple[str | Metric, ...]] = ()
    gives_answers = False
    form = FORMS["embedding"]

    @classmethod
    def check(cls, config: Config) -> None:
        raise ConfigError(
            "an encoder alone has nothing to learn: train a classifier or a reader, or import an encoder."
        )

    def build(self) -> TextEncoder:
        return TextEncoder(self.settings, self.source.size, self.config.text.max_length + 2)

    def architecture(self) -> Architecture:
        return Architecture(encoder=True, decoder=False)
