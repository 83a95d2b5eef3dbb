"""Training without an optimizer's steps: counting and Baum-Welch for HMMs, L-BFGS for chains over features.

L-BFGS sees all examples at every iteration; with an L1 penalty it is OWL-QN (Andrew and Gao 2007).
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.chain import marginals
from regard.data.batching import Batch, Row, collate
from regard.data.vocabulary import PAD
from regard.tasks.encoder import LABELS
from regard.tasks.tagging.model import Tagger

CELLS = 2**19
"""Features and tags of the sentences that are worked on at once."""
HISTORY = 6
"""Steps that L-BFGS remembers."""


def make_groups(rows: Sequence[Row]) -> list[Batch]:
    """All rows in batches of like lengths."""
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].source))
    groups: list[list[Row]] = [[]]
    for number in order:
        if groups[-1] and (len(groups[-1]) + 1) * len(rows[number].source) > CELLS:
            groups.append([])
        groups[-1].append(rows[number])
    return [collate(group) for group in groups]


def minimise(
    compute: Callable[[Tensor], tuple[float, Tensor]], weights: Tensor, l1: float = 0.0, tolerance: float = 1e-5
) -> Iterator[float]:
    """L-BFGS from some weights (n,): `compute` gives the objective, without the L1 penalty, and its gradient. Yields
    the objective after every iteration, until ten of them together gain less than the tolerance; the weights that
    `compute` saw last are those of the iteration."""
    history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)
    value, gradient = compute(weights)
    value += l1 * float(weights.abs().sum())
    slope = pseudo_gradient(weights, gradient, l1)
    values = [value]
    for number in itertools.count():
        direction = -two_loops(slope, history)
        if l1:
            direction *= direction * slope < 0  # only where it goes downhill
        gain = float(direction @ slope)
        if gain >= 0:
            return
        rate = 1.0 if number else min(1.0, 1.0 / float(slope.norm()))
        orthant = torch.where(weights != 0, weights.sign(), -slope.sign()) if l1 else None
        while True:
            moved = weights + rate * direction
            if orthant is not None:
                moved *= moved.sign() == orthant
            new, after = compute(moved)
            new += l1 * float(moved.abs().sum())
            if new <= value + 1e-4 * float(slope @ (moved - weights)) or rate < 1e-10:
                break
            rate /= 2
        change, turn = moved - weights, after - gradient
        curvature = float(change @ turn)
        if curvature > 0:
            history.append((change, turn, curvature))
        weights, value, gradient, slope = moved, new, after, pseudo_gradient(moved, after, l1)
        values.append(value)
        yield value
        if len(values) > 10 and values[-11] - value < tolerance * abs(value):
            return


def pseudo_gradient(weights: Tensor, gradient: Tensor, l1: float) -> Tensor:
    """The gradient with the L1 penalty; at zero, that of the side on which it goes downhill, if any."""
    if not l1:
        return gradient
    kink = torch.where(gradient < -l1, gradient + l1, torch.where(gradient > l1, gradient - l1, 0.0))
    return torch.where(weights != 0, gradient + l1 * weights.sign(), kink)


def two_loops(gradient: Tensor, history: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The gradient times the inverse of the curvature that the history tells of."""
    found, factors = gradient.clone(), []
    for change, turn, curvature in reversed(history):
        factor = float(change @ found) / curvature
        found.sub_(turn, alpha=factor)
        factors.append(factor)
    if history:
        change, turn, curvature = history[-1]
        found *= curvature / float(turn @ turn)
    for (change, turn, curvature), factor in zip(history, reversed(factors), strict=True):
        found.add_(change, alpha=factor - float(turn @ found) / curvature)
    return found


