"""What belongs together: resuming wants a run as it was, and says which part is not; loading wants whole weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny, train_tiny

from regard.config.toml import read
from regard.errors import RunError
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.training.checkpoint import load_state, load_tensors
from regard.training.manifest import fingerprint_settings
from regard.training.prepare import resume_run, start_run


@pytest.fixture
def run(tmp_path, tiny_run):
    """A run to spoil."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run of the same shapes that learned with another seed."""
    folder = tmp_path_factory.mktemp("other") / "run"
    train_tiny(folder, "train.seed=77")
    return folder


def refusal(call, *arguments) -> str:
    with pytest.raises(RunError) as caught:
        call(*arguments)
    return str(caught.value)


def resume(run):
    fit(resume_run(run), run, lambda event: None, device="cpu")


def permute(path):
    """Let two letters change places."""
    tree = json.loads(path.read_text())
    words = tree["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(tree))


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_run_that_is_as_it_was_goes_on(run):
    edit(run / "config.toml", "[train]", "# a comment\n[train]")
    resume(run)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda run: edit(run / "config.toml", "learning_rate = 0.005", "learning_rate = 0.05"),
            "[train] of config.toml",
        ),
        (lambda run: edit(run / "config.toml", "beam_size = 2", "beam_size = 1"), "[decode] of config.toml"),
        (lambda run: permute(run / "tokenizer.json"), "tokenizer.json"),
        (lambda run: permute(run / "tokenizer.target.json"), "tokenizer.target.json"),
        (lambda run: (run / "tokenizer.target.json").unlink(), "tokenizer.target.json"),
        (lambda run: edit(run / "config.toml", "valid = 20", "valid = 19"), "the validation data"),
    ],
)
def test_resuming_names_what_is_not_as_it_was(run, spoil, what):
    spoil(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert refusal(resume, run) == (
        f"{what} is not what {run} began with (manifest.json): it would not be the same run. Put back what it began "
        "with, or start another."
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_all_that_is_not_as_it_was_is_named(run):
    edit(run / "config.toml", "learning_rate = 0.005", "learning_rate = 0.05")
    edit(run / "config.toml", "beam_size = 2", "beam_size = 1")
    assert refusal(resume_run, run).startswith("[train] of config.toml and [decode] of config.toml are not what")


def test_settings_are_the_same_however_they_are_written():
    one, two = (fingerprint_settings(text) for text in ("[train]\na = 1\nb = 2.0\n", "train = {b = 2.0, a = 1}"))
    assert one == two != fingerprint_settings("[train]\na = 1\nb = 2.5\n")
    assert fingerprint_settings("[data]\nkind = 'x'") == fingerprint_settings("")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_the_state_of_another_run_is_refused(run, other, name):
    shutil.copy(other / "state" / "000000008" / name, run / "state" / "000000008" / name)
    assert refusal(resume, run) == (
        f"{run}/state/000000008/{name} is of another run, not of {run} (manifest.json). Put back what belongs there."
    )


def test_the_weights_of_another_run_are_refused(run, other):
    shutil.copy(other / "model.safetensors", run)
    assert refusal(load, run) == (
        f"{run}/model.safetensors is of another run, not of {run} (manifest.json). Put back what belongs there."
    )


def test_the_checkpoint_of_another_run_is_not_averaged(tmp_path):
    runs = [tmp_path / "one", tmp_path / "two"]
    for seed, one in enumerate(runs):
        changes = (f"train.seed={seed}", "train.average_checkpoints=2", "train.steps=100")
        train_tiny(one, *changes, stop=lambda one=one: (one / "state" / "000000004").exists())
    shutil.copy(runs[0] / "checkpoints" / "4.safetensors", runs[1] / "checkpoints" / "4.safetensors")
    assert f"checkpoints/4.safetensors is of another run, not of {runs[1]}" in refusal(resume, runs[1])


@pytest.mark.parametrize("name", ["model.safetensors", "state/000000008/state.safetensors"])
def test_one_wrong_bit_is_noticed(run, name):
    path = run / name
    whole = bytearray(path.read_bytes())
    whole[-2] ^= 1
    path.write_bytes(whole)
    wrong = "is damaged: its checksum is not that of its numbers. Use another copy, or train anew."
    assert refusal(load if name == "model.safetensors" else resume, run) == f"{path} {wrong}"


def test_a_run_is_used_only_with_its_own_vocabulary(run):
    permute(run / "tokenizer.json")
    assert refusal(load, run).startswith(f"tokenizer.json is not what {run} began with")


def test_a_run_without_a_manifest_is_used_but_not_resumed(run, tiny_run):
    (run / "manifest.json").unlink()
    assert load(run)("abc") == load(tiny_run)("abc")
    assert refusal(resume_run, run) == (
        f"{run} has no manifest.json, which says what belongs to it: it can be used, but not resumed."
    )


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"3", b"\xff"])
def test_a_damaged_manifest_is_refused(run, content):
    (run / "manifest.json").write_bytes(content)
    assert refusal(load, run).startswith(f"{run}/manifest.json is damaged: ")


