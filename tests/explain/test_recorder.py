"""Looking from outside: exact under every way to decode, only what is wanted, and nothing when nobody looks."""

import cmath
import itertools

import pytest
import torch
import torch.nn.functional as F
from decoders import FAMILIES, SOURCES, run, settings
from decoders import model as model
from oracles import EXACT, hardmax, shaken
from random_runs import drawn
from torch import nn
from torch.testing import assert_close

import regard
from regard.data.batching import Row, collate
from regard.data.vocabulary import EOS, PAD
from regard.errors import InputError
from regard.explain.recorder import record, watch
from regard.nn.attention import SOURCE, Additive, Attention, JointProjection, multi_head_attention
from regard.tasks.seq2seq import Transformer

WAYS = {
    "greedy": {"beam_size": 1},
    "beam": {"beam_size": 3},
    "beam without repeats": {"beam_size": 4, "no_repeat_ngram": 2},
    "sampling": {"sample": True, "temperature": 1.5},
}


def transformer_of(family):
    return Transformer(FAMILIES[family], 7, 7).double().eval()


SLOPES = {3: (1 / 16, 1 / 256, 1 / 4)}
"""Of ALiBi, by the number of heads: those of its authors."""


def plain_scores(layer, head, queries, keys):
    """How the queries (query, size) and keys (key, size) of one head are compared: Bahdanau's and Luong's scores in
    recurrent models; in others the scaled product and its position bias, where the last query stands at the last
    key."""
    if isinstance(layer.score, Additive):
        return (queries[:, None] + keys).tanh() @ layer.score.vector
    if not isinstance(layer.projection, JointProjection):
        return queries @ keys.T
    far = torch.arange(len(keys)) - torch.arange(len(keys) - len(queries), len(keys))[:, None]
    slope = SLOPES[layer.heads][head] if layer.positions == "alibi" else 0.0
    return queries @ keys.T / queries.shape[-1] ** 0.5 - slope * far.abs()


def plain_maps(model, source, target):
    """Every map of one example, made by the equation itself; neighbouring heads of queries may share one of keys."""
    found = {}

    def seen(name, layer, queries, kv, mask):
        share = layer.heads // kv.keys.shape[1]
        pairs = [(queries[0, head], kv.keys[0, head // share]) for head in range(layer.heads)]
        raised = torch.stack([plain_scores(layer, head, *pair) for head, pair in enumerate(pairs)]).exp()
        raised = raised if mask is None else (raised * mask).view(raised.shape)
        raised = raised.tril() if layer.causal else raised
        weights = raised / raised.sum(-1, keepdim=True)
        found[name] = torch.cat([found[name], weights], dim=-2) if name in found else weights

    with torch.no_grad(), watch(model, seen):
        model.hidden(collate([Row(source, target)]))
    return found


class Alone(nn.Module):
    """A self-attention and nothing else."""

    def __init__(self, **own):
        super().__init__()
        self.attention = shaken(multi_head_attention(24, 6, kind="self", axes=SOURCE, **own).double())

    def forward(self, inputs, mask):
        return self.attention(*self.attention.project_qkv(inputs), mask)


def turned(vectors, base):
    """RoPE, one number at a time: the pair (i, i + half) at a place is turned by place / base^(i / half)."""
    half, out = vectors.shape[-1] // 2, vectors.clone()
    for place, i in itertools.product(range(vectors.shape[-2]), range(half)):
        pair = torch.complex(vectors[..., place, i], vectors[..., place, i + half])
        pair = pair * cmath.exp(1j * place / base ** (i / half))
        out[..., place, i], out[..., place, i + half] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_a_recorded_map_follows_from_the_raw_weights(kv_heads, positions):
    """Projected, parted into heads, shared by groups of them, turned, compared and weighed by hand."""
    torch.manual_seed(1)
    model, inputs = Alone(kv_heads=kv_heads, positions=positions), torch.randn(2, 5, 24, dtype=torch.float64)
    mask = torch.tensor([5, 3])[:, None] > torch.arange(5)
    with torch.no_grad(), record(model) as maps:
        output = model(inputs, mask[:, None, None])
    weight, bias = model.attention.projection.weight.detach(), model.attention.projection.bias.detach()
    contexts = []
    for head in range(6):
        own = head // (6 // kv_heads)
        rows = [4 * head, 24 + 4 * own, 24 + 4 * kv_heads + 4 * own]  # of this head's queries, keys and values
        query, key, value = (inputs @ weight[row : row + 4].T + bias[row : row + 4] for row in rows)
        if positions == "rotary":
            query, key = turned(query, 10_000.0), turned(key, 10_000.0)
        raised = (query @ key.mT / 2).exp() * mask[:, None]
        wanted = raised / raised.sum(-1, keepdim=True)
        assert_close(maps["attention"][:, head], wanted, **EXACT)
        contexts.append(wanted @ value)
    assert_close(model.attention.output(torch.cat(contexts, -1)), output, **EXACT)


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


def test_an_output_is_asked_for_without_its_end(model):
    """Also where a beam has stepped on behind it, with a hypothesis that had ended."""
    with record(model) as maps:
        answers = run(model, SOURCES, settings(max_ratio=1.5, beam_size=4), best=4)
    for source, hypotheses in zip(SOURCES, answers, strict=True):
        for hypothesis in hypotheses:
            with pytest.raises(InputError, match="give those of an output, without <bos> and <eos>"):
                maps.of(source, [*hypothesis.tokens, EOS])


def test_recording_changes_no_answer_and_leaves_nothing_behind(model):
    config = settings(beam_size=3)
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
    config, source = settings(beam_size=2), SOURCES[0]
    with record(model) as outer:
        with record(model) as inner:
            run(model, SOURCES, config)
        ((answer,),) = run(model, [source], config)
    for maps in (outer, inner):
        assert_close(maps.of(source, answer.tokens), plain_maps(model, source, answer.tokens), **EXACT)
    assert "step" not in vars(model)


def test_a_padded_batch_gives_rows_that_sum_to_one_over_what_may_be_seen(model):
    batch = collate([Row(source, [4, 5][: len(source) - 1]) for source in SOURCES])
    with torch.no_grad(), record(model) as maps:
        model.hidden(batch)
    for name, weights in maps.items():
        assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), **EXACT)
        if not name.startswith("decoder.blocks") or "cross" in name:
            assert weights.movedim(-1, 1)[batch.source == PAD].sum() == 0


def test_only_what_is_wanted_is_computed(monkeypatch):
    torch.manual_seed(1)
    model = transformer_of("transformer")
    asked = []
    weigh = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda self, *rest: asked.append(rest[-1]) or weigh(self, *rest))
    with record(model) as every:
        model.hidden(collate([Row([4, 5, 3], [4])]))
    assert len(asked) == 6
    asked.clear()
    name = "decoder.blocks.1.cross_attention"
    with record(model, lambda path: path == name, slice(1, 2)) as one:
        model.hidden(collate([Row([4, 5, 3], [4])]))
    assert asked == [slice(1, 2)]
    assert list(one) == [name]
    assert_close(one[name], every[name][:, 1:2])


