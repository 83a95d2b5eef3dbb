"""Question answering: padding changes nothing, questions look where they may, and spans have their place."""

import json
import math
import random

import pytest
import torch
from oracles import EXACT, assert_half_dropped, entries, rival, shaken
from oracles import exact as exact
from torch.nn import functional
from torch.testing import assert_close

import regard
from regard.config.data import SquadData
from regard.config.model import ReaderConfig
from regard.config.run import Config, DecodeConfig
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Batch, Row, collate
from regard.data.encoding import Encoded
from regard.data.examples import Dropped, Example, Ledger, Question
from regard.data.vocabulary import BOS, EOS, Vocabularies, Vocabulary
from regard.errors import DataError, InputError
from regard.evaluation.fit import fit
from regard.explain.recorder import record
from regard.inference.predictor import Predictor
from regard.tasks import make_task
from regard.tasks.encoder import LABELS
from regard.tasks.question_answering.encoding import encode_questions
from regard.tasks.question_answering.model import Reader, find_shared
from regard.tasks.question_answering.task import extract_span
from regard.training.prepare import read_examples, start_run

pytestmark = pytest.mark.usefixtures("exact")

VOCAB, CLASSES = 13, 5
SIZES = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2, "dropout": 0.0}
STORIES = [
    [BOS, 5, 7, EOS, 9, 4, EOS, 6, 8, 12, EOS],
    [BOS, 5, EOS, 7, EOS, 8, 9, EOS, 10, EOS],
    [BOS, 6, EOS, 4, 4, EOS],
]
WORDS = Vocabulary.learn(["a b c d e f ."], Tokenization(kind="word"))


def reader(**changes):
    config = ReaderConfig(kind="reader", **SIZES | changes)
    return shaken(Reader(config, VOCAB, CLASSES + LABELS, 20))


def batch_of(rows, answers=None):
    return collate(
        [Row(row, answer, False) for row, answer in zip(rows, answers or [[LABELS]] * len(rows), strict=True)]
    )


READERS = {
    "words": {"answer": "word"},
    "sentences": {"answer": "word", "unit": "sentence"},
    "shared": {"answer": "word", "unit": "sentence", "share_layers": True},
    "spans": {"answer": "span"},
}


@pytest.mark.parametrize("kind", READERS)
def test_questions_together_are_as_alone(kind):
    model = reader(**READERS[kind])
    together = model.logits(batch_of(STORIES))
    for row, story in enumerate(STORIES):
        alone = model.logits(batch_of([story]))[0]
        assert_close(together[row][..., : alone.shape[-1]], alone, **EXACT)


def test_sentences_are_sums_of_their_words_the_latest_first():
    model, story = reader(unit="sentence", answer="word"), STORIES[1]
    seen = []
    model.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.logits(batch_of([story]))
    parts = [[BOS, 5, EOS], [10, EOS], [8, 9, EOS], [7, EOS]]
    table, order = model.source_embedding.weight, model.order
    wanted = torch.stack([sum(table[token] * order[place] for place, token in enumerate(part)) for part in parts])
    assert_close(seen[0][0], wanted, **EXACT)


def test_tokens_of_question_and_context_are_marked():
    model, story, seen = reader(answer="span"), [BOS, 5, 7, EOS, 9, 5, EOS], []
    model.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.logits(batch_of([story]))
    marked = torch.tensor([0, 1, 0, 0, 0, 1, 0])[:, None] * model.match
    assert_close(seen[0][0], model.source_embedding.weight[story] + marked, **EXACT)


def test_a_word_is_chosen_by_the_question_and_what_it_saw():
    model, batch = reader(answer="word"), batch_of(STORIES)
    states, question, context = model.parts(batch.source, batch.lengths)
    asked = torch.stack([row[: story.index(EOS) + 1].mean(0) for row, story in zip(states, STORIES, strict=True)])
    assert question.sum(-1).flatten().tolist() == [4, 3, 3]
    seen, _ = rival(model.attention)(asked[:, None], states, states, key_padding_mask=~context[:, 0, 0])
    assert_close(model.logits(batch), model.output(asked + seen[:, 0]), **EXACT)


def test_half_of_what_a_word_is_chosen_by_is_dropped():
    """The question and what it saw add up to 1, and a word is chosen by one element of them alone."""
    model, batch = reader(answer="word", dropout=0.5, layers=1).train(), batch_of(STORIES * 67)
    for part in (model.encoder.norm, model.attention.output, model.output):
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.zeros_(part.bias)
    torch.nn.init.constant_(model.encoder.norm.bias, 0.25)
    torch.nn.init.constant_(model.attention.output.bias, 0.75)
    torch.nn.init.ones_(model.output.weight[:, 0])
    assert_half_dropped(model.logits(batch)[:, 0])
    assert (model.eval().logits(batch) == 1).all()


