"""Taggers: chains against enumeration and rivals, their solvers, spans, and runs from files to answers."""

import importlib.util
import itertools
import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from oracles import EXACT, entries, exact  # noqa: F401 (a fixture)
from serving import live
from taggers import CHUNKS, LABELS, batch, draw_encoder, enumerate_taggings, settings, tagger, train
from torch.testing import assert_close

import regard
from regard.attention.chain import marginals
from regard.config.data import ColumnsData
from regard.config.structure import WINDOW
from regard.data.batching import Row, collate
from regard.data.examples import Example, Ledger, Words
from regard.data.vocabulary import BOS, EOS, UNK
from regard.errors import ConfigError, DataError, InputError
from regard.tasks.tagging.classical import Features, baum_welch, count_hmm, fit_weights, make_groups, minimise, set_hmm
from regard.tasks.tagging.features import Templates, jamo, learn_guesses, ngrams, shape
from regard.tasks.tagging.spans import count_spans, is_closed, mark_spans, may_follow, read_spans
from regard.tasks.tagging.subwords import encode_words, split_words
from regard.training.prepare import resume_run

STRUCTURES = pytest.mark.parametrize("structure", ["crf", "memm", "softmax"])
ENCODERS = pytest.mark.parametrize("encoder", ["none", "rnn", "transformer"])


# --- the model -------------------------------------------------------------------------------------------------------


@STRUCTURES
@ENCODERS
@pytest.mark.parametrize("constrained", [False, True])
def test_taggings_are_as_likely_as_enumeration_says(exact, structure, encoder, constrained):  # noqa: F811
    """The surprise of a tagging, the n-best list and the marginals of sentences of 5, 1, 3 words and of none."""
    model = tagger(structure, encoder=encoder)
    if constrained:  # 2 only behind 1, and neither the first nor the last
        model.allowed = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    given = batch(model, [5, 1, 3, 0])
    with torch.no_grad():
        nats = model.surprise(given).nats
        paths, scores, chances = model.best(given, 4)
    for row, n in enumerate((5, 1, 3, 0)):
        every = enumerate_taggings(model, given, row)
        assert sum(every.values()) == pytest.approx(1.0, abs=1e-10)
        gold = tuple((given.answer[row, :n] - LABELS).tolist())
        assert float((-nats[row]).exp()) == pytest.approx(every.get(gold, 0.0), abs=1e-10)
        ranked = sorted(every.values(), reverse=True)[:4]
        assert scores[row].exp().tolist()[: len(ranked)] == pytest.approx(ranked, abs=1e-10)
        for path, chance in zip(paths[row].tolist(), ranked, strict=False):
            assert every[tuple(path[:n])] == pytest.approx(chance, abs=1e-10)
        for t, tag in itertools.product(range(n), range(3)):
            wanted = sum(chance for path, chance in every.items() if path[t] == tag)
            assert float(chances[row, t, tag]) == pytest.approx(wanted, abs=1e-10)


@ENCODERS
def test_padding_changes_nothing(exact, encoder):  # noqa: F811
    model = tagger(encoder=encoder)
    given = batch(model, [7, 4, 2])
    together = model.surprise(given).nats
    for row, n in enumerate((7, 4, 2)):
        part = [one[row : row + 1, : n * size] for one, size in ((given.source, 2), (given.target, 1))]
        alone = given._replace(source=part[0], lengths=given.lengths[row : row + 1], target=part[1], answer=part[1])
        assert_close(model.surprise(alone).nats[0], together[row], **EXACT)


@STRUCTURES
def test_thousands_of_words_in_float32_are_as_in_float64(structure):
    model = tagger(structure, tags=5)
    given = batch(model, [2000, 1300], tags=5)
    narrow, wide = model.surprise(given).nats, tagger(structure, tags=5).double().surprise(given).nats
    assert narrow.isfinite().all()
    assert ((narrow - wide).abs() / wide < 1e-3).all()
    assert (model.best(given, 1)[2] - tagger(structure, tags=5).double().best(given, 1)[2]).abs().max() < 1e-3


