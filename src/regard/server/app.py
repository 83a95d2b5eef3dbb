"""The HTTP server: the page, its own API, and LibreTranslate's, over the runs it was given (docs/serve.md)."""

import contextlib
import gc
import html
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from regard.config.toml import freeze, merge, suggest
from regard.errors import ConfigError, RegardError
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.tasks.task import Answer
from regard.training.device import choose

try:
    from fastapi import APIRouter, Depends, FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse
    from prometheus_client import CONTENT_TYPE_LATEST
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    from regard.server import schemas
    from regard.server.bodies import JSONRoute
    from regard.server.completions import CompletionBody
    from regard.server.keys import require_bearer
    from regard.server.libretranslate import libretranslate_routes
    from regard.server.middleware import Middleware, Server, problem
    from regard.server.openai import openai_routes
    from regard.server.service import Service
    from regard.server.settings import RefusedError, ServeSettings
    from regard.server.workers import check_workers, open_sockets, share_metrics, supervise
except ModuleNotFoundError as error:
    if (error.name or "").startswith("regard"):
        raise
    raise ConfigError(f"serving needs {error.name}: pip install 'regard[serve]'.") from error

STUDIO = Path(__file__).parent / "studio"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def describe_model(name: str, predictor: Predictor, since: int) -> dict[str, Any]:
    """A model in /v1/models, served since a time."""
    config = predictor.config
    sides = zip(config.text.languages, ("source", "target"), strict=True)  # the languages of a run that names none
    source, target = (None if code == side else code for code, side in sides)
    return {
        "id": name,
        "object": "model",
        "created": since,
        "owned_by": "regard",
        "task": predictor.task.verb,
        "kind": config.model.kind,
        "source": source,
        "target": target,
        "about": config.about,
        "max_length": config.text.max_length,
        "decode": config.decode.model_dump(),
        "form": predictor.task.form._asdict(),
    }


def describe_answer(answer: Answer, logprobs: bool) -> dict[str, Any]:
    """An answer in /v1/predict, with the details that its task's answers have."""
    tokens = [{"text": token.text, "logprob": token.logprob if logprobs else None} for token in answer.tokens]
    return {**answer.tree(), "tokens": tokens, "flags": list(answer.flags)}


def own_routes(service: Service, guarded: Sequence[Any]) -> APIRouter:
    """The API of regard itself."""
    errors = schemas.problems(401, 408, 413, 415)
    router = APIRouter(tags=["regard"], dependencies=list(guarded), responses=errors, route_class=JSONRoute)
    failures = schemas.problems(401, 408, 413, 415, form=schemas.Failure)
    missing = schemas.problems(404, form=schemas.Failure)
    problems = schemas.problems(400, 404, 422, 429, 503)

    @router.get(schemas.MODELS, responses={200: {"model": schemas.ModelsAnswer}, **failures})
    async def models() -> JSONResponse:
        """The runs that are served, the default one first."""
        data = [describe_model(name, predictor, service.since) for name, predictor in service.predictors.items()]
        return JSONResponse({"object": "list", "data": data})

    @router.get(f"{schemas.MODELS}/{{model}}", responses={200: {"model": schemas.ModelAnswer}, **failures, **missing})
    async def model(model: str) -> JSONResponse:
        """One of the runs that are served."""
        name = service.find(model)
        return JSONResponse(describe_model(name, service.predictors[name], service.since))

    answered = {200: {"model": schemas.PredictAnswer}, **problems}

    @router.post(schemas.PREDICT, responses=answered, openapi_extra=schemas.FORM)
    async def predict(body: schemas.PredictBody) -> JSONResponse:
        """Answer one text or several, or an image, with scores, token log-probabilities and what is suspicious."""
        name = service.find(body.model)
        predictor = service.predictors[name]
        service.check(body.texts or ())
        asked = [body.given()] if body.texts is None else [{"text": text} for text in body.texts]
        sources = [predictor.task.make_source(one) for one in asked]
        service.check(sources)
        await service.check_images(predictor, sources)
        settings = schemas.decode_settings(predictor, body.settings)
        found = await service.answers(name, sources, body.best, settings, logprobs=body.logprobs)
        trees = [[describe_answer(answer, body.logprobs) for answer in answers] for answers in found]
        return JSONResponse({"model": name, "answers": trees})

    @router.post(schemas.LOOK, responses=problems, openapi_extra=schemas.FORM)
    async def look(body: schemas.LookBody) -> Response:
        """Answer one text or image and give the attention behind it (docs/maps.md)."""
        name = service.find(body.model)
        predictor = service.predictors[name]
        source = predictor.task.make_source(body.given())
        service.check([source, body.target or ""])
        await service.check_images(predictor, [source])
        settings = schemas.decode_settings(predictor, body.settings)
        options = {"packed": body.packed, "full": body.full, "vectors": body.vectors}
        found = await service.look(name, source, body.best, settings, options, body.target)
        return Response(found, media_type="application/json")

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(service.metrics.write(), media_type=CONTENT_TYPE_LATEST)

    return router


def page_routes(service: Service) -> APIRouter:
    """The page, its files, and what a person or a monitor asks first. Only files that are there at the start exist."""
    router = APIRouter(tags=["page"])
    files = {path.name: path.read_bytes() for path in STUDIO.glob("*") if path.suffix in KINDS}

    @router.get("/studio/{name}", include_in_schema=False)
    async def studio(name: str) -> Response:
        if name not in files:
            raise RefusedError(404, f"there is no page file {name[:100]!r}.")
        return Response(files[name], media_type=KINDS[Path(name).suffix], headers={"Cache-Control": "no-cache"})

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return await studio("index.html")

    @router.get("/health", responses=schemas.problems(503))
    async def health() -> JSONResponse:
        """Whether requests are taken, and the model answers."""
        if service.batcher.closing:
            raise RefusedError(503, "the server is stopping.")
        if problem := service.batcher.problem():
            raise RefusedError(503, problem)
        return JSONResponse({"status": "ok"})

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return Response(make_documentation(request.app.openapi()), media_type=KINDS[".html"])

    return router


