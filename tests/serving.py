"""A real server on a free loopback port, for the tests of what is around it."""

import socket
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

from regard.gate import Server
from regard.predict import Predictor
from regard.serve import application
from regard.service import ServeSettings, Service


class Live(NamedTuple):
    """A running server."""

    url: str
    port: int
    service: Service
    server: Server


@contextmanager
def live(predictors, **settings):
    """Serve predictors by name while the block runs."""
    app = application(predictors, ServeSettings(threads=1, **settings))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    server = Server(app, app.state.service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Live(f"http://127.0.0.1:{port}", port, app.state.service, server)
    finally:
        server.should_exit = True
        thread.join()


class Held(Predictor):
    """A predictor that begins to decode when it is let go, and remembers what it was asked together."""

    def __init__(self, inner: Predictor) -> None:
        super().__init__(inner.model, inner.config, inner.source, inner.target)
        self.begun, self.go = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def predict(self, texts, **options):
        self.batches.append(list(texts))
        self.begun.set()
        assert self.go.wait(5)
        return super().predict(texts, **options)


def wait_until(condition, seconds=10.0):
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
