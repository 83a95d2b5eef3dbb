"""What decoding is given, what an output may be, and by what its log-probability is divided."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.config.run import DecodeConfig
from regard.data.batching import pad
from regard.data.vocabulary import BOS, EOS, PAD


class Constraints(NamedTuple):
    """What an output may be. Rows are sentences."""

    longest: Tensor  # (sentences,) tokens before <eos>
    least: Tensor  # (sentences,) as many tokens before <eos>, unless that is more than `longest`
    prefix: Tensor  # (sentences, n) tokens it must begin with; PAD: free
    soonest: int  # no sentence's `longest` is smaller
    latest: int  # no sentence's `least` is larger


class Sources(NamedTuple):
    """Sources to decode, each with its constraints."""

    source: Tensor  # (sentences, source)
    lengths: Tensor  # (sentences,)
    constraints: Constraints


def make_sources(
    source: Tensor,
    lengths: Tensor,
    config: DecodeConfig,
    prefixes: Sequence[Sequence[int]] | None = None,
    most: int | Tensor | None = None,
) -> Sources:
    """Sources (sentences, source) with the limits of a configuration. Outputs begin with their prefix; none has more
    than `most` tokens: a limit for all, or (sentences,)."""
    limits = [max_tokens(length, config) for length in lengths.tolist()]
    room = torch.tensor(limits, dtype=torch.long, device=lengths.device)
    room = room if most is None else room.clamp(max=most)
    prefix = pad(prefixes).long() if prefixes else torch.empty(len(source), 0, dtype=torch.long)
    room = torch.maximum(room, (prefix != PAD).sum(1).to(room.device))
    least = torch.full_like(room, config.min_length)
    soonest = int(room.min()) if len(room) else 0
    return Sources(source, lengths, Constraints(room, least, prefix.to(source.device), soonest, config.min_length))


def max_tokens(length: int, config: DecodeConfig) -> int:
    """The most tokens that the output to a source of this many may have, by a configuration."""
    return int(length * config.max_ratio) + config.max_extra


Length = TypeVar("Length", float, Tensor)


def length_penalty(length: Length, alpha: float) -> Length:
    """What the log-probability of an output of this many tokens, <eos> among them, is divided by."""
    divisor: Length = ((5 + length) / 6) ** alpha
    return divisor


NEVER = torch.tensor([PAD, BOS])
BROKEN = (
    "the model gives no numbers (NaN): its weights are broken, as by a rate that is too high. Train anew with a "
    "smaller train.learning_rate, or resume an older copy of the run."
)


def apply_constraints(
    logprobs: Tensor,
    step: int,
    constraints: Constraints,
    histories: Sequence[Sequence[int]] = (),
    no_repeat_ngram: int = 0,
) -> Tensor:
    """logprobs (rows, vocab) with -inf where a token may not come next; if the tokens of each row so far are given, no
    n-gram of the size `no_repeat_ngram` comes twice."""
    logprobs.index_fill_(1, NEVER.to(logprobs.device), -torch.inf)
    early, full = step < constraints.latest, step >= constraints.soonest
    if not (early or full or histories or step < constraints.prefix.shape[1]):
        return logprobs
    beam = len(logprobs) // len(constraints.longest)
    given = logprobs.clone() if histories else logprobs
    end = logprobs[:, EOS].clone()
    for row, tokens in enumerate(histories):
        logprobs[row, repeated_ngrams(tokens, no_repeat_ngram)] = -torch.inf
    must = constraints.longest <= step
    if early:
        free = ((constraints.least > step) & ~must).repeat_interleave(beam)
        logprobs[:, EOS] = torch.where(free, -torch.inf, logprobs[:, EOS])
    if histories or early:  # where nothing is left, an output ends
        logprobs[:, EOS] = torch.where(logprobs.amax(1) == -torch.inf, end, logprobs[:, EOS])
    if step < constraints.prefix.shape[1]:
        forced = constraints.prefix[:, step].repeat_interleave(beam)[:, None]
        only = torch.full_like(logprobs, -torch.inf).scatter_(1, forced, given.gather(1, forced))
        logprobs = torch.where(forced == PAD, logprobs, only)
    if full and must.any():
        only = torch.full_like(logprobs, -torch.inf)
        only[:, EOS] = logprobs[:, EOS]
        logprobs = torch.where(must.repeat_interleave(beam)[:, None], only, logprobs)
    return logprobs


def repeated_ngrams(tokens: Sequence[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram that is there already."""
    tail = tuple(tokens[len(tokens) - size + 1 :])
    grams = zip(*(tokens[start:] for start in range(size)), strict=False)
    return [gram[-1] for gram in grams if gram[:-1] == tail] if len(tokens) >= size - 1 else []
