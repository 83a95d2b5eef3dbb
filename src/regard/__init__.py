"""regard: train, run and look inside attention models."""

from typing import TYPE_CHECKING, Any

from regard.errors import ConfigError, DataError, InputError, RegardError, RunError, TrainError

if TYPE_CHECKING:
    from regard.evaluate import evaluate as evaluate
    from regard.look import alignment as alignment
    from regard.predict import Predictor as Predictor
    from regard.predict import load as load
    from regard.record import record as record
    from regard.run import fit as fit
    from regard.run import fresh as fresh
    from regard.run import resumed as resumed
    from regard.toml import read as read

HOMES = {
    "read": "toml",
    "evaluate": "evaluate",
    "alignment": "look",
    "Predictor": "predict",
    "load": "predict",
    "record": "record",
    "fit": "run",
    "fresh": "run",
    "resumed": "run",
}

__all__ = [
    "ConfigError",
    "DataError",
    "InputError",
    "Predictor",
    "RegardError",
    "RunError",
    "TrainError",
    "alignment",
    "evaluate",
    "fit",
    "fresh",
    "load",
    "read",
    "record",
    "resumed",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import regard` alone does not import torch."""
    from importlib import import_module

    if name in HOMES:
        return getattr(import_module(f"regard.{HOMES[name]}"), name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
