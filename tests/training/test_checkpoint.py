"""A run is whole at every instant: what is saved loads, what is damaged is named, what fails leaves the old."""

import ast
import copy
import json
import os
import random
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.config.run import Config
from regard.config.text import Tokenization
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import RunError
from regard.training import checkpoint

CONFIG = Config.model_validate({"data": {"kind": "reverse"}, "model": {"kind": "rnn"}})


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.output = nn.Linear(5, 7)
        self.output.weight = self.embedding.weight


@pytest.fixture
def saved(tmp_path):
    """A model and the file of its weights."""
    model = Tied()
    checkpoint.save_weights(tmp_path / "model.safetensors", checkpoint.get_weights(model), step=3)
    return model, tmp_path / "model.safetensors"


@pytest.fixture
def letters():
    return Vocabulary.learn(["abc"], Tokenization(kind="char"))


def refusal(call, *arguments) -> str:
    with pytest.raises(RunError) as caught:
        call(*arguments)
    return str(caught.value)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_saved_and_loaded_bit_for_bit(saved):
    model, path = saved
    other = Tied()
    checkpoint.fill_weights(other, checkpoint.load_tensors(path), path)
    assert same(checkpoint.get_weights(other), checkpoint.get_weights(model))
    assert other.output.weight is other.embedding.weight
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_shared_weights_are_saved_once(saved):
    assert checkpoint.load_tensors(saved[1]).keys() == {"embedding.weight", "output.bias"}
    assert saved[1].stat().st_size < 4 * (7 * 5 + 7) + 400


def test_weights_of_views_and_of_other_types_are_saved_whole(tmp_path):
    model = nn.Module()
    model.turned = nn.Parameter(torch.rand(3, 5).T)
    model.narrow = nn.Parameter(torch.rand(7).bfloat16())
    checkpoint.save_weights(tmp_path / "new" / "x.safetensors", checkpoint.get_weights(model), step=1)
    loaded = checkpoint.load_tensors(tmp_path / "new" / "x.safetensors")
    assert same(loaded, dict(model.named_parameters()))
    assert loaded["narrow"].dtype == torch.bfloat16


def test_saving_again_replaces(saved):
    model, path = saved
    with torch.no_grad():
        model.output.bias += 1
    checkpoint.save_weights(path, checkpoint.get_weights(model), step=4)
    assert same(checkpoint.load_tensors(path), checkpoint.get_weights(model))
    assert files(path.parent) == [path.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:5],
        lambda whole: whole[:40],
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: random.Random(1).randbytes(999),
        lambda whole: b"This is a text file.\n" * 9,
    ],
    ids=["empty", "length", "header", "truncated", "longer", "random", "text"],
)
def test_damaged_file_is_refused(saved, damage):
    _, path = saved
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(checkpoint.load_tensors, path).startswith(f"{path} is damaged or no safetensors file: ")


def test_missing_file_is_refused(tmp_path):
    path = tmp_path / "none.safetensors"
    assert refusal(checkpoint.load_tensors, path) == f"{path} does not exist."


def test_other_weights_are_refused(saved):
    model, path = saved
    tensors = checkpoint.load_tensors(path)
    bias = tensors.pop("output.bias")
    wrong = f"{path} holds other weights than config.toml describes: "
    older = ". A run of another version of regard has to be trained again."
    assert refusal(checkpoint.fill_weights, model, tensors, path) == f"{wrong}1 missing (output.bias){older}"
    assert refusal(checkpoint.fill_weights, model, {**tensors, "a": bias, "b": bias}, path) == (
        f"{wrong}1 missing (output.bias); 2 unknown (a){older}"
    )
    more = {**tensors, "output.bias": bias, "c": bias}
    assert refusal(checkpoint.fill_weights, model, more, path) == f"{wrong}1 unknown (c){older}"


