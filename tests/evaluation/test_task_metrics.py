"""Metrics of labels, summaries and spans, against counting by hand and the library's own."""

import json
import math

import pytest
from conftest import tiny
from rouge_score.rouge_scorer import RougeScorer

import regard
from regard.config.run import Config, EvaluateConfig
from regard.data.batching import Row, collate
from regard.data.examples import Example
from regard.data.vocabulary import PAD
from regard.errors import DataError
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.evaluation.metrics import (
    better,
    calibration_error,
    confusion_table,
    macro_f1,
    normalize_answer,
    score,
    word_f1,
)
from regard.tasks.classification import ClassificationTask
from regard.tasks.task import Answer
from regard.training.prepare import start_run

SMALL = {"size": 8, "feedforward": 8, "heads": 1, "layers": 1}
WANTED = [["a"], ["a"], ["b"], ["c"]]
GIVEN = ["a", "b", "b", "b"]


def test_macro_f1_is_the_mean_over_labels():
    assert macro_f1(GIVEN, WANTED) == pytest.approx((2 / 3 + 2 * 1 / 4 + 0) / 3)
    assert macro_f1(["a,b", ""], [["b, a"], ["a"]], ",") == pytest.approx((2 / 3 + 1) / 2)
    assert macro_f1(["a|b, c", ""], [["b, c|a"], ["a"]], "|") == pytest.approx((2 / 3 + 1) / 2)
    assert macro_f1(["a, b", "a"], [["a, c"], ["a"]]) == pytest.approx(1 / 3)  # whole texts are labels
    assert macro_f1(["a"], [["a"]]) == 1


@pytest.mark.parametrize("metric", ["span_exact", "span_f1"])
def test_spans_that_normalize_to_nothing_count_as_in_squads_script(metric):
    """Two of nothing agree; a reference of nothing only counts where there is no other."""
    assert score(metric, ["The"], [["a!"]]) == 100
    assert score(metric, ["The"], [["cat"]]) == score(metric, ["cat"], [["the"]]) == 0
    assert score(metric, ["The"], [["the", "cat"]]) == 0
    assert score(metric, ["the cat"], [["an", "cat"]]) == 100


def test_of_several_right_labels_the_given_one_counts():
    assert macro_f1(["b", "a"], [["a", "b"], ["a"]]) == 1
    assert confusion_table(["b", "a"], [["a", "b"], ["a"]]) == {"a": {"a": 1, "b": 0}, "b": {"a": 0, "b": 1}}


def test_confusion_counts_every_pair():
    assert confusion_table(GIVEN, WANTED) == {
        "a": {"a": 1, "b": 1, "c": 0},
        "b": {"a": 0, "b": 1, "c": 0},
        "c": {"a": 0, "b": 1, "c": 0},
    }


def test_only_a_whole_label_is_accurate():
    outputs, wanted = ["New York", "New Jersey"], [["New York"], ["New York"]]
    assert score("accuracy", outputs, wanted, "") == 50
    assert score("accuracy", outputs, wanted) == 75  # of what was written, every token counts