@STRUCTURES
@ENCODERS
def test_sentences_of_no_words_have_a_gradient_of_zeros(structure, encoder):
    model = tagger(structure, encoder=encoder)
    given = batch(model, [1, 0])._replace(lengths=torch.tensor([0, 0]))
    loss = model(given)
    loss.total.backward()
    assert (float(loss.total.detach()), loss.tokens) == (0.0, 0)
    assert all(one.grad is None or one.grad.abs().sum() == 0 for one in model.parameters())


def test_pytorch_crf_agrees(exact):  # noqa: F811
    """pytorch-crf with the same weights: likelihood and decoding."""
    torchcrf = pytest.importorskip("torchcrf")
    model, rival = tagger(tags=5), torchcrf.CRF(5, batch_first=True)
    with torch.no_grad():
        rival.start_transitions.copy_(model.start)
        rival.end_transitions.copy_(model.end)
        rival.transitions.copy_(model.transitions)
        given = batch(model, [6, 3, 1], tags=5)
        scores, lengths = model.word_scores(given)
        mask = torch.arange(6) < lengths[:, None]
        found = rival(scores, (given.answer - LABELS).clamp(min=0), mask, reduction="none")
        assert_close(-model.surprise(given).nats, found, **EXACT)
        for path, wanted in zip(model.best(given, 1)[0][:, 0].tolist(), rival.decode(scores, mask), strict=True):
            assert path[: len(wanted)] == wanted


# --- solvers ---------------------------------------------------------------------------------------------------------


def rows(model, lengths, tags=3):
    given = batch(model, lengths, tags)
    pairs = zip(given.source.tolist(), given.answer.tolist(), lengths, strict=True)
    return [Row(source[: n * model.width], answer[:n], sequence=False) for source, answer, n in pairs]


def test_features_are_the_transpose_of_bags():
    ids, gradients = torch.randint(0, 6, (11, 3)), torch.randn(11, 4)
    wanted = torch.zeros(7, 4).index_add_(0, ids.flatten(), gradients.repeat_interleave(3, 0))
    wanted[0] = 0.0  # PAD
    assert_close(Features.transpose(ids, 7).sum(gradients), wanted)


@STRUCTURES
def test_l_bfgs_finds_what_torchs_finds(exact, structure):  # noqa: F811
    """The same penalized likelihood from the same start, by torch's own L-BFGS."""
    model, rival = tagger(structure), tagger(structure)
    sentences, l2 = rows(model, [5, 4, 3, 1, 6]), 0.3
    *_, found = itertools.islice(fit_weights(model, sentences, 0.0, l2), 60)
    learned = [part for part in rival.parameters() if structure != "softmax" or part is rival.bag.weight]
    solver = torch.optim.LBFGS(learned, max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")
    (whole,) = make_groups(sentences)

    def compute():
        solver.zero_grad()
        loss = rival(whole).total + l2 * sum((part**2).sum() for part in learned)
        loss.backward()
        return loss

    solver.step(compute)
    assert found * 19 == pytest.approx(float(compute().detach()), rel=1e-4)
    assert_close(model.bag.weight, rival.bag.weight, atol=0.02, rtol=0.05)


def test_owl_qn_ends_where_no_direction_goes_down(exact):  # noqa: F811
    """Of a quadratic with an L1 penalty: the penalty balances the slope, and where it is smaller the weight is 0."""
    generator, l1 = torch.Generator().manual_seed(2), 1.5
    root, goal = torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator) * 3
    matrix, seen = root @ root.T + torch.eye(8), []

    def compute(weights):
        seen.append(weights)
        return float(weights @ matrix @ weights / 2 - goal @ weights), matrix @ weights - goal

    list(itertools.islice(minimise(compute, torch.zeros(8), l1, tolerance=1e-14), 400))
    weights, slope = seen[-1], compute(seen[-1])[1]
    zero = weights == 0
    assert 0 < zero.sum() < 8
    assert (slope[zero].abs() <= l1 + 1e-5).all()
    assert_close(slope[~zero], -l1 * weights[~zero].sign(), atol=1e-4, rtol=0)


