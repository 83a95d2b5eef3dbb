"""regard: train, run and look inside attention models."""

from typing import TYPE_CHECKING, Any

from regard.errors import ConfigError, DataError, InputError, RegardError, RunError, TrainError

if TYPE_CHECKING:
    from regard.config.toml import read as read
    from regard.evaluation.evaluate import evaluate as evaluate
    from regard.explain.look import Look as Look
    from regard.explain.look import look as look
    from regard.explain.recorder import record as record
    from regard.explain.vectors import embed as embed
    from regard.inference.predictor import Predictor as Predictor
    from regard.inference.predictor import load as load
    from regard.training.run import fit as fit
    from regard.training.run import fresh as fresh
    from regard.training.run import resumed as resumed

HOMES = {
    "read": "config.toml", "evaluate": "evaluation.evaluate", "Look": "explain.look", "look": "explain.look",
    "Predictor": "inference.predictor", "load": "inference.predictor", "record": "explain.recorder",
    "fit": "training.run", "fresh": "training.run", "resumed": "training.run", "embed": "explain.vectors",
}  # fmt: skip

__all__ = [
    "ConfigError", "DataError", "InputError", "Look", "Predictor", "RegardError", "RunError", "TrainError",
    "embed", "evaluate", "fit", "fresh", "load", "look", "read", "record", "resumed",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import regard` alone does not import torch."""
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("regard")
    if name in HOMES:
        return getattr(import_module(f"regard.{HOMES[name]}"), name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
