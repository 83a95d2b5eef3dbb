"""Middleware: what every request passes on its way in and every answer on its way out.

Requests and answers are bounded in size and in time, a client that goes away is no longer worked for, every answer has
the security headers and is counted, and what breaks is answered with JSON. Below it, `Server` stops in two steps on
SIGTERM.
"""

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.server.batcher import CLIENT
from regard.server.keys import check_host, identify_client
from regard.server.schemas import OPENAI, UPLOADS, failure
from regard.server.service import Service
from regard.server.settings import MISTAKE, RefusedError, ServeSettings

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
BODIES, IMAGES = 64, 8
"""Bodies of the largest size, and images beside them, that are held at once."""
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What the system says when it cannot open another connection."""
COMPLAINT = 60.0
"""Seconds between two lines of the log about that."""
BEAT = 0.2
"""Seconds between two signs of life."""


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
        self.held = 0  # bytes of all bodies
        most = self.settings.max_body
        image = self.settings.max_image * 4 // 3 if service.takes_images() else 0  # base64 of JSON
        self.limits = dict.fromkeys(UPLOADS, most + image)
        self.room = BODIES * most + IMAGES * image

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
        began, reply, body = time.perf_counter(), Reply(send, self.service), b""
        try:
            headers = Headers(scope=scope)
            CLIENT.set(identify_client(scope, headers, self.settings.keys))
            check_host(headers.get("host", ""), self.settings)
            body = await self.read_body(headers, receive, self.limits.get(scope["path"], self.settings.max_body))
            await self.respond(scope, body, receive, reply)
        except RefusedError as refusal:
            await self.allow_origins(problem(refusal, scope["path"]))(scope, receive, reply)
        except GoneError:
            reply.status = 499  # as nginx counts clients that did not wait
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in Rust is no Exception
            log.exception("%s %s", scope["method"], scope["path"])
            if not reply.status:
                await self.allow_origins(problem(MISTAKE, scope["path"]))(scope, receive, reply)
        finally:
            self.held -= len(body)
            route = getattr(scope.get("route"), "path", "other")
            self.service.metrics.requests.labels(route, reply.status).inc()
            self.service.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    async def read_body(self, headers: Headers, receive: Receive, most: int) -> bytes:
        """The whole body, unless it is too large, too slow or compressed; of one with more than `most` bytes no more is
        kept. All that are held together have a limit, too."""
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            words = f"the body is encoded ({coding[:100]}), and bodies are not decoded. Send it as it is."
            raise RefusedError(415, words)
        advice = "Split it." if most == self.settings.max_body else "Split it, or shrink the image."
        large = RefusedError(413, f"the body has more than {most:,} bytes, which is the most that is taken. {advice}")
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
                    self.held += len(chunks[-1])
                    if size > most:
                        raise large
                    if self.held > self.room:
                        raise RefusedError(503, "too many requests are being sent at once. Try again later.")
        except BaseException as error:
            self.held -= size
            if not isinstance(error, TimeoutError):
                raise
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


def make_protocol(settings: ServeSettings) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, which closes a connection whose request line and headers do not come whole in time, or whose
    client does not take what is sent. (The clock of the headers starts with the connection or with the first byte after
    an answer; the body's is the middleware's. That of an answer starts when the system takes no more of it.)"""
    seconds = settings.read_timeout

    class Patient(H11Protocol):
        watch: asyncio.TimerHandle | None = None
        writing: asyncio.TimerHandle | None = None

        def idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # pause_writing is told of every byte that is left
            self.watch = self.loop.call_later(seconds, self.give_up)

        def data_received(self, data: bytes) -> None:
            if self.watch is None and self.idle():
                self.watch = self.loop.call_later(seconds, self.give_up)
            super().data_received(data)
            if not self.idle():
                self.calm()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing = self.loop.call_later(settings.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.writing is not None:
                self.writing.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self.calm()
            self.resume_writing()
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
    One that has a parent also ends when the parent does, and calls `beat` as long as it is alive and well."""

    stop_at, complained = math.inf, -math.inf

    def __init__(
        self, app: Any, service: Service, parent: int | None = None, beat: Callable[[], None] = lambda: None
    ) -> None:
        settings, self.service, self.parent, self.beat = service.settings, service, parent, beat
        http, last = make_protocol(settings), math.ceil(settings.timeout) + 5
        config = uvicorn.Config(
            app, http=http, ws="none", log_level="warning", server_header=False, timeout_graceful_shutdown=last
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.complain)
        await super().startup(sockets)
        self.pulse = asyncio.create_task(self.live())

    async def live(self) -> None:
        """Give signs of life until the end, while answers are finished too."""
        while True:
            if self.service.batcher.problem() is None:
                self.beat()
            await asyncio.sleep(BEAT)

    def complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what went wrong in the loop. Without a file for another connection, that would be thousands of tracebacks
        a second: asyncio tries again each second, as often as connections may wait; also where the server has closed
        meanwhile."""
        error = context.get("exception")
        if isinstance(error, ValueError) and "_start_serving" in str(context.get("message")):
            return
        if not isinstance(error, OSError) or error.errno not in NO_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() > self.complained + COMPLAINT:
            self.complained = time.monotonic()
            words = "no more connections can be taken (%s). Those who come wait; raise the limit with `ulimit -n`."
            log.warning(words, error.strerror)

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
