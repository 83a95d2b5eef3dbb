"""CTranslate2: the same numbers as ours, for every form it can express; and words for what it cannot."""

import itertools
import os
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from random_runs import drawn
from serving import live

import regard
from regard.config.config import DecodeConfig
from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import ConfigError, InputError, RunError
from regard.inference import ctranslate2_engine as fast
from regard.inference import ctranslate2_model as engine
from regard.server.app import opened
from regard.training.checkpoint import save_weights, weights

pytest.importorskip("ctranslate2")

TEXTS = ["abc", "hello", "q", "zyxwvutsrq", "the same again", "mnopab"]
FORMS = {
    "pre": [],
    "post, learned, gelu": ["model.norm=post", "model.positions=learned", "model.activation=gelu"],
    "rotary, tanh": ["model.positions=rotary", "model.activation=gelu tanh", "model.rotary_base=500"],
    "none, norm, no scale": ["model.positions=none", "model.embedding_norm=true", "model.embedding_scale=false"],
    "untied": ["model.tied=false", "model.bias=false"],
    "two vocabularies": ["text.target.kind=char", "text.target.min_count=1", "model.epsilon=0.01"],
    "rms, gated, grouped": ["model.norm_kind=rms", "model.gated=true", "model.activation=silu", "model.key_heads=2"],
}
ALONE = ["pre", "post, learned, gelu", "rotary, tanh", "none, norm, no scale", "untied"]
LLAMA = [*FORMS["rms, gated, grouped"], "model.positions=rotary", "model.bias=false", "model.embedding_scale=false"]


def compared(run: Path, quick=None, **settings):
    """Both engines' answers to the same texts: equal, number by number."""
    ours, theirs = regard.load(run, device="cpu"), quick or fast.load(run, (), "cpu", "ctranslate2", 1)
    wanted = ours.predict(TEXTS, settings=chosen(ours, **settings))
    found = theirs.predict(TEXTS, settings=chosen(theirs, **settings))
    for ones, others in zip(wanted, found, strict=True):
        assert [one.text for one in others] == [one.text for one in ones]
        for one, other in zip(ones, others, strict=True):
            assert [token.id for token in other.tokens] == [token.id for token in one.tokens]
            assert other.score == pytest.approx(one.score, abs=1e-4)
            assert [t.logprob for t in other.tokens] == pytest.approx([t.logprob for t in one.tokens], abs=1e-4)
    return wanted


@pytest.mark.parametrize(
    ("kind", "form"),
    [*itertools.product(["transformer"], FORMS), *itertools.product(["language"], ALONE)],
)
def test_same_numbers(tmp_path, kind, form):
    run = drawn(tmp_path / "run", kind, *FORMS[form])
    greedy = compared(run, beam=1)
    assert len({answer[0].text for answer in greedy}) > 1
    compared(run, beam=5, length_penalty=0.6)
    compared(run, beam=3, length_penalty=0.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return {kind: drawn(folder / kind, kind) for kind in ("transformer", "language")}


def test_padding_is_never_written(tmp_path):
    run = drawn(tmp_path / "run", "transformer")
    ours = regard.load(run, device="cpu")
    with torch.no_grad():
        ours.model.output.bias[[PAD, BOS]] = 4
    save_weights(run / "model.safetensors", weights(ours.model), 0)
    compared(run, beam=1)
    quick = fast.load(run, (), "cpu", "ctranslate2", 1)
    for answers in quick.predict(TEXTS, settings=chosen(quick, beam=3), best=3):
        assert not any(token.id in (PAD, BOS) for one in answers for token in one.tokens)


def test_a_llama_is_the_same(tmp_path):
    run = drawn(tmp_path / "run", "language", *LLAMA)
    compared(run, beam=1)
    compared(run, beam=5)


def test_linear_positions_of_a_language_model(tmp_path):
    compared(drawn(tmp_path / "run", "language", "model.positions=linear"), beam=1)


@pytest.mark.parametrize("kind", ["transformer", "language"])
def test_limits_and_constraints(runs, kind):
    quick = fast.load(runs[kind], (), "cpu", "ctranslate2", 2)
    compared(runs[kind], quick, beam=1, max_ratio=0.0, max_extra=1)
    compared(runs[kind], quick, beam=1, max_ratio=0.3, max_extra=1)
    compared(runs[kind], quick, beam=1, no_repeat=2, min_length=4)
    assert all(len(one.tokens) > 4 for (one,) in quick.predict(TEXTS, settings=chosen(quick, beam=3, min_length=4)))
    short = quick.predict(TEXTS, settings=chosen(quick, beam=4, max_ratio=0.0, max_extra=2, min_length=2))
    assert [len(one.tokens) for (one,) in short] == [3] * len(TEXTS)
    wild = chosen(quick, beam=1, max_ratio=0.0, max_extra=2, min_length=1000)
    assert [len(one.tokens) for (one,) in quick.predict(TEXTS, settings=wild)] == [3] * len(TEXTS)
    assert all(quick.predict(TEXTS, settings=chosen(quick, sample=True, top_k=10**6)))


def chosen(predictor, **settings):
    """The predictor's settings, some of them others."""
    return predictor.config.decode.model_copy(update=settings)


@pytest.mark.parametrize("kind", ["transformer", "language"])
def test_a_prompt_as_long_as_the_context(runs, kind):
    ours, quick = regard.load(runs[kind], device="cpu"), fast.load(runs[kind], (), "cpu", "ctranslate2", 1)
    for length in (36, 39):
        (wanted,), (found,) = (one.predict(["a" * length], settings=chosen(one, beam=1))[0] for one in (ours, quick))
        assert found.text == wanted.text
        assert [t.logprob for t in found.tokens] == pytest.approx([t.logprob for t in wanted.tokens], abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "language"])
