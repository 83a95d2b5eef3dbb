"""CTranslate2: the same numbers as ours, for every form it can express; and words for what it cannot."""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import httpx
import pytest
import torch
from random_runs import drawn
from serving import classifier_run, live, reader_run

import regard
from regard.config.run import DecodeConfig
from regard.data.vocabulary import BOS, EOS, PAD
from regard.errors import ConfigError, InputError, RunError
from regard.formats.ctranslate2 import QUANTIZATIONS, export_ctranslate2
from regard.inference.ctranslate2_engine import CTranslate2Engine
from regard.inference.ctranslate2_model import name_entries
from regard.inference.engine import Request, TorchEngine
from regard.server.app import open_runs
from regard.training.checkpoint import get_weights, save_weights

pytest.importorskip("ctranslate2")

TEXTS = ["abc", "hello", "q", "zyxwvutsrq", "the same again", "mnopab"]
FORMS = {
    "pre": [],
    "post, learned, gelu": ["model.norm=post", "model.positions=learned", "model.activation=gelu"],
    "rotary, tanh": ["model.positions=rotary", "model.activation=gelu tanh", "model.rotary_base=500"],
    "none, norm, no scale": ["model.positions=none", "model.embedding_norm=true", "model.embedding_scale=false"],
    "untied": ["model.tie_embeddings=false", "model.bias=false"],
    "two vocabularies": ["text.target.kind=char", "text.target.min_count=1", "model.norm_epsilon=0.01"],
    "rms, gated, grouped": ["model.norm_kind=rms", "model.gated=true", "model.activation=silu", "model.kv_heads=2"],
}
ALONE = [form for form in FORMS if form != "two vocabularies"]
LLAMA = [*FORMS["rms, gated, grouped"], "model.positions=rotary", "model.bias=false", "model.embedding_scale=false"]


def slow_of(run: Path, *changes: str):
    """A run that our own engine decodes."""
    return regard.load(run, changes, "cpu", "torch")


def quick_of(run: Path, *changes: str, threads=1):
    """A run that CTranslate2 decodes."""
    return regard.load(run, changes, "cpu", "ctranslate2", threads)


def compared(run: Path, quick=None, **settings):
    """Both engines' answers to the same texts: equal, number by number; and where nobody asks for log-probabilities,
    still the same texts and scores, if they have ended (docs/engine.md); greedily, the same texts always."""
    ours, theirs = slow_of(run), quick or quick_of(run)
    wanted = ours.predict(TEXTS, settings=chosen(ours, **settings), logprobs=True)
    found = theirs.predict(TEXTS, settings=chosen(theirs, **settings), logprobs=True)
    assert_same(wanted, found)
    rows = theirs.engine.make_rows(theirs.encode(TEXTS), Request(chosen(theirs, **settings)))
    plain = theirs.predict(TEXTS, settings=chosen(theirs, **settings))
    for (one,), (other,), limit in zip(wanted, plain, [row.most for row in rows], strict=True):
        ended = len(one.tokens) - 1 < limit
        if ended or settings["beam_size"] == 1:
            assert other.text == one.text
            assert [token.id for token in other.tokens] == [token.id for token in one.tokens]
        if ended:
            assert other.score == pytest.approx(one.score, abs=1e-4)
    return wanted


