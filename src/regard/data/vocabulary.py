"""Text <-> token ids, with the character offsets of every token.

All kinds are pipelines of the `tokenizers` library, so each is one JSON file that other tools open too. Bytes, BPE and
Unigram work on UTF-8 bytes and lose nothing; characters and words lose what the vocabulary does not hold (and words
the width of white space). Text never turns into a special token, whatever it spells.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from regard.config.text import Tokenization
from regard.errors import ConfigError, DataError, RunError

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD, UNK, BOS, EOS = range(4)


class Tokens(NamedTuple):
    """A text as ids, each with the span of characters it came from."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def unframed(ids: Iterable[int]) -> list[int]:
    """Ids without <pad>, <bos> and <eos>; an unknown word is a word."""
    return [i for i in ids if i == UNK or i > EOS]


class Vocabulary:
    """One side's text <-> ids. The first four ids are <pad>, <unk>, <bos> and <eos>."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True
        self.size: int = tokenizer.get_vocab_size()
        normalizer = json.dumps(json.loads(tokenizer.to_str()).get("normalizer"))
        self.composed = '"NFD"' in normalizer
        self.space = tokenizer.token_to_id("Ġ") if '"Prepend"' in normalizer else None
        self.spellings: dict[int, str] = {}

    @classmethod
    def learn(cls, lines: Iterable[str], settings: Tokenization) -> "Vocabulary":
        """Make a vocabulary from training text."""
        least = len(SPECIAL) + len(pre_tokenizers.ByteLevel.alphabet())
        if settings.kind in ("bpe", "unigram") and settings.size < least:
            raise ConfigError(
                f"a {settings.kind} vocabulary of size {settings.size} cannot be made: the {len(SPECIAL)} special "
                f'tokens and all bytes are {least} entries. Set a size of at least {least}, or kind = "char".'
            )
        tokenizer, trainer = pipeline(settings)
        if settings.kind == "word":  # a word that spells a special token, once normalized, must not take its place
            normal = tokenizer.normalizer.normalize_str
            lines = [" ".join(word for word in normal(clean(line)).split() if word not in SPECIAL) for line in lines]
        if settings.kind == "label":
            lines = [clean(line) for line in lines]
            refuse_special(set(lines), tokenizer)
        try:
            tokenizer.train_from_iterator((clean(line) for line in lines), trainer)
        except Exception as error:  # the library raises plain Exception, as when a vocabulary cannot hold all bytes
            raise ConfigError(f"no {settings.kind} vocabulary of size {settings.size} can be made: {error}.") from error
        if tokenizer.get_vocab_size() <= len(SPECIAL):
            raise DataError(f"the training text holds nothing to make a vocabulary of kind {settings.kind} from.")
        return cls(settle_scores(tokenizer) if settings.kind == "unigram" else tokenizer)

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read a vocabulary's JSON file."""
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception for a malformed file, or panics in Rust
            raise RunError(f"{path} is not a tokenizer file: {error}.") from error
        if [tokenizer.token_to_id(token) for token in SPECIAL] != list(range(4)):
            raise RunError(f"{path} is not a vocabulary of regard: its first entries are not {' '.join(SPECIAL)}.")
        if max(tokenizer.get_vocab().values()) >= tokenizer.get_vocab_size():
            raise RunError(f"{path} is not a vocabulary of regard: the ids of its entries have gaps.")
        return cls(tokenizer)

    def dump(self) -> str:
        """The vocabulary as JSON."""
        return str(self.tokenizer.to_str(pretty=False))

    def encode(self, text: str) -> Tokens:
        """The ids of a text and where each came from; no <bos> or <eos>."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """As `encode`, for many texts at once."""
        encodings = self.tokenizer.encode_batch([clean(text) for text in texts], add_special_tokens=False)
        found = zip(texts, encodings, strict=True)
        return [self.tokens(text, encoding.ids, encoding.offsets) for text, encoding in found]

    def tokens(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tokens:
        """What the library found, without special tokens; the space put before a first word came from no character."""
        if ids and ids[0] == self.space and len(ids) > 1 and offsets[0][0] == offsets[1][0]:
            offsets = [(0, 0), *offsets[1:]]
        return Tokens([i if i > EOS else UNK for i in ids], whole(text, offsets))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; <pad>, <bos> and <eos> say nothing."""
        text: str = self.tokenizer.decode(unframed(ids), skip_special_tokens=False)
        return unicodedata.normalize("NFC", text) if self.composed else text

    def continued(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that ids add to what stands before them, its white space too; half a character is U+FFFD."""
        if not before:
            return self.decode(ids)
        tail = before[-8:]
        known, whole = self.decode(tail), self.decode([*tail, *ids])
        differ = (place for place, (one, other) in enumerate(zip(known, whole, strict=False)) if one != other)
        return whole[next(differ, min(len(known), len(whole))) :]

    def find(self, word: str) -> int | None:
        """The id of a word that is one entry, however the vocabulary writes it."""
        ids = self.encode(word).ids
        return ids[0] if len(ids) == 1 and ids[0] != UNK else None

    def token(self, index: int) -> str:
        """One entry, as it is written in the vocabulary."""
        return str(self.tokenizer.id_to_token(index))

    def spelled(self, index: int) -> str:
        """What an entry adds to any text."""
        if index not in self.spellings:
            self.spellings[index] = self.added([index], index)
        return self.spellings[index]

    def added(self, before: Sequence[int], index: int) -> str:
        """What an entry adds to the text of others; one that is no whole character by itself, as it is written."""
        text = "" if self.composed else self.continued(before, [index])
        return text if text and "\ufffd" not in text else self.token(index)


def joins(letter: str) -> bool:
    """Whether a character is a part of the one before it: a mark, or the vowel or end of a Korean syllable."""
    plain = unicodedata.normalize("NFKD", letter)[0]
    return "\u1160" <= plain <= "\u11ff" or unicodedata.category(plain)[0] == "M"


def whole(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets that end behind a composed character: the library's end behind the first of its parts."""
    if text.isascii() or not any(map(joins, set(text))):
        return offsets
    starts = {start for start, _ in offsets}

    def last(end: int) -> int:
        while end < len(text) and end not in starts and joins(text[end]):
            end += 1
        return end

    return [(start, last(end) if end > start else end) for start, end in offsets]


def clean(text: str) -> str:
    """A lone surrogate is no character, and no tokenizer takes it: it becomes U+FFFD."""
    if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def refuse_special(lines: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse a label that spells a special token, once normalized: it would take its place."""
    for line in lines:
        text, split = tokenizer.normalizer.normalize_str(line), tokenizer.pre_tokenizer
        for label in [part for part, _ in split.pre_tokenize_str(text)] if split else [text]:
            if label in SPECIAL:
                raise DataError(
                    f"the training data has the label {label!r}, but {' '.join(SPECIAL)} have a meaning of their own: "
                    "give it another name."
                )


def settled(text: str, composed: bool) -> int:
    """How much of a text no later token can change: half a character at its end may become whole, and where letters
    are put together from parts, the last one may get another part."""
    end = len(text)
    while end > max(0, len(text) - 3) and text[end - 1] == "\ufffd":
        end -= 1
    if composed and end:
        end -= 1
        while end and unicodedata.combining(text[end]):
            end -= 1
    return end


def pipeline(settings: Tokenization) -> tuple[Tokenizer, Any]:
    """An untrained tokenizer and its trainer."""
    options: dict[str, Any] = {"special_tokens": list(SPECIAL), "show_progress": False}
    subwords = settings.kind in ("bpe", "unigram")
    trainer: Any
    if settings.kind in ("char", "word", "label"):
        tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNK]))
        trainer = trainers.WordLevelTrainer(vocab_size=2**31, min_frequency=settings.min_count, **options)
        if settings.kind == "char":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), behavior="isolated")
            tokenizer.decoder = decoders.Fuse()
        elif settings.kind == "word":
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        elif settings.separator:
            around = Regex(rf"\s*{re.escape(settings.separator)}\s*")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(around, behavior="removed")
    else:
        options["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
        options["vocab_size"] = settings.size if subwords else len(SPECIAL) + len(options["initial_alphabet"])
        if settings.kind == "unigram":
            tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token=SPECIAL[UNK], **options)
        else:
            tokenizer, trainer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK])), trainers.BpeTrainer(**options)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=subwords)
        tokenizer.decoder = decoders.ByteLevel()
        if subwords:  # a first word is the same entry as any other: a space before it, taken off again
            tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    steps = {
        normalizers.NFC(): settings.normalize == "nfc",
        normalizers.NFKC(): settings.normalize == "nfkc",
        normalizers.Lowercase(): settings.lowercase,
        normalizers.NFD(): settings.jamo,
        normalizers.Prepend(" "): subwords,
    }
    tokenizer.normalizer = normalizers.Sequence([step for step, wanted in steps.items() if wanted])
    return tokenizer, trainer


def settle_scores(tokenizer: Tokenizer) -> Tokenizer:
    """The same Unigram tokenizer for the same text: the library adds up scores in an order of chance, which changes
    their last digits, and deals out those of bytes that it has not seen (steps of 0.0001 above the least) by chance."""
    tree = json.loads(tokenizer.to_str())
    scores = {entry: round(score or 0.0, 4) for entry, score in tree["model"]["vocab"]}
    fixed = [(entry, scores.pop(entry)) for entry in SPECIAL]
    least = min(scores.values())
    unseen = sorted(entry for entry in pre_tokenizers.ByteLevel.alphabet() if scores[entry] < least + 0.0256)
    scores |= zip(unseen, sorted((scores[entry] for entry in unseen), reverse=True), strict=True)
    tree["model"]["vocab"] = [*fixed, *sorted(scores.items(), key=lambda one: (-one[1], one[0]))]
    return Tokenizer.from_str(json.dumps(tree))


class Vocabularies(NamedTuple):
    """The vocabularies of both sides of a run; one may serve both."""

    source: Vocabulary
    target: Vocabulary

    @property
    def shared(self) -> bool:
        """Whether one vocabulary serves both sides."""
        return self.target is self.source
