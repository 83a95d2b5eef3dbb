"""Searching for outputs. Nothing here asks what the model is: it has `start` and `step`, and states are row-first.

An output ends with <eos>; one that has reached its limit may only end. A hypothesis is ranked by its log-probability
over ((5 + length) / 6) ** alpha, its length counting <eos> (Wu 2016).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.models import State, Steppable
from regard.text import BOS, EOS, PAD

Choose = Callable[[Tensor, int], Tensor]
"""Log-probabilities (rows, vocab) at a step -> tokens (rows,)."""
Tell = Callable[[int, int, float], bool]
"""Gets a sentence's number, its next token and that one's log-probability, as they come; True ends the sentence."""


class Hypothesis(NamedTuple):
    """One output, without <bos> and <eos>."""

    tokens: list[int]
    score: float
    """What hypotheses are ranked by."""
    logprobs: list[float]
    """Of each token, and of <eos>."""


class Limits(NamedTuple):
    """What an output may be. Rows are sentences."""

    longest: Tensor  # (sentences,) tokens before <eos>
    prefix: Tensor  # (sentences, n) tokens it must begin with; PAD: free
    no_repeat: int  # no n-gram of this size twice; 0: no limit
    soonest: int  # the least of `longest`: before that step nobody must end
    least: int = 0  # tokens before <eos>; a limit goes before it

    def of(self, keep: Tensor) -> "Limits":
        """The limits of some of the sentences."""
        return self._replace(longest=self.longest[keep], prefix=self.prefix[keep])


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
    longest = (lengths * config.max_ratio).long() + config.max_extra
    longest = longest if most is None else longest.clamp(max=most)
    prefix = torch.full((len(source), max(map(len, prefixes or [[]]))), PAD)
    for row, tokens in enumerate(prefixes or []):
        prefix[row, : len(tokens)] = torch.tensor(tokens)
    longest = torch.maximum(longest, (prefix != PAD).sum(1).to(longest.device))
    limits = Limits(longest, prefix.to(source.device), config.no_repeat, int(longest.min()), config.min_length)
    with torch.inference_mode():
        if config.sample:
            drawn = [walk(model, source, lengths, limits, sampler(config, n), config, tell) for n in range(best)]
            return [list(row) for row in zip(*drawn, strict=True)]
        if config.beam == 1 and best == 1:
            return [[hypothesis] for hypothesis in walk(model, source, lengths, limits, greedy, config, tell)]
        return beam_search(model, source, lengths, limits, config, best)


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


def walk(
    model: Steppable,
    source: Tensor,
    lengths: Tensor,
    limits: Limits,
    choose: Choose,
    config: DecodeConfig,
    tell: Tell | None = None,
) -> list[Hypothesis]:
    """Choose token after token; a sentence that has ended leaves the batch. One that `tell` ends has its last token in
    the place of <eos>."""
    state = model.start(source, lengths)
    outputs = [Hypothesis([], 0.0, []) for _ in source]
    alive = list(range(len(source)))
    tokens = torch.full((len(source),), BOS, device=source.device) if state.first is None else state.first
    for step in range(int(limits.longest.max()) + 1):
        scores, state = model.step(tokens, state)
        scores = allowed(scores, step, [outputs[row].tokens for row in alive], limits)
        tokens = choose(scores, step)
        chosen = tokens.tolist()
        for row, token, logprob in zip(alive, chosen, scores.gather(1, tokens[:, None])[:, 0].tolist(), strict=True):
            outputs[row].tokens.append(token)
            outputs[row].logprobs.append(logprob)
        if tell is not None:
            told = [tell(row, token, outputs[row].logprobs[-1]) for row, token in zip(alive, chosen, strict=True)]
            chosen = [EOS if end else token for end, token in zip(told, chosen, strict=True)]
        if EOS in chosen:
            keep = [place for place, token in enumerate(chosen) if token != EOS]
            if not keep:
                break
            alive, places = [alive[place] for place in keep], torch.tensor(keep, device=source.device)
            tokens, limits = tokens[places], limits.of(places)
            state = State(rows(state.source, places), rows(state.past, places))
    alpha = config.length_penalty
    return [Hypothesis(o.tokens[:-1], sum(o.logprobs) / penalty(len(o.logprobs), alpha), o.logprobs) for o in outputs]


# --- beams -----------------------------------------------------------------------------------------------------------


class Beams(NamedTuple):
    """Hypotheses by sentence: still growing, or ended. A place that holds none has score -inf."""

    tokens: Tensor  # (sentences, beam, length)
    logprobs: Tensor  # (sentences, beam, length)
    scores: Tensor  # (sentences, beam)


def beam_search(
    model: Steppable, source: Tensor, lengths: Tensor, limits: Limits, config: DecodeConfig, best: int
) -> list[list[Hypothesis]]:
    """Keep the `beam` likeliest continuations of every sentence; those that end leave the beam.

    A sentence is finished when none of its living hypotheses can still become one of the `best`, however it goes on:
    a log-probability only falls, and the penalty is largest at the limit. So stopping early changes nothing.
    """
    width, sentences = max(config.beam, best), len(source)
    state = model.start(source, lengths)
    device = source.device
    alive = torch.arange(sentences, device=device)
    tokens = torch.full((sentences,), BOS, device=device) if state.first is None else state.first
    growing = Beams(
        torch.empty(sentences, 1, 0, dtype=torch.long, device=device),
        torch.empty(sentences, 1, 0, device=device),
        torch.zeros(sentences, 1, device=device),
    )
    ended = Beams(growing.tokens[:, :0], growing.logprobs[:, :0], growing.scores[:, :0])
    done: dict[int, list[Hypothesis]] = {}
    largest_penalty = ((6 + limits.longest) / 6) ** config.length_penalty
    for step in range(int(limits.longest.max()) + 1):
        logprobs, state = model.step(tokens, state)
        histories = growing.tokens.flatten(0, 1).tolist() if limits.no_repeat else []
        logprobs = allowed(logprobs, step, histories, limits)
        origin, growing = grown(growing, logprobs, width)
        ends = growing.tokens[..., -1] == EOS
        order = origin + torch.arange(len(alive), device=device)[:, None] * (len(tokens) // len(alive))
        if ends.any():
            ended = merged(ended, growing, ends, penalty(step + 1, config.length_penalty), width)
            growing = growing._replace(scores=growing.scores.masked_fill(ends, -torch.inf))
        reach = growing.scores.amax(1) / largest_penalty
        finished = reach <= ended.scores[:, best - 1] if ended.scores.shape[1] >= best else reach == -torch.inf
        if finished.any():
            for row in finished.nonzero().flatten().tolist():
                done[int(alive[row])] = listed(ended, row, best)
            if finished.all():
                break
            keep = (~finished).nonzero().flatten()
            alive, order = alive[keep], order[keep]
            growing, ended = Beams(*rows(growing, keep)), Beams(*rows(ended, keep))
            state = State(rows(state.source, keep), state.past)
            limits, largest_penalty = limits.of(keep), largest_penalty[keep]
        state = State(state.source, rows(state.past, order.flatten()))
        tokens = growing.tokens[..., -1].flatten()
    return [done[row] for row in range(sentences)]


def grown(beams: Beams, logprobs: Tensor, width: int) -> tuple[Tensor, Beams]:
    """The `width` likeliest continuations of every sentence, and the place (sentences, beam) each came from.

    logprobs (sentences * beam, vocab)."""
    sentences, beam, _ = beams.tokens.shape
    vocab = logprobs.shape[-1]
    totals = (logprobs.view(sentences, beam, vocab) + beams.scores[..., None]).flatten(1)
    scores, places = largest(totals, min(width, totals.shape[1]))
    origin, tokens = places // vocab, places % vocab
    new = logprobs.view(sentences, -1).gather(1, places)
    back = origin[..., None].expand(-1, -1, beams.tokens.shape[-1])
    return origin, Beams(
        torch.cat([beams.tokens.gather(1, back), tokens[..., None]], dim=-1),
        torch.cat([beams.logprobs.gather(1, back), new[..., None]], dim=-1),
        scores,
    )


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row (rows, n) and their places, largest first, as topk gives them.

    Of a long row, only the columns with the largest maxima are sorted when it is folded into a table: no other column
    can hold one of the largest. That is three times as fast as topk over the whole row.
    """
    rows, size = values.shape
    width = size // 64
    if len(values) == 1 or width < 8 * count:
        return torch.topk(values, count)
    table = values[:, : 64 * width].view(rows, 64, width)
    columns = table.amax(1).topk(count).indices
    picked = table.gather(2, columns[:, None].expand(-1, 64, -1)).flatten(1)
    found, order = torch.cat([picked, values[:, 64 * width :]], dim=1).topk(count)
    inside = order // count * width + columns.gather(1, order % count)
    return found, torch.where(order < 64 * count, inside, order - 64 * count + 64 * width)


