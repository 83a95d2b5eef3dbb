"""OpenAI's protocol, as its clients speak it: POST /v1/completions, for runs that continue texts."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.responses import Response

from regard.data.vocabulary import EOS
from regard.errors import RegardError
from regard.inference.predictor import Predictor
from regard.server.bodies import JSONRoute
from regard.server.completions import Choice, CompletionBody, Finish, Part, Prompt, write_choices
from regard.server.schemas import COMPLETIONS, Failure, Responses, failure, problems
from regard.server.service import Service
from regard.server.settings import MISTAKE, RefusedError

log = logging.getLogger("regard.server")


def find_writer(service: Service, name: str | None) -> str:
    """The model that continues texts: the one that is named, or the first."""
    writers = service.speaking("openai")
    found = service.find(name or next(iter(writers), None))
    if found not in writers:
        verb = service.predictors[found].task.verb
        words = f"{found} does not continue texts: its task is to {verb}. Ask it with POST /v1/predict."
        raise RefusedError(400, words, "model")
    return found


def read_prompts(predictor: Predictor, body: CompletionBody) -> list[Prompt]:
    """What is to be continued, as ids; refused if it does not fit with what is to be written. Without any text, a
    document begins."""
    context, found = predictor.config.text.max_length, []
    for given in body.prompts():
        if isinstance(given, str):
            (source,) = predictor.task.encode([given])
            ids, count = source.ids, source.length
        else:
            if max(given, default=0) >= predictor.source.size:
                words = f"token {max(given)} is not in the vocabulary of {predictor.source.size:,}."
                raise RefusedError(400, words, "prompt")
            ids, count = given, len(given)
        slides = predictor.task.output_limit(count, predictor.config.decode) is None
        if count + body.max_tokens > context and not (slides and count <= context):
            words = (
                f"this model's maximum context length is {context:,} tokens, however you requested "
                f"{count + body.max_tokens:,} tokens ({count:,} in your prompt; {body.max_tokens:,} for the "
                "completion). Please reduce your prompt or completion length."
            )
            raise RefusedError(400, words, "prompt" if count >= context else "max_tokens", "context_length_exceeded")
        found.append(Prompt(given if isinstance(given, str) else predictor.source.decode(given), list(ids) or [EOS]))
    return found


def make_choices(service: Service, name: str, body: CompletionBody) -> list[Choice]:
    """What is to be written: every prompt as often as asked for, in the order of their numbers."""
    predictor = service.predictors[name]
    prompts = body.prompts()
    if len(prompts) * body.n > service.settings.max_items:
        words = f"{len(prompts):,} prompts, {body.n} times each, were asked for; at most {service.settings.max_items:,}"
        raise RefusedError(413, f"{words} choices are written at once. Split the request.", "n")
    service.check([prompt for prompt in prompts if isinstance(prompt, str)])
    found = read_prompts(predictor, body)
    service.metrics.tokens.labels("source").inc(sum(len(prompt.ids) for prompt in found))
    pairs = [(prompt, sample) for prompt in found for sample in range(body.n)]
    return [Choice(index, prompt, body, predictor, sample) for index, (prompt, sample) in enumerate(pairs)]


class Listing(BaseModel):
    """The tokens of a choice; `top_logprobs` is null if none were asked for, `token_logprobs` begins with null where
    nothing comes before."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class ChoiceAnswer(BaseModel):
    """One continuation."""

    text: str
    index: int
    logprobs: Listing | None
    finish_reason: Finish | None


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(BaseModel):
    """OpenAI's answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChoiceAnswer]
    usage: Usage | None = None


async def stream_parts(service: Service, name: str, wanted: list[Choice]) -> AsyncIterator[Part]:
    """What becomes certain of every choice, as it does. When nobody listens any more, they end."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Part | None]()
    for choice in wanted:
        choice.emit = lambda part: loop.call_soon_threadsafe(queue.put_nowait, part)
    predictor = service.predictors[name]
    work = service.batcher.submit((name, COMPLETIONS), lambda items: write_choices(predictor, items), wanted)
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: queue.put_nowait(None) if done.cancelled() or done.exception() else None)
    left = len(wanted)
    try:
        while left and (part := await queue.get()) is not None:
            left -= part.finish is not None
            yield part
        await task
    finally:
        for choice in wanted:
            choice.gone = True
        task.cancel()
        service.metrics.tokens.labels("output").inc(sum(len(choice.ids) for choice in wanted))


