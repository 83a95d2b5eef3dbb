"""docs/tasks.md, cell by cell and block by block: every verb of every task, on small data of the same form."""

import ast
import base64
import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from pages import blocks, put_data, read_page, run, small_settings, tools
from serving import free_port, reader_run, served

from regard.config.toml import read
from regard.training.prepare import start_run

PAGE = "docs/tasks.md"
VERBS = ("train", "predict", "evaluate", "look", "serve")


def rows():
    """Task -> verb -> command, as the table says."""
    table = read_page(PAGE).split("## ")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and "`" in cells[1]:
            found[cells[0]] = dict(zip(VERBS, (cell.strip("`").replace("\\|", "|") for cell in cells[1:]), strict=True))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with all data below `data`, in the forms the recipes read."""
    folder = tmp_path_factory.mktemp("tasks")
    put_data(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("task", rows())
def test_every_verb_of_a_task(task, place, typed, monkeypatch):
    """Commands are typed in this process, which has torch already; the server is a process of its own."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("REGARD_DATA", str(place / "data"))
    commands = rows()[task]
    small = small_settings(commands["train"].split()[2])

    def say(verb, *more):
        begin, _, command = commands[verb].rpartition(" | ")
        status, output, told = typed(
            *shlex.split(command)[1:], *more, text=run(["bash", "-c", begin], place) if begin else ""
        )
        assert status == 0, told
        return output

    say("train", *(word for change in small for word in ("--set", change)))
    said = {verb: say(verb) for verb in ("predict", "evaluate", "look")}
    assert said["predict"].endswith("\n")  # after three updates, an answer may well be empty
    assert said["evaluate"].strip()
    assert said["look"].strip()
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    with served([*commands["serve"].split(), "--port", port], port, place, tools(place)):
        text = commands["look"].split('"')[1]
        file = place / text
        asked = {"image": base64.b64encode(file.read_bytes()).decode()} if file.is_file() else {"text": text}
        answer = httpx.post(f"{url}/v1/predict", json={**asked, "settings": {"max_extra": 5}}, timeout=30)
        looked = httpx.post(f"{url}/v1/look", json={**asked, "settings": {"max_extra": 5}}, timeout=30)
        page = httpx.get(url, timeout=30)
    assert [answer.status_code, looked.status_code, page.status_code] == [200, 200, 200], (answer.text, looked.text)
    assert looked.json()["maps"]


def test_the_table_names_every_verb_of_every_task():
    assert len(rows()) == 12
    for task, commands in rows().items():
        for verb, command in commands.items():
            assert f"regard {verb} " in command, (task, verb)


def test_files_of_your_own_data(tmp_path, monkeypatch):
    """The settings that the page shows are whole, and read what it says they read."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"number {n} is fine,{'good' if n % 2 else 'bad'}\n" for n in range(1200))
    Path("reviews.csv").write_text("text,label\n" + rows, encoding="utf-8")
    Path("book.txt").write_text("It was the best of times. " * 400, encoding="utf-8")
    asked = [{"question": f"Who is {n}?", "answers": [{"text": f"Ann{n}", "answer_start": 0}]} for n in range(600)]
    paragraphs = [{"context": f"Ann{n} is {n}.", "qas": [one]} for n, one in enumerate(asked)]
    Path("train.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    found = {block.text.splitlines()[0].removeprefix("# "): block.text for block in blocks(PAGE, "toml")}
    assert list(found) == ["classify.toml", "continue.toml", "answer.toml"]
    for name, text in found.items():
        Path(name).write_text(text, encoding="utf-8")
        prepared = start_run(read(name, ["text.source.size=300"]), tmp_path / name.removesuffix(".toml"))
        assert prepared.splits.valid
        assert prepared.rows


def test_training_in_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block, _ = blocks(PAGE, "python")
    small = ["train.steps=3", "train.validate_every=3", "data.examples=200", "data.valid=9", "data.test=9"]
    assert '["train.steps=200"]' in block.text
    exec(block.text.replace('["train.steps=200"]', repr(small)), {})
    assert set(ast.literal_eval(capsys.readouterr().out)) == {"exact", "cer"}


def test_asking_questions_in_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    reader_run(tmp_path / "runs" / "q", "span", steps=2)
    _, block = blocks(PAGE, "python")
    exec(block.text, {})
    answer, details = capsys.readouterr().out.splitlines()
    start, end = map(int, re.findall(r"\d+", details)[:2])
    assert answer == "Bob sees Ada."[start:end]
    assert Path("why.html").exists()
