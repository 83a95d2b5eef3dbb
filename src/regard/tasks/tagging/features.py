"""What is known of a word, as a bag of features that templates name.

A template is one or more parts joined by `|`, each a property and where to look from the word: `word[0]`, `word[-1]`,
`suffix3[0]`, `pos[-1]|pos[0]`. Properties are `word`, `lower`, `shape` (Xx-0), `prefixN` and `suffixN` (N letters),
`jamoN` (the last N letters of Korean syllables taken apart), `rare` (a word of the vocabulary, or else the shape and
ending of one that is not), `bias`, and the names of columns. `ngramsN` stands alone: all sequences of 2 to N
characters, the ends of the word marked.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers

from regard.data.examples import Words
from regard.data.vocabulary import PAD, SPECIAL, UNK, Vocabulary, clean
from regard.errors import ConfigError

PART = re.compile(r"([a-z_]+?)(\d*)\[(-?\d+)\]")
EDGE = ("<s>", "</s>")
"""What stands before the first and behind the last word."""
Property = Callable[[str], str]
"""Of a word."""
Guesses = Mapping[tuple[str, str], str]
"""(column, word or outline) -> what most often stood there in training."""


@functools.lru_cache(2**16)
def shape(word: str) -> str:
    """The kinds of a word's characters, repeated ones once: `Xx-0` for `Mid-1990`; of other scripts, the character's
    name's first word, so that Hangul, Hanja and kana can be told apart."""

    def kind(letter: str) -> str:
        if letter.isascii() or letter.isupper() or letter.islower():
            return "X" if letter.isupper() else "x" if letter.islower() else "0" if letter.isdigit() else letter
        return unicodedata.name(letter, "?").split()[0][:3].lower()

    return re.sub(r"(.+?)\1+", r"\1", "".join(map(kind, word)))


def outline(word: str) -> str:
    """What a word that is not known is known by: its shape and ending."""
    return f"{shape(word)} {word[-2:].lower()}"


@functools.lru_cache(2**16)
def jamo(word: str) -> str:
    """A word with its Korean syllables taken apart."""
    return unicodedata.normalize("NFD", word)


PROPERTIES: dict[str, Callable[[int], Property]] = {
    "word": lambda size: lambda word: word,
    "lower": lambda size: str.lower,
    "shape": lambda size: shape,
    "prefix": lambda size: lambda word: word[:size],
    "suffix": lambda size: lambda word: word[-size:],
    "jamo": lambda size: lambda word: jamo(word)[-size:],
}


def ngrams(word: str, most: int) -> list[str]:
    """All sequences of 2 to `most` characters, with `^` before the word and `$` behind it."""
    marked = f"^{word}$"
    sizes = range(2, most + 1)
    return [marked[start : start + size] for size in sizes for start in range(len(marked) - size + 1)]


