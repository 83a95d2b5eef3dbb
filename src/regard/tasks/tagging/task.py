"""The task: words in, a tag for each out, with its certainty."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.config.model import ModelConfig, TaggerConfig
from regard.config.run import Config
from regard.data.batching import Batch, Row, pad_sources
from regard.data.encoding import Encoded
from regard.data.examples import Dropped, Example, Source, Words
from regard.data.vocabulary import UNK, Vocabularies, Vocabulary
from regard.errors import ConfigError, DataError, InputError
from regard.tasks.axes import Piece, Tokens
from regard.tasks.encoder import LABELS
from regard.tasks.page import FORMS
from regard.tasks.tagging.classical import baum_welch, count_hmm, fit_weights, make_groups
from regard.tasks.tagging.features import Templates, encode_bag, learn_features
from regard.tasks.tagging.model import Tagger
from regard.tasks.tagging.spans import count_spans, is_closed, may_follow, read_spans
from regard.tasks.task import Answer, Answered, Generate, Metric, Table, Task, Token

EDGES = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)
"""A word, and the punctuation around it."""


def span_f1(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> float:
    """F1 of spans, as CoNLL's script counts it."""
    pairs = [answer.text.split() for answer in answers], [wanted[0].split() for wanted in references]
    return count_spans(*pairs)[""].figures()["f1"]


def accuracy(answers: Sequence[Answer], references: Sequence[Sequence[str]], known: bool | None = None) -> float:
    """The share of tags that are right: of all words, or of those that training knew, or did not."""
    right = total = 0
    for answer, wanted in zip(answers, references, strict=True):
        for word, tag in zip(answer.details.get("words", ()), wanted[0].split(), strict=True):
            if known is None or word["known"] == known:
                right += word["tag"] == tag
                total += 1
    return 100 * right / total if total else math.nan


