"""Dependency trees: distributions over the trees of a sentence, p(tree) ~ exp(sum of the scores of its arcs).

Arc scores are (batch, word, head): how well a head fits a word; the diagonal says how well the word fits as the root,
of which a tree has one. `lengths` (batch,) says how many words are real. Projective trees, whose arcs do not cross, are
added up by Eisner's algorithm; all trees by the matrix-tree theorem (Koo 2007). The marginals, how likely each head of
each word is, are soft parents (Kim 2017): rows that sum to 1.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Reduce = Callable[[Tensor], Tensor]
"""Alternatives (.., n) -> one (..): their log-sum-exp, or the greatest."""


def add_up(scores: Tensor) -> Tensor:
    """Log-sum-exp of the last dimension."""
    return scores.logsumexp(-1)


def take_best(scores: Tensor) -> Tensor:
    """The greatest of the last dimension; of equal ones, one."""
    return scores.max(-1).values


def real_arcs(scores: Tensor, lengths: Tensor) -> Tensor:
    """Which arcs (batch, word, head) join two real words."""
    real = torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None]
    return real[:, :, None] & real[:, None]


# Projective trees


def eisner(scores: Tensor, lengths: Tensor, reduce: Reduce = add_up) -> Tensor:
    """The log-partition (batch,) of projective trees, or, with `take_best`, the score of the best.

    A span is complete, with its head at one end, or still open: its ends are joined by an arc. Spans are kept by where
    they begin, narrow ones first, and by where they end, wide ones first: then all the ways to divide the spans of one
    width are one sum of two slices.
    """
    batch, n, _ = scores.shape
    single = scores.new_zeros(batch, n, 1)
    right_from, right_to, left_from, left_to = single, single, single, single  # complete; headed at the left, right
    open_right, open_left = single[..., :0], single[..., :0]
    rights, lefts = [single[..., 0]], [single[:, 0]]
    for width in range(1, n):
        divided = reduce(right_from[:, :-1] + left_to[:, 1:])
        arcs = [(divided + scores.diagonal(offset, 1, 2))[..., None] for offset in (-width, width)]
        open_right, open_left = torch.cat([open_right[:, :-1], arcs[0]], -1), torch.cat([arcs[1], open_left[:, 1:]], -1)
        right = reduce(open_right + right_to[:, 1:])[..., None]
        left = reduce(left_from[:, :-1] + open_left)[..., None]
        right_from, right_to = torch.cat([right_from[:, :-1], right], -1), torch.cat([right, right_to[:, 1:]], -1)
        left_from, left_to = torch.cat([left_from[:, :-1], left], -1), torch.cat([left, left_to[:, 1:]], -1)
        rights.append(F.pad(right[..., 0], (0, width)))
        lefts.append(left[:, 0])
    places = torch.arange(n, device=scores.device)
    behind = torch.stack(rights, 1).gather(1, (lengths[:, None] - 1 - places).clamp(min=0)[:, None])[:, 0]
    roots = scores.diagonal(0, 1, 2) + torch.cat(lefts, 1) + behind
    real = places < lengths.clamp(min=1)[:, None]
    return torch.where(lengths > 0, reduce(roots.masked_fill(~real, -torch.inf)), 0.0)


def projective_marginals(scores: Tensor, lengths: Tensor) -> Tensor:
    """How likely each head of each word is (batch, word, head), over projective trees; zeros at padding. They can be
    differentiated in turn where scores can."""
    again = torch.is_grad_enabled() and scores.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        arcs = scores if again else scores.detach().clone().requires_grad_()
        total = eisner(arcs, lengths.clone()).sum()
        found: Tensor = torch.autograd.grad(total, arcs, create_graph=again)[0]
    return found


def best_projective(scores: Tensor, lengths: Tensor) -> Tensor:
    """The head (batch, word) of each word in the best projective tree; a word that is its own head is the root."""
    with torch.inference_mode(False), torch.enable_grad():
        arcs = scores.detach().clone().requires_grad_()
        found: Tensor = torch.autograd.grad(eisner(arcs, lengths.clone(), take_best).sum(), arcs)[0]
    return found.argmax(-1)


# All trees


def normalize_arcs(scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Every word's weights of its heads (batch, word, head), which sum to 1, so that no scale of the scores can make a
    Laplacian singular; and which arcs are real."""
    arcs = real_arcs(scores, lengths)
    return scores.double().masked_fill(~arcs, torch.finfo(torch.float64).min).softmax(-1) * arcs, arcs


def laplacian(weights: Tensor) -> Tensor:
    """Koo's matrix (batch, word, head) of the weights of arcs and, on their diagonal, of roots; without padding, its
    determinant is the sum over all trees. It is linear in the weights."""
    others = weights.clone()
    others.diagonal(0, 1, 2).zero_()  # a difference of sums would lose what is small beside the root
    matrix = others.neg()
    matrix.diagonal(0, 1, 2).copy_(others.sum(-1))
    matrix[..., 0] = weights.diagonal(0, 1, 2)
    return matrix


