"""The file list, read top to bottom, is the flow: a module imports only those above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCES = Path(regard.__file__).parent
ORDER = [
    "errors",
    "settings",
    "corpus",
    "config",
    "toml",
    "text",
    "files",
    "data",
    "generate",
    "batch",
    "embeddings",
    "layers",
    "mask",
    "position",
    "attention",
    "pool",
    "recurrent",
    "transformer",
    "loss",
    "encoders",
    "models",
    "device",
    "checkpoint",
    "train",
    "limits",
    "beam",
    "decode",
    "metrics",
    "predict",
    "engine",
    "fast",
    "guard",
    "evaluation",
    "recording",
    "picture",
    "vectors",
    "forms",
    "entries",
    "quantised",
    "exchange",
    "export",
    "maps",
    "looking",
    "waiting",
    "service",
    "schema",
    "gate",
    "libre",
    "writing",
    "completions",
    "workers",
    "serve",
    "run",
    "console",
    "verbs",
    "demo",
    "cli",
    "__main__",
]


def imported(module):
    for node in ast.walk(ast.parse((SOURCES / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "regard":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("regard."):
            yield node.module.removeprefix("regard.")


def test_every_module_has_its_place():
    assert {path.stem for path in SOURCES.glob("*.py")} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_upward(module):
    for other in imported(module):
        assert ORDER.index(other) < ORDER.index(module), f"{module} imports {other}, which comes later"


def test_public_names():
    assert len(regard.__all__) <= 20
    assert sorted(regard.__all__) == regard.__all__
    for name in regard.__all__ * 2:  # a module of the same name would come the second time
        assert callable(getattr(regard, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = regard.nothing


def test_help_and_import_do_not_import_torch():
    code = "import sys, regard, regard.cli; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