def classifier(folder, labels, multi_label=False):
    """A predictor of labels that has learned next to nothing; of several with a bar between them."""
    folder.mkdir(exist_ok=True)
    path = folder / "data.jsonl"
    rows = [{"source": f"text {n}", "target": labels[n % len(labels)]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    parts = {
        "data": {"kind": "jsonl", "train": (str(path),), "cut_valid": 8},
        "text": {"source": {"kind": "word"}, "target": {"kind": "label", "separator": "|" if multi_label else ""}},
        "model": {"kind": "classifier", "multi_label": multi_label, **SMALL},
        "evaluate": {"metrics": ("f1",)},
    }
    config = Config.model_validate({**tiny().model_dump(), **parts})
    fit(start_run(config, folder / "run"), folder / "run", lambda event: None, device="cpu")
    return regard.load(folder / "run", device="cpu")


def scores(predictor, pairs):
    """The evaluation of outputs that are given, each with the right answer."""
    given = {str(number): output for number, (output, _) in enumerate(pairs)}
    predictor.predict = lambda texts: [[Answer(given[text], 0.0, [])] for text in texts]
    examples = [Example(str(number), wanted, "x:1") for number, (_, wanted) in enumerate(pairs)]
    return evaluate(predictor, examples, EvaluateConfig(metrics=("exact", "accuracy", "f1", "ece")))


def test_several_labels_are_compared_as_sets(tmp_path):
    predictor = classifier(tmp_path, ["a|b, c", "a", "d|b, c", ""], multi_label=True)
    found = scores(predictor, [("b, c|a", "a|b, c"), ("a|b, c|d", "d | a|b, c"), ("d", "d|a"), ("", "")])
    assert found.metrics == pytest.approx({"exact": 75, "accuracy": 75, "f1": 100 * (4 / 5 + 1 + 1) / 3, "ece": 25})
    assert found.confusion is None  # of sets, no table can be read
    assert found.outputs[0] == "b, c|a"  # as it was said


def test_a_set_of_labels_is_as_likely_as_its_labels_and_the_lack_of_others(tmp_path):
    predictor = classifier(tmp_path, ["a|b", "a", "c", ""], multi_label=True)
    (answer,) = predictor.predict(["0"])[0]
    chances = {token.text: math.exp(token.logprob) for token in answer.tokens}
    chosen = set(answer.text.split("|"))
    wanted = math.prod(chance if name in chosen else 1 - chance for name, chance in chances.items())
    assert math.exp(answer.score) == pytest.approx(wanted, rel=1e-5)


def test_the_temperature_of_several_labels_is_the_least_surprising(tmp_path):
    predictor = classifier(tmp_path, ["a|b", "a", "c", ""], multi_label=True)
    examples = [Example(str(number), target, "x:1") for number, target in enumerate(["a|b", "c", "", "a"])]
    task, model = predictor.task, predictor.model
    (best,) = task.calibrate(model, lambda: [batch for batch, _ in task.scoring_batches(examples)]).values()

    def surprise(value):
        """By the probabilities of the answers, which the temperature changes."""
        model.temperature.data.fill_(float(value))
        total = 0.0
        for example in examples:
            wanted = set(example.target.split("|"))
            for token in predictor.predict([example.source])[0][0].tokens:
                total -= token.logprob if token.text in wanted else math.log1p(-math.exp(token.logprob))
        return total

    found = {value: surprise(value) for value in (0.5, 1.0, 2.0, 4.0, 8.0)}
    assert surprise(best) <= min(found.values()) + 1e-4
    assert surprise(best) < max(found.values()) - 1e-2


def test_one_label_is_the_whole_text(tmp_path):
    predictor = classifier(tmp_path, ["New York", "New Jersey", "science, fact", "science, fiction"])
    pairs = [("New York", "New Jersey"), ("science, fact", "science, fiction"), ("New York", "New York")]
    found = scores(predictor, pairs).metrics
    assert found == pytest.approx({"exact": 100 / 3, "accuracy": 100 / 3, "f1": 100 * (2 / 3) / 4, "ece": 200 / 3})


def test_texts_without_labels_are_learned_and_scored(tmp_path):
    labels = ["", "", " ", "a"]
    predictor = classifier(tmp_path, labels, multi_label=True)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["train"]["dropped"] == {}
    assert predictor.target.size == 5
    assert collate([Row([4], [PAD], False)] * 3).tokens == 3
    with pytest.raises(DataError, match="nothing to tell apart"):
        classifier(tmp_path / "other", labels)


@pytest.mark.parametrize("metric", ["nats", "bpb"])
def test_metrics_that_a_classifier_does_not_have(tmp_path, metric):
    predictor = classifier(tmp_path, ["a", "b"])
    with pytest.raises(
        DataError, match=rf"a model of kind classifier has no {metric}: set evaluate\.metrics .* f1, ece"
    ):
        evaluate(predictor, [Example("text", "a", "x:1")], EvaluateConfig(metrics=(metric,)))


def test_calibration_error_by_hand():
    sure = [0.95, 0.95, 0.55, 0.55]
    right = ["x", "y", "x", "x"]
    # the bin of 0.95 is right half of the time, that of 0.55 always
    assert calibration_error(sure, right, [["x"]] * 4) == pytest.approx((2 * 0.45 + 2 * 0.45) / 4)
    assert calibration_error([1.0, 1.0], ["x", "x"], [["x"]] * 2) == 0
    assert better(ClassificationTask, "ece")(1.0, 2.0)


@pytest.mark.parametrize(
    ("low", "high", "apart"), [(0.52, 0.54, True), (0.47, 0.53, False), (0.59, 0.61, True), (0.61, 0.66, False)]
)
def test_confidences_are_compared_in_fifteen_bins(low, high, apart):
    """The lower one is right, the higher wrong: in one bin that is nearly even, in two it is twice an error. The edges
    are fifteenths: 7/15 is 0.467, 8/15 0.533, 9/15 0.6 and 10/15 0.667."""
    wanted = ((1 - low) + high) / 2 if apart else abs(low + high - 1) / 2
    assert calibration_error([low, high], ["x", "y"], [["x"], ["x"]]) == pytest.approx(wanted)


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougel"])
def test_rouge_is_that_of_the_library_for_english(metric):
    output, wanted = "The council plans to meet, it said.", "Council plans a meeting on Tuesday, it said"
    name = metric.replace("l", "L")
    theirs = RougeScorer([name]).score(wanted, output)[name].fmeasure
    assert score(metric, [output], [[wanted]]) == pytest.approx(100 * theirs)
    assert score(metric, [output], [["nothing", wanted]]) == pytest.approx(100 * theirs)


def test_rouge_l_reads_a_summary_as_one_line():
    """The longest common subsequence is that of the whole texts: sentences in another order do not count in full."""
    output, wanted = "it rains today\nthe sun will shine", "the sun will shine\nit rains today"
    assert score("rougel", [output], [[wanted]]) == pytest.approx(100 * 4 / 7)
    assert score("rouge1", [output], [[wanted]]) == 100


def test_rouge_keeps_vowel_signs_with_their_letters():
    assert score("rouge1", ["की"], [["का"]]) == 0
    assert score("rouge1", ["किताब।"], [["किताब"]]) == 100
    assert score("rouge1", ["a ❤️"], [["b ❤️"]]) == 0  # the sign behind a heart is no word


def test_rouge_counts_korean_words():
    assert score("rouge1", ["오늘 약속 취소하기"], [["약속 취소하기"]]) == pytest.approx(100 * 4 / 5)
    assert score("rougel", ["오늘 약속"], [["오늘 약속"]]) == 100


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("The  Cat!", "cat"), ("an  apple, a day", "apple day"), ("theatre", "theatre"), ("서울, 한국", "서울 한국")],
)
def test_spans_are_compared_bare(text, wanted):
    assert normalize_answer(text) == wanted


def test_spans_by_squads_rules():
    outputs, wanted = ["the cat", "red dog house", ""], [["A cat.", "x"], ["dog", "big red dog"], ["y"]]
    assert score("span_exact", outputs, wanted) == pytest.approx(100 / 3)
    assert score("span_f1", outputs, wanted) == pytest.approx(100 * (1 + 2 * 2 / 6 + 0) / 3)
    assert word_f1("go go go on", "go go up") == pytest.approx(2 * 2 / (4 + 3))  # two of three are shared
    assert word_f1("the", "a") == 1
    assert word_f1("", "x") == 0
