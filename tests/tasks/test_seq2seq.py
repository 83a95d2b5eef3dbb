"""Encoder-decoders: what is shared, what padding and the future may not change, and that everything learns."""

import itertools

import pytest
import torch
from models import build
from oracles import EXACT, assert_half_dropped, entries, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.config.data import ReverseData
from regard.config.model import RNNConfig, TransformerConfig
from regard.config.run import Config, DecodeConfig
from regard.config.text import TextConfig
from regard.data.batching import Row, collate
from regard.data.vocabulary import PAD
from regard.explain.recorder import record
from regard.tasks.seq2seq import RecurrentSeq2Seq, Transformer

pytestmark = pytest.mark.usefixtures("exact")

SOURCE, TARGET = entries(13), entries(11)
ROWS = [Row([5, 7, 12, 3], [4, 5]), Row([3], []), Row([9, 4, 4, 6, 8, 3], [10, 9, 8, 7, 6])]


def rnn(**changes):
    return RNNConfig(kind="rnn", **{"size": 6, "embedding": 5, "dropout": 0.0} | changes)


def transformer(**changes):
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    return TransformerConfig(kind="transformer", **sizes | changes)


def whole(model, **groups):
    return Config(data=ReverseData(kind="reverse"), model=model, **groups)


CELLS, ATTENTIONS = ["rnn", "gru", "lstm"], ["none", "dot", "scaled dot", "general", "additive"]
POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
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


def made(settings):
    return shaken(build(whole(settings), SOURCE, TARGET))


# --- build -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "family"), [(rnn(), RecurrentSeq2Seq), (transformer(), Transformer)])
def test_build_makes_the_family_from_the_seed(settings, family):
    first, again, other = (build(whole(settings), SOURCE, TARGET, seed) for seed in (1, 1, 2))
    assert isinstance(first, family)
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    assert not all(map(torch.equal, first.state_dict().values(), other.state_dict().values()))
    assert first.logits(collate(ROWS)).shape == (3, 6, 11)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("one", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("kind", [rnn, transformer])
def test_embeddings_are_shared_as_set(kind, one, tied):
    model = build(whole(kind(tie_embeddings=tied)), SOURCE, None if one else TARGET)
    vocab, width = 13 if one else 11, 5 if kind is rnn else 12
    assert (model.target_embedding is model.source_embedding) == (one and tied)
    assert (model.output.weight is model.target_embedding.weight) == tied
    assert model.source_embedding.weight.shape == (13, width)
    assert model.target_embedding.weight.shape == model.output.weight.shape == (vocab, width)
    tables = [part for part in model.parameters() if part.shape in {(13, width), (vocab, width)}]
    assert len(tables) == 3 - tied - (one and tied)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 3.0])
def test_learned_positions_reach_as_far_as_decoding_goes(ratio):
    text, decode = TextConfig(max_length=7), DecodeConfig(max_ratio=ratio, max_extra=2)
    model = build(whole(transformer(positions="learned"), text=text, decode=decode), SOURCE)
    state = model.encode(torch.zeros(1, 7 + 1, dtype=torch.long), torch.tensor([7 + 1]))  # a source and its <eos>
    longest = min(2 * 7, int(ratio * (7 + 1)) + 2)  # a Predictor allows no more than twice text.max_length
    model.decode(torch.zeros(1, 1 + longest, dtype=torch.long), state)  # <bos> and the longest output


# --- every family ----------------------------------------------------------------------------------------------------


@every_kind
def test_batched_and_padded_is_alone(settings):
    model = made(settings)
    together = model.logits(collate(ROWS))
    for number, row in enumerate(ROWS):
        assert_close(together[number, : len(row.target) + 1], model.logits(collate([row]))[0], **EXACT)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mixed", [False, True], ids=["sorted", "mixed"])
def test_many_sources_are_read_as_each_alone(positions, mixed):
    """Whether something is learned or not; and whoever looks sees one map of all of them."""
    model = made(transformer(positions=positions))
    lengths = torch.tensor([1, 9, 1, 2, 3, 8, 1, 2, 4] if mixed else range(1, 10))
    source = torch.randint(4, SOURCE.size, (9, 9))
    source = torch.where(torch.arange(9) < lengths[:, None], source, PAD)
    wanted = model.encode(source, lengths)
    with torch.no_grad(), record(model) as maps:
        found = model.encode(source, lengths)
    assert maps["encoder.blocks.0.self_attention"].shape == (9, 3, 9, 9)
    hidden = [model.decode(torch.arange(9)[:, None], state)[0] for state in (wanted, found)]
    assert_close(hidden[1], hidden[0], **EXACT)
    for row, length in enumerate(lengths.tolist()):
        alone = model.encode(source[row : row + 1, :length], lengths[row : row + 1])
        assert_close(model.decode(torch.tensor([[row]]), alone)[0][0], hidden[0][row], **EXACT)


