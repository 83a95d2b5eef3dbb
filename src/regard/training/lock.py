"""One owner for each run: only the training that holds its lock writes to it.

The lock is the kernel's, on the file RUN/lock (flock): it lasts as long as its process does, stopped or not, and ends
with it, however that ends. The file names host and process, for people, and for file systems that do not tell other
machines about locks.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from regard.errors import RunError


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[Callable[[], None]]:
    """Own a run. Yields a check to be made before anything is written: it raises once the run is somebody else's."""
    path = run / "lock"

    def check() -> None:
        if not is_at(file, path):
            raise RunError(
                f"{run} is no longer this training's: its lock (process {os.getpid()}) was removed. It has stopped "
                f"without writing. If nobody else trains that run, go on with `regard train --resume {run}`."
            )

    with contextlib.ExitStack() as files:
        file = files.enter_context(open_lock(path))
        while not is_at(file, path):  # its owner has just finished and removed it
            file = files.enter_context(open_lock(path))
        sign_lock(file, path)
        try:
            yield check
        finally:
            if is_at(file, path):
                path.unlink()


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[TextIO]:
    """A file that is locked while it is open, or who else has it."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise RunError(f"{path} cannot be made: {error.strerror}. One training at a time owns a run.") from error
    with open(number, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"{path.parent} is being trained by {file.read().strip() or 'another process'}: one training at a time "
                "owns a run. Wait for it, or stop it, then try again."
            ) from error
        except OSError as error:
            raise RunError(f"{path} cannot be locked: {error.strerror}. Put the run on a local disk.") from error
        yield file


def sign_lock(file: TextIO, path: Path) -> None:
    """Write the owner into a file that is locked. What a process of this host left there is out of date; one of another
    host may still be at work, where the lock does not reach."""
    host, owner = socket.gethostname(), file.read().strip()
    if owner and not owner.endswith(f" on {host}"):
        raise RunError(
            f"{path.parent} was being trained by {owner}, which has not given it back. If that process is gone, remove "
            f"{path} and try again."
        )
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {host}\n")
    file.flush()


def is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    return False
