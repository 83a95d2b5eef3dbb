"""The text encoder that classifiers, readers and embeddings share: its window, its dropout of words, its mean."""

import pytest
import torch
from models import build
from oracles import EXACT, assert_half_dropped, entries, shaken
from oracles import exact as exact
from torch.testing import assert_close

from regard.config.data import ReverseData
from regard.config.model import EncoderConfig
from regard.config.run import Config
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import pad_sources
from regard.data.vocabulary import BOS, EOS, UNK, Vocabularies
from regard.errors import ConfigError
from regard.tasks import TASKS, make_task
from regard.tasks.encoder import EmbeddingTask, TextEncoder, mean_states

pytestmark = pytest.mark.usefixtures("exact")

WORDS = entries(13)
SIZES = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2, "dropout": 0.0}
TEXTS = [[BOS, 5, 7, EOS], [BOS, 9, 4, 4, 6, 8, EOS], [BOS, 12, EOS]]


def read(**changes):
    settings = EncoderConfig(kind="encoder", **SIZES | changes)
    return Config(data=ReverseData(kind="reverse"), model=settings, text=TextConfig(max_length=18))


def encoder(**changes):
    made = build(read(**changes), WORDS)
    assert type(made) is TextEncoder
    return shaken(made)


@pytest.mark.parametrize("window", [0, 2])
def test_texts_together_are_as_alone(window):
    model = encoder(conv_window=window)
    together, mask = model.states(*pad_sources(TEXTS))
    assert mask[:, 0, 0].sum(-1).tolist() == [4, 7, 3]
    for row, text in enumerate(TEXTS):
        alone, _ = model.states(*pad_sources([text]))
        assert_close(together[row, : len(text)], alone[0], **EXACT)


def test_a_window_sees_its_neighbours_alone():
    """Before the blocks, what stands outside the window of a token changes nothing of it."""
    model, mask = encoder(conv_window=1), torch.ones(1, 1, 1, 7, dtype=torch.bool)
    x = torch.randn(1, 7, 12)
    far = x.clone()
    far[:, 5] += 1
    changed = (model.convolve(x, mask) != model.convolve(far, mask)).any(-1)[0]
    assert changed.tolist() == [False] * 4 + [True] * 3


def test_words_are_hidden_while_training_only():
    model = encoder(word_dropout=0.1)
    source = torch.full((50, 401), 7)
    assert torch.equal(model.hide_words(source), source)
    hidden = model.train().hide_words(source) == UNK
    assert abs(hidden.double().mean().item() - 0.1) < 5 * (0.1 * 0.9 / hidden.numel()) ** 0.5
    special = torch.arange(4).repeat(50, 101)  # neither <pad>, <bos> nor <eos> is a word
    assert torch.equal(model.hide_words(special), special)


def test_the_states_are_those_of_the_words_that_are_left():
    model, (source, lengths) = encoder(word_dropout=0.5), pad_sources(TEXTS)
    torch.manual_seed(7)
    left = model.train().hide_words(source)
    torch.manual_seed(7)
    found, _ = model.states(source, lengths)
    assert not torch.equal(left, source)
    assert_close(found, model.eval().states(left, lengths)[0], **EXACT)


def test_the_window_sees_embeddings_of_which_half_are_dropped():
    model, arrived = encoder(conv_window=1, dropout=0.5, embedding_scale=False).train(), []
    model.convolution.register_forward_pre_hook(lambda part, inputs: arrived.append(inputs[0]))
    model.convolve(torch.ones(101, 7, 12), torch.ones(101, 1, 1, 7, dtype=torch.bool))
    assert_half_dropped(arrived[0])


def test_the_mean_is_of_what_is_real():
    states, mask = torch.randn(2, 3, 5), torch.tensor([[True, True, False], [False] * 3])[:, None, None]
    found = mean_states(states, mask)
    assert_close(found[0], states[0, :2].mean(0), **EXACT)
    assert not found[1].any()


@pytest.mark.parametrize(("kind", "extra"), [("classifier", 0), ("reader", 1)])
@pytest.mark.parametrize("longest", [7, 50])
def test_a_pretrained_encoder_gives_its_form_and_leaves_the_rest(kind, extra, longest):
    """What says how to train stays as it was set. A reader's context has an end of its own, which takes a place."""
    pretrained, own = read(dropout=0.1, positions="learned", layers=3), {"dropout": 0.3, "word_dropout": 0.2}
    target = Tokenization(kind="label") if kind == "classifier" else None
    raw = {"data": {"kind": "reverse"}, "model": {"kind": kind, "layers": 1, **own}}
    config = Config(**raw, text=TextConfig(target=target, max_length=longest))
    adopted = TASKS[kind].adopt(config, pretrained)
    form = {"size": 12, "heads": 3, "feedforward": 7, "layers": 3, "positions": "learned"}
    assert adopted.model == config.model.model_copy(update=form)
    assert adopted.text.max_length == min(longest, 18 - extra)
    assert (adopted.text.source, adopted.text.target) == (pretrained.text.source, target)


# --- an encoder alone ------------------------------------------------------------------------------------------------


def test_an_encoder_alone_gives_states_and_no_answers():
    task, model = make_task(read(), Vocabularies(WORDS, WORDS)), encoder()
    assert isinstance(task, EmbeddingTask)
    assert not task.gives_answers
    (source,) = task.encode(["abc"])
    assert source.ids == [BOS, *WORDS.encode("abc").ids, EOS]
    assert source.offsets == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 3)]
    states, lengths = task.states(model, *pad_sources([source.ids]))
    assert_close(states, model.states(*pad_sources([source.ids]))[0], **EXACT)
    assert lengths.tolist() == [5]
    assert task.metrics == ()
    with pytest.raises(NotImplementedError):
        model(None)


def test_an_encoder_alone_has_nothing_to_learn():
    with pytest.raises(ConfigError, match="an encoder alone has nothing to learn: train a classifier or a reader"):
        EmbeddingTask.check(read())
