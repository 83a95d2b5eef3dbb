"""One sentence, decoded quickly, against the blocks that it writes out."""

import itertools

import pytest
import torch
from oracles import shaken
from torch.backends import mkldnn
from torch.testing import assert_close

from regard import single
from regard.batch import source_batch
from regard.config import DecodeConfig, TransformerConfig
from regard.decode import decode
from regard.layers import settle
from regard.models import Copying, Transformer, rows
from regard.recording import record
from regard.text import BOS, EOS, PAD
from regard.transformer import Cache

VOCAB = 23
SOURCE = [4, 9, 22, 7, EOS]
FORMS = {
    "pre": {},
    "post": {"norm": "post", "activation": "gelu"},
    "learned": {"positions": "learned", "embedding_norm": True},
    "gated": {"gated": True, "activation": "silu", "norm_kind": "rms"},
}


def made(kind=Transformer, **changes):
    torch.manual_seed(5)
    sizes = {"size": 18, "feedforward": 11, "heads": 3, "encoder_layers": 1, "decoder_layers": 2}
    config = TransformerConfig(kind="transformer", **(sizes | changes))
    return shaken(kind(config, VOCAB)).double().eval()


@pytest.fixture(params=FORMS)
def model(request):
    return made(**FORMS[request.param])


def plain(model, monkeypatch):
    """The same model, which always goes through its blocks."""
    monkeypatch.setattr(single, "begin", lambda *inputs: None)
    return model


def search(model, **changes):
    config = DecodeConfig(**{"max_ratio": 0.0, "max_extra": 17, **changes})
    return decode(model, *source_batch([SOURCE]), config, best=changes.get("beam", 1))[0]


@pytest.mark.parametrize(
    "changes", [{"beam": 1}, {"beam": 5}, {"sample": True, "seed": 3}, {"beam": 2, "no_repeat": 2}]
)
def test_a_search_finds_what_it_finds_through_the_blocks(model, changes, monkeypatch):
    found = search(model, **changes)
    wanted = search(plain(model, monkeypatch), **changes)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-10)


def test_the_numbers_of_every_step_are_those_of_the_blocks(model, monkeypatch):
    """Rows are chosen, doubled and dropped in between, and more are read than the pool has room for at first."""
    orders = itertools.cycle([[0, 0, 0], [2, 0, 1, 1, 2], [4, 4], [1, 0], [1]])
    with torch.inference_mode():
        quick, slow = (model.start(*source_batch([SOURCE])) for _ in range(2))
        tokens = torch.tensor([BOS])
        for step, order in zip(range(40), orders, strict=False):
            found, quick = model.step(tokens, quick)
            with monkeypatch.context() as patch:
                wanted, slow = plain(model, patch).step(tokens, slow)
            assert_close(found, wanted, rtol=0, atol=1e-10)
            index = torch.tensor(order)
            quick, slow = (state._replace(past=rows(state.past, index)) for state in (quick, slow))
            tokens = (torch.arange(len(order)) * 7 + step) % (VOCAB - 4) + 4
    assert isinstance(quick.past, single.Past)
    assert isinstance(slow.past, Cache)
    assert quick.past.pool.mapped.shape[1] > 64


def test_a_state_is_a_value(model):
    """Two ways on from one state do not write over each other."""
    with torch.inference_mode():
        _, state = model.step(torch.tensor([BOS]), model.start(*source_batch([SOURCE])))
        alone = [model.step(torch.tensor([9]), model.step(torch.tensor([first]), state)[1])[0] for first in (5, 6)]
        _, first = model.step(torch.tensor([5]), state)
        _, second = model.step(torch.tensor([6]), state)
        together = [model.step(torch.tensor([9]), after)[0] for after in (first, second)]
    assert_close(together, alone, rtol=0, atol=1e-12)


def test_a_model_that_copies_takes_it_too(monkeypatch):
    model = made(Copying)
    found, wanted = search(model, beam=3), search(plain(model, monkeypatch), beam=3)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert_close([one.score for one in found], [one.score for one in wanted], rtol=0, atol=1e-10)


def past(model, sources=(SOURCE,)):
    state = model.start(*source_batch(sources))
    return model.step(torch.full((len(sources),), BOS), state)[1].past


def test_what_is_of_another_form_goes_through_the_blocks():
    with torch.inference_mode():
        assert isinstance(past(made()), single.Past)
        assert isinstance(past(made(), [SOURCE, SOURCE]), Cache)  # several sentences
        assert isinstance(past(made(), [[*SOURCE, 4, 5, 6]]), Cache)  # longer than a head is wide
        assert isinstance(past(made(positions="rotary")), Cache)
        assert isinstance(past(made(positions="linear")), Cache)
        assert isinstance(past(made(bias=False)), Cache)
        assert isinstance(past(made(key_heads=1)), Cache)
        assert isinstance(past(made().train()), Cache)
    assert isinstance(past(made()), Cache)  # a gradient may be wanted


def test_a_source_with_padding_goes_through_the_blocks():
    model = made()
    with torch.inference_mode():
        state = model.start(torch.tensor([[4, 9, EOS, PAD]]), torch.tensor([3]))
        assert isinstance(model.step(torch.tensor([BOS]), state)[1].past, Cache)


def test_a_settled_model_takes_it_with_packed_matrices(monkeypatch):
    model = made(size=256, feedforward=512, heads=4).float()
    wanted = search(plain(model, monkeypatch), beam=3)
    monkeypatch.undo()
    settle(model)
    assert model.decoder.blocks[0].feedforward.widen.packed is not None or not mkldnn.is_available()
    found = search(model, beam=3)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert_close([one.score for one in found], [one.score for one in wanted], rtol=1e-4, atol=1e-4)


def test_what_nobody_sees_any_more_is_forgotten():
    model = made(positions="sinusoidal")
    with torch.inference_mode():
        state, tokens = model.start(*source_batch([SOURCE])), torch.tensor([BOS])
        for _ in range(200):
            _, state = model.step(tokens, state)
            state = state._replace(past=rows(state.past, torch.zeros(5, dtype=torch.long)))
            tokens = torch.arange(5) + 4
    assert state.past.read < 5 * 200
    assert state.past.pool.mapped.shape[1] < 5 * 200


def test_who_looks_sees_the_blocks():
    model = made()
    found = search(model, beam=3)
    with record(model) as maps:
        assert [one.tokens for one in search(model, beam=3)] == [one.tokens for one in found]
    looked = maps.of(SOURCE, found[0].tokens)["decoder.blocks.1.cross_attention"]
    assert looked.shape == (3, len(found[0].tokens) + 1, len(SOURCE))
    assert_close(looked.sum(-1), torch.ones_like(looked[..., 0]))
