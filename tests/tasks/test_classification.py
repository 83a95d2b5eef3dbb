"""Classification: padding changes nothing, classes look where they may, members of an ensemble vote."""

import math

import pytest
import torch
from oracles import EXACT, assert_half_dropped, rival, shaken
from oracles import exact as exact
from torch.nn import functional
from torch.testing import assert_close

from regard.config.data import LabelledData
from regard.config.model import ClassifierConfig
from regard.config.run import Config
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Row, collate
from regard.data.examples import Dropped, Example, Ledger
from regard.data.vocabulary import BOS, EOS, PAD, Vocabularies, Vocabulary
from regard.errors import DataError
from regard.tasks import make_task
from regard.tasks.classification import Classifier
from regard.tasks.encoder import LABELS

pytestmark = pytest.mark.usefixtures("exact")

VOCAB, CLASSES = 13, 5
SIZES = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2, "dropout": 0.0}
TEXTS = [[BOS, 5, 7, EOS], [BOS, 9, 4, 4, 6, 8, EOS], [BOS, 12, EOS]]
WORDS = Vocabulary.learn(["a b c d e f ."], Tokenization(kind="word"))


def classifier(**changes):
    return shaken(Classifier(ClassifierConfig(kind="classifier", **SIZES | changes), VOCAB, CLASSES + LABELS, 20))


def batch_of(rows, answers=None):
    return collate(
        [Row(row, answer, False) for row, answer in zip(rows, answers or [[LABELS]] * len(rows), strict=True)]
    )


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("pooling", ["classes", "mean", "cls"])
def test_texts_together_are_as_alone(pooling, window):
    model = classifier(pooling=pooling, conv_window=window)
    together = model.logits(batch_of(TEXTS))
    for row, text in enumerate(TEXTS):
        assert_close(together[row], model.logits(batch_of([text]))[0], **EXACT)


def test_every_class_looks_as_in_torchs_own_layer():
    model, batch = classifier(), batch_of(TEXTS)
    states, mask = model.states(batch.source, batch.lengths)
    queries = model.classes.expand(len(TEXTS), -1, -1)
    seen, _ = rival(model.attention)(queries, states, states, key_padding_mask=~mask[:, 0, 0])
    wanted = (seen * model.output.weight).sum(-1) + model.output.bias
    assert_close(model.logits(batch), wanted / model.temperature, **EXACT)


@pytest.mark.parametrize("multi_label", [False, True])
def test_members_vote(multi_label):
    """All together are as likely as each finds on the mean; they learn each by itself, and a frozen table is one."""
    model, batch = (
        classifier(ensemble_size=3, multi_label=multi_label, freeze_vectors=multi_label),
        batch_of(TEXTS, [[LABELS + 1], [LABELS + 4], [LABELS]]),
    )
    model.temperature.fill_(1.0)
    members = [model, *model.ensemble]
    assert len({id(member.source_embedding) for member in members}) == (1 if multi_label else 3)
    votes = [member.own_logits(batch) for member in members]
    found = torch.stack([vote.sigmoid() if multi_label else vote.softmax(-1) for vote in votes])
    assert not torch.allclose(found[0], found[1])
    assert_close(model.probabilities(batch), found.mean(0), **EXACT)
    hot = torch.eye(CLASSES)[[1, 4, 0]]
    if multi_label:
        losses = [functional.binary_cross_entropy_with_logits(vote, hot, reduction="sum") for vote in votes]
    else:  # smoothed: a tenth of what is wanted lies on all classes alike
        losses = [-((0.9 * hot + 0.1 / CLASSES) * vote.log_softmax(-1)).sum() for vote in votes]
    assert_close(model(batch, 0.1).total, sum(losses) / 3, **EXACT)
    assert model(batch).tokens == 3
    own = [torch.autograd.grad(loss, member.output.bias)[0] for loss, member in zip(losses, members, strict=True)]
    model(batch, 0.1).total.backward()
    for member, gradient in zip(members, own, strict=True):
        assert_close(3 * member.output.bias.grad, gradient, **EXACT)


