"""Attention with weights against torch, and against its equations written out (B4, B6)."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import EXACT, hardmax, rival, shaken, three_maps
from oracles import exact as exact
from torch import nn
from torch.testing import assert_close

from regard.attention.masks import causal, padding
from regard.attention.normalizers import softmax
from regard.attention.positions import alibi, rotate
from regard.attention.scores import dot, scaled_dot
from regard.nn.attention import (
    CROSS,
    SOURCE,
    TARGET,
    Attention,
    Axes,
    JointProjection,
    SeparateProjections,
    multi_head_attention,
    single_head_attention,
)

pytestmark = pytest.mark.usefixtures("exact")


def multi_head(size, heads, **options):
    return multi_head_attention(size, heads, kind="self", axes=SOURCE, **options)


# --- several heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_multi_head_is_the_one_of_torch(cross, mask):
    ours = shaken(multi_head(15, 3))
    inputs = torch.randn(2, 5, 15)
    source = torch.randn(2, 7, 15) if cross else inputs
    keys, lengths = source.shape[1], torch.tensor([3, source.shape[1]])
    hidden = padding(lengths, keys) if mask in ("padding", "both") else None
    ahead = causal(5, keys) if mask in ("causal", "both") else None
    joined = hidden if ahead is None else ahead if hidden is None else ahead & hidden
    found = ours(ours.project_query(inputs), ours.project_kv(source), joined)
    wanted, weights = rival(ours)(
        inputs,
        source,
        source,
        key_padding_mask=None if hidden is None else ~hidden[:, 0, 0],
        attn_mask=None if ahead is None else ~ahead,
        average_attn_weights=False,
    )
    assert_close(found, wanted, **EXACT)
    assert_close(ours.weights(ours.project_query(inputs), ours.project_kv(source), joined), weights, **EXACT)


def test_multi_head_without_bias_is_two_matrices():
    assert [tuple(part.shape) for part in multi_head(15, 3, bias=False).parameters()] == [(45, 15), (15, 15)]
    layer = multi_head(15, 3)
    assert not any(part.bias.any() for part in (layer.projection, layer.output))


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_each_projection_begins_as_if_it_stood_alone(kv_heads):
    """Glorot 2010: uniform up to the root of 6 / (inputs + outputs), of each matrix by itself."""
    groups = [300, 100 * kv_heads, 100 * kv_heads]
    for part in multi_head(300, 3, kv_heads=kv_heads).projection.weight.detach().split(groups):
        bound = math.sqrt(6 / sum(part.shape))
        assert 0.99 * bound < part.abs().max() <= bound
        assert float(part.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_three_give(bias, kv_heads):
    layer = shaken(multi_head(12, 6, bias=bias, kv_heads=kv_heads))
    inputs = torch.randn(2, 5, 12)
    queries, kv = layer.project_qkv(inputs)
    assert_close(queries, layer.project_query(inputs), **EXACT)
    for found, wanted in zip(kv, layer.project_kv(inputs), strict=True):
        assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
@pytest.mark.parametrize("keys", [7, 263], ids=["plain", "fused"])
def test_the_weights_are_those_that_forward_used(positions, keys):
    layer = shaken(multi_head(12, 3, positions=positions))
    queries, kv = layer.project_qkv(torch.randn(2, 5, 12), layer.project_qkv(torch.randn(2, keys - 5, 12))[1])
    mask = padding(torch.tensor([keys - 2, keys]), keys)
    weights = layer.weights(queries, kv, mask)
    assert weights.shape == (2, 3, 5, keys)
    assert_close(weights.sum(-1), torch.ones(2, 3, 5), **EXACT)
    mixed = (weights @ kv.values).transpose(1, 2).flatten(2)
    assert_close(layer(queries, kv, mask), layer.output(mixed), **EXACT)


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_the_last_query_stands_at_the_last_key(positions):
    layer = shaken(multi_head(12, 3, positions=positions))
    inputs = torch.randn(2, 7, 12)
    whole = layer(*layer.project_qkv(inputs))
    later = layer(*layer.project_qkv(inputs[:, 4:], layer.project_qkv(inputs[:, :4])[1]))
    assert_close(later, whole[:, 4:], **EXACT)


def test_positions_by_hand():
    inputs = torch.randn(1, 5, 12)
    turned, sloped = (
        shaken(multi_head(12, 3, positions=positions, rotary_base=7.0)) for positions in ("rotary", "alibi")
    )
    query, keys = (part(inputs).view(1, 5, 3, 4).transpose(1, 2) for part in three_maps(turned)[:2])
    scores = rotate(query, base=7.0) @ rotate(keys, base=7.0).mT / 2
    assert_close(turned.weights(*turned.project_qkv(inputs)), scores.softmax(-1), **EXACT)
    query, keys = (part(inputs).view(1, 5, 3, 4).transpose(1, 2) for part in three_maps(sloped)[:2])
    far = (torch.arange(5) - torch.arange(5)[:, None]).abs()
    scores = query @ keys.mT / 2 + alibi(3, far)
    assert_close(sloped.weights(*sloped.project_qkv(inputs)), scores.softmax(-1), **EXACT)


# --- one head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["dot", "scaled dot", "general", "additive"])
def test_one_head_by_hand(score):
    layer, state, states = shaken(single_head_attention(5, score)), torch.randn(5), torch.randn(7, 5)
    match score:
        case "dot":
            energies = [state @ other for other in states]
        case "scaled dot":
            energies = [state @ other / math.sqrt(5) for other in states]
        case "general":
            energies = [state @ layer.projection.key.weight @ other for other in states]
        case "additive":
            asked = layer.projection.query.weight @ state + layer.projection.query.bias
            energies = [
                layer.score.vector @ torch.tanh(asked + layer.projection.key.weight @ other) for other in states
            ]
    weights = torch.stack(energies).softmax(0)
    kv = layer.project_kv(states[None])
    assert_close(layer.weights(layer.project_query(state[None, None]), kv)[0, 0, 0], weights, **EXACT)
    assert_close(layer(layer.project_query(state[None, None]), kv)[0, 0], weights @ states, **EXACT)


def test_one_head_learns_only_what_its_score_has():
    shapes = {
        name: [tuple(part.shape) for part in single_head_attention(5, name).parameters()] for name in ("dot", "general")
    }
    assert shapes == {"dot": [], "general": [(5, 5)]}
    assert isinstance(single_head_attention(5, "additive").score, nn.Module)


# --- what an attention says of itself --------------------------------------------------------------------------------


def test_an_attention_says_what_it_is():
    for kind, axes in (("self", TARGET), ("cross", CROSS), ("matching", Axes("query", "input"))):
        layer = multi_head_attention(12, 3, kind=kind, axes=axes)
        assert (layer.kind, layer.axes, layer.heads) == (kind, axes, 3)
        assert (layer.score, layer.normalize, layer.positions) == (scaled_dot, softmax, "none")
    alone = single_head_attention(5, "dot")
    assert (alone.kind, alone.axes, alone.heads, alone.score) == ("cross", CROSS, 1, dot)
    assert CROSS == ("query", "key")
    assert SOURCE == ("key", "key")
    assert TARGET == ("query", "input")


def test_an_attention_cannot_be_made_without_saying_what_it_is():
    with pytest.raises(TypeError, match="kind"):
        Attention(JointProjection(12, 3), nn.Linear(12, 12), heads=3)


def normalized(normalize, positions="none"):
    projection, output = JointProjection(12, 3, kv_heads=1), nn.Linear(12, 12)
    options = {"heads": 3, "normalize": normalize, "positions": positions}
    return shaken(Attention(projection, output, kind="self", axes=SOURCE, **options))


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
@pytest.mark.parametrize("keys", [7, 263], ids=["plain", "fused"])
def test_its_own_normalizer_makes_the_context_and_the_weights(positions, keys):
    layer, inputs, mask = normalized(hardmax, positions), torch.randn(2, keys, 12), causal(keys, keys)
    queries, kv = layer.project_qkv(inputs)
    weights = layer.weights(queries, kv, mask)
    scores = layer.score_with_positions(queries, kv)(queries, kv.repeat_heads(3).keys)
    assert_close(weights, hardmax(scores, mask), **EXACT)
    assert set(weights.unique().tolist()) == {0, 1}
    mixed = (weights @ kv.repeat_heads(3).values).transpose(1, 2).flatten(2)
    assert_close(layer(queries, kv, mask), layer.output(mixed), **EXACT)
    assert_close(layer.weights(queries, kv, mask, slice(1, 2)), weights[:, 1:2], **EXACT)


@pytest.mark.parametrize(("normalize", "fused"), [(softmax, True), (hardmax, False)])
def test_only_softmax_is_fused(normalize, fused, monkeypatch):
    theirs, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **by: calls.append(1) or theirs(*given, **by))
    layer = normalized(normalize)
    layer(*layer.project_qkv(torch.randn(2, 5, 12)), causal(5, 5))
    assert bool(calls) == fused


def test_separate_projections_split_into_heads_and_skip_what_a_model_has_not():
    key = shaken(nn.Linear(6, 6))
    layer = Attention(
        SeparateProjections(nn.Identity(), key, nn.Identity()), nn.Identity(), kind="cross", axes=CROSS, heads=3
    )
    inputs, source = torch.randn(2, 5, 6), torch.randn(2, 7, 6)
    assert_close(layer.project_query(inputs), inputs.view(2, 5, 3, 2).transpose(1, 2), **EXACT)
    kv = layer.project_kv(source)
    assert_close(kv.keys, key(source).view(2, 7, 3, 2).transpose(1, 2), **EXACT)
    assert_close(kv.values, source.view(2, 7, 3, 2).transpose(1, 2), **EXACT)


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_grouped_heads_are_heads_whose_keys_and_values_are_the_same(positions):
    grouped = shaken(multi_head(12, 6, kv_heads=2, positions=positions))
    whole = multi_head(12, 6, positions=positions)
    assert grouped.projection.weight.shape == (20, 12)
    with torch.no_grad():
        for found, wanted in zip(whole.projection.parameters(), grouped.projection.parameters(), strict=True):
            queries, *others = wanted.split([12, 4, 4])
            repeated = (part.view(2, 2, -1).repeat_interleave(3, 0).flatten(0, 1) for part in others)
            found.copy_(torch.cat([queries.view(12, -1), *repeated]).view(found.shape))
    whole.output = grouped.output
    inputs, mask = torch.randn(2, 5, 12), causal(5, 5)
    ours, theirs = grouped.project_qkv(inputs), whole.project_qkv(inputs)
    assert_close(grouped(*ours, mask), whole(*theirs, mask), **EXACT)
    assert_close(grouped.weights(*ours, mask), whole.weights(*theirs, mask), **EXACT)
