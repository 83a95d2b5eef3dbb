"""Engines: what decodes the sources of a task that writes. This one is ours: torch, with a plain KV cache."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from regard.config.run import DecodeConfig
from regard.data.batching import pad_sources
from regard.data.encoding import Encoded
from regard.inference.beam_search import Found
from regard.inference.constraints import make_sources
from regard.inference.sampling import OnToken, generate
from regard.tasks.task import Task


class Request(NamedTuple):
    """How sources are to be decoded."""

    settings: DecodeConfig
    best: int = 1
    prefixes: Sequence[Sequence[int]] = ()  # what each output must begin with; none: they are free
    on_token: OnToken | None = None  # hears of every token while it is written
    logprobs: bool = False  # whether the log-probabilities of tokens are wanted


class Engine(Protocol):
    """Decodes."""

    def generate(self, sources: Sequence[Encoded], request: Request) -> Iterator[Found]:
        """The place of each source and its hypotheses, as soon as it is finished; None whenever a step is done."""
        ...


class TorchEngine:
    """Our own decoding: beam search, greedy search and sampling over any model with `start` and `step`."""

    def __init__(self, task: Task, model: Any) -> None:
        self.task, self.model = task, model

    def generate(self, sources: Sequence[Encoded], request: Request) -> Iterator[Found]:
        """As `Engine.generate`."""
        settings, device = request.settings, next(self.model.parameters()).device
        ids, lengths = (part.to(device) for part in pad_sources([one.ids for one in sources]))
        limits = [self.task.output_limit(len(one.ids), settings) for one in sources]
        most = None if None in limits else torch.tensor(limits, device=device)
        batch = make_sources(ids, lengths, settings, request.prefixes, most)
        return generate(self.model, batch, settings, best=request.best, on_token=request.on_token)
