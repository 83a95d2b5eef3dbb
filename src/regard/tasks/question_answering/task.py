"""Answering questions about a context, by a span of it or by a word."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.config.model import ModelConfig, ReaderConfig
from regard.config.run import Config
from regard.data.batching import Batch, Row, pad_sources
from regard.data.encoding import Encoded
from regard.data.examples import Dropped, Example, Question, Source
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import ConfigError, InputError
from regard.tasks.axes import Piece, Tokens, read_pieces
from regard.tasks.encoder import EncoderTask, LabelTask, learn_label_vocabularies
from regard.tasks.page import FORMS, Form
from regard.tasks.question_answering.encoding import encode_questions, find_span, sentence_pieces
from regard.tasks.question_answering.model import Reader
from regard.tasks.task import Answer, Answered, Architecture, Generate, Metric


class QuestionAnsweringTask(LabelTask, EncoderTask):
    """The answer to a question about a context. A word is chosen as a label is; a span is pointed at."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (ReaderConfig,)
    settings: ReaderConfig
    verb = "answer"
    metrics: ClassVar[tuple[str | Metric, ...]] = (
        "exact", "error", "accuracy", "span_exact", "span_f1", "f1", "ece", "perplexity",
    )  # fmt: skip
    extra_tokens = 1
    """A context has an end of its own."""

    @property
    def spans(self) -> bool:
        """Whether answers are parts of the context."""
        return self.settings.answer == "span"

    @property
    def form(self) -> Form:  # type: ignore[override]
        """An answer that is a word has no ends to show."""
        form = FORMS["question_answering"]
        return form if self.spans else form._replace(lines=form.lines[:1])

    # --- data

    @classmethod
    def parse(cls, text: str) -> Source:
        """A question, a tab and its context."""
        question, _, context = text.partition("\t")
        return Question(question, context)

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        source = cls.parse(example.source) if isinstance(example.source, str) else example.source
        found = super().accept(example._replace(source=source), config)
        if isinstance(found, Example) and isinstance(found.source, Question) and not found.source.context.strip():
            return Dropped("no context", example.where)
        return found

    @classmethod
    def fitting_metrics(cls, config: Config) -> Sequence[str | Metric]:
        """Spans are no labels."""
        assert isinstance(config.model, ReaderConfig)
        return [one for one in cls.metrics if config.model.answer == "word" or one not in ("f1", "ece")]

    @classmethod
    def adopt(cls, config: Config, pretrained: Config) -> Config:
        assert isinstance(config.model, ReaderConfig)
        if config.model.share_layers:
            raise ConfigError(
                "model.share_layers is one block for all layers, but those of model.pretrained are not the same."
            )
        return super().adopt(config, pretrained)

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        assert isinstance(config.model, ReaderConfig)
        sources = [*(str(example.source) for example in examples), *raw]
        if config.model.answer == "word":
            return learn_label_vocabularies(config, sources, [example.target for example in examples])
        parts = dict.fromkeys(part for text in sources for part in text.split("\t"))
        shared = Vocabulary.learn(parts, config.text.source)
        return Vocabularies(shared, shared)

    def check_examples(self, examples: Sequence[Example]) -> None:
        if not self.spans:
            super().check_examples(examples)

    def encode_targets(self, examples: Sequence[Example], sources: Sequence[Encoded]) -> Iterable[list[int] | Dropped]:
        if not self.spans:
            return super().encode_targets(examples, sources)
        longest = self.settings.max_answer_length
        return (find_span(example, row, longest) for example, row in zip(examples, sources, strict=True))

    def make_row(self, source: Sequence[int], wanted: list[int]) -> Row:
        return Row(source, wanted, sequence=False)

    # --- the model and its answers

    def build(self) -> Reader:
        labels = None if self.vocabularies.shared else self.target.size
        return Reader(self.settings, self.source.size, labels, self.config.text.max_length + 2)

    def make_source(self, fields: Mapping[str, Any]) -> Source:
        if set(fields) == {"question", "context"}:
            return Question(fields["question"], fields["context"])
        return super().make_source(fields)

    def check_source(self, source: Source, where: str) -> None:
        if not isinstance(source, Question):
            came = type(source).__name__
            raise InputError(f"{where} is {came}, expected a question and its context (regard.Question).")
        if source.strip() and not source.context.strip():
            raise InputError(f"{where} has no context: a question, a tab and the context are wanted.")

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        questions = [source for source in sources if isinstance(source, Question)]
        assert len(questions) == len(sources)
        return encode_questions(questions, self.source, self.config.text.max_length, self.settings)

    @property
    def separator(self) -> str | None:
        return None if self.spans else super().separator

    def canonical(self, texts: Sequence[str]) -> list[str]:
        return list(texts) if self.spans else super().canonical(texts)

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        if not self.spans:
            yield from super().answer(model, sources, best, generate)
            return
        ids, lengths = pad_sources([one.ids for one in sources])
        batch = Batch(ids, lengths, ids, ids).to(next(model.parameters()).device)
        with torch.inference_mode():
            logits = model.logits(batch).float().log_softmax(-1).cpu()
        yield from enumerate(self.point(source, both, best) for source, both in zip(sources, logits, strict=True))

    def point(self, source: Encoded, ends: Tensor, best: int) -> list[Answer]:
        """Parts of the context, likeliest first, by the log-probabilities (2, source) of their ends."""
        starts, stops = ends[:, : len(source.ids)]
        totals = starts[:, None] + stops
        visible = torch.tensor([not source.text[a:b].isspace() for a, b in source.offsets])
        near = torch.ones_like(totals, dtype=torch.bool).triu().tril(self.settings.max_answer_length - 1)
        allowed = near & visible & visible[:, None]
        most = min(4 * best + 8, totals.numel())  # tokens may be the bytes of one character
        scores, places = totals.masked_fill(~allowed, -torch.inf).flatten().topk(most)
        found: dict[Any, Answer] = {}
        for score, place in zip(scores.tolist(), places.tolist(), strict=True):
            if score > -1e30:  # what is not in the context is impossible
                answer = extract_span(source, place // len(stops), place % len(stops), score)
                found.setdefault(answer.details["span"], answer)
        answers = [answer for answer in found.values() if answer.text]
        return answers[:best] or [make_span("", math.log(1e-30), 0, 0)]  # only white space is left of it

    # --- looking

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        keys = sentence_pieces(source) if self.settings.unit == "sentence" else read_pieces(source)
        return {"key": keys, "query": self.query_pieces(), "input": []}

    def query_pieces(self) -> list[Piece]:
        return [Piece(name, 0, 0) for name in (("start", "end") if self.spans else ("question",))]

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self.settings.unit == "token":
            return EncoderTask.states(self, model, ids, lengths)
        parts = model.parts(ids, lengths)
        return parts.states, (parts.question | parts.context)[:, 0, 0].sum(-1)

    def check_token_states(self) -> None:
        if self.settings.unit == "sentence":
            raise InputError("this model reads whole sentences (model.unit): its tokens have no states.")

    def architecture(self) -> Architecture:
        raise ConfigError("it is a reader, with an attention behind its encoder")


def extract_span(source: Encoded, first: int, last: int, score: float) -> Answer:
    """The part of a context from one token to another, without white space around it."""
    assert isinstance(source.source, Question)
    inside = source.text[source.offsets[first][0] : source.offsets[last][1]]
    start = source.offsets[first][0] + len(inside) - len(inside.lstrip())
    return make_span(inside.strip(), score, start, len(source.source.question) + 1)


def make_span(text: str, score: float, start: int, shift: int) -> Answer:
    """An answer with its place: `span` counts in the context, which begins at `shift`, `place` in all of the text."""
    first = start - shift
    span = (first, first + len(text)) if text else (0, 0)
    return Answer(text, score, (), {"probability": math.exp(score), "span": span, "place": (start, start + len(text))})
