"""The blockwise loss against torch's, by hand, and by differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import EXACT
from oracles import exact as exact
from torch.autograd import gradcheck
from torch.testing import assert_close

from regard.data.vocabulary import PAD
from regard.nn.loss import Blockwise, classify_loss, cross_entropy, token_surprise

pytestmark = pytest.mark.usefixtures("exact")


def drawn(batch=3, target=5, size=7, vocab=11):
    """Hidden states, weight, bias, and an answer with padding."""
    shapes = ((batch, target, size), (vocab, size), (vocab,))
    answer = torch.randint(1, vocab, (batch, target))
    answer[0, 2:] = PAD
    return [torch.randn(shape, requires_grad=True) for shape in shapes], answer


def rival(inputs, answer, smoothing):
    hidden, weight, bias = inputs
    logits = (hidden @ weight.mT + bias).flatten(0, -2)
    return F.cross_entropy(logits, answer.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("cells", [1, 11, 4 * 11 + 1, 2**21])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_and_its_gradients_are_those_of_torch_in_blocks_of_any_size(smoothing, cells, monkeypatch):
    monkeypatch.setattr(Blockwise, "CELLS", cells)
    monkeypatch.setattr("regard.nn.loss.FEW", 0)  # blocks, however few there are
    inputs, answer = drawn()
    found = cross_entropy(*inputs, answer, smoothing)
    assert_close(found.total, rival(inputs, answer, smoothing), **EXACT)
    assert_close(found.plain, rival(inputs, answer, 0.0), **EXACT)
    assert found.tokens == 12
    slopes = [torch.autograd.grad(3 * total, inputs) for total in (found.total, rival(inputs, answer, smoothing))]
    assert_close(*slopes, **EXACT)


def test_a_small_table_is_the_same_without_blocks():
    inputs, answer = drawn()
    found = cross_entropy(*inputs, answer)
    assert_close((found.total, found.plain), (rival(inputs, answer, 0.0),) * 2, **EXACT)
    slopes = [torch.autograd.grad(total, inputs) for total in (found.total, rival(inputs, answer, 0.0))]
    assert_close(*slopes, **EXACT)


@pytest.mark.parametrize("few", [0, 2**18])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_are_the_differences(smoothing, few, monkeypatch):
    monkeypatch.setattr("regard.nn.loss.FEW", few)
    inputs, answer = drawn(2, 3, 2, 5)
    assert gradcheck(lambda *inputs: cross_entropy(*inputs, answer, smoothing).total, inputs)


def test_a_case_by_hand():
    hidden, weight = torch.eye(2)[None], torch.tensor([[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]]).log()
    answer = torch.tensor([[3, 1]])  # whose probabilities are 4/10 and 3/10
    found = cross_entropy(hidden, weight, torch.zeros(4), answer, 0.5)
    uniform = -math.log(0.1 * 0.2 * 0.3 * 0.4) / 4
    assert_close(float(found.plain), -math.log(0.4) - math.log(0.3), **EXACT)
    assert_close(float(found.total), 0.5 * float(found.plain) + 0.5 * 2 * uniform, **EXACT)
    assert found.tokens == 2


def test_padding_costs_nothing_and_teaches_nothing():
    inputs, answer = drawn()
    hidden, *_ = inputs
    found = cross_entropy(*inputs, torch.full_like(answer, PAD), 0.1)
    assert (found.total.item(), found.plain.item(), found.tokens) == (0, 0, 0)
    assert not any(slope.any() for slope in torch.autograd.grad(found.total, inputs))
    slope = torch.autograd.grad(cross_entropy(*inputs, answer, 0.1).total, hidden)[0]
    assert torch.equal(slope.any(-1), answer != PAD)


def test_the_loss_of_a_batch_is_the_sum_of_its_rows():
    inputs, answer = drawn()
    rows = [cross_entropy(inputs[0][row : row + 1], *inputs[1:], answer[row : row + 1], 0.1) for row in range(3)]
    whole = cross_entropy(*inputs, answer, 0.1)
    for field in range(3):
        assert_close(whole[field], sum(row[field] for row in rows), **EXACT)


def test_huge_logits_stay_finite():
    inputs, answer = drawn()
    inputs = [(1e4 * part.detach()).requires_grad_() for part in inputs]
    found = cross_entropy(*inputs, answer, 0.1)
    assert_close(found.total, rival(inputs, answer, 0.1), rtol=1e-12, atol=0)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(found.total, inputs))


def test_the_plain_loss_is_not_minimised():
    inputs, answer = drawn()
    assert not cross_entropy(*inputs, answer, 0.1).plain.requires_grad


def test_evaluation_makes_no_graph_and_inputs_stay_as_they_were():
    inputs, answer = drawn()
    before = [part.detach().clone() for part in inputs]
    with torch.no_grad():
        found = cross_entropy(*inputs, answer, 0.1)
    assert not found.total.requires_grad
    assert_close(found.total, rival(inputs, answer, 0.1).detach(), **EXACT)
    assert all(torch.equal(part, kept) for part, kept in zip(inputs, before, strict=True))


@pytest.mark.parametrize("learning", range(3))
def test_one_input_may_learn_alone(learning):
    inputs, answer = drawn()
    wanted = torch.autograd.grad(rival(inputs, answer, 0.1), inputs)[learning]
    parts = [part if place == learning else part.detach() for place, part in enumerate(inputs)]
    cross_entropy(*parts, answer, 0.1).total.backward()
    assert_close(parts[learning].grad, wanted, **EXACT)


def test_single_precision_is_near():
    inputs, answer = drawn()
    found = cross_entropy(*(part.float() for part in inputs), answer, 0.1)
    assert found.total.dtype == torch.float32
    assert_close(found.total, rival(inputs, answer, 0.1).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("few", [0, 2**18], ids=["blocks", "whole"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_rounds_the_logits_and_nothing_else(smoothing, few, monkeypatch):
    monkeypatch.setattr("regard.nn.loss.FEW", few)
    inputs, answer = drawn(vocab=211)
    hidden, weight, bias = (part.detach().bfloat16().requires_grad_() for part in inputs)
    found = cross_entropy(hidden, weight.float(), bias.float(), answer, smoothing)
    assert found.total.dtype == torch.float32
    logits, wanted = F.linear(hidden, weight, bias).double().flatten(0, 1), answer.flatten()
    plain, total = (
        F.cross_entropy(logits, wanted, ignore_index=PAD, label_smoothing=share, reduction="sum")
        for share in (0.0, smoothing)
    )
    assert_close((found.plain.double(), found.total.double()), (plain, total), rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(one, [hidden, weight, bias]) for one in (found.total, total))
    for slope, wide in zip(ours, theirs, strict=True):
        assert_close(slope, wide, rtol=0, atol=2**-5 * float(wide.abs().max()))


# --- surprise, and choosing one --------------------------------------------------------------------------------------


def test_the_surprise_of_every_row_is_its_share_of_the_plain_loss():
    inputs, answer = drawn()
    hidden, weight, bias = inputs
    logits = hidden @ weight.mT + bias
    for given in (logits, logits.log_softmax(-1)):
        found = token_surprise(given, answer)
        assert found.tokens.tolist() == [2, 5, 5]
        for row in range(3):
            assert_close(found.nats[row], rival([hidden[row], weight, bias], answer[row], 0.0), **EXACT)
    assert_close(found.nats.sum(), cross_entropy(*inputs, answer, 0.1).plain, **EXACT)


def test_a_row_that_wants_nothing_surprises_nobody():
    found = token_surprise(torch.randn(2, 3, 7), torch.tensor([[PAD] * 3, [4, PAD, PAD]]))
    assert found.nats[0] == 0
    assert found.tokens.tolist() == [0, 1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_choosing_one_is_cross_entropy(smoothing):
    logits, wanted = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 6, 3, 3, 1])
    found = classify_loss(logits, wanted, smoothing)
    logprobs = logits.log_softmax(-1)
    plain = -logprobs[torch.arange(5), wanted].sum()
    assert_close(found.plain, plain, **EXACT)
    assert not found.plain.requires_grad
    assert_close(found.total, (1 - smoothing) * plain - smoothing * logprobs.mean(-1).sum(), **EXACT)
    assert found.tokens == 5
