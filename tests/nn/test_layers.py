"""Dropout, embeddings, files of vectors, the output layer."""

import copy

import pytest
import torch
from oracles import shaken
from torch import nn
from torch.backends import mkl, mkldnn
from torch.testing import assert_close

from regard.nn import layers
from regard.nn.attention import multi_head
from regard.nn.layers import (
    LARGE,
    Dropout,
    Linear,
    Map,
    Output,
    embedding,
    log_softmax,
    settle,
)

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


def test_dropout_takes_any_share_below_one():
    assert Dropout(0.999)(torch.ones(101)).isfinite().all()


# --- embedding and output --------------------------------------------------------------------------------------------


def test_rows_of_an_embedding_have_a_length_of_about_one():
    torch.manual_seed(7)
    assert (embedding(11, 1009).weight.norm(dim=-1) - 1).abs().max() < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_is_a_product_with_its_own_or_the_embedding_matrix(tied):
    table, hidden = embedding(7, 5), torch.randn(2, 3, 5)
    output = Output(7, 5, table if tied else None)
    assert (output.weight is table.weight) == tied
    assert not output.bias.any()
    nn.init.normal_(output.bias)
    assert_close(output(hidden), hidden @ output.weight.T + output.bias)


# --- models that are only used ---------------------------------------------------------------------------------------


VOCABULARY = 3 * LARGE // 128 + 5


class Parts(nn.Module):
    """A matrix that is large enough to be laid out anew, one that is not, and a tied output, which fills no whole
    number of strips."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = embedding(VOCABULARY, 128)
        self.large, self.small = Linear(128, LARGE // 128, bias=False), Linear(LARGE // 128, 127)
        self.narrow = Linear(127, 128)
        self.output = Output(VOCABULARY, 128, self.table)
        nn.init.normal_(self.output.bias)

    def forward(self, x):
        return self.output(self.narrow(self.small(self.large(x))))


def settled():
    model = Parts()
    settle(model)
    return model


there = mkldnn.is_available() and mkl.is_available()
quick = pytest.mark.skipif(not there, reason="this torch has no oneDNN or no MKL")


@quick
@pytest.mark.parametrize("rows", [1, 5, 67])
def test_a_settled_attention_gives_the_same_numbers(rows):
    """Whoever asks or remembers needs but a part of the joint matrix, which is packed, too."""
    attention, x = shaken(multi_head(192, 3)).requires_grad_(False), torch.randn(2, rows, 192)
    wanted = [attention.ask(x), *attention.remember(x)]
    settle(attention)
    with torch.no_grad():
        assert not attention.maps.parts
        for same in (attention, copy.deepcopy(attention)):
            assert_close([same.ask(x), *same.remember(x)], wanted, rtol=1e-5, atol=1e-4)
        assert len(attention.maps.parts) == 2
        twice = attention.double()
        assert_close([twice.ask(x.double()).float()], wanted[:1], rtol=1e-5, atol=1e-4)
    assert_close([copy.deepcopy(attention).float().ask(x)], wanted[:1], rtol=1e-5, atol=1e-4)


@quick
@pytest.mark.parametrize("rows", [(1,), (2,), (9,), (67,), (3, 7), (1, 1), (512,), (513,), (0,), ()])
def test_a_settled_model_gives_the_same_numbers(rows):
    model, x = Parts(), torch.randn(*rows, 128)
    with torch.no_grad():
        wanted = model(x)
        settle(model)
        for order in ("packed", "strips"):
            laid_out = [getattr(part, order) is not None for part in (model.large, model.small, model.output)]
            assert laid_out == [True, False, True]
        assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
        assert_close(copy.deepcopy(model)(x), wanted, rtol=1e-5, atol=1e-5)
        assert_close(model.double()(x.double()).float(), wanted, rtol=1e-5, atol=1e-5)  # what is packed is not asked


@quick
def test_packed_matrices_are_asked_for_few_numbers_of_rows(monkeypatch):
    assert sorted(set(layers.ROWS)) == layers.ROWS
    model, asked = settled(), set()
    monkeypatch.setattr(
        Map,
        "product",
        lambda self, x: asked.add(x.shape[:-1].numel()) or x.new_empty(*x.shape[:-1], len(self.weight)),
    )
    with torch.no_grad():
        for rows in range(1, 1100):
            assert model.large(torch.empty(rows, 128)).shape == (rows, LARGE // 128)
    assert sorted(asked) == layers.ROWS


@pytest.mark.parametrize("rows", [1, 5])
def test_a_copy_of_a_settled_model_may_change(rows):
    again = copy.deepcopy(settled())
    with torch.no_grad():
        again.large.weight.zero_()
        assert_close(again.large(torch.ones(rows, 128)), torch.zeros(rows, LARGE // 128))


@quick
def test_one_row_is_multiplied_by_strips():
    model, x = settled(), torch.randn(1, 128)
    with torch.no_grad():
        wanted = model(x)
        for part in (model.large, model.output):
            part.strips *= 0  # whoever reads them finds the bias alone
        assert_close(model.output(x)[0], model.output.bias)
        assert_close(model.large(x), torch.zeros(1, LARGE // 128))
    assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)  # what learns asks the matrix itself


def test_a_model_that_is_elsewhere_is_left_as_it_is():
    model = Parts().to("meta")
    settle(model)
    assert model.large.packed is model.large.strips is None
    with torch.no_grad():
        assert model(torch.empty(3, 128, device="meta")).shape == (3, VOCABULARY)


@quick
def test_a_large_model_is_not_packed_and_a_larger_one_left_as_it_is(monkeypatch):
    monkeypatch.setattr(layers, "PACKED", LARGE)
    model = settled()
    assert [part.packed for part in (model.large, model.output)] == [None, None]
    assert model.large.strips is not None
    with torch.no_grad():
        for rows in (1, 2):
            assert_close(model(torch.ones(rows, 128)), Parts()(torch.ones(rows, 128)), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(layers, "STRIPED", LARGE)
    assert settled().large.strips is None


def test_a_settled_model_still_has_gradients():
    model, x = settled(), torch.randn(3, 128, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.abs().sum() > 0
    assert model.large.weight.grad.abs().sum() > 0


def test_a_model_of_double_precision_is_left_as_it_is():
    model = Parts().double()
    settle(model)
    assert model.large.packed is model.large.strips is None


def test_log_probabilities_may_be_written_over_the_logits():
    logits = torch.randn(3, 11)
    wanted = logits.log_softmax(-1)
    with torch.inference_mode():
        assert_close(log_softmax(logits.clone()), wanted)
    assert_close(log_softmax(logits.clone().requires_grad_()), wanted)
    assert log_softmax(logits.bfloat16()).dtype == torch.float32
