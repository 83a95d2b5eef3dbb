"""Several processes that serve one address (`serve.workers`): while one batch waits between its steps, another works.

The models are read once, before the processes part, so their weights are shared. The system deals the connections out,
and each process has a queue of its own. What is counted is counted together, in files that all of them can read.
"""

import contextlib
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

Work = Callable[[socket.socket], None]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
REST = 1.0
"""Seconds before a process that broke down is replaced, so that one that cannot live does not busy the machine."""


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
    with tempfile.TemporaryDirectory(prefix="regard-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        own, values.ValueClass = values.ValueClass, values.MultiProcessValue()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            values.ValueClass = own
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def supervise(sockets: Sequence[socket.socket], work: Work, begun: Callable[[], None]) -> None:
    """Keep a process at work at each socket until SIGTERM or SIGINT, which they are handed; then wait for them. `begun`
    is called when all are there."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for process in working:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    working: list[BaseProcess] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes while they are born waits until all can hear it
    for number in SIGNALS:
        signal.signal(number, stop)
    working += [start_worker(work, one) for one in sockets]
    begun()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        for place, process in enumerate(working):
            if process.is_alive() or stopping:
                continue
            mark_process_dead(process.pid or 0)  # type: ignore[no-untyped-call]
            words = f"worker {process.pid} broke down (status {process.exitcode}); another takes its place."
            print(words, file=sys.stderr)
            time.sleep(REST)
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # else one might come before the newcomer is known
            if not stopping:
                working[place] = start_worker(work, sockets[place])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        alive = [process for process in working if process.is_alive()]
        if not alive and stopping:
            return
        if alive and (stopping or len(alive) == len(working)):  # else one has died since it was looked at
            wait([process.sentinel for process in alive])


def start_worker(work: Work, listener: socket.socket) -> BaseProcess:
    """A copy of this process that works at a socket."""

    def begin() -> None:
        os.setpgrp()  # Ctrl-C reaches the parent, which passes it on
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        work(listener)

    process = multiprocessing.get_context("fork").Process(target=begin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads that torch and numpy keep do nothing by now
        process.start()
    return process