def assert_same(wanted, found):
    """The same answers, number by number."""
    for ones, others in zip(wanted, found, strict=True):
        assert [one.text for one in others] == [one.text for one in ones]
        for one, other in zip(ones, others, strict=True):
            assert [token.id for token in other.tokens] == [token.id for token in one.tokens]
            assert other.score == pytest.approx(one.score, abs=1e-4)
            assert [t.logprob for t in other.tokens] == pytest.approx([t.logprob for t in one.tokens], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "form"),
    [*itertools.product(["transformer"], FORMS), *itertools.product(["language model"], ALONE)],
)
def test_same_numbers(tmp_path, kind, form):
    run = drawn(tmp_path / "run", kind, *FORMS[form])
    greedy = compared(run, beam_size=1)
    assert len({answer[0].text for answer in greedy}) > 1
    compared(run, beam_size=5, length_penalty=0.6)
    compared(run, beam_size=3, length_penalty=0.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return {kind: drawn(folder / kind, kind) for kind in ("transformer", "language model")}


def test_padding_is_never_written(tmp_path):
    run = drawn(tmp_path / "run", "transformer")
    ours = slow_of(run)
    with torch.no_grad():
        ours.model.output.bias[[PAD, BOS]] = 4
    save_weights(run / "model.safetensors", get_weights(ours.model), 0)
    compared(run, beam_size=1)
    compared(run, beam_size=1, max_ratio=0.5, max_extra=1)
    quick = quick_of(run)
    for answers in quick.predict(TEXTS, settings=chosen(quick, beam_size=3), best=3):
        assert not any(token.id in (PAD, BOS) for one in answers for token in one.tokens)


def test_a_llama_is_the_same(tmp_path):
    run = drawn(tmp_path / "run", "language model", *LLAMA)
    compared(run, beam_size=1)
    compared(run, beam_size=5)


@pytest.mark.parametrize("heads", [3, 4, 6, 12])
def test_alibi_positions_of_a_language_model(tmp_path, heads):
    compared(drawn(tmp_path / "run", "language model", "model.positions=alibi", f"model.heads={heads}"), beam_size=1)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_limits_and_constraints(runs, kind):
    quick = quick_of(runs[kind], threads=2)
    compared(runs[kind], quick, beam_size=1, max_ratio=0.0, max_extra=1)
    compared(runs[kind], quick, beam_size=1, max_ratio=0.3, max_extra=1)
    compared(runs[kind], quick, beam_size=1, no_repeat_ngram=2, min_length=4)
    assert all(
        len(one.tokens) > 4 for (one,) in quick.predict(TEXTS, settings=chosen(quick, beam_size=3, min_length=4))
    )
    short = quick.predict(TEXTS, settings=chosen(quick, beam_size=4, max_ratio=0.0, max_extra=2, min_length=2))
    assert [len(one.tokens) for (one,) in short] == [3] * len(TEXTS)
    wild = chosen(quick, beam_size=1, max_ratio=0.0, max_extra=2, min_length=1000)
    assert [len(one.tokens) for (one,) in quick.predict(TEXTS, settings=wild)] == [3] * len(TEXTS)
    assert all(quick.predict(TEXTS, settings=chosen(quick, sample=True, top_k=10**6)))


@pytest.mark.parametrize("form", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("beam", [1, 3])
def test_each_prompt_is_continued_to_the_end_of_its_context(tmp_path, form, beam):
    run = drawn(tmp_path / "run", "language model", f"model.positions={form}")
    ours, quick = slow_of(run), quick_of(run)
    for predictor in (ours, quick):
        with torch.no_grad():
            predictor.model.output.bias[EOS] = -40
    settings = chosen(ours, beam_size=beam, max_extra=1000)
    for prefixes in (None, ["ab", "", "t", "quick", "b", "x"]):
        wanted, found = (
            one.predict(TEXTS, settings=settings, prefixes=prefixes, logprobs=True) for one in (ours, quick)
        )
        assert [len(one.tokens) - 1 for (one,) in found] == [39 - len(text) for text in TEXTS]
        assert [one.text for (one,) in found] == [one.text for (one,) in wanted]


def chosen(predictor, **settings):
    """The predictor's settings, some of them others."""
    return predictor.config.decode.model_copy(update=settings)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_a_prompt_as_long_as_the_context(runs, kind):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    for length in (36, 39):
        (wanted,), (found,) = (
            one.predict(["a" * length], settings=chosen(one, beam_size=1), logprobs=True)[0] for one in (ours, quick)
        )
        assert found.text == wanted.text
        assert [t.logprob for t in found.tokens] == pytest.approx([t.logprob for t in wanted.tokens], abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("beam", [1, 4])
def test_prefixes(runs, kind, beam):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    prefixes = ["ab", "", "t", "quick", "b", "x"]
    wanted, found = (
        one.predict(TEXTS, settings=chosen(one, beam_size=beam, length_penalty=0.0), prefixes=prefixes, logprobs=True)
        for one in (ours, quick)
    )
    for prefix, (one,), (other,) in zip(prefixes, wanted, found, strict=True):
        assert other.text.startswith(prefix)
        if beam > 1 and other.text != one.text:  # to end right behind a prefix is always among what was found here
            assert (other.text, other.score > one.score) == (prefix, True)
            continue
        assert other.text == one.text
        assert other.score == pytest.approx(one.score, abs=1e-4)
        assert [t.logprob for t in other.tokens] == pytest.approx([t.logprob for t in one.tokens], abs=1e-4)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("prefixes", [None, ["ab", "", "t", "quick", "b", "x"]])
@pytest.mark.parametrize("least", [0, 5, 100])
def test_greedy_search_is_the_same_whatever_is_forbidden(runs, kind, prefixes, least):
    """Also where everything is: 31 tokens cannot make a hundred if none comes twice."""
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    for repeats, extra in itertools.product((0, 1, 2), (3, 60)):
        forced = {"no_repeat_ngram": repeats, "min_length": least, "max_ratio": 0.5, "max_extra": extra}
        settings = chosen(ours, beam_size=1, **forced)
        wanted, found = (
            one.predict(TEXTS, settings=settings, prefixes=prefixes, logprobs=True) for one in (ours, quick)
        )
        assert_same(wanted, found)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_n_best_answers_have_the_models_own_scores(runs, kind):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    forced = chosen(ours, beam_size=1, max_ratio=0.0, max_extra=1)
    found = quick.predict(TEXTS, settings=chosen(quick, beam_size=2), best=4, logprobs=True)
    for text, answers in zip(TEXTS, found, strict=True):
        assert len({tuple(token.id for token in one.tokens) for one in answers}) == 4
        assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)
        for one in answers:
            if 2 < len(one.tokens) < 40:
                (same,) = ours.predict([text], settings=forced, prefixes=[one.text])[0]
                logprobs = [token.logprob for token in same.tokens]
                assert [token.logprob for token in one.tokens][:-1] == pytest.approx(
                    logprobs[: len(one.tokens) - 1], abs=1e-4
                )


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("beam", [1, 3])
def test_logprobs_come_when_they_are_wanted(tmp_path, kind, beam):
    """Else CTranslate2's own sums are the scores, and our model is only asked where they are not comparable."""
    run = drawn(tmp_path / "run", kind, *FORMS["untied"])  # what it writes ends soon
    wanted = compared(run, beam_size=beam)
    quick, rescored = quick_of(run), set()
    rescore, settings = quick.engine.rescore, chosen(quick, beam_size=beam)
    quick.engine.rescore = lambda pairs: rescored.update(source.text for source, _ in pairs) or rescore(pairs)
    for text, (one,), (other,) in zip(TEXTS, wanted, quick.predict(TEXTS, settings=settings), strict=True):
        assert beam > 1 or [token[::2] for token in other.tokens] == [token[::2] for token in one.tokens]
        assert all((token.logprob is None) == (text not in rescored) for token in other.tokens)
    assert len(set(TEXTS) - rescored) >= 4
    quick.predict(TEXTS, settings=settings, logprobs=True)
    assert rescored == set(TEXTS)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("beam", [1, 4])
def test_one_text_at_a_time(runs, kind, beam):
    """Alone or shared among replicas, the answers are the same."""
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind], threads=2)
    texts = [*TEXTS, "cba", "olleh"]
    for text in texts:
        wanted, found = (
            one.predict([text], settings=chosen(one, beam_size=beam), logprobs=True) for one in (ours, quick)
        )
        assert_same(wanted, found)
    wanted, found = (one.predict(texts, settings=chosen(one, beam_size=beam), logprobs=True) for one in (ours, quick))
    assert_same(wanted, found)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("beam", [2, 5])
