"""The architecture, held: rooms in flow order, imports that point upward, and nobody who asks which task it has."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCES = Path(regard.__file__).parent
ROOMS = {
    "config": ["settings", "data", "text", "model", "structure", "vision", "run", "toml"],
    "data": [
        *("examples", "files", "images", "vocabulary", "encoding", "cutting", "synthetic", "columns", "formats"),
        *("splits", "batching"),
    ],
    "attention": [
        "masks",
        "positions",
        "scores",
        "chain",
        "trees",
        "matching",
        "normalizers",
        "equation",
        "linformer",
        "sparse",
    ],
    "nn": [
        *("layers", "attention", "kv_cache", "state", "transformer", "recurrent", "loss", "word_vectors"),
        "vision",
    ],
    "tasks": [
        *("answers", "axes", "page", "task", "generation", "seq2seq", "language_model", "lineup", "encoder"),
        *("classification", "question_answering", "tagging", "vision", "__init__"),
    ],
    "training": ["device", "lock", "manifest", "checkpoint", "trainer", "memory", "prepare"],
    "inference": [
        *("constraints", "beam_search", "sampling", "engine", "predictor", "degeneration", "ctranslate2_model"),
        *("ctranslate2_engine", "load"),
    ],
    "evaluation": ["metrics", "evaluate", "fit", "cost"],
    "explain": [
        *("recorder", "strips", "attention_maps", "uses", "plots", "overlays", "look", "alignment", "marginals"),
        "vectors",
    ],
    "formats": ["architectures", "tokenizers", "gguf", "huggingface_import", "huggingface_export", "ctranslate2"],
    "server": [
        *("settings", "schemas", "batcher", "service", "keys", "middleware", "bodies", "libretranslate"),
        *("completions", "openai", "workers", "app"),
    ],
    "cli": ["console", "verbs", "demo", "cost", "commands"],
}
"""Rooms in flow order, and the files of each: a room imports only rooms above it, a file only files above it."""
OUTSIDE = ["errors", *ROOMS]


def modules():
    """Every module as (room, file, path); a folder inside a room is one file."""
    for path in sorted(SOURCES.rglob("*.py")):
        room, *rest = path.relative_to(SOURCES).with_suffix("").parts
        if rest and (room == "tasks" or rest != ["__init__"]):
            yield pytest.param(room, rest[0], path, id=".".join([room, *rest]))


def imported(path):
    """Every (room, file) of this package that a module imports, for types alone left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for node in types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node in skipped or not (node.module or "").startswith("regard"):
            continue
        parts = (node.module or "").split(".")[1:]
        for name in node.names:
            room, *rest = [*parts, name.name]
            known = rest and rest[0] in ROOMS.get(room, ())
            yield room, rest[0] if known else "__init__"


@pytest.mark.parametrize(("room", "file", "path"), list(modules()))
def test_imports_point_upward(room, file, path):
    assert file in ROOMS[room], f"{path} has no place in the flow: add it to ROOMS"
    for other, inside in imported(path):
        if other != room:
            assert OUTSIDE.index(other) < OUTSIDE.index(room), f"{path} imports {other}, a room that comes later"
        elif inside != file:
            order = ROOMS[room]
            assert order.index(inside) < order.index(file), f"{path} imports {inside}, a file that comes later"


def test_every_folder_is_a_room():
    folders = {path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*ROOMS, "recipes"}
    assert {path.stem for path in SOURCES.glob("*.py")} == {"__init__", "__main__", "errors"}
    for room, files in ROOMS.items():
        found = {path.stem for path in (SOURCES / room).glob("*.py")} - {"__init__"}
        folders = {path.parent.name for path in (SOURCES / room).glob("*/__init__.py")}
        assert found | folders == set(files) - {"__init__"}, room


def test_rooms_are_small_and_introduce_themselves():
    for room, files in ROOMS.items():
        assert len(files) <= 14, f"{room} is crowded"
        text = ast.get_docstring(ast.parse((SOURCES / room / "__init__.py").read_text(encoding="utf-8"))) or ""
        first, *rest = text.split("\n\n")  # what the room is for; what it may not know, or how far it may go
        assert [first[-1:], *(part[-1:] for part in rest)] == [".", "."], f"{room} does not say it"
    for path in SOURCES.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, f"{path} is longer than 350 lines"


