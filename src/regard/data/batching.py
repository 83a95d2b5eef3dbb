"""Examples -> tensors: the only place where lengths meet tensors.

An epoch is a pure function of the seed and its number, so a run that is resumed sees what it would have seen.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from regard.config.config import EncoderConfig, LanguageConfig, Model, ReaderConfig, TextConfig, TrainConfig
from regard.data.files import Example
from regard.data.splits import Ledger
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, UNK, Tokens, Vocabulary
from regard.errors import DataError

SENTENCE = re.compile(r"(?s)\S.*?(?:[.!?](?=\s|$)|\n|$)")
"""A sentence of a context."""


class Pair(NamedTuple):
    """One example as ids. A target that is a sequence has neither <bos> nor <eos>, a batch puts them there; one that is
    not (labels, places of a span) is taken as it is."""

    source: list[int]
    target: list[int]
    sequence: bool = True


class Batch(NamedTuple):
    """Padded ids, batch first. `target` holds what is fed (<bos> a b), `answer` what is wanted (a b <eos>)."""

    source: Tensor  # (batch, source)
    lengths: Tensor  # (batch,) tokens of each source
    target: Tensor  # (batch, target)
    answer: Tensor  # (batch, target), PAD beyond the end

    @property
    def tokens(self) -> int:
        """Wanted tokens; a row that wants none, a text without labels, counts as one."""
        return int((self.answer != PAD).sum(1).clamp(min=1).sum())


class Framed(NamedTuple):
    """A text as a model reads it: ids with the characters they came from, cut to what the model takes."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]
    length: int
    """Tokens of the text before anything was cut, without special ones; of a prompt, with its <bos>."""


def framed(texts: Sequence[str], vocabulary: Vocabulary, text: TextConfig, model: Model | None = None) -> list[Framed]:
    """Texts as a model of these settings reads them. An encoder's begin with <bos> and end with <eos>, as does a
    question; its context ends with <eos>, too, or every sentence of it does. The source of a sequence only ends, and
    a prompt only begins, by setting."""
    most = text.max_length
    if isinstance(model, ReaderConfig):
        found = questions(texts, vocabulary, model)
        return [asked(string, *parts, most, model) for string, parts in zip(texts, found, strict=True)]
    lead = [BOS] if isinstance(model, EncoderConfig) or (isinstance(model, LanguageConfig) and model.begin) else []
    tail = [] if isinstance(model, LanguageConfig) else [EOS]
    prompts = isinstance(model, LanguageConfig)  # their <bos> takes room, and it is their end that is kept
    keep = slice(len(lead) - most, None) if prompts else slice(most)
    out = []
    for string, (ids, offsets) in zip(texts, vocabulary.encode_all(texts), strict=True):
        end = (len(string), len(string))
        inside = [*[(0, 0)] * len(lead), *offsets[keep], *[end] * len(tail)]
        out.append(Framed(string, [*lead, *ids[keep], *tail], inside, len(ids) + len(lead) * prompts))
    return out


def questions(
    texts: Sequence[str], vocabulary: Vocabulary, model: ReaderConfig
) -> Iterator[tuple[Tokens, list[Tokens]]]:
    """Of every text `question <tab> context`: the question's tokens, and those of each part of its context."""
    parts: list[list[tuple[int, str]]] = []
    for string in texts:
        question, _, context = string.partition("\t")
        shift = len(question) + 1
        found = SENTENCE.finditer(context) if model.unit == "sentence" else [re.match(r"(?s).*", context)]
        parts.append([(0, question), *((shift + part.start(), part.group()) for part in found if part)])
    unique = list({string for one in parts for _, string in one})
    known = dict(zip(unique, vocabulary.encode_all(unique), strict=True))
    for one in parts:
        moved = [
            Tokens(known[string].ids, [(start + a, start + b) for a, b in known[string].offsets])
            for start, string in one
        ]
        yield moved[0], moved[1:]