def test_where_a_question_looks_is_the_span():
    model = reader(answer="span")
    with record(model) as maps:
        logits = model.logits(batch_of(STORIES[:1]))
    weights = maps["pointer"]
    assert_close(logits.softmax(-1), weights[:, 0], **EXACT)
    seen = [place for place, weight in enumerate(weights[0, 0, 0].tolist()) if weight]
    assert seen == [4, 5, 7, 8, 9]  # the context, without its <eos>


@pytest.mark.parametrize("kind", ["words", "sentences", "shared"])
def test_the_question_looks_at_the_context_alone(kind):
    model = reader(**READERS[kind])
    with record(model, lambda name: name == "attention") as maps:
        model.logits(batch_of(STORIES[:1]))
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
    logits = model.logits(batch)
    wanted = sum(functional.cross_entropy(logits[:, i], batch.answer[:, i], reduction="sum") for i in range(2))
    for smoothing in (0.0, 0.1):  # over padding, it would make no sense
        loss = model(batch, smoothing)
        assert_close(loss.total, wanted, **EXACT)
        assert loss.tokens == 6


@pytest.mark.parametrize("kind", READERS)
def test_the_surprise_of_every_row_is_its_share_of_the_plain_loss(kind):
    spans = READERS[kind]["answer"] == "span"
    wanted = [[4, 5], [6, 7], [3, 4]] if spans else [[LABELS + 1], [LABELS + 4], [LABELS]]
    model, batch = reader(**READERS[kind]), batch_of(STORIES, wanted)
    found = model.surprise(batch)
    assert found.tokens.tolist() == [2 if spans else 1] * 3
    assert_close(found.nats.sum(), model(batch, 0.1).plain, **EXACT)
    for row in range(3):
        alone = model.surprise(batch_of(STORIES[row : row + 1], wanted[row : row + 1]))
        assert_close(alone.nats[0], found.nats[row], **EXACT)


# --- texts as models read them ---------------------------------------------------------------------------------------


def encode(question, context, most, **settings):
    config = ReaderConfig(kind="reader", **settings)
    (found,) = encode_questions([Question(question, context)], WORDS, most, config)
    return found


def words_of(row):
    return [row.text[a:b] for a, b in row.offsets if a < b]


SENTENCES = {"unit": "sentence", "answer": "word"}


def test_frames_keep_offsets():
    question, context = "a b ?", "c d . e f ."
    found = encode(question, context, 20)
    assert found.ids.count(EOS) == 2
    assert found.ids[0] == BOS
    assert found.source == Question(question, context)
    assert found.text == f"{question}\n{context}"
    assert words_of(found) == ["a", "b", "?", "c", "d", ".", "e", "f", "."]
    found = encode(question, context, 20, **SENTENCES)
    assert found.ids.count(EOS) == 3
    assert words_of(found) == ["a", "b", "?", "c", "d", ".", "e", "f", "."]
    cut = encode(question, context, 8, **SENTENCES)
    assert words_of(cut) == ["a", "b", "?", "e", "f", "."]  # the oldest sentence goes
    assert cut.length == 11  # the words, and an end for each sentence


def test_a_tab_or_a_line_in_a_question_is_its_own():
    """Only the command line and files join question and context with a tab: a question may hold one."""
    found = encode("a\tb", "c\td\ne", 20)
    assert words_of(found) == ["a", "b", "c", "d", "e"]
    assert found.ids.count(EOS) == 2
    assert found.ids.index(EOS) == 3


def test_questions_are_encoded_together_as_alone():
    asked = [Question("a b", "c. d e."), Question("a b", "c. d e."), Question("c", "a. b f. e."), Question("f", "d")]
    for settings in ({}, SENTENCES):
        config = ReaderConfig(kind="reader", **settings)
        together = encode_questions(asked, WORDS, 9, config)
        assert together == [encode(*one, 9, **settings) for one in asked]


def test_what_is_cut_off_is_counted():
    """Ends of sentences take room, so a story that does not fit is longer than its words; a question that fits with its
    context is not cut."""
    question, context = "a b c", "d e. " * 14
    row = encode(question, context.strip(), 32, **SENTENCES)
    assert row.ids.count(EOS) - 1 < 14
    assert row.length > 32
    whole = encode(question, context.strip(), row.length, **SENTENCES)
    assert whole.ids.count(EOS) - 1 == 14
    asked = encode("a b c d e f", "a", 8)
    assert (len(asked.ids), asked.length) == (6 + 1 + 3, 7)


