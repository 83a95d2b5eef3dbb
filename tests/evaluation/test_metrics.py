"""Numbers by hand, by brute force, and by sacreBLEU itself."""

import functools
import math
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.config.run import Config
from regard.data.vocabulary import Vocabularies
from regard.evaluation.evaluate import Nats
from regard.evaluation.metrics import (
    OF_PROBABILITIES,
    better,
    corpus_score,
    edit_distance,
    score,
    score_answers,
    token_accuracy,
)
from regard.tasks import TASKS, make_task
from regard.tasks.seq2seq import Seq2SeqTask
from regard.tasks.task import Answer, Metric

OUTPUTS = ["the cat sat on a mat", "a dog", "ein Hund läuft über die Straße", ""]
REFERENCES = ["the cat sat on the mat", "the dog runs", "ein Hund läuft über die Straße", "nothing"]
RIVALS = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf, "ter": sacrebleu.corpus_ter}


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_exact_and_error_are_shares_of_whole_answers():
    outputs, references = ["a b", "c", "d", "e"], [["x", "a b"], ["c"], ["D"], ["e "]]
    assert score("exact", outputs, references) == 50
    assert score("error", outputs, references) == 50
    assert score("exact", outputs[:1], references[:1]) == 100
    assert score("error", outputs[:1], references[:1]) == 0


@pytest.mark.parametrize("metric", ["wer", "per"])
def test_word_and_phoneme_error_rates_by_the_nearest_reference(metric):
    outputs = ["a b c", "d e", ""]
    references = [["x y z w", "a b d"], ["d e"], ["f", "g h"]]
    assert score(metric, outputs, references) == pytest.approx(100 * (1 + 0 + 1) / (3 + 2 + 1))
    assert score(metric, ["a a a"], [["b"]]) == 300  # more edits than tokens
    assert score(metric, ["the cat sat"], [["the  cat sits"]]) == pytest.approx(100 / 3)


def test_the_character_error_rate_counts_characters():
    assert score("cer", ["1234", "20"], [["1294"], ["2", "201"]]) == pytest.approx(100 * (1 + 1) / (4 + 1))
    assert score("cer", ["a b"], [["a c"]]) == pytest.approx(100 / 3)
    assert score("wer", ["1234"], [["1294"]]) == 100


def test_token_accuracy_by_the_best_reference():
    assert token_accuracy(["a b c"], [["a x c d"]]) == 2 / 4
    assert token_accuracy(["a b c d"], [["a x c"]]) == 2 / 4
    outputs, references = ["a b", "c d e"], [["b a", "a x"], ["c d e"]]
    assert token_accuracy(outputs, references) == (1 + 3) / (2 + 3)
    assert score("accuracy", outputs, references) == 80
    assert score("accuracy", [""], [["a"]]) == 0


def test_tokens_before_the_first_error():
    assert score("prefix", ["a b x d"], [["a b c d"]]) == 50
    assert score("prefix", ["a b c d e"], [["a b c d"]]) == 100  # what follows is behind the last
    assert score("prefix", ["x b c d", "a"], [["a b c d"], ["b", "a c"]]) == 25  # the mean, by the best reference
    assert score("prefix", ["", "a"], [[""], [""]]) == 50


@pytest.mark.parametrize("metric", ["exact", "prefix", "error", "wer", "cer", "per", "accuracy"])
def test_of_nothing_no_metric_is_a_number(metric):
    assert math.isnan(score(metric, [], []))


@pytest.mark.parametrize("metric", ["exact", "error", "wer", "cer", "per", "accuracy"])
def test_outputs_and_references_must_be_as_many(metric):
    with pytest.raises(ValueError, match="zip"):
        score(metric, ["a", "b"], [["a"]])


def test_perplexity_is_not_made_of_outputs():
    with pytest.raises(ValueError, match="perplexity is not made of outputs alone"):
        score("perplexity", ["a"], [["a"]])


@pytest.mark.parametrize("metric", ["bleu", "chrf", "exact", "accuracy"])
def test_larger_is_better(metric):
    assert better(Seq2SeqTask, metric)(2, 1)
    assert not better(Seq2SeqTask, metric)(1, 2)
    assert not better(Seq2SeqTask, metric)(1, 1)


@pytest.mark.parametrize("metric", ["ter", "error", "wer", "cer", "per", "perplexity"])
def test_smaller_is_better(metric):
    assert better(Seq2SeqTask, metric)(1, 2)
    assert not better(Seq2SeqTask, metric)(2, 1)
    assert not better(Seq2SeqTask, metric)(1, 1)


