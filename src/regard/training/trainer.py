"""The training loop: forward, loss, backward, clip, update, report. A function; what it needs is passed in.

Resuming is exact: the order of the data is a pure function of the step, and everything else that changes (weights,
optimizer, random state, best score, checkpoints to average) is saved.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from regard.config.run import TrainConfig
from regard.data.batching import Batch
from regard.errors import RunError, TrainError
from regard.nn.loss import Loss, Trainable
from regard.training.checkpoint import (
    average_weights,
    fill_weights,
    get_weights,
    load_facts,
    load_state,
    save_state,
    save_weights,
)

Score = dict[str, float]
"""Metric -> value; the first is the one that decides."""


@dataclass(frozen=True)
class Event:
    """What the trainer reports."""

    kind: (
        str  # "step", "validation", "saving", "saved", "stopped", "done"; of a run also "sample", "warning", "warming"
    )
    step: int
    values: dict[str, Any]


@dataclass
class Progress:
    """What changes during training beside tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    worse: int = 0  # validations since the best
    late: bool = False  # whether `train.minutes` have passed, and the last validation is done
    checkpoints: list[int] = field(default_factory=list)  # steps of the weights files to average
    precision: str = ""
    """The device and the kind of its products, which may have been measured: a resumed training stays with it."""
    threads: int = 0
    """Threads that add up the numbers: with others, the last digits may differ."""


Validate = Callable[[Trainable], Score]
Better = Callable[[float, float], bool]
Report = Callable[[Event], None]


def learning_rate(step: int, config: TrainConfig, seconds: float = 0.0) -> float:
    """The learning rate of update `step`, counted from 1, which begins after so many seconds; the settings have every
    number (`TrainConfig.resolve`). Where minutes are limited, a cosine ends with whichever ends first."""
    assert config.steps is not None
    assert config.warmup is not None
    if step < config.warmup:
        return config.learning_rate * step / config.warmup
    match config.schedule:
        case "inverse sqrt":
            return config.learning_rate * math.sqrt(max(1, config.warmup) / step)
        case "cosine":
            done = (step - config.warmup) / max(1, config.steps - config.warmup)
            done = max(done, seconds / (60 * config.minutes)) if config.minutes else done
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "constant":
            return config.learning_rate


