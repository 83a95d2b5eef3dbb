"""Rooms, and what is public."""

import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCES = Path(regard.__file__).parent
ROOMS = [
    *("config", "data", "attention", "nn", "tasks", "training", "inference", "evaluation", "explain", "formats"),
    *("server", "cli", "recipes"),
]


def test_every_folder_is_a_room():
    folders = {path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)


def test_public_names():
    assert len(regard.__all__) <= 20
    assert sorted(regard.__all__) == regard.__all__
    for name in regard.__all__ * 2:  # a module of the same name would come the second time
        assert callable(getattr(regard, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = regard.nothing


def test_help_and_import_do_not_import_torch():
    code = "import sys, regard, regard.cli.commands; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
