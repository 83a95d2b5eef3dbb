"""Searching for outputs. Nothing here asks what the model is: it has `start` and `step`, and states are row-first.

An output ends with <eos>; one that has reached its limit may only end. A hypothesis is ranked by its log-probability
over ((5 + length) / 6) ** alpha, its length counting <eos> (Wu 2016).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard.config.config import DecodeConfig
from regard.data.vocabulary import EOS
from regard.errors import RunError
from regard.inference.beam_search import Found, beam_search, begun
from regard.inference.constraints import BROKEN, Asked, Hypothesis, allowed, asked, penalty
from regard.tasks.models import State, Steppable, rows

Choose = Callable[[Tensor, int], Tensor]
"""Log-probabilities (rows, vocab) at a step -> tokens (rows,)."""
Tell = Callable[[int, int, float], bool]
"""Gets a sentence's number, its next token and that one's log-probability, as they come; True ends the sentence."""


def decode(
    model: Steppable,
    source: Tensor,
    lengths: Tensor,
    config: DecodeConfig,
    *,
    best: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    most: int | Tensor | None = None,
    tell: Tell | None = None,
) -> list[list[Hypothesis]]:
    """The `best` outputs of every source (sentences, source), best first; samples come in the order they were drawn.
    The answer to a source does not depend on what else is in the batch. No output has more than `most` tokens; a limit
    for all, or (sentences,). `tell` hears of every token, as `walk` says; with beams, there is nothing to tell."""
    steps = flow(model, asked(source, lengths, config, prefixes, most), config, best=best, tell=tell)
    found = dict(filter(None, steps))
    return [found[row] for row in range(len(source))]


def flow(
    model: Steppable, sources: Asked, config: DecodeConfig, *, best: int = 1, tell: Tell | None = None
) -> Iterator[Found]:
    """As `decode`: the place of each sentence and its outputs, as soon as it is finished; None behind every step."""
    if config.sample and best > 1:
        drawn: dict[int, list[Hypothesis]] = {}
        for number in range(best):
            for one in walk(model, sources, sampler(config, number), config, tell):
                if one is None:
                    yield None
                else:
                    drawn.setdefault(one[0], []).extend(one[1])
        yield from drawn.items()
    elif config.sample or (config.beam == 1 and best == 1):
        yield from walk(model, sources, sampler(config, 0) if config.sample else greedy, config, tell)
    else:
        yield from beam_search(model, sources, config, best)


# --- one hypothesis a sentence ---------------------------------------------------------------------------------------


def greedy(logprobs: Tensor, step: int) -> Tensor:
    """The likeliest token. On a CPU NumPy finds it: torch's argmax is many times slower there (docs/log.md)."""
    if logprobs.is_cpu:
        return torch.from_numpy(logprobs.numpy().argmax(-1))
    return logprobs.argmax(-1)


def sampler(config: DecodeConfig, number: int) -> Choose:
    """Draws tokens. Every sentence uses the same random numbers, those of the seed and the sample's number: a sample
    is the same alone and in a batch."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
    numbers: list[float] = []

    def choose(logprobs: Tensor, step: int) -> Tensor:
        while len(numbers) <= step:
            numbers.append(float(torch.rand((), generator=generator, dtype=torch.float64)))
        scaled = (logprobs.double() / config.temperature).softmax(-1)
        if scaled.isnan().any():
            raise RunError(BROKEN)
        sorted_, order = scaled.sort(dim=-1, descending=True, stable=True)
        if config.top_k is not None:
            sorted_[:, config.top_k :] = 0
        below = sorted_.cumsum(-1) - sorted_
        if config.top_p is not None:
            sorted_[below >= config.top_p] = 0
        edges = sorted_.cumsum(-1)
        place: Tensor = (edges <= numbers[step] * edges[:, -1:]).sum(-1, keepdim=True)
        return order.gather(-1, place.clamp(max=order.shape[-1] - 1)).squeeze(-1)

    return choose


@torch.inference_mode()
def walk(
    model: Steppable, sources: Asked, choose: Choose, config: DecodeConfig, tell: Tell | None = None
) -> Iterator[Found]:
    """Choose token after token; a sentence that has ended leaves the batch. One that `tell` ends has its last token in
    the place of <eos>. None comes behind every step."""
    state, limits = model.start(sources.source, sources.lengths), sources.limits
    alive = [(row, Hypothesis([], 0.0, [])) for row in range(len(sources.source))]
    tokens = begun(state, sources)
    for step in itertools.count():
        scores, state = model.step(tokens, state)
        written = [output.tokens for _, output in alive] if config.no_repeat else []
        scores = allowed(scores, step, limits, written, config.no_repeat)
        tokens = choose(scores, step)
        chances = scores.gather(1, tokens[:, None])[:, 0].tolist()
        keep = []
        for place, (token, chance) in enumerate(zip(tokens.tolist(), chances, strict=True)):
            if math.isnan(chance):
                raise RunError(BROKEN)
            number, output = alive[place]
            output.tokens.append(token)
            output.logprobs.append(chance)
            told = tell is not None and tell(number, token, chance)
            if token != EOS and not told:
                keep.append(place)
            else:
                yield number, [scored(output, config.length_penalty)]
        if not keep:
            return
        if len(keep) < len(alive):
            alive, places = [alive[place] for place in keep], torch.tensor(keep, device=tokens.device)
            tokens, limits = rows((tokens, limits), places)
            state = State(rows(state.source, places), rows(state.past, places))
        yield None


def scored(output: Hypothesis, alpha: float) -> Hypothesis:
    """A hypothesis that has ended: without <eos>, and with its score."""
    score = sum(output.logprobs) / penalty(float(len(output.logprobs)), alpha)
    return Hypothesis(output.tokens[:-1], score, output.logprobs)
