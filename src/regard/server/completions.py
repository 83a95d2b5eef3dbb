"""Continuations while they are written, by the thread that owns the models: what may be sent, and when it ends.

Choices that wait are written together, whatever their settings: a row each. Text goes out when it is certain: never
half a character, nor the beginning of a stop.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import AfterValidator, ConfigDict, Field, model_validator
from torch import Tensor

from regard.data.batching import Batch, pad_sources
from regard.data.vocabulary import BOS, EOS, Vocabulary, settled
from regard.inference.constraints import Constraints, Sources
from regard.inference.predictor import Predictor, group_by_length
from regard.inference.sampling import generate_tokens, greedy, sampler
from regard.server.schemas import Body, Some, Text, Texts, refuse_surrogates

BUDGET = 16_384
"""Padded tokens of prompts that are read at once."""
Finish = Literal["stop", "length"]
Likely = list[tuple[int, float]]
"""The likeliest tokens in a place, by their ids, and their log-probabilities."""


def nullable(schema: dict[str, Any]) -> None:
    """In OpenAPI: every field may be null, which is as if it were left out."""
    schema["properties"] = {name: {"anyOf": [field, {"type": "null"}]} for name, field in schema["properties"].items()}


class StreamOptions(Body):
    """What a stream has beside its text."""

    include_usage: bool = False


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[Some[Token], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1), AfterValidator(refuse_surrogates)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class CompletionBody(Body):
    """OpenAI's request for continuations."""

    model_config = ConfigDict(json_schema_extra=nullable)
    model: str | None = None
    """A name of /v1/models; the first that continues texts by default."""
    prompt: Text | Texts | Tokens | Annotated[Some[Tokens], Field(min_length=1)] = ""
    """A text or several, or the ids of their tokens."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Choices for each prompt."""
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Only as many as n."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """How many of the likeliest tokens are listed in every place."""
    echo: bool = False
    """Whether the prompt is repeated before the continuation."""
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = Field(default_factory=list)
    """Texts that end a continuation; they are not in it."""
    seed: int | None = None
    """The same seed gives the same text again."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    suffix: str | None = None
    """Not supported."""
    logit_bias: dict[str, Any] | None = None
    """Not supported."""
    user: str | None = None
    """Ignored."""

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {name: value for name, value in tree.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def supported(self) -> "CompletionBody":
        for name in ("suffix", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out")
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of}, n is {self.n}: only equal numbers are supported")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text, or ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def stops(self) -> list[str]:
        """Texts that end a continuation."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def decode_settings(self) -> dict[str, Any]:
        """As decoding settings."""
        draws = self.temperature >= 1e-4  # below, nothing but the likeliest has a chance
        return {
            "sample": draws,
            "temperature": self.temperature if draws else 1.0,
            "top_k": None,
            "top_p": max(self.top_p, 1e-9) if self.top_p < 1 else None,
            "seed": (self.seed or 0) % 2**32,
        }


class Prompt(NamedTuple):
    """What is to be continued."""

    text: str
    ids: list[int]


class CompletionToken(NamedTuple):
    """A token, what was as likely, and where it begins in the text that is returned."""

    text: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


class Part(NamedTuple):
    """What has become certain of a choice: text, its tokens, and at the end why it ended."""

    number: int
    text: str
    tokens: list[CompletionToken]
    finish: Finish | None = None


class Choice:
    """One continuation while it is written, by the thread that owns the models."""

    def __init__(self, index: int, prompt: Prompt, body: CompletionBody, predictor: Predictor, sample: int) -> None:
        self.index, self.prompt, self.body, self.vocabulary = index, prompt, body, predictor.target
        self.settings = predictor.config.decode.model_copy(update=body.decode_settings())
        self.draw = sampler(self.settings, sample) if self.settings.sample else greedy
        self.emit: Callable[[Part], object] = lambda part: None
        self.ids, self.text, self.gone = list[int](), "", False
        self.start = len(prompt.text) if body.echo else 0
        self.tokens: list[CompletionToken] = []
        self.sent = self.told = 0
        self.likely: Likely = []
        self.finish: Finish | None = None

    def choose(self, logprobs: Tensor, step: int) -> int:
        """The next token, from logprobs (vocab,)."""
        if self.body.logprobs:
            values, ids = logprobs.topk(min(self.body.logprobs, len(logprobs)))
            self.likely = list(zip(ids.tolist(), values.tolist(), strict=True))
        once, often = self.body.presence_penalty, self.body.frequency_penalty
        if self.ids and (once or often):
            logprobs = logprobs.clone()
            for token, count in Counter(self.ids).items():
                logprobs[token] -= once + often * count
        return int(self.draw(logprobs[None], step))

    def hear(self, token: int, logprob: float) -> bool:
        """Take the next token; True if it was the last."""
        if self.gone or token == EOS:
            return self.end("stop")
        if self.body.logprobs is not None:
            before = [*self.prompt.ids[-8:], *self.ids[-8:]]
            offset = self.start + settled(self.text, self.vocabulary.composed)
            self.tokens.append(make_token(self.vocabulary, before, token, logprob, self.likely, offset))
        self.ids.append(token)
        self.text = self.vocabulary.continued(self.prompt.ids, self.ids)
        cuts = [place for stop in self.body.stops() if (place := self.text.find(stop)) >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
            self.tokens = [one for one in self.tokens if one.offset < self.start + len(self.text)]
            return self.end("stop")
        if len(self.ids) >= self.body.max_tokens:
            return self.end("length")
        sure = settled(self.text, self.vocabulary.composed)
        self.send(sure - held_back(self.text[:sure], self.body.stops()))
        return False

    def end(self, why: Finish) -> bool:
        """Send the rest, without half a character."""
        self.finish = why
        self.send(settled(self.text, False))
        return True

    def send(self, end: int) -> None:
        """Send the text up to a place, and the tokens that begin before it."""
        text, last = self.text[self.sent : end], len(self.tokens)
        while not self.finish and last > self.told and self.tokens[last - 1].offset >= self.start + end:
            last -= 1
        if text or self.finish:
            self.emit(Part(self.index, text, self.tokens[self.told : last], self.finish))
            self.sent, self.told = max(end, self.sent), last

    def begin(self, model: Any) -> None:
        """Send what is known before the first token: the prompt, if it is to be echoed."""
        if self.body.echo:
            tokens = score_prompt(model, self.prompt.ids, self.vocabulary, self.body.logprobs)
            self.emit(Part(self.index, self.prompt.text, tokens))
        if not self.body.max_tokens:
            self.end("length")


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop."""
    lengths = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def make_token(
    vocabulary: Vocabulary, before: list[int], token: int, logprob: float | None, likely: Likely, offset: int
) -> CompletionToken:
    """A token with the likeliest ones in its place, itself among them."""
    text = vocabulary.added(before, token)
    others = {vocabulary.added(before, i): value for i, value in likely if value > -torch.inf}
    top = {**others, text: logprob} if likely and logprob is not None else None
    return CompletionToken(text, logprob, top, offset)


@torch.inference_mode()
def score_prompt(model: Any, ids: list[int], vocabulary: Vocabulary, count: int | None) -> list[CompletionToken]:
    """The tokens of a prompt with their log-probabilities; the first has none, unless a special one is before it."""
    if count is None:
        return []
    row = torch.tensor([ids], device=next(model.parameters()).device)
    chances: list[float | None] = [None]
    tops: list[Likely] = [[]]
    states = model.hidden(Batch(row, row, row, row))[0]
    for start in range(0, len(ids) - 1, 256):  # some at a time: a vocabulary is wide
        wanted = row[0, start + 1 : start + 257]
        logprobs = model.output(states[start : start + len(wanted)]).float().log_softmax(-1)
        chances += logprobs.gather(1, wanted[:, None])[:, 0].tolist()
        values, best = logprobs.topk(min(count, logprobs.shape[1]))
        tops += [list(zip(*pair, strict=True)) for pair in zip(best.tolist(), values.tolist(), strict=True)]
    found, offset = [], 0
    for place, token in enumerate(ids):
        if place or token not in (BOS, EOS):
            before = ids[max(0, place - 8) : place]
            found.append(make_token(vocabulary, before, token, chances[place], tops[place], offset))
            offset += len(vocabulary.continued(before, [token]).replace("\ufffd", ""))
    return found


def write_choices(predictor: Predictor, choices: Sequence[Choice]) -> Iterator[tuple[int, BaseException | None] | None]:
    """Write choices with our own engine, which gives every row its own settings and shows every distribution; None
    whenever a step is done, then the place of each and what went wrong with it."""
    problem = None
    try:
        for choice in choices:
            choice.begin(predictor.model)
        open_ = [choice for choice in choices if not choice.finish]
        for group in group_by_length([choice.prompt.ids for choice in open_], BUDGET):
            yield from write_together(predictor, [open_[place] for place in group])
    except GeneratorExit:
        raise
    except BaseException as error:  # must not be tried again one by one, as others are: they have sent text
        problem = error
    yield from enumerate([problem] * len(choices))


def write_together(predictor: Predictor, choices: Sequence[Choice]) -> Iterator[None]:
    """Write choices as the rows of one batch, a step at a time."""
    device = next(predictor.model.parameters()).device
    ids, lengths = (part.to(device) for part in pad_sources([choice.prompt.ids for choice in choices]))
    longest = torch.tensor([choice.body.max_tokens for choice in choices], device=ids.device)
    sources = Sources(ids, lengths, Constraints(longest, torch.zeros_like(longest), ids[:, :0], int(longest.min()), 0))

    def choose(logprobs: Tensor, step: int) -> Tensor:
        rows = [choice for choice in choices if not choice.finish]
        found = [choice.choose(row, step) for choice, row in zip(rows, logprobs, strict=True)]
        return torch.tensor(found, device=ids.device)

    model: Any = predictor.model
    steps = generate_tokens(model, sources, choose, choices[0].settings, lambda row, *token: choices[row].hear(*token))
    yield from (None for _ in steps)
