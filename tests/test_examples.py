"""Every command and every block of both READMEs runs, in order, as a reader would type them."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import free_port, served

from regard.config.toml import parse

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.ko.md")


def blocks(name, kind):
    """The code blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)


def test_both_languages_show_the_same_code():
    for kind in ("bash", "python"):
        assert blocks(READMES[0], kind) == blocks(READMES[1], kind)


@pytest.mark.parametrize("name", READMES)
def test_the_configuration_is_one(name, tmp_path):
    (tmp_path / "my.toml").write_text(blocks(name, "toml")[0], encoding="utf-8")
    assert parse(tmp_path / "my.toml").data.kind == "tsv"


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    """The set-up commands are what installs this very environment; all others run here."""
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    commands = [line for block in blocks(READMES[0], "bash") for line in block.splitlines() if line.strip()]
    said, port = {}, str(free_port())
    with contextlib.ExitStack() as running:
        for command in commands:
            if command.startswith("regard serve"):
                words = command.replace("5000", port).split()
                running.enter_context(served(words, port, tmp_path, tools))
            elif not command.startswith("pip install"):
                line = command.replace("5000", port)
                run = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=tools, capture_output=True, text=True)
                assert run.returncode == 0, f"{command}\n{run.stderr}"
                said[command] = run.stdout
    assert said["echo einundzwanzig | regard predict runs/n"] == "21\n"
    assert json.loads(next(answer for command, answer in said.items() if "curl" in command))["translatedText"] == "21"
    assert (tmp_path / "why.html").stat().st_size < 4_000_000
    for block in blocks(READMES[0], "python"):
        run = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert run.stdout == "21\n"
    (tmp_path / "pairs.tsv").write_text("".join(f"{n} go\tgo {n}\n" for n in range(2000)), encoding="utf-8")
    (tmp_path / "my.toml").write_text(blocks(READMES[0], "toml")[0], encoding="utf-8")
    run = subprocess.run(["regard", "check", "my.toml"], cwd=tmp_path, env=tools, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    quick = "regard train my.toml --run runs/mine --set train.steps=4 --set train.validate_every=4"
    run = subprocess.run(quick.split(), cwd=tmp_path, env=tools, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
