"""A run as a function: loading, batches, prefixes, scores; and evaluation over it."""

import copy
import itertools
import math
import random

import pytest
import torch
from random_runs import drawn
from saying import saying

import regard
from regard.config.data import TableData
from regard.config.run import EvaluateConfig
from regard.data.batching import Row, collate
from regard.data.examples import Example
from regard.errors import DataError, InputError
from regard.evaluation.evaluate import evaluate, measure_nats
from regard.inference.engine import Request
from regard.inference.predictor import group_by_length
from regard.tasks import make_task


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return regard.load(tiny_run, device="cpu")


def test_text_in_text_out(predictor):
    assert isinstance(predictor("abc"), str)
    assert predictor(["abc", "", "b"]) == [predictor("abc"), "", predictor("b")]
    with pytest.raises(InputError, match=r"a text or a list of texts is wanted, int came\."):
        predictor(5)


def test_opening_a_run_draws_nothing_from_whoever_opens_it(tiny_run):
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    regard.load(tiny_run, device="cpu")
    assert torch.equal(torch.rand(3), wanted)


def test_scores_are_the_sums_of_tokens(predictor):
    (outputs,) = predictor.predict(["abca"], best=2)
    for output in outputs:
        total = sum(token.logprob for token in output.tokens)
        assert output.score == pytest.approx(total / ((5 + len(output.tokens)) / 6) ** 0.6, rel=1e-5)


def test_prefixes_are_kept(predictor):
    answers = predictor.predict(["abc", "cb"], prefixes=["c", ""])
    assert answers[0][0].text.startswith("c")
    with pytest.raises(InputError, match="1 prefixes came for 2 texts"):
        predictor.predict(["a", "b"], prefixes=["c"])


def test_settings_of_another_type_are_refused(predictor):
    message = r"settings is dict, expected DecodeConfig: .*predictor\.config\.decode\.model_copy\(update="
    with pytest.raises(InputError, match=message):
        predictor.predict(["abc"], settings={"beam_size": 1})
    with pytest.raises(InputError, match=message):
        next(predictor.stream("abc", settings={"beam_size": 1}))


def test_how_texts_are_grouped_changes_nothing(predictor):
    texts = ["abcd", "a", "", "dcb", "bb"] * 3
    together = predictor.predict(texts, budget=9999)
    for few, many in zip(predictor.predict(texts, budget=8), together, strict=True):
        assert [output.text for output in few] == [output.text for output in many]
        assert [output.score for output in few] == pytest.approx([output.score for output in many])


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_seeded_samples_are_the_same_under_any_load(tmp_path, kind):
    changes = ["decode.sample=true", "decode.temperature=2", "decode.top_p=0.95", "decode.max_ratio=0"]
    predictor, order = regard.load(drawn(tmp_path / "run", kind), changes, "cpu"), random.Random(3)
    texts = ["".join(order.choices("abcdefghijklm ", k=order.randint(1, 30))) for _ in range(20)]
    alone = {text: [one.text for one in predictor.predict([text], best=2)[0]] for text in texts}
    assert len({answer for answers in alone.values() for answer in answers}) > 20
    for size in (3, 20):
        order.shuffle(texts)
        for start in range(0, len(texts), size):
            some = texts[start : start + size]
            for text, answers in zip(some, predictor.predict(some, best=2), strict=True):
                assert [one.text for one in answers] == alone[text]


@pytest.mark.parametrize(("budget", "most"), [(1, None), (12, None), (20, 3), (9999, 2), (9999, None)])
def test_groups_are_within_their_bounds(budget, most):
    """And no smaller than they must be: the next row would not fit."""
    rows = [[0] * length for length in (3, 0, 5, 1, 1, 4, 9, 2, 5, 0, 1, 6)]
    groups = list(group_by_length(rows, budget, most))
    sizes = [[len(rows[i]) for i in group] for group in groups]
    assert [length for some in sizes for length in some] == sorted(filter(None, map(len, rows)))
    assert sorted(i for group in groups for i in group) == [i for i, row in enumerate(rows) if row]
    assert all(len(some) * some[-1] <= budget or len(some) == 1 for some in sizes)
    assert all(len(some) <= (most or 99) for some in sizes)
    for some, (first, *_) in itertools.pairwise(sizes):
        assert (len(some) + 1) * first > budget or len(some) == most


