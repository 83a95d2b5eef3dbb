"""The pointer-generator: its mixture is a distribution, its loss what it says, and copies come from the source."""

import pytest
import torch
from models import build
from oracles import EXACT, entries, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.config.data import ReverseData
from regard.config.model import TransformerConfig
from regard.config.run import Config
from regard.config.text import Tokenization
from regard.data.batching import Row, collate
from regard.nn.state import State
from regard.tasks.seq2seq import PointerGenerator, follow_copies

pytestmark = pytest.mark.usefixtures("exact")

ROWS = [Row([5, 7, 12, 3], [4, 5]), Row([3], []), Row([9, 4, 4, 6, 8, 3], [10, 9, 8, 7, 6])]


@pytest.fixture
def model():
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    config = TransformerConfig(kind="transformer", pointer_generator=True, **sizes)
    made = build(Config(data=ReverseData(kind="reverse"), model=config), entries(13))
    assert isinstance(made, PointerGenerator)
    return shaken(made)


def test_the_mixture_is_a_distribution(model):
    assert_close(model.logits(collate(ROWS)).exp().sum(-1), torch.ones(3, 6), **EXACT)


def test_it_is_made_of_the_vocabulary_and_the_source(model):
    batch = collate(ROWS[:1])
    state = model.encode(batch.source, batch.lengths)
    hidden = model.decode(batch.target, state)[0]
    own, other, places = model.mix(hidden, state)
    wanted = own.exp() * model.output(hidden).softmax(-1)
    for place, token in enumerate(ROWS[0].source):
        wanted[..., token] += (other.exp() * places)[..., place]
    assert_close(model.logits(batch).exp(), wanted, **EXACT)
    assert_close(own.exp() + other.exp(), torch.ones_like(own), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_surprise(model, smoothing):
    batch = collate(ROWS)
    real = batch.answer != 0
    plain = -(model.logits(batch).gather(-1, batch.answer[..., None])[..., 0] * real).sum()
    loss = model(batch, smoothing)
    assert_close(loss.plain, plain.detach(), **EXACT)
    made = model.output(model.hidden(batch)).log_softmax(-1).mean(-1)
    assert_close(loss.total, (1 - smoothing) * plain - smoothing * (made * real).sum(), **EXACT)
    assert loss.tokens == 10
    found = model.surprise(batch)
    assert_close(found.nats.sum(), plain, **EXACT)
    assert found.tokens.tolist() == [3, 1, 6]


def test_with_every_token_the_decoder_reads_where_it_stands_and_what_follows(model):
    """What is read is added to embeddings before they are scaled, so it is divided by their scale."""
    batch, arrived = collate(ROWS[:1]), []
    model.decoder.register_forward_pre_hook(lambda part, inputs: arrived.append(inputs[0]))
    model.logits(batch)
    first, second, *_ = model.encoder_states(batch.source, batch.lengths)[0]
    nothing = torch.zeros(12)
    near = torch.stack([torch.cat(pair) for pair in ((nothing, first), (nothing, first), (first, second))])
    assert batch.target.tolist() == [[2, 4, 5]]  # of these, 5 stands in the source, at its beginning
    wanted = model.target_embedding.weight[[2, 4, 5]] + model.here(near) / 12**0.5
    assert_close(arrived[0][0], wanted, **EXACT)


def test_together_is_as_alone_and_step_as_whole(model):
    together = model.logits(collate(ROWS))
    for number, row in enumerate(ROWS):
        alone = collate([row])
        wanted = model.logits(alone)[0]
        assert_close(together[number, : len(wanted)], wanted, **EXACT)
        state = model.start(alone.source, alone.lengths)
        for place, token in enumerate(alone.target[0].tolist()):
            found, state = model.step(torch.tensor([token]), state)
            assert_close(found[0], wanted[place], **EXACT)


def test_hypotheses_of_one_sentence_share_its_source(model):
    batch = collate(ROWS[:1])
    state = model.start(batch.source, batch.lengths)
    both, _ = model.step(torch.tensor([2, 5]), State(state.source, None))
    for row, token in enumerate((2, 5)):
        assert_close(both[row], model.step(torch.tensor([token]), state)[0][0], **EXACT)


def test_two_vocabularies_cannot_be_copied_between():
    model = {"kind": "transformer", "pointer_generator": True}
    with pytest.raises(ValueError, match=r"model\.pointer_generator needs one vocabulary"):
        Config(data=ReverseData(kind="reverse"), model=model, text={"target": Tokenization()})


def test_where_the_last_token_stands():
    """The next such place behind the one before, going round; unknown tokens leave it; padding is as good as any."""
    source = torch.tensor([[5, 6, 5, 7, 3, 0], [4, 4, 4, 3, 0, 0]])
    written = torch.tensor([[2, 5, 7, 5, 9, 5], [2, 4, 4, 4, 4, 8]])
    places = follow_copies(written, source, torch.tensor([-1, -1]))
    assert places.tolist() == [[-1, 0, 3, 0, 0, 2], [-1, 0, 1, 2, 0, 0]]
    steps = torch.tensor([-1, -1])
    for step in range(6):
        steps = follow_copies(written[:, step : step + 1], source, steps)[:, 0]
        assert steps.tolist() == places[:, step].tolist()
