"""The LibreTranslate protocol, as its clients speak it: JSON, forms or the query, and errors as {"error": message}.

A document is translated line by line; of HTML, the text between tags, and the tags stay as they are. Which language a
text is in is a guess: the served source language whose vocabulary writes it with the fewest tokens by character, an
unknown token counting as several.
"""

import html
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from regard.data.vocabulary import UNK
from regard.server.bodies import read_form, read_json
from regard.server.keys import check_field_or_bearer
from regard.server.schemas import MOST, Text, Texts, problems
from regard.server.service import Service
from regard.server.settings import RefusedError
from regard.tasks.task import Answer

UNKNOWN = 4
"""Tokens that an unknown one counts as, when a language is guessed."""


class Detect(BaseModel):
    """A text whose language is asked for."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    q: Text | Texts
    """The text, or several."""
    api_key: str | None = None


class Translate(Detect):
    """Texts to translate."""

    source: str
    """A language of /languages, or auto."""
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, lt=MOST)] = 0
    """Other answers wanted, beside the best."""
    model: str | None = None
    """A model by its name; the first of the languages by default."""


class Guess(BaseModel):
    """A language and how sure that is, in percent."""

    confidence: float
    language: str


class Translated(BaseModel):
    """What was asked for one text, or for a list of texts."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    translatedText: str | list[str]  # noqa: N815 (LibreTranslate's name)
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Guess | list[Guess] | None = None  # noqa: N815
    flags: list[str] | list[list[str]] | None = None
    """What is suspicious about the answers, if anything is."""


class Language(BaseModel):
    """A language and those that it can be translated to."""

    code: str
    name: str
    targets: list[str]


Body = TypeVar("Body", bound=Detect)


def document_body(model: type[Detect]) -> dict[str, Any]:
    """The body in OpenAPI: the same fields as JSON and as a form."""
    schema = model.model_json_schema()
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}


async def read_fields(request: Request) -> dict[str, Any]:
    """What a request says: a JSON object, or else a form and the query. An empty text or language is as if left out."""
    if "json" in request.headers.get("content-type", ""):
        try:
            tree = read_json(await request.body())
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is not JSON: {getattr(error, 'msg', str(error))[:200]}.") from error
        if not isinstance(tree, dict):
            raise RefusedError(400, f"the body is a JSON {type(tree).__name__}, expected an object with q.")
    else:
        pairs = await read_form(request)
        tree = dict(pairs)
        if len(several := [value for name, value in pairs if name == "q"]) > 1:
            tree["q"] = several
    absent: dict[str, tuple[Any, ...]] = dict.fromkeys(("q", "source", "target"), (None, "", []))
    return {name: value for name, value in tree.items() if value not in absent.get(name, (None,))}


async def read_body(request: Request, model: type[Body], service: Service) -> Body:
    """The request, checked; complaints are LibreTranslate's where it has one."""
    tree = await read_fields(request)
    check_field_or_bearer(tree.get("api_key"), request.headers.get("authorization", ""), service.settings.keys)
    try:
        body = model.model_validate(tree)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        if wrong["type"] == "missing":
            raise RefusedError(400, f"Invalid request: missing {name} parameter") from error
        message = wrong["msg"].removeprefix("Value error, ")
        raise RefusedError(400, f"Invalid request: parameter {name}: {message[0].lower()}{message[1:]}.") from error
    service.check([body.q] if isinstance(body.q, str) else body.q)
    return body


class Segment(NamedTuple):
    """A stretch of a document: text to translate, or what stays as it is."""

    raw: str
    is_text: bool


ATTRIBUTES = r"""(?:[^<>"']|"[^"]*"|'[^']*')*+>"""
TAG = re.compile(
    rf"<!--.*?(?:-->|\Z)|<(script|style)\b{ATTRIBUTES}.*?(?:</\1\s*>|\Z)|</?[a-z]{ATTRIBUTES}|<[!?][^>]*>?",
    re.IGNORECASE | re.DOTALL,
)
"""What is not text in HTML, whole or broken off. (html.parser takes quadratic time for some and stops at others.)"""
BLANK = re.compile(r"\s+")
SPACE = re.compile(r"\s+|&(?:nbsp|ensp|emsp|thinsp|#160|#xa0);", re.IGNORECASE)
"""White space of a text, and of HTML."""


def split_document(document: str, form: str) -> list[Segment]:
    """A document as pieces that make it up again; white space around text is a piece of its own. Signs alone, as a full
    stop behind a tag, are no text of HTML."""
    if form != "html":
        return [part for line in document.splitlines(keepends=True) for part in trim(line)]
    found, place = [], 0
    for tag in TAG.finditer(document):
        found += [*trim(document[place : tag.start()], SPACE), Segment(tag[0], False)]
        place = tag.end()
    found += trim(document[place:], SPACE)
    return [
        piece._replace(is_text=piece.is_text and any(map(str.isalnum, html.unescape(piece.raw)))) for piece in found
    ]


def trim(raw: str, space: re.Pattern[str] = BLANK) -> list[Segment]:
    """Text without the white space around it, and that space."""
    start, end = 0, len(raw)
    while before := space.match(raw, start):
        start = before.end()
    for after in reversed(list(space.finditer(raw, start))):
        if after.end() != end:
            break
        end = after.start()
    parts = (Segment(raw[:start], False), Segment(raw[start:end], True), Segment(raw[end:], False))
    return [part for part in parts if part.raw]


