"""What clients of /v1 send and get, and how every error looks: the words of the OpenAPI document."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from regard.config.run import DecodeConfig
from regard.config.settings import Settings
from regard.config.toml import suggest
from regard.inference.predictor import Predictor
from regard.server.settings import RefusedError

MOST = 20
"""Answers that may be asked for."""
BOUNDS: dict[str, dict[str, float]] = {
    "beam_size": {"le": 64},
    "length_penalty": {"le": 10},
    "max_ratio": {"le": 10},
    "max_extra": {"le": 1000},
    "no_repeat_ngram": {"le": 32},
    "min_length": {"le": 1000},
    "temperature": {"ge": 0.01, "le": 100},
}
"""How far a client may go, beside the bounds that the settings have themselves."""


class Problem(BaseModel):
    """What went wrong, and what to do."""

    error: str


Responses = dict[int | str, dict[str, Any]]
STATUSES = {
    400: "The request makes no sense, or the model cannot take the text.",
    401: "An API key is needed.",
    403: "The API key is not known.",
    404: "There is no such thing.",
    408: "The request came too slowly.",
    413: "The request is larger than the limits.",
    415: "The body is compressed, or the image is of a format that is not read.",
    422: "A field is missing, unknown or of the wrong kind, or the image is damaged.",
    429: "Too many texts wait already.",
    503: "The server is stopping, or busy.",
}
COMPLETIONS, MODELS = OPENAI = "/v1/completions", "/v1/models"
"""OpenAI's paths, whose errors have OpenAI's form."""
UPLOADS = PREDICT, LOOK = "/v1/predict", "/v1/look"
"""Paths that take images."""


class Failing(BaseModel):
    """An error as OpenAI describes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """What went wrong, and what to do, in OpenAI's form."""

    error: Failing


def problems(*statuses: int, form: type[BaseModel] = Problem) -> Responses:
    """The errors that a route may answer with, for OpenAPI."""
    return {status: {"model": form, "description": STATUSES[status]} for status in statuses}


def failure(error: RefusedError) -> dict[str, Any]:
    """An error as OpenAI words it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    codes = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = error.code or codes.get(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def refuse_surrogates(text: str) -> str:
    """Refuse half characters: JSON can spell them, and no answer could repeat them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at {error.start} is no character. Send valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(refuse_surrogates)]
Item = TypeVar("Item")
Some = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: one error is told, and a million would not fit into memory."""
Texts = Annotated[Some[Text], Field(min_length=1)]


def read_base64(image: Any) -> Any:
    """The bytes of an image that JSON holds in base64, as they are or in a data URI."""
    if isinstance(image, str):
        try:
            image = base64.b64decode(image.partition(";base64,")[2] or image, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError("not base64. Send the bytes of an image's file, never its path") from error
    if image == b"":
        raise ValueError("empty (0 bytes), expected the bytes of an image's file")
    return image


Upload = Annotated[bytes, BeforeValidator(read_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})]


class Body(Settings):
    """What a client sends."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def one_unknown(cls, tree: Any) -> Any:
        """Leave one of the fields that are unknown: each would be an error, and one is told."""
        if not isinstance(tree, dict):
            return tree
        unknown = next((name for name in tree if name not in cls.model_fields), None)
        return {name: value for name, value in tree.items() if name in cls.model_fields or name == unknown}


AskedSettings = create_model(
    "AskedSettings",
    __base__=Body,
    __doc__="Decoding settings that differ from the run's own.",
    **{
        name: (Annotated[field.annotation, *field.metadata, Field(**BOUNDS.get(name, {}))] | None, None)  # type: ignore
        for name, field in DecodeConfig.model_fields.items()
        if name != "quantization"  # the model was converted when it was opened
    },
)


OTHERS = "or question and context, to a model that answers; or an image, to one that reads images"