@pytest.mark.parametrize("beam", [1, 4])
def test_prefixes(runs, kind, beam):
    ours, quick = regard.load(runs[kind], device="cpu"), fast.load(runs[kind], (), "cpu", "ctranslate2", 1)
    prefixes = ["ab", "", "t", "quick", "b", "x"]
    wanted = ours.predict(TEXTS, settings=chosen(ours, beam=beam, length_penalty=0.0), prefixes=prefixes)
    found = quick.predict(TEXTS, settings=chosen(quick, beam=beam, length_penalty=0.0), prefixes=prefixes)
    for prefix, (one,), (other,) in zip(prefixes, wanted, found, strict=True):
        assert other.text.startswith(prefix)
        if beam > 1 and other.text != one.text:  # to end right behind a prefix is always among what was found here
            assert (other.text, other.score > one.score) == (prefix, True)
            continue
        assert other.text == one.text
        assert other.score == pytest.approx(one.score, abs=1e-4)
        assert [t.logprob for t in other.tokens] == pytest.approx([t.logprob for t in one.tokens], abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "language"])
def test_n_best_answers_have_the_models_own_scores(runs, kind):
    ours, quick = regard.load(runs[kind], device="cpu"), fast.load(runs[kind], (), "cpu", "ctranslate2", 1)
    forced = chosen(ours, beam=1, max_ratio=0.0, max_extra=1)
    for text, answers in zip(TEXTS, quick.predict(TEXTS, settings=chosen(quick, beam=2), best=4), strict=True):
        assert len({tuple(token.id for token in one.tokens) for one in answers}) == 4
        assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)
        for one in answers:
            if 2 < len(one.tokens) < 40:
                (same,) = ours.predict([text], settings=forced, prefixes=[one.text])[0]
                logprobs = [token.logprob for token in same.tokens]
                assert [token.logprob for token in one.tokens][:-1] == pytest.approx(
                    logprobs[: len(one.tokens) - 1], abs=1e-4
                )


@pytest.mark.parametrize("kind", ["transformer", "language"])
def test_samples_are_seeded(runs, kind):
    quick = fast.load(runs[kind], (), "cpu", "ctranslate2", 2)

    def drawn_texts(**settings):
        answers = quick.predict(TEXTS, settings=chosen(quick, sample=True, **settings), best=3)
        return [[one.text for one in ones] for ones in answers]

    first = drawn_texts(seed=3)
    assert first == drawn_texts(seed=3) != drawn_texts(seed=4)
    assert any(len(set(ones)) > 1 for ones in first)
    (one,) = quick.predict(["abc"], settings=chosen(quick, sample=True, top_k=1))[0]
    (best,) = quick.predict(["abc"], settings=chosen(quick, beam=1))[0]
    assert one.text == best.text
    assert drawn_texts(seed=3, top_p=0.5, temperature=0.5)