def make_documentation(schema: dict[str, Any]) -> str:
    """OpenAPI as a page that needs nothing from elsewhere."""
    rows = [
        f"<tr><td>{method.upper()}<td><code>{path}</code><td>{html.escape(operation.get('description', ''))}"
        f"<td>{' '.join(operation['responses'])}"
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{schema['info']['title']}</title>"
        f"<h1>{schema['info']['title']}</h1><p>All fields: <a href=/openapi.json>/openapi.json</a> (OpenAPI)."
        f"<table><tr><th>Method<th>Path<th>What<th>Statuses{''.join(rows)}</table></html>"
    )


def make_app(predictors: Mapping[str, Predictor], settings: ServeSettings | None = None) -> FastAPI:
    """The whole server as an ASGI application; `app.state.service` is what it serves."""
    service = Service(predictors, settings or ServeSettings())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.batcher:
            yield

    app = FastAPI(title="regard", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.service = service
    guarded = [Depends(require_bearer(service.settings.keys))] if service.settings.keys else []
    own, openai = own_routes(service, guarded), openai_routes(service, guarded)
    for router in (own, openai, libretranslate_routes(service), page_routes(service)):
        app.include_router(router)
    app.add_middleware(Middleware, service=service)
    answer_errors(app)
    return app


def answer_errors(app: FastAPI) -> None:
    """Every error as JSON, in words."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong, path = error.errors(), request.url.path
        if path != schemas.COMPLETIONS:
            known = schemas.LookBody if path == schemas.LOOK else schemas.PredictBody
            return problem(RefusedError(*schemas.explain_problems(wrong, known)))
        place = [str(part) for part in wrong[0]["loc"] if part != "body"]
        _, words = schemas.explain_problems(wrong, CompletionBody)
        return problem(RefusedError(400, words, place[0] if place else None), path)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        headers, path = dict(error.headers or {}), request.url.path[:100]
        words = {
            400: "the body cannot be read: it is no UTF-8, nested too deeply, or has a number that is too long.",
            404: f"nothing is at {path}; /docs lists what is.",
            405: f"{request.method} is not possible at {path}, only {headers.get('Allow')}.",
        }
        return problem(RefusedError(error.status_code, words.get(error.status_code, str(error.detail))), path, headers)

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return problem(error, request.url.path)

    @app.exception_handler(RegardError)
    async def unfit(request: Request, error: RegardError) -> Response:
        return problem(RefusedError(400, str(error)), request.url.path)


def read_settings(changes: Iterable[str]) -> tuple[ServeSettings, list[str]]:
    """Changes as in `--set`: those that begin with `serve.` make the server's settings, the others are the runs'."""
    changes = list(changes)
    own = [change.removeprefix("serve.") for change in changes if change.startswith("serve.")]
    try:
        settings = ServeSettings.model_validate(freeze(merge({}, own)))
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "extra_forbidden":
            hint = suggest(name, ServeSettings.model_fields, "serve")
            raise ConfigError(f"unknown setting serve.{name}.{hint}") from error
        came = "" if wrong["loc"][:1] == ("keys",) else f" is {wrong['input']!r}"  # no secrets in messages
        raise ConfigError(f"setting serve.{name}{came}: {wrong['msg'].removeprefix('Value error, ')}.") from error
    return settings, [change for change in changes if not change.startswith("serve.")]


def open_runs(
    runs: Sequence[Path], changes: Iterable[str], device: str, engine: str = "auto", threads: int | None = None
) -> dict[str, Predictor]:
    """Runs by the names of their directories, to be decoded by an engine."""
    changes, found = list(changes), {}
    for run in runs:
        name = run.resolve().name
        if name in found:
            raise ConfigError(f"two runs are named {name}, and a model is asked for by name. Rename one directory.")
        found[name] = load(run, changes, device, engine, threads)
    return found


def allow_connections() -> None:
    """Raise the number of files, which connections are, that this process may open, as far as the system lets it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(
    runs: Sequence[Path],
    settings: ServeSettings,
    changes: Iterable[str] = (),
    device: str = "auto",
    engine: str = "auto",
) -> None:
    """Serve runs until SIGTERM or Ctrl-C; what was accepted by then is finished first."""
    if not runs:
        raise ConfigError("give at least one run to serve, as in `regard serve runs/n`.")
    check_workers(settings.workers, str(choose(device)))
    threads = settings.threads or max(1, torch.get_num_threads() // settings.workers)
    torch.set_num_threads(1)  # here; a second team of threads beside the model's would slow it to a third
    predictors = open_runs(runs, changes, device, engine, threads)
    settings = settings.model_copy(update={"threads": threads})
    gc.freeze()  # what is there now stays: collections need not look at it, nor touch memory that processes share
    allow_connections()
    sockets = open_sockets(settings.host, settings.port, settings.workers)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    names, parent = ", ".join(predictors), os.getpid()

    def begun() -> None:
        print(f"serving {names} at http://{host}:{sockets[0].getsockname()[1]} (API: /docs). Ctrl-C stops.", flush=True)

    def work(listener: socket.socket, beat: Callable[[], None]) -> None:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by connections: no wait of 40 ms
        app = make_app(predictors, settings)
        Server(app, app.state.service, parent if settings.workers > 1 else None, beat).run(sockets=[listener])

    if settings.workers == 1:
        begun()
        work(sockets[0], lambda: None)
        return
    with share_metrics():
        supervise(sockets, work, begun)