def asked(text: str, question: Tokens, context: list[Tokens], most: int, model: ReaderConfig) -> Framed:
    """Question and context as one row. What is too much is cut off: the oldest sentences, or the end of the context;
    and of a question, what is more than half of all."""
    ends = len(context) if model.unit == "sentence" else 0  # they take room, too
    length = len(question.ids) + sum(len(part.ids) for part in context) + ends
    half = max(1, most // 2) if length > most else most
    ids, offsets = question.ids[:half], question.offsets[:half]
    room = most - len(ids)
    if model.unit == "sentence":
        sizes = itertools.accumulate(len(part.ids) + 1 for part in reversed(context))
        kept = sum(size <= room for size in sizes)
        context = context[len(context) - kept :]
    else:
        context = [Tokens(part.ids[:room], part.offsets[:room]) for part in context]
    rows = [Tokens([BOS, *ids], [(0, 0), *offsets]), *context]
    end = [part.offsets[-1][1] if part.offsets else 0 for part in rows]
    return Framed(
        text,
        [i for part in rows for i in (*part.ids, EOS)],
        [span for part, last in zip(rows, end, strict=True) for span in (*part.offsets, (last, last))],
        length,
    )


def span(example: Example, row: Framed, longest: int) -> list[int] | str:
    """The first and the last token of an example's answer in its row; or why it cannot be pointed at."""
    question, _, context = example.source.partition("\t")
    start = example.start if example.start is not None else context.find(example.target)
    missing = "answer not in context"
    if start < 0 or context[start : start + len(example.target)] != example.target:
        return missing
    first = start + len(question) + 1
    places = range(row.ids.index(EOS) + 1, len(row.ids))
    inside = [i for i in places if row.offsets[i][0] < first + len(example.target) and row.offsets[i][1] > first]
    whole = inside and row.offsets[inside[-1]][1] >= first + len(example.target.rstrip())
    if whole and inside[-1] - inside[0] >= longest:
        return f"answer longer than model.longest = {longest}"
    return [inside[0], inside[-1]] if whole else missing


def answerable(examples: Sequence[Example], ledger: Ledger, model: Model | None) -> list[Example]:
    """The examples that a model can answer; a reader needs a context, and what has none is dropped, and counted."""
    found = []
    for example in examples:
        if isinstance(model, ReaderConfig) and not example.source.partition("\t")[2].strip():
            ledger.drop("no context", example.where)
            ledger.kept -= 1
        else:
            found.append(example)
    return found


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
        ledger.drop("too long", where)
        ledger.kept -= 1
        return False
    ledger.cut += 1
    return True


def encode(
    examples: Sequence[Example],
    source: Vocabulary,
    target: Vocabulary,
    text: TextConfig,
    ledger: Ledger,
    model: Model | None = None,
) -> list[Pair]:
    """Turn examples into ids; what cannot be answered, or is too long, goes into the ledger."""
    if isinstance(model, LanguageConfig):
        return [Pair([], tokens.ids) for tokens in target.encode_all([example.target for example in examples])]
    spans = model.longest if isinstance(model, ReaderConfig) and model.answer == "span" else 0
    labels = isinstance(model, EncoderConfig) and not spans
    examples = answerable(examples, ledger, model)
    sources = framed([example.source for example in examples], source, text, model)
    targets = [] if spans else target.encode_all([example.target for example in examples])
    if labels:
        known_labels(examples, target)
    pairs = []
    for number, (example, left) in enumerate(zip(examples, sources, strict=True)):
        right = span(example, left, spans) if spans else targets[number].ids
        if isinstance(right, str):
            ledger.drop(right, example.where)
            ledger.kept -= 1
            continue
        if fits(max(left.length, len(right)), text, ledger, example.where):
            pairs.append(Pair(left.ids, right[: text.max_length] or [PAD] * labels, not (spans or labels)))
    return pairs


def known_labels(examples: Sequence[Example], target: Vocabulary) -> None:
    """Refuse a label that training never saw: it would be wrong whatever the model says."""
    for example, tokens in zip(examples, target.encode_all([one.target for one in examples]), strict=True):
        if UNK in tokens.ids:
            raise DataError(
                f"{example.where} has the label {example.target!r}, which training never saw. "
                f"Known: {', '.join(target.token(i) for i in range(len(SPECIAL), min(target.size, 24)))}."
            )


def joined(pairs: Sequence[Pair], begin: bool) -> list[int]:
    """Documents as one stream: each ends with <eos>, and begins with <bos> by setting."""
    return [i for pair in pairs for i in (*([BOS] if begin else []), *pair.target, EOS)]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids as one tensor (batch, longest), PAD at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def source_batch(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Padded sources (batch, source) and their lengths (batch,)."""
    return padded(rows), torch.tensor([len(row) for row in rows])


def collate(pairs: Sequence[Pair]) -> Batch:
    """Pairs as one batch."""
    source, lengths = source_batch([pair.source for pair in pairs])
    if not pairs[0].sequence:
        answer = padded([pair.target for pair in pairs])
        return Batch(source, lengths, answer, answer)
    target = padded([[BOS, *pair.target] for pair in pairs])
    return Batch(source, lengths, target, padded([[*pair.target, EOS] for pair in pairs]))


def epoch(pairs: Sequence[Pair], budget: int, seed: int, number: int) -> list[list[int]]:
    """Indices of the batches of epoch `number`: pairs of like lengths together, rows times the longer side's longest
    within the budget, in an order that only the seed and the number decide."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    noise = torch.rand(len(pairs), generator=generator).tolist()

    def place(index: int) -> tuple[int, int, float]:
        """By the target's length, then the source's, there and back again: neighbours are alike on both sides."""
        source, target = len(pairs[index].source), len(pairs[index].target)
        return target, source if target % 2 else -source, noise[index]

    order = sorted(range(len(pairs)), key=place)
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        size = max(len(pairs[index].source), len(pairs[index].target) + 1)
        longest = max(longest, size)
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = size
        batches[-1].append(index)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def updates(pairs: Sequence[Pair], config: TrainConfig, start: int) -> Iterator[list[Batch]]:
    """Endless updates, each of `accumulate` batches, from update `start` on, as if the first had been drawn too."""
    skip, number = start * config.accumulate, 0
    group: list[Batch] = []
    while True:
        order = epoch(pairs, config.batch_tokens, config.seed, number)
        number += 1
        if skip >= len(order):
            skip -= len(order)
            continue
        for indices in order[skip:]:
            group.append(collate([pairs[i] for i in indices]))
            if len(group) == config.accumulate:
                yield group
                group = []
        skip = 0


def windows(stream: Sequence[int], width: int, config: TrainConfig, start: int) -> Iterator[list[Batch]]:
    """Endless updates over one long text, from update `start` on: each row of a batch goes on where that of the batch
    before ended, `width` tokens at a time, so an epoch reads every token once. Where the rows begin is drawn anew
    for every epoch; all of it is a pure function of the seed and the update's number."""
    text = torch.from_numpy(numpy.array(stream))  # several times as fast as torch.tensor
    width = min(width, len(text) - 1)
    rows = max(1, min(config.batch_tokens // width, (len(text) - 1) // width))
    length = len(text) // rows
    each = max(1, length // width)  # batches of an epoch
    group: list[Batch] = []
    places = torch.arange(rows)[:, None] * length + torch.arange(width + 1)

    @functools.lru_cache(1)
    def shift(turn: int) -> int:
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + turn)
        return int(torch.randint(len(text), (), generator=generator))

    for number in itertools.count(start * config.accumulate):
        turn, place = divmod(number, each)
        ids = text[(places + (shift(turn) + place * width)) % len(text)]
        answer = ids[:, 1:].masked_fill(ids[:, 1:] == BOS, PAD)  # nobody writes it
        batch = Batch(ids[:, :0], torch.zeros(rows, dtype=torch.long), ids[:, :-1], answer)
        group = [batch] if number % config.accumulate == 0 else [*group, batch]
        if len(group) == config.accumulate:
            yield group


def padding_share(pairs: Sequence[Pair], batches: Sequence[Sequence[int]]) -> float:
    """The share of cells, on both sides, that hold nothing."""
    cells = tokens = 0
    for batch in batches:
        for lengths in ([len(pairs[i].source) for i in batch], [len(pairs[i].target) + 1 for i in batch]):
            cells += max(lengths) * len(lengths)
            tokens += sum(lengths)
    return 1 - tokens / cells
