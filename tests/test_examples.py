"""Documentation is held by tests: every command and every script of every page runs, as a reader would type it, and
what a page names exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from pages import (
    KINDS,
    PAGES,
    ROOT,
    SMALL,
    WEIGHTS,
    blocks,
    commands,
    installed,
    play,
    put_data,
    read_page,
    run,
    small_settings,
    train_small,
)
from serving import classifier_run, reader_run
from test_architecture import ROOMS
from test_tasks import rows

import regard
from regard.cli.commands import app
from regard.config.data import TableData
from regard.config.run import Config
from regard.config.toml import find_models, parse, read
from regard.data.examples import Dropped, Example
from regard.data.formats import Format, read_each
from regard.server.settings import ServeSettings
from regard.training.prepare import prepare

READMES = ("README.md", "README.ko.md")
HISTORY = ("CHANGELOG.md", "docs/log.md")
"""Pages that also name what is gone."""
PLAYED = {
    *READMES,
    "CONTRIBUTING.md",
    "docs/serve.md",
    "docs/embed.md",
    "docs/exchange.md",
    "docs/engine.md",
    "docs/tagging.md",
    "docs/long.md",
    "docs/captions.md",
}
"""Pages whose blocks run below; those of docs/tasks.md run in test_tasks.py."""


def outside_blocks(page):
    return re.sub(r"^```.*?^```", "", read_page(page), flags=re.MULTILINE | re.DOTALL)


def inline_code(page):
    """What stands between backticks in the text of a page."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside_blocks(page))]


# --- every page ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is_and_runs(page):
    kinds = {block.kind for block in blocks(page)}
    assert kinds <= KINDS, f"{page} has a block of kind {kinds - KINDS}: say bash, python or toml, or text or json"
    if kinds & {"bash", "python", "toml"}:
        assert page in PLAYED | {"docs/tasks.md"}, f"nobody runs the blocks of {page}"
    for block in blocks(page, "json"):
        json.loads(block.text)


def check_command(command):
    """The verb and the options of a command are those of the command line."""
    known = typer.main.get_command(app).commands
    words = shlex.split(command, comments=True)
    verb, *rest = words[words.index("regard") + 1 :] or ["-"]
    if verb.startswith("-"):
        return
    assert verb in known, command
    options = {"--help", *(option for one in known[verb].params for option in one.opts)}
    given = {word for word in rest if word.startswith("--")}
    assert given <= options, f"{command}: regard {verb} has no {given - options}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_commands_have_the_options_they_are_given(page):
    inline = [code for code in inline_code(page) if code.startswith("regard ") and "=" not in code.split()[1]]
    for command in [*commands(page), *inline]:
        if "regard " in command:
            check_command(command)


def test_commands_of_the_tasks_have_the_options_they_are_given():
    for task in rows().values():
        for command in task.values():
            check_command(command)


def setting_names():
    """The name of every setting, with its group before it."""

    def below(group, annotation):
        for model in find_models(annotation):
            for name, field in model.model_fields.items():
                yield f"{group}.{name}"
                yield from below(f"{group}.{name}", field.annotation)

    found = {name for group, field in Config.model_fields.items() for name in below(group, field.annotation)}
    return found | {f"serve.{name}" for name in ServeSettings.model_fields}


FILES = {"json", "jsonl", "toml", "txt", "bin", "safetensors", "html", "py", "md", "model"}
"""What may stand behind a dot where a group of settings does not stand before it."""
NAMED = re.compile(r"(?<![\w./])((?:data|text|model|train|decode|evaluate|serve)(?:\.[a-z_]+)+)\b(?![(/])")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY])
def test_every_setting_that_is_named_exists(page):
    code = " ".join([*inline_code(page), *commands(page)])
    named = {name for name in NAMED.findall(code) if name.split(".")[1] not in FILES}
    missing = sorted(named - setting_names() - {"serve.NAME"})
    assert not missing, f"{page} names settings that do not exist: {missing}"


