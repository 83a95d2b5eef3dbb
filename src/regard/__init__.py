"""regard: train, run and look inside attention models."""

from typing import TYPE_CHECKING, Any

from regard.errors import ConfigError, DataError, InputError, RegardError, RunError, TrainError

if TYPE_CHECKING:
    from regard.evaluation import evaluate as evaluate
    from regard.looking import Look as Look
    from regard.looking import look as look
    from regard.predict import Predictor as Predictor
    from regard.predict import load as load
    from regard.recording import record as record
    from regard.run import fit as fit
    from regard.run import fresh as fresh
    from regard.run import resumed as resumed
    from regard.toml import read as read
    from regard.vectors import embed as embed

HOMES = {
    "read": "toml", "evaluate": "evaluation", "Look": "looking", "look": "looking", "Predictor": "predict",
    "load": "predict", "record": "recording", "fit": "run", "fresh": "run", "resumed": "run", "embed": "vectors",
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
