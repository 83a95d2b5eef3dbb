"""The degeneration guard, on outputs made by hand; and the second try, on a model that loops."""

import math

import pytest
from saying import saying

import regard
from regard.config.run import DecodeConfig
from regard.inference.constraints import length_penalty
from regard.inference.degeneration import Loop, find_flags, find_loop, flag_answers, flags, surprise
from regard.tasks.task import Answer, Bounds, Token

WORDS = ["<pad>", "<unk>", "<bos>", "<eos>", " ja", " nein", " 0", " doch", "."]


def output(ids, eos=-0.1):
    """An output of these ids whose <eos> has this log-probability."""
    tokens = [Token(WORDS[i], -0.1, i) for i in ids]
    return Answer("".join(WORDS[i] for i in ids), -1.0, [*tokens, Token("<eos>", eos, 3)])


def flagged(source, ids, limit=100, least=1 / 3, eos=-0.1):
    return flags(source, output(ids, eos), Bounds(least, limit), spell=lambda ids: "".join(WORDS[i] for i in ids))


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([], Loop(0, 0, 0)),
        ([4], Loop(1, 0, 1)),
        ([4, 5, 6], Loop(1, 0, 1)),
        ([4, 4], Loop(2, 1, 2)),
        ([5, 4, 4, 4, 6], Loop(3, 3, 4)),
        ([4, 5, 4, 5, 4, 5, 4], Loop(3, 4, 6)),
        ([4, 4, 5, 4, 4, 5, 4, 4, 5], Loop(3, 6, 9)),
    ],
)
def test_the_longest_loop(tokens, loop):
    assert find_loop(tokens) == loop


def test_a_good_output_has_no_flags():
    assert flagged([10, 11, 12], [4, 5, 7]) == []
    assert flagged([10, 11, 12], [4, 4, 4, 5]) == []
    assert flagged([], []) == []


def test_a_loop_is_flagged_wherever_it_is():
    assert flagged([10, 11], [5, 4, 4, 4, 4, 8]) == ["repeats 'ja' 4 times in a row"]
    assert flagged([10, 11], [4, 5] * 5) == ["repeats 'ja nein' 5 times in a row"]


def test_a_source_may_repeat_and_so_may_digits():
    assert flagged([10, 10, 10, 10, 10], [4, 4, 4, 4, 4]) == []
    assert flagged([10, 11], [6] * 9) == []
    assert flagged([10, 11], [6] * 10) == ["repeats '0' 10 times in a row"]


def test_an_output_that_was_cut():
    assert flagged([10, 11], [4, 5, 7], limit=3, eos=-2.0) == ["was cut at its limit of 3 tokens"]
    assert flagged([10, 11], [4, 5, 7], limit=3, eos=math.log(0.6)) == []  # it would have ended there by itself
    assert flagged([10, 11], [4, 5, 7], limit=4, eos=-2.0) == []


def test_an_output_that_leaves_its_source_unsaid():
    assert flagged([10], []) == ["is empty"]
    assert flagged(range(10, 22), [4, 5, 7]) == ["is short: 3 tokens for a source of 12"]
    assert flagged(range(10, 22), [4, 5, 7, 8]) == []
    assert flagged(range(10, 21), [4]) == []
    assert flagged(range(10, 60), [4, 5, 7], least=1 / 20) == []


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return regard.load(tiny_run, device="cpu")


def test_a_run_judges_with_its_own_limit(predictor):
    settings = DecodeConfig(beam_size=1, max_ratio=1.5, max_extra=2, min_length=8)
    ((cut,),) = predictor.predict(["abc"], settings=settings)  # too small to have learned how to end
    assert len(cut.tokens) - 1 == 8
    (source,) = predictor.encode(["abc"])
    assert "was cut at its limit of 8 tokens" in find_flags(predictor.task, source.ids[:-1], cut, settings)


def test_unknown_words_are_words(predictor, monkeypatch):
    """They count when a limit is reckoned, and an empty answer to them is flagged."""
    (source,) = predictor.encode(["!" * 12])
    assert set(source.ids) == {1, 3}
    settings = DecodeConfig(beam_size=1, max_ratio=1.0, max_extra=5)
    long = [answer.flags for answer in flag_answers(predictor, source, [output([4, 5, 7, 8] * 3, eos=-3.0)], settings)]
    assert long == [[]]
    assert flag_answers(predictor, source, [output([])], settings)[0].flags == ["is empty"]


def test_a_second_try_replaces_a_flagged_answer(predictor, monkeypatch):
    loop, good = [4] * 6, [4, 5, 7]
    tries = []

    def predict(texts, *, best, settings):
        tries.append((list(texts), settings.no_repeat_ngram))
        return [[output(good)] for _ in texts]

    monkeypatch.setattr(predictor, "predict", predict)
    monkeypatch.setattr(predictor.target, "decode", lambda ids: "".join(WORDS[i] for i in ids))
    settings = DecodeConfig()
    (source,), answers = predictor.encode(["b"]), [output(loop)]
    (flagged_,) = flag_answers(predictor, source, answers, settings)
    assert flagged_.flags == ["repeats 'ja' 6 times in a row"]
    assert not tries
    assert flag_answers(predictor, source, [output(good)], settings, retry=True) == [output(good)._replace(flags=[])]
    assert not tries
    (second,) = flag_answers(predictor, source, answers, settings, retry=True)
    assert tries == [(["b"], 3)]
    assert second.text == " ja nein doch"
    (note,) = second.flags
    assert note.endswith("because the first answer repeats 'ja' 6 times in a row")


@pytest.mark.parametrize(("before", "after"), [(0, [3]), (2, []), (3, []), (5, [3])])
def test_a_second_try_forbids_what_was_allowed_and_gives_as_many_answers(before, after):
    """Where trigrams were forbidden already, it would be the same."""
    predictor = saying(lambda text: ["no no no no ", "ab", "cd"])
    settings = predictor.config.decode.model_copy(update={"no_repeat_ngram": before})
    ((source,), (answers,)) = predictor.encode(["ab"]), predictor.predict(["ab"], best=3, settings=settings)
    predictor.engine.asked.clear()
    assert len(flag_answers(predictor, source, answers, settings, retry=True)) == 3
    asked = [(request.settings.no_repeat_ngram, request.best) for _, request in predictor.engine.asked]
    assert asked == [(size, 3) for size in after]


def test_a_second_try_that_is_much_unlikelier_is_not_kept(predictor, monkeypatch):
    settings = DecodeConfig()
    score = -10.0 / length_penalty(2.0, settings.length_penalty)
    unlikely = Answer("x", score, [Token("x", -5.0, 5), Token("<eos>", -5.0, 3)])
    monkeypatch.setattr(predictor, "predict", lambda texts, *, best, settings: [[unlikely]])
    (kept,) = flag_answers(predictor, *predictor.encode(["b"]), [output([4] * 6)], settings, retry=True)
    assert kept.text == " ja" * 6
    assert surprise(unlikely, settings) == pytest.approx(5.0)