def slug(heading):
    """A heading as links name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/log.md"])
def test_links_and_file_names_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", outside_blocks(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page} links to {target}"
    for code in inline_code(page):
        if re.fullmatch(r"(src|tests|docs|benchmarks|\.ci)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{page} names {code}"
        if re.fullmatch(rf"({'|'.join(ROOMS)})/[\w./-]*", code):
            assert (ROOT / "src" / "regard" / code).exists(), f"{page} names {code}"


# --- the READMEs -----------------------------------------------------------------------------------------------------


def test_both_languages_show_the_same_code():
    for kind in ("bash", "python"):
        assert blocks(READMES[0], kind) == blocks(READMES[1], kind)


@pytest.mark.parametrize("name", READMES)
def test_the_configuration_is_one(name, tmp_path):
    (block,) = blocks(name, "toml")
    (tmp_path / "my.toml").write_text(block.text, encoding="utf-8")
    assert parse(tmp_path / "my.toml").data.kind == "tsv"


@pytest.mark.parametrize("name", READMES)
def test_the_file_map_has_every_room_in_its_order(name):
    mapped = re.findall(r"^\| `([\w./]+)` \|", read_page(name), re.MULTILINE)
    assert mapped == ["errors.py", *(f"{room}/" for room in ROOMS), "recipes/"]


@pytest.mark.slow
def test_every_command_of_the_readme_runs(tmp_path):
    """The set-up commands are what installs this very environment; all others run here, and the script at the end: it
    uses what the commands behind it train."""
    said = play(READMES[0], tmp_path, last="python")
    assert said["echo einundzwanzig | regard predict runs/n"] == "21\n"
    assert json.loads(next(answer for command, answer in said.items() if "curl" in command))["translatedText"] == "21"
    assert (tmp_path / "why.html").stat().st_size < 4_000_000
    for block in blocks(READMES[0], "python"):
        assert said[block.text] == "21\n"
    (tmp_path / "pairs.tsv").write_text("".join(f"{n} go\tgo {n}\n" for n in range(2000)), encoding="utf-8")
    run(["regard", "check", "my.toml"], tmp_path)
    quick = "regard train my.toml --run runs/mine --set train.steps=4 --set train.validate_every=4"
    run(quick.split(), tmp_path)


# --- the other pages -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_of_the_server(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    runs.mkdir()
    put_data(tmp_path)
    train_small("numbers", runs / "n", monkeypatch, "data.examples=300", "data.valid=9", "data.test=9", "model.size=16")
    classifier_run(runs / "trec", steps=2)
    reader_run(runs / "squad", "span", steps=2)
    train_small("shakespeare", runs / "shakespeare", monkeypatch, *small_settings("shakespeare"))
    train_small("shapes", runs / "captions", monkeypatch, *small_settings("shapes"))
    said = play("docs/serve.md", tmp_path)
    (shown,) = (json.loads(block.text) for block in blocks("docs/serve.md", "json"))
    (found,) = (json.loads(answer) for command, answer in said.items() if '"squad"' in command)
    assert [set(tree) for (tree,) in found["answers"]] == [set(tree) for (tree,) in shown["answers"]]
    (stream,) = (answer for command, answer in said.items() if '"stream"' in command)
    assert stream.rstrip().endswith("data: [DONE]")
    assert any(block.text in said and said[block.text] for block in blocks("docs/serve.md", "python"))


@pytest.mark.slow
def test_the_page_of_the_engines(tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    put_data(tmp_path)
    (tmp_path / "input.txt").write_text("two dogs run 5 times\ntwo dogs\n", encoding="utf-8")
    train_small("multi30k", tmp_path / "runs" / "m", monkeypatch, *small_settings("multi30k"))
    said = play("docs/engine.md", tmp_path)
    plain, torch = (said[f"regard predict runs/m{more} < input.txt"] for more in ("", " --engine torch"))
    assert plain == torch
    folders = {path.name.partition("-")[2] for path in (tmp_path / "runs" / "m" / "ctranslate2").iterdir()}
    assert folders == {"float32", "int8"}


@pytest.mark.slow
def test_the_page_of_taggers(tmp_path):
    people, places = [f"Ann{n}" for n in range(20)], [f"Rome{n}" for n in range(20)]
    rows = [f"{one} B-PER\nmet O\nBob B-PER\nin O\n{place} B-LOC\n. O\n" for one in people for place in places]
    (tmp_path / "names.txt").write_text("\n".join(rows), encoding="utf-8")
    said = play("docs/tagging.md", tmp_path)
    (answers,) = (text for command, text in said.items() if "predict" in command)
    assert answers.split("\t")[0] == "B-PER O B-PER O B-LOC O"
    assert "B-PER" in (tmp_path / "names.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_of_captions(tmp_path):
    small = ["train.steps=3", "train.validate_every=3", "data.examples=40", "data.valid=4", "data.test=4"]
    said = play("docs/captions.md", tmp_path, small=[*small, "model.grid_size=8"])
    scores = [text for command, text in said.items() if command.startswith("regard evaluate")]
    assert "pointing" in scores[0]
    assert "accuracy" in scores[1]


@pytest.mark.slow
def test_the_page_of_long_texts(tmp_path):
    (said,) = play("docs/long.md", tmp_path).values()
    assert all(name in said for name in ("recurrent", "convolution", "window", "linformer", "bigbird"))
    assert (tmp_path / "cost.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_page_of_vectors(tmp_path):
    if not installed("minilm"):
        pytest.skip(f"{WEIGHTS['minilm']} is not installed")
    (block,) = blocks("docs/embed.md", "text")
    lines = [line.split("  ")[-1] for line in block.text.splitlines()]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    said = play("docs/embed.md", tmp_path)
    (near,) = (answer for command, answer in said.items() if "--near" in command)
    assert block.text in near
    for command, answer in said.items():
        if "--words" in command or "--analogy" in command:
            for word, cosine in re.findall(r"(\w+) (0\.\d+)", command.partition("#")[2]):
                assert f"{cosine}\t{word}" in answer.splitlines()[:3]
    assert {path.name for path in tmp_path.glob("*.*")} >= {"vectors.npy", "tokens.npy", "tokens.json", "map.png"}


@pytest.mark.slow
def test_the_page_of_exchange(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    put_data(tmp_path)
    train_small("multi30k", tmp_path / "runs" / "m", monkeypatch, *small_settings("multi30k"))
    said = play("docs/exchange.md", tmp_path, small=SMALL)
    assert "regard import out/m runs/again" in said
    again, before = (regard.load(tmp_path / "runs" / name, engine="torch") for name in ("again", "m"))
    assert again("two dogs") == before("two dogs")


@pytest.mark.slow
def test_the_page_for_contributors(tmp_path):
    said = play("CONTRIBUTING.md", tmp_path, shell=ROOT)
    assert all(" passed" in answer for command, answer in said.items() if command.startswith("pytest"))
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_what_contributors_add(tmp_path, monkeypatch):
    """The examples of a recipe, an attention and a data format do what the page says of them."""
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks("CONTRIBUTING.md", "toml")
    Path("spanish.toml").write_text(recipe.text, encoding="utf-8")
    prepared = prepare(read("spanish.toml", ["data.examples=300", "data.valid=9", "data.test=9"]))
    assert len(prepared.rows) == 300
    _, attention, reader = blocks("CONTRIBUTING.md", "python")
    names = {}
    exec(attention.text, names)
    assert names["context"].shape == (2, 7, 8)
    assert names["weights"].sum(-1).allclose(names["weights"].new_ones(2, 7))
    exec(reader.text, names)
    Path("data.txt").write_text("one => 1\ntwo\n", encoding="utf-8")
    settings = TableData(kind="tsv", train=("data.txt",))
    found = list(Format(read_each(names["read_arrows"])).read(settings, settings.train))
    assert found == [Example("one", "1", "data.txt:1"), Dropped("no arrow", "data.txt:2")]


# --- the changelog ---------------------------------------------------------------------------------------------------


def test_the_changelog_has_this_version_and_its_names():
    """Settings on the left of its table are gone, those on the right are there."""
    text = read_page("CHANGELOG.md")
    version = tomllib.loads(read_page("pyproject.toml"))["project"]["version"]
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == version
    table = text.split("### Settings")[1].split("###")[0]
    pairs = re.findall(r"^\| (.*?) \|? ?(`.*) \|$", table, re.MULTILINE)
    assert len(pairs) > 20
    for old, new in pairs:
        assert set(NAMED.findall(new)) <= setting_names(), new
        assert old.count("=") or not set(NAMED.findall(old)) & setting_names(), old
