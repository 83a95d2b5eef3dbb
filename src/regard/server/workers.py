"""Several processes that serve one address (`serve.workers`): while one batch waits between its steps, another works.

The models are read once, before the processes part, so their weights are shared. The system deals the connections out,
and each process has a queue of its own. What is counted is counted together, in files that all of them can read. Each
gives signs of life in memory that is shared; one that has died, stopped or hangs is replaced.
"""

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from regard.errors import ConfigError

Work = Callable[[socket.socket, Callable[[], None]], None]
"""What a process does at a socket; it calls the function as long as it is alive and well."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
REST = 1.0
"""Seconds before a process that broke down is replaced, so that one that cannot live does not busy the machine."""
LOOK = 1.0
"""Seconds between two looks at the processes."""
QUIET = 20.0
"""Seconds without a sign of life after which a process is ended; those in which nobody could look do not count, for all
may have been stopped together."""


def check_workers(workers: int, device: str) -> None:
    """Refuse several processes where they cannot share an address or a model."""
    if workers > 1 and sys.platform != "linux":
        raise ConfigError(f"serve.workers={workers} needs Linux, which deals connections out. Leave it at 1.")
    if workers > 1 and device != "cpu":
        raise ConfigError(f"serve.workers={workers} is for models on the CPU, not on {device}. Leave it at 1.")


def open_sockets(host: str, port: int, workers: int) -> list[socket.socket]:
    """A socket for each process, all at one address; nobody else listens there."""
    listen = partial(socket.create_server, family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    try:
        found = listen((host, port))
        if workers == 1:
            return [found]
        port = found.getsockname()[1]  # is free: sockets that share a port would share it with a stranger, too
        found.close()
        return [listen((host, port), reuse_port=True) for _ in range(workers)]
    except OSError as error:
        words = f"{host} port {port} cannot be listened on: {error.strerror}. Change --host or --port."
        raise ConfigError(words) from error


@contextlib.contextmanager
def share_metrics() -> Iterator[None]:
    """Inside, what Prometheus's client counts goes to files that other processes can read."""
    import fcntl

    with tempfile.TemporaryDirectory(prefix="regard-metrics-") as folder, contextlib.ExitStack() as stack:
        lock = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)  # systemd, which removes old temporary files, leaves a locked folder alone
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        own, values.ValueClass = values.ValueClass, values.MultiProcessValue()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            values.ValueClass = own
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


class Worker:
    """A process that works at a socket, and whether it gives signs of life."""

    def __init__(self, work: Work, listener: socket.socket) -> None:
        self.work, self.listener, self.sign = work, listener, mmap.mmap(-1, 1)  # one byte of memory that is shared
        self.start()

    def start(self) -> None:
        """Let a copy of this process begin."""
        self.seen, self.quiet = self.sign[0], 0.0
        os.makedirs(os.environ["PROMETHEUS_MULTIPROC_DIR"], 0o700, exist_ok=True)  # somebody may have removed it
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=self.begin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's and numpy's threads do nothing by now
            self.process.start()

    def begin(self) -> None:
        """Work, as the copy."""
        os.setpgrp()  # Ctrl-C reaches the parent, which passes it on
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.work(self.listener, self.beat)

    def beat(self) -> None:
        """Give a sign of life."""
        self.sign[0] = (self.sign[0] + 1) % 256

    def look(self, seconds: float) -> None:
        """End the process if it has given no sign of life for too long, another few seconds included."""
        self.quiet = self.quiet + seconds if self.sign[0] == self.seen else 0.0
        self.seen = self.sign[0]
        if self.quiet > QUIET:
            print(f"worker {self.process.pid} hangs, and is ended.", file=sys.stderr)
            self.quiet = 0.0
            self.process.kill()
            self.process.join(REST)


def supervise(sockets: Sequence[socket.socket], work: Work, begun: Callable[[], None]) -> None:
    """Keep a process at work at each socket until SIGTERM or SIGINT, which they are handed; then wait for them. `begun`
    is called when all are there."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for worker in working:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid or 0, number)

    working: list[Worker] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes while they are born waits until all can hear it
    for number in SIGNALS:
        signal.signal(number, stop)
    working += [Worker(work, one) for one in sockets]
    begun()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        for worker in working:
            if worker.process.is_alive() or stopping:
                continue
            pid, status = worker.process.pid, worker.process.exitcode
            mark_process_dead(pid)  # type: ignore[no-untyped-call]
            print(f"worker {pid} broke down (status {status}); another takes its place.", file=sys.stderr)
            time.sleep(REST)
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # else one might come before the newcomer is known
            if not stopping:
                worker.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        alive = [worker for worker in working if worker.process.is_alive()]
        if not alive and stopping:
            return
        if alive and (stopping or len(alive) == len(working)):  # else one has died since it was looked at
            began = time.monotonic()
            wait([worker.process.sentinel for worker in alive], LOOK)
            for worker in alive:
                worker.look(min(LOOK, time.monotonic() - began))