def task_of(answer="span", vocabulary=WORDS, target=None, text=None, **changes):
    settings = ReaderConfig(kind="reader", answer=answer, **SIZES | changes)
    given = {"max_length": 256, "target": Tokenization(kind="label") if answer == "word" else None} | (text or {})
    config = Config(data=SquadData(kind="squad", train=("x",)), text=TextConfig(**given), model=settings)
    return make_task(config, Vocabularies(vocabulary, target or vocabulary))


@pytest.mark.parametrize("start", [None, 4])
def test_spans_are_found_by_tokens(start):
    example = Example(Question("a", "c d c d e"), "c d", "x:1", start)
    (row,) = task_of().encode_examples([example], Ledger())
    first = 3 + (2 if start else 0)
    assert row == Row([BOS, WORDS.find("a"), EOS, *WORDS.encode("c d c d e").ids, EOS], [first, first + 1], False)


def test_an_answer_that_is_not_in_its_context_is_dropped_and_said():
    ledger, asked = Ledger(read=3, kept=3), Question("a", "b c")
    examples = [Example(asked, "d", "x:1"), Example(asked, "c", "x:2", 1), Example(asked, "c", "x:3", 2)]
    assert len(task_of().encode_examples(examples, ledger)) == 1
    assert ledger.dropped == {"answer not in context": ["x:1", "x:2"]}
    assert ledger.kept == 1


def test_an_answer_that_is_longer_than_any_is_dropped_and_said():
    ledger, example = Ledger(read=1, kept=1), Example(Question("a", "b c d e"), "b c d", "x:1")
    assert not task_of(max_answer_length=2).encode_examples([example], ledger)
    assert ledger.dropped == {"answer longer than model.max_answer_length = 2": ["x:1"]}
    assert len(task_of(max_answer_length=3).encode_examples([example], Ledger())) == 1


def test_words_are_labels():
    labels = Vocabulary.learn(["kitchen", "garden"], Tokenization(kind="label"))
    task, example = task_of("word", target=labels), Example(Question("a", "b c"), "garden", "x:1")
    (row,) = task.encode_examples([example], Ledger())
    assert row.target == [labels.find("garden")]
    with pytest.raises(
        DataError, match=r"x:1 has the label 'cellar', which training never saw\. Known: garden, kitchen"
    ):
        task.check_examples([example._replace(target="cellar")])
    task_of().check_examples([example._replace(target="cellar")])  # of a span, no words are known beforehand


def test_a_question_is_asked_with_its_context():
    task = task_of()
    asked = Question("who?", "Ann is.\tShe is.")
    assert str(asked) == "who?\tAnn is.\tShe is."
    assert task.parse(str(asked)) == asked
    assert task.make_source({"question": "who?", "context": "Ann is.\tShe is."}) == asked
    assert task.make_source({"text": str(asked)}) == asked
    with pytest.raises(InputError, match="question came, but this model's task is to answer: send question and"):
        task.make_source({"question": "who?"})
    task.check_source(asked, "text 1")
    task.check_source(Question("", " "), "text 1")  # nothing is asked: the answer is empty
    with pytest.raises(InputError, match="text 1 has no context"):
        task.check_source(Question("who?", " "), "text 1")
    with pytest.raises(InputError, match="text 1 is str, expected a question and its context"):
        task.check_source("who?", "text 1")


def test_examples_are_questions_with_a_context():
    task = task_of()
    assert task.accept(Example("a\tb c", "c", "x:1"), task.config).source == Question("a", "b c")
    assert task.accept(Example("a\t ", "c", "x:1"), task.config) == Dropped("no context", "x:1")
    assert task.accept(Example("a\tb c", " ", "x:1"), task.config) == Dropped("empty", "x:1")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_parts_of_a_context_are_the_likeliest_of_all():
    task, model = task_of(vocabulary=entries(VOCAB)), reader(answer="span")
    asked = Question("q", "c d e f")
    offsets = [(0, 0), (0, 1), (0, 1), (1, 1), (2, 3), (4, 5), (5, 5)]
    source = Encoded(asked, "q\nc d e f", STORIES[0][:7], offsets, 5)
    ids, lengths = torch.tensor([source.ids]), torch.tensor([7])
    logits = model.logits(Batch(ids, lengths, ids, ids)).log_softmax(-1)[0].detach()
    every = {(i, j): float(logits[0, i] + logits[1, j]) for i in (4, 5) for j in (4, 5) if i <= j}
    ((_, real),) = task.answer(model, [source], 100, None)
    assert len({answer.details["span"] for answer in real}) == len(real) == len(every)
    assert [answer.score for answer in real] == pytest.approx(sorted(every.values(), reverse=True))
    best = max(every, key=every.get)
    assert real[0] == extract_span(source, *best, real[0].score)
    for answer in real:
        assert asked.context[slice(*answer.details["span"])] == answer.text
        assert source.text[slice(*answer.details["place"])] == answer.text
        assert answer.details["probability"] == pytest.approx(math.exp(answer.score))