def make_optimizer(model: Trainable, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam or AdamW over what is to be learned."""
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(learned, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def accumulate_gradients(model: Trainable, group: Sequence[Batch], config: TrainConfig, kind: torch.dtype) -> Loss:
    """Add the gradient of one update's batches, as of one large batch: each is divided by the tokens of all."""
    device = next(model.parameters()).device
    tokens = sum(batch.tokens for batch in group)
    total, plain = torch.zeros(()), torch.zeros(())
    for batch in group:
        with torch.autocast(device.type, kind, enabled=kind != torch.float32):
            loss: Loss = model(batch.to(device), config.label_smoothing)
        (loss.total / tokens).backward()  # type: ignore[no-untyped-call]
        total += loss.total.detach().cpu()
        plain += loss.plain.detach().cpu()
    return Loss(total, plain, tokens)


def train(
    model: Trainable,
    batches: Callable[[int], Iterator[list[Batch]]],
    config: TrainConfig,
    run: Path,
    *,
    validate: Validate,
    better: Better,
    report: Report,
    precision: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train until the last step or minute, the patience's end, or `stop()`; the run directory holds the best weights
    and the state. Resumes from the run's state if there is one. `batches(start)` are the updates from number `start`
    on, each as a list of batches. Before anything is written, `validate` or `report` is called: either may raise to
    prevent it."""
    assert config.steps is not None
    assert config.validate_every is not None
    set_checkpointing(model, config.checkpoint_activations)
    optimizer = make_optimizer(model, config)
    progress = resume(model, optimizer, run)
    progress.precision = f"{next(model.parameters()).device.type} {str(precision).removeprefix('torch.')}"
    progress.threads = torch.get_num_threads()
    updates = batches(progress.step)  # which may prepare data for long: that is no time of training
    began = time.monotonic() - progress.seconds
    model.train()
    while not (is_finished(progress, config) or stop()):
        group = next(updates)  # drawn only when it is used: a task may sample it
        rate = learning_rate(progress.step + 1, config, progress.seconds)
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        loss = accumulate_gradients(model, group, config, precision)
        norm = clip_gradient(optimizer, config.clip_norm)
        if not math.isfinite(float(loss.total)) or not math.isfinite(norm):
            raise explain_divergence(progress.step + 1, loss, norm, group)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.tokens += loss.tokens
        progress.seconds = time.monotonic() - began
        report(Event("step", progress.step, describe_update(loss, norm, rate, progress)))
        late = config.minutes is not None and progress.seconds >= 60 * config.minutes
        due = progress.step % config.validate_every == 0 or progress.step == config.steps or late
        if due:
            progress.late = late
            report(validate_model(model, config, run, progress, validate, better))
        if due or (config.save_every and progress.step % config.save_every == 0):
            progress.seconds = time.monotonic() - began
            save_all(model, optimizer, run, progress, report)
    finished = is_finished(progress, config)
    if not finished:
        save_all(model, optimizer, run, progress, report)
    report(Event("done" if finished else "stopped", progress.step, asdict(progress)))
    return progress


def set_checkpointing(model: Trainable, wanted: bool) -> None:
    """Whether the blocks of a model forget their inside, and compute it again for the gradient."""
    for part in model.modules():
        if hasattr(part, "checkpoint_activations"):
            part.checkpoint_activations = wanted  # type: ignore[assignment]


def solve(
    model: Trainable,
    passes: Iterator[float],
    tokens: int,
    config: TrainConfig,
    run: Path,
    *,
    validate: Validate,
    better: Better,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Let a model's own solver fit it: `passes` gives the objective, in nats a token, after every pass over so many
    training tokens. It is validated and saved once, at its end: a solver that is stopped has saved nothing, and begins
    again when it is resumed."""
    progress, began = Progress(precision="cpu float32", threads=torch.get_num_threads()), time.monotonic()
    for objective in itertools.islice(passes, config.steps):
        if stop():
            report(Event("stopped", 0, asdict(Progress())))
            return Progress()
        progress.step += 1
        progress.tokens += tokens
        progress.seconds = time.monotonic() - began
        if not math.isfinite(objective):
            raise TrainError(f"the objective after pass {progress.step} is {objective}. Try a larger model.l2.")
        values = {"loss": objective, "nats": objective, "tokens": tokens, "seconds": progress.seconds}
        report(Event("step", progress.step, values))
    report(validate_model(model, config, run, progress, validate, better))
    save_all(model, make_optimizer(model, config), run, progress, report)
    report(Event("done", progress.step, asdict(progress)))
    return progress


def describe_update(loss: Loss, norm: float, rate: float, progress: Progress) -> dict[str, float]:
    """One update in numbers."""
    return {
        "loss": float(loss.total) / loss.tokens,
        "nats": float(loss.plain) / loss.tokens,
        "norm": norm,
        "rate": rate,
        "tokens": loss.tokens,
        "seconds": progress.seconds,
    }


def clip_gradient(optimizer: torch.optim.Optimizer, most: float) -> float:
    """Clip the norm of the whole gradient; returns what it was."""
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return float(torch.nn.utils.clip_grad_norm_(learned, most))


def is_finished(progress: Progress, config: TrainConfig) -> bool:
    """Whether the steps, the minutes or the patience have ended."""
    assert config.steps is not None
    return progress.step >= config.steps or progress.late or 0 < config.patience <= progress.worse


def explain_divergence(step: int, loss: Loss, norm: float, group: Sequence[Batch]) -> TrainError:
    """The error for a loss or gradient that is not finite."""
    shapes = ", ".join(f"{tuple(batch.source.shape)} -> {tuple(batch.answer.shape)}" for batch in group)
    return TrainError(
        f"the loss at step {step} is {float(loss.total) / loss.tokens} and its gradient's norm {norm} (batch of "
        f"{shapes} ids). The last saved state is whole. Try a smaller train.learning_rate, a longer train.warmup, "
        "train.clip_norm=1.0 or train.precision=float32."
    )


def validate_model(
    model: Trainable, config: TrainConfig, run: Path, progress: Progress, validate: Validate, better: Better
) -> Event:
    """Make a checkpoint, score the average of the last ones by real decoding, and keep it if it is the best. As long as
    the score is 0 the newest counts as the best: it has learned more, and patience has nothing to wait for yet."""
    mean = current = {name: tensor.clone() for name, tensor in get_weights(model).items()}
    folder = run / "checkpoints"
    if config.average_checkpoints > 1:
        save_weights(folder / f"{progress.step}.safetensors", current, progress.step, run)
        progress.checkpoints = [*progress.checkpoints, progress.step][-config.average_checkpoints :]
        mean = average_weights([folder / f"{step}.safetensors" for step in progress.checkpoints], run)
    fill_weights(model, mean, folder)
    model.eval()
    random = torch.get_rng_state()
    score = validate(model)
    torch.set_rng_state(random)
    model.train()
    fill_weights(model, current, folder)
    value = next(iter(score.values()))
    unscored = progress.best is None or math.isnan(progress.best) or progress.best == value == 0  # as BLEU at first
    progress.worse += 1
    if unscored or progress.best is None or better(value, progress.best):
        progress.best, progress.best_step, progress.worse = value, progress.step, 0
        save_weights(run / "model.safetensors", mean, progress.step, run)
    best = {"best": progress.best, "best_step": progress.best_step}
    return Event("validation", progress.step, {**score, **model.gauges(), **best})


def save_all(model: Trainable, optimizer: torch.optim.Optimizer, run: Path, progress: Progress, report: Report) -> None:
    """Save the resumable state; then weights that no average needs any more go."""
    tensors = {f"model.{name}": tensor for name, tensor in get_weights(model).items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
    tensors["random"] = torch.get_rng_state()
    report(Event("saving", progress.step, {}))
    save_state(run, progress.step, tensors, asdict(progress))
    for path in (run / "checkpoints").glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) not in progress.checkpoints:
            path.unlink(missing_ok=True)
    report(Event("saved", progress.step, {}))


def resume(model: Trainable, optimizer: torch.optim.Optimizer, run: Path) -> Progress:
    """Put everything back as it was at the last save; a fresh start if there was none."""
    saved = load_state(run)
    if saved is None:
        return Progress()
    tensors, facts = saved
    weights = {name.removeprefix("model."): one for name, one in tensors.items() if name.startswith("model.")}
    fill_weights(model, weights, run / "state")
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for _, number, name in (key.split(".", 2) for key in tensors if key.startswith("optimizer.")):
            state.setdefault(int(number), {})[name] = tensors[f"optimizer.{number}.{name}"]
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["random"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{run}/state is damaged: {error}. Train anew, or put another copy of it there.") from error
    return read_progress(facts, run)


def load_progress(run: Path) -> Progress | None:
    """How far a run has come; None if nothing was saved yet."""
    facts = load_facts(run)
    return None if facts is None else read_progress(facts, run)


def read_progress(facts: dict[str, Any], run: Path) -> Progress:
    """What a saved state says, checked."""
    try:
        return TypeAdapter(Progress).validate_json(json.dumps(facts), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(
            f"{run}/state is damaged: {'.'.join(map(str, first['loc']))} in state.json is {first['input']!r}, "
            f"{first['msg'].lower()}. Train anew, or put another copy of it there."
        ) from error


def append_event(path: Path, event: Event) -> None:
    """Add an event to a JSON-lines file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": event.kind, "step": event.step, **event.values}) + "\n")
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. The last saved state is whole; make room and resume."
        ) from error
