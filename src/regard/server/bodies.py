"""Bodies as clients send them: JSON, in which no name stands twice, and forms, which are UTF-8."""

import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from regard.server.settings import RefusedError

MOST_FIELDS = 1000
"""Fields of a form."""
NO_UTF8 = RefusedError(400, "the form is not UTF-8. Send it so, percent-encoded or not.")


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


class JSONRoute(APIRoute):
    """A route of such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
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
    if body.partition(b"\r\n")[0] + b"--" not in body:
        raise RefusedError(400, "the form breaks off: its last boundary is missing.")
    async with request.form(max_files=0, max_fields=MOST_FIELDS, max_part_size=len(body)) as form:
        return list(form.multi_items())
