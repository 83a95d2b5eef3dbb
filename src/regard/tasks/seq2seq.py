"""Sequence to sequence: translation, summaries, pronunciations.

Encoder-decoder models: recurrent with or without attention, the Transformer, and the pointer-generator.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import padding
from regard.config.model import ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from regard.config.run import DecodeConfig
from regard.data.batching import Batch
from regard.data.encoding import Encoded
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL
from regard.errors import ConfigError
from regard.nn.attention import CROSS, multi_head_attention
from regard.nn.layers import Dropout, OutputLayer, make_embedding, widen
from regard.nn.loss import Loss
from regard.nn.recurrent import RecurrentDecoder, RecurrentEncoder, WordEncoder
from regard.nn.state import State
from regard.nn.transformer import Decoder, EncodedSource, Encoder
from regard.tasks.axes import Piece, Tokens, read_pieces, written_pieces
from regard.tasks.generation import EncoderDecoder, GenerationTask
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Architecture, Bounds, Embedded


class Seq2Seq(EncoderDecoder):
    """An encoder, a decoder, and what both families share: embeddings and output."""

    def __init__(self, width: int, tied: bool, source_vocab: int, target_vocab: int | None) -> None:
        """Without `target_vocab`, one vocabulary (and with `tied`, one embedding) serves both sides."""
        super().__init__()
        self.source_embedding = make_embedding(source_vocab, width)
        one = target_vocab is None and tied
        self.target_embedding = self.source_embedding if one else make_embedding(target_vocab or source_vocab, width)
        self.output = OutputLayer(target_vocab or source_vocab, width, self.target_embedding if tied else None)


class RecurrentSeq2Seq(Seq2Seq):
    """Recurrent encoder and decoder: the source passes through one vector, or is attended to."""

    def __init__(self, config: RNNConfig, source_vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config.embedding, config.tie_embeddings, source_vocab, target_vocab)
        self.encoder = RecurrentEncoder(config) if config.encoder == "recurrent" else WordEncoder(config)
        self.decoder = RecurrentDecoder(config)
        self.dropout = Dropout(config.dropout)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        states, last = self.encoder(self.dropout(self.source_embedding(source)), lengths)
        return State(*self.decoder.begin(states, last, lengths))

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cache = self.decoder(self.target_embedding(target), state.source, state.cache)
        return hidden, State(state.source, cache)

    def encoder_states(self, source: Tensor, lengths: Tensor) -> Tensor:
        states: Tensor = self.encoder(self.source_embedding(source), lengths)[0]
        return states


class Transformer(Seq2Seq):
    """The encoder-decoder Transformer."""

    def __init__(
        self, config: TransformerConfig, source_vocab: int, target_vocab: int | None = None, longest: int = 1024
    ) -> None:
        super().__init__(config.size, config.tie_embeddings, source_vocab, target_vocab)
        self.encoder = Encoder(config, config.encoder_layers, longest)
        self.decoder = Decoder(config, config.decoder_layers, longest, cross="cross")

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        full = bool((lengths == source.shape[1]).all())
        mask = None if full else padding(lengths, source.shape[1])
        return State(EncodedSource(self.encoder(self.source_embedding(source), mask), mask), None)

    def start(self, source: Tensor, lengths: Tensor) -> State:
        return State(self.decoder.project_source(self.encode(source, lengths).source), None)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cache = self.decoder(self.target_embedding(target), state.source, state.cache)
        return hidden, State(state.source, cache)

    def encoder_states(self, source: Tensor, lengths: Tensor) -> Tensor:
        states: Tensor = self.encoder(self.source_embedding(source), padding(lengths, source.shape[1]))
        return states


def follow_copies(written: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """Where in its source each token stands that was written: the next such place behind the one before, going round;
    a token that the source does not have leaves the place as it was. written (rows, n), source (rows, source), place
    (rows,) before the first token, -1 at the very beginning -> (rows, n)."""
    count, places = source.shape[1], []
    every = torch.arange(count, device=source.device)
    for tokens in written.unbind(1):
        ahead = ((every - place[:, None] - 1) % count).masked_fill(source != tokens[:, None], count).amin(1)
        place = torch.where(ahead < count, (place + 1 + ahead) % count, place)
        places.append(place)
    return torch.stack(places, dim=1)


class PointerGenerator(Transformer):
    """A Transformer whose output may be a token of the source: a learned share of each step's probability lies on the
    vocabulary, the rest on the source's tokens, by one more attention to them (CopyNet, Gu 2016; See 2017). With every
    token it wrote, the decoder reads the source's state where that token stands, and the one behind: to go on copying
    it has to know where it is (Gu's selective read)."""

    def __init__(self, config: TransformerConfig, vocab: int, longest: int = 1024) -> None:
        super().__init__(config, vocab, None, longest)
        self.copy_attention = multi_head_attention(config.size, 1, kind="cross", axes=CROSS)
        self.share = nn.Linear(2 * config.size, 1)
        self.here = nn.Linear(2 * config.size, config.size)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        mask = padding(lengths, source.shape[1])
        states = self.encoder(self.source_embedding(source), mask)
        copied = self.copy_attention.project_kv(states)
        encoded = self.decoder.project_source(EncodedSource(states, mask))
        return State((encoded, copied, mask, source, F.pad(states, (0, 0, 1, 1))), None)

    def start(self, source: Tensor, lengths: Tensor) -> State:
        return self.encode(source, lengths)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        cache, place = state.cache or (None, torch.full_like(target[:, 0], -1))
        source, states = (one.repeat_interleave(len(target) // len(one), dim=0) for one in state.source[3:])
        places = follow_copies(target, source, place)
        rows = torch.arange(len(target), device=target.device)[:, None]
        near = torch.cat([states[rows, places + 1], states[rows, places + 2]], dim=-1)  # a row of zeros at either end
        read = self.target_embedding(target) + self.here(near) / self.decoder.scale
        hidden, cache = self.decoder(read, state.source[0], cache)
        return hidden, State(state.source, (cache, places[:, -1]))

    def mix(self, hidden: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (rows, n, size) -> the logarithms of the vocabulary's share and of the source's (rows, n, 1), and how
        the latter lies on the source's places (rows, n, source)."""
        _, kv, mask, *_ = state.source
        sentences = len(mask)
        queries = self.copy_attention.project_query(hidden.reshape(sentences, -1, hidden.shape[-1]))
        seen = self.copy_attention(queries, kv, mask).view(hidden.shape)
        places = self.copy_attention.weights(queries, kv, mask)[:, 0].reshape(*hidden.shape[:-1], -1)
        share = self.share(torch.cat([hidden, seen], dim=-1))
        return F.logsigmoid(share), F.logsigmoid(-share), places

    def logprobs(self, hidden: Tensor, state: State) -> Tensor:
        """hidden (rows, n, size) -> log-probabilities (rows, n, vocab)."""
        own, other, places = self.mix(hidden, state)
        made = widen(self.output(hidden)).log_softmax(-1) + own
        ids = state.source[3].repeat_interleave(len(hidden) // len(state.source[3]), dim=0)
        copied = torch.zeros_like(made).scatter_add_(-1, ids[:, None].expand(places.shape), places.to(made.dtype))
        return torch.logaddexp(made, copied.log() + other)

    def logits(self, batch: Batch) -> Tensor:
        """Log-probabilities (batch, target, vocab): logits whose softmax they are."""
        state = self.encode(batch.source, batch.lengths)
        return self.logprobs(self.decode(batch.target, state)[0], state)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = self.decode(tokens[:, None], state)
        return self.logprobs(hidden, state)[:, 0], after

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Smoothing is of what the vocabulary gives: what is copied is not smoothed."""
        state = self.encode(batch.source, batch.lengths)
        hidden = self.decode(batch.target, state)[0]
        own, other, places = self.mix(hidden, state)
        made = widen(self.output(hidden)).log_softmax(-1)
        wanted = made.gather(-1, batch.answer[..., None])
        same = (batch.source[:, None] == batch.answer[..., None]) & (batch.answer[..., None] != PAD)
        copied = (places * same).sum(-1, keepdim=True).clamp(min=torch.finfo(places.dtype).tiny)
        real = batch.answer[..., None] != PAD
        plain = -(torch.logaddexp(wanted + own, copied.log() + other) * real).sum()
        uniform = -(made.mean(-1, keepdim=True) * real).sum()
        return Loss((1 - label_smoothing) * plain + label_smoothing * uniform, plain.detach(), int(real.sum()))


class Seq2SeqTask(GenerationTask):
    """One text in, another out."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (RNNConfig, TransformerConfig)
    settings: Seq2SeqConfig
    verb = "translate"
    protocols = frozenset({"libretranslate"})
    form = FORMS["seq2seq"]

    def build(self) -> Seq2Seq:
        source, target = self.source.size, None if self.vocabularies.shared else self.target.size
        longest = 2 * self.config.text.max_length + 2  # an output has at most twice that many tokens
        match self.settings:
            case RNNConfig() as settings:
                return RecurrentSeq2Seq(settings, source, target)
            case TransformerConfig(pointer_generator=True) as settings:
                return PointerGenerator(settings, source, longest)
            case TransformerConfig() as settings:
                return Transformer(settings, source, target, longest)
        raise TypeError(self.config.model)

    def embeddings(self, model: Any) -> list[Embedded]:
        raw = bool(self.config.text.raw)
        return [
            Embedded("source", model.source_embedding, self.source, self.settings.source_vectors, raw),
            Embedded("target", model.target_embedding, self.target, self.settings.target_vectors, False),
        ]

    def length_bounds(self, source: Sequence[int], answer: Answer, settings: DecodeConfig) -> Bounds | None:
        """With one vocabulary for both sides, an output of less than a third of its source's tokens is short; with two,
        only one of less than a twentieth."""
        limit = int((len(source) + 1) * settings.max_ratio) + settings.max_extra
        least = 1 / 3 if self.vocabularies.shared else 1 / 20
        return Bounds(least, min(limit, 2 * self.config.text.max_length))

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        queries = written_pieces(self.target, [token.id for token in answer.tokens[:-1]], answer.text)
        end = Piece(SPECIAL[EOS], len(answer.text), len(answer.text))
        return {
            "key": read_pieces(source),
            "query": [*queries, end],
            "input": [Piece(SPECIAL[BOS], 0, 0), *queries],
        }

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return model.encoder_states(ids, lengths), lengths

    def architecture(self) -> Architecture:
        match self.settings:
            case TransformerConfig(pointer_generator=True):
                raise ConfigError("it copies from the source (model.pointer_generator), and no other library's does")
            case TransformerConfig():
                return Architecture(encoder=True, decoder=True)
        raise ConfigError("it is recurrent")