def test_an_output_that_reaches_its_limit_pays_for_its_end(runs, kind, beam):
    """Else it would be taken for better than one that has ended."""
    for extra in (1, 2, 4):
        compared(runs[kind], beam_size=beam, max_ratio=0.0, max_extra=extra, length_penalty=0.0)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_samples_are_seeded_and_our_own(runs, kind):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind], threads=2)

    def samples(predictor, **settings):
        return predictor.predict(TEXTS, settings=chosen(predictor, sample=True, **settings), best=3)

    def drawn_texts(**settings):
        answers = samples(quick, **settings)
        assert answers == samples(ours, **settings)
        return [[one.text for one in ones] for ones in answers]

    first = drawn_texts(seed=3)
    assert first == drawn_texts(seed=3) != drawn_texts(seed=4)
    assert any(len(set(ones)) > 1 for ones in first)
    (one,) = quick.predict(["abc"], settings=chosen(quick, sample=True, top_k=1))[0]
    (best,) = quick.predict(["abc"], settings=chosen(quick, beam_size=1))[0]
    assert one.text == best.text
    assert drawn_texts(seed=3, top_p=0.5, temperature=0.5)


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("prefix", ["", "ab"])
@pytest.mark.parametrize("end", [1, 3, 5, 100])
def test_tokens_are_told_as_they_come(runs, kind, prefix, end):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    for extra in (20, 4):
        heard = []
        for predictor in (ours, quick):
            told = []

            def tell(sentence, token, logprob, told=told):
                told.append((sentence, token, logprob))
                return len(told) == end

            settings = chosen(predictor, beam_size=1, max_ratio=0.0, max_extra=extra)
            (answer,) = predictor.predict(["abc"], settings=settings, prefixes=[prefix], on_token=tell)[0]
            heard.append((told, answer))
        assert heard[0] == heard[1]
        assert 0 < len(heard[0][0]) <= end


