"""Sources as a model reads them: token ids, each with the characters it came from, cut to what the model takes."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.config.text import TextConfig
from regard.data.examples import Ledger, Source
from regard.data.vocabulary import Vocabulary
from regard.errors import DataError


class Encoded(NamedTuple):
    """A source as ids with character offsets into its text, special tokens included."""

    source: Source
    text: str  # what the offsets count in; of a question, question and context on two lines
    ids: list[int]
    offsets: list[tuple[int, int]]
    length: int  # tokens before anything was cut, without special ones; of a prompt, with its <bos>


def encode_texts(
    texts: Sequence[str], vocabulary: Vocabulary, most: int, *, lead: Sequence[int] = (), tail: Sequence[int] = ()
) -> list[Encoded]:
    """Texts as at most `most` ids each, cut at the end, with special tokens before (`lead`) and behind (`tail`)."""
    out = []
    for text, (ids, offsets) in zip(texts, vocabulary.encode_all(texts), strict=True):
        end = (len(text), len(text))
        inside = [*[(0, 0)] * len(lead), *offsets[:most], *[end] * len(tail)]
        out.append(Encoded(text, text, [*lead, *ids[:most], *tail], inside, len(ids)))
    return out


def fits(tokens: int, text: TextConfig, ledger: Ledger, where: str) -> bool:
    """Whether an example of so many tokens is taken; one that is too long is dropped, cut or an error, and counted."""
    if tokens <= text.max_length:
        return True
    if text.longer == "error":
        raise DataError(
            f"{where} has {tokens:,} tokens, at most {text.max_length:,} fit (text.max_length). "
            "Set text.longer to drop or cut."
        )
    if text.longer == "drop":
        ledger.discard("too long", where)
        return False
    ledger.cut += 1
    return True
