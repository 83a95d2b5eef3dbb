"""One owner for each run: whoever comes second is refused, and whoever lost it stops."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import tiny

from regard.errors import RunError
from regard.evaluation.fit import fit
from regard.training.checkpoint import load_state
from regard.training.lock import lock_run
from regard.training.prepare import resume_run, start_run

HERE = f"on {socket.gethostname()}"


def refusal(run) -> str:
    with pytest.raises(RunError) as caught, lock_run(run):
        pass
    return str(caught.value)


def test_a_run_has_one_owner(tmp_path):
    with lock_run(tmp_path) as check:
        check()
        assert refusal(tmp_path) == (
            f"{tmp_path} is being trained by process {os.getpid()} {HERE}: one training at a time owns a run. Wait for "
            "it, or stop it, then try again."
        )
        check()
    assert not list(tmp_path.iterdir())
    with lock_run(tmp_path):
        pass


HOLD = """
import sys, time
from pathlib import Path
from regard.training.lock import lock_run
with lock_run(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_stopped_process_keeps_its_run_and_a_dead_one_does_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"mine\n"
        process.send_signal(signal.SIGSTOP)
        assert f"is being trained by process {process.pid} {HERE}" in refusal(tmp_path)
        process.kill()
    assert (tmp_path / "lock").exists()
    with lock_run(tmp_path):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} {HERE}\n"


def test_a_process_of_another_host_may_be_alive(tmp_path):
    """A lock does not reach every host that a file system does."""
    (tmp_path / "lock").write_text("process 7 on elsewhere\n")
    assert refusal(tmp_path) == (
        f"{tmp_path} was being trained by process 7 on elsewhere, which has not given it back. If that process is "
        f"gone, remove {tmp_path}/lock and try again."
    )
    (tmp_path / "lock").unlink()
    with lock_run(tmp_path):
        pass


def test_who_lost_the_lock_knows_and_leaves_the_next_ones_alone(tmp_path):
    with contextlib.ExitStack() as other:
        with lock_run(tmp_path) as check:
            (tmp_path / "lock").unlink()
            with pytest.raises(RunError, match=r"is no longer this training's: .* It has stopped without writing\."):
                check()
            still = other.enter_context(lock_run(tmp_path))
            with pytest.raises(RunError, match="no longer this training's"):
                check()
            still()
        still()
        assert "is being trained by" in refusal(tmp_path)


def test_a_lock_that_is_given_back_just_now_is_none(tmp_path, monkeypatch):
    """Its owner removes the file between our opening and our locking it."""
    own, removed = fcntl.flock, []

    def flock(file, how):
        if not removed:
            removed.append((tmp_path / "lock").unlink())
        own(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_run(tmp_path) as check:
        check()
        assert "is being trained by" in refusal(tmp_path)
    assert removed


def test_what_cannot_be_locked_is_refused(tmp_path, monkeypatch):
    assert refusal(tmp_path / "none").startswith(f"{tmp_path}/none/lock cannot be made: No such file or directory.")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "mine.txt")
    assert f"{tmp_path}/lock cannot be made" in refusal(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "lock").unlink()

    def flock(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert refusal(tmp_path) == f"{tmp_path}/lock cannot be locked: No locks available. Put the run on a local disk."


# --- trainings -------------------------------------------------------------------------------------------------------


def contents(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_that_is_being_trained_is_not_resumed(tmp_path):
    """Nor started once more by who has prepared it already."""
    run, said = tmp_path / "run", []
    prepared = start_run(tiny("data.examples=50"), run)

    def report(event):
        if event.kind == "step" and event.step in (2, 6):
            for second in (lambda: resume_run(run), lambda: fit(prepared, run, print, device="cpu")):
                with pytest.raises(RunError) as caught:
                    second()
                said.append(str(caught.value))

    fit(prepared, run, report, device="cpu")
    assert len(said) == 4
    assert all(f"is being trained by process {os.getpid()} {HERE}" in one for one in said)
    assert not (run / "lock").exists()


@pytest.mark.parametrize(
    "moment", [("step", 3), ("step", 5), ("sample", 0), ("saving", 4), ("stop", 5)], ids=lambda moment: moment[0]
)
def test_a_training_that_lost_its_run_cannot_overwrite_it(tmp_path, moment):
    """As one that was stopped (Ctrl-Z) while somebody removed its lock and trained the run to its end: whether it goes
    on from between two updates, from a validation or a save, or is interrupted (Ctrl-C) then."""
    run, finished, steps = tmp_path / "run", {}, []

    def lose(event):
        steps.append(event.step)
        kind = "step" if moment[0] == "stop" else moment[0]
        if not finished and (event.kind, event.step) == (kind, moment[1]):
            (run / "lock").unlink()
            fit(resume_run(run), run, lambda event: None, device="cpu")
            finished.update(contents(run))

    prepared = start_run(tiny("train.steps=12", "data.examples=50"), run)
    with pytest.raises(RunError, match="is no longer this training's"):
        fit(prepared, run, lose, device="cpu", stop=lambda: moment[0] == "stop" and bool(finished))
    assert load_state(run)[1]["step"] == 12
    assert contents(run) == finished
