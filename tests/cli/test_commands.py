"""The command line as a person types it: what comes out, and what is said when something is wrong."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import TINY

COMMAND = (sys.executable, "-m", "regard")


@pytest.fixture
def says(typed):
    """What the command line says about a mistake: one message, status 2, no traceback."""

    def said(*words):
        status, _, err = typed(*words)
        assert status == 2
        return err.removeprefix("regard: ").rstrip()

    return said


def options(*changes):
    return [part for change in changes for part in ("--set", change)]


# --- settings and data -----------------------------------------------------------------------------------------------


def test_settings_that_are_wrong(says, tmp_path):
    run = ("--run", tmp_path / "run")
    message = says("train", "revers", *run)
    assert message == "unknown recipe revers. Did you mean reverse? See `regard recipes`."
    message = says("train", "reverse", *run, *options("train.stepz=3"))
    assert message.endswith("unknown setting train.stepz. Did you mean train.steps?")
    message = says("train", "reverse", *run, *options("train.steps=many"))
    assert "setting train.steps is 'many': input should be a valid integer" in message
    message = says("check", tmp_path)
    assert message == f"{tmp_path} is a directory, expected a .toml file or a recipe's name."
    assert says("train", "reverse", "runs/r") == (
        "runs/r is one name too many behind reverse. The run's directory is --run runs/r."
    )
    assert says("train").startswith("give a recipe or a .toml file to train, or --resume RUN")
    assert says("train", "reverse", *options("train.steps")).startswith("--set train.steps is not of the form")


def test_data_that_changed_is_noticed(tmp_path, typed, says):
    """A split that is cut anew may hold what was learned: evaluation says so, and resuming refuses."""
    table = tmp_path / "pairs.tsv"
    lines = [f"{letter}{other}\t{other}{letter}\n" for letter in "abcde" for other in "abcde"]
    table.write_text("".join(lines))
    data = [f"data={{kind='tsv', train=['{table}'], cut_valid=3, cut_test=3}}"]
    typed("train", "reverse", "--run", tmp_path / "run", *options(*TINY[4:], *data))
    assert typed("evaluate", tmp_path / "run")[2] == ""
    status, out, err = typed("evaluate", tmp_path / "run", "--json", *options("data.cut_test=9"))
    seen = json.loads(out)["seen"]
    assert (status, json.loads(out)["examples"]) == (0, 9)
    assert f"warning: {seen} of 9 sources are in the training data: new ones will score worse. Leave them" in err
    assert seen >= 9 - 3 - 3
    table.write_text("".join(lines[:20]))
    assert "the training data and the validation data are not what" in says("train", "--resume", tmp_path / "run")
    test = tmp_path / "test.tsv"
    test.write_text("ab\tba\n")
    table.unlink()
    status, _, err = typed("evaluate", tmp_path / "run", *options(f"data.test=['{test}']"))
    assert (status, err) == (0, "")  # it needs no other file


def test_what_cannot_begin_leaves_nothing_behind(tmp_path, says):
    vectors = tmp_path / "v.txt"
    vectors.write_text("a 1 2\n")
    words = ("train", "reverse", "--run", tmp_path / "run", *options(*TINY, f"model.source_vectors='{vectors}'"))
    assert "holds vectors of 2 numbers" in says(*words)
    assert not (tmp_path / "run").exists()


def test_output_is_utf8_whatever_the_terminal_says(tiny_run):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [*COMMAND, "predict", tiny_run, "--prefix", "é"]
    run = subprocess.run(command, input=b"abc\n", capture_output=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode()


@pytest.fixture
def pairs(tmp_path):
    """A configuration of two small files."""
    (tmp_path / "a").write_text("one\ntwo\nthree\n")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\n")
    config = tmp_path / "my.toml"
    config.write_text(
        f'[data]\nkind = "parallel"\ntrain = {{source = ["{tmp_path}/a"], target = ["{tmp_path}/b"]}}\n'
        '[text]\nsource = {kind = "char"}\n[model]\nkind = "rnn"\nsize = 8\nembedding = 8\n'
    )
    return tmp_path


def test_check_tells_what_is_there(pairs, typed):
    status, said, _ = typed("check", pairs / "my.toml")
    assert status == 0
    assert "train: read 3, kept 3, dropped 0" in said
    assert "warning: there is no test data: set data.test or data.cut_test." in said
    assert "two -> zwei" in said


def test_files_that_are_wrong(says, pairs):
    config = pairs / "my.toml"
    (pairs / "b").write_text("eins\nzwei\n")
    assert says("check", config).startswith(f"{pairs}/a has 3 lines but {pairs}/b has 2: line n of one must belong")
    (pairs / "b").write_text("")
    assert says("check", config) == f"{pairs}/b is empty."
    (pairs / "b").unlink()
    assert says("check", config) == f"{pairs}/b does not exist."
    (pairs / "b").mkdir()
    assert says("check", config) == f"{pairs}/b is a directory, expected a file."


def test_missing_data_says_how_to_get_it(says, monkeypatch, tmp_path):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    message = says("train", "multi30k", "--run", tmp_path / "run")
    assert message.startswith("the environment variable $REGARD_DATA is not set, and the data is at")
    assert "github.com/multi30k/dataset" in message


def test_a_folder_with_other_files_is_left_alone(says, tmp_path):
    """A run would write its own data.json, and clear its own state/."""
    (tmp_path / "data.json").write_text("mine")
    assert says("train", "reverse", "--run", tmp_path, *options(*TINY)).startswith(
        f"{tmp_path} is there already, and not an empty folder. Choose another"
    )
    assert (tmp_path / "data.json").read_text() == "mine"


def test_a_language_model_reads_texts_not_pairs(says, pairs):
    config = pairs / "my.toml"
    config.write_text(
        config.read_text().replace('kind = "rnn"', 'kind = "language model"').replace("embedding = 8", "heads = 2")
    )
    assert says("check", config).startswith(
        "a language model continues texts: it needs data.kind = \"text\", not 'parallel'"
    )


def test_settings_with_a_byte_order_mark_and_without_sides(typed, says, pairs):
    config = pairs / "my.toml"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert typed("check", config)[0] == 0
    assert "expected a table { .. } of settings such as source, target." in says(
        "check", config, *options('data.train=["a", "b"]')
    )


# --- runs ------------------------------------------------------------------------------------------------------------


def test_runs_that_are_none(says, tmp_path, tiny_run):
    assert says("predict", tmp_path / "none") == f"{tmp_path}/none is not a run: it does not exist."
    assert says("evaluate", tmp_path).startswith(f"{tmp_path} is not a run: it has no config.toml.")
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    assert says("predict", tmp_path).endswith(" There are runs inside it: a, b.")
    (tmp_path / "config.json").touch()
    assert says("predict", tmp_path).endswith(f"`regard import {tmp_path} NEW` makes a run of it.")
    assert says("train", "reverse", "--run", tiny_run).startswith(f"{tiny_run} already holds a run. Resume it with")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_run, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert says("predict", broken).startswith(f"{weights} is damaged or no safetensors file")
    weights.write_bytes(b"PK\x03\x04 something else entirely, long enough to be looked at")
    assert says("predict", broken).startswith(f"{weights} is damaged or no safetensors file")
    weights.unlink()
    assert says("predict", broken) == f"{broken} has no model yet: training has not reached its first validation."


def test_names_that_are_too_many_or_of_another_file(says, tmp_path):
    said = says("evaluate", "runs/a", "other.tsv")
    assert said.startswith(
        "other.tsv is one name too many behind runs/a: a file to score on is --set data.test=other.t"
    )
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    assert says("check", tmp_path / "pairs.tsv").startswith(f"{tmp_path / 'pairs.tsv'} is no .toml file. Data is named")


def test_a_vocabulary_that_does_not_fit(says, tmp_path, tiny_run):
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    tree = json.loads((other / "tokenizer.json").read_text())
    tree["model"]["vocab"] = {word: i for word, i in tree["model"]["vocab"].items() if i < 9}
    (other / "tokenizer.json").write_text(json.dumps(tree))
    assert says("predict", other).startswith(f"tokenizer.json is not what {other} began with (manifest.json)")
    (other / "manifest.json").unlink()
    message = says("predict", other)
    assert "source_embedding.weight has shape" in message
    assert message.endswith("The vocabulary does not fit the weights.")


# --- predicting ------------------------------------------------------------------------------------------------------


def test_lines_stay_aligned(tiny_run, typed):
    status, out, err = typed("predict", tiny_run, text="abc\n\n  \ncba")
    assert (status, err) == (0, "")
    lines = out.split("\n")
    assert len(lines) == 5
    assert lines[1] == lines[2] == lines[4] == ""


def test_predictions_in_json(tiny_run, typed):
    _, out, _ = typed("predict", tiny_run, "--json", "--best", "2", text="abc\n")
    answers = json.loads(out)
    assert len(answers) == 2
    assert answers[0]["score"] >= answers[1]["score"]
    assert answers[0]["tokens"][-1]["text"] == "<eos>"
    assert all(token["logprob"] <= 0 for answer in answers for token in answer["tokens"])


def test_a_line_that_is_too_long(tiny_run, typed):
    status, out, err = typed("predict", tiny_run, text="abc\n" + "x" * 100_000 + "\n")
    assert (status, len(out.splitlines())) == (2, 2)
    assert err.startswith("regard: line 2 has 100,000 tokens, this model takes at most 256. Split it, or ")
    status, out, err = typed("predict", tiny_run, "--set", "text.longer=cut", text="abc\n" + "x" * 100_000 + "\n")
    assert (status, err) == (0, "regard: 1 text was cut to 256 tokens.\n")
    assert len(out.splitlines()) == 2


def test_input_that_is_not_utf8(tiny_run, typed):
    status, _, err = typed("predict", tiny_run, text=b"abc\nab\xff\n")
    assert status == 2
    assert err.startswith("regard: standard input, line 2: byte 0xff at 3 is not UTF-8. Convert the text first")


def test_a_closed_pipe_is_no_traceback(tiny_run):
    command = f"yes abc | head -20000 | {sys.executable} -m regard predict {tiny_run} | head -1"
    run = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[2]}}"], capture_output=True, check=False)
    assert len(run.stdout.splitlines()) == 1
    assert (run.stderr, run.returncode) == (b"", 1)


def test_evaluation_in_json_and_outputs(tiny_run, tmp_path, typed):
    status, out, _ = typed("evaluate", tiny_run, "--json", "--outputs", tmp_path / "out.txt")
    assert status == 0
    found = json.loads(out)
    assert found["examples"] == 30
    assert set(found["metrics"]) == {"exact", "cer"}
    assert sum(bucket["examples"] for bucket in found["buckets"]) == 30
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 30


def test_a_file_that_was_learned_is_noticed(tiny_run, typed, tmp_path):
    status, out, err = typed("evaluate", tiny_run, "--split", "train", "--json")
    assert (status, json.loads(out)["seen"]) == (0, 300)
    assert err.startswith("regard: warning: 300 of 300 sources are in the training data: new ones will score worse.")
    _, out, err = typed("evaluate", tiny_run, "--json", *options("evaluate.unseen=true"))
    assert (json.loads(out)["seen"], json.loads(out)["examples"], err) == (0, 30, "")


def test_training_says_doubts_epochs_and_what_it_drops(tmp_path, typed):
    table = tmp_path / "pairs.tsv"
    table.write_text("ab\tba\n" * 3 + "cd\tdc\nde\ted\n")
    data = f"data={{kind='tsv', train=['{table}'], cut_valid=1}}"
    sizes = ("model.kind=transformer", "model.size=16", "model.heads=2", "model.feedforward=8", "train.epochs=2")
    few = [one for one in TINY[6:] if not one.startswith("train.steps")]
    status, _, err = typed("train", "reverse", "--run", tmp_path / "run", *options(*few, *sizes, data))
    assert status == 0, err
    assert "regard: warning: model.kind 'transformer' has no embedding, attention: left out" in err
    assert "updates are 2.0 epochs" in err
    assert "warning: there is no test data" in err
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "warning: there is no test data" in said


def test_evaluation_of_nothing(says, tmp_path, tiny_run):
    assert says("evaluate", tiny_run, "--split", "tset") == "--split is 'tset', expected test, valid or train."


def test_look_draws(tiny_run, typed):
    assert typed("look", tiny_run, "abc")[1].startswith("abc -> ")


def test_views_exclude_each_other(says, tiny_run):
    said = says("look", tiny_run, "abc", "--map", "all", "--token", "0")
    assert said == "--token and --map all are different views: ask for one of them at a time."
    assert says("look", tiny_run, "abc", "--token", "0", "--out", "x.png").startswith("--out and --token are different")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "RUN", "--prompt", "a", "--json"], "--prompt continues one text as it comes: leave files, --best"),
        (["predict", "RUN", "a.txt", "--prompt", "a"], "--prompt continues one text as it comes: leave files, --best"),
        (["predict", "RUN", "--device", "nothing"], "the device 'nothing' cannot be used: "),
        (["look", "RUN", "abc", "--map", "all", "--head", "0"], "--map all shows every head: leave --head out."),
        (["look", "RUN", "abc", "--head", "0", "--out", "x.html"], "x.html will hold every map: leave --map and"),
        (["train", "--resume", "RUN", "--run", "other"], "--run names a new run, --resume one that is there"),
    ],
)
def test_options_that_would_be_left_out(says, tiny_run, words, said):
    assert said in says(*(tiny_run if word == "RUN" else word for word in words))


def test_a_wrong_device_makes_no_run(says, tmp_path):
    assert "cannot be used" in says("train", "reverse", "--run", tmp_path / "run", "--device", "nothing")
    assert not (tmp_path / "run").exists()


def test_one_bad_line_does_not_lose_the_others(tiny_run, typed):
    """Its place stays empty, so that lines stay aligned; the status says that something was wrong."""
    _, good, _ = typed("predict", tiny_run, text="abc\nb\n\n\nb\n")
    status, out, err = typed("predict", tiny_run, text=f"abc\nb\n{'a' * 5000}\n".encode() + b"a\xff\nb\n")
    assert (status, out) == (2, good)
    too_long, not_text = err.splitlines()
    assert too_long.startswith("regard: line 3 has 5,000 tokens")
    assert not_text.startswith("regard: standard input, line 4: byte 0xff at 2 is not UTF-8")
    _, out, _ = typed("predict", tiny_run, "--json", text=f"{'a' * 5000}\nabc\n")
    first, second = map(json.loads, out.splitlines())
    assert (first, len(second)) == ([], 1)


def test_files_are_answered_as_standard_input_is(tiny_run, typed, tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.gz"
    one.write_bytes(b"\xef\xbb\xbfabc\r\nb")
    two.write_bytes(gzip.compress(b"cba\n" + b"a" * 5000 + b"\n"))
    _, wanted, _ = typed("predict", tiny_run, text="abc\nb\ncba\n\n")
    status, out, err = typed("predict", tiny_run, one, two)
    assert (status, out) == (2, wanted)
    assert err.startswith(f"regard: {two}, line 2 has 5,000 tokens")
    status, out, err = typed("predict", tiny_run, "einundzwanzig")
    assert (status, out) == (2, "")
    hint = "A text comes on standard input: echo einundzwanzig | regard predict RUN"
    assert err == f"regard: einundzwanzig does not exist. {hint}\n"


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, typed):
    """The file size limit makes the second save fail as a full disk would."""
    code = (
        "import resource; from regard.cli import commands as cli; from regard.training import checkpoint\n"
        "save, calls = checkpoint.save_state, []\n"
        "def limited(*given):\n"
        "    if calls: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "    calls.append(1); save(*given)\n"
        "import regard.training.trainer; regard.training.trainer.save_state = limited; cli.main()"
    )
    words = ["train", "reverse", "--run", tmp_path / "run", *options(*TINY, "train.steps=12")]
    run = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert (
        "cannot be saved: File too large. What was there before is untouched: mend that, then try again or resume."
        in run.stderr
    )
    assert "Traceback" not in run.stderr
    status, _, err = typed("train", "--resume", tmp_path / "run")
    assert status == 0, err
    assert "done: 12 steps" in err


def test_recipes_are_listed(typed):
    _, said, _ = typed("recipes")
    for name in ("reverse", "numbers", "dates", "g2p", "multi30k", "multi30k-rnn", "multi30k-rnn-plain"):
        assert name in said


def test_a_tokenizer_that_panics_is_no_traceback(says, tiny_run, monkeypatch):
    """A panic of the library's Rust code is no Exception."""

    class PanicException(BaseException):
        """As pyo3 names it."""

    def panic(*given):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("regard.cli.verbs.answer_input", panic)
    assert says("predict", tiny_run).startswith("the tokenizer cannot read a text: index out of bounds. Is the run's")


def test_costs_are_measured_shown_and_drawn(typed, says, tmp_path):
    picture = tmp_path / "cost.svg"
    status, out, err = typed(
        "cost", "--size", "8", "--heads", "2", "--most", "256", "--layers", "window", "--out", picture
    )
    assert status == 0, err
    assert [line.split(" tokens")[0] for line in (out + err).splitlines() if " tokens: " in line] == [
        *("window 128", "window 256"),
    ]
    assert "n w d" in out
    assert "window" in picture.read_text()
    assert says("cost", "--size", "7") == "--size 7 is not a multiple of --heads 4."
    assert says("cost", "--out", "cost.txt").startswith("--out cost.txt: a picture's name ends in")
    assert says("cost", "--layers", "gru").startswith("unknown layer 'gru', expected recurrent, convolution")


def test_the_table_of_costs_fits_a_terminal_of_80_columns(typed, monkeypatch):
    monkeypatch.setattr("regard.cli.cost.LONG", 128)
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = typed("cost", "--size", "8", "--heads", "2", "--most", "256")
    assert status == 0, err
    assert len(re.findall(r"n\^-?\d\.\d\d\b", out)) == 12  # time and memory of six layers
    assert "…" not in out