def test_an_hmm_is_counted():
    """Two sentences by hand: what follows a tag, or that nothing does; what a tag emits. Every count has half more."""
    model = tagger("hmm", tags=2, features=LABELS + 2, width=1)
    a, b, x, y = LABELS, LABELS + 1, LABELS, LABELS + 1
    count_hmm(model, [Row([x, y], [a, b], False), Row([x], [a], False)], 0.5)
    assert_close(model.start.exp(), torch.tensor([2.5, 0.5]) / 3)
    assert_close(model.transitions.exp(), torch.tensor([[0.5 / 3.5, 1.5 / 3.5], [0.5 / 2.5, 0.5 / 2.5]]))
    assert_close(model.end.exp(), torch.tensor([1.5 / 3.5, 1.5 / 2.5]))
    assert_close(model.bag.weight[LABELS:].exp(), torch.tensor([[2.5 / 3, 0.5 / 2], [0.5 / 3, 1.5 / 2]]))


def test_baum_welch_is_hmmlearns(exact):  # noqa: F811
    """From the same start, the same likelihood round by round. hmmlearn has no end: a state that emits a mark is it."""
    hmm, numpy = pytest.importorskip("hmmlearn.hmm"), pytest.importorskip("numpy")
    tags, words, lengths = 2, 3, [5, 3, 4, 1]
    model = tagger("hmm", tags=tags, features=LABELS + words, width=1)
    counts = [torch.rand(shape) + 0.1 for shape in ((tags,), (tags,), (tags, tags), (LABELS + words, tags))]
    set_hmm(model, *counts, 0.0)
    sentences = [torch.randint(words, (n,)) for n in lengths]
    groups = make_groups([Row((one + LABELS).tolist(), [LABELS] * len(one), False) for one in sentences])
    rival = hmm.CategoricalHMM(tags + 1, n_iter=1, init_params="", n_features=words + 1, implementation="scaling")
    rival.startprob_ = numpy.append(model.start.exp().tolist(), 0.0)
    inside = torch.cat([model.transitions.exp(), model.end.exp()[:, None]], 1)
    rival.transmat_ = numpy.vstack([inside.tolist(), [0.0] * tags + [1.0]])
    emitted = torch.cat([model.bag.weight[LABELS:].exp().T, torch.zeros(tags, 1)], 1)
    rival.emissionprob_ = numpy.vstack([emitted.tolist(), [0.0] * words + [1.0]])
    marked = numpy.concatenate([[*one.tolist(), words] for one in sentences])[:, None]
    for found in itertools.islice(baum_welch(model, groups, 0.0), 6):
        assert found * sum(lengths) == pytest.approx(-rival.score(marked, [n + 1 for n in lengths]), abs=1e-5)
        rival.fit(marked, [n + 1 for n in lengths])
        rival.transmat_[tags] = [0.0] * tags + [1.0]  # nothing follows the end


# --- features and spans ----------------------------------------------------------------------------------------------


def test_templates_by_hand():
    templates = Templates(["word[0]", "suffix2[-1]|pos[0]", "shape[1]", "ngrams3"], ["pos"], lambda word: True)
    first, second = templates.extract(Words(("Ab", "cde"), (("X",), ("Y",))))
    assert first == ["word[0]=Ab", "suffix2[-1]|pos[0]=<s>|X", "shape[1]=x", *(f"ngrams={n}" for n in ngrams("Ab", 3))]
    assert second[:3] == ["word[0]=cde", "suffix2[-1]|pos[0]=Ab|Y", "shape[1]=</s>"]
    assert ngrams("Ab", 3) == ["^A", "Ab", "b$", "^Ab", "Ab$"]
    assert [shape(word) for word in ("Mid-1990", "한국어2", "漢字")] == ["Xx-0", "han0", "cjk"]
    assert len(jamo("갔다")) == 5


