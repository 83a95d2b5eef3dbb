"""What the middleware keeps out: bodies that are too large, clients that are too slow."""

import asyncio
import contextlib
import errno
import gzip
import os
import socket
import threading
import time

import httpx
import pytest
from serving import live, wait_until
from starlette.datastructures import Headers

import regard
from regard.server.app import STUDIO
from regard.server.middleware import Middleware, problem
from regard.server.service import Service
from regard.server.settings import RefusedError, ServeSettings


@pytest.fixture(scope="module")
def server(tiny_run):
    predictor = regard.load(tiny_run, ["text.languages=['en','de']"], device="cpu")
    with live({"tiny": predictor}, read_timeout=0.4) as server:
        yield server


def conversation(port, *parts, pause=0.0, seconds=40.0):
    """Send parts over one connection, then read until it is closed: what came, and after how long."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except ConnectionError:
            pass
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return received, time.monotonic() - began


HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_of_50_megabytes(server):
    response = httpx.post(f"{server.url}/translate", content=b"x" * 50_000_000, timeout=30)
    assert response.status_code == 413
    assert response.json() == {
        "error": "the body has more than 1,000,000 bytes, which is the most that is taken. Split it."
    }
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_that_does_not_say_its_size(server):
    def endless():
        for _ in range(800):
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError):  # when the server had answered, waited and hung up
        assert httpx.post(f"{server.url}/translate", content=endless(), timeout=30).status_code == 413
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_no_more_is_read_than_may_be(server):
    """Of an endless body, one chunk beyond the limit."""
    middleware = Middleware(None, Service({}, ServeSettings(max_body=1000)))
    read = []

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    with pytest.raises(RefusedError, match="more than 1,000 bytes"):
        asyncio.run(middleware.read_body(Headers({}), receive, 1000))
    assert len(read) == 11
    for length in ("1001", "9" * 5000):
        with pytest.raises(RefusedError, match="more than 1,000 bytes"):
            asyncio.run(middleware.read_body(Headers({"content-length": length}), receive, 1000))
    assert len(read) == 11


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, gzip"])
def test_compressed_bodies_are_refused_unread(server, coding):
    bomb = gzip.compress(bytes(1_000_000))
    response = httpx.post(f"{server.url}/v1/predict", content=bomb, headers={"Content-Encoding": coding})
    words = f"the body is encoded ({coding}), and bodies are not decoded. Send it as it is."
    assert (response.status_code, response.json()) == (415, {"error": words})


def test_all_bodies_together_are_bounded(monkeypatch):
    """Whoever comes when too much is held is told so, and what was held is let go whatever became of its request."""
    monkeypatch.setattr("regard.server.middleware.BODIES", 2)
    held, statuses = [], []

    async def app(scope, receive, send):
        await receive()
        held.append(middleware.held)
        if scope["path"] == "/breaks":
            raise ZeroDivisionError
        if scope["path"] == "/waits":
            await asyncio.gather(ask("/fits"), ask("/fits"))
            await ask("/breaks")
        await problem(RefusedError(404, "nothing"))(scope, receive, send)

    async def ask(path):
        messages = [{"type": "http.request", "body": b"x" * 500, "more_body": part} for part in (False, True)]
        sent = []

        async def receive():
            await asyncio.sleep(0)
            return messages.pop() if messages else await asyncio.Future()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await middleware(scope, receive, send)
        statuses.append(sent[0]["status"])

    middleware = Middleware(app, Service({}, ServeSettings(max_body=1000)))
    asyncio.run(ask("/waits"))
    assert (sorted(statuses[:2]), statuses[2:]) == ([404, 503], [500, 404])
    assert (max(held), middleware.held) == (2000, 0)


def test_headers_that_never_end(server):
    received, seconds = conversation(server.port, b"POST /translate HTTP/1.1\r\nHost: localhost\r\n")
    assert received == b""
    assert 0.3 < seconds < 30


def test_headers_that_trickle(server):
    received, seconds = conversation(server.port, *([b"G", b"E", b"T", b" ", b"/"] * 8), pause=0.05)
    assert received == b""
    assert seconds < 40


def test_headers_that_trickle_after_an_answer(server):
    received, seconds = conversation(
        server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /he", pause=0.1
    )
    assert received.startswith(b"HTTP/1.1 200")
    assert seconds < 30


def test_a_body_that_never_ends(server):
    received, seconds = conversation(server.port, HEAD + b"Content-Length: 100\r\n\r\n", b'{"q": ')
    assert received.startswith(b"HTTP/1.1 408")
    assert b'{"error": "the request was not complete after 0.4 seconds. Send it faster."}' in received
    assert b"\r\nconnection: close\r\n" in received
    assert 0.3 < seconds < 30


def test_what_is_not_http(server):
    received, _ = conversation(server.port, b"\x16\x03\x01 hello\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")


def test_slow_clients_keep_nobody_waiting(server):
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for connection in slow:
        connection.sendall(HEAD)
    began = time.monotonic()
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert time.monotonic() - began < 20  # and not until all of them are gone
    for connection in slow:
        connection.close()


def connect(port):
    """A connection that takes little before it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    return connection


ASK = b"GET /studio/view.js HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_clients_that_do_not_read_are_left():
    """And with them goes what was to be sent to them; one that reads gets everything."""
    with live({}, write_timeout=0.5) as server:
        open_ = server.server.server_state.connections
        deaf = [connect(server.port) for _ in range(3)]
        for connection in deaf:
            connection.sendall(ASK * 400)  # some 20 MB, more than the system holds for it
        wait_until(lambda: len(open_) == 3)
        wait_until(lambda: not open_)
        with connect(server.port) as connection:
            connection.sendall(ASK * 3 + ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200 OK") == 4
        assert received.endswith((STUDIO / "view.js").read_bytes())
        for connection in deaf:
            connection.close()


def test_what_asyncio_tries_on_a_closed_server_is_not_logged(caplog):
    """It tries to accept once more for each failure of the second before, and the server may have closed meanwhile."""
    loop = asyncio.new_event_loop()
    with live({}) as server:
        for name in ("_start_serving", "other"):
            context = {"message": f"Exception in callback {name}()", "exception": ValueError("Invalid descriptor: -1")}
            server.server.complain(loop, context)
    loop.close()
    assert [record.getMessage() for record in caplog.records] == ["Exception in callback other()"]


def test_the_log_is_not_flooded_when_no_files_are_left(monkeypatch, caplog):
    """asyncio would write a traceback for each place of the backlog, each second. Who came meanwhile is served."""
    accept, full = socket.socket.accept, threading.Event()
    tried = []

    def no_file(self):
        if not full.is_set():
            return accept(self)
        tried.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", no_file)
    with live({}) as server, caplog.at_level("WARNING"):
        full.set()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            wait_until(lambda: len(tried) > 2000)
            full.clear()
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    words = "no more connections can be taken (Too many open files). Those who come wait;"
    assert [record.getMessage() for record in caplog.records] == [f"{words} raise the limit with `ulimit -n`."]


def test_an_error_can_quote_anything():
    assert problem(RefusedError(400, "it was \ud800")).body == b'{"error": "it was ?"}'
