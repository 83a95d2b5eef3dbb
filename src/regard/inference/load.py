"""Opening a run: its settings, vocabularies and weights, and the engine that decodes best."""

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import torch

from regard.config.toml import change
from regard.errors import ConfigError, RunError
from regard.inference.ctranslate2_engine import Absent, CTranslate2Engine
from regard.inference.ctranslate2_model import check_expressible, convert_run, get_library
from regard.inference.predictor import Predictor
from regard.tasks import make_task
from regard.tasks.task import Task
from regard.training.checkpoint import fill_weights, load_config, load_tensors, load_vocabularies
from regard.training.device import choose, keep_memory

ENGINES = ("auto", "torch", "ctranslate2")


def load(
    run: str | Path, changes: Iterable[str] = (), device: str = "auto", engine: str = "auto", threads: int | None = None
) -> Predictor:
    """Open a run that `regard train` or `import` made, or a folder that `regard export --to ctranslate2` made;
    `changes` are settings as in `--set`. The engine that decodes is CTranslate2 where it is installed and can express
    the model (`auto`), our own (`torch`), or `ctranslate2` and nothing else."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine is {engine!r}, expected {', '.join(ENGINES)}.")
    keep_memory()
    folder, place = Path(run), choose(device)
    machine = "cuda" if place.type == "cuda" else "cpu", threads or torch.get_num_threads()
    task = make_task(change(load_config(folder), changes), load_vocabularies(folder))
    if (folder / "model.bin").exists():
        get_library()
        if engine == "torch":
            raise RunError(f"{folder} is a CTranslate2 model: our engine needs the run that it was exported from.")
        absent = Absent()
        return Predictor(task, absent, CTranslate2Engine(task, absent, lambda: folder, *machine), folder)
    model = load_model(task, folder).to(place)
    if not fits_ctranslate2(task, engine):
        return Predictor(task, model, run=folder)
    convert = functools.partial(convert_run, task, model, folder, task.config.decode.quantization)
    return Predictor(task, model, CTranslate2Engine(task, model, convert, *machine), folder)


def load_model(task: Task, run: Path) -> torch.nn.Module:
    """The model of a run with its best weights, on the CPU."""
    path = run / "model.safetensors"
    if not path.exists():
        raise RunError(f"{run} has no model yet: training has not reached its first validation.")
    with torch.random.fork_rng(devices=[]):  # who opens a run keeps their own random numbers
        model = task.build()
    fill_weights(model, load_tensors(path, run), path)
    return model.eval()


def fits_ctranslate2(task: Task, engine: str) -> bool:
    """Whether CTranslate2 is wanted, or installed and able to."""
    if engine == "torch" or (engine == "auto" and importlib.util.find_spec("ctranslate2") is None):
        return False
    try:
        get_library()
        check_expressible(task)
    except ConfigError:
        if engine == "ctranslate2":
            raise
        return False
    return True