def test_a_column_that_does_not_come_is_guessed(predictor):
    """By the word if training saw it twice, else by its outline, else the most frequent; read back from the run."""
    sentences = [Words(("dog", "dog", "Ann", "the"), (("NN",), ("NN",), ("NNP",), ("DT",)))]
    guesses = learn_guesses(["pos"], sentences)
    assert guesses == {("pos", "dog"): "NN", ("pos", "Xx nn"): "NNP", ("pos", "x he"): "DT", ("pos", ""): "NN"}
    templates = Templates(["pos[0]"], ["pos"], lambda word: True, guesses)
    found = templates.extract(Words(("dog", "Lenn", "zebra", "she")))
    assert found == [["pos[0]=NN"], ["pos[0]=NNP"], ["pos[0]=NN"], ["pos[0]=DT"]]
    assert "pos[0]=VBD" in predictor.task.templates.extract(Words(("ran",)))[0]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("wrd[0]", "'wrd[0]' is no property[offset]"),
        ("word", "'word' is no property[offset]"),
        ("suffix[0]", "needs a size, as suffix3[0]."),
        ("word[0]|lower2[1]", "'lower2[1]' in 'word[0]|lower2[1]' needs no size."),
    ],
)
def test_wrong_templates_are_named(template, told):
    with pytest.raises(ConfigError) as error:
        Templates([template], [], lambda word: True)
    assert told in str(error.value)


def conlleval(tags):
    """Spans by the two tables of CoNLL's script: whether one ends before a tag, whether one begins with it."""
    found, begun = [], None
    for place, (before, tag) in enumerate(itertools.pairwise(["O", *tags, "O"])):
        (left, _, label), (right, _, other) = before.partition("-"), tag.partition("-")
        if left != "O" and (left in "ES" or right in ("B", "S", "O") or label != other):
            found.append((label, begun, place))
        if right != "O" and (right in "BS" or left in ("E", "S", "O") or label != other):
            begun = place
    return found


SPANS = ("O", "B-A", "I-A", "B-B", "I-B", "E-A", "S-A")


def test_spans_are_those_of_conlls_script():
    for tags in itertools.product(SPANS, repeat=4):
        assert [tuple(span) for span in read_spans(tags)] == conlleval(tags), tags


@pytest.mark.parametrize("names", [("O", "B-A", "I-A", "B-B", "I-B"), ("O", "B-A", "I-A", "E-A", "S-A")])
def test_what_may_follow_is_what_spans_can_be_written_as(names):
    """A tagging is valid where writing its spans anew gives it again."""
    closed = is_closed(names)

    def write(tags):
        out = ["O"] * len(tags)
        for label, first, end in read_spans(tags):
            marks = ["B", *["I"] * (end - first - 1)]
            if closed:
                marks = ["S"] if end - first == 1 else ["B", *["I"] * (end - first - 2), "E"]
            out[first:end] = [f"{mark}-{label}" for mark in marks]
        return out

    assert mark_spans(names)
    assert not mark_spans(["NOUN", "O"])
    for tags in itertools.product(names, repeat=4):
        steps = itertools.pairwise([None, *tags, None])
        assert all(may_follow(*step, closed) for step in steps) == (write(tags) == list(tags)), tags


