"""Chains against every tagging written out, against pytorch-crf, and at lengths where probabilities vanish (G2, G6)."""

import itertools

import pytest
import torch
from oracles import EXACT
from oracles import exact as exact
from torch.autograd import gradcheck
from torch.testing import assert_close

from regard.attention import chain

pytestmark = pytest.mark.usefixtures("exact")

TAGS, LENGTHS = 4, (6, 4, 2, 1, 0)


def draw(form, tags=TAGS, lengths=LENGTHS):
    """Unary and transition scores, and lengths; transitions are the same at every step, or differ."""
    batch, n = len(lengths), max(lengths)
    unary, shared = 3 * torch.randn(batch, n, tags), torch.randn(tags, tags)
    if form == "forbidden":
        shared[0, 1] = shared[2, 2] = -torch.inf
    if form == "far apart":  # logarithms alone can add these
        unary *= 300
    moves = torch.randn(batch, n - 1, tags, tags) if form == "by step" else shared
    return unary, moves, torch.tensor(lengths)


def write_out(unary, moves, length):
    """Every tagging of one chain (taggings, n), and its score."""
    paths = torch.tensor(list(itertools.product(range(unary.shape[-1]), repeat=length)), dtype=torch.long)
    scores = torch.zeros(len(paths))
    for t in range(length):
        scores = scores + unary[t, paths[:, t]]
        if t:
            matrix = moves if moves.dim() == 2 else moves[t - 1]
            scores = scores + matrix[paths[:, t - 1], paths[:, t]]
    return paths.view(len(paths), length), scores


FORMS = pytest.mark.parametrize("form", ["shared", "by step", "forbidden", "far apart"])


@FORMS
def test_every_tagging_written_out(form):
    unary, moves, lengths = draw(form)
    found, total = chain.marginals(unary, moves, lengths), chain.log_partition(unary, moves, lengths)
    for row, length in enumerate(lengths.tolist()):
        paths, scores = write_out(unary[row], moves[row] if form == "by step" else moves, length)
        shares = scores.softmax(0)
        assert_close(total[row], scores.logsumexp(0), **EXACT)
        assert_close(found.log_partition[row], scores.logsumexp(0), **EXACT)
        assert_close(found.entropy[row], torch.special.entr(shares).sum(), rtol=0, atol=1e-9)
        tags, pairs = torch.zeros_like(unary[row]), torch.zeros(TAGS, TAGS)
        for t in range(length):
            tags[t].index_add_(0, paths[:, t], shares)
            if t:
                pairs.index_put_((paths[:, t - 1], paths[:, t]), shares, accumulate=True)
        assert_close(found.tags[row], tags, **EXACT)
        assert_close(found.transitions[row], pairs, **EXACT)


@FORMS
@pytest.mark.parametrize("count", [1, 5])
def test_the_best_taggings_are_the_best_of_all(form, count):
    unary, moves, lengths = draw(form)
    paths, scores = chain.best_paths(unary, moves, lengths, count)
    for row, length in enumerate(lengths.tolist()):
        every, values = write_out(unary[row], moves[row] if form == "by step" else moves, length)
        order = values.argsort(descending=True, stable=True)[:count]
        there = int((values[order] > -torch.inf).sum())
        assert_close(scores[row, :there], values[order[:there]], **EXACT)
        assert (scores[row, there:] == -torch.inf).all()
        assert paths[row, :there, :length].tolist() == every[order[:there]].tolist()
        assert not paths[row, :, length:].any()
        score = chain.path_score(unary[row : row + 1], moves[row : row + 1] if form == "by step" else moves,
                                 paths[row, :1], lengths[row : row + 1])  # fmt: skip
        assert_close(score, scores[row, :1], **EXACT)