def test_data_may_move(tmp_path):
    """What was read counts, not where it lay."""
    pairs = "".join(f"{one}{two}\t{two}{one}\n" for one in "abcde" for two in "abcde")
    (tmp_path / "pairs.tsv").write_text(pairs)
    data = f"data={{kind='tsv', train=['{tmp_path}/pairs.tsv'], cut_valid=3}}"
    start_run(read("reverse", [*TINY[4:], data]), tmp_path / "run")
    (tmp_path / "pairs.tsv").rename(tmp_path / "moved.tsv")
    edit(tmp_path / "run" / "config.toml", "pairs.tsv", "moved.tsv")
    resume(tmp_path / "run")
    (tmp_path / "moved.tsv").write_text(pairs.replace("\n", "a\n"))  # other targets
    assert "the training data and the validation data are not what" in refusal(resume, tmp_path / "run")


def test_the_same_settings_make_the_same_files(tmp_path, tiny_run):
    """Nothing of chance or of the clock is in what a run is made of."""
    train_tiny(tmp_path / "run")
    for name in ("manifest.json", "config.toml", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tiny_run / name).read_bytes()
    ours, theirs = (load_tensors(folder / "model.safetensors") for folder in (tmp_path / "run", tiny_run))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Crash(BaseException):
    """A process that dies."""


@pytest.fixture
def crash(monkeypatch):
    """Dies instead of making the rename of a number; says whether it came so far."""
    own = os.replace

    def crashing(number, call, *given):
        left = iter(range(number))

        def replace(source, target):
            if next(left, None) is None:
                raise Crash
            own(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                call(*given)
            except Crash:
                return True
        return False

    return crashing


def test_a_crash_while_a_run_is_made_leaves_none(tmp_path, crash):
    number = 0
    while crash(number, start_run, tiny("data.examples=50"), tmp_path / str(number)):
        with pytest.raises(RunError, match=r"is not a run: it has no config\.toml"):
            resume_run(tmp_path / str(number))
        number += 1
    assert number == 6  # settings, two vocabularies, manifest, ledger, sources


def test_a_crash_at_any_rename_leaves_a_run_that_goes_on(tmp_path, crash):
    """To the same end. Every file gets its name by a rename."""
    changes = ("train.average_checkpoints=2", "train.steps=4", "train.validate_every=2", "data.examples=50")
    prepared, number = start_run(tiny(*changes), tmp_path / "begun"), 0

    def train(run):
        fit(prepared, run, lambda event: None, device="cpu")

    shutil.copytree(tmp_path / "begun", tmp_path / "whole")
    train(tmp_path / "whole")
    while crash(number, train, run := shutil.copytree(tmp_path / "begun", tmp_path / str(number))):
        resume_run(run)
        train(run)
        load(run)
        ours, theirs = load_state(run)[0], load_state(tmp_path / "whole")[0]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        number += 1
    assert number >= 2 * 2 + 1  # a checkpoint and a state, twice, and at least one model
