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
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers

from regard.data.examples import Words
from regard.data.vocabulary import PAD, SPECIAL, UNK, Vocabulary, clean
from regard.errors import ConfigError

PART = re.compile(r"([a-z_]+?)(\d*)\[(-?\d+)\]")
EDGE = ("<s>", "</s>")
"""What stands before the first and behind the last word."""
Property = Callable[[str], str]
"""Of a word."""


@functools.lru_cache(2**16)
def shape(word: str) -> str:
    """The kinds of a word's characters, repeated ones once: `Xx-0` for `Mid-1990`; of other scripts, the character's
    name's first word, so that Hangul, Hanja and kana can be told apart."""

    def kind(letter: str) -> str:
        if letter.isascii() or letter.isupper() or letter.islower():
            return "X" if letter.isupper() else "x" if letter.islower() else "0" if letter.isdigit() else letter
        return unicodedata.name(letter, "?").split()[0][:3].lower()

    return re.sub(r"(.+?)\1+", r"\1", "".join(map(kind, word)))


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

    def __init__(self, templates: Sequence[str], columns: Sequence[str], known: Callable[[str], bool]) -> None:
        """`known` says whether `rare` takes a word as it is."""
        self.known, self.columns = known, list(columns)
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
            column = self.columns.index(kind)
            return [row[column] if column < len(row) else "?" for row in sentence.columns] or ["?"] * len(words)
        if kind == "bias":
            return [""] * len(words)
        if kind == "rare":
            return [word if self.known(word) else f"{shape(word)} {word[-2:].lower()}" for word in words]
        return list(map(PROPERTIES[kind](size), words))


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


def learn_features(templates: Templates, sentences: Iterable[Words], least: int) -> Vocabulary:
    """The vocabulary of the features that occur at least so often, most frequent first."""
    counts = Counter(feature for sentence in sentences for bag in templates.extract(sentence) for feature in bag)
    return make_vocabulary(name for name, count in counts.most_common() if count >= least)


def encode_bag(bag: Sequence[str], ids: dict[str, int], width: int) -> list[int]:
    """The known features of a word as exactly `width` ids, PAD behind them."""
    found = [ids[name] for name in bag if name in ids][:width]
    return [*found, *[PAD] * (width - len(found))]
