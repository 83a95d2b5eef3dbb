"""What a task says of itself, and what everybody else asks of it.

A task is everything that differs between translating, continuing, classifying, answering and embedding. One object
belongs to one run: it knows the run's settings and vocabularies. The defaults here are those of a task that reads one
text and chooses an answer, so a new one only says what is different.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from regard.config.model import ModelConfig
from regard.config.run import Config, DecodeConfig
from regard.data.batching import Batch, Row, collate, iterate_updates, pad_sources, padding_share, plan_epoch
from regard.data.encoding import Encoded, encode_texts, fits, reject_surrogates
from regard.data.examples import Dropped, Example, Ledger, Source
from regard.data.vocabulary import EOS, Vocabularies, Vocabulary
from regard.errors import ConfigError, InputError
from regard.nn.loss import Surprise, Trainable
from regard.nn.state import Hypothesis
from regard.nn.word_vectors import count_vectors, load_vectors
from regard.tasks.answers import Answer as Answer
from regard.tasks.answers import Architecture as Architecture
from regard.tasks.answers import Bounds as Bounds
from regard.tasks.answers import Metric as Metric
from regard.tasks.answers import Table as Table
from regard.tasks.answers import Token as Token
from regard.tasks.axes import Piece, Shown, Structure, Tokens, read_pieces
from regard.tasks.page import FORMS, Form

Answered = tuple[int, list[Answer]] | None
"""The place of a source and its answers; None: nothing yet, and a moment to do something else."""
Generate = Callable[[Sequence[Encoded]], Iterator[tuple[int, list[Hypothesis]] | None]]
"""Decodes sources by whichever engine a predictor has: the place of each and its hypotheses, as they are finished."""
Scored = tuple[Batch, list[int]]
"""A batch, and the numbers of its rows' examples."""
Say = Callable[[str], None]


class Embedded(NamedTuple):
    """An embedding that may begin with word vectors: of which side, from which file, or counted from text.raw."""

    side: str
    table: nn.Embedding
    vocabulary: Vocabulary
    path: str | None
    counted: bool


