"""Dropout, embeddings, norms, the output layer."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from regard.nn.layers import Dropout, OutputLayer, make_embedding, make_norm, widen

# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest_exactly(probability):
    torch.manual_seed(7)
    share = round(probability * 256) / 256
    dropped = Dropout(probability)(torch.ones(125_003, 8, dtype=torch.float64))
    assert dropped.unique().tolist() == [0, 1 / (1 - share)]
    lanes = (dropped == 0).double().mean(0)  # the eight elements that one random number decides
    assert_close(lanes, torch.full_like(lanes, share), rtol=0, atol=5 * (share * (1 - share) / 125_003) ** 0.5)
    pairs = torch.corrcoef((dropped == 0).double().T) - torch.eye(8, dtype=torch.float64)
    assert pairs.abs().max() < 5 / 125_003**0.5


def test_dropout_rests_when_not_training_or_at_zero():
    x, before = torch.randn(3, 5), torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_gradient_drops_what_was_dropped():
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    dropped = Dropout(0.5)(x)
    dropped.sum().backward()
    assert torch.equal(dropped, x * x.grad)
    assert 0 < (x.grad == 0).sum() < x.numel()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (8,), (3, 5, 7)])
def test_dropout_takes_any_shape(shape):
    assert Dropout(0.5)(torch.ones(shape)).shape == shape
    assert Dropout(0.5)(torch.ones(*shape, 2).movedim(-1, 0)).shape == (2, *shape)


def test_dropout_follows_the_seed():
    drop, x = Dropout(0.5), torch.ones(101)
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second)
    repeats = [torch.manual_seed(7) and drop(x) for _ in range(2)]
    assert torch.equal(*repeats)


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.999])
def test_a_probability_far_from_any_256th_is_kept_exactly(probability):
    torch.manual_seed(7)
    dropped = Dropout(probability)(torch.ones(1_000_003, dtype=torch.float64))
    assert_close(dropped.unique(), torch.tensor([0, 1 / (1 - probability)], dtype=torch.float64))
    found = (dropped == 0).double().mean().item()
    assert abs(found - probability) < 5 * (probability * (1 - probability) / 1_000_003) ** 0.5


# --- embedding and output --------------------------------------------------------------------------------------------


def test_rows_of_an_embedding_have_a_length_of_about_one():
    torch.manual_seed(7)
    assert (make_embedding(11, 1009).weight.norm(dim=-1) - 1).abs().max() < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_is_a_product_with_its_own_or_the_embedding_matrix(tied):
    table, hidden = make_embedding(7, 5), torch.randn(2, 3, 5)
    output = OutputLayer(7, 5, table if tied else None)
    assert (output.weight is table.weight) == tied
    assert not output.bias.any()
    nn.init.normal_(output.bias)
    assert_close(output(hidden), hidden @ output.weight.T + output.bias)


def test_an_output_layer_learns_what_an_embedding_does():
    table = make_embedding(7, 5)
    OutputLayer(7, 5, table)(torch.randn(2, 5)).sum().backward()
    assert table.weight.grad.abs().sum() > 0


# --- norms and precision ---------------------------------------------------------------------------------------------


def test_a_norm_is_the_one_that_was_asked_for():
    x = torch.randn(3, 5)
    for kind, mean in (("layer", x.mean(-1, keepdim=True)), ("rms", 0.0)):
        norm = make_norm(5, kind, epsilon=0.25)
        assert_close(norm(x), (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 0.25).sqrt())


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_have_at_least_32_bits(given, wide):
    logits = torch.randn(3, 11).to(given)
    assert widen(logits).dtype == wide
    assert torch.equal(widen(logits), logits.to(wide))
