"""Beam search: keep the likeliest beginnings of every sentence."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.config.run import DecodeConfig
from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import RunError
from regard.inference.constraints import BROKEN, Constraints, Sources, apply_constraints, length_penalty
from regard.nn.state import Hypothesis, State, Steppable, select_rows

PIECE = 64
"""How many of a row's numbers are one piece to `likely_places`."""
Found = tuple[int, list[Hypothesis]] | None
"""The place of a sentence and its outputs; None: nothing yet, and a moment in which whoever searches may do something
else."""


class Beams(NamedTuple):
    """Hypotheses by sentence: still growing, or ended, with PAD behind. A place that holds none has score -inf."""

    tokens: Tensor  # (sentences, beam, length)
    logprobs: Tensor  # (sentences, beam, length)
    scores: Tensor  # (sentences, beam)


class Sentences(NamedTuple):
    """What a search knows of the sentences it still works on. Rows are sentences."""

    number: Tensor  # (sentences,) their places in what was asked
    largest: Tensor  # (sentences,) the largest penalty that an output can get
    constraints: Constraints
    growing: Beams
    ended: Beams


def begin_search(sources: Sources, config: DecodeConfig) -> Sentences:
    """Sentences with one empty hypothesis each."""
    count, device = len(sources.source), sources.source.device
    nothing, scores = torch.empty(count, 1, 0, device=device), torch.zeros(count, 1, device=device)
    growing = Beams(nothing.long(), nothing, scores)
    largest = length_penalty(sources.constraints.longest.double() + 1, config.length_penalty)
    ended = Beams(*(part[:, :0] for part in growing))
    return Sentences(torch.arange(count, device=device), largest, sources.constraints, growing, ended)


@torch.inference_mode()
def beam_search(model: Steppable, sources: Sources, config: DecodeConfig, best: int) -> Iterator[Found]:
    """Keep the `beam_size` likeliest continuations of every sentence; those that end leave the beam. A sentence's
    number and its `best` outputs come as soon as it is finished; None comes behind every step.

    A sentence is finished when none of its living hypotheses can still become one of the `best`, however it goes on:
    a log-probability only falls, and the penalty is largest at the limit. So stopping early changes nothing.
    """
    width, here = max(config.beam_size, best), begin_search(sources, config)
    state = model.start(sources.source, sources.lengths)
    tokens = first_tokens(state, sources)
    for step in itertools.count():
        logprobs, state = model.step(tokens, state)
        written = here.growing.tokens.flatten(0, 1).tolist() if config.no_repeat_ngram else []
        logprobs = apply_constraints(logprobs, step, here.constraints, written, config.no_repeat_ngram)
        origin, growing = expand(here.growing, logprobs, width)
        ends, ended = growing.tokens[..., -1] == EOS, here.ended
        order = origin + torch.arange(len(origin), device=origin.device)[:, None] * (len(tokens) // len(origin))
        if ends.any():
            ended = merge_ended(ended, growing, ends, length_penalty(step + 1.0, config.length_penalty), width)
            growing = growing._replace(scores=growing.scores.masked_fill(ends, -torch.inf))
        here = here._replace(growing=growing, ended=ended)
        reach = growing.scores.amax(1) / here.largest
        if reach.isnan().any():
            raise RunError(BROKEN)
        finished = reach <= ended.scores[:, best - 1] if ended.scores.shape[1] >= best else reach == -torch.inf
        if finished.any():
            for row in finished.nonzero().flatten().tolist():
                yield int(here.number[row]), list_hypotheses(ended, row, best)
            if finished.all():
                return
            keep = (~finished).nonzero().flatten()
            here, order = select_rows(here, keep), order[keep]
            state = State(select_rows(state.source, keep), state.cache)
        state = State(state.source, select_rows(state.cache, order.flatten()))
        tokens = here.growing.tokens[..., -1].flatten()
        yield None


def first_tokens(state: State, sources: Sources) -> Tensor:
    """The tokens (sentences,) that the first step reads."""
    return torch.full_like(sources.lengths, BOS) if state.first is None else state.first


def expand(beams: Beams, logprobs: Tensor, width: int) -> tuple[Tensor, Beams]:
    """The `width` likeliest continuations of every sentence by logprobs (sentences * beam, vocab), and the place
    (sentences, beam) each came from."""
    sentences, vocab = len(beams.scores), logprobs.shape[1]
    flat, places = logprobs.reshape(sentences, -1), likely_places(logprobs, beams.scores, width)
    totals = flat.gather(1, places) + beams.scores.gather(1, places // vocab)
    scores, order = totals.topk(min(width, totals.shape[1]))
    places = places.gather(1, order)
    origin, tokens, new = places // vocab, places % vocab, flat.gather(1, places)
    back = origin[..., None].expand(-1, -1, beams.tokens.shape[-1])
    return origin, Beams(
        torch.cat([beams.tokens.gather(1, back), tokens[..., None]], dim=-1),
        torch.cat([beams.logprobs.gather(1, back), new[..., None]], dim=-1),
        scores,
    )


def likely_places(logprobs: Tensor, scores: Tensor, width: int) -> Tensor:
    """Places (sentences, n) in the rows of each sentence, one after the other, among which are the `width` likeliest
    continuations: logprobs (sentences * beam, vocab) of beginnings with scores (sentences, beam).

    Of long rows, only the pieces with the largest maxima are looked at: no other piece can hold one of the likeliest.
    That is many times as fast as topk over whole rows."""
    (sentences, beam), vocab, device = scores.shape, logprobs.shape[1], logprobs.device
    pieces, whole = vocab // PIECE, vocab // PIECE * PIECE
    if pieces * beam < 8 * width:
        return torch.arange(beam * vocab, device=device).expand(sentences, -1)
    maxima = logprobs[:, :whole].reshape(sentences, beam, pieces, PIECE).amax(3) + scores[..., None]
    chosen = maxima.flatten(1).topk(width).indices
    first = chosen // pieces * vocab + chosen % pieces * PIECE
    places = (first[..., None] + torch.arange(PIECE, device=device)).flatten(1)
    if whole == vocab:
        return places
    rest = torch.arange(beam, device=device)[:, None] * vocab + torch.arange(whole, vocab, device=device)
    return torch.cat([places, rest.flatten().expand(sentences, -1)], dim=1)


def merge_ended(ended: Beams, growing: Beams, ends: Tensor, divisor: float, width: int) -> Beams:
    """The best hypotheses that have ended, with those that end now (sentences, beam) among them."""
    length = growing.tokens.shape[-1]
    room = (0, length - ended.tokens.shape[-1])
    scores = torch.cat([ended.scores, (growing.scores / divisor).masked_fill(~ends, -torch.inf)], dim=1)
    scores, places = scores.topk(min(width, scores.shape[1]))
    back = places[..., None].expand(-1, -1, length)
    tokens = torch.cat([F.pad(ended.tokens, room, value=PAD), growing.tokens], dim=1)
    logprobs = torch.cat([F.pad(ended.logprobs, room), growing.logprobs], dim=1)
    return Beams(tokens.gather(1, back), logprobs.gather(1, back), scores)


def list_hypotheses(ended: Beams, row: int, best: int) -> list[Hypothesis]:
    """One sentence's ended hypotheses, best first."""
    out = []
    for tokens, logprobs, score in zip(*(part[row, :best].tolist() for part in ended), strict=True):
        if score > -torch.inf:
            length = tokens.index(EOS)
            out.append(Hypothesis(tokens[:length], score, logprobs[: length + 1]))
    return out
