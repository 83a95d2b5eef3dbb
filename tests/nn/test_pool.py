"""Tokens written with a pool of keys, against the blocks that it writes out."""

import itertools

import pytest
import torch
from oracles import shaken
from torch.backends import mkldnn
from torch.testing import assert_close

from regard.config.config import DecodeConfig, LanguageConfig, TransformerConfig
from regard.data.batching import source_batch
from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import RunError
from regard.explain.recorder import record
from regard.inference.decoding import decode
from regard.nn import pool
from regard.nn.layers import settle
from regard.nn.transformer import Cache
from regard.tasks.models import Copying, Language, Transformer, rows

VOCAB = 23
SOURCE = [4, 9, 22, 7, EOS]
SEVERAL = [SOURCE, [5, EOS], [*SOURCE, 6, 7, 8, EOS]]
FORMS = {
    "pre": {},
    "post": {"norm": "post", "activation": "gelu"},
    "learned": {"positions": "learned", "embedding_norm": True},
    "gated": {"gated": True, "activation": "silu", "norm_kind": "rms"},
    "rotary": {"positions": "rotary", "rotary_base": 100.0},
}
ALONE = FORMS | {
    "grouped": {"key_heads": 1},
    "llama": {"positions": "rotary", "key_heads": 1, "bias": False, "gated": True, "norm_kind": "rms"},
}
"""Of a decoder without a source."""


def made(kind=Transformer, **changes):
    torch.manual_seed(5)
    sizes = {"size": 18, "feedforward": 11, "heads": 3}
    if kind is Language:
        config = LanguageConfig(kind="language", layers=2, **(sizes | changes))
    else:
        config = TransformerConfig(kind="transformer", encoder_layers=1, decoder_layers=2, **(sizes | changes))
    return shaken(kind(config, VOCAB)).double().eval()


@pytest.fixture(params=[*(f"translates, {form}" for form in FORMS), *(f"continues, {form}" for form in ALONE)])
def model(request):
    what, form = request.param.split(", ")
    return made(Transformer if what == "translates" else Language, **ALONE[form])


@pytest.fixture(params=[1, pool.MANY], ids=["products", "fused"])
def many(request, monkeypatch):
    """Queries look by two products from so many on."""
    monkeypatch.setattr(pool, "MANY", request.param)


def plain(model, monkeypatch):
    """The same model, which always goes through its blocks."""
    monkeypatch.setattr(pool, "begin", lambda *inputs, **others: None)
    return model