class TaggingTask(Task):
    """The tags of words."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (TaggerConfig,)
    settings: TaggerConfig
    verb = "tag"
    metrics: ClassVar[tuple[str | Metric, ...]] = (
        Metric("span_f1", span_f1),
        Metric("accuracy", accuracy),
        Metric("accuracy_known", functools.partial(accuracy, known=True)),
        Metric("accuracy_unknown", functools.partial(accuracy, known=False)),
        "exact",
        "perplexity",
    )
    form = FORMS["tagging"]

    @classmethod
    def check(cls, config: Config) -> None:
        cls.make_templates(config, lambda word: True)

    @classmethod
    def make_templates(cls, config: Config, known: Callable[[str], bool]) -> Templates:
        """The feature templates of a run; `known` says which words are no rare ones."""
        assert isinstance(config.model, TaggerConfig)
        return Templates(config.model.features, list(getattr(config.data, "features", ())), known)

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        source = example.source if isinstance(example.source, Words) else Words(tuple(str(example.source).split()))
        accepted = super().accept(example._replace(source=source), config)
        if isinstance(accepted, Example) and len(source.words) != len(example.target.split()):
            return Dropped("not as many tags as words", example.where)
        return accepted

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        """Features of the words, and tags."""
        assert config.text.target is not None
        sentences = [example.source for example in examples if isinstance(example.source, Words)]
        sentences += [Words(tuple(line.split())) for line in raw]
        counts = Counter(word for sentence in sentences for word in sentence.words)
        templates = cls.make_templates(config, lambda word: counts[word] > 1)
        features = learn_features(templates, sentences, config.text.source.min_count)
        return Vocabularies(features, Vocabulary.learn([example.target for example in examples], config.text.target))

    def __init__(self, config: Config, vocabularies: Vocabularies) -> None:
        super().__init__(config, vocabularies)
        self.ids: dict[str, int] = self.source.tokenizer.get_vocab()
        self.templates = self.make_templates(config, lambda word: f"rare[0]={word}" in self.ids)
        self.ids_per_token = min(
            len(self.templates.single) + 200 * bool(self.templates.ngrams), self.settings.max_features
        )
        self.tags = [self.target.token(i) for i in range(LABELS, self.target.size)]

    def knows(self, word: str) -> bool:
        """Whether training saw a word, as far as the features tell."""
        return any(name in self.ids for name in (f"word[0]={word}", f"lower[0]={word.lower()}", f"rare[0]={word}"))

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Refuse a tagging that the constraints do not allow."""
        if self.settings.constraints == "none":
            return
        closed = is_closed(self.tags)
        for example in examples:
            for before, tag in itertools.pairwise([None, *example.target.split(), None]):
                if not may_follow(before, tag, closed):
                    raise DataError(
                        f"{example.where} has {tag or 'the end'} behind {before or 'the beginning'}, which model.constraints = "
                        '"spans" forbids: it is neither BIO nor BIOES. Correct it, or set model.constraints = "none".'
                    )

    def encode_targets(self, examples: Sequence[Example], sources: Sequence[Encoded]) -> Iterable[list[int] | Dropped]:
        for example, tokens in zip(examples, self.target.encode_all([one.target for one in examples]), strict=True):
            yield Dropped("a tag that training never saw", example.where) if UNK in tokens.ids else tokens.ids

    def describe_rows(self, rows: Sequence[Row]) -> tuple[int, str]:
        """A solver's step is a pass over all words."""
        words = [len(row.target) for row in rows]
        told = f"{len(rows):,} sentences of {sum(words):,} words, at most {max(words):,}; {len(self.tags)} tags"
        return 1 if self.settings.encoder == "none" else super().describe_rows(rows)[0], told

    # --- the model

    def build(self) -> Tagger:
        model = Tagger(self.settings, self.source.size, len(self.tags), self.ids_per_token, self.config.text.max_length)
        if self.settings.constraints == "spans":
            names, closed = [*self.tags, None], is_closed(self.tags)
            model.allowed = torch.tensor([[may_follow(before, tag, closed) for tag in names] for before in names])
        return model

    def solve(self, model: Any, rows: Sequence[Row], raw: Callable[[], Iterable[str]]) -> Iterator[float] | None:
        """Weights of features are fitted by L-BFGS; an HMM is counted, and goes on with Baum-Welch where there is text
        without tags (text.raw)."""
        settings = self.settings
        if settings.encoder != "none":
            return None
        if settings.structure != "hmm":
            return fit_weights(model, rows, settings.l1, settings.l2)
        return self.solve_hmm(model, rows, raw)

    def solve_hmm(self, model: Tagger, rows: Sequence[Row], raw: Callable[[], Iterable[str]]) -> Iterator[float]:
        """Count, then Baum-Welch on all sentences if some come without tags."""
        count_hmm(model, rows, self.settings.smoothing)
        with torch.no_grad():
            yield sum(float(model(batch).total) for batch in make_groups(rows)) / sum(len(row.target) for row in rows)
        if self.config.text.raw:
            plain = [Row(one.ids, [LABELS] * len(one.offsets), sequence=False) for one in self.encode(list(raw()))]
            yield from baum_welch(model, make_groups([*rows, *plain]), self.settings.smoothing)

    # --- answers

    def split(self, text: str) -> list[tuple[int, int]]:
        """Where the words of a text are: between white space; punctuation around one that is not known is apart."""
        found = []
        for match in re.finditer(r"\S+", text):
            parts = EDGES.fullmatch(match[0])
            assert parts is not None
            if self.knows(match[0]) or not parts[2]:
                found.append(match.span())
                continue
            start, first, last = match.start(), len(parts[1]), len(parts[1]) + len(parts[2])
            edges = [*range(first), *range(last, len(match[0]))]
            found += sorted([(start + first, start + last), *((start + place, start + place + 1) for place in edges)])
        return found

    def check_source(self, source: Source, where: str) -> None:
        if not isinstance(source, Words):
            super().check_source(source, where)

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        out = []
        for source in sources:
            text = str(source)
            if isinstance(source, Words):
                ends = list(itertools.accumulate(len(word) + 1 for word in source.words))
                places = [(end - len(word) - 1, end - 1) for word, end in zip(source.words, ends, strict=True)]
            else:
                places = self.split(text)
                source = Words(tuple(text[start:end] for start, end in places))
            most = self.config.text.max_length
            bags = self.templates.extract(source)[:most]
            ids = [i for bag in bags for i in encode_bag(bag, self.ids, self.ids_per_token)]
            out.append(Encoded(source, text, ids, places[:most], len(places)))
        return out

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        ids, lengths = pad_sources([one.ids for one in sources])
        batch = Batch(ids, lengths, ids, ids).to(next(model.parameters()).device)
        with torch.no_grad():
            paths, scores, chances = (part.cpu() for part in model.best(batch, best))
        for row, source in enumerate(sources):
            found = zip(paths[row].tolist(), scores[row].tolist(), strict=True)
            yield row, [self.make_answer(source, *one, chances[row]) for one in found if one[1] > -math.inf]

    def make_answer(self, source: Encoded, path: list[int], score: float, chances: Tensor) -> Answer:
        """A tagging with the certainty of each of its tags, and the spans that it marks."""
        words, tokens = [], []
        for place, ((start, end), tag) in enumerate(zip(source.offsets, path, strict=False)):
            chance, text = float(chances[place, tag]), source.text[start:end]
            words.append(
                {
                    "text": text,
                    "start": start,
                    "end": end,
                    "tag": self.tags[tag],
                    "probability": chance,
                    "known": self.knows(text),
                }
            )
            tokens.append(Token(self.tags[tag], math.log(max(chance, 1e-30)), tag + LABELS))
        tags = [token.text for token in tokens]
        spans = [
            {"label": span.label, "start": source.offsets[span.first][0], "end": source.offsets[span.end - 1][1]}
            for span in read_spans(tags)
            if span.label
        ]
        return Answer(" ".join(tags), score, tokens, {"probability": math.exp(score), "words": words, "spans": spans})