@every_kind
def test_what_comes_later_is_not_seen(settings):
    model, batch = made(settings), collate(ROWS[2:])
    before = model.logits(batch)
    changed = batch.target.clone()
    changed[0, 3] = 4
    after = model.logits(batch._replace(target=changed))
    assert_close(after[:, :3], before[:, :3], **EXACT)
    assert (after[:, 3:] - before[:, 3:]).norm(dim=-1).min() > 1e-6


@every_kind
def test_every_word_of_the_source_matters(settings):
    model, batch = made(settings), collate(ROWS[2:])
    before = model.logits(batch)
    for place in range(6):
        source = batch.source.clone()
        source[0, place] = 11
        assert (model.logits(batch._replace(source=source)) - before).abs().max() > 1e-6


@every_kind
def test_a_step_at_a_time_is_all_at_once(settings):
    model, batch = made(settings), collate(ROWS[2:])
    state = first = model.start(batch.source, batch.lengths)
    wanted = model.logits(batch)
    for place, token in enumerate(batch.target[0]):
        hidden, state = model.decode(token.view(1, 1), state)
        assert_close(model.output(hidden[:, 0]), wanted[:, place], **EXACT)
    logprobs, _ = model.step(batch.target[:, 0], first)
    assert_close(logprobs, wanted[:, 0].log_softmax(-1), **EXACT)


@every_kind
def test_the_loss_and_the_surprise_are_of_the_logits(settings):
    model, batch = made(settings), collate(ROWS)
    logprobs, real = model.logits(batch).log_softmax(-1), batch.answer != PAD
    nats = -(logprobs.gather(-1, batch.answer[..., None])[..., 0] * real).sum(1)
    found = model.surprise(batch)
    assert_close(found.nats, nats, **EXACT)
    assert found.tokens.tolist() == [3, 1, 6]
    for smoothing in (0.0, 0.1):
        loss = model(batch, smoothing)
        assert_close(loss.plain, nats.sum().detach(), **EXACT)
        uniform = -(logprobs.mean(-1) * real).sum()
        assert_close(loss.total, (1 - smoothing) * nats.sum() + smoothing * uniform, **EXACT)
        assert loss.tokens == 10


@every_kind
def test_what_start_reads_is_what_encode_reads(settings):
    model, batch = made(settings), collate(ROWS)
    states = [begin(batch.source, batch.lengths) for begin in (model.encode, model.start)]
    assert_close(*(model.decode(batch.target, state)[0] for state in states), **EXACT)


@every_kind
def test_every_parameter_learns(settings):
    model = made(settings).train()
    model.logits(collate(ROWS)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("settings", [rnn(dropout=0.5), transformer(dropout=0.5, positions="none")], ids=["rnn", "t"])
def test_dropout_thins_both_embeddings_in_training_alone(settings):
    """What reaches the first layers of the encoder and of the decoder, when every embedding is 1."""
    model, batch, arrived = made(settings), collate(ROWS * 67), []
    for embedding in (model.source_embedding, model.target_embedding):
        torch.nn.init.constant_(embedding.weight, 1 / getattr(model.encoder, "scale", 1))
    if isinstance(model, Transformer):
        firsts = [stack.blocks[0].residuals[0] for stack in (model.encoder, model.decoder)]
    else:
        firsts = [model.encoder.network, model.decoder.cells[0]]
    for part in firsts:
        part.register_forward_pre_hook(lambda part, inputs: arrived.append(getattr(inputs[0], "data", inputs[0])))
    assert torch.equal(model.logits(batch), model.logits(batch))
    assert all((x[..., :5] == 1).all() for x in arrived)
    arrived.clear()
    model.train().logits(batch)
    for x in (arrived[0], arrived[1][..., :5]):  # a recurrent decoder's input has the context behind it
        assert_half_dropped(x)
