"""What people see: the figures of a training, tables of scores, and Ctrl-C."""

import signal

import pytest
from conftest import tiny

from regard.cli.console import TrainingView, catch_interrupts, show_evaluation
from regard.evaluation.evaluate import Evaluation
from regard.training.trainer import Event


def step(number, loss, seconds=0.0):
    return Event("step", number, {"loss": loss, "tokens": 100, "seconds": seconds})


def test_the_loss_is_smoothed_over_twenty_steps():
    with TrainingView(tiny(), None) as view:
        view(step(1, 4.0))
        assert view.loss == 4.0
        view(step(2, 2.0))
    assert view.loss == pytest.approx(4.0 + (2.0 - 4.0) / 20)


def test_the_time_that_is_left_is_that_of_the_steps_that_are_left(capsys):
    """A quarter of the steps took a minute: three are left."""
    with TrainingView(tiny("train.steps=40"), None, seconds_between_lines=0.0) as view:
        view(step(10, 4.0, seconds=60.0))
        view(step(40, 4.0, seconds=240.0))
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 10/40  loss 4.000")
    assert first.endswith("3.0 min left")
    assert last.endswith("0.0 min left")


def test_examples_of_long_texts_are_shown_in_part(capsys):
    with TrainingView(tiny(), None) as view:
        view(Event("sample", 1, {"source": "a" * 3000, "output": "b", "wanted": "c" * 200}))
    assert capsys.readouterr().err == f"  {'a' * 200}... (3,000 letters) -> b (wanted {'c' * 200})\n"


def test_the_time_that_training_takes_is_foretold(capsys):
    """After ten updates, from those but the first, which is slow; also where it goes on."""
    with TrainingView(tiny("train.steps=640"), None, seconds_between_lines=1e9) as view:
        for number in range(21, 60):
            view(step(number, 4.0, seconds=100.0 + 3 * (number - 21)))
    assert capsys.readouterr().err == "about 30.4 minutes for 640 updates of 3 s, and time for validations\n"


def test_warnings_are_shown(capsys):
    with TrainingView(tiny(), None) as view:
        view(Event("warning", 0, {"text": "there is no test data."}))
    assert capsys.readouterr().err == "warning: there is no test data.\n"


def test_a_second_interrupt_stops_at_once(capsys):
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupts() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in capsys.readouterr().err


def test_scores_are_shown_by_file_by_length_and_of_all(capsys):
    files = [{"file": f"data/{name}.tsv", "examples": 1, "exact": value} for name, value in (("a", 0.0), ("b", 100.0))]
    buckets = [{"length": "1-3", "examples": 2, "exact": 50.0}]
    show_evaluation(Evaluation({"exact": 50.0}, {}, buckets, 2, [], [], [], files))
    lines = [line.strip(" │┃").split() for line in capsys.readouterr().out.splitlines() if any(map(str.isdigit, line))]
    rows = [[word for word in line if word not in "│┃"] for line in lines]
    assert rows == [
        ["a.tsv", "1", "0.00"],
        ["b.tsv", "1", "100.00"],
        ["1-3", "2", "50.00"],
        ["all", "2", "50.00"],
    ]
