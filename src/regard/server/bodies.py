"""Bodies as clients send them: JSON, in which no name stands twice, and forms, which are UTF-8 but for an image."""

import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.routing import APIRoute
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response

from regard.server.schemas import UPLOADS
from regard.server.settings import RefusedError

MOST_FIELDS, MOST_UPLOADED = 1000, 20
"""Fields of a form, and of one with an image."""
NO_UTF8 = RefusedError(400, "the form is not UTF-8. Send it so, percent-encoded or not.")
TEXTS = ("model", "text", "question", "context", "target", "image")
"""Fields of a form that are no JSON."""


def read_json(body: bytes) -> Any:
    """The tree of a body; JSON that is broken is a ValueError, as is an object that has a name twice."""
    return json.loads(body, object_pairs_hook=make_object)


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Which of two values would be meant, if it had a name twice, nobody can know."""
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise json.JSONDecodeError(f"{name[:100]!r} stands twice in one object", "", 0)
        tree[name] = value
    return tree


class JSONRequest(Request):
    """A request whose JSON is read by `read_json`."""

    async def json(self) -> Any:
        return read_json(await self.body())


class FormRequest(Request):
    """A form in the place of JSON, as `read_upload` has read it."""

    def __init__(self, request: Request, tree: dict[str, Any]) -> None:
        others = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        headers = [*others, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers})
        self.tree = tree

    async def body(self) -> bytes:
        return b"{}"  # whatever is not empty

    async def json(self) -> Any:
        return self.tree


class JSONRoute(APIRoute):
    """A route of such requests; where images are taken, of forms, too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
            if form and request.url.path in UPLOADS:
                return await handle(FormRequest(request, await read_upload(request)))
            return await handle(JSONRequest(request.scope, request.receive))

        return handle_json


async def read_form(request: Request) -> list[tuple[str, Any]]:
    """The fields of a query and a form, in their order."""
    kind, pairs = request.headers.get("content-type", "").lower(), read_pairs(request.scope["query_string"])
    if kind.startswith("multipart/form-data"):
        return pairs + await read_parts(request)
    if kind.startswith("application/x-www-form-urlencoded"):
        return pairs + read_pairs(await request.body())
    return pairs


def read_pairs(form: bytes) -> list[tuple[str, Any]]:
    """The fields of a form or a query, percent-encoded or not."""
    try:
        return parse_qsl(form.decode(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except UnicodeDecodeError as error:
        raise NO_UTF8 from error
    except ValueError as error:
        raise RefusedError(400, f"the form has more than {MOST_FIELDS:,} fields.") from error


async def read_parts(request: Request) -> list[tuple[str, Any]]:
    """The fields of a multipart form, which has no files."""
    body = await request.body()
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NO_UTF8 from error
    check_charset(request)
    check_end(body)
    async with request.form(max_files=0, max_fields=MOST_FIELDS, max_part_size=len(body)) as form:
        return list(form.multi_items())


def check_charset(request: Request) -> None:
    """Refuse a form that names a character set of its own: some of Python's decoders take quadratic time."""
    named = parse_options_header(request.headers.get("content-type", ""))[1].get(b"charset", b"utf-8")
    if named.lower() not in (b"utf-8", b"utf8"):
        raise NO_UTF8


def check_end(body: bytes) -> None:
    """Refuse a multipart form that was not sent to its end."""
    if body.partition(b"\r\n")[0] + b"--" not in body:
        raise RefusedError(400, "the form breaks off: its last boundary is missing.")


async def read_upload(request: Request) -> dict[str, Any]:
    """A multipart form as the object that JSON would be: `image` is the bytes of a file; `settings`, `best` and other
    fields that are no texts are JSON."""
    body = await request.body()
    check_charset(request)
    check_end(body)
    try:
        async with request.form(max_files=1, max_fields=MOST_UPLOADED, max_part_size=len(body)) as form:
            return make_object([(name, await read_field(name, value, body)) for name, value in form.multi_items()])
    except HTTPException as error:
        raise RefusedError(400, f"the form cannot be read: {error.detail}") from error
    except json.JSONDecodeError as error:
        raise RefusedError(400, f"the form cannot be read: {error.msg}.") from error


async def read_field(name: str, value: UploadFile | str, body: bytes) -> Any:
    """What a field of a form holds. Text that is no UTF-8 was read as something else, which does not stand there."""
    if isinstance(value, UploadFile):
        if name != "image":
            raise RefusedError(422, f"{name[:100]} is a file; the only one that is taken is image.")
        return await value.read()
    if value.encode() not in body:
        raise NO_UTF8
    try:
        return value if name in TEXTS else read_json(value.encode())
    except (ValueError, RecursionError) as error:
        raise RefusedError(422, f"{name[:100]} is {value[:100]!r}, expected JSON.") from error