def make_choice(index: int, found: Sequence[Part], body: CompletionBody) -> dict[str, Any]:
    """A choice in an answer, or what is new of it."""
    tokens = [token for part in found for token in part.tokens]
    text = "".join(part.text for part in found)
    columns = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [token.top for token in tokens] if body.logprobs else None,
        "text_offset": [token.offset for token in tokens],
    }
    logprobs = None if body.logprobs is None else columns
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": found[-1].finish}


def count_usage(wanted: Sequence[Choice], body: CompletionBody) -> dict[str, int]:
    """Tokens read and written; a prompt counts once."""
    read, wrote = sum(len(one.prompt.ids) for one in wanted[:: body.n]), sum(len(one.ids) for one in wanted)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


async def stream_events(
    first: Part, rest: AsyncIterator[Part], head: dict[str, Any], wanted: list[Choice], body: CompletionBody
) -> AsyncIterator[str]:
    """Server-sent events: a chunk for each part, the usage if it is wanted, and the end."""

    def event(tree: dict[str, Any]) -> str:
        return f"data: {json.dumps(tree, ensure_ascii=False, allow_nan=False)}\n\n"

    counted = bool(body.stream_options and body.stream_options.include_usage)
    more = {"usage": None} if counted else {}
    try:
        yield event({**head, "choices": [make_choice(first.number, [first], body)], **more})
        async for part in rest:
            yield event({**head, "choices": [make_choice(part.number, [part], body)], **more})
        if counted:
            yield event({**head, "choices": [], "usage": count_usage(wanted, body)})
    except RefusedError as error:  # the status is out already: the client finds this in the stream
        yield event(failure(error))
    except RegardError as error:
        yield event(failure(RefusedError(400, str(error))))
    except Exception:
        log.exception("POST %s", COMPLETIONS)
        yield event(failure(MISTAKE))
    yield "data: [DONE]\n\n"


def openai_routes(service: Service, guarded: Sequence[Any]) -> APIRouter:
    """OpenAI's route."""
    router = APIRouter(tags=["OpenAI"], dependencies=list(guarded), route_class=JSONRoute)
    failures = problems(400, 401, 404, 408, 413, 415, 429, 503, form=Failure)
    answers: Responses = {200: {"model": CompletionAnswer, "content": {"text/event-stream": {}}}, **failures}

    @router.post(COMPLETIONS, responses=answers)
    async def completions(body: CompletionBody) -> Response:
        """Continue texts: all at once, or with `stream` as they are written."""
        name = find_writer(service, body.model)
        if body.seed is None:
            body = body.model_copy(update={"seed": secrets.randbits(32)})
        wanted = await asyncio.to_thread(make_choices, service, name, body)
        found = stream_parts(service, name, wanted)
        code = f"cmpl-{secrets.token_hex(12)}"
        head = {"id": code, "object": "text_completion", "created": int(time.time()), "model": name}
        if body.stream:
            first = await anext(found)  # what is refused is refused before the status is out
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            stream = stream_events(first, found, head, wanted, body)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        made: list[list[Part]] = [[] for _ in wanted]
        async for part in found:
            made[part.number].append(part)
        listing = [make_choice(index, some, body) for index, some in enumerate(made)]
        return JSONResponse({**head, "choices": listing, "usage": count_usage(wanted, body)})

    return router
