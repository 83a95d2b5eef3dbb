"""What the verbs pass on and say, with models that answer as they are told."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
from conftest import TINY
from random_runs import drawn
from saying import saying

import regard
from regard.cli import demo as demo_verb
from regard.cli import verbs
from regard.data.examples import Example
from regard.errors import InputError
from regard.evaluation.evaluate import Evaluation


@pytest.fixture
def told(typed, monkeypatch):
    """Types a command to a run that says what it is told."""

    def run(say, *words, text=""):
        monkeypatch.setattr(regard, "load", lambda *given, **options: saying(say))
        return typed(*words, text=text)

    return run


def same(text):
    return [text]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("verbs") / "run", "transformer")


# --- lines in, answers out -------------------------------------------------------------------------------------------


def test_a_byte_order_mark_is_not_read(told):
    assert told(same, "predict", "run", text=b"\xef\xbb\xbfabc\ncba\n")[:2] == (0, "abc\ncba\n")


def test_errors_count_all_lines(told):
    """Also behind those that were answered together."""
    _, out, err = told(same, "predict", "run", text="ab\n" * 600 + "a" * 5000 + "\n")
    assert out.startswith("ab\n" * 600)
    assert "line 601 has 5,000 tokens" in err


def test_an_answer_is_a_line_and_several_are_its_columns(told):
    def say(text):
        return ["a\tb\nc", "d\n\te"]

    assert told(say, "predict", "run", text="x\ny\n")[1] == "a\tb c\n" * 2  # one answer is as it was written
    assert told(say, "predict", "run", "--best", "2", text="x\ny\n")[1] == "a b c\td  e\n" * 2


def test_every_answer_begins_with_the_prefix(told):
    assert told(same, "predict", "run", "--prefix", "of ", text="a\nb\n")[1] == "of a\nof b\n"


# --- looking ---------------------------------------------------------------------------------------------------------


def test_looking_at_an_answer_that_is_given(transformer, typed):
    assert typed("look", transformer, "abc", "--target", "cab")[1].startswith("abc -> cab\n")


@pytest.mark.parametrize("head", [None, 0, 2])
def test_the_numbers_of_a_row_are_those_of_its_head(transformer, typed, head):
    words = [] if head is None else ["--head", head]
    _, said, _ = typed("look", transformer, "abc", "--token", "1", *words)
    found = regard.look(regard.load(transformer, device="cpu"), "abc").calculate(1, head or 0)
    rows = [line for line in said.splitlines() if re.match(r"\s*(a|b|c|<eos>)\s+[-+]", line)]
    assert [line.split()[3] for line in rows] == [f"{weight:.4f}" for weight in found.weights.tolist()]
    assert f"head {head or 0})" in said


def test_agreement_is_sought_in_the_same_two_texts(monkeypatch, transformer, capsys):
    """The run of the other direction is shown the answer, and made to say the text."""
    there = regard.load(transformer, device="cpu")
    found, seen = regard.look(there, "ab cd", target="x yz"), []
    monkeypatch.setattr(verbs, "agree", lambda one, other: seen.append((one, other)) or [("x", "cd")])
    verbs.show_agreement(found, there)
    ((one, other),) = seen
    assert one is found
    assert (other.text, other.answer.text) == ("x yz", "ab cd")
    assert capsys.readouterr().out == "x - cd\n"


@pytest.mark.parametrize(
    ("languages", "said"),
    [
        (["de", "en"], ""),
        (["source", "target"], ""),  # as of a run that does not say
        (["en", "de"], "is from en to de, a run from de to en is wanted (text.languages)."),
        (["ko", "gist"], "is from ko to gist, a run from de to en is wanted (text.languages)."),
    ],
)
def test_a_run_of_another_direction_is_refused_by_its_languages(transformer, languages, said, capsys):
    there, back = (
        regard.load(transformer, [f"text.languages={json.dumps(pair)}"], device="cpu")
        for pair in (["en", "de"], languages)
    )
    found = regard.look(there, "ab", target="ba")
    if not said:
        verbs.show_agreement(found, back)
        return
    with pytest.raises(InputError) as caught:
        verbs.show_agreement(found, back)
    assert str(caught.value) == f"--back: {transformer} {said}"


def test_a_run_of_another_direction_is_refused_by_its_words(transformer):
    there = regard.load(transformer, device="cpu")
    look = regard.look(there, "ab", target="ba")
    found = dataclasses.replace(look, answers=[look.answer._replace(text="남자")])
    with pytest.raises(InputError, match=r"--back: .*run does not know the words of '남자'\. Give a run of the other"):
        verbs.show_agreement(found, there)


# --- what is passed on -----------------------------------------------------------------------------------------------


def test_an_export_is_quantized_as_asked(transformer, typed, tmp_path):
    pytest.importorskip("ctranslate2")
    sizes = []
    for name in ("float32", "int8"):
        status, _, err = typed("export", transformer, tmp_path / name, "--to", "ctranslate2", "--quantization", name)
        assert status == 0, err
        sizes.append((tmp_path / name / "model.bin").stat().st_size)
    assert sizes[1] < 0.6 * sizes[0]


def test_what_serving_is_told(typed, monkeypatch, tmp_path):
    """Options and --set, of the server and of its runs."""
    called = []
    monkeypatch.setattr("regard.server.app.serve", lambda *given: called.append(given))
    words = ["--port", "8001", "--keys", "one, two", "--set", "serve.max_queue=7", "--set", "text.longer=cut"]
    assert typed("serve", tmp_path / "a", tmp_path / "b", *words, "--engine", "torch")[0] == 0
    ((runs, settings, changes, device, engine),) = called
    assert (runs, changes, device, engine) == ([tmp_path / "a", tmp_path / "b"], ["text.longer=cut"], "auto", "torch")
    assert (settings.port, settings.keys, settings.max_queue) == (8001, ("one", "two"), 7)


@pytest.mark.parametrize(("test", "option"), [(5, ""), (0, " --split valid")])
def test_the_command_that_is_proposed_has_data(typed, tmp_path, test, option):
    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{one}{two}\t{two}{one}\n" for one in "abcde" for two in "abcde"))
    data = f"data={{kind='tsv', train=['{table}'], cut_valid=3, cut_test={test}}}"
    changes = [part for change in (*TINY[4:], data, "train.steps=1") for part in ("--set", change)]
    _, _, said = typed("train", "reverse", "--run", tmp_path / "run", *changes)
    assert f"next: regard evaluate {tmp_path}/run{option}, regard predict" in said


def test_the_demo_scores_what_training_never_saw(monkeypatch, tmp_path, capsys):
    seen, *others = (Example(text, text[::-1], f"x:{number}") for number, text in enumerate(("ab", "ab", "cd", "ab")))
    prepared, scored = SimpleNamespace(splits=SimpleNamespace(train=[seen], test=others)), []

    def evaluate(predictor, examples, settings):
        scored.extend(examples)
        return Evaluation({"exact": 50.0}, {}, [], len(examples), [], [], [])

    monkeypatch.setattr(demo_verb, "start_run", lambda *given: prepared)
    monkeypatch.setattr(demo_verb, "fit", lambda *given, **options: None)
    monkeypatch.setattr(demo_verb, "load", lambda *given, **options: saying(lambda text: ["21"]))
    monkeypatch.setattr(demo_verb, "evaluate", evaluate)
    demo_verb.demo(tmp_path / "run")
    assert [example.where for example in scored] == ["x:2"]
    assert "exact match 50.00 % of 1 unseen numbers" in capsys.readouterr().out