def merged(ended: Beams, growing: Beams, ends: Tensor, divisor: float, width: int) -> Beams:
    """The best hypotheses that have ended, with those that end now (sentences, beam) among them."""
    length = growing.tokens.shape[-1]
    room = length - ended.tokens.shape[-1]
    new = (growing.scores / divisor).masked_fill(~ends, -torch.inf)
    tokens = torch.cat([torch.nn.functional.pad(ended.tokens, (0, room), value=PAD), growing.tokens], dim=1)
    logprobs = torch.cat([torch.nn.functional.pad(ended.logprobs, (0, room)), growing.logprobs], dim=1)
    scores = torch.cat([ended.scores, new], dim=1)
    scores, places = scores.topk(min(width, scores.shape[1]))
    back = places[..., None].expand(-1, -1, length)
    return Beams(tokens.gather(1, back), logprobs.gather(1, back), scores)


def listed(ended: Beams, row: int, best: int) -> list[Hypothesis]:
    """One sentence's ended hypotheses, best first."""
    out = []
    for tokens, logprobs, score in zip(*(part[row, :best].tolist() for part in ended), strict=True):
        if score > -torch.inf:
            length = tokens.index(EOS)
            out.append(Hypothesis(tokens[:length], score, logprobs[: length + 1]))
    return out