def test_f1_by_hand():
    found = count_spans([["B-A", "I-A", "O"], ["B-B"]], [["B-A", "O", "O"], ["B-B"]])
    assert (found[""], found["A"], found["B"]) == ((1, 2, 2), (0, 1, 1), (1, 1, 1))
    assert found[""].figures() == {"precision": 50.0, "recall": 50.0, "f1": 50.0}
    assert count_spans([["O"]], [["O"]])[""].figures()["f1"] == 0.0


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks") / "chunks.txt"
    path.write_text(CHUNKS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def predictor(data, tmp_path_factory):
    return train(settings(data, constraints="spans"), tmp_path_factory.mktemp("runs") / "crf")


def test_a_run_learns_what_it_was_shown(predictor, data):
    found = regard.evaluate(predictor, regard.start_run(predictor.config, data.parent / "again").splits.valid, warn=len)
    assert found.metrics["span_f1"] == found.metrics["accuracy"] == 100.0
    assert found.metrics["accuracy_unknown"] != found.metrics["accuracy_unknown"]  # there are none: not a number
    (np, vp) = found.tables["by label"]
    assert np == {"label": "NP", "wanted": 4, "precision": 100.0, "recall": 100.0, "f1": 100.0}
    assert vp["wanted"] == 3
    assert found.tree()["tables"] == found.tables


@pytest.mark.parametrize(
    "model",
    [
        {"structure": "memm"},
        {"structure": "softmax"},
        {"structure": "hmm", "features": ["rare[0]"]},
        {"l1": 0.1},
        {"encoder": "rnn", "size": 16, "dropout": 0.0, "word_dropout": 0.1, "constraints": "spans"},
        {"encoder": "transformer", "structure": "memm", "size": 16, "heads": 2, "feedforward": 16},
    ],
    ids=str,
)
def test_every_kind_of_tagger_trains(model, data, tmp_path):
    config = settings(data, **model)
    predictor = train(config, tmp_path / "run")
    (answers,) = predictor.predict(["The dog ran ."], best=3)
    assert [len(answer.text.split()) for answer in answers] == [4, 4, 4]
    assert sum(answer.details["probability"] for answer in answers) <= 1 + 1e-5
    assert answers[0].score >= answers[1].score >= answers[2].score


def test_an_hmm_goes_on_with_text_that_has_no_tags(data, tmp_path):
    (tmp_path / "plain.txt").write_text("The old dog saw\nDogs ran\n", encoding="utf-8")
    config = settings(data, structure="hmm", features=["rare[0]"])
    text = config.text.model_copy(update={"raw": (str(tmp_path / "plain.txt"),)})
    losses = []
    train(
        config.model_copy(update={"text": text}), tmp_path / "run",
        lambda event: event.kind == "step" and losses.append(event.values["loss"]),
    )  # fmt: skip
    assert len(losses) == 30
    assert losses[-1] < losses[1]


def test_a_solver_that_was_stopped_begins_again_and_one_that_is_done_stays(data, tmp_path):
    config, steps = settings(data), []
    once = train(config, tmp_path / "whole")
    with pytest.raises(regard.RegardError, match="has no model yet"):
        train(config, tmp_path / "run", steps.append, stop=lambda: len(steps) > 7)
    regard.fit(resume_run(tmp_path / "run"), tmp_path / "run", steps.append, device="cpu")
    again = regard.load(tmp_path / "run", device="cpu")
    assert_close(again.model.bag.weight, once.model.bag.weight)
    done = regard.fit(
        resume_run(tmp_path / "run"), tmp_path / "run", lambda event: pytest.fail(event.kind), device="cpu"
    )
    assert done.best == 100.0


def test_words_and_text(predictor):
    """Tabs part words and bring columns; of text, punctuation is parted from words, and columns are guessed."""
    task = predictor.task
    assert task.parse("The DT\tU.S. NNP") == Words(("The", "U.S."), (("DT",), ("NNP",)))
    ((text,), (words,)) = predictor.predict(["The dog ran.", task.parse("The DT\tdog NN\tran VBD\t. .")])
    assert text.text == words.text == "B-NP I-NP B-VP O"
    assert (text.details["guessed"], "guessed" in words.details) == (["pos"], False)
    assert [(one["start"], one["end"]) for one in text.details["words"]] == [(0, 3), (4, 7), (8, 11), (11, 12)]
    assert text.details["spans"] == [{"label": "NP", "start": 0, "end": 7}, {"label": "VP", "start": 8, "end": 11}]
    ((strange,),) = predictor.predict(["Zebras (quickly) ran"])
    assert [one["text"] for one in strange.details["words"]] == ["Zebras", "(", "quickly", ")", "ran"]
    assert [one["known"] for one in strange.details["words"]] == [False, False, False, False, True]
    assert predictor("") == ""


def test_a_batch_answers_as_single_sentences_do(predictor):
    texts = ["The dog ran .", "ran", "She saw the old dog . The dog ran ."]
    together = predictor.predict(texts, best=2)
    for text, answers in zip(texts, together, strict=True):
        ((alone, _),) = predictor.predict([text], best=2)
        assert (alone.text, alone.score) == (answers[0].text, pytest.approx(answers[0].score, abs=1e-5))


def test_tags_that_training_never_saw_are_wrong_and_counted(predictor):
    told, pairs = [], [("The dog ran .", "B-NP I-NP B-VP O"), ("Dogs ran .", "B-NP B-ZZ O")]
    found = regard.evaluate(predictor, pairs, warn=told.append)
    assert found.metrics["accuracy"] == pytest.approx(100 * 6 / 7)
    assert found.unscored == 1
    assert "a tag that training never saw" in "".join(told)


def test_a_sentence_that_is_cut_is_wrong_where_it_was_cut(predictor):
    words = "ran " * 40
    found = regard.evaluate(predictor, [(words, "B-VP " * 40)], warn=len)
    assert found.cut == 1
    assert found.metrics["accuracy"] <= 75.0


def test_what_constraints_forbid_is_named(data, tmp_path, predictor):
    with pytest.raises(
        DataError, match=r"examples:1 has I-NP behind the beginning, which model.constraints = \"spans\""
    ):
        regard.evaluate(predictor, [("The dog", "I-NP I-NP")])
    path = tmp_path / "two.txt"
    path.write_text("a x B-A\nb x E-A\n\nc x B-A\nd x E-A\n", encoding="utf-8")
    pairs = train(settings(path, constraints="spans"), tmp_path / "run")
    assert pairs("c b") == "B-A E-A"
    with pytest.raises(InputError) as error:
        pairs("a")
    wanted = 'text 1 has 1 words, and model.constraints = "spans" allows no tagging of so many with the tags B-A, E-A.'
    assert str(error.value) == wanted
    path.write_text("a x I-A\nb x O\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"{path}:1 has I-A behind the beginning"):
        regard.start_run(settings(path, constraints="spans"), tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"structure": "hmm"}, "an HMM emits one thing a word"),
        ({"structure": "hmm", "encoder": "rnn"}, "an HMM is counted"),
        ({"encoder": "rnn", "size": 9, "heads": 3}, "size 9 is odd"),
        ({"features": []}, "features are all that is known of a word"),
        ({"features": [], "pretrained": "x"}, 'a pretrained encoder is a Transformer: set encoder = "transformer"'),
        ({"encoder": "transformer", "pretrained": "x"}, "a pretrained encoder reads sub-words, no features"),
        ({"features": ["suffix2[0]"]}, "model.features needs one of word[0], lower[0], rare[0]"),
    ],
)
def test_settings_that_do_not_go_together(changes, told, data, tmp_path):
    with pytest.raises(ConfigError) as error:
        regard.start_run(settings(data, **changes), tmp_path / "run")
    assert told in str(error.value)


