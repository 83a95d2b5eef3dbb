"""The memory plan: what the largest batch would need, forward and backward, before training begins.

Nothing is computed from formulas of models: one and two rows of the largest batch are run, the bytes of their tensors
counted, and what each further row adds is the difference. So it holds for every model, attention and normalizer, with
and without checkpointed activations.
"""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from regard.config.run import Config, TrainConfig
from regard.data.batching import Batch
from regard.errors import ConfigError
from regard.nn.loss import Trainable
from regard.training.device import choose, precision
from regard.training.trainer import accumulate_gradients, set_checkpointing

MOMENTS = 2
"""Numbers that Adam keeps of every weight."""


LARGE = 1e9
"""Bytes of weights that take some seconds to draw."""
Built = TypeVar("Built", bound=nn.Module)


class Plan(NamedTuple):
    """What training is expected to need beside the weights, in bytes."""

    batch: int  # forward and backward of the largest batch, and the gradient of all weights
    optimizer: int
    rows: int
    tokens: int  # of the longest row
    stopped: bool = False  # one or two rows needed more than the limit by themselves: it is more than this

    @property
    def total(self) -> int:
        return self.batch + self.optimizer


class TooLargeError(Exception):
    """A count has gone past its limit."""


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made inside of it and alive at the same time, and the most of them; stops
    what makes more than a limit."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most, self.limit = 0, 0, limit
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        for part in found if isinstance(found, tuple | list) else [found]:
            if isinstance(part, Tensor):
                self.count(part.untyped_storage())
        if self.now > self.limit:
            raise TooLargeError
        return found

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count memory until it is freed, once however many tensors look at it."""
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.known or not size:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)

        def free() -> None:
            self.known.discard(place)
            self.now -= size

        weakref.finalize(storage, free)


def measure_batch(model: Trainable, batch: Batch, config: TrainConfig, kind: torch.dtype, limit: float) -> int:
    """The most bytes of tensors that one batch needs at once, forward and backward; the gradient is let go of."""
    try:
        with TensorBytes(limit) as counted:
            accumulate_gradients(model, [batch], config, kind)
        return int(counted.most)
    finally:
        model.zero_grad(set_to_none=True)


def plan_memory(
    model: Trainable, batch: Batch, config: TrainConfig, kind: torch.dtype, limit: float = float("inf")
) -> Plan:
    """What training with batches up to this one needs, measured on its first rows and no further than the limit. The
    model, and torch's random numbers, stay as they are."""
    weights = sum(part.nbytes for part in model.parameters() if part.requires_grad)
    rows, mode, stopped = len(batch.answer), model.training, False
    model.train()
    set_checkpointing(model, config.checkpoint_activations)
    try:
        with torch.random.fork_rng(devices=[]):
            found = [
                measure_batch(model, batch.select(slice(count)), config, kind, limit)
                for count in range(1, min(2, rows) + 1)
            ]
        needed = found[0] + (rows - 1) * (found[-1] - found[0])
    except (TooLargeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        needed, stopped = int(limit), True
    finally:
        model.train(mode)
    length = max(int(batch.lengths.max()), batch.answer.shape[1])
    return Plan(needed, MOMENTS * weights, rows, length, stopped)


def bound_memory(model: nn.Module, batch: Batch) -> float:
    """Bytes that no model of such parts needs for a batch: where they are there, nothing has to be measured."""
    if batch.source.dim() == 4:  # what convolutions keep grows with pixels, of which nothing here knows
        return float("inf")
    length = int(batch.lengths.max()) + batch.answer.shape[1]
    sizes = [(len(part), part.shape[-1]) for part in model.parameters()]
    outputs = sum(rows if rows <= 16 * columns else columns for rows, columns in sizes)  # others are tables to look up
    heads = [getattr(part, "heads", None) for part in model.modules()]
    maps = sum(count for count in heads if isinstance(count, int))
    return 4.0 * len(batch.answer) * length * (12 * outputs + 6 * maps * length)


def free_memory(device: torch.device) -> float:
    """Bytes that may still be used on a device; infinite where nobody tells."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return float("inf")
    found = [float("inf")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        groups = Path("/sys/fs/cgroup")  # a container may have less than its machine
        limit, used = ((groups / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        found += [float(limit) - float(used)]
    except (OSError, ValueError):  # another system, or no limit ("max")
        pass
    return min(found)


def count_weights(build: Callable[[], nn.Module]) -> int:
    """Bytes of a model's weights. It is built on torch's meta device, where tensors have no memory."""
    with torch.device("meta"):
        return sum(part.nbytes for part in build().parameters())


def build_within(build: Callable[[], Built], free: float, config: Config) -> Built:
    """Build a model whose weights fit into so many bytes, or refuse it. A large one is counted first; what counts takes
    a second to load, so not for others."""
    held, state, own = 0, torch.get_rng_state(), threading.get_ident()

    def hold(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        nonlocal held
        if threading.get_ident() == own and weight is not None:  # torch's hook hears of all threads
            held += weight.nbytes
            if held > min(LARGE, free):
                raise TooLargeError

    hook = register_module_parameter_registration_hook(hold)
    try:
        return build()
    except (TooLargeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
    finally:
        hook.remove()
    if (needed := count_weights(build)) > free:
        raise ConfigError(describe_weights("the weights of this model", needed, free, config))
    torch.set_rng_state(state)
    return build()


def describe_weights(what: str, needed: float, free: float, config: Config) -> str:
    """What weights need, and which settings make them fewer."""
    known = config.model_dump()["model"]
    sizes = [f"model.{name}" for name in ("size", "grid_size", "layers", "encoder_layers") if name in known]
    lower = f"lower {' or '.join(sizes)}" if sizes else "choose a smaller model"
    return f"{what} need {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: {lower}."


def check_memory(model: Trainable, batch: Batch, config: Config, device: str) -> None:
    """Refuse a training whose largest batch would not fit into memory, with the figures and what to change."""
    place = choose(device)
    free = free_memory(place)
    learned = sum(part.nbytes for part in model.parameters() if part.requires_grad)
    if (needed := (1 + MOMENTS) * learned) > free:
        what = "the weights of this model, their gradient and what the optimizer keeps of them"
        raise ConfigError(describe_weights(what, needed, free, config))
    if bound_memory(model, batch) + needed < free / 2:
        return
    plan = plan_memory(model.to(place), batch.to(place), config.train, precision(place, config.train.precision), free)
    if plan.total > free:
        raise ConfigError(describe_shortage(plan, free, config))


def describe_shortage(plan: Plan, free: float, config: Config) -> str:
    """What is missing, and which settings need less."""
    tokens, how = config.train.batch_tokens, "more than" if plan.stopped else "about"
    advice = [f"lower train.batch_tokens (now {tokens:,})"] if plan.rows > 1 else []
    if not config.train.checkpoint_activations:
        advice.append("set train.checkpoint_activations = true")
    advice.append(f"lower text.max_length (now {config.text.max_length:,})")
    if config.model_dump()["model"].get("attention") == "full":
        advice.append('choose a model.attention of linear cost, as "bigbird"')
    return (
        f"the largest batch, {plan.rows:,} x {plan.tokens:,} tokens, would need {how} "
        f"{plan.total / 1e9:,.1f} GB to train on, forward and backward, and {free / 1e9:,.1f} GB are free: "
        f"{', or '.join(advice)}."
    )