# --- what both share -------------------------------------------------------------------------------------------------


def rows(tree: Any, index: Tensor) -> Any:
    """Every tensor of a state (tuples of tensors and tuples), its rows chosen and ordered by an index."""
    if isinstance(tree, tuple):
        parts = [rows(part, index) for part in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return tree.index_select(0, index) if isinstance(tree, Tensor) else tree


def penalty(length: int, alpha: float) -> float:
    """What the log-probability of an output of this many tokens, <eos> among them, is divided by."""
    return float(((5 + length) / 6) ** alpha)


NEVER = torch.tensor([PAD, BOS])


def allowed(logprobs: Tensor, step: int, histories: list[list[int]], limits: Limits) -> Tensor:
    """logprobs (rows, vocab) with -inf where a token may not come next; the tokens of each row so far."""
    beam = len(logprobs) // len(limits.longest)
    logprobs.index_fill_(1, NEVER.to(logprobs.device), -torch.inf)
    if step < limits.prefix.shape[1]:
        forced = limits.prefix[:, step].repeat_interleave(beam)[:, None]
        only = torch.full_like(logprobs, -torch.inf).scatter_(1, forced, logprobs.gather(1, forced))
        logprobs = torch.where(forced == PAD, logprobs, only)
    if limits.no_repeat:
        for row, tokens in enumerate(histories):
            logprobs[row, repeats(tokens, limits.no_repeat)] = -torch.inf
    if step < limits.least:
        free = (limits.longest > step).repeat_interleave(beam)
        logprobs[:, EOS] = torch.where(free, -torch.inf, logprobs[:, EOS])
    if step >= limits.soonest:
        at_end = (limits.longest <= step).repeat_interleave(beam)
        only = torch.full_like(logprobs, -torch.inf)
        only[:, EOS] = logprobs[:, EOS]
        logprobs = torch.where(at_end[:, None], only, logprobs)
    return logprobs


def repeats(tokens: list[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram that is there already."""
    tail = tuple(tokens[len(tokens) - size + 1 :])
    grams = zip(*(tokens[start:] for start in range(size)), strict=False)
    return [gram[-1] for gram in grams if gram[:-1] == tail] if len(tokens) >= size - 1 else []
