"""The equation against loops, algebra and torch (B1 to B5)."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import EXACT, attend_slowly, hardmax
from oracles import exact as exact
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.testing import assert_close

from regard.attention.equation import KeyValues, attend, attend_fast, fused_is_faster
from regard.attention.masks import causal, padding, window
from regard.attention.normalizers import softmax
from regard.attention.scores import biased, dot, scaled_dot
from regard.nn.attention import Additive
from regard.training.memory import TensorBytes

pytestmark = pytest.mark.usefixtures("exact")

BATCH, HEADS, QUERY, KEY, SIZE, VALUE = 2, 3, 5, 7, 11, 13


def drawn(query=QUERY, key=KEY, size=SIZE, value=VALUE, learning=False):
    shapes = ((query, size), (key, size), (key, value))
    return [torch.randn(BATCH, HEADS, *shape, requires_grad=learning) for shape in shapes]


def random_mask(query=QUERY, key=KEY, blind=False):
    """Some keys hidden, at least one shown; with `blind`, one query of the second sentence sees nothing."""
    mask = torch.rand(BATCH, HEADS, query, key) < 0.5
    mask[..., -1] = True
    if blind:
        mask[1, :, 1] = False
    return mask


# --- the equation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("kind", ["dot", "scaled dot", "additive"])
def test_attend_is_the_loop(kind, blind):
    additive = Additive(SIZE)
    vector = additive.vector.tolist()
    fast = {"dot": dot, "scaled dot": scaled_dot, "additive": additive}[kind]
    slow = {
        "dot": lambda query, key: sum(q * k for q, k in zip(query, key, strict=True)),
        "scaled dot": lambda query, key: sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(SIZE),
        "additive": lambda query, key: sum(v * math.tanh(q + k) for v, q, k in zip(vector, query, key, strict=True)),
    }[kind]
    inputs, mask = drawn(), random_mask(blind=blind)
    wanted = attend_slowly(*inputs, mask, slow)
    found = attend(*inputs, mask, score=fast)
    assert_close(found.context, wanted.context, **EXACT)
    assert_close(found.weights, wanted.weights, **EXACT)


@pytest.mark.parametrize(
    "mask",
    [None, causal(QUERY, KEY), padding(torch.tensor([3, 7]), KEY), padding(torch.tensor([4, 6]), KEY) & causal(5, 7)],
    ids=["none", "causal", "padding", "both"],
)
def test_attend_is_the_one_of_torch(mask):
    inputs = drawn()
    assert_close(attend(*inputs, mask).context, F.scaled_dot_product_attention(*inputs, mask), **EXACT)


def test_two_keys_by_hand():
    query, keys = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0], [1.0, 7.0]])
    found = attend(query, keys, torch.tensor([[2.0], [3.0]]), score=dot)
    assert_close(found.weights, torch.tensor([[1.0, math.e]]) / (1 + math.e), **EXACT)
    assert_close(found.context, torch.tensor([[(2 + 3 * math.e) / (1 + math.e)]]), **EXACT)
    wider = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0] * 4, [2.0, 0.0, 0.0, 0.0]]), torch.zeros(2, 1)
    assert_close(attend(*wider).weights, found.weights, **EXACT)


def test_the_size_of_the_values_is_their_own():
    found = attend(*drawn())
    assert found.context.shape == (BATCH, HEADS, QUERY, VALUE)
    assert found.weights.shape == (BATCH, HEADS, QUERY, KEY)


@pytest.mark.parametrize("score", [dot, scaled_dot])
def test_permuting_the_keys_permutes_the_weights_alone(score):
    (query, keys, values), mask, order = drawn(), random_mask(), torch.randperm(KEY)
    before = attend(query, keys, values, mask, score=score)
    after = attend(query, keys[..., order, :], values[..., order, :], mask[..., order], score=score)
    assert_close(after.context, before.context, **EXACT)
    assert_close(after.weights, before.weights[..., order], **EXACT)


@pytest.mark.parametrize("junk", [0.0, 1e6, -1e6])
def test_hidden_keys_do_not_matter(junk):
    query, keys, values = drawn()
    alone = attend(query, keys[..., :4, :], values[..., :4, :])
    keys[..., 4:, :] = values[..., 4:, :] = junk
    found = attend(query, keys, values, padding(torch.tensor([4, 4]), KEY))
    assert_close(found.context, alone.context, **EXACT)
    assert_close(found.weights, F.pad(alone.weights, (0, KEY - 4)), **EXACT)


@pytest.mark.parametrize("keys", [KEY, 263], ids=["plain", "fused"])
def test_a_blind_query_gets_zeros_and_finite_gradients(keys):
    inputs, mask = drawn(key=keys, learning=True), random_mask(key=keys, blind=True)
    query, *memory = inputs
    seen = attend_fast(query, KeyValues(*memory), mask, score=scaled_dot, normalize=softmax)
    assert not seen[1, :, 1].any()
    assert seen[0].any(-1).all()
    seen.square().sum().backward()
    assert all(part.grad.isfinite().all() for part in inputs)
    assert not query.grad[1, :, 1].any()


def test_softmax_of_a_blind_query_is_zero_and_of_the_rest_sums_to_one():
    scores, mask = torch.randn(BATCH, HEADS, QUERY, KEY, requires_grad=True), random_mask(blind=True)
    weights = softmax(scores, mask)
    assert_close(weights.sum(-1), mask.any(-1).double(), **EXACT)
    assert not weights[~mask].any()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert not scores.grad[~mask].any()
    assert_close(softmax(scores), softmax(scores, torch.tensor(True)), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_softmax_hides_at_every_precision(dtype):
    weights = softmax(torch.tensor([-60_000.0, 60_000.0, 60_000.0], dtype=dtype), torch.tensor([True, False, False]))
    assert weights.dtype == dtype
    assert weights.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", ["dot", "scaled dot", "additive", "biased"])
def test_gradients_are_the_differences(kind):
    additive = Additive(3)
    scores = {
        "dot": lambda extra: dot,
        "scaled dot": lambda extra: scaled_dot,
        "additive": lambda extra: lambda *pair: functional_call(additive, {"vector": extra}, pair),
        "biased": lambda extra: biased(scaled_dot, extra),
    }
    extra = torch.randn(3, requires_grad=True)
    inputs, mask = drawn(2, 3, 3, 2, learning=True), random_mask(2, 3, blind=True)
    assert gradcheck(lambda extra, *inputs: attend(*inputs, mask, score=scores[kind](extra)), (extra, *inputs))


def test_a_bias_joins_the_scores():
    (query, keys, _), bias = drawn(), torch.randn(HEADS, QUERY, KEY)
    assert_close(biased(dot, bias)(query, keys), query @ keys.mT + bias, **EXACT)
    assert biased(dot, bias)(query.float(), keys.float()).dtype == torch.float32


def test_another_normalizer_decides_the_weights():
    (query, keys, values), mask = drawn(), random_mask(blind=True)
    found = attend(query, keys, values, mask, normalize=hardmax)
    scores = scaled_dot(query, keys).masked_fill(~mask, -torch.inf)
    best = values.gather(-2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, VALUE))
    assert_close(found.context, best * mask.any(-1, keepdim=True), **EXACT)
    assert_close(found.weights.sum(-1), mask.any(-1).double(), **EXACT)


def test_more_keys_are_appended_and_heads_repeated():
    first, second = (KeyValues(torch.randn(2, 3, n, 5), torch.randn(2, 3, n, 7)) for n in (4, 2))
    both = first.append(*second)
    for one, parts in zip(both, zip(first, second, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts, dim=-2))
    assert both.repeat_heads(3) is both
    for one, own in zip(both.repeat_heads(6), both, strict=True):
        assert torch.equal(one, own[:, [0, 0, 1, 1, 2, 2]])


# --- the fast path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mask", ["none", "causal", "causal square", "window square", "padding", "random", "blind"])
def test_fused_equals_plain(mask, dtype, near, monkeypatch):
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **by: calls.append(by) or fused(*given, **by))
    square = mask == "causal square"
    inputs = [part.to(dtype).requires_grad_() for part in drawn(query=263 if "square" in mask else QUERY, key=263)]
    chosen = {
        "none": None,
        "causal": causal(QUERY, 263),
        "causal square": causal(263, 263, inputs[0].device),
        "window square": window(263, 263, 7),
        "padding": padding(torch.tensor([0, 101]), 263),
        "random": random_mask(key=263),
        "blind": random_mask(key=263, blind=True),
    }[mask]
    given = {"score": scaled_dot, "normalize": softmax, "is_causal": square}  # the kernel knows that mask itself
    found = attend_fast(inputs[0], KeyValues(*inputs[1:]), None if square else chosen, **given)
    assert calls == [{"is_causal": square}]
    wanted = attend(*inputs, chosen).context
    assert_close(found, wanted, rtol=0, atol=near)
    pull = torch.randn_like(wanted)
    slopes = [torch.autograd.grad((seen * pull).sum(), inputs) for seen in (found, wanted)]
    assert_close(*slopes, rtol=0, atol=near)


def test_whatever_a_kernel_leaves_of_a_blind_query_is_blanked(monkeypatch):
    """Some kernels give a query that sees nothing the mean of all values, others what is not a number."""
    (query, *memory), mask = drawn(), random_mask(blind=True)
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *given, **by: fused(*given, **by).masked_fill(~given[3].any(-1, keepdim=True), torch.nan),
    )
    found = attend_fast(query, KeyValues(*memory), mask, score=scaled_dot, normalize=softmax)
    assert_close(found, attend(query, *memory, mask).context, **EXACT)


def test_the_plain_path_serves_the_rest(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    for query, keys, values, score, normalize in (
        (*drawn(5, 263), dot, softmax),
        (*drawn(5, 263), scaled_dot, hardmax),
        (torch.randn(131, 2, 1, 3), torch.randn(131, 2, 7, 3), torch.randn(131, 2, 7, 5), scaled_dot, softmax),
    ):
        found = attend_fast(query, KeyValues(keys, values), None, score=score, normalize=normalize)
        assert_close(found, attend(query, keys, values, score=score, normalize=normalize).context, **EXACT)


def test_the_choice_is_the_one_that_was_measured():
    assert fused_is_faster(torch.empty(300, 4, 15, 64), 15)
    assert fused_is_faster(torch.empty(1, 4, 1, 64), 7)
    assert not fused_is_faster(torch.empty(320, 4, 1, 64), 7)
    with torch.no_grad():
        assert fused_is_faster(torch.empty(320, 4, 1, 64), 7)
    assert not fused_is_faster(torch.empty(300, 4, 15, 64, dtype=torch.bfloat16), 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_texts_have_no_tensor_of_queries_times_keys(dtype, is_causal):
    """Neither forward nor backward, neither maps nor masks."""
    inputs = [torch.randn(1, 1, 3000, 2, dtype=dtype, requires_grad=True) for _ in range(3)]
    with TensorBytes() as counted:
        given = {"score": scaled_dot, "normalize": softmax, "is_causal": is_causal}
        attend_fast(inputs[0], KeyValues(*inputs[1:]), None, **given).sum().backward()
    assert counted.most < 3000 * 3000


# --- B5: why it is scaled --------------------------------------------------------------------------------------------


def test_without_scaling_the_softmax_peaks_and_gradients_vanish():
    query, keys, values = torch.randn(101, 1009, requires_grad=True), torch.randn(31, 1009), torch.randn(31, 7)
    entropy, slope = {}, {}
    for score in (dot, scaled_dot):
        seen, weights = attend(query, keys, values, score=score)
        entropy[score] = -torch.special.xlogy(weights, weights).sum(-1).median()
        slope[score] = torch.autograd.grad(seen.sum(), query)[0].norm(dim=-1).median()
    assert entropy[scaled_dot] > 0.8 * math.log(31)
    assert entropy[dot] < 0.05 * math.log(31)
    assert slope[dot] < 0.1 * slope[scaled_dot]