def test_columns_of_the_wrong_number(predictor):
    with pytest.raises(InputError, match="text 1 has 2 words, but columns for 1"):
        predictor.predict([Words(("a", "b"), (("X",),))])
    assert ColumnsData(kind="columns", train=("x",)).features == {}


def test_a_look_shows_the_marginals(predictor, tmp_path):
    found = regard.look(predictor, "The dog ran .")
    weights, rows, columns = found.label()
    assert (rows, columns) == (["The", "dog", "ran", "."], predictor.task.tags)
    with torch.inference_mode():
        assert_close(weights, marginals(*predictor.model.chain(found.batch)).tags[0])
    assert_close(weights.sum(-1), torch.ones(4))
    for name in ("why.html", "why.json", "why.png", "why.svg"):
        found.save(tmp_path / name)
    assert json.loads((tmp_path / "why.json").read_text("utf-8"))["maps"][0]["kind"] == "chain"
    with pytest.raises(InputError, match="chain shows marginals: there are no queries and keys"):
        found.calculate(0)


def test_served(predictor):
    with live({"chunk": predictor}) as server:
        sent = {"texts": ["The dog ran .", "The DT\tdog NN"], "best": 2}
        first, second = httpx.post(f"{server.url}/v1/predict", json=sent).json()["answers"]
        assert [len(first), first[0]["text"], second[0]["text"]] == [2, "B-NP I-NP B-VP O", "B-NP I-NP"]
        assert first[0]["words"][2]["tag"] == "B-VP"
        tree = httpx.post(f"{server.url}/v1/look", json={"text": "The dog ran ."}).json()
        assert (tree["form"]["answer"], tree["maps"][0]["shape"]) == ("spans", [1, 4, len(predictor.task.tags)])