@pytest.mark.parametrize(("tags", "length"), [(4, 6), (3, 1), (2, 0)])
def test_without_scores_the_partition_counts(tags, length):
    total = chain.log_partition(torch.zeros(1, length, tags), torch.zeros(tags, tags), torch.tensor([length]))
    assert_close(total.exp(), torch.tensor([float(tags**length)]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["shared", "by step"])
def test_gradient_is_that_of_the_numbers(form):
    unary, moves, lengths = draw(form, 3, (4, 2, 0))
    inputs = unary.requires_grad_(), moves.requires_grad_()
    assert gradcheck(lambda own, pairs: chain.log_partition(own, pairs, lengths), inputs)
    plain = chain.log_partition_in_logs(*inputs, lengths).sum()
    fast = chain.log_partition(*inputs, lengths).sum()
    for one, other in zip(*(torch.autograd.grad(total, inputs) for total in (fast, plain)), strict=True):
        assert_close(one, other, **EXACT)


def test_what_is_behind_the_end_does_not_matter():
    unary, moves, lengths = draw("shared")
    wider = torch.cat([unary, torch.full((len(unary), 3, TAGS), 70.0)], dim=1)
    for one, other in zip(chain.marginals(unary, moves, lengths), chain.marginals(wider, moves, lengths), strict=True):
        assert_close(other[:, : one.shape[1]] if other.dim() == 3 and other.shape[1] == 9 else other, one, **EXACT)


def test_no_tagging_is_allowed():
    total = chain.log_partition(torch.zeros(1, 3, 2), torch.full((2, 2), -torch.inf), torch.tensor([3]))
    assert total.tolist() == [-torch.inf]


def test_thousands_of_steps_in_half_the_digits():
    unary, moves, lengths = 5 * torch.randn(2, 2000, 7), 3 * torch.randn(7, 7), torch.tensor([2000, 1501])
    wanted = chain.marginals(unary, moves, lengths)
    found = chain.marginals(unary.float(), moves.float(), lengths)
    assert found.log_partition.isfinite().all()
    assert_close(found.log_partition.double(), wanted.log_partition, rtol=1e-6, atol=0)
    assert_close(found.tags.double(), wanted.tags, rtol=0, atol=1e-3)


def test_samples_come_as_often_as_they_are_likely():
    unary, moves, lengths = draw("by step", 3, (4, 2))
    many = 3000
    repeated = (part.repeat_interleave(many, 0) for part in (unary, moves, lengths))
    paths = chain.sample(*repeated, torch.Generator().manual_seed(5)).view(2, many, 4)
    shares = torch.nn.functional.one_hot(paths, 3).double().mean(1)
    real = torch.arange(4) < lengths[:, None]
    wanted = chain.marginals(unary, moves, lengths).tags
    assert_close(shares[real], wanted[real], rtol=0, atol=5 * 0.5 / many**0.5)  # five sigma
    assert not paths[1, :, 2:].any()


def test_pytorch_crf_agrees():
    torchcrf = pytest.importorskip("torchcrf")
    crf = torchcrf.CRF(TAGS, batch_first=True).double()
    lengths = torch.tensor([6, 4, 1])
    unary, tags = torch.randn(3, 6, TAGS), torch.randint(TAGS, (3, 6))
    real = torch.arange(6) < lengths[:, None]
    own = unary.clone()
    own[:, 0] += crf.start_transitions.detach()
    own[torch.arange(3), lengths - 1] += crf.end_transitions.detach()
    moves = crf.transitions.detach()
    likelihood = chain.path_score(own, moves, tags, lengths) - chain.log_partition(own, moves, lengths)
    assert_close(likelihood, crf(unary, tags, real, reduction="none").detach(), **EXACT)
    paths = chain.best_paths(own, moves, lengths)[0][:, 0]
    assert [path[:length].tolist() for path, length in zip(paths, lengths, strict=True)] == crf.decode(unary, real)


# --- two states, all queries at once ---------------------------------------------------------------------------------


def test_segments_are_the_marginals_of_a_chain_over_what_is_seen():
    scores, moves = 3 * torch.randn(3, 4, 7), torch.randn(2, 2)
    mask = torch.rand(3, 1, 7) < 0.7
    mask[0], mask[2] = True, False
    found = chain.segment_marginals(scores, moves, mask)
    assert not found[2].any()  # nothing is seen there
    for row, query in itertools.product(range(2), range(4)):
        keys = mask[row, 0].nonzero()[:, 0]
        unary = torch.stack([torch.zeros(len(keys)), scores[row, query, keys]], dim=-1)[None]
        wanted = chain.marginals(unary, moves, torch.tensor([len(keys)])).tags[0, :, 1]
        assert_close(found[row, query, keys], wanted, **EXACT)
        assert not found[row, query, ~mask[row, 0]].any()


def test_segments_without_ties_are_sigmoids():
    scores = torch.randn(2, 3, 5)
    assert_close(chain.segment_marginals(scores, torch.zeros(2, 2)), scores.sigmoid(), **EXACT)


def test_segments_of_one_key_and_of_none():
    scores = torch.randn(2, 1)
    assert_close(chain.segment_marginals(scores, torch.randn(2, 2)), scores.sigmoid(), **EXACT)
    assert chain.segment_marginals(torch.zeros(2, 0), torch.zeros(2, 2)).shape == (2, 0)


def test_gradient_of_segments():
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, False, False], [False] * 5])
    inputs = torch.randn(3, 5, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    assert gradcheck(lambda scores, moves: chain.segment_marginals(scores, moves, mask), inputs)


def test_segments_of_thousands_in_half_the_digits():
    scores, moves = 30 * torch.randn(2, 2000), torch.tensor([[2.0, -3.0], [-1.0, 4.0]])
    found = chain.segment_marginals(scores.float(), moves.float())
    assert_close(found.double(), chain.segment_marginals(scores, moves), rtol=0, atol=1e-3)
