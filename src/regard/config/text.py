"""How text becomes tokens: the settings of `[text]`."""

from typing import Literal

from regard.config.settings import Count, Paths, Settings


class Tokenization(Settings):
    """How the text of one side becomes tokens."""

    kind: Literal["char", "byte", "word", "bpe", "unigram", "label"] = "bpe"
    """label: the whole text is one entry (a class), or several with a `separator`."""
    size: Count = 8000
    """Entries of the vocabulary, for bpe and unigram."""
    min_count: Count = 1
    """Words or characters seen less often in training become <unk>."""
    normalize: Literal["none", "nfc", "nfkc"] = "nfc"
    """Unicode normalization."""
    jamo: bool = False
    """Decompose Korean syllables (and other composed letters) into their parts (NFD); the output is composed again."""
    lowercase: bool = False
    """Whether text is lower-cased."""
    separator: str = ""
    """Between several labels of one text, for label."""


class TextConfig(Settings):
    """Both sides; without `target`, one vocabulary serves both."""

    source: Tokenization = Tokenization()
    """How the source becomes tokens, as below."""
    target: Tokenization | None = None
    """How the target does."""
    raw: Paths = ()
    """Files of plain text in the source's language, without targets. The vocabulary is learned from them too, and the
    source embedding starts as word vectors counted from them (PPMI and SVD); `model.freeze_vectors` keeps it so."""
    languages: tuple[str, str] = ("source", "target")
    """Codes of the two sides' languages (ISO 639), by which the server offers them."""
    max_length: Count = 256
    """The most tokens a side may have."""
    longer: Literal["drop", "cut", "error"] = "drop"
    """What happens to a longer training example; each is counted. A longer text to predict is cut for `cut`, else an
    error."""
