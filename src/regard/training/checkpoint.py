"""A run is a directory that is whole at every instant: every file is written beside its place, then renamed.

    config.toml                  every setting, resolved
    tokenizer.json               the vocabulary (of the source; tokenizer.target.json if the target has its own)
    model.safetensors            the best weights so far (averaged over checkpoints by setting)
    data.json                    the ledger of every example read
    manifest.json                fingerprints of what belongs together (manifest.py)
    seen.safetensors             hashes of the training sources, by which evaluation knows them
    lock                         the process that is training it (lock.py)
    metrics.jsonl, log.txt       what happened
    checkpoints/STEP.safetensors weights that are still to be averaged
    state/STEP/                  what resuming needs: state.safetensors and state.json, renamed into place together

No pickle is written or read.
"""

import contextlib
import hashlib
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
from regard.data.examples import Splits
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import RunError
from regard.training.lock import lock_run
from regard.training.manifest import (
    TOKENIZERS,
    check_manifest,
    fingerprint_examples,
    fingerprint_settings,
    fingerprint_tokenizers,
    hash_sources,
    identify,
)

Tensors = dict[str, Tensor]


def write_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it: readers see the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.part")
    with report_failure(path, lambda: beside.unlink(missing_ok=True)):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # of a process that was killed; or a link that would lead elsewhere
        flush_file(beside, data)
        os.replace(beside, path)


