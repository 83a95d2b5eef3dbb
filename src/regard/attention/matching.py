"""Matchings: weights whose rows and columns sum to 1, so that every query has its own key.

Sinkhorn's algorithm finds the doubly stochastic matrix exp(scores + row potential + column potential), on logarithms in
float64. The sharper the scores, the slower it is, so Newton's method goes on from its first rounds to the same fixed
point. The gradient is that of the fixed point: no graph of the iterations is kept. Where there are more keys than
queries, some keys are left over, and the other way round.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROUNDS, ITERATIONS, TOLERANCE = 10, 100, 1e-9
TINY = 1e-300
NEVER = -1e9
"""The logarithm of no weight; finite, so that differences are defined."""


class Matched(NamedTuple):
    """A soft matching."""

    weights: Tensor  # (.., query, key)
    gap: Tensor  # (..): how far a row's or column's sum is at most from 1


def balance(scores: Tensor, rows: Tensor, columns: Tensor, iterations: int, tolerance: float) -> Tensor:
    """exp(scores + u + v) whose rows and columns have these sums, given as logarithms: scores (.., n, m), rows (.., n),
    columns (.., m). Stops when no sum is further away than the tolerance."""
    v = torch.zeros_like(columns)
    for _ in range(ROUNDS):
        u = rows - (scores + v[..., None, :]).logsumexp(-1)
        v = columns - (scores + u[..., None]).logsumexp(-2)
    ridge = 1e-12 * torch.eye(scores.shape[-2], dtype=scores.dtype, device=scores.device)
    for _ in range(iterations):
        plan = (scores + u[..., None] + v[..., None, :]).exp()
        sums = plan.sum(-1)
        if float((sums - rows.exp()).abs().max()) < tolerance:
            break
        # Newton's step of the row potentials, where column potentials follow: a log-sum-exp is convex
        shares = plan / plan.sum(-2, keepdim=True).clamp(min=TINY)
        curvature = torch.diag_embed(sums) - plan @ shares.mT + ridge
        change = torch.linalg.solve_ex(curvature, rows.exp() - sums).result
        reach = (change.amax(-1) - change.amin(-1)).clamp(min=TINY)
        u = u + change * (reach.log1p() / reach)[..., None]  # as far as it is sure to come nearer (Sun 2019)
        v = columns - (scores + u[..., None]).logsumexp(-2)
    return (scores + u[..., None] + v[..., None, :]).exp()


class Balanced(torch.autograd.Function):
    """`balance`, with the gradient of its fixed point: of all changes, those that keep the sums."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rows: Tensor, columns: Tensor, iterations: int, tolerance: float) -> Tensor:
        plan = balance(scores, rows, columns, iterations, tolerance)
        ctx.save_for_backward(plan)
        return plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (plan,) = ctx.saved_tensors
        change = plan * gradient
        sums = torch.cat([change.sum(-1), change.sum(-2)], dim=-1)
        above = torch.cat([torch.diag_embed(plan.sum(-1)), plan], dim=-1)
        below = torch.cat([plan.mT, torch.diag_embed(plan.sum(-2))], dim=-1)
        inverse = torch.linalg.pinv(torch.cat([above, below], dim=-2), hermitian=True)
        kept = (inverse @ sums[..., None])[..., 0]
        row, column = kept.split([plan.shape[-2], plan.shape[-1]], dim=-1)
        return change - plan * (row[..., None] + column[..., None, :]), None, None, None, None


def sinkhorn(
    scores: Tensor, mask: Tensor | None = None, *, iterations: int = ITERATIONS, tolerance: float = TOLERANCE
) -> Matched:
    """scores (.., query, key) -> weights of the same shape. `mask`, which broadcasts to it, says who may be matched
    with whom; who may be matched with nobody has zeros."""
    allowed = (scores.new_ones(()).bool() if mask is None else mask).expand(scores.shape)
    has_key, has_query = allowed.any(-1), allowed.any(-2)
    more = has_query.sum(-1) - has_key.sum(-1)  # keys that are left over; if negative, queries

    def targets(exists: Tensor, left_over: Tensor) -> Tensor:
        """The logarithms of the sums: 1 for who exists, and for a last one the number of those left over."""
        spare = left_over.clamp(min=0).double().log().clamp(min=NEVER)
        return torch.cat([torch.where(exists, 0.0, NEVER).double(), spare[..., None]], dim=-1)

    wide = F.pad(scores.double().masked_fill(~allowed, NEVER), (0, 1, 0, 1))
    corner = F.pad(torch.zeros_like(scores, dtype=torch.bool), (0, 1, 0, 1))
    corner[..., -1, -1] = True
    logs = wide.masked_fill(corner, NEVER)
    plan = Balanced.apply(logs, targets(has_key, more), targets(has_query, -more), iterations, tolerance)  # type: ignore[no-untyped-call]
    weights = plan[..., :-1, :-1] * allowed
    gap = torch.cat([(plan.sum(-1)[..., :-1] - 1) * has_key, (plan.sum(-2)[..., :-1] - 1) * has_query], dim=-1)
    return Matched(weights.to(scores.dtype), F.pad(gap.detach().abs(), (0, 1)).amax(-1).to(scores.dtype))


def best_matching(scores: Tensor) -> Tensor:
    """The key (.., query) of each query in the best one-to-one assignment, of scores (.., query, key); -1 for a query
    that is left over."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    rows = scores.detach().double().flatten(0, -3).cpu() if scores.dim() > 2 else scores.detach().double().cpu()[None]
    found = torch.full(rows.shape[:-1], -1)
    for line, one in zip(found, rows, strict=True):
        queries, keys = map(torch.from_numpy, linear_sum_assignment(one.numpy(), maximize=True))
        line[queries] = keys
    return found.view(scores.shape[:-1]).to(scores.device)
