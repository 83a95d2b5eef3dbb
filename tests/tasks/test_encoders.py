"""Encoders and what looks at them: padding changes nothing, classes and questions look where they may."""

import pytest
import torch
from oracles import EXACT, rival, shaken
from oracles import exact as exact
from torch.nn import functional
from torch.testing import assert_close

from regard.config.config import ClassifierConfig, Config, ReaderConfig, TextConfig, Tokenization
from regard.config.data import SquadData
from regard.data.batching import Batch, Framed, Pair, collate, encode, framed
from regard.data.files import Example
from regard.data.splits import Ledger
from regard.data.vocabulary import BOS, EOS, Vocabulary
from regard.errors import DataError
from regard.explain.recorder import record
from regard.inference.predictor import Predictor
from regard.tasks.encoders import LABELS, Classifier, Reader, shared
from regard.tasks.models import build

pytestmark = pytest.mark.usefixtures("exact")

VOCAB, CLASSES = 13, 5
SIZES = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2, "dropout": 0.0}
TEXTS = [[BOS, 5, 7, EOS], [BOS, 9, 4, 4, 6, 8, EOS], [BOS, 12, EOS]]
STORIES = [
    [BOS, 5, 7, EOS, 9, 4, EOS, 6, 8, 12, EOS],
    [BOS, 5, EOS, 7, EOS, 8, 9, EOS, 10, EOS],
    [BOS, 6, EOS, 4, 4, EOS],
]
WORDS = Vocabulary.learn(["a b c d e f ."], Tokenization(kind="word"))


def classifier(**changes):
    return shaken(Classifier(ClassifierConfig(kind="classifier", **SIZES | changes), VOCAB, CLASSES + LABELS, 20))


def reader(**changes):
    config = ReaderConfig(kind="reader", **SIZES | changes)
    return shaken(Reader(config, VOCAB, CLASSES + LABELS, 20))


def batch_of(rows, answers=None):
    return collate(
        [Pair(row, answer, False) for row, answer in zip(rows, answers or [[LABELS]] * len(rows), strict=True)]
    )


READERS = {
    "words": {"answer": "word"},
    "sentences": {"answer": "word", "unit": "sentence"},
    "shared": {"answer": "word", "unit": "sentence", "shared": True},
    "spans": {"answer": "span"},
}


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("pool", ["classes", "mean", "cls"])
def test_texts_together_are_as_alone(pool, window):
    model = classifier(pool=pool, window=window)
    together = model(batch_of(TEXTS))
    for row, text in enumerate(TEXTS):
        assert_close(together[row], model(batch_of([text]))[0], **EXACT)


@pytest.mark.parametrize("kind", READERS)
def test_questions_together_are_as_alone(kind):
    model = reader(**READERS[kind])
    together = model(batch_of(STORIES))
    for row, story in enumerate(STORIES):
        alone = model(batch_of([story]))[0]
        assert_close(together[row][..., : alone.shape[-1]], alone, **EXACT)


def test_every_class_looks_as_in_torchs_own_layer():
    model, batch = classifier(), batch_of(TEXTS)
    states, mask = model.states(batch.source, batch.lengths)
    queries = model.classes.expand(len(TEXTS), -1, -1)
    seen, _ = rival(model.attention)(queries, states, states, key_padding_mask=~mask[:, 0, 0])
    wanted = (seen * model.output.weight).sum(-1) + model.output.bias
    assert_close(model(batch), wanted / model.temperature, **EXACT)


