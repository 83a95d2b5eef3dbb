"""Metrics of labels, summaries and spans, against counting by hand and the library's own."""

import pytest
from rouge_score.rouge_scorer import RougeScorer

from regard.metrics import bare, better, calibration_error, confusion, macro_f1, overlap, score

WANTED = [["a"], ["a"], ["b"], ["c"]]
GIVEN = ["a", "b", "b", "b"]


def test_macro_f1_is_the_mean_over_labels():
    assert macro_f1(GIVEN, WANTED) == pytest.approx((2 / 3 + 2 * 1 / 4 + 0) / 3)
    assert macro_f1(["a,b", ""], [["b, a"], ["a"]]) == pytest.approx((2 / 3 + 1) / 2)
    assert macro_f1(["a"], [["a"]]) == 1


def test_confusion_counts_every_pair():
    assert confusion(GIVEN, WANTED) == {
        "a": {"a": 1, "b": 1, "c": 0},
        "b": {"a": 0, "b": 1, "c": 0},
        "c": {"a": 0, "b": 1, "c": 0},
    }


def test_calibration_error_by_hand():
    sure = [0.95, 0.95, 0.55, 0.55]
    right = ["x", "y", "x", "x"]
    # the bin of 0.95 is right half of the time, that of 0.55 always
    assert calibration_error(sure, right, [["x"]] * 4) == pytest.approx((2 * 0.45 + 2 * 0.45) / 4)
    assert calibration_error([1.0, 1.0], ["x", "x"], [["x"]] * 2) == 0
    assert better("ece")(1.0, 2.0)


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougel"])
def test_rouge_is_that_of_the_library_for_english(metric):
    output, wanted = "The council plans to meet, it said.", "Council plans a meeting on Tuesday, it said"
    name = metric.replace("l", "L")
    theirs = RougeScorer([name]).score(wanted, output)[name].fmeasure
    assert score(metric, [output], [[wanted]]) == pytest.approx(100 * theirs)
    assert score(metric, [output], [["nothing", wanted]]) == pytest.approx(100 * theirs)


def test_rouge_counts_korean_words():
    assert score("rouge1", ["오늘 약속 취소하기"], [["약속 취소하기"]]) == pytest.approx(100 * 4 / 5)
    assert score("rougel", ["오늘 약속"], [["오늘 약속"]]) == 100


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("The  Cat!", "cat"), ("an  apple, a day", "apple day"), ("theatre", "theatre"), ("서울, 한국", "서울 한국")],
)
def test_spans_are_compared_bare(text, wanted):
    assert bare(text) == wanted


def test_spans_by_squads_rules():
    outputs, wanted = ["the cat", "red dog house", ""], [["A cat.", "x"], ["dog", "big red dog"], ["y"]]
    assert score("span_exact", outputs, wanted) == pytest.approx(100 / 3)
    assert score("span_f1", outputs, wanted) == pytest.approx(100 * (1 + 2 * 2 / 6 + 0) / 3)
    assert overlap("the", "a") == 1
    assert overlap("", "x") == 0