# --- nobody asks which task or model it has --------------------------------------------------------------------------

MODELS = (
    "Classifier", "Reader", "TextEncoder", "LanguageModel", "Seq2Seq", "RecurrentSeq2Seq", "Transformer",
    "PointerGenerator", "Writer", "Tagger", "Lineup", "Captioner", "ImageClassifier",
)  # fmt: skip
"""Models; settings of models end in Config, tasks in Task."""
ASKED = ("kind", "verb", "architecture")


def names_a_kind(node):
    """Whether an expression names a model, the settings of a model or a task."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    settings = {name for name in names if name.endswith("Config") and name.removesuffix("Config") in SETTINGS}
    return bool(names & {*MODELS} or settings or {name for name in names if name.endswith("Task")})


SETTINGS = (
    "RNN", "Transformer", "LanguageModel", "Encoder", "Classifier", "Reader", "Block", "Seq2Seq", "Model", "Lineup",
    "Tagger", "Vision", "Captioner", "ImageClassifier",
)  # fmt: skip


def of_a_run(node):
    """Whether an expression is a task, a model or the settings of a model: `self.task`, `config.model`, `model`, .."""
    text = ast.unparse(node)
    return text.split(".")[-1] in ("model", "task") and not text.startswith(("body.", "given."))


def asks(tree):
    """The lines of a module that ask which task or model they have in hand."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, what]) if names_a_kind(what):
                yield node.lineno
            case ast.Call(func=ast.Name(id="type"), args=[what]) if of_a_run(what):
                yield node.lineno
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[what, *_]) if of_a_run(what):
                yield node.lineno
            case ast.Match(subject=subject, cases=cases):
                patterns = [inner for case in cases for inner in ast.walk(case.pattern)]
                kinds = [inner.cls for inner in patterns if isinstance(inner, ast.MatchClass)]
                asked = isinstance(subject, ast.Attribute) and subject.attr in ASKED and of_a_run(subject.value)
                if asked or any(map(names_a_kind, kinds)):
                    yield node.lineno
            case ast.Compare(left=left, comparators=others):
                for side in (left, *others):
                    if isinstance(side, ast.Attribute) and side.attr in ASKED and of_a_run(side.value):
                        yield node.lineno
                    if isinstance(side, ast.Subscript) and ast.unparse(side.value) == "TASKS":
                        yield node.lineno


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_nobody_outside_asks_which_task_it_has(path):
    if {"tasks", "formats"} & set(path.relative_to(SOURCES).parts):
        return
    found = sorted(set(asks(ast.parse(path.read_text(encoding="utf-8")))))
    assert not found, f"{path} asks which model or task it has, in lines {found}: let the task say it"


def test_what_asking_looks_like():
    """Every way to ask that the walk must notice, one a line."""
    asked = """
isinstance(model, Classifier)
isinstance(config.model, ReaderConfig | ClassifierConfig)
getattr(config.model, "pretrained", None)
hasattr(model, "start")
type(predictor.model) is TextEncoder
config.model.kind == "rnn"
predictor.task.verb != "translate"
predictor.config.model.kind in ("language model",)
match model:
    case Reader(answer="span"):
        pass
match config.model:
    case TransformerConfig():
        pass
"""
    lines = [number for number, line in enumerate(asked.splitlines(), 1) if line and not line.startswith((" ", "case"))]
    assert sorted(set(asks(ast.parse(asked)))) == lines
    innocent = "isinstance(source, Question)\nevent.kind == 'step'\nsettings.kind in FORMATS\ngetattr(data, 'valid')"
    assert not list(asks(ast.parse(innocent)))


# --- what is public --------------------------------------------------------------------------------------------------


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


def test_settings_do_not_import_torch():
    code = "import sys, regard; regard.read('reverse'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
