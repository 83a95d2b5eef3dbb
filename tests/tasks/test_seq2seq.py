"""Assemblies: what is shared, what padding and the future may not change, and that everything learns."""

import itertools

import pytest
import torch
from oracles import EXACT, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.config.config import Config, DecodeConfig, RNNConfig, TextConfig, TrainConfig, TransformerConfig
from regard.config.data import ReverseData
from regard.data.batching import Pair, collate
from regard.data.vocabulary import PAD
from regard.explain.recorder import record
from regard.nn.layers import settle
from regard.tasks.models import Recurrent, Transformer, build

pytestmark = pytest.mark.usefixtures("exact")

SOURCE, TARGET = 13, 11
PAIRS = [Pair([5, 7, 12, 3], [4, 5]), Pair([3], []), Pair([9, 4, 4, 6, 8, 3], [10, 9, 8, 7, 6])]


def rnn(**changes):
    return RNNConfig(kind="rnn", **{"size": 6, "embedding": 5, "dropout": 0.0} | changes)


def transformer(**changes):
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    return TransformerConfig(kind="transformer", **sizes | changes)


def whole(model, **groups):
    return Config(data=ReverseData(kind="reverse"), model=model, **groups)


CELLS, ATTENTIONS = ["rnn", "gru", "lstm"], ["none", "dot", "scaled dot", "general", "additive"]
POSITIONS = ["sinusoidal", "learned", "rotary", "linear", "none"]
KINDS = {
    f"{cell}-{attention}": rnn(cell=cell, attention=attention, layers=2)
    for cell, attention in itertools.product(CELLS, ATTENTIONS)
}
KINDS["gru-one-way"] = rnn(bidirectional=False)
KINDS |= {
    f"transformer-{positions}-{norm}": transformer(positions=positions, norm=norm)
    for positions, norm in itertools.product(POSITIONS, ["pre", "post"])
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())


def made(settings, target_vocab=TARGET):
    return shaken(build(whole(settings), SOURCE, target_vocab))


# --- settle ----------------------------------------------------------------------------------------------------------


@every_kind
def test_a_settled_model_gives_the_same_numbers(settings):
    model, batch = made(settings), collate(PAIRS)
    before, names = model(batch), list(model.state_dict())
    settle(model)
    assert_close(model(batch), before, **EXACT)
    assert list(model.state_dict()) == names


# --- build -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "family"), [(rnn(), Recurrent), (transformer(), Transformer)])
def test_build_makes_the_family_from_the_seed(settings, family):
    first, again, other = (build(whole(settings, train=TrainConfig(seed=seed)), SOURCE, TARGET) for seed in (1, 1, 2))
    assert isinstance(first, family)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    assert not all(map(torch.equal, first.state_dict().values(), other.state_dict().values()))
    assert first(collate(PAIRS)).shape == (3, 6, TARGET)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("one", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("kind", [rnn, transformer])
def test_embeddings_are_shared_as_set(kind, one, tied):
    model = build(whole(kind(tied=tied)), SOURCE, None if one else TARGET)
    vocab, width = SOURCE if one else TARGET, 5 if kind is rnn else 12
    assert (model.target_embedding is model.source_embedding) == (one and tied)
    assert (model.output.weight is model.target_embedding.weight) == tied
    assert model.source_embedding.weight.shape == (SOURCE, width)
    assert model.target_embedding.weight.shape == model.output.weight.shape == (vocab, width)
    tables = [part for part in model.parameters() if part.shape in {(SOURCE, width), (vocab, width)}]
    assert len(tables) == 3 - tied - (one and tied)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 3.0])
def test_learned_positions_reach_as_far_as_decoding_goes(ratio):
    text, decode = TextConfig(max_length=7), DecodeConfig(max_ratio=ratio, max_extra=2)
    model = build(whole(transformer(positions="learned"), text=text, decode=decode), SOURCE, None)
    state = model.encode(torch.zeros(1, 7 + 1, dtype=torch.long), torch.tensor([7 + 1]))  # a source and its <eos>
    longest = min(2 * 7, int(ratio * (7 + 1)) + 2)  # a Predictor allows no more than twice text.max_length
    model.decode(torch.zeros(1, 1 + longest, dtype=torch.long), state)  # <bos> and the longest output


# --- every family ----------------------------------------------------------------------------------------------------


@every_kind
def test_batched_and_padded_is_alone(settings):
    model = made(settings)
    together = model(collate(PAIRS))
    for row, pair in enumerate(PAIRS):
        assert_close(together[row, : len(pair.target) + 1], model(collate([pair]))[0], **EXACT)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mixed", [False, True], ids=["sorted", "mixed"])
def test_many_sources_are_read_in_pieces(positions, mixed, monkeypatch):
    """The same numbers, in fewer cells; and whoever looks sees one map of all of them."""
    model = made(transformer(positions=positions)).eval()
    lengths = torch.tensor([1, 9, 1, 2, 3, 8, 1, 2, 4] if mixed else range(1, 10))
    source, cells = torch.randint(4, SOURCE, (9, 9)), []
    source = torch.where(torch.arange(9) < lengths[:, None], source, PAD)
    forward = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda x, mask: cells.append(x.shape[:2].numel()) or forward(x, mask))
    wanted = model.encode(source, lengths)
    assert cells == [81]
    with torch.no_grad():
        found = model.encode(source, lengths)
        assert lengths.sum() <= sum(cells[1:]) < 81
        hidden = [model.decode(torch.arange(9)[:, None], state)[0] for state in (wanted, found)]
        assert_close(hidden[1], hidden[0], **EXACT)
        del cells[:]
        with record(model) as maps:
            model.encode(source, lengths)
    assert cells == [81]
    assert maps["encoder.blocks.0.self_attention"].shape == (9, 3, 9, 9)


@every_kind
def test_what_comes_later_is_not_seen(settings):
    model, batch = made(settings), collate(PAIRS[2:])
    before = model(batch)
    changed = batch.target.clone()
    changed[0, 3] = 4
    after = model(batch._replace(target=changed))
    assert_close(after[:, :3], before[:, :3], **EXACT)
    assert (after[:, 3:] - before[:, 3:]).norm(dim=-1).min() > 1e-6


@every_kind
def test_every_word_of_the_source_matters(settings):
    model, batch = made(settings), collate(PAIRS[2:])
    before = model(batch)
    for place in range(6):
        source = batch.source.clone()
        source[0, place] = 11
        assert (model(batch._replace(source=source)) - before).abs().max() > 1e-6


@every_kind
def test_a_step_at_a_time_is_all_at_once(settings):
    model, batch = made(settings), collate(PAIRS[2:])
    state = first = model.start(batch.source, batch.lengths)
    wanted = model(batch)
    for place, token in enumerate(batch.target[0]):
        hidden, state = model.decode(token.view(1, 1), state)
        assert_close(model.output(hidden[:, 0]), wanted[:, place], **EXACT)
    logprobs, _ = model.step(batch.target[:, 0], first)
    assert_close(logprobs, wanted[:, 0].log_softmax(-1), **EXACT)


@every_kind
def test_every_parameter_learns(settings):
    model = made(settings).train()
    model(collate(PAIRS)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("settings", [rnn(dropout=0.5, layers=2), transformer(dropout=0.5)])
def test_dropout_works_in_training_alone(settings):
    model, batch = made(settings), collate(PAIRS)
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.equal(model(batch), model(batch))
