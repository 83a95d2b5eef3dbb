"""Who asks, and whether they may: API keys, and the names by which the server is asked for."""

from collections.abc import Sequence
from hmac import compare_digest
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope

from regard.server.settings import RefusedError, ServeSettings


def is_known(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is one of those; how long that takes says nothing about them."""
    return any([compare_digest(key.encode("utf-8", "replace"), known.encode()) for known in keys])


def require_bearer(keys: Sequence[str]) -> Any:
    """A dependency that wants `Authorization: Bearer KEY`."""

    async def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        if given is None or not is_known(given.credentials, keys):
            came = "none came" if given is None else "the one that came is not known"
            raise RefusedError(401, f"an API key is needed, and {came}: send Authorization: Bearer KEY.")

    return check


def check_field_or_bearer(field: Any, header: str, keys: Sequence[str]) -> None:
    """LibreTranslate's way: a key in the field api_key, or as a bearer."""
    scheme, _, sent = header.partition(" ")
    if not keys or (scheme.lower() == "bearer" and is_known(sent.strip(), keys)):
        return
    if not field:
        raise RefusedError(401, "an API key is needed: send it as api_key.")
    if not isinstance(field, str) or not is_known(field, keys):
        raise RefusedError(403, "Invalid API key")


def identify_client(scope: Scope, headers: Headers, keys: Sequence[str]) -> str:
    """Who shares the queue with others as one: the owner of an API key, or else an address."""
    key = headers.get("authorization", "").partition(" ")[2].strip()
    return key if is_known(key, keys) else (scope.get("client") or ("",))[0]


def check_host(header: str, settings: ServeSettings) -> None:
    """Refuse a name that is not the server's. A page of another site can let its own name point at this machine, and
    then read what a server here answers (DNS rebinding); with localhost or a plain address, it cannot."""
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        host = header
    names = {name.lower() for name in settings.hosts or (() if is_local(settings.host) else ("*",))}
    if header and "*" not in names and host not in names | {settings.host} and not is_local(host):
        try:
            ip_address(host)
        except ValueError:
            words = f"this server is not called {host[:100]!r}. Ask for localhost or its address, or add the name to"
            raise RefusedError(403, f"{words} serve.hosts when starting it.") from None


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's for itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