@pytest.mark.parametrize("multiple", [False, True])
def test_members_vote(multiple):
    """All together are as likely as each finds on the mean; they learn each by itself, and a frozen table is one."""
    model, batch = (
        classifier(members=3, multiple=multiple, freeze_vectors=multiple),
        batch_of(TEXTS, [[LABELS + 1], [LABELS + 4], [LABELS]]),
    )
    model.temperature.fill_(1.0)
    members = [model, *model.others]
    assert len({id(member.source_embedding) for member in members}) == (1 if multiple else 3)
    votes = [member.vote(batch) for member in members]
    found = torch.stack([vote.sigmoid() if multiple else vote.softmax(-1) for vote in votes])
    assert not torch.allclose(found[0], found[1])
    assert_close(model.probabilities(batch), found.mean(0), **EXACT)
    losses = [model.judged(vote, batch, 0.1) for vote in votes]
    assert_close(model.loss(batch, 0.1).total, sum(loss.total for loss in losses) / 3, **EXACT)
    assert model.loss(batch).tokens == losses[0].tokens
    own = [torch.autograd.grad(loss.total, member.output.bias)[0] for loss, member in zip(losses, members, strict=True)]
    model.loss(batch, 0.1).total.backward()
    for member, gradient in zip(members, own, strict=True):
        assert_close(3 * member.output.bias.grad, gradient, **EXACT)


def test_one_label_is_cross_entropy_and_several_are_binary():
    batch = batch_of(TEXTS, [[LABELS + 1], [LABELS + 4], [LABELS]])
    model = classifier()
    logits = model(batch) * model.temperature  # which is fitted after training: the loss knows nothing of it
    wanted = functional.cross_entropy(logits, torch.tensor([1, 4, 0]), reduction="sum")
    assert_close(model.loss(batch).total, wanted, **EXACT)
    assert model.loss(batch).tokens == 3
    several = collate([Pair(TEXTS[0], [LABELS, LABELS + 3], False), Pair(TEXTS[2], [LABELS + 1], False)])
    model = classifier(multiple=True)
    hot = torch.tensor([[1.0, 0, 0, 1, 0], [0, 1, 0, 0, 0]])
    logits = model(several) * model.temperature
    wanted = functional.binary_cross_entropy_with_logits(logits, hot.double(), reduction="sum")
    assert_close(model.loss(several).total, wanted.double(), **EXACT)
    assert model.loss(several).tokens == 3


def test_a_window_sees_its_neighbours_alone():
    """Before the blocks, what stands outside the window of a token changes nothing of it."""
    model, mask = classifier(window=1), torch.ones(1, 1, 1, 7, dtype=torch.bool)
    x = torch.randn(1, 7, 12)
    far = x.clone()
    far[:, 5] += 1
    changed = (model.mixed(x, mask) != model.mixed(far, mask)).any(-1)[0]
    assert changed.tolist() == [False] * 4 + [True] * 3


def test_hidden_tokens_are_drawn_while_training_only():
    model = classifier(token_dropout=0.5)
    source = torch.full((50, 40), 7)
    assert torch.equal(model.hide(source), source)
    share = float((model.train().hide(source) == 1).float().mean())
    assert 0.4 < share < 0.6
    special = torch.tensor([[0, 1, 2, 3]])
    assert torch.equal(model.hide(special), special)


# --- readers ---------------------------------------------------------------------------------------------------------


def test_sentences_are_sums_of_their_words_the_latest_first():
    model, story = reader(unit="sentence", answer="word"), STORIES[1]
    seen = []
    model.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(batch_of([story]))
    parts = [[BOS, 5, EOS], [10, EOS], [8, 9, EOS], [7, EOS]]
    table, order = model.source_embedding.weight, model.order
    wanted = torch.stack([sum(table[token] * order[place] for place, token in enumerate(part)) for part in parts])
    assert_close(seen[0][0], wanted, **EXACT)


def test_where_a_question_looks_is_the_span():
    model = reader(answer="span")
    with record(model) as maps:
        logits = model(batch_of(STORIES[:1]))
    weights = maps["pointer"]
    assert_close(logits.softmax(-1), weights[:, 0], **EXACT)
    seen = [place for place, weight in enumerate(weights[0, 0, 0].tolist()) if weight]
    assert seen == [4, 5, 7, 8, 9]  # the context, without its <eos>


