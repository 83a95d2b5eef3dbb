"""Matchings: sums of 1 both ways, Sinkhorn's own fixed point, and the best of every assignment (G7)."""

import itertools
import math

import pytest
import torch
from oracles import EXACT
from oracles import exact as exact
from torch.autograd import gradcheck
from torch.testing import assert_close

from regard.attention.matching import best_matching, sinkhorn

pytestmark = pytest.mark.usefixtures("exact")

SHAPES = pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 1), (1, 4), (6, 6)], ids=str)


def balance_slowly(scores, rounds=20_000):
    """Rows and columns of a square made to sum to 1 in turns, on the numbers themselves."""
    weights = scores.exp()
    for _ in range(rounds):
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights / weights.sum(-2, keepdim=True)
    return weights


@SHAPES
def test_rows_and_columns_sum_to_one(shape):
    found = sinkhorn(3 * torch.randn(2, *shape))
    queries, keys = shape
    rows, columns = found.weights.sum(-1), found.weights.sum(-2)
    assert found.gap.max() < 1e-8
    if queries <= keys:
        assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-8)
    if keys <= queries:
        assert_close(columns, torch.ones_like(columns), rtol=0, atol=1e-8)
    assert columns.max() < 1 + 1e-8  # who is left over has less
    assert rows.max() < 1 + 1e-8


def test_the_gap_is_how_far_a_sum_is_from_one():
    found = sinkhorn(30 * torch.randn(3, 6, 6), iterations=0)
    sums = torch.cat([found.weights.sum(-1), found.weights.sum(-2)], dim=-1)
    assert_close(found.gap, (sums - 1).abs().amax(-1), rtol=0, atol=1e-9)
    assert found.gap.max() > 1e-3


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_square_is_the_fixed_point_of_taking_turns(size):
    scores = torch.randn(size, size)
    found = sinkhorn(scores).weights
    assert_close(found, balance_slowly(scores), rtol=0, atol=1e-10)
    potentials = found.log() - scores  # what was added is one number a row plus one a column
    assert_close(
        potentials - potentials[:1], (potentials - potentials[:1])[:, :1].expand(size, size), rtol=0, atol=1e-9
    )


def test_two_by_hand():
    """exp(a) on the diagonal, 1 beside it: p / (1 - p) is exp(a), squared and rooted."""
    found = sinkhorn(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).weights
    share = math.e / (1 + math.e)
    assert_close(found, torch.tensor([[share, 1 - share], [1 - share, share]]), rtol=0, atol=1e-9)


def test_without_scores_all_are_alike():
    assert_close(sinkhorn(torch.zeros(2, 5)).weights, torch.full((2, 5), 0.2), rtol=0, atol=1e-9)
    assert_close(sinkhorn(torch.zeros(5, 5)).weights, torch.full((5, 5), 0.2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_gradient_is_that_of_the_fixed_point(shape):
    scores = torch.randn(2, *shape, requires_grad=True)
    assert gradcheck(lambda logs: sinkhorn(logs, tolerance=1e-13).weights, (scores,), atol=1e-4)


def test_padding_takes_no_part():
    scores = torch.randn(2, 1, 6, 7)
    mask = torch.zeros(2, 1, 6, 7, dtype=torch.bool)
    mask[0, :, :3, :4] = True
    mask[1, :, :6, :7] = True
    found = sinkhorn(scores, mask)
    assert_close(found.weights[0, :, :3, :4], sinkhorn(scores[0, :, :3, :4]).weights, rtol=0, atol=1e-8)
    assert_close(found.weights[1], sinkhorn(scores[1]).weights, rtol=0, atol=1e-8)
    assert not found.weights[0, :, 3:].any()
    assert not found.weights[0, :, :, 4:].any()


def test_nobody_may_be_matched():
    scores = torch.randn(2, 3, 3, requires_grad=True)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[1] = False
    found = sinkhorn(scores, mask).weights
    assert not found[1].any()
    found.pow(2).sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[1].any()


def test_nothing_to_match():
    assert sinkhorn(torch.zeros(2, 0, 0)).weights.shape == (2, 0, 0)


def test_half_the_digits():
    scores = 5 * torch.randn(20, 20)
    assert_close(sinkhorn(scores.float()).weights.double(), sinkhorn(scores).weights, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", range(1, 7))
def test_the_best_of_every_assignment(size):
    scores = torch.randn(3, size, size)
    every = torch.tensor(list(itertools.permutations(range(size))))
    for one, found in zip(scores, best_matching(scores), strict=True):
        values = one[torch.arange(size), every].sum(1)
        assert found.tolist() == every[values.argmax()].tolist()


def test_who_is_left_over_has_no_key():
    scores = torch.tensor([[3.0, 1.0], [2.0, 5.0], [0.0, 4.0]])
    assert best_matching(scores).tolist() == [0, 1, -1]
    assert best_matching(scores.mT).tolist() == [0, 1]


def test_the_colder_the_nearer_to_the_best():
    scores = torch.randn(5, 5)
    found = sinkhorn(100 * scores, iterations=5000).weights
    assert_close(found, torch.nn.functional.one_hot(best_matching(scores), 5).double(), rtol=0, atol=1e-3)


def test_permuting_keys_permutes_weights():
    scores, order = torch.randn(4, 6), torch.randperm(6)
    assert_close(sinkhorn(scores[:, order]).weights, sinkhorn(scores).weights[:, order], **{**EXACT, "atol": 1e-8})
