"""Blocks of keys that are gathered against the same pattern as a dense mask; Linformer against its formula."""

import functools
import itertools

import pytest
import torch
from linformer import LinformerSelfAttention
from torch.testing import assert_close

from regard.attention import sparse
from regard.attention.equation import KeyValues, attend
from regard.attention.linformer import project_sequence
from regard.attention.masks import causal, distance, window
from regard.attention.normalizers import softmax
from regard.attention.positions import alibi
from regard.attention.scores import biased, scaled_dot
from regard.attention.sparse import Pattern, attend_blocks, list_blocks, sparse_mask, weigh_blocks
from regard.nn.attention import SOURCE, Slots, multi_head_attention

EXACT = {"rtol": 0, "atol": 1e-10}
HEADS = 2


def drawn(n, batch=3):
    shape = (batch, HEADS, n, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def places_mask(pattern, queries, keys):
    """The mask of the last `queries` of so many tokens."""
    places = torch.arange(keys)
    return sparse_mask(pattern, places[keys - queries :], places, keys)


def dense(query, keys, values, pattern, bias):
    """The context of one row by a dense mask."""
    n = query.shape[-2]
    score = scaled_dot if bias is None else biased(scaled_dot, bias(distance(n, n)))
    return attend(query, keys, values, places_mask(pattern, n, n), score=score).context


PATTERNS = [
    Pattern(block, near, None, first, random, 1, ahead)
    for block, near, first, random, ahead in itertools.product((4,), (0, 1), (0, 1, 2), (0, 2), (False, True))
]


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, Pattern(1, 2, None, 1, 1), Pattern(4, 1, 4), Pattern(3, 2, 5, causal=True)], ids=str
)
@pytest.mark.parametrize("n", [1, 12, 25])
@pytest.mark.parametrize("form", ["in parts", "fused"])
def test_blocks_are_a_dense_mask_with_gradients_whatever_the_padding(pattern, n, form, monkeypatch):
    """A few blocks of queries at a time, and as devices other than a CPU compute it."""
    for limit in ("GATHERED", "MANY"):
        monkeypatch.setattr(sparse, limit, 3 * HEADS * 5 * pattern.block * 4)
    if form == "fused":
        monkeypatch.setattr(sparse, "attend_gathered", sparse.attend_fused)
    for lengths, bias in itertools.product((None, [n, max(1, n // 2), 1]), (None, functools.partial(alibi, HEADS))):
        inputs = drawn(n)
        query, keys, values = inputs
        found = attend_blocks(
            query, KeyValues(keys, values), pattern, None if lengths is None else torch.tensor(lengths), bias
        )
        for row, length in enumerate(lengths or [n] * 3):
            wanted = dense(*(part[row, :, :length] for part in inputs), pattern, bias)
            got = found[row, :, :length]
            assert_close(got, wanted, **EXACT)
            weight = torch.randn_like(got)
            slopes = [torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (got, wanted)]
            assert_close(*slopes, **EXACT)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_blocks_under_autocast(kind):
    """As mixed precision of any device: the products have 16 bits, whatever came."""
    inputs = [part.detach().to(kind).requires_grad_() for part in drawn(25)]
    pattern = Pattern(4, 1, None, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_blocks(inputs[0], KeyValues(*inputs[1:]), pattern)
    wanted = dense(*(part.double() for part in inputs), pattern, None)
    assert found.dtype == torch.bfloat16
    assert_close(found.double(), wanted, rtol=0, atol=0.05)
    slopes = [torch.autograd.grad(x.double().square().sum(), inputs) for x in (found, wanted)]
    assert_close(*slopes, rtol=0, atol=0.2)


@pytest.mark.parametrize("pattern", [*PATTERNS, Pattern(4, 1, 4), Pattern(3, 2, 5, causal=True)], ids=str)
@pytest.mark.parametrize("n", [1, 12, 25])
def test_weights_of_blocks_are_those_of_a_dense_mask(pattern, n):
    query, keys, _ = (part[0].detach() for part in drawn(n))
    leading = 0 if pattern.causal else min(n, pattern.first * pattern.block)  # which see everything
    for bias, step in itertools.product((None, functools.partial(alibi, HEADS)), (1, 3)):
        score = scaled_dot if bias is None else biased(scaled_dot, bias(distance(n, n)))
        wanted = softmax(score(query, keys), places_mask(pattern, n, n))
        found = torch.zeros(HEADS, n, n, dtype=torch.float64)
        for start in range(0, -(-n // pattern.block), step):
            weights, places = weigh_blocks(query, keys, pattern, slice(start, start + step), bias)
            rows = torch.arange(start * pattern.block, min(n, (start + step) * pattern.block))
            assert len(rows) == len(places) == weights.shape[1]
            assert (weights.sum(-1) - 1).abs().max() < 1e-10
            for row, own, of in zip(rows, weights.unbind(1), places, strict=True):
                assert not own[:, of < 0].any()
                assert (of[of >= 0].diff() > 0).all()
                found[:, row, of[of >= 0]] = own[:, of >= 0]
        assert_close(found[:, leading:], wanted[:, leading:], **EXACT)


@pytest.mark.parametrize("n", [1, 5, 17, 40])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_window_of_words_is_the_mask_of_that_name(n, width):
    assert torch.equal(places_mask(Pattern(width, 1, width), n, n), window(n, n, width))
    assert torch.equal(places_mask(Pattern(width, 1, width, causal=True), n, n), window(n, n, width) & causal(n, n))


def test_every_block_sees_what_the_pattern_says():
    pattern, count = Pattern(4, 1, None, 2, 3, seed=5), 20
    mask = places_mask(pattern, 4 * count, 4 * count)[::4, ::4]
    assert mask[:2].all()
    assert mask[:, :2].all()
    for own in range(4, count - 1):
        assert mask[own, own - 1 : own + 2].all()
        assert mask[own].sum() == 3 + 2 + 3
    assert not torch.equal(mask, places_mask(pattern._replace(seed=6), 4 * count, 4 * count)[::4, ::4])


def test_more_random_blocks_than_exist_are_all_of_them():
    assert places_mask(Pattern(2, 0, None, 0, 99), 9, 9).all()
    assert torch.equal(places_mask(Pattern(2, 0, None, 0, 99, causal=True), 9, 9), causal(9, 9))


def test_what_a_causal_pattern_shows_does_not_depend_on_what_follows():
    """So each step of decoding sees what training saw."""
    pattern = Pattern(3, 1, None, 1, 2, causal=True)
    whole = places_mask(pattern, 50, 50)
    for n in range(1, 50):
        assert torch.equal(places_mask(pattern, 1, n)[0], whole[n - 1, :n])
        assert torch.equal(places_mask(pattern, min(n, 4), n), whole[max(0, n - 4) : n, :n])
    assert (list_blocks(pattern, 17)[:9, :6] == list_blocks(pattern, 9)[:, :6]).all()


def test_no_tensor_is_as_large_as_queries_times_keys():
    """Neither forward nor backward, whatever is kept: 4,096 x 4,096 numbers of 4 bytes would be 64 MB."""
    query, keys, values = (torch.randn(1, 1, 4096, 4, requires_grad=True) for _ in range(3))
    most = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            nonlocal most
            found = function(*arguments, **(named or {}))
            parts = found if isinstance(found, tuple | list) else [found]
            most = max([most, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
            return found

    with Largest():
        attend_blocks(query, KeyValues(keys, values), Pattern(16, 1, None, 1, 2)).sum().backward()
    assert 4096 <= most < 4096 * 4096 / 16


# --- Linformer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 4), (HEADS, 9, 4)])
def test_linformer_is_its_formula(shape):
    projection, x = torch.randn(shape, dtype=torch.float64), torch.randn(3, HEADS, 9, 5, dtype=torch.float64)
    wanted = torch.einsum("bhns,hnk->bhks", x, projection.expand(HEADS, 9, 4))
    assert_close(project_sequence(x, projection), wanted, **EXACT)
    assert_close(project_sequence(x, projection, torch.tensor([9, 9, 9])), wanted, **EXACT)


def test_padding_adds_nothing_to_linformers_slots():
    projection, x = torch.randn(9, 4, dtype=torch.float64), torch.randn(2, HEADS, 7, 5, dtype=torch.float64)
    found = project_sequence(x, projection, torch.tensor([7, 3]))
    assert_close(found[0], project_sequence(x[:1], projection)[0], **EXACT)
    assert_close(found[1], project_sequence(x[1:, :, :3], projection)[0], **EXACT)


def test_what_is_the_same_everywhere_is_the_same_in_linformers_slots_at_any_length():
    projection = torch.full((8, 3), 1 / 8, dtype=torch.float64)
    for n in (1, 3, 8):
        assert_close(
            project_sequence(torch.ones(1, 1, n, 2, dtype=torch.float64), projection),
            torch.ones(1, 1, 3, 2, dtype=torch.float64),
        )


@pytest.mark.parametrize("shared", [False, True])
def test_linformer_is_that_of_the_linformer_package_with_the_same_weights(shared):
    """Its `share_kv` shares the projections to keys and values too, so ours are made equal by hand."""
    rival = LinformerSelfAttention(12, 11, k=5, heads=3, share_kv=shared).double()
    own = multi_head_attention(12, 3, bias=False, kind="self", axes=SOURCE, slots=Slots(11, 5, None, shared=shared))
    own.double()
    values, slots = ("k", rival.proj_k) if shared else ("v", rival.proj_v)
    weights = [getattr(rival, f"to_{part}").weight for part in ("q", "k", values)]
    with torch.no_grad():
        own.projection.weight.copy_(torch.cat(weights))
        own.output.weight.copy_(rival.to_out.weight)
        rival.to_out.bias.zero_()
        own.slots.keys.copy_(rival.proj_k)
        if not shared:
            own.slots.values.copy_(slots)
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    found, wanted = own(*own.project_qkv(x)), rival(x)
    assert_close(found, wanted, **EXACT)
    weight = torch.randn_like(found)
    assert_close(*(torch.autograd.grad((one * weight).sum(), x)[0] for one in (found, wanted)), **EXACT)