@pytest.mark.parametrize("kind", ["transformer", "language model"])
@pytest.mark.parametrize("sample", [False, True])
def test_streams_are_our_own(runs, kind, sample):
    ours, quick = slow_of(runs[kind]), quick_of(runs[kind])
    for text in TEXTS:
        wanted, found = (list(one.stream(text, chosen(one, sample=sample))) for one in (ours, quick))
        assert found == wanted
    assert "translator" not in vars(quick.engine)


def test_a_context_that_slides_is_our_own(tmp_path):
    run = drawn(tmp_path / "run", "language model", "model.positions=rotary")
    ours, quick = (
        of(run, "decode.slide=true", "decode.max_extra=60", "decode.beam_size=1") for of in (slow_of, quick_of)
    )
    assert quick.predict(TEXTS) == (found := ours.predict(TEXTS))
    assert max(len(one.tokens) for (one,) in found) > ours.config.text.max_length


def test_broken_weights_are_told(tmp_path):
    """At once where they are no numbers, and when it decodes where they make none."""
    for kind, value in itertools.product(("transformer", "language model"), (math.nan, 1e38)):
        run = drawn(tmp_path / f"{kind} {value}", kind)
        model = slow_of(run).model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        save_weights(run / "model.safetensors", get_weights(model), 0)
        for of, beam in itertools.product((slow_of, quick_of), (1, 4)):
            message = r"source_embedding.weight has numbers that are not finite|gives no numbers \(NaN\): its weights"
            with pytest.raises(RunError, match=message.split("|")[math.isfinite(value)]):
                of(run, f"decode.beam_size={beam}").predict(TEXTS)


def test_every_entry_has_a_name_of_its_own():
    for entries in itertools.permutations(["a", "a", "a", "<3>", "<4>", "<<4>>"]):
        names = name_entries(SimpleNamespace(size=6, token=entries.__getitem__))
        assert len(set(names)) == 6
        assert names[entries.index("a")] == "a"


