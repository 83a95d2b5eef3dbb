"""Middleware: what every request passes on its way in and every answer on its way out.

Bodies are bounded in size and in time, a client that goes away is no longer worked for, every answer has the security
headers and is counted, and what breaks is answered with JSON. Below it, `Server` stops in two steps on SIGTERM.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.server.schemas import OPENAI, failure
from regard.server.service import Service
from regard.server.settings import MISTAKE, RefusedError

log = logging.getLogger("regard.server")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class GoneError(Exception):
    """The client has closed the connection."""


def problem(error: RefusedError, path: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """An error as JSON, at OpenAI's paths in OpenAI's form; what it quotes that is no character is replaced."""
    tree = failure(error) if path.startswith(OPENAI) else {"error": error.message}
    body = json.dumps(tree, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, error.status, {**error.headers, **(headers or {})}, "application/json")


class Middleware:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.service, self.settings = service, service.settings
        self.app = self.allow_origins(app)

    def allow_origins(self, app: ASGIApp) -> ASGIApp:
        """An application whose answers pages of the allowed origins may read; those of the middleware itself, too."""
        if not self.settings.cors:
            return app
        return CORSMiddleware(app, self.settings.cors, ["GET", "POST"], ["Authorization", "Content-Type"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        began, reply = time.perf_counter(), Reply(send, self.service)
        try:
            body = await self.read_body(Headers(scope=scope), receive)
            await self.respond(scope, body, receive, reply)
        except RefusedError as refusal:
            await self.allow_origins(problem(refusal, scope["path"]))(scope, receive, reply)
        except GoneError:
            reply.status = 499  # as nginx counts clients that did not wait
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if not reply.status:
                await self.allow_origins(problem(MISTAKE, scope["path"]))(scope, receive, reply)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.service.metrics.requests.labels(route, reply.status).inc()
            self.service.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def read_body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body, unless it is too large or too slow; of a larger one no more than the limit is kept."""
        most = self.settings.max_body
        large = RefusedError(413, f"the body has more than {most:,} bytes, which is the most that is taken. Split it.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise large
        chunks, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise GoneError
                    chunks.append(message.get("body", b""))
                    size, more = size + len(chunks[-1]), message.get("more_body", False)
                    if size > most:
                        raise large
        except TimeoutError:
            seconds = f"{self.settings.read_timeout:g}"
            raise RefusedError(408, f"the request was not complete after {seconds} seconds. Send it faster.") from None
        return b"".join(chunks)

    async def respond(self, scope: Scope, body: bytes, receive: Receive, reply: "Reply") -> None:
        """Let the application answer, as long as the client is there."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await asyncio.shield(watch)

        watch = asyncio.ensure_future(receive())  # the body has been read: only a disconnection can come
        work = asyncio.ensure_future(self.app(scope, again, reply))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not reply.complete:
                raise GoneError
            await work
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)


class Reply:
    """Sends an answer, with the headers that every answer has."""

    def __init__(self, send: Send, service: Service) -> None:
        self.send, self.service = send, service
        self.status, self.complete = 0, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            last = [(b"connection", b"close")] if self.service.batcher.closing or self.status == 408 else []
            message = {**message, "headers": [*message.get("headers", []), *HEADERS, *last]}
        elif not message.get("more_body", False):
            self.complete = True
        await self.send(message)


def make_protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, which closes a connection whose request line and headers do not come whole in time. (Their
    clock starts with the connection or with the first byte after an answer; the body's is the middleware's.)"""

    class Patient(H11Protocol):
        watch: asyncio.TimerHandle | None = None

        def idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.watch = self.loop.call_later(seconds, self.give_up)

        def data_received(self, data: bytes) -> None:
            if self.watch is None and self.idle():
                self.watch = self.loop.call_later(seconds, self.give_up)
            super().data_received(data)
            if not self.idle():
                self.calm()

        def connection_lost(self, exc: Exception | None) -> None:
            self.calm()
            super().connection_lost(exc)

        def calm(self) -> None:
            if self.watch is not None:
                self.watch.cancel()
                self.watch = None

        def give_up(self) -> None:
            self.watch = None
            if self.idle() and not self.transport.is_closing():
                self.transport.close()

    return Patient


class Server(uvicorn.Server):
    """Stops in two steps: on the first signal newcomers are refused, in words, while what was accepted goes on; a
    little later it takes no more connections, and ends when the last answer is out. A second signal ends it at once.
    One that has a parent also ends when the parent does."""

    stop_at = math.inf

    def __init__(self, app: Any, service: Service, parent: int | None = None) -> None:
        settings, self.service, self.parent = service.settings, service, parent
        http, last = make_protocol(settings.read_timeout), math.ceil(settings.timeout) + 5
        config = uvicorn.Config(
            app, http=http, ws="none", log_level="warning", server_header=False, timeout_graceful_shutdown=last
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stop_at < math.inf:
            self.should_exit = self.force_exit = True
        self.service.batcher.closing = True
        self.stop_at = time.monotonic() + self.service.settings.linger

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            with contextlib.suppress(OSError):  # other processes hold it too: closed here alone, it would go on ringing
                listener.shutdown(socket.SHUT_RDWR)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        orphan = self.parent is not None and os.getppid() != self.parent
        return await super().on_tick(counter) or orphan or time.monotonic() >= self.stop_at