@pytest.mark.parametrize("kind", ["words", "sentences", "shared"])
def test_the_question_looks_at_the_context_alone(kind):
    model = reader(**READERS[kind])
    with record(model, lambda name: name == "attention") as maps:
        model(batch_of(STORIES[:1]))
    weights = maps["attention"][0].mean(0)[0].tolist()
    hidden = [0] if "unit" in READERS[kind] else [0, 1, 2, 3, 6, 10]
    assert [place for place, weight in enumerate(weights) if not weight] == hidden


def test_shared_layers_are_one_block():
    model = reader(**READERS["shared"])
    assert len(model.encoder.blocks) == 2
    assert len({id(block) for block in model.encoder.blocks}) == 1
    assert sum("blocks" in name for name, _ in model.named_parameters()) == sum(
        "blocks.0." in name for name, _ in reader(**READERS["sentences"]).named_parameters()
    )


def test_a_span_is_learned_by_its_ends():
    model, batch = reader(answer="span"), batch_of(STORIES, [[4, 5], [6, 7], [3, 4]])
    logits = model(batch)
    wanted = sum(functional.cross_entropy(logits[:, i], batch.answer[:, i], reduction="sum") for i in range(2))
    assert_close(model.loss(batch).total, wanted, **EXACT)


# --- texts as models read them ---------------------------------------------------------------------------------------


def test_frames_keep_offsets():
    text = TextConfig(max_length=20)
    question = "a b ?\tc d . e f ."
    (found,) = framed([question], WORDS, text, ReaderConfig(kind="reader"))
    assert found.ids.count(EOS) == 2
    assert found.ids[0] == BOS
    assert [question[a:b] for a, b in found.offsets if a < b] == ["a", "b", "?", "c", "d", ".", "e", "f", "."]
    (found,) = framed([question], WORDS, text, ReaderConfig(kind="reader", unit="sentence", answer="word"))
    assert found.ids.count(EOS) == 3
    (cut,) = framed(
        [question], WORDS, TextConfig(max_length=8), ReaderConfig(kind="reader", unit="sentence", answer="word")
    )
    assert [question[a:b] for a, b in cut.offsets if a < b] == [
        "a",
        "b",
        "?",
        "e",
        "f",
        ".",
    ]  # the oldest sentence goes
    assert cut.length == 11  # the words, and an end for each sentence


def test_what_is_cut_off_is_counted():
    """Ends of sentences take room, so a story that does not fit is longer than its words; a question that fits with its
    context is not cut."""
    stories = ReaderConfig(kind="reader", unit="sentence", answer="word")
    text = "a b c\t" + "d e. " * 14
    (row,) = framed([text.strip()], WORDS, TextConfig(max_length=32), stories)
    assert row.ids.count(EOS) - 1 < 14
    assert row.length > 32
    (whole,) = framed([text.strip()], WORDS, TextConfig(max_length=row.length), stories)
    assert whole.ids.count(EOS) - 1 == 14
    (asked,) = framed(["a b c d e f\ta"], WORDS, TextConfig(max_length=8), ReaderConfig(kind="reader"))
    assert (len(asked.ids), asked.length) == (6 + 1 + 3, 7)


@pytest.mark.parametrize("start", [None, 4])
def test_spans_are_found_by_tokens(start):
    settings = ReaderConfig(kind="reader", answer="span")
    example = Example("a\tc d c d e", "c d", "x:1", start)
    (pair,) = encode([example], WORDS, WORDS, TextConfig(), Ledger(), settings)
    first = 3 + (2 if start else 0)
    assert pair == Pair([BOS, WORDS.find("a"), EOS, *WORDS.encode("c d c d e").ids, EOS], [first, first + 1], False)


