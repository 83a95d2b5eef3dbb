"""The training loop: forward, loss, backward, clip, update, report. A function; what it needs is passed in.

Resuming is exact: the order of the data is a pure function of the step, and everything else that changes (weights,
optimizer, random state, best score, checkpoints to average) is saved.
"""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config.config import TrainConfig
from regard.data.batching import Batch
from regard.errors import RunError, TrainError
from regard.nn.loss import Loss, Trainable
from regard.training.checkpoint import Tensors, average, fill, load_state, save_state, save_weights, weights

Score = dict[str, float]
"""Metric -> value; the first is the one that decides."""


@dataclass(frozen=True)
class Event:
    """What the trainer reports."""

    kind: str
    """"step", "validation", "saved", "stopped", "done"; of a run also "sample" and "note"."""
    step: int
    values: dict[str, Any]


@dataclass
class Progress:
    """What changes during training beside tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    worse: int = 0
    """Validations since the best."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the weights files to average."""
    precision: str = ""
    """The device and the kind of its products, which may have been measured: a resumed training stays with it."""


def rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step`, counted from 1."""
    if step < config.warmup:
        return config.rate * step / config.warmup
    match config.schedule:
        case "inverse sqrt":
            return config.rate * math.sqrt(max(1, config.warmup) / step)
        case "cosine":
            done = (step - config.warmup) / max(1, config.steps - config.warmup)
            return config.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "constant":
            return config.rate


def optimizer_of(model: Trainable, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam or AdamW over what is to be learned."""
    kind = awake(torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(learned, lr=config.rate, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def awake(kind: type[torch.optim.Adam]) -> type[torch.optim.Adam]:
    """The same optimizer, but one that does not import torch's compiler, for a second, when it begins: torch wraps
    these methods so that they are never compiled, and here nothing is."""
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def learn(model: Trainable, group: Sequence[Batch], config: TrainConfig, kind: torch.dtype) -> Loss:
    """Add the gradient of one update's batches, as of one large batch: each is divided by the tokens of all."""
    device = next(model.parameters()).device
    tokens = sum(batch.tokens for batch in group)
    total, plain = torch.zeros(()), torch.zeros(())
    for batch in group:
        batch = Batch(*(tensor.to(device) for tensor in batch))
        with torch.autocast(device.type, kind, enabled=kind != torch.float32):
            loss = model.loss(batch, config.smoothing)
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
    validate: Callable[[Trainable], Score],
    better: Callable[[float, float], bool],
    report: Callable[[Event], None],
    precision: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train until the last step, the patience's end, or `stop()`; the run directory holds the best weights and the
    state. Resumes from the run's state if there is one. `batches(start)` are the updates from number `start` on, each
    as a list of batches."""
    optimizer = optimizer_of(model, config)
    progress = resume(model, optimizer, run)
    progress.precision = f"{next(model.parameters()).device.type} {str(precision).removeprefix('torch.')}"
    began = time.monotonic() - progress.seconds
    model.train()
    for group in batches(progress.step):
        if progress.step >= config.steps or stop() or exhausted(progress, config):
            break
        for settings in optimizer.param_groups:
            settings["lr"] = rate(progress.step + 1, config)
        loss = learn(model, group, config, precision)
        norm = clip(optimizer, config.clip)
        if not math.isfinite(float(loss.total)) or not math.isfinite(norm):
            raise not_a_number(progress.step + 1, loss, norm, group)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.tokens += loss.tokens
        progress.seconds = time.monotonic() - began
        report(Event("step", progress.step, described(loss, norm, config, progress)))
        due = progress.step % config.validate_every == 0 or progress.step == config.steps
        if due:
            validated(model, config, run, progress, validate, better, report)
        if due or (config.save_every and progress.step % config.save_every == 0):
            progress.seconds = time.monotonic() - began
            save_all(model, optimizer, run, progress, report)
    finished = progress.step >= config.steps or exhausted(progress, config)
    if not finished:
        save_all(model, optimizer, run, progress, report)
    report(Event("done" if finished else "stopped", progress.step, asdict(progress)))
    return progress


def described(loss: Loss, norm: float, config: TrainConfig, progress: Progress) -> dict[str, float]:
    """One update in numbers."""
    return {
        "loss": float(loss.total) / loss.tokens,
        "nats": float(loss.plain) / loss.tokens,
        "norm": norm,
        "rate": rate(progress.step, config),
        "tokens": loss.tokens,
        "seconds": progress.seconds,
    }


def clip(optimizer: torch.optim.Optimizer, most: float) -> float:
    """Clip the norm of the whole gradient; returns what it was."""
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return float(torch.nn.utils.clip_grad_norm_(learned, most))


def exhausted(progress: Progress, config: TrainConfig) -> bool:
    """Whether patience has ended."""
    return config.patience is not None and progress.worse >= config.patience


def not_a_number(step: int, loss: Loss, norm: float, group: Sequence[Batch]) -> TrainError:
    """The error for a loss or gradient that is not finite."""
    shapes = ", ".join(f"{tuple(batch.source.shape)} -> {tuple(batch.answer.shape)}" for batch in group)
    return TrainError(
        f"the loss at step {step} is {float(loss.total) / loss.tokens} and its gradient's norm {norm} (batch of "
        f"{shapes} ids). The last saved state is whole. Try a smaller train.rate, a longer train.warmup, "
        "train.clip=1.0 or train.precision=float32."
    )


def validated(
    model: Trainable,
    config: TrainConfig,
    run: Path,
    progress: Progress,
    validate: Callable[[Trainable], Score],
    better: Callable[[float, float], bool],
    report: Callable[[Event], None],
) -> None:
    """Make a checkpoint, score the average of the last ones by real decoding, and keep it if it is the best."""
    current = {name: tensor.clone() for name, tensor in weights(model).items()}
    mean: Tensors = current
    folder = run / "checkpoints"
    if config.average > 1:
        save_weights(folder / f"{progress.step}.safetensors", current, progress.step)
        progress.checkpoints = [*progress.checkpoints, progress.step][-config.average :]
        mean = average([folder / f"{step}.safetensors" for step in progress.checkpoints])
    fill(model, mean, folder)
    model.eval()
    random = torch.get_rng_state()
    score = validate(model)
    torch.set_rng_state(random)
    model.train()
    fill(model, current, folder)
    value = next(iter(score.values()))
    progress.worse += 1
    if progress.best is None or math.isnan(progress.best) or better(value, progress.best):
        progress.best, progress.best_step, progress.worse = value, progress.step, 0
        save_weights(run / "model.safetensors", mean, progress.step)
    report(Event("validation", progress.step, {**score, "best": progress.best, "best_step": progress.best_step}))


def save_all(
    model: Trainable,
    optimizer: torch.optim.Optimizer,
    run: Path,
    progress: Progress,
    report: Callable[[Event], None],
) -> None:
    """Save the resumable state; then weights that no average needs any more go."""
    tensors = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
    tensors["random"] = torch.get_rng_state()
    save_state(run, progress.step, tensors, asdict(progress))
    for path in (run / "checkpoints").glob("*.safetensors"):
        if int(path.stem) not in progress.checkpoints:
            path.unlink(missing_ok=True)
    report(Event("saved", progress.step, {}))


def resume(model: Trainable, optimizer: torch.optim.Optimizer, run: Path) -> Progress:
    """Put everything back as it was at the last save; a fresh start if there was none."""
    saved = load_state(run)
    if saved is None:
        return Progress()
    tensors, facts = saved
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, rest = name.partition(".")
        groups.setdefault(owner, {})[rest] = tensor
    fill(model, groups.get("model", {}), run / "state")
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for name, tensor in groups.get("optimizer", {}).items():
            number, _, rest = name.partition(".")
            state.setdefault(int(number), {})[rest] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["random"])
        return Progress(**facts)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{run}/state is damaged: {error}. Train anew, or put another copy of it there.") from error


def append(path: Path, event: Event) -> None:
    """Add an event to a JSON-lines file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": event.kind, "step": event.step, **event.values}) + "\n")
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. The last saved state is whole; make room and resume."
        ) from error
