"""A guard against degenerate outputs: those that loop, end at their limit, or leave most of their source unsaid.

Nothing is hidden: an output is flagged with the reason in words, and a second try is made only when asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from regard.config.config import DecodeConfig
from regard.data.batching import Framed
from regard.data.vocabulary import unframed
from regard.inference.constraints import longest
from regard.inference.predictor import Output, Predictor
from regard.tasks.encoders import TextEncoder
from regard.tasks.models import Language

PHRASE = 8
"""The longest phrase, in tokens, whose repetition is looked for."""
TIMES = 4
"""A phrase this often in a row is a loop, when it holds a letter; the source may repeat as often."""
TIMES_WITHOUT_LETTERS = 10
"""As TIMES, for digits and signs: a million has six zeros."""
WORSE = 1.0
"""How much unlikelier by token, in nats, a second try may be and still replace the first."""


class Answer(NamedTuple):
    """An output and what is suspicious about it."""

    output: Output
    flags: list[str]


class Loop(NamedTuple):
    """A phrase tokens[start:end] and how often it comes in a row."""

    times: int
    start: int
    end: int


def longest_loop(tokens: Sequence[int]) -> Loop:
    """The phrase of at most PHRASE tokens that comes most often in a row; of equals the shortest, then the first."""
    best = Loop(min(1, len(tokens)), 0, min(1, len(tokens)))
    for size in range(1, min(PHRASE, len(tokens) // 2) + 1):
        same = 0
        for place in range(size, len(tokens)):
            same = same + 1 if tokens[place] == tokens[place - size] else 0
            if same // size + 1 > best.times:
                best = Loop(same // size + 1, place - size + 1, place + 1)
    return best


def flags(
    source: Sequence[int],
    output: Output,
    limit: int,
    *,
    least: float,
    spell: Callable[[Sequence[int]], str],
) -> list[str]:
    """What is suspicious about an output, in words; nothing for a good one.

    `source` are the source's ids without <eos>; `limit` is the most tokens the output could have; an output of less
    than `least` times its source's tokens is short, if the source has a dozen; `spell` makes text of ids.
    """
    tokens = [token.id for token in output.tokens[:-1]]
    if not source:
        return []
    if not tokens:
        return ["is empty"]
    found = []
    loop = longest_loop(tokens)
    phrase = spell(tokens[loop.start : loop.end]).strip()
    enough = TIMES if any(letter.isalpha() for letter in phrase) else TIMES_WITHOUT_LETTERS
    if loop.times >= enough and loop.times > longest_loop(source).times:
        found.append(f"repeats {phrase!r} {loop.times} times in a row")
    if len(tokens) >= limit and output.tokens[-1].logprob < math.log(0.5):
        found.append(f"was cut at its limit of {limit} tokens")
    if len(source) >= 12 and len(tokens) < least * len(source):
        found.append(f"is short: {len(tokens)} tokens for a source of {len(source)}")
    return found


def judged(predictor: Predictor, source: Sequence[int], output: Output, settings: DecodeConfig) -> list[str]:
    """The flags of one output of a run, for the ids of its source. With one vocabulary for both sides, an output of
    less than a third of its source's tokens is short; with two, only one of less than a twentieth."""
    if isinstance(predictor.model, TextEncoder):
        return []
    if isinstance(predictor.model, Language):  # what it wrote is neither short nor too long, but may loop
        return flags(source, output, len(output.tokens) + 1, least=0.0, spell=predictor.target.decode)
    limit = min(int(longest(torch.tensor(len(source) + 1), settings)), 2 * predictor.config.text.max_length)
    least = 1 / 3 if predictor.target is predictor.source else 1 / 20
    return flags(source, output, limit, least=least, spell=predictor.target.decode)


def guarded(
    predictor: Predictor, source: Framed, outputs: Sequence[Output], settings: DecodeConfig, *, retry: bool = False
) -> list[Answer]:
    """The answers to a source with their flags. With `retry`, a text whose first answer is flagged is decoded again
    without repeated trigrams; the second try is kept if it has fewer flags and is not much unlikelier."""
    ids = unframed(source.ids)
    first = [Answer(output, judged(predictor, ids, output, settings)) for output in outputs]
    if not retry or not first[0].flags or 0 < settings.no_repeat <= 3:
        return first
    strict = settings.model_copy(update={"no_repeat": 3})
    (again,) = predictor.predict([source.text], best=len(outputs), settings=strict)
    second = guarded(predictor, source, again, strict)
    before, after = first[0], second[0]
    if len(after.flags) < len(before.flags) and surprise(after) < surprise(before) + WORSE:
        note = f"was decoded again without repeats, because the first answer {' and '.join(before.flags)}"
        return [after._replace(flags=[*after.flags, note]), *second[1:]]
    return first


def surprise(answer: Answer) -> float:
    """The mean negative log-probability of a token."""
    return -sum(token.logprob for token in answer.output.tokens) / max(1, len(answer.output.tokens))
