"""regard: train, run and look inside attention models."""

from typing import TYPE_CHECKING, Any

from regard.errors import ConfigError, DataError, InputError, RegardError, RunError, TrainError

if TYPE_CHECKING:
    from regard.config.toml import read as read
    from regard.data.examples import Question as Question
    from regard.evaluation.evaluate import evaluate as evaluate
    from regard.evaluation.fit import fit as fit
    from regard.explain.look import Look as Look
    from regard.explain.look import look as look
    from regard.explain.recorder import record as record
    from regard.explain.vectors import embed as embed
    from regard.inference.load import load as load
    from regard.inference.predictor import Predictor as Predictor
    from regard.training.prepare import resume_run as resume_run
    from regard.training.prepare import start_run as start_run

HOMES = {
    "read": "config.toml", "Question": "data.examples", "evaluate": "evaluation.evaluate", "fit": "evaluation.fit",
    "Look": "explain.look", "look": "explain.look", "record": "explain.recorder", "embed": "explain.vectors",
    "load": "inference.load", "Predictor": "inference.predictor", "start_run": "training.prepare",
    "resume_run": "training.prepare",
}  # fmt: skip

__all__ = [
    "ConfigError", "DataError", "InputError", "Look", "Predictor", "Question", "RegardError", "RunError", "TrainError",
    "embed", "evaluate", "fit", "load", "look", "read", "record", "resume_run", "start_run",
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
