"""docs/tasks.md, cell by cell: every verb of every task, on small data of the same form."""

import ast
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import pytest
from serving import free_port, served

from regard.config.toml import read
from regard.training.run import fresh

ROOT = Path(__file__).parent.parent
VERBS = ("train", "predict", "evaluate", "look", "serve")
SMALL = [
    *("train.steps=3", "train.validate_every=3", "train.validate_examples=4", "train.batch_tokens=256"),
    *("train.warmup=2", "train.average=1", "model.size=16", "model.feedforward=16", "model.heads=2"),
    *("model.dropout=0.1", "text.source.size=300"),
]
LAYERS = {"multi30k": ("encoder_layers", "decoder_layers"), "compression": ("encoder_layers", "decoder_layers")}
LAYERS["sae4k"] = LAYERS["multi30k"]


def rows():
    """Task -> verb -> command, as the table says."""
    table = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8").split("## ")[0]
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
    data = folder / "data"

    def put(name, text):
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())

    for split, count in (("train", 90), ("val", 6), ("test_2016_flickr", 6)):
        put(f"multi30k/{split}.en.gz", "".join(f"two dogs run {n} times\n" for n in range(count)))
        put(f"multi30k/{split}.de.gz", "".join(f"zwei Hunde laufen {n} mal\n" for n in range(count)))
    put("shakespeare/input.txt.gz", "ROMEO:\nBut soft, what light?\n\nJULIET:\nAy me!\n\n" * 60)
    put("trec/TREC.train.all", "".join(f"{n % 3} Who or what is number {n} ?\n" for n in range(1000)))
    put("wikitext2/train.txt.gz", "the number of whom or what is known\n" * 9)
    reviews = "".join(f"{n}\t{'재미있어요' if n % 2 else '별로예요'} {n}번 봤다\t{n % 2}\n" for n in range(8000))
    put("nsmc/train_rebuilt.tsv.gz", "id\tdocument\tlabel\n" + reviews)
    put("compression/sentence.txt.gz", "".join(f"The council plans to meet on day {n} .\n" for n in range(1200)))
    put("compression/compression.txt.gz", "".join(f"Council to meet on day {n} .\n" for n in range(1200)))
    put("sae4k/sae4k_v1.txt.gz", "".join(f"오늘 {n}번 약속 취소해줘\t{n}번 약속 취소하기\t4\n" for n in range(2400)))
    paragraphs = [
        {
            "context": f"Bob {n} sees Ada. Then Ada sees Eve.",
            "qas": [{"question": f"Who sees Ada {n}?", "id": n, "answers": [{"text": f"Bob {n}", "answer_start": 0}]}],
        }
        for n in range(1800)
    ]
    put("squad/train.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    with tarfile.open(data / "babi.tar.gz", "w:gz") as archive:
        for task in (1, 6):
            who = [(f"Mary {task}{n}", "home" if n % 2 else "out") for n in range(7000)]
            story = "".join(f"1 {one} went {place}.\n2 Where is {one}? \t{place}\t1\n" for one, place in who)
            entry = tarfile.TarInfo(f"./qa{task}_x_train.txt")
            entry.size = len(story)
            archive.addfile(entry, io.BytesIO(story.encode()))
    (data / "babi").mkdir()
    (data / "babi.tar.gz").rename(data / "babi" / "babi_en10k.tar.gz")
    return folder


def tools(place):
    """The environment of a user whose data is there."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "REGARD_DATA": str(place / "data"), "OMP_NUM_THREADS": "1"}


def run(command, place, more=()):
    """What a command says, with more settings behind it."""
    words = [command, *(f"--set '{change}'" for change in more)]
    done = subprocess.run(["bash", "-c", " ".join(words)], cwd=place, env=tools(place), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", rows())
def test_every_verb_of_a_task(task, place):
    commands = rows()[task]
    recipe = commands["train"].split()[2]
    layers = [f"model.{name}=1" for name in LAYERS.get(recipe, ("layers",))]
    run(commands["train"], place, [*SMALL, *layers])
    said = {verb: run(commands[verb], place) for verb in ("predict", "evaluate", "look")}
    assert said["predict"].endswith("\n")  # after three updates, an answer may well be empty
    assert said["evaluate"].strip()
    assert said["look"].strip()
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    with served([*commands["serve"].split(), "--port", port], port, place, tools(place)):
        text = commands["look"].split('"')[1]
        answer = httpx.post(f"{url}/v1/predict", json={"text": text, "settings": {"max_extra": 5}}, timeout=30)
        looked = httpx.post(f"{url}/v1/look", json={"text": text, "settings": {"max_extra": 5}}, timeout=30)
        page = httpx.get(url, timeout=30)
    assert [answer.status_code, looked.status_code, page.status_code] == [200, 200, 200], (answer.text, looked.text)
    assert looked.json()["maps"]


def test_the_table_names_every_verb_of_every_task():
    assert len(rows()) == 8
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
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["classify.toml", "continue.toml", "answer.toml"]
    for name, block in blocks:
        Path(name).write_text(block, encoding="utf-8")
        prepared = fresh(read(name, ["text.source.size=300"]), tmp_path / name.removesuffix(".toml"))
        assert prepared.splits.valid
        assert prepared.pairs


def test_training_in_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    small = ["train.steps=3", "train.validate_every=3", "data.examples=200", "data.valid=9", "data.test=9"]
    exec(block.replace('["train.steps=200"]', repr(small)), {})
    assert set(ast.literal_eval(capsys.readouterr().out)) == {"exact", "per"}
