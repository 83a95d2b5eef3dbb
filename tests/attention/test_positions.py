"""Positions: the four ways (C1 to C3), and what is lost without them (C4)."""

import math

import pytest
import torch
from oracles import EXACT, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.attention.masks import distance
from regard.attention.positions import alibi, rotate, sinusoidal
from regard.config.model import TransformerConfig
from regard.errors import InputError
from regard.nn.layers import LearnedPositions, SinusoidalPositions, make_embedding
from regard.nn.transformer import Encoder

pytestmark = pytest.mark.usefixtures("exact")

# --- C1: sinusoidal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 6])
def test_sinusoidal_is_the_published_formula(size):
    for position, row in zip((0, 3, 701), sinusoidal(torch.tensor([0, 3, 701]), size), strict=True):
        angles = [position / 10_000 ** ((channel - channel % 2) / size) for channel in range(size)]
        wanted = [math.cos(angle) if channel % 2 else math.sin(angle) for channel, angle in enumerate(angles)]
        assert_close(row, torch.tensor(wanted), **EXACT)


def test_sinusoidal_positions_are_bounded_unique_and_always_the_same():
    table = sinusoidal(torch.arange(1009), 6)
    assert table.abs().max() <= 1
    assert (torch.cdist(table, table) + torch.eye(1009)).min() > 0.1
    assert torch.equal(table, sinusoidal(torch.arange(1009), 6))
    assert torch.equal(table[701:], sinusoidal(torch.arange(701, 1009), 6))


@pytest.mark.parametrize("offset", [1, 7, 601])
def test_the_same_offset_is_the_same_rotation(offset):
    table = sinusoidal(torch.arange(1009), 6)
    blocks = [torch.stack([torch.stack([cos, sin]), torch.stack([-sin, cos])]) for sin, cos in table[offset].view(3, 2)]
    rotation = torch.block_diag(*blocks)
    assert_close(rotation @ rotation.mT, torch.eye(6), **EXACT)
    assert_close(table[offset:], table[:-offset] @ rotation.mT, **EXACT)


def test_sinusoidal_works_beyond_its_first_table():
    positions, x = SinusoidalPositions(6), torch.randn(2, 523, 6)
    assert_close(positions(x), x + sinusoidal(torch.arange(523), 6), **EXACT)
    assert_close(positions(x[:, :3], start=2003), x[:, :3] + sinusoidal(torch.arange(2003, 2006), 6), **EXACT)
    assert positions(x.float()).shape == x.shape
    assert not positions.state_dict()


def test_a_table_that_grew_while_predicting_serves_training():
    positions, x = SinusoidalPositions(6), torch.zeros(1, 523, 6, requires_grad=True)
    with torch.inference_mode():
        positions(x)
    positions(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# --- C2: learned -----------------------------------------------------------------------------------------------------


def test_learned_adds_its_rows_from_the_start():
    positions, x = LearnedPositions(3, longest=7), torch.randn(2, 5, 3)
    assert torch.equal(positions(x), x + positions.table[:5])
    assert torch.equal(positions(x, start=2), x + positions.table[2:])
    positions(x).sum().backward()
    assert positions.table.grad.tolist() == [[2.0] * 3] * 5 + [[0.0] * 3] * 2


@pytest.mark.parametrize("scaled", [False, True])
def test_learned_positions_begin_as_long_as_the_embeddings_they_join(scaled):
    sizes = {"size": 1009, "heads": 1, "feedforward": 2, "embedding_scale": scaled}
    stack = Encoder(TransformerConfig(kind="transformer", positions="learned", **sizes), 1, longest=11)
    embedded = stack.scale * make_embedding(11, 1009).weight.norm(dim=-1)
    assert_close(stack.positions.table.norm(dim=-1), embedded, rtol=0.2, atol=0)


@pytest.mark.parametrize(("length", "start"), [(1031, 0), (2, 1029)])
def test_learned_refuses_what_it_has_not_learned(length, start):
    message = (
        r"an input of 1,031 positions came, but this model learned 1,030\. "
        r"Shorten it, or train with sinusoidal, rotary or alibi positions\."
    )
    with pytest.raises(InputError, match=f"^{message}$"):
        LearnedPositions(3, longest=1030)(torch.zeros(1, length, 3), start)


# --- C3: in the attention itself -------------------------------------------------------------------------------------


def test_rotary_turns_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 5.0])[None]
    turned = rotate(x, start=7)[0]
    for left, rate in ((0, 1.0), (1, 0.01)):
        pair = complex(x[0, left], x[0, left + 2]) * complex(math.cos(7 * rate), math.sin(7 * rate))
        assert_close(turned[[left, left + 2]], torch.tensor([pair.real, pair.imag]), **EXACT)


