"""What the middleware keeps out: bodies that are too large, clients that are too slow."""

import asyncio
import contextlib
import socket
import time

import httpx
import pytest
from serving import live
from starlette.datastructures import Headers

import regard
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


HEAD = b"POST /translate HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"


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
        asyncio.run(middleware.read_body(Headers({}), receive))
    assert len(read) == 11
    for length in ("1001", "9" * 5000):
        with pytest.raises(RefusedError, match="more than 1,000 bytes"):
            asyncio.run(middleware.read_body(Headers({"content-length": length}), receive))
    assert len(read) == 11


def test_headers_that_never_end(server):
    received, seconds = conversation(server.port, b"POST /translate HTTP/1.1\r\nHost: here\r\n")
    assert received == b""
    assert 0.3 < seconds < 30


def test_headers_that_trickle(server):
    received, seconds = conversation(server.port, *([b"G", b"E", b"T", b" ", b"/"] * 8), pause=0.05)
    assert received == b""
    assert seconds < 40


def test_headers_that_trickle_after_an_answer(server):
    received, seconds = conversation(server.port, b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n", b"GET /he", pause=0.1)
    assert received.startswith(b"HTTP/1.1 200")
    assert seconds < 30


def test_a_body_that_never_ends(server):
    received, seconds = conversation(server.port, HEAD + b"Content-Length: 100\r\n\r\n", b'{"q": ')
    assert received.startswith(b"HTTP/1.1 408")
    assert b'{"error": "the request was not complete after 0.4 seconds. Send it faster."}' in received
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


def test_an_error_can_quote_anything():
    assert problem(RefusedError(400, "it was \ud800")).body == b'{"error": "it was ?"}'