def matrix_tree(scores: Tensor, lengths: Tensor) -> Tensor:
    """The log-partition (batch,) of all trees."""
    weights, arcs = normalize_arcs(scores, lengths)
    tops = scores.double().masked_fill(~arcs, torch.finfo(torch.float64).min).logsumexp(-1)
    real = arcs.diagonal(0, 1, 2)
    total: Tensor = torch.linalg.slogdet(laplacian(weights) + torch.diag_embed((~real).double())).logabsdet
    return (total + (tops * real).sum(-1)).to(scores.dtype)


def weigh_arcs(weights: Tensor, inverse: Tensor) -> Tensor:
    """The marginals (batch, word, head) of weights, with the inverse of their Laplacian. It is linear in both."""
    later = torch.arange(weights.shape[-1], device=weights.device) > 0
    arcs = weights * ((inverse.diagonal(0, 1, 2) * later)[..., None] - inverse.mT * later)
    return torch.diagonal_scatter(arcs, weights.diagonal(0, 1, 2) * inverse[:, 0], 0, 1, 2)


class TreeMarginals(torch.autograd.Function):
    """Marginals of all trees. They are the gradient of the log-partition, so their own derivative is symmetric: the
    gradient is how they change if the scores move along it."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lengths: Tensor) -> Tensor:
        weights, arcs = normalize_arcs(scores, lengths)
        inverse = torch.linalg.inv(laplacian(weights) + torch.diag_embed((~arcs.diagonal(0, 1, 2)).double()))
        ctx.save_for_backward(weights, inverse)
        return weigh_arcs(weights, inverse).to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weights, inverse = ctx.saved_tensors
        moved = weights * gradient
        turned = inverse @ laplacian(moved) @ inverse
        return (weigh_arcs(moved, inverse) - weigh_arcs(weights, turned)).to(gradient.dtype), None


def tree_marginals(scores: Tensor, lengths: Tensor) -> Tensor:
    """How likely each head of each word is (batch, word, head), over all trees; zeros at padding."""
    found: Tensor = TreeMarginals.apply(scores, lengths)  # type: ignore[no-untyped-call]
    return found


def best_tree(scores: Tensor, lengths: Tensor) -> Tensor:
    """The head (batch, word) of each word in the best tree of all (Chu-Liu-Edmonds); the root is its own head."""
    heads = torch.zeros(scores.shape[:2], dtype=torch.long)
    for row, (arcs, count) in enumerate(zip(scores.detach().double().tolist(), lengths.tolist(), strict=True)):
        every = [score for line in arcs[:count] for score in line[:count]]
        apart = count * (max(every, default=0.0) - min(every, default=0.0) + 1.0)  # a second root would cost more
        table = {}
        for word, line in enumerate(arcs[:count]):
            others = {head + 1: score for head, score in enumerate(line[:count]) if head != word}
            table[word + 1] = {0: line[word] - apart} | others
        found = span(table)
        for word in range(count):
            heads[row, word] = found[word + 1] - 1 if found[word + 1] else word
    return heads.to(scores.device)


def span(choices: dict[int, dict[int, float]]) -> dict[int, int]:
    """Chu-Liu-Edmonds: of what each word's heads score, the heads of the best tree with root 0."""
    heads = {word: max(scores, key=scores.__getitem__) for word, scores in choices.items()}
    cycle = find_cycle(heads)
    if not cycle:
        return heads
    merged = max(choices) + 1 + max(cycle)  # stands for the whole cycle
    inside, outside = {}, {}  # by which word the cycle is entered from a head; by which it is left to a word
    entering: dict[int, float] = {}
    smaller: dict[int, dict[int, float]] = {}
    for word, scores in choices.items():
        for head, score in scores.items():
            if word in cycle and head not in cycle:
                gain = score - choices[word][heads[word]]
                if gain > entering.get(head, -float("inf")):
                    entering[head], inside[head] = gain, word
            elif word not in cycle:
                best = smaller.setdefault(word, {})
                name = merged if head in cycle else head
                if score > best.get(name, -float("inf")):
                    best[name] = score
                    if head in cycle:
                        outside[word] = head
    smaller[merged] = entering
    found = span(smaller)
    broken = inside[found[merged]]
    result = {word: heads[word] for word in cycle if word != broken}
    result[broken] = found.pop(merged)
    return result | {word: outside[word] if head == merged else head for word, head in found.items()}


def find_cycle(heads: dict[int, int]) -> set[int]:
    """The words of one cycle, or none."""
    done: set[int] = {0}
    for begin in heads:
        path, word = [], begin
        while word not in done and word not in path:
            path.append(word)
            word = heads[word]
        if word in path:
            return set(path[path.index(word) :])
        done.update(path)
    return set()
