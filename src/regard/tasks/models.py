"""Assemblies: settings -> a model that can be trained (`forward`) and decoded (`start`, `step`)."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.masks import padding
from regard.config.config import (
    ClassifierConfig,
    Config,
    EncoderConfig,
    LanguageConfig,
    ReaderConfig,
    RNNConfig,
    TransformerConfig,
)
from regard.data.batching import Batch
from regard.data.vocabulary import PAD
from regard.nn import recurrent, transformer
from regard.nn.attention import multi_head
from regard.nn.layers import Dropout, Linear, Output, embedding, log_softmax, wide
from regard.nn.loss import Loss, Trainable, cross_entropy
from regard.nn.pool import Past, quiet
from regard.tasks.encoders import Classifier, Reader, TextEncoder

PIECES = 4
"""Sources of different lengths are read in so many, on a CPU."""


class State(NamedTuple):
    """What decoding carries along. Every tensor is row-first: rows of `source` are sentences, rows of `past` are
    hypotheses, so re-ordering beams is indexing `past` and dropping a finished sentence is indexing both."""

    source: Any
    past: Any
    first: Tensor | None = None
    """(sentences,) the token that the first step reads; None: <bos>."""


def rows(tree: Any, index: Tensor) -> Any:
    """Every tensor of a state (tuples of tensors and tuples), its rows chosen and ordered by an index."""
    if isinstance(tree, Past):
        return tree.chosen(index)
    if isinstance(tree, tuple):
        parts = [rows(part, index) for part in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return tree.index_select(0, index) if isinstance(tree, Tensor) else tree


class Steppable(Protocol):
    """All that decoding knows of a model."""

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Read sources (sentences, source) of some lengths (sentences,)."""
        ...

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens (rows,) -> log-probabilities of the next ones (rows, vocab), and the state after them."""
        ...


class Writer(Trainable):
    """A model that writes: what it makes of a batch becomes the next tokens' logits, and they should be the answer."""

    output: Output

    def hidden(self, batch: Batch) -> Tensor:
        """What the output layer sees: (batch, target, width)."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """Logits (batch, target, vocab) of the answer, given what comes before."""
        logits: Tensor = self.output(self.hidden(batch))
        return logits

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Loss:
        return cross_entropy(self.hidden(batch), self.output.weight, self.output.bias, batch.answer, smoothing)


class Seq2Seq(Writer):
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
        return self.decode(batch.target, self.encode(batch.source, batch.lengths))[0]

    def start(self, source: Tensor, lengths: Tensor) -> State:
        return self.encode(source, lengths)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.decode(tokens[:, None], state)
        return log_softmax(self.output(hidden[:, 0])), state


class Transformer(Seq2Seq):
    """D4."""

    def __init__(
        self, config: TransformerConfig, source_vocab: int, target_vocab: int | None = None, longest: int = 1024
    ) -> None:
        super().__init__(config, source_vocab, target_vocab)
        self.encoder = transformer.Encoder(config, config.encoder_layers, longest)
        self.decoder = transformer.Decoder(config, config.decoder_layers, longest, cross=True)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        if bool((lengths == source.shape[1]).all()):
            return State(self.read(source, None), None)
        mask = padding(lengths, source.shape[1])
        if not source.is_cpu or len(source) < 2 * PIECES or not all(map(quiet, self.encoder.blocks)):
            return State(self.read(source, mask), None)
        parts = []  # whoever comes sorted by length is hardly padded in pieces
        for ids, seen in zip(source.chunk(PIECES), mask.chunk(PIECES), strict=True):
            longest = int(seen.sum(-1).max())
            parts.append(self.read(ids[:, :longest], seen[..., :longest]))
        return State(transformer.together(parts, mask), None)

    def read(self, source: Tensor, mask: Tensor | None) -> transformer.Source:
        """What the decoder looks at, of sources (sentences, source)."""
        return self.decoder.remember(self.encoder(self.source_embedding(source), mask), mask)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, past = self.decoder(self.target_embedding(target), state.source, state.past)
        return hidden, State(state.source, past)


def followed(written: Tensor, source: Tensor, place: Tensor) -> Tensor:
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


class Copying(Transformer):
    """D4 whose output may be a token of the source: a learned share of each step's probability lies on the vocabulary,
    the rest on the source's tokens, by one more attention to them (Gu 2016, See 2017). With every token it wrote, the
    decoder reads the source's state where that token stands, and the one behind: whoever copies has to know where he
    is (Gu's selective read)."""

    def __init__(self, config: TransformerConfig, vocab: int, longest: int = 1024) -> None:
        super().__init__(config, vocab, None, longest)
        self.copy_attention = multi_head(config.size, 1)
        self.share = Linear(2 * config.size, 1)
        self.here = Linear(2 * config.size, config.size)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        mask = padding(lengths, source.shape[1])
        states = self.encoder(self.source_embedding(source), mask)
        copied = self.copy_attention.remember(states)
        return State((self.decoder.remember(states, mask), copied, mask, source, F.pad(states, (0, 0, 1, 1))), None)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        past, place = state.past or (None, torch.full_like(target[:, 0], -1))
        source, states = (one.repeat_interleave(len(target) // len(one), dim=0) for one in state.source[3:])
        places = followed(target, source, place)
        rows = torch.arange(len(target), device=target.device)[:, None]
        near = torch.cat([states[rows, places + 1], states[rows, places + 2]], dim=-1)  # a row of zeros at either end
        read = self.target_embedding(target) + self.here(near) / self.decoder.scale
        hidden, past = self.decoder(read, state.source[0], past)
        return hidden, State(state.source, (past, places[:, -1]))

    def mixed(self, hidden: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (rows, n, size) -> the logarithms of the vocabulary's share and of the source's (rows, n, 1), and how
        the latter lies on the source's places (rows, n, source)."""
        _, memory, mask, *_ = state.source
        sentences = len(mask)
        queries = self.copy_attention.ask(hidden.reshape(sentences, -1, hidden.shape[-1]))
        seen = self.copy_attention(queries, memory, mask).view(hidden.shape)
        places = self.copy_attention.weights(queries, memory, mask)[:, 0].reshape(*hidden.shape[:-1], -1)
        share = self.share(torch.cat([hidden, seen], dim=-1))
        return F.logsigmoid(share), F.logsigmoid(-share), places

    def logprobs(self, hidden: Tensor, state: State) -> Tensor:
        """hidden (rows, n, size) -> log-probabilities (rows, n, vocab)."""
        own, other, places = self.mixed(hidden, state)
        logits: Tensor = self.output(hidden)
        made = wide(logits).log_softmax(-1) + own
        ids = state.source[3].repeat_interleave(len(hidden) // len(state.source[3]), dim=0)
        copied = torch.zeros_like(made).scatter_add_(-1, ids[:, None].expand(places.shape), places.to(made.dtype))
        return torch.logaddexp(made, copied.log() + other)

    def forward(self, batch: Batch) -> Tensor:
        state = self.encode(batch.source, batch.lengths)
        return self.logprobs(self.decode(batch.target, state)[0], state)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = self.decode(tokens[:, None], state)
        return self.logprobs(hidden, state)[:, 0], after

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Loss:
        """Smoothing is of what the vocabulary gives: what is copied is not smoothed."""
        state = self.encode(batch.source, batch.lengths)
        hidden = self.decode(batch.target, state)[0]
        own, other, places = self.mixed(hidden, state)
        logits: Tensor = self.output(hidden)
        made = wide(logits).log_softmax(-1)
        wanted = made.gather(-1, batch.answer[..., None])
        same = (batch.source[:, None] == batch.answer[..., None]) & (batch.answer[..., None] != PAD)
        copied = (places * same).sum(-1, keepdim=True).clamp(min=torch.finfo(places.dtype).tiny)
        real = batch.answer[..., None] != PAD
        plain = -(torch.logaddexp(wanted + own, copied.log() + other) * real).sum()
        uniform = -(made.mean(-1, keepdim=True) * real).sum()
        return Loss((1 - smoothing) * plain + smoothing * uniform, plain.detach(), int(real.sum()))


class Language(Writer):
    """D3: every token looks at those before it, and the next is wanted."""

    def __init__(self, config: LanguageConfig, vocab: int, context: int = 1024) -> None:
        super().__init__()
        self.context = context
        self.source_embedding = embedding(vocab, config.size)
        self.decoder = transformer.Decoder(config, config.layers, context)
        self.output = Output(vocab, config.size, self.source_embedding if config.tied else None)
        self.output.bias.requires_grad_(config.bias)

    def hidden(self, batch: Batch) -> Tensor:
        return self.decoder(self.source_embedding(batch.target))[0]

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Read prompts (sentences, source) but for the last token of each, which the first step reads."""
        count = source.shape[1]
        begin = count - lengths
        places = torch.arange(count, device=source.device)
        ids = source.gather(1, (places - begin[:, None]) % count)  # they end in line
        ragged = bool(begin.any())
        _, past = self.decoder(
            self.source_embedding(ids[:, :-1]),
            past=transformer.Cache((), -begin) if ragged else None,
            real=places[:-1] >= begin[:, None] if ragged else None,
        )
        return State(None, past, ids[:, -1])

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        past = state.past.latest(self.context - 1)  # the oldest is forgotten: no row sees more than the context
        hidden, after = self.decoder(self.source_embedding(tokens[:, None]), past=past)
        return log_softmax(self.output(hidden[:, 0])), State(None, after)


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
        hidden, past = self.decoder(self.target_embedding(target), state.source, state.past)
        return hidden, State(state.source, past)


AnyModel = Transformer | Recurrent | Language | TextEncoder
"""Every model there is; a Classifier and a Reader are a TextEncoder too."""


def build(config: Config, source_vocab: int, target_vocab: int | None) -> AnyModel:
    """The model of a configuration, its weights drawn from the configuration's seed."""
    torch.manual_seed(config.train.seed)
    context = config.text.max_length
    longest = 2 * context + 2  # an output has at most twice that many tokens (see Predictor)
    match config.model:
        case RNNConfig():
            return Recurrent(config.model, source_vocab, target_vocab)
        case TransformerConfig(copy_source=True):
            return Copying(config.model, source_vocab, longest)
        case TransformerConfig():
            return Transformer(config.model, source_vocab, target_vocab, longest)
        case LanguageConfig():
            return Language(config.model, source_vocab, context)
        case ClassifierConfig():
            return Classifier(config.model, source_vocab, target_vocab or 0, context + 2)
        case ReaderConfig():
            return Reader(config.model, source_vocab, target_vocab, context + 2)
        case EncoderConfig():
            return TextEncoder(config.model, source_vocab, context + 2)
