"""Assemblies: settings -> a model that can be trained (`forward`) and decoded (`start`, `step`)."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard import recurrent, transformer
from regard.batch import Batch
from regard.config import Config, RNNConfig, TransformerConfig
from regard.layers import Dropout, Output, embedding
from regard.mask import padding


class State(NamedTuple):
    """What decoding carries along. Every tensor is row-first: rows of `source` are sentences, rows of `past` are
    hypotheses, so re-ordering beams is indexing `past` and dropping a finished sentence is indexing both."""

    source: Any
    past: Any


class Steppable(Protocol):
    """All that decoding knows of a model."""

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Read sources (sentences, source) of some lengths (sentences,)."""
        ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens (rows,) -> log-probabilities of the next ones (rows, vocab), and the state after them."""
        ...


class Seq2Seq(nn.Module):
    """An encoder, a decoder, and what both families share: embeddings and output."""

    def __init__(self, config: RNNConfig | TransformerConfig, source_vocab: int, target_vocab: int | None) -> None:
        """Without `target_vocab`, one vocabulary (and with `tied`, one embedding) serves both sides."""
        super().__init__()
        width = config.embedding if isinstance(config, RNNConfig) else config.size
        self.source_embedding = embedding(source_vocab, width)
        one = target_vocab is None and config.tied
        self.target_embedding = self.source_embedding if one else embedding(target_vocab or source_vocab, width)
        tied = self.target_embedding if config.tied else None
        self.output = Output(target_vocab or source_vocab, width, tied)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        """Read the sources; the past is empty."""
        raise NotImplementedError

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """Tokens (rows, target) after the state -> hidden states (rows, target, width), and the state after them."""
        raise NotImplementedError

    def hidden(self, batch: Batch) -> Tensor:
        """What the output layer sees: (batch, target, width)."""
        return self.decode(batch.target, self.encode(batch.source, batch.lengths))[0]

    def forward(self, batch: Batch) -> Tensor:
        """Logits (batch, target, vocab) of the answer, given what comes before."""
        logits: Tensor = self.output(self.hidden(batch))
        return logits

    def start(self, source: Tensor, lengths: Tensor) -> State:
        return self.encode(source, lengths)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.decode(tokens[:, None], state)
        logits = self.output(hidden[:, 0])
        return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), state


class Transformer(Seq2Seq):
    """D4."""

    def __init__(
        self, config: TransformerConfig, source_vocab: int, target_vocab: int | None = None, longest: int = 1024
    ) -> None:
        super().__init__(config, source_vocab, target_vocab)
        self.encoder = transformer.Encoder(config, longest)
        self.decoder = transformer.Decoder(config, longest)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        mask = None if bool((lengths == source.shape[1]).all()) else padding(lengths, source.shape[1])
        states = self.encoder(self.source_embedding(source), mask)
        return State(self.decoder.remember(states, mask), None)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, past = self.decoder(self.target_embedding(target), state.source, state.past)
        return hidden, State(state.source, past)


class Recurrent(Seq2Seq):
    """A1 and A2."""

    def __init__(self, config: RNNConfig, source_vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, source_vocab, target_vocab)
        self.encoder = recurrent.Encoder(config)
        self.decoder = recurrent.Decoder(config)
        self.dropout = Dropout(config.dropout)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        states, last = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        return State(*self.decoder.remember(states, last, lengths))

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, past = self.decoder(self.target_embedding(target), *state)
        return hidden, State(state.source, past)


def build(config: Config, source_vocab: int, target_vocab: int | None) -> Transformer | Recurrent:
    """The model of a configuration, its weights drawn from the configuration's seed."""
    torch.manual_seed(config.train.seed)
    longest = 2 * config.text.max_length + 2  # an output has at most twice that many tokens (see Predictor)
    match config.model:
        case RNNConfig():
            return Recurrent(config.model, source_vocab, target_vocab)
        case TransformerConfig():
            return Transformer(config.model, source_vocab, target_vocab, longest)
