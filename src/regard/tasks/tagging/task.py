"""The task: words in, a tag for each out, with its certainty."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention.chain import marginals
from regard.config.model import ModelConfig
from regard.config.run import Config
from regard.config.structure import TaggerConfig
from regard.data.batching import Batch, Row, pad_sources
from regard.data.encoding import Encoded
from regard.data.examples import Dropped, Example, Source, Words
from regard.data.vocabulary import UNK, Vocabularies, Vocabulary
from regard.errors import ConfigError, DataError, InputError
from regard.tasks.axes import Piece, Structure, Tokens, read_pieces
from regard.tasks.encoder import LABELS, EncoderTask
from regard.tasks.page import FORMS
from regard.tasks.tagging.classical import baum_welch, count_hmm, fit_weights, make_groups
from regard.tasks.tagging.features import Guesses, Templates, encode_bag, learn_features, read_guesses
from regard.tasks.tagging.model import ChainTagger, Tagger
from regard.tasks.tagging.spans import count_spans, count_tags, is_closed, mark_spans, may_follow, read_spans
from regard.tasks.tagging.subwords import IDS, SubwordTagger, count_words, encode_words, split_words
from regard.tasks.task import Answer, Answered, Generate, Metric, Table, Task, Token

KNOWN = ("word[0]", "lower[0]", "rare[0]")
"""Templates whose features are the words of the training data."""
EDGES = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)
"""A word, and the punctuation around it."""


def split_tags(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> tuple[list[list[str]], ...]:
    """The tags that were given and those that were wanted, sentence by sentence."""
    return [answer.text.split() for answer in answers], [wanted[0].split() for wanted in references]


def span_f1(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> float:
    """F1 of spans, as CoNLL's script counts it."""
    return count_spans(*split_tags(answers, references))[""].figures()["f1"]