# --- over a pretrained encoder ---------------------------------------------------------------------------------------


def adapt(data, encoder, *, max_length=30, **model):
    """Settings of a tagger that begins with an encoder's run."""
    given = settings(data, encoder="transformer", pretrained=str(encoder), features=WINDOW, dropout=0.0, **model)
    text = given.text.model_copy(update={"max_length": max_length, "longer": "cut"})
    return given.model_copy(update={"text": text})


@pytest.fixture(scope="module")
def adapted(data, tmp_path_factory):
    """A tagger that began with an encoder, which is gone since; the loss of its steps; and what it began with."""
    folder, events = tmp_path_factory.mktemp("adapted"), []
    config = adapt(data, draw_encoder(folder / "encoder"), constraints="spans", word_dropout=0.05)
    begun = regard.start_run(config, folder / "run")
    first = {name: tensor.clone() for name, tensor in begun.model.state_dict().items()}
    before = regard.load(folder / "encoder", device="cpu").model
    regard.fit(begun, folder / "run", events.append, device="cpu")
    shutil.rmtree(folder / "encoder")
    losses = [event.values["loss"] for event in events if event.kind == "step"]
    return regard.load(folder / "run", device="cpu"), losses, (first, before)


def test_a_pretrained_encoder_gives_a_tagger_its_form_and_weights(adapted):
    predictor, losses, (first, before) = adapted
    config = predictor.config
    assert (config.model.size, config.model.layers, config.model.positions) == (12, 2, "learned")
    assert (config.model.features, config.text.source.kind) == ((), "bpe")
    for name, tensor in before.state_dict().items():
        assert_close(first[name], tensor[: len(first[name])])
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]


def test_the_state_of_a_word_is_that_of_its_first_sub_word(data, tmp_path, exact):  # noqa: F811
    """By hand: the encoder's own states of the sub-words of all words, one after another, at the places where words
    begin."""
    run = draw_encoder(tmp_path / "encoder")
    begun, before = regard.start_run(adapt(data, run), tmp_path / "run"), regard.load(run, device="cpu")
    sentences, model = ["She saw the", "dog", "old Dogs ran . ."], begun.model.double().eval()
    given = begun.task.collate(begun.task.encode([Words(tuple(one.split())) for one in sentences]))
    found, lengths = model.word_states(given)
    assert lengths.tolist() == [3, 1, 5]
    for row, sentence in enumerate(sentences):
        parts = [before.source.encode(word).ids for word in sentence.split()]
        assert max(map(len, parts)) > 1
        ids = [BOS, *itertools.chain.from_iterable(parts), EOS]
        states = before.model.double().states(torch.tensor([ids]), torch.tensor([len(ids)]))[0][0]
        places = itertools.accumulate((len(part) for part in parts[:-1]), initial=1)
        assert_close(found[row, : len(parts)], states[list(places)], **EXACT)


def test_a_word_of_which_a_vocabulary_leaves_nothing_is_unknown():
    tokens = split_words(["ab", ""], entries(12))
    assert tokens[1] == ([UNK], [(0, 0)])
    assert encode_words(tokens, 9) == ([BOS, 0, tokens[0].ids[0], BOS, tokens[0].ids[1], 0, UNK, BOS, EOS, 0], 3)
    assert encode_words([], 9) == ([], 0)