@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_one_head_is_that_head_of_all(positions, kv_heads):
    layer = multi_head_attention(12, 3, kind="self", axes=SOURCE, kv_heads=kv_heads, positions=positions)
    queries, kv = layer.project_qkv(torch.randn(2, 5, 12))
    assert_close(layer.weights(queries, kv, None, slice(2, 3)), layer.weights(queries, kv)[:, 2:3])


def test_when_nobody_looks_the_fast_path_runs(monkeypatch):
    model, batch = transformer_of("transformer").float(), collate([Row([4, 5, 3], [4])])
    fused, used = F.scaled_dot_product_attention, []

    def spy(*inputs, **options):
        used.append(1)
        return fused(*inputs, **options)

    monkeypatch.setattr(Attention, "weights", None)  # whoever asked for a map would fail
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model.hidden(batch)
    assert len(used) == 6
    monkeypatch.undo()
    with record(model):
        monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
        model.hidden(batch)
    assert len(used) == 12  # the model itself runs as always, looked at or not


def test_maps_of_another_normalizer_are_recorded():
    """The recorder asks the attention, which knows how its scores become weights; nothing else assumes a softmax."""
    torch.manual_seed(1)
    model, batch = transformer_of("transformer"), collate([Row([4, 5, 6, 3], [4, 6])])
    name = "decoder.blocks.0.cross_attention"
    layer, inputs = model.get_submodule(name), []
    with torch.no_grad():
        before = model.hidden(batch)
    layer.normalize = hardmax
    layer.output.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad(), record(model) as maps:
        after = model.hidden(batch)
    assert maps[name].unique().tolist() == [0, 1]
    assert maps[name].sum(-1).unique().tolist() == [1]
    assert maps["decoder.blocks.1.cross_attention"].unique().numel() > 10
    given = []
    with torch.no_grad(), watch(model, lambda *seen: given.append(seen), lambda path: path == name):
        model.hidden(batch)
    ((_, _, _, kv, _),) = given
    assert_close((maps[name] @ kv.values).transpose(1, 2).flatten(2), inputs[0], **EXACT)  # what the model went on with
    assert (after - before).abs().max() > 1e-6


def test_our_own_engine_decodes_what_is_recorded(tmp_path, monkeypatch):
    """CTranslate2 shows nothing of what it does: while somebody looks, and no longer, we decode."""
    pytest.importorskip("ctranslate2")
    predictor = regard.load(drawn(tmp_path / "run", "transformer"), device="cpu", engine="ctranslate2")
    own, calls, texts = predictor.engine.own.generate, [], ["abc", "hello"]
    monkeypatch.setattr(predictor.engine.own, "generate", lambda *given: calls.append(1) or own(*given))
    before = predictor(texts)
    assert not calls
    with record(predictor.model) as maps:
        answers = predictor.predict(texts)
    assert calls
    assert [one.text for (one,) in answers] == before
    for source, (answer,) in zip(predictor.encode(texts), answers, strict=True):
        found = maps.of(source.ids, [token.id for token in answer.tokens[:-1]])
        assert len(found) == 4
        for name, weights in found.items():
            rows = len(source.ids) if name.startswith("encoder") else len(answer.tokens)
            assert weights.shape[:2] == (4, rows)
    calls.clear()
    assert predictor(texts) == before
    assert not calls


def test_linformers_maps_go_from_tokens_to_slots(tmp_path):
    """While decoding, too; of each text as many rows as it has tokens, and all slots."""
    own = ("model.attention=linformer", "model.slots=5", "decode.beam_size=2")
    predictor = regard.load(drawn(tmp_path / "run", "transformer", *own), device="cpu")
    texts = ["the quick brown fox", "abc"]
    with record(predictor.model) as maps:
        answers = predictor.predict(texts)
    for row, (answer, *_) in zip(predictor.encode(texts, "text"), answers, strict=True):
        found = maps.of(row.ids, [token.id for token in answer.tokens[:-1]])
        for layer in range(2):
            weights = found[f"encoder.blocks.{layer}.self_attention"]
            assert weights.shape == (4, len(row.ids), 5)
            assert_close(weights.sum(-1), torch.ones(4, len(row.ids)))