def flush_file(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, and wait until the disk has it."""
    with path.open("xb") as file:
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
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
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


def checksum(tensors: Tensors) -> str:
    """A hash of the names, types, shapes and numbers of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack(tensors: Tensors, step: int, run: Path | None) -> bytes:
    """A safetensors file that says of which step and run it is, and the checksum of its tensors."""
    facts = {"format": "pt", "step": str(step), "run": identify(run) if run else "", "sha256": checksum(tensors)}
    return save(tensors, metadata=facts)


def save_weights(path: Path, tensors: Tensors, step: int, run: Path | None = None) -> None:
    """Save weights with the step they are of; those of a run say so."""
    write_file(path, pack(tensors, step, run))


def load_tensors(path: Path, run: Path | None = None) -> Tensors:
    """Read a safetensors file. Its checksum must be right, and it must be of this run, as far as it says."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise RunError(f"{path} does not exist.") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}.") from error
    if "sha256" in facts and facts["sha256"] != checksum(tensors):
        raise RunError(f"{path} is damaged: its checksum is not that of its numbers. Use another copy, or train anew.")
    if run and (owner := facts.get("run")) and (own := identify(run)) and owner != own:
        raise RunError(f"{path} is of another run, not of {run} (manifest.json). Put back what belongs there.")
    return tensors


def fill_weights(model: nn.Module, tensors: Tensors, path: Path) -> None:
    """Put tensors into a model: every name and shape must fit, and every number be finite."""
    wanted = dict(model.named_parameters())
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise RunError(
            f"{path} holds other weights than config.toml describes: "
            + "; ".join(f"{len(n)} {what} ({n[0]})" for what, n in (("missing", missing), ("unknown", unknown)) if n)
            + ". A run of another version of regard has to be trained again."
        )
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            hint = " The vocabulary does not fit the weights." if "embedding" in name else ""
            raise RunError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}.{hint}"
            )
        check_numbers(name, tensors[name], path)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def check_numbers(name: str, weights: Tensor, path: Path) -> None:
    """Refuse weights that are no finite floating-point numbers."""
    if not weights.is_floating_point() or weights.dtype.itemsize < 2:
        kind = str(weights.dtype).removeprefix("torch.")
        raise RunError(f"{path}: {name} is of type {kind}, expected floating-point numbers of 16 bits or more.")
    if not weights.float().isfinite().all():
        raise RunError(
            f"{path}: {name} has numbers that are not finite: its training has gone astray, or the file is damaged. "
            "Train anew with a smaller train.learning_rate, or use another copy."
        )


def create_run(run: Path, config: Config, vocabularies: Vocabularies, facts: Any, splits: Splits | None = None) -> None:
    """Start a run directory; nothing that is there is overwritten. What makes it a run, config.toml, comes last."""
    check_vacant(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{run} cannot be made: {error.strerror}.") from error
    with lock_run(run):
        if (run / "config.toml").exists():
            check_vacant(run)
        write_file(run / TOKENIZERS[0], vocabularies.source.dump().encode())
        if not vocabularies.shared:
            write_file(run / TOKENIZERS[1], vocabularies.target.dump().encode())
        marks = fingerprint_settings(dump(config)) | fingerprint_tokenizers(run)
        marks |= fingerprint_examples(splits) if splits else {}
        write_file(run / "manifest.json", json.dumps(marks, indent=1).encode())
        write_file(run / "data.json", json.dumps(facts, ensure_ascii=False, indent=1).encode())
        if splits:
            save_weights(run / "seen.safetensors", {"sources": hash_sources(splits.train)}, 0, run)
        write_file(run / "config.toml", dump(config).encode())


def load_config(run: Path) -> Config:
    """The settings of a run."""
    if not run.is_dir():
        raise RunError(f"{run} is not a run: {'it is a file' if run.exists() else 'it does not exist'}.")
    if not (run / "config.toml").exists():
        inside = sorted(path.parent.name for path in run.glob("*/config.toml"))
        hint = f" There are runs inside it: {', '.join(inside[:9])}{', ...' * (len(inside) > 9)}." if inside else ""
        if (run / "config.json").exists():
            hint = f" It may be a model of Hugging Face's: `regard import {run} NEW` makes a run of it."
        raise RunError(f"{run} is not a run: it has no config.toml. A run is what `regard train` makes.{hint}")
    return parse(run / "config.toml")


def load_vocabularies(run: Path) -> Vocabularies:
    """The vocabularies of a run, as they were when it began; one serves both sides unless the target has its own."""
    source, target = Vocabulary.load(run / TOKENIZERS[0]), run / TOKENIZERS[1]
    check_manifest(run, fingerprint_tokenizers(run))
    return Vocabularies(source, Vocabulary.load(target) if target.exists() else source)


def save_state(run: Path, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
    """Save all that resuming needs, then let go of what was saved before."""
    place = run / "state" / f"{step:09d}"
    if place.exists():  # saved already, and whole: as when Ctrl-C comes right behind a save
        return
    with make_folder(place) as beside:
        flush_file(beside / "state.safetensors", pack(tensors, step, run))
        flush_file(beside / "state.json", json.dumps(facts | {"run": identify(run)}).encode())
    for other in place.parent.iterdir():
        if other.name != place.name:
            shutil.rmtree(other, ignore_errors=True)


def load_facts(run: Path) -> dict[str, Any] | None:
    """What the newest saved state says beside its tensors, or None if training never got so far."""
    if (place := find_state(run)) is None:
        return None
    path = place / "state.json"
    try:
        facts = dict(json.loads(path.read_bytes()))
        owner = facts.pop("run")
        if type(facts["step"]) is not int:
            raise TypeError(f"its step is {facts['step']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}.") from error
    if owner != identify(run):
        raise RunError(f"{path} is of another run, not of {run} (manifest.json). Put back what belongs there.")
    return facts


def load_state(run: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """The newest saved state, or None if training never got so far."""
    facts, place = load_facts(run), find_state(run)
    return None if facts is None or place is None else (load_tensors(place / "state.safetensors", run), facts)


def find_state(run: Path) -> Path | None:
    """The folder of the newest saved state."""
    return max((place for place in (run / "state").glob("[0-9]*") if place.is_dir()), default=None)


def average_weights(paths: list[Path], run: Path | None = None) -> Tensors:
    """The mean of several weights files, of a run if one is given. What is the same in all of them, as frozen weights
    are, stays the same to the last bit."""
    first = load_tensors(paths[0], run)
    total, changed = {name: tensor.clone() for name, tensor in first.items()}, set()
    for path in paths[1:]:
        for name, tensor in load_tensors(path, run).items():
            total[name] += tensor
            if name not in changed and not torch.equal(tensor, first[name]):
                changed.add(name)
    return {name: tensor / len(paths) if name in changed else first[name] for name, tensor in total.items()}
