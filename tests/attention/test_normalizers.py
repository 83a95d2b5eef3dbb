"""Structured normalizers as arguments of the one equation: heads, padding, and what they refuse (G2, G3, G7)."""

import pytest
import torch
from oracles import EXACT
from oracles import exact as exact
from torch.testing import assert_close

from regard.attention.equation import attend
from regard.attention.masks import causal, padding
from regard.attention.normalizers import NORMALIZERS, matching, nonprojective_trees, projective_trees
from regard.attention.trees import projective_marginals, tree_marginals
from regard.nn.attention import Cosine, Segments

pytestmark = pytest.mark.usefixtures("exact")

BATCH, HEADS, WORDS, SIZE = 2, 3, 5, 7
LENGTHS = torch.tensor([3, 5])
STRUCTURED = pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "softmax"])
NEAR = {"rtol": 0.0, "atol": 1e-7}  # Sinkhorn stops at 1e-9


@pytest.mark.parametrize(("normalize", "marginals"), [(projective_trees, projective_marginals),
                                                      (nonprojective_trees, tree_marginals)])  # fmt: skip
def test_every_head_has_its_own_trees(normalize, marginals):
    scores = torch.randn(BATCH, HEADS, WORDS, WORDS)
    real = padding(LENGTHS, WORDS)
    for mask in (real, real & real.mT):
        found = normalize(scores, mask)
        for row in range(BATCH):
            assert_close(found[row], marginals(scores[row], LENGTHS[row].expand(HEADS)), **EXACT)
    assert_close(normalize(scores, None), normalize(scores, torch.ones(WORDS, WORDS, dtype=torch.bool)), **EXACT)


@STRUCTURED
def test_padding_more_changes_nothing(name):
    query, keys, values = (torch.randn(BATCH, HEADS, WORDS, SIZE) for _ in range(3))
    real = padding(LENGTHS, WORDS)
    found = attend(query, keys, values, real & real.mT, normalize=NORMALIZERS[name])
    for row, length in enumerate(LENGTHS.tolist()):
        short = (part[row : row + 1, :, :length] for part in (query, keys, values))
        alone = attend(*short, normalize=NORMALIZERS[name])
        assert_close(found.weights[row : row + 1, :, :length, :length], alone.weights, **NEAR)
        assert_close(found.context[row : row + 1, :, :length], alone.context, **NEAR)
        assert not found.weights[row, :, length:].any()
        assert not found.weights[row, :, :, length:].any()


@STRUCTURED
def test_a_text_of_padding_alone_has_zeros_and_finite_gradients(name):
    scores = torch.randn(2, 1, 4, 4, requires_grad=True)
    real = padding(torch.tensor([4, 0]), 4)
    found = NORMALIZERS[name](scores, real & real.mT)
    assert not found[1].any()
    found.pow(2).sum().backward()
    assert scores.grad.isfinite().all()


@STRUCTURED
def test_half_precision_is_widened(name):
    scores = torch.randn(2, 1, 9, 9)
    found = NORMALIZERS[name](scores.bfloat16(), None)
    assert found.dtype == torch.bfloat16
    wanted = NORMALIZERS[name](scores.bfloat16().double(), None)
    assert_close(found.double(), wanted, rtol=0.01, atol=1e-3)


def test_rows_of_trees_and_matchings_sum_to_one():
    scores = torch.randn(BATCH, HEADS, WORDS, WORDS)
    for normalize in (projective_trees, nonprojective_trees, matching):
        assert_close(normalize(scores, None).sum(-1), torch.ones(BATCH, HEADS, WORDS), **NEAR)
    assert_close(matching(scores, None).sum(-2), torch.ones(BATCH, HEADS, WORDS), **NEAR)


def test_a_tree_has_no_future_to_hide():
    with pytest.raises(ValueError, match="no mask but that of padding"):
        projective_trees(torch.randn(1, 1, 4, 4), causal(4, 4))
    with pytest.raises(ValueError, match="3 queries look at 4 keys"):
        nonprojective_trees(torch.randn(1, 1, 3, 4), None)


def test_segments_of_every_query_are_sigmoids_until_ties_are_learned():
    segments, scores = Segments().double(), torch.randn(BATCH, HEADS, 4, WORDS)
    mask = padding(LENGTHS, WORDS)
    assert_close(segments(scores, mask), scores.sigmoid() * mask, **EXACT)
    torch.nn.init.constant_(segments.transitions[1, 1:].data, 2.0)
    assert (segments(scores, None) > scores.sigmoid()).all()  # who is chosen wants the next one chosen


def test_the_cosine_is_that_of_the_angle_over_a_temperature():
    score = Cosine().double()
    query, keys = torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 5.0], [0.0, 2.0], [-7.0, 0.0]])
    assert_close(score(query, keys), 10 * torch.tensor([[0.5**0.5, 0.0, -1.0]]), rtol=0, atol=1e-6)
    assert_close(score(query * 9, keys / 4), score(query, keys), **EXACT)
