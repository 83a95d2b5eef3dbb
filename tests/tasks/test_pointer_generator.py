"""Copying: the mixture is a distribution, its loss is what it says, and what is copied comes from the source."""

import pytest
import torch
from oracles import EXACT, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.config.config import Config, Tokenization, TransformerConfig
from regard.config.data import ReverseData
from regard.data.batching import Pair, collate
from regard.tasks.models import Copying, State, build, followed

pytestmark = pytest.mark.usefixtures("exact")

PAIRS = [Pair([5, 7, 12, 3], [4, 5]), Pair([3], []), Pair([9, 4, 4, 6, 8, 3], [10, 9, 8, 7, 6])]


@pytest.fixture
def model():
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    config = TransformerConfig(kind="transformer", copy_source=True, **sizes)
    made = build(Config(data=ReverseData(kind="reverse"), model=config), 13, None)
    assert isinstance(made, Copying)
    return shaken(made)


def test_the_mixture_is_a_distribution(model):
    assert_close(model(collate(PAIRS)).exp().sum(-1), torch.ones(3, 6), **EXACT)


def test_it_is_made_of_the_vocabulary_and_the_source(model):
    batch = collate(PAIRS[:1])
    state = model.encode(batch.source, batch.lengths)
    hidden = model.decode(batch.target, state)[0]
    own, other, places = model.mixed(hidden, state)
    wanted = own.exp() * model.output(hidden).softmax(-1)
    for place, token in enumerate(PAIRS[0].source):
        wanted[..., token] += (other.exp() * places)[..., place]
    assert_close(model(batch).exp(), wanted, **EXACT)
    assert_close(own.exp() + other.exp(), torch.ones_like(own), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_surprise(model, smoothing):
    batch = collate(PAIRS)
    real = batch.answer != 0
    plain = -(model(batch).gather(-1, batch.answer[..., None])[..., 0] * real).sum()
    loss = model.loss(batch, smoothing)
    assert_close(loss.plain, plain.detach(), **EXACT)
    made = model.output(model.hidden(batch)).log_softmax(-1).mean(-1)
    assert_close(loss.total, (1 - smoothing) * plain - smoothing * (made * real).sum(), **EXACT)
    assert loss.tokens == 10


def test_together_is_as_alone_and_step_as_whole(model):
    together = model(collate(PAIRS))
    for row, pair in enumerate(PAIRS):
        alone = collate([pair])
        wanted = model(alone)[0]
        assert_close(together[row, : len(wanted)], wanted, **EXACT)
        state = model.start(alone.source, alone.lengths)
        for place, token in enumerate(alone.target[0].tolist()):
            found, state = model.step(torch.tensor([token]), state)
            assert_close(found[0], wanted[place], **EXACT)


def test_hypotheses_of_one_sentence_share_its_source(model):
    batch = collate(PAIRS[:1])
    state = model.start(batch.source, batch.lengths)
    both, _ = model.step(torch.tensor([2, 5]), State(state.source, None))
    for row, token in enumerate((2, 5)):
        assert_close(both[row], model.step(torch.tensor([token]), state)[0][0], **EXACT)


def test_two_vocabularies_cannot_be_copied_between():
    model = {"kind": "transformer", "copy_source": True}
    with pytest.raises(ValueError, match=r"model\.copy_source needs one vocabulary"):
        Config(data=ReverseData(kind="reverse"), model=model, text={"target": Tokenization()})


def test_where_the_last_token_stands():
    """The next such place behind the one before, going round; unknown tokens leave it; padding is as good as any."""
    source = torch.tensor([[5, 6, 5, 7, 3, 0], [4, 4, 4, 3, 0, 0]])
    written = torch.tensor([[2, 5, 7, 5, 9, 5], [2, 4, 4, 4, 4, 8]])
    places = followed(written, source, torch.tensor([-1, -1]))
    assert places.tolist() == [[-1, 0, 3, 0, 0, 2], [-1, 0, 1, 2, 0, 0]]
    steps = torch.tensor([-1, -1])
    for step in range(6):
        steps = followed(written[:, step : step + 1], source, steps)[:, 0]
        assert steps.tolist() == places[:, step].tolist()
