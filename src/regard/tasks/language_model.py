"""Language models: the decoder-only Transformer, which continues texts token by token."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.config.model import LanguageModelConfig, ModelConfig
from regard.config.run import Config, DecodeConfig
from regard.data.batching import Batch, Row, pad, plan_windows, read_windows
from regard.data.encoding import Encoded, reject_surrogates
from regard.data.examples import Dropped, Example, Ledger, Source
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL
from regard.errors import ConfigError, InputError
from regard.nn.kv_cache import KVCache
from regard.nn.layers import OutputLayer, make_embedding, widen
from regard.nn.state import State
from regard.nn.transformer import Decoder
from regard.tasks.axes import Piece, Tokens, read_pieces, written_pieces
from regard.tasks.generation import GenerationTask, Writer
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Architecture, Bounds, Embedded, Metric, Scored


class LanguageModel(Writer):
    """Predicts the next token."""

    def __init__(self, config: LanguageModelConfig, vocab: int, context: int = 1024) -> None:
        super().__init__()
        self.context = context
        self.source_embedding = make_embedding(vocab, config.size)
        self.decoder = Decoder(config, config.layers, context)
        self.output = OutputLayer(vocab, config.size, self.source_embedding if config.tie_embeddings else None)
        self.output.bias.requires_grad_(config.bias)

    def hidden(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.decoder(self.source_embedding(batch.target))[0]
        return hidden

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Prefill: read prompts (sentences, source) but for the last token of each, which the first step reads."""
        count = source.shape[1]
        begin = count - lengths
        places = torch.arange(count, device=source.device)
        ids = source.gather(1, (places - begin[:, None]) % count)  # they end in line
        ragged = bool(begin.any())
        _, cache = self.decoder(
            self.source_embedding(ids[:, :-1]),
            cache=KVCache(start=-begin) if ragged else None,
            real=places[:-1] >= begin[:, None] if ragged else None,
        )
        return State(None, cache, ids[:, -1])

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens (rows,) -> log-probabilities of the next ones (rows, vocab), and the state after them."""
        cache = state.cache.keep_latest(self.context - 1)  # the oldest is dropped: no row sees more than the context
        hidden, after = self.decoder(self.source_embedding(tokens[:, None]), cache=cache)
        return widen(self.output(hidden[:, 0])).log_softmax(-1), State(None, after)


class LanguageModelTask(GenerationTask):
    """What follows a text."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (LanguageModelConfig,)
    settings: LanguageModelConfig
    verb = "continue"
    metrics: ClassVar[tuple[str | Metric, ...]] = ("nats", "perplexity", "bpb")
    protocols = frozenset({"openai"})
    form = FORMS["language_model"]

    # --- data

    @classmethod
    def check(cls, config: Config) -> None:
        if config.data.kind != "text":
            raise ConfigError(
                f'a language model continues texts: it needs data.kind = "text", not {config.data.kind!r}, of whose '
                "pairs it would read one side."
            )

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        return reject_surrogates(example) if example.target.strip() else Dropped("empty", example.where)

    def encode_examples(self, examples: Sequence[Example], ledger: Ledger, longer: str | None = None) -> list[Row]:
        """Documents as rows; they may be as long as they like, for they are read in windows."""
        return [Row([], tokens.ids) for tokens in self.target.encode_all([example.target for example in examples])]

    def join(self, rows: Sequence[Row]) -> list[int]:
        """Documents as one stream: each ends with <eos>, and begins with <bos> by setting."""
        lead, _ = self.frame()
        return [i for row in rows for i in (*lead, *row.target, EOS)]

    def batches(self, rows: Sequence[Row], start: int) -> Iterator[list[Batch]]:
        return read_windows(self.join(rows), self.config.text.max_length, self.config.train, start)

    def largest_batch(self, rows: Sequence[Row]) -> Batch:
        return next(self.batches(rows, 0))[0]  # all are alike

    def scoring_batches(self, examples: Sequence[Example], ledger: Ledger | None = None) -> Iterator[Scored]:
        """Texts in windows of the context that do not overlap; they are scored as one stream, which is the first
        example's."""
        stream = self.join(self.encode_examples(examples, ledger or Ledger()))
        if not self.settings.add_bos:
            stream = stream[:-1]  # the text ends where the split does, not where the author ended it
        width = self.config.text.max_length
        rows = [stream[start : start + width + 1] for start in range(0, len(stream) - 1, width)]
        most = max(1, min(32, self.config.train.batch_tokens // width))
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            fed, wanted = pad([row[:-1] for row in part]), pad([row[1:] for row in part])
            wanted = wanted.masked_fill(wanted == BOS, PAD)  # nobody writes it: foreseeing it is no merit
            yield Batch(fed[:, :0], torch.zeros(len(part), dtype=torch.long), fed, wanted), [0] * len(part)

    def describe_rows(self, rows: Sequence[Row]) -> tuple[int, str]:
        tokens = sum(len(row.target) + 1 + self.settings.add_bos for row in rows)
        _, batches = plan_windows(tokens, self.config.text.max_length, self.config.train.batch_tokens)
        return batches, f"{len(rows):,} documents of {tokens:,} tokens; {batches:,} batches an epoch"

    # --- the model

    def build(self) -> LanguageModel:
        return LanguageModel(self.settings, self.source.size, self.config.text.max_length)

    def embeddings(self, model: Any) -> list[Embedded]:
        raw = bool(self.config.text.raw)
        return [Embedded("source", model.source_embedding, self.source, self.settings.source_vectors, raw)]

    # --- answers

    def frame(self) -> tuple[list[int], list[int]]:
        return [BOS] if self.settings.add_bos else [], []

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        """Prompts. Of one that is too long the end is kept, and half of the context is left to what is written."""
        lead, _ = self.frame()
        most, out = self.config.text.max_length, []
        texts = [str(source) for source in sources]
        for text, (ids, offsets) in zip(texts, self.source.encode_all(texts), strict=True):
            length = len(ids) + len(lead)
            kept = len(ids) if length <= most else most // 2
            first = len(ids) - kept
            inside = [*[(0, 0)] * len(lead), *offsets[first:]]
            out.append(Encoded(text, text, [*lead, *ids[first:]], inside, length))
        return out

    def prefix_ids(self, source: Encoded, prefix: str) -> list[int]:
        """A prefix goes on where the prompt ends."""
        before, both = (self.source.encode(text).ids for text in (source.text, source.text + prefix))
        return both[len(before) :] if both[: len(before)] == before else self.target.encode(prefix).ids

    def continuation(self, source: Encoded) -> list[int]:
        return list(source.ids)

    def output_limit(self, length: int, settings: DecodeConfig) -> int | None:
        return None if self.slides(settings) else max(0, self.config.text.max_length - length)

    def slides(self, settings: DecodeConfig) -> bool:
        """Whether a text goes on past the context."""
        positions = self.settings.positions
        if settings.slide and positions not in ("rotary", "alibi"):
            raise InputError(
                f"this model's positions are {positions}: it cannot go on past its "
                f"context of {self.config.text.max_length:,} tokens. Only rotary and alibi positions slide."
            )
        return settings.slide

    def kept_tokens(self) -> int:
        return self.config.text.max_length // 2

    def fills_context(self, text: str) -> bool:
        length = len(self.source.encode(text).ids) + self.settings.add_bos
        return not self.config.decode.slide and length >= self.config.text.max_length

    def length_bounds(self, source: Sequence[int], answer: Answer, settings: DecodeConfig) -> Bounds | None:
        return Bounds(0.0, len(answer.tokens) + 1)  # it is neither short nor too long, but may loop

    # --- looking

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        """Prompt and answer are one text; each row attends to what was read when it came."""
        written = [token.id for token in answer.tokens[:-1]]
        queries = written_pieces(self.target, written, answer.text, source.ids)
        end = Piece(SPECIAL[EOS], len(answer.text), len(answer.text))
        shift = len(source.text)
        moved = (Piece(one.text, one.start + shift, one.end + shift) for one in [*queries, end])
        both = [*read_pieces(source), *moved]
        return {"key": [], "query": both[1:], "input": both[:-1]}

    def replay_all(self, sources: Sequence[Encoded], outputs: Sequence[Sequence[int]]) -> Batch:
        ids = pad([[*source.ids, *output, EOS] for source, output in zip(sources, outputs, strict=True)])
        return Batch(ids[:, :0], torch.zeros(len(ids), dtype=torch.long), ids[:, :-1], ids[:, 1:])

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return model.decoder(model.source_embedding(ids))[0], lengths

    def architecture(self) -> Architecture:
        return Architecture(encoder=False, decoder=True)
