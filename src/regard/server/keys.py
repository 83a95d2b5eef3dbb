"""API keys: who may ask."""

from collections.abc import Sequence
from hmac import compare_digest
from typing import Annotated, Any

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from regard.server.settings import RefusedError


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