def test_a_wide_beam_works_on_fewer_texts_at_once(predictor, monkeypatch):
    """A step's probabilities are bounded: hypotheses times the vocabulary."""
    texts, start, sizes = ["abcd", "a", "dcb", "bb"], predictor.model.start, []
    settings = predictor.config.decode.model_copy(update={"beam_size": 3})
    wanted = predictor.predict(texts, settings=settings)
    monkeypatch.setattr("regard.inference.predictor.CELLS", 2 * 3 * predictor.target.size)
    monkeypatch.setattr(predictor.model, "start", lambda *given: sizes.append(len(given[0])) or start(*given))
    found = predictor.predict(texts, settings=settings)
    assert [[output.text for output in one] for one in found] == [[output.text for output in one] for one in wanted]
    assert sizes == [2, 2]
    sizes.clear()
    predictor.predict(texts, settings=settings, best=6)  # the beam is as wide as that
    assert sizes == [1, 1, 1, 1]


@pytest.mark.parametrize("beam", [1, 2])
def test_who_is_finished_does_not_wait_for_the_longest(predictor, monkeypatch, beam):
    steps, step = [], predictor.model.step
    monkeypatch.setattr(predictor.model, "step", lambda *given: steps.append(1) or step(*given))
    limits = {"max_ratio": 2.0, "max_extra": 0, "min_length": 16}  # each goes on to its limit
    settings = predictor.config.decode.model_copy(update={"beam_size": beam, **limits})
    sources = predictor.encode(["abcdabcd", "", "a"])
    when = {}
    for place, outputs in filter(None, predictor.answer(sources, Request(settings))):
        assert not torch.is_inference_mode_enabled()
        when[place] = len(steps)
        assert [output.text for output in outputs] == [
            predictor.predict([sources[place].text], settings=settings)[0][0].text
        ]
        del steps[when[place] :]
    assert when[1] == 0
    assert 0 < when[2] < when[0]


def test_only_what_does_not_fit_is_cut():
    predictor = saying(lambda text: [text], "text.longer=cut", "text.max_length=7")
    for length, cut in ((6, 0), (7, 0), (8, 1)):
        (row,) = predictor.encode(["a" * length])
        assert (len(row.ids), row.length, predictor.cut) == (min(length, 7) + 1, length, cut)  # and <eos>


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_a_stream_comes_piece_by_piece_whatever_the_beam(tmp_path, kind):
    """It is what greedy search writes: a beam knows its answer at the end alone."""
    predictor = regard.load(drawn(tmp_path / "run", kind), ["decode.beam_size=4"], "cpu")
    greedy = predictor.config.decode.model_copy(update={"beam_size": 1})
    (answer,) = predictor.predict(["abc"], settings=greedy)[0]
    parts = list(predictor.stream("abc"))
    assert "".join(parts) == answer.text
    assert len(list(filter(None, parts))) == len(answer.tokens) - 1 > 3  # its letters


def test_perplexity_is_the_mean_surprise(predictor):
    examples = [Example("abc", "cba", ""), Example("b", "b", "")]
    total = tokens = 0
    for example in examples:
        source, target = (v.encode(t).ids for v, t in zip((predictor.source, predictor.target), example, strict=False))
        batch = collate([Row([*source, 3], target)])
        with torch.inference_mode():
            logprobs = predictor.model.logits(batch).log_softmax(-1).gather(-1, batch.answer[..., None])
        total -= float(logprobs.sum())
        tokens += batch.answer.numel()
    found = measure_nats(predictor, examples).figures(range(len(examples)))
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_evaluation_adds_up(predictor):
    examples = [Example("ab", "ba", ""), Example("ab", "xx", ""), Example("abcde", "?", "")]
    settings = EvaluateConfig(metrics=("exact", "perplexity", "bleu"), buckets=(3,))
    found = evaluate(predictor, examples, settings)
    assert found.examples == 3
    assert [bucket["examples"] for bucket in found.buckets] == [2, 1]
    assert [bucket["length"] for bucket in found.buckets] == ["1-3", "4+"]
    assert "version:" in found.signatures["bleu"]
    grouped = evaluate(predictor, examples, settings.model_copy(update={"multi_reference": True}))
    assert grouped.references == [["ba", "xx"], ["?"]]
    with pytest.raises(DataError, match=r"nothing to evaluate on: this split has no examples\.$"):
        evaluate(predictor, [], settings)
    other = copy.copy(predictor)
    data = TableData(kind="tsv", train=("a",), cut_valid=3)
    other.task = make_task(predictor.config.model_copy(update={"data": data}), predictor.task.vocabularies)
    with pytest.raises(DataError, match=r"no examples\. Set data\.test or data\.cut_test for test\.$"):
        evaluate(other, [], settings)
