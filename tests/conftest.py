"""Shared fixtures: small runs that are trained once, and the command line."""

import io
import sys
from pathlib import Path

import pytest
import torch

from regard.cli import commands as cli
from regard.config.run import Config
from regard.config.toml import read
from regard.evaluation.fit import fit
from regard.training.prepare import start_run

torch.set_num_threads(1)

TINY = (
    "data.examples=300",
    "data.valid=20",
    "data.test=30",
    "data.longest=4",
    "model.size=16",
    "model.embedding=8",
    "train.steps=8",
    "train.validate_every=4",
    "train.batch_tokens=128",
    "train.warmup=4",
    "decode.beam_size=2",
)


def tiny(*changes: str) -> Config:
    """The reverse recipe, too small to learn anything."""
    return read("reverse", [*TINY, *changes])


def train_tiny(folder: Path, *changes: str, report=lambda event: None, say=lambda text: None, **options):
    config = tiny(*changes)
    return fit(start_run(config, folder, say), folder, report, device="cpu", **options)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train_tiny(folder)
    return folder


@pytest.fixture
def typed(capsys, monkeypatch):
    """Types a command: its status, what it writes and what it says. Standard input is text or bytes."""

    def run(*words, text=""):
        data = io.BytesIO(text.encode() if isinstance(text, str) else text)
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, encoding="utf-8"))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, *capsys.readouterr()

    return run


def tiny_language(folder: Path, *changes: str) -> Path:
    """A language model of Korean syllables, too small to say much; returns its run directory."""
    text = folder / "text.txt"
    text.write_text("가나다라 마바사아 자차카타 파하\n" * 40, encoding="utf-8")
    config = read("shakespeare", [f'data.train=["{text}"]', *TINY_LANGUAGE, *changes])
    fit(start_run(config, folder / "run"), folder / "run", lambda event: None, device="cpu")
    return folder / "run"


TINY_LANGUAGE = (
    "text.max_length=24",
    "model.size=16",
    "model.feedforward=16",
    "model.heads=2",
    "model.layers=1",
    "model.positions=learned",
    "train.steps=4",
    "train.warmup=2",
    "train.validate_every=4",
    "train.batch_tokens=96",
)
