"""The recurrent line against torch on single sentences, and against its equations written out (A1, A2)."""

import pytest
import torch
from oracles import EXACT, assert_half_dropped, shaken
from oracles import exact as exact
from pydantic import ValidationError
from torch.testing import assert_close

from regard.attention.normalizers import NORMALIZERS
from regard.config.model import RNNConfig
from regard.nn.recurrent import NETWORKS, RecurrentDecoder, RecurrentEncoder, WordEncoder

pytestmark = pytest.mark.usefixtures("exact")

CELLS = ["rnn", "gru", "lstm"]
ATTENTIONS = ["none", "dot", "scaled dot", "cosine", "general", "additive"]
LENGTHS = torch.tensor([3, 7, 1])


def settings(**changes):
    return RNNConfig(kind="rnn", **{"size": 6, "embedding": 5, "dropout": 0.0} | changes)


def sources(decoder, sentences=3):
    """What a decoder looks at, and its first state."""
    layers = len(decoder.cells)
    return decoder.begin(torch.randn(sentences, 7, 6), torch.randn(sentences, layers, 6), LENGTHS[:sentences])


# --- words and their soft parents ------------------------------------------------------------------------------------

PARENTS = ["softmax", "projective trees", "nonprojective trees"]


@pytest.mark.parametrize("kind", PARENTS)
def test_a_word_is_its_embedding_and_those_it_attends_to(kind):
    encoder = shaken(WordEncoder(settings(encoder=kind, cell="lstm")))
    x = torch.randn(3, 7, 5)
    found, mean = encoder(x, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        words = x[row : row + 1, :length]
        states, _ = encoder.states(words, LENGTHS[row : row + 1])
        keys = encoder.attention.projection.key(states)
        scores = encoder.attention.projection.query(states) @ keys.mT / 6**0.5
        weights = NORMALIZERS[kind](scores[:, None], None)[:, 0]
        wanted = torch.tanh(encoder.join(torch.cat([words, weights @ words], dim=-1)))[0]
        assert_close(found[row, :length], wanted, **EXACT)
        assert_close(mean[row, 0], wanted.mean(0), **EXACT)
        assert not found[row, length:].any()


def test_words_alone_know_nothing_of_each_other():
    encoder = shaken(WordEncoder(settings(encoder="words")))
    x = torch.randn(3, 7, 5)
    found, _ = encoder(x, torch.tensor([7, 7, 7]))
    assert_close(encoder(x.flip(1), torch.tensor([7, 7, 7]))[0], found.flip(1), **EXACT)


@pytest.mark.parametrize("normalize", ["projective trees", "matching"])
def test_a_decoder_has_one_query_at_a_time(normalize):
    with pytest.raises(ValidationError, match="weighs all queries of a text together, and a decoder has one at a time"):
        settings(normalize=normalize)
    with pytest.raises(ValidationError, match="'segments' needs scores"):
        settings(normalize="segments", attention="none")


# --- the encoder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_the_encoder_reads_as_torch_does_each_sentence_alone(cell, directions, layers):
    ours = shaken(RecurrentEncoder(settings(cell=cell, bidirectional=directions == 2, layers=layers)))
    theirs = NETWORKS[cell](5, 6 // directions, layers, batch_first=True, bidirectional=directions == 2)
    theirs.load_state_dict(ours.network.state_dict())
    x = torch.randn(3, 8, 5)
    states, last = ours(x, LENGTHS)
    assert states.shape == (3, 8, 6)
    assert last.shape == (3, layers, 6)
    for row, length in enumerate(LENGTHS.tolist()):
        wanted, ends = theirs(x[row, :length])
        ends = ends[0] if cell == "lstm" else ends  # (layer * directions, size / directions)
        assert_close(states[row, :length], wanted, **EXACT)
        assert not states[row, length:].any()
        for layer in range(layers):
            both = torch.cat([ends[layer * directions + way] for way in range(directions)])
            assert_close(last[row, layer], both, **EXACT)


def test_the_last_state_of_each_direction_is_at_its_own_end():
    encoder = shaken(RecurrentEncoder(settings()))
    states, last = encoder(torch.randn(3, 7, 5), LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(last[row, 0], torch.cat([states[row, length - 1, :3], states[row, 0, 3:]]))


def test_two_directions_need_an_even_size():
    with pytest.raises(ValidationError, match="size 7 is odd, and a bidirectional encoder gives half to each"):
        RNNConfig(kind="rnn", size=7)


def test_dropout_stands_between_layers_alone():
    assert RecurrentEncoder(settings(dropout=0.5)).network.dropout == 0
    assert RecurrentEncoder(settings(dropout=0.5, layers=2)).network.dropout == 0.5


# --- the decoder -----------------------------------------------------------------------------------------------------


def seen_by_hand(decoder, kind, state, states, length, last):
    """c_t: the encoder's last state, or sum_i a_i h_i with a = softmax(f(s, h_i)) over the words that exist."""
    attention = decoder.attention
    match kind:
        case "none":
            return last
        case "dot":
            energies = [state @ other for other in states[:length]]
        case "general":
            energies = [state @ attention.projection.key.weight @ other for other in states[:length]]
        case "additive":
            asked = attention.projection.query.weight @ state + attention.projection.query.bias
            keys = [attention.projection.key.weight @ other for other in states[:length]]
            energies = [attention.score.vector @ torch.tanh(asked + key) for key in keys]
    return torch.stack(energies).softmax(0) @ states[:length]


def gates(cell, x, state):
    """W x + b and U s + c, of every gate: (gates, size) each."""
    return (cell.weight_ih @ x + cell.bias_ih).view(-1, 6), (cell.weight_hh @ state + cell.bias_hh).view(-1, 6)


def gru_by_hand(cell, x, state):
    (reset_x, update_x, new_x), (reset_s, update_s, new_s) = gates(cell, x, state)
    reset, update = torch.sigmoid(reset_x + reset_s), torch.sigmoid(update_x + update_s)
    return (1 - update) * torch.tanh(new_x + reset * new_s) + update * state


def lstm_by_hand(cell, x, state, inner):
    enter, forget, new, leave = sum(gates(cell, x, state))
    inner = torch.sigmoid(forget) * inner + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(inner), inner


@pytest.mark.parametrize("kind", ["none", "dot", "general", "additive"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_step_is_its_equations(cell, kind):
    decoder = shaken(RecurrentDecoder(settings(cell=cell, attention=kind, layers=2)))
    states, last, x = torch.randn(3, 7, 6), torch.randn(3, 2, 6), torch.randn(3, 5)
    source, past = decoder.begin(states, last, LENGTHS)
    assert_close(past.hidden, torch.tanh(last @ decoder.bridge.weight.mT + decoder.bridge.bias), **EXACT)
    assert torch.equal(past.cell, past.hidden)  # an LSTM's cell begins as its state does
    past = past._replace(cell=torch.randn(3, 2, 6))
    joined, after = decoder.step(x, source, past)
    for row, length in enumerate(LENGTHS.tolist()):
        seen = seen_by_hand(decoder, kind, past.hidden[row, -1], states[row], length, last[row, -1])
        inputs = torch.cat([x[row], seen])
        for layer, network in enumerate(decoder.cells):
            if cell == "lstm":
                inputs, inner = lstm_by_hand(network, inputs, past.hidden[row, layer], past.cell[row, layer])
                assert_close(after.cell[row, layer], inner, **EXACT)
            else:
                inputs = gru_by_hand(network, inputs, past.hidden[row, layer])
            assert_close(after.hidden[row, layer], inputs, **EXACT)
        assert_close(joined[row], torch.cat([inputs, seen, x[row]]), **EXACT)


def test_dropout_stands_before_between_and_behind_the_decoders_layers():
    """All states are made 1, so that what a dropout of 0.5 leaves of them can be counted where they arrive."""
    decoder = RecurrentDecoder(settings(cell="rnn", attention="none", layers=2, dropout=0.5))
    for part in decoder.parameters():
        torch.nn.init.zeros_(part)
    for part in (*decoder.cells, decoder.join):
        torch.nn.init.constant_(part.bias_ih if part is not decoder.join else part.bias, 30.0)  # whose tanh is 1
    arrived = {}
    decoder.cells[0].register_forward_pre_hook(lambda part, inputs: arrived.update(first=inputs[0][:, :5]))
    decoder.cells[1].register_forward_pre_hook(lambda part, inputs: arrived.update(second=inputs[0]))
    decoder.join.register_forward_pre_hook(lambda part, inputs: arrived.update(join=inputs[0][..., :6]))
    source, first = decoder.begin(torch.ones(203, 7, 6), torch.ones(203, 2, 6), torch.full((203,), 7))
    arrived["out"], _ = decoder(torch.ones(203, 3, 5), source, first)
    for dropped in arrived.values():
        assert_half_dropped(dropped)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_at_a_time_is_all_at_once(cell, attention):
    decoder, x = shaken(RecurrentDecoder(settings(cell=cell, attention=attention, layers=2))), torch.randn(3, 4, 5)
    source, first = sources(decoder)
    wanted, end = decoder(x, source, first)
    past, steps = first, []
    for piece in x.unbind(1):
        step, past = decoder(piece[:, None], source, past)
        steps.append(step)
    assert_close(torch.cat(steps, dim=1), wanted, **EXACT)
    assert_close(past, end, **EXACT)
    joined, _ = decoder.step(x[:, 0], source, first)
    assert_close(wanted[:, 0], torch.tanh(decoder.join(joined)), **EXACT)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_hypotheses_of_one_sentence_look_at_the_same_source(attention, rows):
    decoder, state = shaken(RecurrentDecoder(settings(attention=attention))), torch.randn(3 * rows, 6)
    states, last = torch.randn(3, 7, 6), torch.randn(3, 1, 6)
    found = decoder.attend_source(state, decoder.begin(states, last, LENGTHS)[0])
    for place, row in enumerate(range(0, 3 * rows, rows)):
        one = slice(place, place + 1)
        alone, _ = decoder.begin(states[one], last[one], LENGTHS[one])
        for number in range(row, row + rows):
            assert_close(found[number : number + 1], decoder.attend_source(state[number : number + 1], alone), **EXACT)


def test_without_attention_the_context_is_the_last_state_at_every_step():
    decoder = shaken(RecurrentDecoder(settings(attention="none")))
    source, _ = sources(decoder)
    assert decoder.attention is None
    assert torch.equal(
        decoder.attend_source(torch.randn(3, 6), source), decoder.attend_source(torch.randn(3, 6), source)
    )


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_words_that_do_not_exist_are_not_seen(attention):
    decoder, state = shaken(RecurrentDecoder(settings(attention=attention))), torch.randn(3, 6)
    states, last = torch.randn(3, 7, 6), torch.randn(3, 1, 6)
    before = decoder.attend_source(state, decoder.begin(states, last, LENGTHS)[0])
    for row, length in enumerate(LENGTHS.tolist()):
        states[row, length:] = 1e3
    assert_close(decoder.attend_source(state, decoder.begin(states, last, LENGTHS)[0]), before, **EXACT)
