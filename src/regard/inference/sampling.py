"""Greedy search and sampling; and which search a configuration asks for.

Nothing here asks what the model is: it has `start` and `step`, and states are row-first. An output ends with <eos>; one
that has reached its limit may only end. A hypothesis is ranked by its log-probability over ((5 + length) / 6) ** alpha,
its length counting <eos> (Wu 2016).
"""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.config.run import DecodeConfig
from regard.data.vocabulary import EOS
from regard.errors import RunError
from regard.inference.beam_search import Found, beam_search, first_tokens
from regard.inference.constraints import BROKEN, Sources, apply_constraints, length_penalty
from regard.nn.state import Hypothesis, State, Steppable, select_rows

Choose = Callable[[Tensor, int], Tensor]
"""Log-probabilities (rows, vocab) at a step -> tokens (rows,)."""
OnToken = Callable[[int, int, float], bool]
"""Gets a sentence's number, its next token and that one's log-probability, as they come; True ends the sentence."""


def generate(
    model: Steppable, sources: Sources, config: DecodeConfig, *, best: int = 1, on_token: OnToken | None = None
) -> Iterator[Found]:
    """The place of each sentence and its `best` outputs, best first, as soon as it is finished; None behind every step.
    Samples come in the order they were drawn. The answer to a source does not depend on what else is in the batch.
    `on_token` hears of every token, as `generate_tokens` says; beam search tells none."""
    if config.sample and best > 1:
        drawn: dict[int, list[Hypothesis]] = {}
        for number in range(best):
            for one in generate_tokens(model, sources, sampler(config, number), config, on_token):
                if one is None:
                    yield None
                else:
                    drawn.setdefault(one[0], []).extend(one[1])
        yield from drawn.items()
    elif config.sample or (config.beam_size == 1 and best == 1):
        choose = sampler(config, 0) if config.sample else greedy
        yield from generate_tokens(model, sources, choose, config, on_token)
    else:
        yield from beam_search(model, sources, config, best)


def greedy(logprobs: Tensor, step: int) -> Tensor:
    """The likeliest token. On a CPU NumPy finds it: torch's argmax is many times slower there (docs/log.md)."""
    if logprobs.is_cpu:
        return torch.from_numpy(logprobs.numpy().argmax(-1))
    return logprobs.argmax(-1)


def sampler(config: DecodeConfig, number: int) -> Choose:
    """Draws tokens, one step after the other, by the Gumbel-max trick: the largest of log-probabilities with Gumbel
    noise is a draw from them. The noise is that of the seed, the sample's number and the step, the same for every
    sentence, and the last bits of a log-probability hardly ever decide: a sample is the same alone and in a batch."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)

    def choose(logprobs: Tensor, step: int) -> Tensor:
        uniform = torch.rand(logprobs.shape[-1], generator=generator, dtype=torch.float64).to(logprobs.device)
        return greedy(truncate(logprobs.double() / config.temperature, config) - (-uniform.log()).log(), step)

    return choose


def truncate(scores: Tensor, config: DecodeConfig) -> Tensor:
    """Scores (rows, vocab) with -inf for what is not among the `top_k` best, nor, of those, among the likeliest that
    together have the share `top_p` of their probability."""
    if config.top_k is None and config.top_p is None:
        return scores
    best, places = (part[:, : config.top_k] for part in scores.sort(dim=-1, descending=True, stable=True))
    if config.top_p is not None:
        shares = best.softmax(-1)
        best = best.masked_fill(shares.cumsum(-1) - shares >= config.top_p, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, places, best)


@torch.inference_mode()
def generate_tokens(
    model: Steppable, sources: Sources, choose: Choose, config: DecodeConfig, on_token: OnToken | None = None
) -> Iterator[Found]:
    """Choose token after token; a sentence that has ended leaves the batch. One that `on_token` ends has its last token
    in the place of <eos>. None comes behind every step."""
    state, constraints = model.start(sources.source, sources.lengths), sources.constraints
    alive: list[tuple[int, list[int], list[float]]] = [(row, [], []) for row in range(len(sources.source))]
    tokens = first_tokens(state, sources)
    for step in itertools.count():
        scores, state = model.step(tokens, state)
        written = [ids for _, ids, _ in alive] if config.no_repeat_ngram else []
        scores = apply_constraints(scores, step, constraints, written, config.no_repeat_ngram)
        tokens = choose(scores, step)
        chances = scores.gather(1, tokens[:, None])[:, 0].tolist()
        keep = []
        for place, (token, chance) in enumerate(zip(tokens.tolist(), chances, strict=True)):
            if math.isnan(chance):
                raise RunError(BROKEN)
            number, ids, logprobs = alive[place]
            ids.append(token)
            logprobs.append(chance)
            ended = on_token is not None and on_token(number, token, chance)
            if token != EOS and not ended:
                keep.append(place)
            else:
                yield number, [make_hypothesis(ids[:-1], logprobs, config.length_penalty)]
        if not keep:
            return
        if len(keep) < len(alive):
            alive, places = [alive[place] for place in keep], torch.tensor(keep, device=tokens.device)
            tokens, constraints = select_rows((tokens, constraints), places)
            state = State(select_rows(state.source, places), select_rows(state.cache, places))
        yield None


def make_hypothesis(tokens: list[int], logprobs: list[float], alpha: float) -> Hypothesis:
    """An output with the log-probabilities of its tokens and of <eos>, and its score."""
    return Hypothesis(tokens, sum(logprobs) / length_penalty(float(len(logprobs)), alpha), logprobs)