def test_one_label_is_cross_entropy_and_several_are_binary():
    batch = batch_of(TEXTS, [[LABELS + 1], [LABELS + 4], [LABELS]])
    model = classifier()
    logits = model.logits(batch) * model.temperature  # which is fitted after training: the loss knows nothing of it
    wanted = functional.cross_entropy(logits, torch.tensor([1, 4, 0]), reduction="sum")
    assert_close(model(batch).total, wanted, **EXACT)
    assert model(batch).tokens == 3
    several = collate([Row(TEXTS[0], [LABELS, LABELS + 3], False), Row(TEXTS[2], [LABELS + 1], False)])
    model = classifier(multi_label=True)
    hot = torch.tensor([[1.0, 0, 0, 1, 0], [0, 1, 0, 0, 0]])
    logits = model.logits(several) * model.temperature
    wanted = functional.binary_cross_entropy_with_logits(logits, hot.double(), reduction="sum")
    assert_close(model(several).total, wanted.double(), **EXACT)
    assert model(several).tokens == 3


@pytest.mark.parametrize(("multi_label", "size"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_the_surprise_of_every_row_is_its_share_of_the_plain_loss(multi_label, size):
    model = classifier(multi_label=multi_label, ensemble_size=size)
    wanted = [[LABELS, LABELS + 3], [PAD], [LABELS + 1]] if multi_label else [[LABELS + 1], [LABELS + 4], [LABELS]]
    batch = batch_of(TEXTS, wanted)
    found = model.surprise(batch)
    assert found.tokens.tolist() == ([2, 1, 1] if multi_label else [1, 1, 1])
    assert_close(found.nats.sum(), model(batch, 0.1).plain, **EXACT)
    assert model(batch).tokens == found.tokens.sum()
    for row in range(3):
        alone = model.surprise(batch_of(TEXTS[row : row + 1], wanted[row : row + 1]))
        assert_close(alone.nats[0], found.nats[row], **EXACT)


@pytest.mark.parametrize("pooling", ["classes", "mean", "cls"])
def test_half_of_what_the_classes_judge_is_dropped(pooling):
    """All that a class judges by is made 1, and it judges by one element alone."""
    model, batch = classifier(pooling=pooling, dropout=0.5, layers=1).train(), batch_of(TEXTS * 67)
    last = model.encoder.norm if model.attention is None else model.attention.output
    for part in (last.weight, model.output.weight, model.output.bias):
        torch.nn.init.zeros_(part)
    torch.nn.init.ones_(last.bias)
    torch.nn.init.ones_(model.output.weight[:, 0])
    assert_half_dropped(model.own_logits(batch))
    assert (model.eval().own_logits(batch) == 1).all()


class Sure(torch.nn.Module):
    """A model that always says the same: logits (batch, classes) over its temperature."""

    def __init__(self, logits, temperature):
        super().__init__()
        self.fixed, self.temperature = logits, torch.nn.Parameter(torch.tensor([temperature]), requires_grad=False)

    def logits(self, batch):
        return self.fixed.expand(len(batch.answer), -1) / self.temperature


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("multi_label", [False, True])
def test_the_temperature_makes_three_of_four_likely_by_three_quarters(multi_label, temperature):
    """A model that says log 9 where log 3 is right is half as sure at a temperature of 2, whatever it had before."""
    task = labelled(["good", "bad"], separator="," if multi_label else "", multi_label=multi_label)
    batch = batch_of([TEXTS[0]] * 4, [[LABELS]] * 3 + [[LABELS + 1]])
    both = math.log(9) * torch.tensor([1.0, -1.0] if multi_label else [1.0, 0.0])
    found = task.calibrate(Sure(both, temperature), lambda: [batch])
    assert found["temperature"].tolist() == pytest.approx([2.0])


def test_a_text_that_is_always_right_is_not_made_sure_of_everything():
    batch = batch_of([TEXTS[0]] * 4, [[LABELS]] * 4)
    found = labelled(["good", "bad"]).calibrate(Sure(torch.tensor([1.0, 0.0]), 1.0), lambda: [batch])
    assert found["temperature"].tolist() == pytest.approx([0.5])


# --- labels ----------------------------------------------------------------------------------------------------------


def labelled(labels, separator="", **changes):
    """A task that gives these labels."""
    settings = Tokenization(kind="label", separator=separator)
    config = Config(
        data=LabelledData(kind="labelled", train=("x",)),
        text=TextConfig(source=Tokenization(kind="word"), target=settings),
        model=ClassifierConfig(kind="classifier", **SIZES | changes),
    )
    return make_task(config, Vocabularies(WORDS, Vocabulary.learn(labels, settings)))


def test_a_label_that_training_never_saw():
    task = labelled(["good", "bad"])
    task.check_examples([Example("a", "bad", "x:2")])
    with pytest.raises(DataError, match=r"x:1 has the label 'fine', which training never saw\. Known: bad, good\."):
        task.check_examples([Example("a", "bad", "x:2"), Example("a", "fine", "x:1")])


def test_rows_are_texts_in_a_frame_and_ids_of_labels():
    task = labelled(["red", "blue", "green"], separator=",", multi_label=True)
    red, blue = (task.target.find(name) for name in ("red", "blue"))
    rows = task.encode_examples([Example("a b", "red,blue", "x:1"), Example("c", "", "x:2")], Ledger(read=2, kept=2))
    assert rows == [
        Row([BOS, *WORDS.encode("a b").ids, EOS], [red, blue], False),
        Row([BOS, *WORDS.encode("c").ids, EOS], [PAD], False),
    ]


def test_a_text_without_labels_is_an_example_only_where_it_may_have_several():
    nothing = Example("a", " ", "x:1")
    assert labelled(["good", "bad"]).accept(nothing, labelled(["good", "bad"]).config) == Dropped("empty", "x:1")
    several = labelled(["good", "bad"], separator=",", multi_label=True)
    assert several.accept(nothing, several.config) == nothing._replace(target="")
    assert several.accept(Example(" ", "good", "x:2"), several.config) == Dropped("empty", "x:2")


def test_one_label_is_chosen_and_several_are_all_that_are_likely():
    chances = torch.tensor([0.2, 0.7, 0.1])
    names = [labelled(["good", "bad", "fine"]).target.token(LABELS + i) for i in range(3)]
    found = labelled(["good", "bad", "fine"]).choose(chances, best=2)
    assert [one.text for one in found] == [names[1], names[0]]
    assert [one.details["probability"] for one in found] == pytest.approx([0.7, 0.2])
    assert [one.score for one in found] == pytest.approx([math.log(0.7), math.log(0.2)])
    assert [[token.id for token in one.tokens] for one in found] == [[LABELS + 1], [LABELS]]
    task = labelled(["good", "bad", "fine"], separator=", ", multi_label=True)
    (all_of,) = task.choose(torch.tensor([0.6, 0.1, 0.9]), best=3)
    assert all_of.text == f"{names[2]}, {names[0]}"
    assert all_of.score == pytest.approx(math.log(0.6 * 0.9 * 0.9))
    assert [token.text for token in all_of.tokens] == [names[2], names[0], names[1]]


def test_labels_are_compared_in_any_order():
    task = labelled(["red", "dark blue", "green"], separator=",", multi_label=True)
    assert task.canonical(["red,green", "green, red,red", ""]) == ["green,red", "green,red", ""]


def test_labels_are_whole_texts_or_separated():
    one = Vocabulary.learn(["New York, NY", "a"], Tokenization(kind="label"))
    assert one.decode(one.encode("New York, NY").ids) == "New York, NY"
    several = Vocabulary.learn(["red, dark blue", "green"], Tokenization(kind="label", separator=","))
    assert [several.token(i) for i in several.encode("dark blue,green").ids] == ["dark blue", "green"]