def test_a_context_of_white_space_and_little_else():
    """However likely white space is, an answer is none of it; where nothing else is left, the answer is empty."""
    letters = Vocabulary.learn(["q x y", "\t"], Tokenization(kind="char"))
    sizes = {"size": 16, "feedforward": 16, "heads": 2, "layers": 1, "dropout": 0.1}
    task = task_of(vocabulary=letters, text={"max_length": 100, "longer": "cut"}, **sizes)
    torch.manual_seed(task.config.train.seed)
    predictor = Predictor(task, task.build())
    assert predictor(Question("q", 60 * " " + "x" + 20 * " ")) == "x"
    found = predictor.predict([Question("q", "x   \n   y")], best=9)[0]
    assert {answer.text for answer in found} == {"x", "y", "x   \n   y"}
    ((nothing,),) = predictor.predict([Question("q", 200 * " " + "x")])
    assert (nothing.text, nothing.details["span"]) == ("", (0, 0))
    assert predictor.cut == 1
    short, long = Question("q", "x   y"), Question("q", 30 * " " + "x y")
    assert [one[0].text for one in predictor.predict([short, long])] == [predictor(short), predictor(long)]


def test_what_question_and_context_share():
    source = torch.tensor([[BOS, 5, 7, EOS, 7, 4, 7, EOS, 0, 0], [BOS, 6, EOS, 8, 9, 10, 6, 11, 6, EOS]])
    asked = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]]).bool()
    told = ~asked & (source != 0)
    assert find_shared(source, asked, told).int().tolist() == [
        [0, 0, 1, 0, 1, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 1, 0, 1, 0],
    ]


# --- a run -----------------------------------------------------------------------------------------------------------

NAMES = ["Ann", "Bob", "Cem", "Dai", "Eva", "Fei", "Gus", "Hana"]
PLACES = ["Rome", "Paris", "Seoul", "New York", "Lima", "Oslo", "Busan", "Cairo"]


def squad(count: int) -> dict:
    """Who lives where, of three; and for one of them, where. Only the name tells which place is asked for."""
    rng, paragraphs = random.Random(5), []
    for number in range(count):
        names, places = rng.sample(NAMES, 3), rng.sample(PLACES, 3)
        context = " ".join(f"{name} lives in {place}." for name, place in zip(names, places, strict=True))
        which = rng.randrange(3)
        answer = {"text": places[which], "answer_start": context.index(places[which])}
        question = {"id": str(number), "question": f"Where does {names[which]} live?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "places", "paragraphs": paragraphs}]}


@pytest.mark.slow
def test_spans_are_learned_and_have_their_place(tmp_path):
    torch.set_default_dtype(torch.float32)
    (tmp_path / "train.json").write_text(json.dumps(squad(4000)), encoding="utf-8")
    config = regard.read(
        "squad-form",
        [
            f'data.train=["{tmp_path / "train.json"}"]',
            *("data.cut_valid=100", "data.cut_test=300", "text.source.size=400", "model.size=64", "model.layers=2"),
            *("model.feedforward=128", "train.steps=350", "train.validate_every=350", "train.batch_tokens=2048"),
            *("train.warmup=50", "train.learning_rate=2e-3"),
        ],
    )
    run = tmp_path / "run"
    fit(start_run(config, run), run, lambda event: None, device="cpu")
    predictor = regard.load(run, device="cpu")
    found = regard.evaluate(predictor, read_examples(config).test, config.evaluate)
    assert found.metrics["span_exact"] >= 95
    assert found.metrics["span_f1"] >= found.metrics["span_exact"]
    context = "Eva lives in Lima. Bob lives in New York. Fei lives in Oslo."
    ((best, second),) = predictor.predict([Question("Where does Bob live?", context)], best=2, settings=DecodeConfig())
    assert best.text == "New York"
    assert best.score > second.score
    assert context[slice(*best.details["span"])] == "New York"
