"""How a server behaves, and how it refuses."""

from typing import Annotated

from pydantic import Field, field_validator

from regard.config.settings import Count, Settings
from regard.data.images.pixels import MOST_PIXELS

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NoneOrMore = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ServeSettings(Settings):
    """How a server behaves."""

    host: str = "127.0.0.1"
    """The address to listen on; the default is reached from this machine only."""
    port: Annotated[int, Field(ge=0, le=65535)] = 5000
    """0 takes a free one."""
    keys: tuple[str, ...] = ()
    """API keys; without any, everybody is served."""
    hosts: tuple[str, ...] = ()
    """Names by which clients may ask for the server, beside localhost and addresses; "*" is any. Without names, any if
    `host` can be reached from other machines, else none: pages of other sites could ask by a name of theirs."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may call the server, as in https://example.org; "*" is any."""
    max_body: Count = 1_000_000
    """Bytes of a request."""
    max_characters: Count = 5000
    """Characters of one text."""
    max_image: Count = 10_000_000
    """Bytes of the file of an image. Where a run reads images, requests may be larger than `max_body` by that."""
    max_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] = 25_000_000
    """Pixels of an image; one that has more is refused before it is decoded."""
    max_items: Count = 100
    """Texts of one request."""
    max_look: Count = 10_000_000
    """Bytes of all maps of one /v1/look."""
    max_queue: Count = 256
    """Texts of one client that may wait, and a quarter of all that may; who sends more is asked to come again later."""
    timeout: Seconds = 60.0
    """Seconds that a request may wait for its answer."""
    read_timeout: Seconds = 10.0
    """Seconds in which a client must have sent its request."""
    write_timeout: Seconds = 60.0
    """Seconds in which a client must have taken its answer, or what was streamed so far."""
    step_timeout: Seconds = 120.0
    """Seconds without a finished step after which a model counts as hung: /health fails, its process is replaced."""
    linger: NoneOrMore = 0.5
    """Seconds after SIGTERM in which newcomers are still told, with status 503, that the server stops."""
    batch_items: Count = 64
    """Texts decoded together."""
    wait_ms: NoneOrMore = 2.0
    """A batch is closed when nobody has joined it for so long."""
    threads: Count | None = None
    """Of the model, in each process; None: as torch chooses, dealt out to the processes."""
    workers: Count = 1
    """Processes that answer (Linux, CPU). Two with a thread each do more on two cores than one with two."""
    retry: bool = False
    """Whether an answer that the guard flags is decoded again without repeats."""

    @field_validator("keys")
    @classmethod
    def keys_fit_headers(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(keys, 1):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ValueError(f"key {number} of {len(keys)} is empty, or not plain ASCII without spaces around it")
        return keys


class RefusedError(Exception):
    """A request that is not answered: the HTTP status, what to tell, and whether to come again."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """`param` and `code` are OpenAI's: the field that is wrong, and a word for what is wrong."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}


MISTAKE = RefusedError(500, "the server made a mistake; its log says which.")