class Templates:
    """Feature templates -> the features of every word of a sentence, as strings."""

    def __init__(
        self,
        templates: Sequence[str],
        columns: Sequence[str],
        known: Callable[[str], bool],
        guesses: Guesses | None = None,
    ) -> None:
        """`known` says whether `rare` takes a word as it is; `guesses` fill in columns that did not come."""
        self.known, self.columns, self.guesses = known, list(columns), guesses or {}
        self.single: list[tuple[str, list[tuple[str, int, int]]]] = []
        self.ngrams = 0
        for template in templates:
            if match := re.fullmatch(r"ngrams(\d)", template):
                self.ngrams = int(match[1])
            else:
                self.single.append((template, [self.parse(part, template) for part in template.split("|")]))

    def parse(self, part: str, template: str) -> tuple[str, int, int]:
        """A part of a template: property, size, offset."""
        match = PART.fullmatch(part)
        names = [*PROPERTIES, "rare", "bias", *self.columns]
        if match is None or match[1] not in names:
            known = ", ".join(names)
            raise ConfigError(
                f"model.features has the template {template!r}, of which {part!r} is no property[offset]. "
                f"Properties: {known}, or ngramsN alone."
            )
        if (match[1] in ("prefix", "suffix", "jamo")) != bool(match[2]):
            raise ConfigError(
                f"model.features: {part!r} in {template!r} "
                + ("needs no size." if match[2] else "needs a size, as suffix3[0].")
            )
        return match[1], int(match[2] or 0), int(match[3])

    def extract(self, sentence: Words) -> list[list[str]]:
        """The features of every word."""
        words = [clean(word) for word in sentence.words]
        out: list[list[str]] = [[] for _ in words]
        values: dict[tuple[str, int], list[str]] = {}
        for name, parts in self.single:
            columns = []
            for kind, size, offset in parts:
                if (kind, size) not in values:
                    values[kind, size] = self.read(kind, size, words, sentence)
                columns.append(shift(values[kind, size], offset))
            for place, found in enumerate(zip(*columns, strict=True)):
                out[place].append(f"{name}={'|'.join(found)}")
        if self.ngrams:
            for place, word in enumerate(words):
                out[place] += [f"ngrams={part}" for part in dict.fromkeys(ngrams(word, self.ngrams))]
        return out

    def read(self, kind: str, size: int, words: list[str], sentence: Words) -> list[str]:
        """A property of every word."""
        if kind in self.columns:
            column, rows = self.columns.index(kind), sentence.columns or [()] * len(words)
            return [
                row[column] if column < len(row) else self.guess(kind, word)
                for row, word in zip(rows, words, strict=True)
            ]
        if kind == "bias":
            return [""] * len(words)
        if kind == "rare":
            return [word if self.known(word) else outline(word) for word in words]
        return list(map(PROPERTIES[kind](size), words))

    def guess(self, column: str, word: str) -> str:
        """What most often stood in a column beside a word, or else beside one of its outline, or any."""
        found = (self.guesses.get((column, key)) for key in (word, outline(word), ""))
        return next(filter(None, found), "?")


def shift(values: list[str], offset: int) -> list[str]:
    """What stands so many words further on; nothing but an edge stands outside the sentence."""
    if not offset:
        return values
    count = min(abs(offset), len(values))
    return [*values[count:], *[EDGE[1]] * count] if offset > 0 else [*[EDGE[0]] * count, *values[: len(values) - count]]


def make_vocabulary(entries: Iterable[str]) -> Vocabulary:
    """A vocabulary of exactly these entries, behind the special ones."""
    names = {name: number for number, name in enumerate(dict.fromkeys([*SPECIAL, *entries]))}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Vocabulary(tokenizer)


def learn_features(templates: Templates, sentences: Sequence[Words], least: int) -> Vocabulary:
    """The vocabulary of the features that occur at least so often, most frequent first, with the guesses of columns
    behind them."""
    counts = Counter(feature for sentence in sentences for bag in templates.extract(sentence) for feature in bag)
    guesses = learn_guesses(templates.columns, sentences)
    named = ("\t".join((*key, value)) for key, value in guesses.items())
    return make_vocabulary([*(name for name, count in counts.most_common() if count >= least), *named])


def learn_guesses(columns: Sequence[str], sentences: Sequence[Words]) -> dict[tuple[str, str], str]:
    """What most often stands beside every word that is seen twice, beside the outlines of the others, and at all."""
    words = Counter(word for sentence in sentences for word in sentence.words)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for sentence in sentences:
        for word, row in zip(sentence.words, sentence.columns, strict=False):
            for name, value in zip(columns, row, strict=True):
                for key in (word if words[word] > 1 else outline(word), ""):
                    counts.setdefault((name, key), Counter())[value] += 1
    return {key: found.most_common(1)[0][0] for key, found in counts.items()}


def read_guesses(ids: Iterable[str]) -> dict[tuple[str, str], str]:
    """The guesses among the entries of a vocabulary."""
    found = (name.split("\t") for name in ids if "\t" in name)
    return {(column, key): value for column, key, value in found}


def encode_bag(bag: Sequence[str], ids: dict[str, int], width: int) -> list[int]:
    """The known features of a word as exactly `width` ids, PAD behind them."""
    found = [ids[name] for name in bag if name in ids][:width]
    return [*found, *[PAD] * (width - len(found))]