class Features(NamedTuple):
    """Which words have each feature: the transpose of bags, by which the gradient of weights is added up."""

    words: Tensor  # (occurrences,) their words, feature by feature
    offsets: Tensor  # (features,) where each feature's occurrences begin

    @classmethod
    def transpose(cls, ids: Tensor, features: int) -> "Features":
        """Of the bags (words, width) of all words, PAD where they have fewer features."""
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=features)
        offsets = counts.cumsum(0) - counts
        order = order[int(counts[: PAD + 1].sum()) :]
        return cls(order // ids.shape[1], (offsets - counts[PAD]).clamp(min=0))

    def sum(self, gradients: Tensor) -> Tensor:
        """The gradients (words, tags) of scores -> those of weights (features, tags)."""
        return F.embedding_bag(self.words, gradients, self.offsets, mode="sum")


def fit_weights(model: Tagger, rows: Sequence[Row], l1: float, l2: float) -> Iterator[float]:
    """Fit the weights of a chain over features: the penalized likelihood is as high as it gets."""
    learned = [model.bag.weight] + ([] if model.structure == "softmax" else [model.start, model.end, model.transitions])
    sizes, groups = [part.numel() for part in learned], make_groups(rows)
    bags = Features.transpose(torch.cat([one.source.view(-1, model.width) for one in groups]), model.bag.num_embeddings)
    words = sum(len(row.target) for row in rows)

    def compute(weights: Tensor) -> tuple[float, Tensor]:
        with torch.no_grad():
            for part, values in zip(learned, torch.split(weights, sizes), strict=True):
                part.copy_(values.view_as(part))
                part.grad = None
        value, gradients = 0.0, []
        for batch in groups:
            with torch.no_grad():
                scores, lengths = model.bags(batch)
            scores.requires_grad_()
            loss = model.measure(scores, lengths, batch.answer).nats.double().sum()
            torch.autograd.backward(loss)
            value += float(loss.detach())
            assert scores.grad is not None
            gradients.append(scores.grad.flatten(0, 1))
        others = (torch.zeros_like(part) if part.grad is None else part.grad for part in learned[1:])
        gradient = torch.cat([part.flatten() for part in (bags.sum(torch.cat(gradients)), *others)])
        return value + l2 * float(weights @ weights), gradient.add_(weights, alpha=2 * l2)

    first = torch.cat([part.detach().flatten() for part in learned])
    return (value / words for value in minimise(compute, first, l1))


def count_hmm(model: Tagger, rows: Sequence[Row], smoothing: float) -> None:
    """Fill an HMM with what was counted in tagged sentences, `smoothing` added to every count."""
    tags, features = len(model.start), model.bag.num_embeddings
    start, end, moves = torch.zeros(tags), torch.zeros(tags), torch.zeros(tags, tags)
    seen = torch.zeros(features, tags)
    for row in rows:
        path = torch.tensor(row.target) - LABELS
        start[path[0]] += 1
        end[path[-1]] += 1
        moves.index_put_((path[:-1], path[1:]), torch.ones(len(path) - 1), accumulate=True)
        seen.index_put_((torch.tensor(row.source), path), torch.ones(len(path)), accumulate=True)
    set_hmm(model, start, end, moves, seen, smoothing)


def set_hmm(model: Tagger, start: Tensor, end: Tensor, moves: Tensor, seen: Tensor, smoothing: float) -> None:
    """Counts -> the logarithms of smoothed probabilities: of the first tag, of what follows a tag or that nothing does,
    and of what a tag emits."""
    first = start + smoothing
    behind = torch.cat([moves, end[:, None]], dim=1) + smoothing
    emitted = seen + smoothing
    emitted[:LABELS] = 0  # special entries are emitted by nobody
    with torch.no_grad():
        model.start.copy_((first / first.sum()).log())
        both = (behind / behind.sum(1, keepdim=True)).log()
        model.transitions.copy_(both[:, :-1])
        model.end.copy_(both[:, -1])
        model.bag.weight.copy_((emitted / emitted.sum(0)).log().clamp(min=-100.0))
        model.bag.weight[:LABELS] = 0.0


def baum_welch(model: Tagger, groups: Sequence[Batch], smoothing: float) -> Iterator[float]:
    """Expectation maximisation of an HMM on sentences without tags, from the weights it has. Yields, round by round,
    the negative log-likelihood a word before it, which no round makes larger while nothing is smoothed."""
    tags, features = len(model.start), model.bag.num_embeddings
    words = sum(int(batch.lengths.sum()) for batch in groups)
    while True:
        start, end, moves = torch.zeros(tags), torch.zeros(tags), torch.zeros(tags, tags)
        seen, total = torch.zeros(features, tags), 0.0
        for batch in groups:
            with torch.no_grad():
                chain = model.chain(batch)
            found = marginals(*chain)
            total -= float(found.log_partition.sum())
            start += found.tags[:, 0].sum(0)
            last = (chain.lengths - 1).clamp(min=0)
            end += found.tags[torch.arange(len(last)), last].sum(0)
            moves += found.transitions.sum(0)
            seen.index_add_(0, batch.source.flatten(), found.tags.flatten(0, 1))
        set_hmm(model, start, end, moves, seen, smoothing)
        yield total / words