# --- which engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "form"),
    [*itertools.product(["transformer"], FORMS), *itertools.product(["language model"], ALONE)],
)
def test_ctranslate2_decodes_by_itself_what_it_can_express(tmp_path, kind, form):
    run = drawn(tmp_path / "run", kind, *FORMS[form])
    assert isinstance(regard.load(run).engine, CTranslate2Engine)
    assert isinstance(slow_of(run).engine, TorchEngine)
    assert not (run / "ctranslate2").exists()  # it is written when it is first needed


def test_our_own_engine_decodes_the_rest(tmp_path, tiny_run, runs, monkeypatch):
    for number, (kind, *changes) in enumerate(
        [
            ("transformer", "model.pointer_generator=true"),
            ("transformer", "model.positions=alibi"),
        ]
    ):
        predictor = regard.load(drawn(tmp_path / f"run{number}", kind, *changes), device="cpu")
        assert isinstance(predictor.engine, TorchEngine)
        assert any(predictor(TEXTS))
    others = [classifier_run(tmp_path / "classes", 1), reader_run(tmp_path / "word", "word", 1)]
    others += [reader_run(tmp_path / "span", "span", 1), regard.load(tiny_run, device="cpu")]
    assert all(isinstance(predictor.engine, TorchEngine) for predictor in others)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as where it is not installed
    for run in runs.values():
        assert isinstance(regard.load(run, device="cpu").engine, TorchEngine)


def test_without_the_library(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ConfigError, match=r"this engine needs ctranslate2: pip install 'regard\[exchange\]'"):
        quick_of(runs["transformer"])
    assert isinstance(regard.load(runs["transformer"], device="cpu").engine, TorchEngine)


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_an_exported_folder_is_all_that_is_needed(tmp_path, runs, kind):
    run = shutil.copytree(runs[kind], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    export_ctranslate2(run, tmp_path / "folder", "none")
    shutil.rmtree(run)
    quick = quick_of(tmp_path / "folder", "decode.beam_size=1")
    compared(runs[kind], quick, beam_size=1)
    compared(runs[kind], quick, beam_size=1, no_repeat_ngram=2, min_length=4)
    compared(runs[kind], quick, beam_size=4)
    assert quick.config.decode.beam_size == 1
    by_itself = regard.load(tmp_path / "folder", device="cpu")
    assert isinstance(by_itself.engine, CTranslate2Engine)
    assert by_itself(TEXTS) == quick_of(runs[kind])(TEXTS)
    with pytest.raises(RunError, match="is a CTranslate2 model: our engine needs the run that it was exported from"):
        slow_of(tmp_path / "folder")


@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_an_exported_folder_says_what_it_cannot(tmp_path, runs, kind):
    export_ctranslate2(runs[kind], tmp_path / "folder")
    quick = regard.load(tmp_path / "folder", device="cpu")
    words = r"cannot be looked into, sample or stream\. Use the run that it was exported from"
    with pytest.raises(InputError, match=words):
        regard.look(quick, "abc").tree()
    with pytest.raises(InputError, match=words):
        quick.predict(["abc"], settings=chosen(quick, sample=True))
    with pytest.raises(InputError, match=words):
        quick.predict(["abc"], on_token=lambda *heard: False)
    with pytest.raises(InputError, match=words):
        list(quick.stream("abc"))
    with pytest.raises(InputError, match=words):
        quick.predict(["abc"], settings=chosen(quick, slide=True))
    with pytest.raises(InputError, match=words):
        regard.embed(quick, ["abc"])


def test_a_long_source_of_an_exported_folder_is_scored_whole(tmp_path):
    for kind in ("transformer", "language model"):
        run = drawn(tmp_path / kind, kind, "text.max_length=1500", "decode.max_ratio=0", "decode.max_extra=5")
        export_ctranslate2(run, tmp_path / f"{kind} folder")
        text = "the quick brown fox " * 60
        wanted, found = (
            one.predict([text], logprobs=True, settings=chosen(one, beam_size=1))
            for one in (slow_of(run), quick_of(tmp_path / f"{kind} folder"))
        )
        assert_same(wanted, found)


@pytest.mark.parametrize("quantization", [one for one in QUANTIZATIONS if one != "float32"])
@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_quantized(tmp_path, runs, kind, quantization):
    export_ctranslate2(runs[kind], tmp_path / "folder", quantization)
    export_ctranslate2(runs[kind], tmp_path / "whole")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("folder", "whole")]
    assert sizes[0] < sizes[1]
    if quantization in ("int8", "int8_float32"):
        quick = quick_of(tmp_path / "folder")
        assert all(answer[0].tokens for answer in quick.predict(TEXTS))