def search(model, sources=(SOURCE,), **changes):
    config = DecodeConfig(**{"max_ratio": 0.0, "max_extra": 17, **changes})
    found = decode(model, *source_batch(sources), config, best=changes.get("beam", 1))
    return list(itertools.chain(*found))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("sources", [[SOURCE], SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(
    "changes", [{"beam": 1}, {"beam": 5}, {"sample": True, "seed": 3}, {"beam": 2, "no_repeat": 2}]
)
def test_a_search_finds_what_it_finds_through_the_blocks(model, sources, changes, monkeypatch):
    found = search(model, sources, **changes)
    wanted = search(plain(model, monkeypatch), sources, **changes)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-10)


def test_the_numbers_of_every_step_are_those_of_the_blocks(model, monkeypatch):
    """Rows are chosen, doubled and dropped in between, and more are read than the pool has room for at first."""
    orders = itertools.cycle([[0, 0, 0], [2, 0, 1, 1, 2], [4, 4], [1, 0], [1]])
    with torch.inference_mode():
        quick, slow = (model.start(*source_batch([SOURCE])) for _ in range(2))
        tokens = torch.tensor([BOS])
        read = quick.past.keys if quick.past else 0
        for step, order in zip(range(40), orders, strict=False):
            found, quick = model.step(tokens, quick)
            with monkeypatch.context() as patch:
                wanted, slow = plain(model, patch).step(tokens, slow)
            assert_close(found, wanted, rtol=0, atol=1e-10)
            index = torch.tensor(order)
            quick, slow = (state._replace(past=rows(state.past, index)) for state in (quick, slow))
            tokens = (torch.arange(len(order)) * 7 + step) % (VOCAB - 4) + 4
    assert isinstance(quick.past, pool.Past)
    assert isinstance(slow.past, Cache)
    assert quick.past.start == read + 40
    assert quick.past.pool.both.shape[4] > 64


@pytest.mark.usefixtures("many")
def test_the_numbers_of_several_sentences_are_those_of_the_blocks(model, monkeypatch):
    """Hypotheses are chosen and doubled, sentences go and change places, the pool grows and is cleared."""
    orders = {0: [0, 0, 1, 1, 2, 2], 1: [1, 0, 2, 2, 5, 4], 2: [0, 0, 0, 1, 2, 2, 3, 3, 5, 4, 4, 4]}
    orders |= {3: [0, 3, 5, 4, 8, 11], 10: [2, 3, 5, 4], 20: [3, 2, 0, 1], 30: [3, 2], 40: [0], 50: [0, 0, 0]}
    sources = {10: [1, 2], 20: [1, 0], 30: [1]}
    with torch.inference_mode():
        quick, slow = (model.start(*source_batch(SEVERAL)) for _ in range(2))
        tokens = torch.tensor([BOS] * 3)
        for step in range(70):
            found, quick = model.step(tokens, quick)
            with monkeypatch.context() as patch:
                wanted, slow = plain(model, patch).step(tokens, slow)
            assert_close(found, wanted, rtol=0, atol=1e-10)
            order = orders.get(step, list(range(len(tokens))))
            quick, slow = (state._replace(past=rows(state.past, torch.tensor(order))) for state in (quick, slow))
            if step in sources:
                kept = sources[step]
                quick, slow = (state._replace(source=rows(state.source, torch.tensor(kept))) for state in (quick, slow))
            tokens = (torch.arange(len(order)) * 7 + step) % (VOCAB - 4) + 4
    assert isinstance(quick.past, pool.Past)
    assert isinstance(slow.past, Cache)


@pytest.mark.usefixtures("many")
def test_sentences_that_go_leave_their_places_for_a_while(model, monkeypatch):
    """First few of nine go, one by one, whose keys stay; then so many that the others get a pool of their own."""
    sources = [[4 + number, *SOURCE[: 1 + number % 4], EOS] for number in range(9)]
    left = {2: [0, 1, 2, 3, 5, 6, 7, 8], 5: [0, 1, 2, 4, 5, 6, 7], 8: [6, 0, 1, 3, 2, 4, 5], 11: [5, 1, 3]}
    with torch.inference_mode():
        quick, slow = (model.start(*source_batch(sources)) for _ in range(2))
        tokens, beam, pools = torch.tensor([BOS] * 9), 1, []
        for step in range(20):
            found, quick = model.step(tokens, quick)
            with monkeypatch.context() as patch:
                wanted, slow = plain(model, patch).step(tokens, slow)
            assert_close(found, wanted, rtol=0, atol=1e-10)
            kept = torch.tensor(left.get(step, list(range(len(tokens) // beam))))
            if step in left:
                quick, slow = (state._replace(source=rows(state.source, kept)) for state in (quick, slow))
            origins = torch.tensor([0, 0, 0] if beam == 1 else [2, 0, 2])
            order = (kept[:, None] * beam + origins).flatten()
            quick, slow = (state._replace(past=rows(state.past, order)) for state in (quick, slow))
            tokens, beam = (torch.arange(len(order)) * 7 + step) % (VOCAB - 4) + 4, 3
            pools.append((len(kept), quick.past.pool.both.shape[2]))
    assert pools[4] == (8, 9)
    assert pools[10] == (7, 9)
    assert pools[11] == (3, 3)


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
        assert isinstance(past(made()), pool.Past)
        for kind in (Transformer, Language):
            assert isinstance(past(made(kind, positions="linear")), Cache)
            assert isinstance(past(made(kind).train()), Cache)
    assert isinstance(past(made()), Cache)  # a gradient may be wanted
    assert isinstance(past(made(Language)), Cache)


def test_a_source_is_multiplied_out_where_that_is_possible(monkeypatch):
    def is_single(model, sources=(SOURCE,)):
        found = search(model, sources, beam=2)
        with monkeypatch.context() as patch:
            wanted = search(plain(model, patch), sources, beam=2)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
        assert_close([one.score for one in found], [one.score for one in wanted], rtol=0, atol=1e-10)
        with torch.inference_mode():
            return isinstance(past(model, sources).blocks[0].cross, pool.Single)

    assert is_single(made())
    assert not is_single(made(), SEVERAL)
    assert not is_single(made(), [[*SOURCE, 4, 5, 6]])  # longer than a head is wide
    assert not is_single(made(bias=False))
    assert not is_single(made(key_heads=1))


def test_a_source_with_padding_is_seen_without_it():
    model = made()
    with torch.inference_mode():
        states = [model.start(torch.tensor([ids]), torch.tensor([3])) for ids in ([4, 9, EOS], [4, 9, EOS, PAD])]
        wanted, found = (model.step(torch.tensor([BOS]), state)[0] for state in states)
    assert_close(found, wanted, rtol=0, atol=1e-10)


def test_who_is_left_of_a_batch_is_as_alone():
    """The last prompt of several has padding before it."""
    model, prompts = made(Language), [SOURCE[:2], SOURCE]
    with torch.inference_mode():
        together = model.start(*source_batch(prompts))
        _, together = model.step(together.first, together)
        together = together._replace(past=rows(together.past, torch.tensor([0])))
        alone = model.start(*source_batch(prompts[:1]))
        _, alone = model.step(alone.first, alone)
        for token in (5, 6, 7):
            wanted, alone = model.step(torch.tensor([token]), alone)
            found, together = model.step(torch.tensor([token]), together)
            assert_close(found, wanted, rtol=0, atol=1e-10)


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
    assert state.past.pool.both.shape[4] < 5 * 200


@pytest.mark.parametrize("form", ["rotary", "llama"])
def test_what_slides_sees_what_the_blocks_see_and_stays_bounded(form, monkeypatch):
    """Rows come and go, and see no more than the context, wherever it begins."""
    model = made(Language, **ALONE[form])
    model.context = 7
    orders = itertools.cycle([[0], [0], [0, 0, 0], [2, 0, 1], [1, 0], [1]])
    with torch.inference_mode():
        quick, slow = (model.start(*source_batch([SOURCE])) for _ in range(2))
        tokens = torch.tensor([BOS])
        for step, order in zip(range(120), orders, strict=False):
            found, quick = model.step(tokens, quick)
            with monkeypatch.context() as patch:
                wanted, slow = plain(model, patch).step(tokens, slow)
            assert slow.past.keys <= 7
            assert_close(found, wanted, rtol=0, atol=1e-10)
            index = torch.tensor(order)
            quick, slow = (state._replace(past=rows(state.past, index)) for state in (quick, slow))
            tokens = (torch.arange(len(order)) * 7 + step) % (VOCAB - 4) + 4
    assert isinstance(quick.past, pool.Past)
    assert quick.past.pool.both.shape[4] == 64


def test_who_looks_sees_the_blocks():
    model = made()
    found = search(model, beam=3)
    with record(model) as maps:
        assert [one.tokens for one in search(model, beam=3)] == [one.tokens for one in found]
    looked = maps.of(SOURCE, found[0].tokens)["decoder.blocks.1.cross_attention"]
    assert looked.shape == (3, len(found[0].tokens) + 1, len(SOURCE))
    assert_close(looked.sum(-1), torch.ones_like(looked[..., 0]))


@pytest.mark.parametrize("changes", [{"beam": 1}, {"beam": 3}, {"sample": True}])
@pytest.mark.parametrize("kind", [Transformer, Language])
def test_a_model_that_gives_no_numbers_is_refused(kind, changes):
    model = made(kind)
    with torch.no_grad():
        model.decoder.blocks[0].feedforward.narrow.weight.fill_(torch.nan)
    with pytest.raises(RunError, match=r"the model gives no numbers \(NaN\): its weights are broken"):
        search(model, **changes)