class Asking(Body):
    """A text, a question and the context that holds the answer, or an image: /v1/models says what a model is asked
    with."""

    model: str | None = None
    """A name of /v1/models; the first by default."""
    best: Annotated[int, Field(ge=1, le=MOST)] = 1
    """Answers wanted."""
    settings: AskedSettings | None = None  # type: ignore[valid-type]
    text: Text | None = None
    question: Text | None = None
    context: Text | None = None
    image: Upload | None = None
    """The bytes of an image's file, in base64; or send a form (multipart/form-data) with the file itself."""

    def given(self) -> dict[str, Any]:
        """What is asked with, by the names of its fields."""
        if (self.question is None) != (self.context is None):
            raise ValueError("question and context belong together: give both")
        names = ("text", "question", "context", "image")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class PredictBody(Asking):
    """One text or several, a question and its context, or an image."""

    texts: Texts | None = None
    logprobs: bool = True
    """Whether tokens come with their log-probabilities, which may take one more pass of the model."""

    @model_validator(mode="after")
    def one_of_them(self) -> "PredictBody":
        if bool(self.given()) == (self.texts is not None) or (self.text is not None and self.question is not None):
            raise ValueError(f"give either text or texts ({OTHERS})")
        return self


class LookBody(Asking):
    """A text, and which of its maps are wanted in full."""

    target: Text | None = None
    """An answer to look at instead of the model's own; for models that write."""
    full: Some[str] | None = None
    """Names of maps that are given as far as there is room, not only as pictures; null: all."""
    vectors: Annotated[Some[str], Field(default_factory=list)]
    """Names of maps whose queries, keys and values are wanted."""
    packed: bool = True
    """Whether weights come as base64 of bytes, or as numbers."""

    @model_validator(mode="after")
    def one_text(self) -> "LookBody":
        if not self.given() or (self.text is not None and self.question is not None):
            raise ValueError(f"give text ({OTHERS})")
        return self


FORM: dict[str, Any] = {
    "requestBody": {
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {"image": {"type": "string", "format": "binary"}, "model": {"type": "string"}},
                }
            }
        }
    }
}
"""A form that holds the file of an image, and any other field of the JSON object as JSON, for OpenAPI."""


def decode_settings(predictor: Predictor, asked: Any) -> DecodeConfig:
    """A run's decoding settings with those that a client asks for."""
    return predictor.config.decode.model_copy(update=asked.model_dump(exclude_none=True) if asked else {})


def explain_problems(problems: Sequence[Any], known: type[Body]) -> tuple[int, str]:
    """What is wrong with a body: the status, and the first problem in words; `known` has the fields it may have."""
    wrong = problems[0]
    place = ".".join(str(part) for part in wrong["loc"] if part != "body")
    if place.startswith("prompt."):
        return 422, "prompt must be a text, a list of texts, a list of token ids, or a list of such lists."
    if place.startswith("stop."):
        return 422, "stop must be a text, or a list of at most 4 texts, none of them empty."
    match wrong["type"]:
        case "json_invalid":
            return 400, f"the body is not JSON: {wrong['ctx']['error']}."
        case "extra_forbidden":
            fields = AskedSettings.model_fields if "settings" in wrong["loc"] else known.model_fields
            return 422, f"unknown field {place[:100]}.{suggest(str(wrong['loc'][-1])[:100], fields)}"
        case "model_attributes_type":
            form = " An image may also come as the file of a form." if "image" in known.model_fields else ""
            return 422, f"{place or 'the body'} must be a JSON object, sent with Content-Type: application/json.{form}"
        case "missing":
            return 422, f"field {place} is missing." if place else "there is no body: send a JSON object."
        case "value_error":
            return 422, f"{place}{': ' if place else ''}{wrong['ctx']['error']}."
    return 422, f"{place[:100] or 'the body'}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}."


class TokenAnswer(BaseModel):
    """One token of an output, as the vocabulary writes it; the last is <eos>."""

    text: str
    logprob: float | None


class TextAnswer(BaseModel):
    """One answer to a text, and what is suspicious about it; some tasks add details of their own."""

    model_config = ConfigDict(extra="allow")

    text: str
    score: float
    tokens: list[TokenAnswer]
    flags: list[str]
    probability: float | None = None
    """Of an answer that was chosen, not written."""
    span: tuple[int, int] | None = None
    """Of an answer that is a part of the context: its first character in there, and the one after its last."""


class PredictAnswer(BaseModel):
    """The answers to every text, best first."""

    model: str
    answers: list[list[TextAnswer]]


class ModelAnswer(BaseModel):
    """One model; its languages are null if its run names none."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str
    task: str
    """What it does: translate, continue, classify, answer, tag, embed, or what a task of your own says."""
    source: str | None
    target: str | None
    about: str
    max_length: int
    decode: DecodeConfig
    form: dict[str, Any]
    """How it is asked and shown (docs/serve.md)."""


class ModelsAnswer(BaseModel):
    """The models, the default one first."""

    object: Literal["list"]
    data: list[ModelAnswer]