def detect_language(service: Service, text: str, target: str | None = None) -> list[dict[str, Any]]:
    """The served source languages (those with a model to `target`), likeliest first, with a confidence in percent. The
    first thousand characters decide."""
    text = text[:1000]
    costs: dict[str, float] = {}
    for predictor in service.speaking("libretranslate").values():
        source, other = predictor.config.text.languages
        if target in (None, other):
            ids = predictor.source.encode(text).ids
            cost = (1 + len(ids) + (UNKNOWN - 1) * ids.count(UNK)) / (1 + len(text))
            costs[source] = min(cost, costs.get(source, cost))
    shares = {language: cost**-4 for language, cost in costs.items()}
    total = sum(shares.values())
    order = sorted(shares, key=lambda language: -shares[language])
    return [{"confidence": round(100 * shares[language] / total, 1), "language": language} for language in order]


def choose_model(service: Service, body: Translate, source: str) -> str:
    """The model that translates between two languages."""
    pairs = {name: predictor.config.text.languages for name, predictor in service.speaking("libretranslate").items()}
    if body.model is not None:
        name = service.find(body.model)
        if name not in pairs:
            raise RefusedError(400, f"{name} does not translate. Ask it with POST /v1/predict.")
        if pairs[name] != (source, body.target):
            does = " to ".join(pairs[name])
            raise RefusedError(400, f"{name} translates {does}, not {source[:20]} to {body.target[:20]}")
        return name
    for name, pair in pairs.items():
        if pair == (source, body.target):
            return name
    known = {language for pair in pairs.values() for language in pair}
    for language in (source, body.target):
        if language not in known:
            raise RefusedError(400, f"{language[:20]} is not supported")
    raise RefusedError(400, f"{body.target} is not available as a target language from {source}")


def language_name(code: str) -> str:
    """The English name of a language; of an unknown code, the code."""
    from babel import Locale, UnknownLocaleError

    try:
        return str(Locale.parse(code, sep="-" if "-" in code else "_").english_name or code)
    except (UnknownLocaleError, ValueError):
        return code


async def translate_body(service: Service, body: Translate) -> dict[str, Any]:
    """The answer to /translate."""
    texts = [body.q] if isinstance(body.q, str) else body.q
    guess = None
    if body.source == "auto":
        guesses = detect_language(service, "\n".join(texts), body.target)
        if not guesses:
            raise RefusedError(400, f"{body.target[:20]} is not supported")
        guess = guesses[0]
    model = choose_model(service, body, guess["language"] if guess else body.source)
    documents = [split_document(text, body.format) for text in texts]
    read = html.unescape if body.format == "html" else str
    wanted = [read(piece.raw) for document in documents for piece in document if piece.is_text]
    settings = service.predictors[model].config.decode
    found = iter(await service.answers(model, wanted, 1 + body.alternatives, settings) if wanted else [])
    filled = [[next(found) if piece.is_text else piece.raw for piece in document] for document in documents]
    versions = [
        [fill_document(document, rank, body.format) for rank in range(1 + body.alternatives)] for document in filled
    ]
    flags = [[flag for part in document if not isinstance(part, str) for flag in part[0].flags] for document in filled]
    tree: dict[str, list[Any]] = {"translatedText": [best for best, *_ in versions]}
    if body.alternatives:
        tree["alternatives"] = [list(dict.fromkeys(all_))[1:] for all_ in versions]
    if guess:
        tree["detectedLanguage"] = [guess for _ in texts]
    if any(flags):
        tree["flags"] = flags
    return {name: value[0] for name, value in tree.items()} if isinstance(body.q, str) else tree


def fill_document(document: Sequence[str | list[Answer]], rank: int, form: str) -> str:
    """A document whose texts have been replaced by their answers of a rank, or their last."""
    write = partial(html.escape, quote=False) if form == "html" else str
    return "".join(part if isinstance(part, str) else write(part[min(rank, len(part) - 1)].text) for part in document)


def libretranslate_routes(service: Service) -> APIRouter:
    """LibreTranslate's routes."""
    router = APIRouter(tags=["LibreTranslate"])
    pairs = [predictor.config.text.languages for predictor in service.speaking("libretranslate").values()]
    codes = list(dict.fromkeys(code for pair in pairs for code in pair))
    errors = problems(400, 401, 403, 404, 408, 413, 415, 429, 503)

    @router.post("/translate", responses={200: {"model": Translated}, **errors}, openapi_extra=document_body(Translate))
    async def translate(request: Request) -> JSONResponse:
        """Translate texts, given as JSON or as a form."""
        return JSONResponse(await translate_body(service, await read_body(request, Translate, service)))

    @router.post("/detect", responses={200: {"model": list[Guess]}, **errors}, openapi_extra=document_body(Detect))
    async def detect(request: Request) -> JSONResponse:
        """Guess the language of a text among those that are served."""
        body = await read_body(request, Detect, service)
        return JSONResponse(detect_language(service, body.q if isinstance(body.q, str) else "\n".join(body.q)))

    @router.get("/languages", responses={200: {"model": list[Language]}})
    async def languages() -> JSONResponse:
        """The languages, and which others each can be translated to."""
        targets = {code: list(dict.fromkeys(to for source, to in pairs if source == code)) for code in codes}
        return JSONResponse([{"code": code, "name": language_name(code), "targets": targets[code]} for code in codes])

    @router.get("/frontend/settings")
    async def settings() -> JSONResponse:
        """What a page in front of the server needs to know."""
        source, target = ({"code": code, "name": language_name(code)} for code in (pairs or [("auto", "")])[0])
        tree = {
            "apiKeys": bool(service.settings.keys),
            "charLimit": service.settings.max_characters,
            "filesTranslation": False,
            "frontendTimeout": 500,
            "keyRequired": bool(service.settings.keys),
            "language": {"source": source, "target": target},
            "suggestions": False,
            "supportedFilesFormat": [],
        }
        return JSONResponse(tree)

    return router
