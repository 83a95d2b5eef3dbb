"""A question and its context as one row of ids: <bos> question <eos> context <eos>, or <eos> behind every sentence."""

import itertools
import re
from collections.abc import Iterator, Sequence

from regard.config.model import ReaderConfig
from regard.data.encoding import Encoded
from regard.data.examples import Dropped, Example, Question
from regard.data.vocabulary import BOS, EOS, Tokens, Vocabulary
from regard.tasks.axes import Piece

SENTENCE = re.compile(r"(?s)\S.*?(?:[.!?](?=\s|$)|\n|$)")
"""A sentence of a context."""


def encode_questions(
    sources: Sequence[Question], vocabulary: Vocabulary, most: int, settings: ReaderConfig
) -> list[Encoded]:
    """Questions with their contexts, each as at most `most` ids and their special tokens. All texts are tokenized
    together, each different one once."""
    found = tokenize(sources, vocabulary, settings)
    return [join_parts(source, *parts, most, settings) for source, parts in zip(sources, found, strict=True)]


def tokenize(
    sources: Sequence[Question], vocabulary: Vocabulary, settings: ReaderConfig
) -> Iterator[tuple[Tokens, list[Tokens]]]:
    """The tokens of every question, and those of each part of its context."""
    parts: list[list[tuple[int, str]]] = []
    for question, context in sources:
        shift = len(question) + 1
        found = SENTENCE.finditer(context) if settings.unit == "sentence" else [re.match(r"(?s).*", context)]
        parts.append([(0, question), *((shift + part.start(), part.group()) for part in found if part)])
    unique = list({text for one in parts for _, text in one})
    known = dict(zip(unique, vocabulary.encode_all(unique), strict=True))
    for one in parts:
        moved = [
            Tokens(known[text].ids, [(start + a, start + b) for a, b in known[text].offsets]) for start, text in one
        ]
        yield moved[0], moved[1:]


def join_parts(source: Question, question: Tokens, context: list[Tokens], most: int, settings: ReaderConfig) -> Encoded:
    """Question and context as one row. What is too much is cut off: the oldest sentences, or the end of the context;
    and of a question, what is more than half of all."""
    ends = len(context) if settings.unit == "sentence" else 0  # they take room, too
    length = len(question.ids) + sum(len(part.ids) for part in context) + ends
    half = max(1, most // 2) if length > most else most
    ids, offsets = question.ids[:half], question.offsets[:half]
    room = most - len(ids)
    if settings.unit == "sentence":
        sizes = itertools.accumulate(len(part.ids) + 1 for part in reversed(context))
        kept = sum(size <= room for size in sizes)
        context = context[len(context) - kept :]
    else:
        context = [Tokens(part.ids[:room], part.offsets[:room]) for part in context]
    rows = [Tokens([BOS, *ids], [(0, 0), *offsets]), *context]
    end = [part.offsets[-1][1] if part.offsets else 0 for part in rows]
    return Encoded(
        source,
        f"{source.question}\n{source.context}",
        [i for part in rows for i in (*part.ids, EOS)],
        [span for part, last in zip(rows, end, strict=True) for span in (*part.offsets, (last, last))],
        length,
    )


def find_span(example: Example, row: Encoded, longest: int) -> list[int] | Dropped:
    """The first and the last token of an example's answer in its row; or why it cannot be pointed at."""
    assert isinstance(example.source, Question)
    question, context = example.source
    start = example.start if example.start is not None else context.find(example.target)
    missing = Dropped("answer not in context", example.where)
    if start < 0 or context[start : start + len(example.target)] != example.target:
        return missing
    first = start + len(question) + 1
    places = range(row.ids.index(EOS) + 1, len(row.ids))
    inside = [i for i in places if row.offsets[i][0] < first + len(example.target) and row.offsets[i][1] > first]
    whole = inside and row.offsets[inside[-1]][1] >= first + len(example.target.rstrip())
    if whole and inside[-1] - inside[0] >= longest:
        return Dropped(f"answer longer than model.max_answer_length = {longest}", example.where)
    return [inside[0], inside[-1]] if whole else missing


def sentence_pieces(source: Encoded) -> list[Piece]:
    """A question and the sentences of its context, the latest first, as a reader of whole sentences sees them."""
    ends = [place for place, i in enumerate(source.ids) if i == EOS]
    found = []
    for first, last in itertools.pairwise([-1, *ends]):
        start, end = source.offsets[first + 1 + (first < 0)][0], source.offsets[last][1]
        found.append(Piece(source.text[start:end], start, end))
    return [found[0], *reversed(found[1:])]