@pytest.mark.parametrize("kind", ["rnn", "language model", "classifier", "reader"])
def test_of_every_metric_the_right_answers_have_the_better_figure(kind):
    """And of those made of probabilities, the model that is surprised less."""
    task = SimpleNamespace(metrics=TASKS[kind].metrics, separator="")
    texts = ["b c d e f", "c d", "e"]
    references = [[text] for text in texts]
    right, wrong = ([Answer(text, 0.0) for text in some] for some in (texts, texts[::-1]))
    nats = Nats(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]), [5, 5])
    for metric in (one for one in task.metrics if isinstance(one, str)):
        if metric in OF_PROBABILITIES:
            good, bad = (nats.figures([number])[metric] for number in range(2))
        else:
            good, bad = (score_answers(task, metric, answers, references) for answers in (right, wrong))
        assert better(task, metric)(good, bad), metric
        assert not better(task, metric)(bad, good), metric
        assert not better(task, metric)(good, good), metric


def test_not_a_number_is_never_better():
    assert not any(better(Seq2SeqTask, metric)(math.nan, 1.0) for metric in ("bleu", "per"))


@pytest.mark.parametrize("smaller", [True, False])
def test_a_metric_of_a_tasks_own(smaller):
    """It is computed by the task, and says itself what is better, even under a name that is known here."""

    class Counting(Seq2SeqTask):
        metrics = (Metric("bleu", lambda answers, references: float(len(answers)), smaller), "exact")

    assert better(Counting, "bleu")(1, 2) is smaller
    assert better(Counting, "bleu")(2, 1) is not smaller
    answers, references = [Answer("a", 0.0), Answer("b", 0.0)], [["a"], ["c"]]
    assert score_answers(Counting, "bleu", answers, references) == 2
    made = make_task(
        Config.model_validate({"data": {"kind": "reverse"}, "model": {"kind": "rnn"}}), Vocabularies(None, None)
    )
    assert score_answers(made, "exact", answers, references) == score("exact", ["a", "b"], references) == 50


# --- by brute force --------------------------------------------------------------------------------------------------


def naive(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    """Every way to edit, tried."""

    @functools.cache
    def fewest(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        if left[i - 1] == right[j - 1]:
            return fewest(i - 1, j - 1)
        return 1 + min(fewest(i - 1, j), fewest(i, j - 1), fewest(i - 1, j - 1))

    return fewest(len(left), len(right))


words = st.lists(st.sampled_from("abc"), max_size=8).map(tuple)


@settings(deadline=None, max_examples=200)
@given(words, words)
def test_edit_distance_is_that_of_brute_force(left, right):
    assert edit_distance(left, right) == naive(left, right) == edit_distance(right, left)


@settings(deadline=None, max_examples=100)
@given(words, words, words)
def test_edit_distance_is_a_distance(left, middle, right):
    assert (edit_distance(left, right) == 0) == (left == right)
    assert edit_distance(left, right) <= edit_distance(left, middle) + edit_distance(middle, right)


# --- by sacreBLEU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", RIVALS)
def test_figure_is_that_of_sacrebleu(metric):
    wanted = RIVALS[metric](OUTPUTS, [REFERENCES]).score
    assert 0 < wanted < 100
    assert score(metric, OUTPUTS, [[reference] for reference in REFERENCES]) == wanted


@pytest.mark.parametrize("metric", RIVALS)
def test_several_references_are_those_of_sacrebleu(metric):
    more = ["a cat sat on a mat", None, "der Hund läuft", None]
    grouped = [[first, *([second] if second else [])] for first, second in zip(REFERENCES, more, strict=True)]
    wanted = RIVALS[metric](OUTPUTS, [REFERENCES, more]).score
    assert score(metric, OUTPUTS, grouped) == wanted != score(metric, OUTPUTS, [[r] for r in REFERENCES])


@pytest.mark.parametrize("metric", RIVALS)
def test_signature_says_how_the_figure_was_made(metric):
    figure, signature = corpus_score(metric, OUTPUTS, [[reference] for reference in REFERENCES])
    assert figure == score(metric, OUTPUTS, [[reference] for reference in REFERENCES])
    assert f"version:{sacrebleu.__version__}" in signature
    assert "nrefs:1" in signature
    assert ("tok:13a" in signature) == (metric == "bleu")


@pytest.mark.parametrize("metric", ["bleu", "chrf", "exact", "accuracy"])
def test_right_outputs_have_the_best_figure(metric):
    assert score(metric, REFERENCES, [[reference] for reference in REFERENCES]) == pytest.approx(100)