@pytest.mark.parametrize("kind", ["transformer", "language"])
@pytest.mark.parametrize("prefix", ["", "ab"])
@pytest.mark.parametrize("end", [1, 3, 5, 100])
def test_tokens_are_told_as_they_come(runs, kind, prefix, end):
    ours, quick = regard.load(runs[kind], device="cpu"), fast.load(runs[kind], (), "cpu", "ctranslate2", 1)
    for extra in (20, 4):
        heard = []
        for predictor in (ours, quick):
            told = []

            def tell(sentence, token, logprob, told=told):
                told.append((sentence, token, round(logprob, 3)))
                return len(told) == end

            settings = chosen(predictor, beam=1, max_ratio=0.0, max_extra=extra)
            (answer,) = predictor.predict(["abc"], settings=settings, prefixes=[prefix], tell=tell)[0]
            heard.append((told, answer.text, [token.id for token in answer.tokens]))
        assert heard[0][1:] == heard[1][1:]
        assert [one[:2] for one in heard[0][0]] == [one[:2] for one in heard[1][0]]
        assert [one[2] for one in heard[0][0]] == pytest.approx([one[2] for one in heard[1][0]], abs=2e-3)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_an_exported_folder_is_all_that_is_needed(tmp_path, runs):
    run = shutil.copytree(runs["transformer"], tmp_path / "run")
    engine.export(run, tmp_path / "folder", "none")
    shutil.rmtree(run)
    quick = fast.load(tmp_path / "folder", ["decode.beam=1"], "cpu", "ctranslate2", 1)
    compared(runs["transformer"], quick, beam=1)
    assert quick.config.decode.beam == 1
    with pytest.raises(InputError, match=r"cannot be looked into. Use the run"):
        regard.look(quick, "abc").tree()
    with pytest.raises(RunError, match="is a CTranslate2 model, for `predict` and `serve` with --engine ctranslate2"):
        regard.load(tmp_path / "folder")


@pytest.mark.parametrize("quantization", [one for one in engine.QUANTIZATIONS if one != "float32"])
@pytest.mark.parametrize("kind", ["transformer", "language"])
def test_quantized(tmp_path, runs, kind, quantization):
    engine.export(runs[kind], tmp_path / "folder", quantization)
    engine.export(runs[kind], tmp_path / "whole")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("folder", "whole")]
    assert sizes[0] < sizes[1]
    if quantization in ("int8", "int8_float32"):
        quick = fast.load(tmp_path / "folder", (), "cpu", "ctranslate2", 1)
        assert all(answer[0].tokens for answer in quick.predict(TEXTS))


def test_a_run_is_converted_once_and_again_when_its_weights_change(tmp_path, runs):
    run = shutil.copytree(runs["transformer"], tmp_path / "run")
    first = fast.load(run, (), "cpu", "ctranslate2", 1)
    state = (first.folder / "model.bin").stat()
    again = fast.load(run, (), "cpu", "ctranslate2", 1)
    assert (again.folder, (again.folder / "model.bin").stat().st_mtime_ns) == (first.folder, state.st_mtime_ns)
    model = first.model
    with torch.no_grad():
        model.output.bias[EOS] += 20
    save_weights(run / "model.safetensors", weights(model), 1)
    changed_ = fast.load(run, (), "cpu", "ctranslate2", 1)
    assert {path.name for path in (run / "ctranslate2").iterdir()} == {changed_.folder.name, first.folder.name}
    assert changed_.predict(["abc"])[0][0].text == ""
    first.predict(["abc"], settings=DecodeConfig(sample=True))  # who has the old one open can go on
    for old in (first.folder, changed_.folder):
        os.utime(old, (0, 0))
    save_weights(run / "model.safetensors", weights(model), 2)
    os.utime(run / "model.safetensors", (1, 1))
    last = fast.load(run, (), "cpu", "ctranslate2", 1)
    assert [path.name for path in (run / "ctranslate2").iterdir()] == [last.folder.name]