class Task:
    """One thing that a run does. `kinds` are the settings of the models it serves, `verb` is what it does to a text."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]]
    verb: ClassVar[str]
    metrics: ClassVar[tuple[str | Metric, ...]] = ("exact", "accuracy", "perplexity")
    """Those that fit: names of evaluation/metrics.py, or its own."""
    protocols: ClassVar[frozenset[str]] = frozenset()
    """Other servers' protocols that it can be asked by: libretranslate, openai."""
    gives_answers: ClassVar[bool] = True
    """Whether a source has an answer; else there are vectors and maps only."""
    form: ClassVar[Form] = FORMS["text"]
    """How it is asked over HTTP and on the page."""
    files_are_sources: ClassVar[bool] = False
    """Whether a file on the command line is a source itself, an image; else its lines are."""
    multi_reference: ClassVar[bool] = False
    """Whether all targets of one source are references for it, whatever `evaluate.multi_reference` says."""
    ids_per_token: int = 1
    """Ids of a source that stand for one token; batches are counted in tokens."""
    settings: Any
    """Those of the model."""

    def __init__(self, config: Config, vocabularies: Vocabularies) -> None:
        self.config, self.vocabularies, self.settings = config, vocabularies, config.model
        self.source, self.target = vocabularies

    # --- settings and data

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse settings that contradict each other in a way that only this task knows."""

    @classmethod
    def fitting_metrics(cls, config: Config) -> Sequence[str | Metric]:
        """Those of `metrics` that models of these settings have."""
        return cls.metrics

    @classmethod
    def pretrained_run(cls, config: Config) -> Path | None:
        """The run that a model begins with, if any."""
        return None

    @classmethod
    def adopt(cls, config: Config, pretrained: Config) -> Config:
        """The same settings, with what a model takes over from a pretrained run."""
        raise ConfigError(f"a model of kind {config.model.kind} cannot begin with another run.")

    @classmethod
    def parse(cls, text: str) -> Source:
        """A source, from the text that stands for it on the command line or in a file."""
        return text

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        """An example in the task's own form, or why it cannot be used."""
        if not example.target.strip() or not example.source.strip():
            return Dropped("empty", example.where)
        return reject_surrogates(example)

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        """Vocabularies of the training examples; that of the source of raw text, too."""
        sources = [*(str(example.source) for example in examples), *raw]
        targets = [example.target for example in examples]
        if config.text.target is None:
            shared = Vocabulary.learn(itertools.chain(sources, targets), config.text.source)
            return Vocabularies(shared, shared)
        target = Vocabulary.learn(targets, config.text.target)
        return Vocabularies(Vocabulary.learn(sources, config.text.source), target)

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Refuse examples that training or evaluation could make no sense of."""

    def encode_targets(self, examples: Sequence[Example], sources: Sequence[Encoded]) -> Iterable[list[int] | Dropped]:
        """The wanted ids of every example, or why it cannot be learned."""
        return [tokens.ids for tokens in self.target.encode_all([example.target for example in examples])]

    def encode_examples(self, examples: Sequence[Example], ledger: Ledger, longer: str | None = None) -> list[Row]:
        """Examples as rows of ids; what cannot be learned, or is too long, goes into the ledger. `longer` is what
        happens then, else text.longer decides."""
        text = self.config.text if longer is None else self.config.text.model_copy(update={"longer": longer})
        sources = self.encode([example.source for example in examples])
        rows = []
        for example, source, wanted in zip(examples, sources, self.encode_targets(examples, sources), strict=True):
            if isinstance(wanted, Dropped):
                ledger.discard(*wanted)
            elif fits(max(source.length, len(wanted)), text, ledger, example.where):
                rows.append(self.make_row(source.ids, wanted[: text.max_length]))
        return rows

    def make_row(self, source: Sequence[int], wanted: list[int]) -> Row:
        """One example to learn from; its target is taken as it is."""
        return Row(source, wanted, sequence=False)

    def batches(self, rows: Sequence[Row], start: int) -> Iterator[list[Batch]]:
        """Endless updates from number `start` on, each a list of batches."""
        settings = self.config.train.model_copy(update={"batch_tokens": self.batch_ids})
        return iterate_updates(rows, settings, start)

    def largest_batch(self, rows: Sequence[Row]) -> Batch:
        """The longest rows, as many as a batch has of them: no batch of training needs more memory."""
        longest = sorted(rows, key=lambda row: max(len(row.source), len(row.target) + 1), reverse=True)
        size = max(len(longest[0].source), len(longest[0].target) + 1)
        return collate(longest[: max(1, self.batch_ids // size)])

    @property
    def batch_ids(self) -> int:
        """The ids of a batch."""
        return self.config.train.batch_tokens * self.ids_per_token

    def scoring_batches(self, examples: Sequence[Example], ledger: Ledger | None = None) -> Iterator[Scored]:
        """Examples as batches whose surprise is measured, each with the numbers of its examples. What is too long is
        cut; what cannot be given as a target at all goes into the ledger."""
        rows = self.encode_examples(examples, ledger or Ledger(), "cut")
        every = len(rows) == len(examples)  # else find out which ones can
        kept = [number for number, one in enumerate(examples) if every or self.encode_examples([one], Ledger(), "cut")]
        for indices in plan_epoch(rows, self.batch_ids, 0, 0):
            yield collate([rows[i] for i in indices]), [kept[i] for i in indices]

    def describe_rows(self, rows: Sequence[Row]) -> tuple[int, str]:
        """The batches of an epoch, and what else a user wants to know before training: lengths, padding."""
        batches = plan_epoch(rows, self.batch_ids, self.config.train.seed, 0)
        sides = [sorted(len(row.source) for row in rows), sorted(len(row.target) for row in rows)]

        def both(numbers: Iterable[int]) -> str:
            return " / ".join(f"{number:,}" for number in numbers)

        return len(batches), (
            f"tokens {both(map(sum, sides))} (source / target); median length "
            f"{both(side[len(side) // 2] for side in sides)}, longest {both(side[-1] for side in sides)}; "
            f"{len(batches):,} batches an epoch, {padding_share(rows, batches):.1%} padding"
        )

    # --- the model

    def build(self) -> Trainable:
        """The model of these settings, its weights drawn from torch's global generator."""
        raise NotImplementedError

    def embeddings(self, model: Any) -> list[Embedded]:
        """The embeddings that may begin with word vectors."""
        return []

    def initialize(self, model: Any, raw: Callable[[], Iterable[str]], say: Say) -> None:
        """First weights that are not random: word vectors, counted from the texts that `raw` gives, or from a file."""
        for side, table, vocabulary, path, counted in self.embeddings(model):
            if counted:
                say("counting which words stand near which ...")
                filled = count_vectors(table, (tokens.ids for tokens in vocabulary.encode_all(list(raw()))))
                found = "from their neighbours in the text"
                say(f"{filled:,} of the {vocabulary.size:,} {side} entries have a vector {found}")
            if path:
                filled = load_vectors(table, path, vocabulary.find)
                say(f"{filled:,} of the {vocabulary.size:,} {side} entries have a vector in {path}")

    def freeze(self, model: Any) -> None:
        """Leave out of training what the settings say."""
        for _, table, _, path, counted in self.embeddings(model):
            if path or counted:
                table.weight.requires_grad_(not self.settings.freeze_vectors)

    def warm(self, model: Any, examples: Sequence[Example], report: Callable[[int, int], None]) -> None:
        """Compute once what frozen parts of the model make of the sources of examples, if it has any; the model has its
        weights by now. `report` hears how many of how many are done."""

    def solve(self, model: Any, rows: Sequence[Row], raw: Callable[[], Iterable[str]]) -> Iterator[float] | None:
        """Fit a model by an algorithm of its own, from the rows and the texts that `raw` gives: the objective in nats a
        token after every pass over them. None: it has none, and learns by the trainer's steps."""
        return None

    def calibrate(self, model: Any, batches: Callable[[], Iterable[Batch]]) -> dict[str, Tensor]:
        """Weights that are fitted to validation data after training."""
        return {}

    def surprise(self, model: Any, batch: Batch) -> Surprise:
        """The negative log-probability of every row's answer."""
        found: Surprise = model.surprise(batch)
        return found

    # --- answers

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        """Sources as the model reads them: cut to what it takes, <eos> behind them."""
        lead, tail = self.frame()
        texts = [str(source) for source in sources]
        return encode_texts(texts, self.source, self.config.text.max_length, lead=lead, tail=tail)

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind every source."""
        return [], [EOS]

    def source_lengths(self, sources: Sequence[Source]) -> list[int]:
        """The tokens of sources, by which an evaluation groups them; a source of 0 is in no group."""
        return [len(tokens.ids) for tokens in self.source.encode_all(list(map(str, sources)))]

    def make_source(self, fields: Mapping[str, Any]) -> Source:
        """A source, from what a client sent by the names of the form's fields: texts, and the bytes of an image."""
        if list(fields) == ["text"]:
            return self.parse(fields["text"])
        wanted = " and ".join(field["name"] for field in self.form.fields)
        raise InputError(f"{' and '.join(fields)} came, but this model's task is to {self.verb}: send {wanted}.")

    def check_source(self, source: Source, where: str) -> None:
        """Refuse a source that the model cannot take, whatever its length."""
        if not isinstance(source, str):
            raise InputError(f"{where} is {type(source).__name__}, expected str.")

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        """The place of each source and its `best` answers, best first; None whenever a step is done."""
        raise NotImplementedError

    def prefix_ids(self, source: Encoded, prefix: str) -> list[int]:
        """The ids of a text that a written answer must begin with."""
        raise InputError(
            "this model does not write its answers: they cannot begin with a prefix, nor can a target be given."
        )

    def continuation(self, source: Encoded) -> list[int]:
        """The ids that a written answer goes on from."""
        raise InputError("this model does not write: there is nothing to stream.")

    def output_limit(self, length: int, settings: DecodeConfig) -> int | None:
        """The most tokens that the output to a source of this many may have, whatever the settings' limits."""
        raise InputError("this model does not write.")

    def length_bounds(self, source: Sequence[int], answer: Answer, settings: DecodeConfig) -> Bounds | None:
        """The lengths between which an answer to these ids is not suspicious; None: there is nothing to suspect."""
        return None

    def kept_tokens(self) -> int:
        """Tokens that are kept of a source that is cut."""
        return self.config.text.max_length

    def fills_context(self, text: str) -> bool:
        """Whether a text and its continuation have filled the context."""
        return False

    def canonical(self, texts: Sequence[str]) -> list[str]:
        """Answers or references as they can be compared."""
        return list(texts)

    @property
    def separator(self) -> str | None:
        """What stands between the labels of one answer, "" if each is one label; None if answers are no labels."""
        return None

    def tabulate(self, answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> dict[str, Table]:
        """Tables of an evaluation beside its metrics, by their titles."""
        return {}

    # --- looking

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        """What stands on the sides of the maps: the source (key), the answer (query), what a decoder reads (input)."""
        return {"key": read_pieces(source), "query": self.query_pieces(), "input": []}

    def show_source(self, source: Encoded) -> Shown | None:
        """A source that is an image, as a look shows it."""
        return None

    def query_pieces(self) -> list[Piece]:
        """What attends to the source, where that is no text: classes, the ends of a span."""
        return []

    def replay(self, source: Encoded, answer: Answer) -> Batch:
        """The answer as if it were to be learned: one pass over it gives all that its computation saw."""
        ids, lengths = pad_sources([source.ids])
        return Batch(ids, lengths, ids, ids)

    def run(self, model: Any, batch: Batch) -> None:
        """The forward pass that is looked at."""
        model.logits(batch)

    def structures(self, model: Any, batch: Batch) -> list[Structure]:
        """Maps of a batch of one row that no attention makes."""
        return []

    def look_logprobs(self, model: Any, batch: Batch, answer: Answer) -> list[float]:
        """The log-probabilities that a look shows, of the tokens of its query axis."""
        return [token.logprob for token in answer.tokens if token.logprob is not None]

    # --- vectors and export

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """ids (batch, source) -> states (batch, n, size), and how many of each row are real (batch,)."""
        raise InputError("this model has no vectors.")

    def check_token_states(self) -> None:
        """Refuse vectors of tokens where the states are those of something else."""

    def architecture(self) -> Architecture:
        """The architecture that others know it by, with nothing behind it; the default is to refuse export, for what
        nobody asked about would be lost."""
        raise ConfigError(f"its task is to {self.verb}, which is not offered for export")