def test_sub_words_of_others_change_nothing(data, adapted, exact):  # noqa: F811
    """Alone or in a batch, a sentence is as likely, and has the same answer."""
    predictor = adapted[0]
    model, task = predictor.model.double(), predictor.task
    sentences = [[line.split() for line in part.splitlines()] for part in CHUNKS.split("\n\n")]
    examples = [
        Example(Words(tuple(one[0] for one in part)), " ".join(one[-1] for one in part), "x") for part in sentences
    ]
    found = task.encode_examples(examples, Ledger())
    assert len({len(row.source) for row in found}) == 3
    together = model.surprise(collate(found))
    assert together.tokens.tolist() == [4, 6, 3]
    for row, nats in zip(found, together.nats, strict=True):
        assert_close(model.surprise(collate([row])).nats[0], nats, **EXACT)
    texts = ["The dog ran .", "ran", "She saw the old dog ."]
    for text, (answer,) in zip(texts, predictor.predict(texts), strict=True):
        ((alone,),) = predictor.predict([text])
        assert (alone.text, alone.score) == (answer.text, pytest.approx(answer.score, abs=1e-10))
    model.float()


def test_a_tagger_over_sub_words_answers_by_words(adapted):
    predictor = adapted[0]
    ((answer,), (again,)) = predictor.predict(["The  dog ran.", predictor.task.parse("The\tdog\tran\t.")])
    assert answer.text == again.text
    words = answer.details["words"]
    assert [(one["start"], one["end"]) for one in words] == [(0, 3), (5, 8), (9, 12), (12, 13)]
    assert [one["known"] for one in words] == [predictor.source.find(one["text"]) is not None for one in words]
    assert {one["known"] for one in words} == {True, False}
    assert "guessed" not in answer.details
    assert predictor("") == ""
    found = regard.evaluate(predictor, [("The dog ran .", answer.text)], warn=len)
    assert found.metrics["accuracy"] == found.metrics["span_f1"] == 100.0


def test_a_look_at_sub_words(adapted, tmp_path):
    """The chain's map is of words, the encoder's maps are of sub-words."""
    predictor = adapted[0]
    found = regard.look(predictor, "The old dog")
    weights, rows, columns = found.label()
    assert (rows, columns) == (["The", "old", "dog"], predictor.task.tags)
    assert_close(weights.sum(-1), torch.ones(3))
    inside, rows, columns = found.label(next(iter(found.uses)))
    assert (rows, len(rows)) == (columns, len(inside))
    assert rows == ["<bos>", "·", "T", "he", "·", "o", "l", "d", "·", "d", "og", "<eos>"]  # a space begins each
    for name in ("why.html", "why.json", "why.png"):
        found.save(tmp_path / name)
    assert [(one["rows"], one["columns"]) for one in found.tree()["maps"]][-2:] == [("key", "key"), ("input", "query")]


def test_sub_words_that_do_not_fit(data, tmp_path):
    """text.max_length counts sub-words. A word that is cut in two keeps its tag, one behind it has none."""
    predictor = train(adapt(data, draw_encoder(tmp_path / "encoder"), max_length=5), tmp_path / "run")
    texts = ["zzzzzzzzzz", "zz zzzzzzzz ran ran", ". . . . ."]
    ((long,), (several,), (whole,)) = predictor.predict(texts)
    assert [one["text"] for one in long.details["words"]] == ["zzzzzzzzzz"]
    assert [one["text"] for one in several.details["words"]] == ["zz", "zzzzzzzz"]
    assert (len(whole.details["words"]), predictor.cut) == (5, 2)
    (row,) = predictor.task.encode_examples(
        [Example(Words(tuple(texts[1].split())), "O O B-VP B-VP", "x:1")], Ledger(), "cut"
    )
    assert (len(row.target), len(row.source)) == (2, 2 * (5 + 2))
    predictor.longer = "error"
    with pytest.raises(InputError, match="text 1 has 11 tokens, this model takes at most 5"):
        predictor.predict(texts)


def test_label_bias(tmp_path):
    """Whatever the amount of data, an MEMM goes with the first letter, and a CRF is right."""
    path = Path(__file__).parents[2] / "benchmarks" / "label_bias.py"
    spec = importlib.util.spec_from_file_location("label_bias", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for count, found in benchmark.compare([20, 200], tmp_path).items():
        assert found["memm"] == pytest.approx((0.6, 0.4), abs=0.02), count
        assert min(found["crf"]) > 0.9, count
