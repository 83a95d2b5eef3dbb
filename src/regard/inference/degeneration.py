"""Degenerate outputs: those that loop, end at their limit, or leave most of their source unsaid.

Nothing is hidden: an output is flagged with the reason in words, and a second try is made only when asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from regard.config.run import DecodeConfig
from regard.data.encoding import Encoded
from regard.data.vocabulary import unframed
from regard.inference.constraints import length_penalty
from regard.inference.predictor import Predictor
from regard.tasks.task import Answer, Bounds, Task

PHRASE = 8
"""The longest phrase, in tokens, whose repetition is looked for."""
TIMES = 4
"""A phrase this often in a row is a loop, when it holds a letter; the source may repeat as often."""
TIMES_WITHOUT_LETTERS = 10
"""As TIMES, for digits and signs: a million has six zeros."""
WORSE = 1.0
"""How much unlikelier by token, in nats, a second try may be and still replace the first."""


class Loop(NamedTuple):
    """A phrase tokens[start:end] and how often it comes in a row."""

    times: int
    start: int
    end: int


def find_loop(tokens: Sequence[int]) -> Loop:
    """The phrase of at most PHRASE tokens that comes most often in a row; of equals the shortest, then the first."""
    best = Loop(min(1, len(tokens)), 0, min(1, len(tokens)))
    for size in range(1, min(PHRASE, len(tokens) // 2) + 1):
        same = 0
        for place in range(size, len(tokens)):
            same = same + 1 if tokens[place] == tokens[place - size] else 0
            if same // size + 1 > best.times:
                best = Loop(same // size + 1, place - size + 1, place + 1)
    return best


def flags(source: Sequence[int], output: Answer, bounds: Bounds, *, spell: Callable[[Sequence[int]], str]) -> list[str]:
    """What is suspicious about an output, in words; nothing for a good one.

    `source` are the source's ids without <eos>; `bounds.most` is the most tokens the output could have; an output of
    less than `bounds.least` times its source's tokens is short, if the source has a dozen; `spell` makes text of ids.
    """
    tokens = [token.id for token in output.tokens[:-1]]
    if not source:
        return []
    if not tokens:
        return ["is empty"]
    found, loop = [], find_loop(tokens)
    phrase = spell(tokens[loop.start : loop.end]).strip()
    enough = TIMES if any(letter.isalpha() for letter in phrase) else TIMES_WITHOUT_LETTERS
    if loop.times >= enough and loop.times > find_loop(source).times:
        found.append(f"repeats {phrase!r} {loop.times} times in a row")
    end = output.tokens[-1].logprob
    if len(tokens) >= bounds.most and (end is None or end < math.log(0.5)):
        found.append(f"was cut at its limit of {bounds.most} tokens")
    if len(source) >= 12 and len(tokens) < bounds.least * len(source):
        found.append(f"is short: {len(tokens)} tokens for a source of {len(source)}")
    return found


def find_flags(task: Task, source: Sequence[int], answer: Answer, settings: DecodeConfig) -> list[str]:
    """The flags of one answer of a task, for the ids of its source."""
    bounds = task.length_bounds(source, answer, settings)
    return [] if bounds is None else flags(source, answer, bounds, spell=task.target.decode)


def flag_answers(
    predictor: Predictor, source: Encoded, answers: Sequence[Answer], settings: DecodeConfig, *, retry: bool = False
) -> list[Answer]:
    """The answers to a source with their flags. With `retry`, a text whose first answer is flagged is decoded again
    without repeated trigrams; the second try is kept if it has fewer flags and is not much unlikelier."""
    ids = unframed(source.ids)
    found = [find_flags(predictor.task, ids, one, settings) for one in answers]
    first = [one._replace(flags=[*one.flags, *own]) for one, own in zip(answers, found, strict=True)]
    if not retry or not found[0] or 0 < settings.no_repeat_ngram <= 3:
        return first
    strict = settings.model_copy(update={"no_repeat_ngram": 3})
    (again,) = predictor.predict([source.source], best=len(answers), settings=strict)
    second = flag_answers(predictor, source, again, strict)
    before, after = first[0], second[0]
    if len(after.flags) < len(before.flags) and surprise(after, settings) < surprise(before, settings) + WORSE:
        note = f"was decoded again without repeats, because the first answer {' and '.join(found[0])}"
        return [after._replace(flags=[*after.flags, note]), *second[1:]]
    return first


def surprise(answer: Answer, settings: DecodeConfig) -> float:
    """The mean negative log-probability of a token: the score without its length penalty."""
    count = max(1, len(answer.tokens))
    return -answer.score * length_penalty(float(count), settings.length_penalty) / count