def test_an_answer_that_is_not_in_its_context_is_dropped_and_said():
    settings, ledger = ReaderConfig(kind="reader", answer="span"), Ledger(read=3, kept=3)
    examples = [Example("a\tb c", "d", "x:1"), Example("a\tb c", "c", "x:2", 1), Example("a\tb c", "c", "x:3", 2)]
    assert len(encode(examples, WORDS, WORDS, TextConfig(), ledger, settings)) == 1
    assert ledger.dropped == {"answer not in context": ["x:1", "x:2"]}
    assert ledger.kept == 1


def test_a_label_that_training_never_saw():
    labels = Vocabulary.learn(["good", "bad"], Tokenization(kind="label"))
    settings = ClassifierConfig(kind="classifier")
    with pytest.raises(DataError, match=r"x:1 has the label 'fine', which training never saw\. Known: bad, good\."):
        encode([Example("a", "fine", "x:1")], WORDS, labels, TextConfig(), Ledger(), settings)


def test_labels_are_whole_texts_or_separated():
    one = Vocabulary.learn(["New York, NY", "a"], Tokenization(kind="label"))
    assert one.decode(one.encode("New York, NY").ids) == "New York, NY"
    several = Vocabulary.learn(["red, dark blue", "green"], Tokenization(kind="label", separator=","))
    assert [several.token(i) for i in several.encode("dark blue,green").ids] == ["dark blue", "green"]


def test_parts_of_a_context_are_the_likeliest_of_all():
    from regard.inference.predictor import part as part_of

    model = reader(answer="span")
    text = "q\tc d e f"
    source = Framed(text, STORIES[0][:7], [(0, 0), (0, 1), (0, 1), (1, 1), (2, 3), (4, 5), (5, 5)], 5)
    predictor = object.__new__(Predictor)
    predictor.model = model
    ids, lengths = torch.tensor([source.ids]), torch.tensor([7])
    logits = model(Batch(ids, lengths, ids, ids)).log_softmax(-1)[0].detach()
    every = {(i, j): float(logits[0, i] + logits[1, j]) for i in (4, 5) for j in (4, 5) if i <= j}
    real = predictor.pointed([source], best=100)[0]
    assert len({output.span for output in real}) == len(real) == len(every)
    assert [output.score for output in real] == pytest.approx(sorted(every.values(), reverse=True))
    best = max(every, key=every.get)
    assert real[0] == part_of(source, *best, real[0].score)
    assert text.partition("\t")[2][slice(*real[0].span)] == real[0].text


def test_a_context_of_white_space_and_little_else():
    """However likely white space is, an answer is none of it; where nothing else is left, the answer is empty."""
    letters = Vocabulary.learn(["q x y", "\t"], Tokenization(kind="char"))
    torch.manual_seed(0)
    settings = ReaderConfig(kind="reader", size=16, feedforward=16, heads=2, layers=1)
    config = Config(
        data=SquadData(kind="squad", train=("x",)), text=TextConfig(max_length=100, longer="cut"), model=settings
    )
    predictor = Predictor(build(config, letters.size, None), config, letters, None)
    assert predictor("q\t" + 60 * " " + "x" + 20 * " ") == "x"
    assert {output.text for output in predictor.predict(["q\tx   \n   y"], best=9)[0]} == {"x", "y", "x   \n   y"}
    ((nothing,),) = predictor.predict(["q\t" + 200 * " " + "x"])
    assert (nothing.text, nothing.span) == ("", (0, 0))
    assert predictor.cut == 1
    short, long = "q\tx   y", "q\t" + 30 * " " + "x y"
    assert [one[0].text for one in predictor.predict([short, long])] == [predictor(short), predictor(long)]


def test_what_question_and_context_share():
    source = torch.tensor([[BOS, 5, 7, EOS, 7, 4, 7, EOS, 0, 0], [BOS, 6, EOS, 8, 9, 10, 6, 11, 6, EOS]])
    asked = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]]).bool()
    told = ~asked & (source != 0)
    assert shared(source, asked, told).int().tolist() == [
        [0, 0, 1, 0, 1, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 1, 0, 1, 0],
    ]
