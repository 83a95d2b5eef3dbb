"""What clients of /v1 send and get, and how every error looks: the words of the OpenAPI document."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from regard.config import DecodeConfig, Settings
from regard.predict import Predictor
from regard.toml import suggestion

MOST = 20
"""Answers that may be asked for."""
BOUNDS: dict[str, dict[str, float]] = {
    "beam": {"le": 64},
    "length_penalty": {"le": 10},
    "max_ratio": {"le": 10},
    "max_extra": {"le": 1000},
    "no_repeat": {"le": 32},
    "temperature": {"ge": 0.01, "le": 100},
    "top_k": {"le": 2**31 - 1},
}
"""How far a client may go, beside the bounds that the settings have themselves."""

# --- errors ----------------------------------------------------------------------------------------------------------


class Problem(BaseModel):
    """What went wrong, and what to do."""

    error: str


Responses = dict[int | str, dict[str, Any]]
PROBLEMS: Responses = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The request makes no sense, or the model cannot take the text.",
        401: "An API key is needed.",
        404: "There is no such thing.",
        408: "The request came too slowly.",
        413: "The request is larger than the limits.",
        422: "A field is missing, unknown or of the wrong kind.",
        429: "Too many texts wait already.",
        503: "The server is stopping, or busy.",
    }.items()
}
WRONG_KEY: Responses = {403: {"model": Problem, "description": "The API key is not known."}}

# --- requests --------------------------------------------------------------------------------------------------------


def whole(text: str) -> str:
    """Refuse half characters: JSON can spell them, and no answer could repeat them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at {error.start} is no character. Send valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(whole)]


class Body(Settings):
    """What a client sends."""

    model_config = ConfigDict(allow_inf_nan=False)


Asked = create_model(
    "Asked",
    __base__=Body,
    __doc__="Decoding settings that differ from the run's own.",
    **{
        name: (Annotated[field.annotation, *field.metadata, Field(**BOUNDS.get(name, {}))] | None, None)  # type: ignore
        for name, field in DecodeConfig.model_fields.items()
    },
)


class Question(Body):
    """What predicting and looking have in common."""

    model: str | None = None
    """A name of /v1/models; the first by default."""
    best: Annotated[int, Field(ge=1, le=MOST)] = 1
    """Answers wanted."""
    settings: Asked | None = None  # type: ignore[valid-type]


class PredictBody(Question):
    """One text or several."""

    text: Text | None = None
    texts: Annotated[list[Text], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def one_of_both(self) -> "PredictBody":
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either text or texts")
        return self


class LookBody(Question):
    """A text, and which of its maps are wanted in full."""

    text: Text
    full: list[str] | None = None
    """Names of maps that are not reduced in size; null: all."""
    vectors: Annotated[list[str], Field(default_factory=list)]
    """Names of maps whose queries, keys and values are wanted."""
    packed: bool = True
    """Whether weights come as base64 of bytes, or as numbers."""


def decoding(predictor: Predictor, asked: Any) -> DecodeConfig:
    """A run's decoding settings with those that a client asks for."""
    return predictor.config.decode.model_copy(update=asked.model_dump(exclude_none=True) if asked else {})


def complaint(problems: Sequence[Any]) -> tuple[int, str]:
    """What is wrong with a body: the status, and the first problem in words."""
    wrong = problems[0]
    place = ".".join(str(part) for part in wrong["loc"] if part != "body")
    match wrong["type"]:
        case "json_invalid":
            return 400, f"the body is not JSON: {wrong['ctx']['error']}."
        case "extra_forbidden":
            fields = Asked.model_fields if "settings" in wrong["loc"] else {**PredictBody.model_fields, "full": 0}
            return 422, f"unknown field {place[:100]}.{suggestion(str(wrong['loc'][-1])[:100], fields)}"
        case "model_attributes_type":
            return 422, f"{place or 'the body'} must be a JSON object, sent with Content-Type: application/json."
        case "missing":
            return 422, f"field {place or 'body'} is missing."
        case "value_error":
            return 422, f"{place}{': ' if place else ''}{wrong['ctx']['error']}."
    return 422, f"{place[:100] or 'the body'}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}."


# --- answers ---------------------------------------------------------------------------------------------------------


class TokenAnswer(BaseModel):
    """One token of an output, as the vocabulary writes it; the last is <eos>."""

    text: str
    logprob: float


class TextAnswer(BaseModel):
    """One answer to a text, and what is suspicious about it."""

    text: str
    score: float
    tokens: list[TokenAnswer]
    flags: list[str]


class PredictAnswer(BaseModel):
    """The answers to every text, best first."""

    model: str
    answers: list[list[TextAnswer]]


class ModelAnswer(BaseModel):
    """One model; its languages are null if its run names none."""

    id: str
    kind: str
    source: str | None
    target: str | None
    about: str
    max_length: int
    decode: DecodeConfig


class ModelsAnswer(BaseModel):
    """The models, the default one first."""

    object: Literal["list"]
    data: list[ModelAnswer]