def test_misshapen_weights_are_refused(saved):
    model, path = saved
    tensors = checkpoint.load_tensors(path)
    assert refusal(checkpoint.fill_weights, model, {**tensors, "output.bias": torch.zeros(3)}, path) == (
        f"{path}: output.bias has shape (3,), expected (7,)."
    )
    assert refusal(checkpoint.fill_weights, model, {**tensors, "embedding.weight": torch.zeros(11, 5)}, path) == (
        f"{path}: embedding.weight has shape (11, 5), expected (7, 5). The vocabulary does not fit the weights."
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(saved, value):
    model, path = saved
    tensors, before = checkpoint.load_tensors(path), copy.deepcopy(checkpoint.get_weights(model))
    bias = tensors["output.bias"].clone()
    bias[3] = value
    assert refusal(checkpoint.fill_weights, model, {**tensors, "output.bias": bias}, path) == (
        f"{path}: output.bias has numbers that are not finite: its training has gone astray, or the file is damaged. "
        "Train anew with a smaller train.learning_rate, or use another copy."
    )
    assert same(checkpoint.get_weights(model), before)


@pytest.mark.parametrize("kind", [torch.bool, torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_another_type_are_refused(saved, kind):
    model, path = saved
    tensors = {**checkpoint.load_tensors(path), "embedding.weight": torch.ones(7, 5).to(kind)}
    wanted = f"{str(kind).removeprefix('torch.')}, expected floating-point numbers of 16 bits or more."
    assert refusal(checkpoint.fill_weights, model, tensors, path) == f"{path}: embedding.weight is of type {wanted}"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_width_are_taken(saved, kind):
    model, path = saved
    tensors = {name: tensor.to(kind) for name, tensor in checkpoint.load_tensors(path).items()}
    checkpoint.fill_weights(model, tensors, path)
    assert same(checkpoint.get_weights(model), {name: tensor.float() for name, tensor in tensors.items()})


def test_average_is_the_mean_of_the_files(tmp_path):
    paths = [tmp_path / f"{step}.safetensors" for step in (1, 2, 3)]
    tensors = [{"a": torch.rand(5, dtype=torch.float64), "b": torch.rand(2, 3, dtype=torch.float64)} for _ in paths]
    for step, (path, values) in enumerate(zip(paths, tensors, strict=True)):
        checkpoint.save_weights(path, values, step)
    before = [path.read_bytes() for path in paths]
    mean = checkpoint.average_weights(paths)
    for name in ("a", "b"):
        assert torch.allclose(mean[name], torch.stack([values[name] for values in tensors]).mean(0), rtol=1e-14)
    assert same(checkpoint.average_weights(paths[:1]), tensors[0])
    assert [path.read_bytes() for path in paths] == before


def test_the_average_of_frozen_weights_is_those_weights(tmp_path):
    """A third of three times a number is often another number, and kept features are known by their encoder's bits."""
    paths, frozen = [tmp_path / f"{step}.safetensors" for step in (1, 2, 3)], torch.rand(1000)
    assert not torch.equal((frozen + frozen + frozen) / 3, frozen)
    for step, path in enumerate(paths):
        checkpoint.save_weights(path, {"frozen": frozen, "other": torch.full((2,), float(step))}, step)
    assert same(checkpoint.average_weights(paths), {"frozen": frozen, "other": torch.ones(2)})


def test_weights_without_a_folder_are_refused(saved):
    model, path = saved
    refusal(checkpoint.save_weights, path / "inside.safetensors", checkpoint.get_weights(model), 1)


def test_nothing_is_written_through_a_link(tmp_path):
    """One that somebody put where a file is written before it gets its name."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / ".x.json.part").symlink_to(tmp_path / "mine.txt")
    checkpoint.write_file(tmp_path / "x.json", b"new")
    assert (tmp_path / "x.json").read_bytes() == b"new"
    assert not (tmp_path / "x.json").is_symlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / f".y.{os.getpid()}.part").symlink_to(tmp_path / "folder")
    with pytest.raises(RunError, match="y cannot be saved: File exists"), checkpoint.make_folder(tmp_path / "y"):
        pass
    assert files(tmp_path) == ["mine.txt", "x.json"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / ".x.json.part").write_bytes(b"half of something longer")
    (tmp_path / f".y.{os.getpid()}.part").mkdir()
    (tmp_path / f".y.{os.getpid()}.part" / "half").write_bytes(b"half")
    checkpoint.write_file(tmp_path / "x.json", b"new")
    with checkpoint.make_folder(tmp_path / "y") as beside:
        (beside / "whole").write_bytes(b"whole")
    assert files(tmp_path) == ["x.json", "y/whole"]


def test_the_checksum_is_of_names_types_shapes_and_numbers():
    one = {"a": torch.arange(6.0), "b": torch.tensor(3.0), "c": torch.zeros(0)}
    assert checkpoint.checksum(dict(reversed(one.items()))) == checkpoint.checksum(one)
    others = [
        {"a": one["b"], "b": one["a"], "c": one["c"]},
        {**one, "a": torch.arange(6.0).view(2, 3)},
        {**one, "a": torch.arange(6.0).view(torch.int32)},
        {**one, "b": torch.tensor(3.0000002)},
        {"a": one["a"], "b": one["b"]},
    ]
    assert len({checkpoint.checksum(tensors) for tensors in (one, *others)}) == 6


# --- the run ---------------------------------------------------------------------------------------------------------


def test_run_is_created_once(tmp_path, letters):
    run = tmp_path / "deep" / "run"
    checkpoint.create_run(run, CONFIG, Vocabularies(letters, letters), {"train": {"dropped": {"empty": ["한:1"]}}})
    assert files(run) == ["config.toml", "data.json", "manifest.json", "tokenizer.json"]
    assert checkpoint.load_config(run) == CONFIG
    source, target = checkpoint.load_vocabularies(run)
    assert source.dump() == letters.dump()
    assert target is source
    assert checkpoint.load_vocabularies(run).shared
    assert json.loads((run / "data.json").read_bytes()) == {"train": {"dropped": {"empty": ["한:1"]}}}
    before = {name: (run / name).read_bytes() for name in files(run)}
    assert refusal(checkpoint.create_run, run, CONFIG, Vocabularies(letters, letters), {}) == (
        f"{run} already holds a run. Resume it with `regard train --resume {run}`, or choose another."
    )
    assert {name: (run / name).read_bytes() for name in files(run)} == before


def test_run_may_have_two_vocabularies(tmp_path, letters):
    other = Vocabulary.learn(["xyz"], Tokenization(kind="char"))
    both = Vocabularies(letters, other)
    checkpoint.create_run(tmp_path, CONFIG, both, {})  # a directory that is there, and holds no run
    loaded = checkpoint.load_vocabularies(tmp_path)
    assert [vocabulary.dump() for vocabulary in loaded] == [letters.dump(), other.dump()]
    assert not loaded.shared


def test_run_in_the_place_of_a_file_is_refused(tmp_path, letters):
    (tmp_path / "file").write_text("x")
    message = f"{tmp_path / 'file'} is there already, and not an empty folder. Choose another, or remove it."
    assert refusal(checkpoint.create_run, tmp_path / "file", CONFIG, Vocabularies(letters, letters), {}) == message


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    load = checkpoint.load_config
    assert refusal(load, tmp_path / "none") == f"{tmp_path / 'none'} is not a run: it does not exist."
    assert refusal(load, tmp_path / "file") == f"{tmp_path / 'file'} is not a run: it is a file."
    assert refusal(load, tmp_path / "empty") == (
        f"{tmp_path / 'empty'} is not a run: it has no config.toml. A run is what `regard train` makes."
    )


# --- the state -------------------------------------------------------------------------------------------------------


def test_newest_state_wins_and_the_older_goes(tmp_path):
    assert checkpoint.load_state(tmp_path) is None
    for step in (9, 10, 100):
        tensors = {"a": torch.full((3,), float(step)), "rng": torch.arange(5, dtype=torch.uint8)}
        checkpoint.save_state(tmp_path, step, tensors, {"step": step, "best": [0.1, None]})
        loaded, facts = checkpoint.load_state(tmp_path)
        assert same(loaded, tensors)
        assert facts == {"step": step, "best": [0.1, None]}
        assert len(list((tmp_path / "state").iterdir())) == 1


def test_a_step_that_is_saved_stays_as_it_was(tmp_path):
    for value in (1.0, 2.0):
        checkpoint.save_state(tmp_path, 5, {"a": torch.tensor([value])}, {"step": 5, "value": value})
    loaded, facts = checkpoint.load_state(tmp_path)
    assert (loaded["a"].item(), facts["value"]) == (1.0, 1.0)


def test_of_two_states_the_newer_is_loaded(tmp_path):
    checkpoint.save_state(tmp_path, 2, {"a": torch.tensor([2.0])}, {"step": 2})
    (tmp_path / "state" / "000000002").rename(tmp_path / "kept")
    checkpoint.save_state(tmp_path, 11, {"a": torch.tensor([11.0])}, {"step": 11})
    (tmp_path / "kept").rename(tmp_path / "state" / "000000002")  # as if stopped before the older one went
    assert checkpoint.load_state(tmp_path)[1] == {"step": 11}


def test_half_written_state_is_not_seen(tmp_path):
    checkpoint.save_state(tmp_path, 2, {"a": torch.ones(2)}, {"step": 2})
    half = tmp_path / "state" / ".000000003.17"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert checkpoint.load_state(tmp_path)[1] == {"step": 2}
    checkpoint.save_state(tmp_path, 4, {"a": torch.ones(2)}, {"step": 4})
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["000000004"]


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_damaged_state_is_refused(tmp_path, name):
    checkpoint.save_state(tmp_path, 2, {"a": torch.ones(2)}, {"step": 2})
    place = tmp_path / "state" / "000000002"
    (place / name).write_bytes((place / name).read_bytes()[:-1])
    assert refusal(checkpoint.load_state, tmp_path).startswith(f"{place / name} is damaged")
    (place / name).unlink()
    assert str(place / name) in refusal(checkpoint.load_state, tmp_path)


@pytest.mark.parametrize("facts", [{}, {"step": "2"}, {"step": None}])
def test_a_state_that_does_not_say_its_step_is_refused(tmp_path, facts):
    checkpoint.save_state(tmp_path, 2, {"a": torch.ones(2)}, facts)
    assert "state.json is damaged" in refusal(checkpoint.load_state, tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from regard.training import checkpoint
from regard.errors import RunError

run = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for step, count in ((1, 3), (2, 5000)):
    tensors = {"a": torch.full((count,), float(step))}
    for save in (
        lambda: checkpoint.save_weights(run / "model.safetensors", tensors, step),
        lambda: checkpoint.save_state(run, step, tensors, {"step": step}),
    ):
        try:
            save()
        except RunError as error:
            print(step, error)
"""


def test_full_disk_leaves_what_was_there(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True)
    cause = "cannot be saved: File too large. What was there before is untouched: mend that, then try again or resume."
    assert done.stdout.splitlines() == [
        f"2 {tmp_path / 'model.safetensors'} {cause}",
        f"2 {tmp_path / 'state' / '000000002'} {cause}",
    ]
    assert same(checkpoint.load_tensors(tmp_path / "model.safetensors"), {"a": torch.ones(3)})
    tensors, facts = checkpoint.load_state(tmp_path)
    assert same(tensors, {"a": torch.ones(3)})
    assert facts == {"step": 1}
    assert files(tmp_path) == ["model.safetensors", "state/000000001/state.json", "state/000000001/state.safetensors"]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["000000001"]


# --- no pickle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(Path(str(resources.files("regard"))).rglob("*.py")), ids=lambda path: path.name)
def test_no_source_pickles(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not names & {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
            assert not (getattr(node, "module", None) == "torch" and names & {"load", "save"})
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load")
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle" or ast.unparse(node.value) == "False"