@pytest.mark.parametrize("quantization", get_args(DecodeConfig.model_fields["quantization"].annotation))
@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_quantized_by_a_setting(tmp_path, runs, kind, quantization):
    run = shutil.copytree(runs[kind], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    quick = quick_of(run, f"decode.quantization={quantization}", threads=2)
    found = [*quick.predict(TEXTS, logprobs=True), *quick.predict(TEXTS[:1], logprobs=True)]
    assert [path.name for path in (run / "ctranslate2").iterdir()] == [f"{digest_of(run)}-{quantization}"]
    ours = slow_of(run)
    for (answer,), source in zip(found, ours.encode([*TEXTS, TEXTS[0]]), strict=True):
        (logprobs,) = ours.task.score(ours.model, [source], [[token.id for token in answer.tokens[:-1]]])
        assert [token.logprob for token in answer.tokens] == pytest.approx(logprobs, abs=1e-4)  # whoever has searched
    assert sum(one.text == text for (one,), text in zip(found, slow_of(run)(TEXTS), strict=False)) >= 3
    assert regard.look(quick, "hello").answer == regard.look(ours, "hello").answer


def digest_of(run: Path) -> str:
    """The hash of what a converted model is made of, by which it is known."""
    task = slow_of(run).task
    settings = task.config.model_dump_json(include={"model", "text"})
    parts = [settings, task.source.dump(), task.target.dump()]
    return hashlib.sha256((run / "model.safetensors").read_bytes() + "".join(parts).encode()).hexdigest()


def test_a_run_is_converted_once_and_again_when_its_weights_change(tmp_path, runs):
    run = shutil.copytree(runs["transformer"], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    first = quick_of(run)
    assert not (run / "ctranslate2").exists()
    assert first.engine.folder == run / "ctranslate2" / f"{digest_of(run)}-float32"
    state = (first.engine.folder / "model.bin").stat()
    os.utime(run / "model.safetensors", (1, 1))  # is not read: what counts is what is in it
    again = quick_of(run)
    assert again.engine.folder == first.engine.folder
    assert (again.engine.folder / "model.bin").stat().st_mtime_ns == state.st_mtime_ns
    model = first.model
    with torch.no_grad():
        model.output.bias[EOS] += 20
    save_weights(run / "model.safetensors", get_weights(model), 1)
    changed_ = quick_of(run)
    assert changed_.predict(["abc"])[0][0].text == ""
    folders = {changed_.engine.folder, first.engine.folder}
    assert len(folders) == 2
    assert set((run / "ctranslate2").iterdir()) == folders
    assert first.predict(["abc"])[0][0].text  # who has the old one open can go on
    for old in folders:
        os.utime(old, (0, 0))
    save_weights(run / "model.safetensors", get_weights(model), 2)
    os.utime(run / "model.safetensors", (1, 1))
    last = quick_of(run)
    assert last.predict(["abc"])[0][0].text == ""
    assert list((run / "ctranslate2").iterdir()) == [last.engine.folder]


def test_a_run_is_converted_again_when_its_settings_change(tmp_path, runs):
    """The same weights with other settings are another model."""
    run = shutil.copytree(runs["transformer"], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    for changes in ((), ("text.max_length=100",), ("model.norm_epsilon=10.0",), ("model.embedding_scale=false",)):
        changes = ("decode.beam_size=1", *changes)
        texts = ["abc", "hello", "a" * 99][: 3 if "text.max_length=100" in changes else 2]
        wanted = [answer.text for (answer,) in slow_of(run, *changes).predict(texts)]
        assert [answer.text for (answer,) in quick_of(run, *changes).predict(texts)] == wanted
    assert len(list((run / "ctranslate2").iterdir())) == 4


def test_several_convert_a_run_at_once(tmp_path, runs):
    """As the processes of a server do: whoever is first is taken, and nothing is left over."""
    run = shutil.copytree(runs["transformer"], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    script = "import sys, regard; print(regard.load(sys.argv[1], device='cpu').engine.folder)"
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert said == {str(run / "ctranslate2" / f"{digest_of(run)}-float32")}
    assert [str(path) for path in (run / "ctranslate2").iterdir()] == list(said)


def test_a_run_that_cannot_be_written_to(tmp_path, runs):
    run = shutil.copytree(runs["transformer"], tmp_path / "run")
    shutil.rmtree(run / "ctranslate2", ignore_errors=True)
    (run / "ctranslate2").write_text("in the way")
    quick = quick_of(run)
    assert not quick.engine.folder.is_relative_to(run)
    compared(run, quick, beam_size=1)


def test_looking_uses_our_own_model(runs):
    ours, quick = slow_of(runs["transformer"]), quick_of(runs["transformer"])
    (one, other) = regard.look(ours, "hello"), regard.look(quick, "hello")
    assert one.answer == other.answer
    for left, right in zip(one.maps, other.maps, strict=True):
        torch.testing.assert_close(left.weights, right.weights)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_says_why(tmp_path, tiny_run, runs):
    cases = {
        "copies from the source": drawn(tmp_path / "copy", "transformer", "model.pointer_generator=true"),
        "encoders there do not have": drawn(tmp_path / "linear", "transformer", "model.positions=alibi"),
        "weights are not softmax's": drawn(tmp_path / "trees", "transformer", "model.normalize=projective trees"),
        "it is recurrent": tiny_run,
    }
    for number, (words, run) in enumerate(cases.items()):
        with pytest.raises(ConfigError, match=f"cannot run on CTranslate2: .*{words}"):
            export_ctranslate2(run, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()
        with pytest.raises(ConfigError, match=words):
            quick_of(run)
        assert not (run / "ctranslate2").exists()


def test_bad_wishes(tmp_path, runs):
    run = runs["transformer"]
    with pytest.raises(ConfigError, match="--quantization is 'int4', expected none, float32, int8, int8_float32"):
        export_ctranslate2(run, tmp_path / "out", "int4")
    (tmp_path / "full").mkdir()
    export_ctranslate2(run, tmp_path / "full")
    with pytest.raises(RunError, match="full is there already, and not an empty folder"):
        export_ctranslate2(run, tmp_path / "full")
    with pytest.raises(ConfigError, match="--engine is 'fast', expected auto, torch, ctranslate2"):
        regard.load(run, engine="fast")
    with pytest.raises(InputError, match="positions are sinusoidal: it cannot go on past its context"):
        quick_of(runs["language model"], "decode.slide=true").predict(["abc"])
    with pytest.raises(ConfigError, match=r"decode\.quantization"):
        quick_of(run, "decode.quantization=int4")
    (tmp_path / "full" / "model.bin").write_bytes(b"nothing")
    with pytest.raises(RunError, match="cannot be opened by CTranslate2"):
        quick_of(tmp_path / "full").predict(["abc"])


# --- served ----------------------------------------------------------------------------------------------------------


def test_served(runs):
    ours = slow_of(runs["transformer"])
    with live({"run": quick_of(runs["transformer"])}) as server:
        found = httpx.post(f"{server.url}/v1/predict", json={"texts": TEXTS}, timeout=30).json()
        plain = httpx.post(f"{server.url}/v1/predict", json={"texts": TEXTS, "logprobs": False}, timeout=30).json()
        looked = httpx.post(f"{server.url}/v1/look", json={"text": "hello"}, timeout=30)
    wanted = ours.predict(TEXTS)
    assert [answers[0]["text"] for answers in plain["answers"]] == [one.text for (one,) in wanted]
    for (one,), (other,) in zip(wanted, found["answers"], strict=True):
        assert (other["text"], other["score"]) == (one.text, pytest.approx(one.score, abs=1e-4))
        assert [token["logprob"] for token in other["tokens"]] == pytest.approx(
            [token.logprob for token in one.tokens], abs=1e-4
        )
    assert looked.status_code == 200


def test_a_served_folder_answers_and_says_what_it_cannot(tmp_path, runs):
    export_ctranslate2(runs["language model"], tmp_path / "folder")
    ours = slow_of(runs["language model"])
    with live({"run": regard.load(tmp_path / "folder", device="cpu")}) as server:
        found = httpx.post(f"{server.url}/v1/predict", json={"texts": TEXTS}, timeout=30).json()
        refused = [
            httpx.post(f"{server.url}/v1/look", json={"text": "hello"}, timeout=30),
            httpx.post(f"{server.url}/v1/predict", json={"text": "a", "settings": {"sample": True}}, timeout=30),
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello"}, timeout=30),
        ]
    assert [answers[0]["text"] for answers in found["answers"]] == ours(TEXTS)
    for answer in refused:
        assert answer.status_code == 400
        assert "cannot be looked into, sample or stream" in answer.text


STARTED = """
import sys
from pathlib import Path
from regard.server.app import read_settings, serve
changes = ["serve.port=0", "serve.workers=2", "serve.linger=0.1"]
serve([Path(sys.argv[1])], read_settings(changes)[0], device="cpu")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes share a port on Linux only")
@pytest.mark.parametrize("kind", ["transformer", "language model"])
def test_served_by_several_processes(tmp_path, runs, kind):
    """CTranslate2's threads would not survive a fork: each process starts its own, when it is first asked."""
    run = shutil.copytree(runs[kind], tmp_path / "run", ignore=shutil.ignore_patterns("ctranslate2"))
    wanted = slow_of(run)(TEXTS)
    command = [sys.executable, "-c", STARTED, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split(" at ")[1].split()[0]
            assert not (run / "ctranslate2").exists()

            def ask(_):
                answer = httpx.post(f"{url}/v1/predict", json={"texts": TEXTS}, timeout=60)
                assert answer.status_code == 200
                return [answers[0]["text"] for answers in answer.json()["answers"]]

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(ask, range(24))) == [wanted] * 24
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            started = [re.search("libctranslate2", Path(f"/proc/{pid}/maps").read_text()) for pid in workers]
            assert len(started) == 2
            assert all(started)
            assert [path.name for path in (run / "ctranslate2").iterdir()] == [f"{digest_of(run)}-float32"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_on_the_command_line(runs, typed):
    (served,) = open_runs([runs["transformer"]], (), "cpu", "ctranslate2", 2).values()
    assert (type(served.engine), served.engine.threads) == (CTranslate2Engine, 2)
    words = ("predict", runs["transformer"], "--engine")
    ours, theirs, auto = (typed(*words, name, text="\n".join(TEXTS)) for name in ("torch", "ctranslate2", "auto"))
    assert ours == theirs == auto
    assert (ours[0], len(ours[1].splitlines())) == (0, len(TEXTS))
    (one, other) = (typed(*words, name, "--json", text="abc\n")[1] for name in ("torch", "ctranslate2"))
    for wanted, found in zip(json.loads(one), json.loads(other), strict=True):
        assert found["text"] == wanted["text"]
        assert [token["logprob"] for token in found["tokens"]] == pytest.approx(
            [token["logprob"] for token in wanted["tokens"]], abs=1e-4
        )
    (evaluated,) = {typed("evaluate", runs["transformer"], "--split", "valid")[0]}
    assert evaluated == 0
