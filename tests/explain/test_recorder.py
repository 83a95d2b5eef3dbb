"""Looking from outside: exact under every way to decode, only what is wanted, and nothing when nobody looks."""

import itertools

import pytest
import torch
from decoders import FAMILIES, SOURCES, run, settings
from decoders import model as model
from oracles import EXACT
from torch.testing import assert_close

from regard.data.batching import Pair, collate
from regard.data.vocabulary import PAD
from regard.explain.recorder import record, watch
from regard.nn import attention as module
from regard.nn.attention import Attention, multi_head

WAYS = {
    "greedy": {"beam": 1},
    "beam": {"beam": 3},
    "beam without repeats": {"beam": 4, "no_repeat": 2},
    "sampling": {"sample": True, "temperature": 1.5},
}


def plain_maps(model, source, target):
    """Every map of one example, made by the equation itself: softmax(score(query, keys)) by hand, without a mask's
    help where nothing is hidden."""
    found = {}

    def seen(name, layer, queries, memory, mask):
        scores = layer.scored(queries, memory)(queries, memory.keys)
        if mask is not None:
            scores = torch.where(mask, scores, -torch.inf)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        found[name] = torch.cat([found[name], weights], dim=-2) if name in found else weights

    with torch.no_grad(), watch(model, seen):
        model.hidden(collate([Pair(source, target)]))
    return {name: weights[0] for name, weights in found.items()}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_maps_of_the_chosen_output_are_the_plain_ones(model, way):
    with record(model) as maps:
        answers = run(model, SOURCES, settings(max_ratio=1.5, **way), best=2)
    for source, hypotheses in zip(SOURCES, answers, strict=True):
        for hypothesis in hypotheses:
            found, wanted = maps.of(source, hypothesis.tokens), plain_maps(model, source, hypothesis.tokens)
            assert found.keys() == wanted.keys()
            for name, weights in found.items():
                assert_close(weights, wanted[name], **EXACT)
                assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), **EXACT)


def test_recording_changes_no_answer_and_leaves_nothing_behind(model):
    config = settings(beam=3)
    before = run(model, SOURCES, config)
    with record(model):
        looked = run(model, SOURCES, config)
    for one, other in zip(itertools.chain(*looked), itertools.chain(*before), strict=True):
        assert one.tokens == other.tokens
        assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), **EXACT)
    assert "step" not in vars(model)
    assert not any(part._forward_hooks for part in model.modules())
    assert run(model, SOURCES, config) == before


def test_a_record_within_another_leaves_the_other_one_whole(model):
    config, source = settings(beam=2), SOURCES[0]
    with record(model) as outer:
        with record(model) as inner:
            run(model, SOURCES, config)
        ((answer,),) = run(model, [source], config)
    for maps in (outer, inner):
        assert_close(maps.of(source, answer.tokens), plain_maps(model, source, answer.tokens), **EXACT)
    assert "step" not in vars(model)


def test_a_padded_batch_gives_rows_that_sum_to_one_over_what_may_be_seen(model):
    batch = collate([Pair(source, [4, 5][: len(source) - 1]) for source in SOURCES])
    with torch.no_grad(), record(model) as maps:
        model.hidden(batch)
    for name, weights in maps.items():
        assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), **EXACT)
        if not name.startswith("decoder.blocks") or "cross" in name:
            assert weights.movedim(-1, 1)[batch.source == PAD].sum() == 0


def test_only_what_is_wanted_is_computed(monkeypatch):
    torch.manual_seed(1)
    model = module_of("transformer")
    asked = []
    weigh = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda self, *rest: asked.append(rest[-1]) or weigh(self, *rest))
    with record(model) as every:
        model.hidden(collate([Pair([4, 5, 3], [4])]))
    assert len(asked) == 6
    asked.clear()
    name = "decoder.blocks.1.cross_attention"
    with record(model, lambda path: path == name, slice(1, 2)) as one:
        model.hidden(collate([Pair([4, 5, 3], [4])]))
    assert asked == [slice(1, 2)]
    assert list(one) == [name]
    assert_close(one[name], every[name][:, 1:2])


@pytest.mark.parametrize("order", ["none", "rotary", "linear"])
def test_one_head_is_that_head_of_all(order):
    layer = multi_head(12, 3, order=order)
    queries, memory = layer.both(torch.randn(2, 5, 12))
    assert_close(layer.weights(queries, memory, None, slice(2, 3)), layer.weights(queries, memory)[:, 2:3])


def test_when_nobody_looks_the_fast_path_runs(monkeypatch):
    model, batch = module_of("transformer").float(), collate([Pair([4, 5, 3], [4])])
    fused, used = module.F.scaled_dot_product_attention, []

    def spy(*inputs, **options):
        used.append(1)
        return fused(*inputs, **options)

    monkeypatch.setattr(Attention, "weights", None)  # whoever asked for a map would fail
    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    model.hidden(batch)
    assert len(used) == 6
    monkeypatch.undo()
    with record(model):
        monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
        model.hidden(batch)
    assert len(used) == 12  # the model itself runs as always, looked at or not


def module_of(family):
    from regard.tasks.models import Transformer

    return Transformer(FAMILIES[family], 7, 7).double().eval()