def test_a_run_that_cannot_be_written_to(tmp_path, runs):
    run = shutil.copytree(runs["transformer"], tmp_path / "run")
    shutil.rmtree(run / "ctranslate2", ignore_errors=True)
    (run / "ctranslate2").write_text("in the way")
    quick = fast.load(run, (), "cpu", "ctranslate2", 1)
    assert not quick.folder.is_relative_to(run)
    compared(run, quick, beam=1)


def test_looking_uses_our_own_model(runs):
    ours, quick = (
        regard.load(runs["transformer"], device="cpu"),
        fast.load(runs["transformer"], (), "cpu", "ctranslate2", 1),
    )
    (one, other) = regard.look(ours, "hello"), regard.look(quick, "hello")
    assert one.answer.text == other.answer.text
    for left, right in zip(one.maps, other.maps, strict=True):
        torch.testing.assert_close(left.weights, right.weights)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_says_why(tmp_path, tiny_run, runs):
    cases = {
        "copies from the source": drawn(tmp_path / "copy", "transformer", "model.copy_source=true"),
        "encoders there do not have": drawn(tmp_path / "linear", "transformer", "model.positions=linear"),
        "linear positions and 3 heads": drawn(
            tmp_path / "three", "language", "model.positions=linear", "model.heads=3"
        ),
        "of kind rnn, and only": tiny_run,
    }
    for number, (words, run) in enumerate(cases.items()):
        with pytest.raises(ConfigError, match=f"cannot run on CTranslate2: .*{words}"):
            engine.export(run, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()
        with pytest.raises(ConfigError, match=words):
            fast.load(run, (), "cpu", "ctranslate2")
        assert not (run / "ctranslate2").exists()


def test_bad_wishes(tmp_path, runs):
    run = runs["transformer"]
    with pytest.raises(ConfigError, match="--quantization is 'int4', expected none, float32, int8, int8_float32"):
        engine.export(run, tmp_path / "out", "int4")
    (tmp_path / "full").mkdir()
    engine.export(run, tmp_path / "full")
    with pytest.raises(RunError, match="full is there already, and not an empty folder"):
        engine.export(run, tmp_path / "full")
    with pytest.raises(ConfigError, match="--engine is 'fast', expected regard or ctranslate2"):
        fast.load(run, engine="fast")
    with pytest.raises(InputError, match=r"decode.slide: a CTranslate2 model cannot go on past its context"):
        fast.load(runs["language"], ["decode.slide=true"], "cpu", "ctranslate2", 1).predict(["abc"])
    (tmp_path / "full" / "model.bin").write_bytes(b"nothing")
    with pytest.raises(RunError, match="cannot be opened by CTranslate2"):
        fast.load(tmp_path / "full", (), "cpu", "ctranslate2")


# --- served ----------------------------------------------------------------------------------------------------------


def test_served(runs):
    ours = regard.load(runs["transformer"], device="cpu")
    with live({"run": fast.load(runs["transformer"], (), "cpu", "ctranslate2", 1)}) as server:
        found = httpx.post(f"{server.url}/v1/predict", json={"texts": TEXTS}, timeout=30).json()
        looked = httpx.post(f"{server.url}/v1/look", json={"text": "hello"}, timeout=30)
    assert [answers[0]["text"] for answers in found["answers"]] == ours(TEXTS)
    assert looked.status_code == 200


def test_on_the_command_line(runs, typed):
    (served,) = opened([runs["transformer"]], (), "cpu", "ctranslate2", 2).values()
    assert (type(served), served.threads) == (fast.Fast, 2)
    words = ("predict", runs["transformer"], "--engine")
    ours, theirs = (typed(*words, name, text="\n".join(TEXTS)) for name in fast.ENGINES)
    assert ours == theirs
    assert (ours[0], len(ours[1].splitlines())) == (0, len(TEXTS))