def accuracy(answers: Sequence[Answer], references: Sequence[Sequence[str]], known: bool | None = None) -> float:
    """The share of tags that are right, in percent: of all words, or of those that training knew, or did not. Words
    that were cut off are wrong."""
    right = total = 0
    for answer, wanted in zip(answers, references, strict=True):
        tags, words = wanted[0].split(), answer.details.get("words", ())
        for word, tag in zip(words, tags, strict=False):
            if known is None or word["known"] == known:
                right += word["tag"] == tag
                total += 1
        total += len(tags) - len(words) if known is None else 0
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
        templates = cls.make_templates(config, lambda word: True)
        if not cls.pretrained_run(config) and not any(name in KNOWN for name, _ in templates.single):
            raise ConfigError(f"model.features needs one of {', '.join(KNOWN)}: it tells which words training knew.")

    @classmethod
    def pretrained_run(cls, config: Config) -> Path | None:
        assert isinstance(config.model, TaggerConfig)
        return Path(config.model.pretrained) if config.model.pretrained else None

    @classmethod
    def adopt(cls, config: Config, pretrained: Config) -> Config:
        """As every encoder; features are left out."""
        adopted = EncoderTask.adopt(config, pretrained)
        return adopted.model_copy(update={"model": adopted.model.model_copy(update={"features": ()})})

    @classmethod
    def parse(cls, text: str) -> Source:
        """Tabs part words that are taken as they are, each with the further columns of the data behind it, as in
        `The DT<tab>dog NN`; other text is split into words first."""
        if "\t" not in text:
            return text
        rows = [cell.split() for cell in text.split("\t") if cell.strip()]
        return Words(tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows))

    @classmethod
    def make_templates(cls, config: Config, known: Callable[[str], bool], guesses: Guesses | None = None) -> Templates:
        """The feature templates of a run; `known` says which words are no rare ones."""
        assert isinstance(config.model, TaggerConfig)
        return Templates(config.model.features, list(getattr(config.data, "features", ())), known, guesses)

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
        self.subwords = self.pretrained_run(config) is not None
        guesses = {} if self.subwords else read_guesses(self.ids)
        self.templates = self.make_templates(config, lambda word: f"rare[0]={word}" in self.ids, guesses)
        features = len(self.templates.single) + 200 * bool(self.templates.ngrams)
        self.ids_per_token = IDS if self.subwords else min(features, self.settings.max_features)
        self.tags: list[str] = [self.target.token(i) for i in range(LABELS, self.target.size)]
        self.closed = is_closed(self.tags)

    def knows(self, word: str) -> bool:
        """Whether training saw a word, as far as the features tell; of sub-words, whether it is one of them."""
        if self.subwords:
            return self.source.find(word) is not None
        return any(f"{name}={word.lower() if name == 'lower[0]' else word}" in self.ids for name in KNOWN)

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Refuse a tagging that the constraints do not allow."""
        for example in examples:
            for before, tag in itertools.pairwise([None, *example.target.split(), None]):
                if not self.allows(before, tag):
                    found = f"{tag or 'the end'} behind {before or 'the beginning'}"
                    raise DataError(
                        f'{example.where} has {found}, which model.constraints = "spans" forbids: it is neither BIO '
                        'nor BIOES. Correct it, or set model.constraints = "none".'
                    )

    def encode_targets(self, examples: Sequence[Example], sources: Sequence[Encoded]) -> Iterable[list[int] | Dropped]:
        for example, tokens in zip(examples, self.target.encode_all([one.target for one in examples]), strict=True):
            yield Dropped("a tag that training never saw", example.where) if UNK in tokens.ids else tokens.ids

    def make_row(self, source: Sequence[int], wanted: list[int]) -> Row:
        """Words that were cut off have no tags."""
        return super().make_row(source, wanted[: count_words(source)] if self.subwords else wanted)

    def describe_rows(self, rows: Sequence[Row]) -> tuple[int, str]:
        """A solver's step is a pass over all words."""
        words = [len(row.target) for row in rows]
        told = f"{len(rows):,} sentences of {sum(words):,} words, at most {max(words):,}; {len(self.tags)} tags"
        return 1 if self.settings.encoder == "none" else super().describe_rows(rows)[0], told

    # --- the model

    def build(self) -> ChainTagger:
        sizes, longest = (self.settings, self.source.size, len(self.tags)), self.config.text.max_length
        model: ChainTagger = (
            SubwordTagger(*sizes, longest + 2) if self.subwords else Tagger(*sizes, self.ids_per_token, longest)
        )
        names = [*self.tags, None]
        model.allowed = torch.tensor([[self.allows(before, tag) for tag in names] for before in names])
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
        """Refuse columns that do not belong to the words, and a number of words that the constraints cannot tag."""
        if not isinstance(source, Words):
            super().check_source(source, where)
        elif source.columns and len(source.columns) != len(source.words):
            raise InputError(f"{where} has {len(source.words)} words, but columns for {len(source.columns)}.")
        if self.settings.constraints == "none":
            return
        count = len(source.words if isinstance(source, Words) else self.split(str(source)))
        kept = len(self.encode([source])[0].offsets) if self.subwords else min(count, self.config.text.max_length)
        if not self.may_tag(kept):
            raise InputError(
                f'{where} has {count} words, and model.constraints = "spans" allows no tagging of so many with the '
                f"tags {', '.join(self.tags)}."
            )

    def may_tag(self, count: int) -> bool:
        """Whether there is a tagging of so many words that the constraints allow."""
        last: list[str | None] = [None]
        for _ in range(count):
            last = [tag for tag in self.tags if any(self.allows(before, tag) for before in last)]
        return any(self.allows(tag, None) for tag in last)

    def allows(self, before: str | None, tag: str | None) -> bool:
        """Whether the constraints allow a tag behind another; None is the edge of a sentence."""
        return self.settings.constraints == "none" or may_follow(before, tag, self.closed)

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
            most, length = self.config.text.max_length, len(places)
            if self.subwords:
                ids, length = encode_words(split_words(source.words, self.source), most)
                places = places[: count_words(ids)]
            else:
                bags = self.templates.extract(source)[:most]
                ids = [i for bag in bags for i in encode_bag(bag, self.ids, self.ids_per_token)]
            out.append(Encoded(source, text, ids, places[:most], length))
        return out

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        batch = self.collate(sources).to(next(model.parameters()).device)
        with torch.no_grad():
            paths, scores, chances = (part.cpu() for part in model.best(batch, best))
        for row, source in enumerate(sources):
            found = zip(paths[row].tolist(), scores[row].tolist(), strict=True)
            yield row, [self.make_answer(source, *one, chances[row]) for one in found if one[1] > -math.inf]

    def collate(self, sources: Sequence[Encoded]) -> Batch:
        """Sources as a batch without tags."""
        ids, lengths = pad_sources([one.ids for one in sources])
        return Batch(ids, lengths, ids, ids)

    def make_answer(self, source: Encoded, path: list[int], score: float, chances: Tensor) -> Answer:
        """A tagging with the certainty of each of its tags, and the spans that it marks."""
        words, tokens = [], []
        for place, ((start, end), tag) in enumerate(zip(source.offsets, path, strict=False)):
            chance, text = float(chances[place, tag]), source.text[start:end]
            found = {"text": text, "start": start, "end": end, "tag": self.tags[tag], "probability": chance}
            words.append(found | {"known": self.knows(text)})
            tokens.append(Token(self.tags[tag], math.log(max(chance, 1e-30)), tag + LABELS))
        tags = [token.text for token in tokens]
        came = min((len(row) for row in getattr(source.source, "columns", ())), default=0)
        guessed = [] if self.subwords else self.templates.columns[came:]
        spans = [
            {"label": label, "start": words[first]["start"], "end": words[end - 1]["end"]}
            for label, first, end in (read_spans(tags) if mark_spans(self.tags) else ())
        ]
        details = {"probability": math.exp(score), "words": words, "spans": spans}
        return Answer(" ".join(tags), score, tokens, details | ({"guessed": guessed} if guessed else {}))

    def tabulate(self, answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> dict[str, Table]:
        """Precision, recall and F1 of every label: of spans, where tags mark them, else of tags."""
        given, wanted = split_tags(answers, references)
        spans = mark_spans(self.tags)
        counts = count_spans(given, wanted) if spans else count_tags(given, wanted)
        rows = [{"label": label, "wanted": one.wanted, **one.figures()} for label, one in counts.items() if label]
        return {"by label" if spans else "by tag": rows} if rows else {}

    # --- looking

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        """Words and tags; beside sub-words, which the encoder's maps are of, words are the `input`."""
        words = [Piece(source.text[start:end], start, end) for start, end in source.offsets]
        tags = [Piece(tag, 0, 0) for tag in self.tags]
        if not self.subwords:
            return {"key": words, "query": tags, "input": []}
        places = [
            (word.start + start, word.start + end)
            for word, tokens in zip(words, split_words([one.text for one in words], self.source), strict=True)
            for start, end in tokens.offsets
        ]
        ids, end = source.ids[::IDS], (len(source.text), len(source.text))
        return {
            "key": read_pieces(source._replace(ids=ids, offsets=[(0, 0), *places[: len(ids) - 2], end])),
            "query": tags,
            "input": words,
        }

    def look_logprobs(self, model: Any, batch: Batch, answer: Answer) -> list[float]:
        """Of tags there are some for every word: the map has them."""
        return []

    def structures(self, model: Any, batch: Batch) -> list[Structure]:
        """How likely every tag of every word is."""
        words, chain = "input" if self.subwords else "key", model.chain(batch)
        return [Structure("chain", "chain", (words, "query"), marginals(*chain).tags, chain)]