def test_a_rotary_dot_product_depends_on_the_distance_alone():
    query, key = torch.randn(2, 3, 1, 10), torch.randn(2, 3, 1, 10)
    scores = rotate(query.expand(-1, -1, 11, -1)) @ rotate(key.expand(-1, -1, 13, -1)).mT
    for offset in range(-10, 13):
        diagonal = scores.diagonal(offset, -2, -1)
        assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), **EXACT)
    assert (scores[..., 0, 0] - scores[..., 0, 5]).abs().min() > 1e-3
    assert_close(rotate(query).norm(dim=-1), query.norm(dim=-1), **EXACT)


def test_rotary_may_start_anywhere():
    x = torch.randn(2, 3, 11, 10)
    assert torch.equal(rotate(x[..., 7:, :], start=7), rotate(x)[..., 7:, :])
    assert torch.equal(rotate(x)[..., 0, :], x[..., 0, :])


def test_rotary_in_single_precision_is_right_at_length():
    query, key = torch.randn(1, 10, dtype=torch.float32), torch.randn(1, 10, dtype=torch.float32)
    near, far = (rotate(query, start + 3) @ rotate(key, start).mT for start in (0, 1009))
    assert near.dtype == torch.float32
    assert_close(far, near, rtol=0, atol=2e-3)


@pytest.mark.parametrize("start", [1009, torch.tensor([1009, 5])], ids=["one", "each"])
def test_rotary_of_half_precision_turns_by_exact_angles(start):
    """An angle of 16 bits would be off by radians at position 1009: what is rounded are its sine and cosine."""
    x = torch.randn(2, 3, 11, 10).bfloat16()
    turned = rotate(x, start)
    assert turned.dtype == torch.bfloat16
    assert_close(turned.double(), rotate(x.double(), start), rtol=0, atol=3 * 2**-8 * float(x.abs().max()))


def test_alibi_by_hand():
    bias = alibi(2, distance(2, 3))
    far = torch.tensor([[1, 0, 1], [2, 1, 0]])
    assert torch.equal(bias, torch.stack([-far / 16, -far / 256]))
    assert_close(alibi(8, torch.tensor([[-5]])).flatten(), -5 * 0.5 ** torch.arange(1, 9), **EXACT)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    assert torch.equal(-alibi(6, torch.tensor([[1]])).flatten(), slopes)


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_has_the_slopes_of_others(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    wanted = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    assert_close(-alibi(heads, torch.tensor([[1]])).flatten(), wanted[:, 0, 1], rtol=1e-6, atol=0)  # theirs are 32 bits


# --- C4: none --------------------------------------------------------------------------------------------------------


def encoder(positions):
    settings = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 2, "decoder_layers": 1}
    return shaken(Encoder(TransformerConfig(kind="transformer", positions=positions, **settings), 2, longest=11))


def test_without_positions_i_ate_lunch_is_lunch_ate_i():
    words, model = torch.randn(1, 3, 12), encoder("none")
    assert_close(model(words.flip(1), None), model(words, None).flip(1), **EXACT)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi"])
def test_with_positions_the_order_matters(positions):
    words, model = torch.randn(1, 3, 12), encoder(positions)
    order = [2, 0, 1]
    assert (model(words[:, order], None) - model(words, None)[:, order]).abs().max() > 1e-3
