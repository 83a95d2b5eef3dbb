"""The KV cache: how long it is, what slides out of it, and what re-ordering its rows does."""

import pytest
import torch
from oracles import EXACT, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.attention.equation import KeyValues
from regard.config.model import LanguageModelConfig
from regard.nn.kv_cache import KVCache
from regard.nn.state import State, select_rows
from regard.nn.transformer import Decoder

pytestmark = pytest.mark.usefixtures("exact")

FORMS = {
    "plain": {},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "llama": {"positions": "rotary", "kv_heads": 1, "bias": False, "gated": True, "norm_kind": "rms"},
}


def made(length, start=None, real=None):
    """A cache of two blocks, whose values are as wide as their keys are not."""
    blocks = tuple(KeyValues(torch.randn(2, 3, length, 5), torch.randn(2, 3, length, 7)) for _ in range(2))
    return KVCache(blocks, length if start is None else start, real)


def test_an_empty_cache_has_no_keys():
    assert KVCache().length == 0
    assert KVCache().start == 0
    assert KVCache().keep_latest(3) == KVCache()


def test_the_length_is_how_many_keys_there_are():
    assert made(4).length == 4
    assert made(4, start=9).length == 4


@pytest.mark.parametrize("count", [4, 5, 100])
def test_what_has_room_stays(count):
    cache = made(4)
    assert cache.keep_latest(count) is cache


@pytest.mark.parametrize("count", [1, 3])
def test_the_latest_are_kept_and_still_stand_where_they_stood(count):
    real = torch.tensor([[False, True, True, True], [True] * 4])
    for cache in (made(4, start=9), made(4, start=torch.tensor([3, 4]), real=real)):
        kept = cache.keep_latest(count)
        assert kept.length == count
        assert kept.start is cache.start
        for one, whole in zip(kept.blocks, cache.blocks, strict=True):
            assert torch.equal(one.keys, whole.keys[:, :, 4 - count :])
            assert torch.equal(one.values, whole.values[:, :, 4 - count :])
        assert (kept.real is None) == (cache.real is None)
        if cache.real is not None:
            assert torch.equal(kept.real, real[:, 4 - count :])


def decoder(**changes):
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2}
    settings = LanguageModelConfig(kind="language model", **sizes | changes)
    return shaken(Decoder(settings, settings.layers, longest=64))


def test_no_row_sees_what_slid_out_of_a_single_block():
    one = decoder(layers=1, positions="rotary")
    x, cache, steps = torch.randn(2, 9, 12), None, []
    for token in x.split(1, dim=1):
        step, cache = one(token, cache=cache and cache.keep_latest(3))
        steps.append(step)
    assert cache.length == 4
    for last in range(4, 10):
        window, _ = one(x[:, last - 4 : last])  # rotary positions depend on the distance alone
        assert_close(steps[last - 1][:, 0], window[:, -1], **EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_be_chosen_doubled_and_dropped_between_steps(form):
    model, table = decoder(**FORMS[form]), torch.randn(23, 12)
    orders = {0: [0, 0, 1, 1], 1: [1, 0, 2, 2], 2: [0, 0, 0, 1, 2, 3], 3: [5, 3], 5: [1], 6: [0, 0, 0]}
    read, cache = torch.tensor([[4], [9]]), None
    for step in range(8):
        found, cache = model(table[read[:, -1:]], cache=cache)
        assert_close(found[:, 0], model(table[read])[0][:, -1], **EXACT)
        index = torch.tensor(orders.get(step, range(len(read))))
        cache = select_rows(cache, index)
        assert isinstance(cache, KVCache)
        read = torch.cat([read[index], (torch.arange(len(index)) * 7 + step)[:, None] % 23], dim=1)


def test_rows_are_chosen_of_every_tensor_and_of_nothing_else():
    cache = made(4, start=torch.tensor([3, 4]), real=torch.tensor([[False, True, True, True], [True] * 4]))
    state = State((torch.arange(2), None), (cache, torch.tensor([[5], [6]])), None)
    found = select_rows(state, torch.tensor([1, 1, 0]))
    assert isinstance(found, State)
    assert found.source[0].tolist() == [1, 1, 0]
    assert found.source[1] is found.first is None
    chosen, tokens = found.cache
    assert tokens.tolist() == [[6], [6], [5]]
    assert chosen.start.tolist() == [4, 4, 3]
    assert torch.equal(chosen.real, cache.real[[1, 1, 0]])
    for one, whole in zip(chosen.blocks, cache.blocks, strict=True):
        assert isinstance(one, KeyValues)
        assert torch.equal(one.keys, whole.keys[[1, 1, 0]])
        assert torch.equal(one.values, whole.values[[1, 1, 0]])
    assert select_rows(made(4), torch.tensor([1])).start == 4
