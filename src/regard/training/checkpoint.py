"""A run is a directory that is whole at every instant: every file is written beside its place, then renamed.

    config.toml                  every setting, resolved
    tokenizer.json               the vocabulary (of the source; tokenizer.target.json if the target has its own)
    model.safetensors            the best weights so far (averaged over checkpoints by setting)
    data.json                    the ledger of every example read
    metrics.jsonl, log.txt       what happened
    checkpoints/STEP.safetensors weights that are still to be averaged
    state/STEP/                  what resuming needs: state.safetensors and state.json, renamed into place together

No pickle is written or read.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from regard.config.run import Config
from regard.config.toml import dump, parse
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import RunError

Tensors = dict[str, Tensor]


def write_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it: readers see the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.part")
    with report_failure(path, lambda: beside.unlink(missing_ok=True)):
        path.parent.mkdir(parents=True, exist_ok=True)
        flush_file(beside, data)
        os.replace(beside, path)


def flush_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def report_failure(path: Path, clean: Callable[[], Any]) -> Iterator[None]:
    """Say what could not be saved, and leave nothing half-written."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            clean()
        raise RunError(
            f"{path} cannot be saved: {error.strerror}. What was there before is untouched: mend that, then try again "
            "or resume."
        ) from error


@contextlib.contextmanager
def make_folder(place: Path) -> Iterator[Path]:
    """A folder beside its place, which gets its name when it is whole."""
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    with report_failure(place, lambda: shutil.rmtree(beside, ignore_errors=True)):
        beside.mkdir(parents=True, exist_ok=True)
        yield beside
        os.replace(beside, place)


def check_free(folder: Path) -> Path:
    """The whole path of a folder that is to be made; nothing that is there is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is there already, and not an empty folder. Choose another, or remove it.")
    return folder.absolute()


def check_vacant(run: Path) -> None:
    """Refuse a folder for a new run in which there is one already, or anything else."""
    if (run / "config.toml").exists():
        raise RunError(f"{run} already holds a run. Resume it with `regard train --resume {run}`, or choose another.")
    check_free(run)


def get_weights(model: nn.Module) -> Tensors:
    """Every parameter once, also those that are used in two places."""
    return {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}


def save_weights(path: Path, tensors: Tensors, step: int) -> None:
    """Save weights with the step they are of."""
    write_file(path, save(tensors, metadata={"format": "pt", "step": str(step)}))


def load_tensors(path: Path) -> Tensors:
    """Read a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise RunError(f"{path} does not exist.") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}.") from error


def fill_weights(model: nn.Module, tensors: Tensors, path: Path) -> None:
    """Put tensors into a model; every name and shape must fit."""
    wanted = dict(model.named_parameters())
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise RunError(
            f"{path} holds other weights than config.toml describes: "
            + "; ".join(f"{len(n)} {what} ({n[0]})" for what, n in (("missing", missing), ("unknown", unknown)) if n)
            + ". A run of another version of regard has to be trained again."
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if parameter.shape != tensors[name].shape:
                hint = " The vocabulary does not fit the weights." if "embedding" in name else ""
                raise RunError(
                    f"{path}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}.{hint}"
                )
            parameter.copy_(tensors[name])


def create_run(run: Path, config: Config, vocabularies: Vocabularies, facts: Any) -> None:
    """Start a run directory; nothing that is there is overwritten."""
    check_vacant(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{run} cannot be made: {error.strerror}.") from error
    write_file(run / "tokenizer.json", vocabularies.source.dump().encode())
    if not vocabularies.shared:
        write_file(run / "tokenizer.target.json", vocabularies.target.dump().encode())
    write_file(run / "data.json", json.dumps(facts, ensure_ascii=False, indent=1).encode())
    write_file(run / "config.toml", dump(config).encode())


def load_config(run: Path) -> Config:
    """The settings of a run."""
    if not run.is_dir():
        raise RunError(f"{run} is not a run: {'it is a file' if run.exists() else 'it does not exist'}.")
    if not (run / "config.toml").exists():
        raise RunError(f"{run} is not a run: it has no config.toml. A run is what `regard train` makes.")
    return parse(run / "config.toml")


def load_vocabularies(run: Path) -> Vocabularies:
    """The vocabularies of a run; one serves both sides unless the target has its own."""
    source, target = Vocabulary.load(run / "tokenizer.json"), run / "tokenizer.target.json"
    return Vocabularies(source, Vocabulary.load(target) if target.exists() else source)


def save_state(run: Path, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
    """Save all that resuming needs, then let go of what was saved before."""
    place = run / "state" / f"{step:09d}"
    if place.exists():  # saved already, and whole: as when Ctrl-C comes right behind a save
        return
    with make_folder(place) as beside:
        flush_file(beside / "state.safetensors", save(tensors))
        flush_file(beside / "state.json", json.dumps(facts).encode())
    for other in place.parent.iterdir():
        if other.name != place.name:
            shutil.rmtree(other, ignore_errors=True)


def load_state(run: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """The newest saved state, or None if training never got so far."""
    places = sorted(place for place in (run / "state").glob("[0-9]*") if place.is_dir())
    if not places:
        return None
    try:
        facts = json.loads((places[-1] / "state.json").read_bytes())
        if type(facts["step"]) is not int:
            raise TypeError(f"its step is {facts['step']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{places[-1]}/state.json is damaged: {error}.") from error
    return load_tensors(places[-1] / "state.safetensors"), facts


def average_weights(paths: list[Path]) -> Tensors:
    """The mean of several weights files."""
    total = load_tensors(paths[0])
    for path in paths[1:]:
        for name, tensor in load_tensors(path).items():
            total[name] += tensor
    return {name: tensor / len(paths) for name, tensor in total.items()}
