"""A trained run as a function: text in, text out."""

import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from regard.config.run import DecodeConfig
from regard.data.encoding import Encoded
from regard.data.examples import Source
from regard.data.vocabulary import EOS, settled
from regard.errors import InputError
from regard.inference.engine import Engine, Request, TorchEngine
from regard.inference.sampling import OnToken
from regard.tasks.task import Answer, Answered, Task

EMPTY = Answer("", 0.0)
"""The answer to an empty text."""
CELLS = 2**26
"""Probabilities that one step gives at most: hypotheses times the vocabulary, in 256 MB."""


class Predictor:
    """A task, its model, the engine that decodes, and the run it was opened from, if any."""

    def __init__(self, task: Task, model: nn.Module, engine: Engine | None = None, run: Path | None = None) -> None:
        self.task, self.config, self.model, self.run = task, task.config, model.eval(), run
        self.source, self.target = task.vocabularies
        self.engine: Engine = engine or TorchEngine(task, model)
        self.longer = task.config.text.longer
        self.cut = 0  # texts that were shortened to what the model takes

    @overload
    def __call__(self, source: Source) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, source: Sequence[Source]) -> list[str]: ...
    def __call__(self, source: Any) -> str | list[str]:
        """The best answer to a source, or to each of several."""
        if isinstance(source, str) or hasattr(source, "_fields"):
            return self([source])[0]
        return [answers[0].text for answers in self.predict(source)]

    def predict(
        self,
        sources: Iterable[Source],
        *,
        best: int = 1,
        settings: DecodeConfig | None = None,
        prefixes: Sequence[str] | None = None,
        logprobs: bool = False,
        budget: int = 4096,
        first: int = 1,
        on_token: OnToken | None = None,
    ) -> list[list[Answer]]:
        """The `best` answers to each source, best first. An empty text has the empty answer. `prefixes` are the texts
        that written answers must begin with; `logprobs` asks for those of the tokens; `budget` is how many source
        tokens are worked on at once; errors count sources from `first`; `on_token` hears of every token that is
        written (see sampling.py), while there is one source."""
        if best < 1 or isinstance(sources, str) or isinstance(prefixes, str):
            raise InputError(
                "predict wants several texts, a prefix for each if any, and at least one answer; call it with one text."
            )
        encoded = self.encode(sources, first=first)
        prefixes = prefixes or [""] * len(encoded)
        if len(prefixes) != len(encoded):
            raise InputError(f"{len(prefixes)} prefixes came for {len(encoded)} texts; each text needs its own.")
        forced: list[list[int]] = []
        if any(prefixes):
            forced = [self.task.prefix_ids(*pair) for pair in zip(encoded, prefixes, strict=True)]
        if max(map(len, forced), default=0) > self.config.text.max_length:
            raise InputError(f"a prefix has more than {self.config.text.max_length:,} tokens (text.max_length).")
        request = Request(self.choose_settings(settings), best, forced, on_token, logprobs)
        answers: list[list[Answer]] = [[] for _ in encoded]
        for place, found in filter(None, self.answer(encoded, request, budget)):
            answers[place] = found
        return answers

    def answer(self, sources: Sequence[Encoded], request: Request, budget: int = 4096) -> Iterator[Answered]:
        """The place of each source, as `encode` gives them, and its answers, as soon as it has them; None whenever a
        step is done."""
        if not self.task.gives_answers:
            raise InputError("an encoder gives vectors, no answers: use `regard embed`.")
        yield from ((place, [EMPTY]) for place, source in enumerate(sources) if not source.ids)
        rows = max(1, CELLS // (max(request.best, request.settings.beam_size) * self.target.size))
        for group in group_by_length([one.ids for one in sources], budget * self.task.ids_per_token, rows):
            own = request._replace(prefixes=[request.prefixes[i] for i in group] if any(request.prefixes) else ())

            def generate(chosen: Sequence[Encoded], own: Request = own) -> Any:
                return self.engine.generate(chosen, own)

            for one in self.task.answer(self.model, [sources[i] for i in group], request.best, generate):
                yield one and (group[one[0]], one[1])

    def choose_settings(self, settings: DecodeConfig | None) -> DecodeConfig:
        """Those that were given, or else the run's own."""
        if settings is not None and not isinstance(settings, DecodeConfig):
            raise InputError(
                f"settings is {type(settings).__name__}, expected DecodeConfig: "
                "change the run's own with predictor.config.decode.model_copy(update={'beam_size': 1})."
            )
        return settings or self.config.decode

    def stream(self, source: Source, settings: DecodeConfig | None = None) -> Iterator[str]:
        """The answer to one source, written without beams, piece by piece as it comes, never half a character."""
        settings = self.choose_settings(settings)
        news: queue.Queue[int | None] = queue.Queue()
        (encoded,) = self.encode([source])
        before = self.task.continuation(encoded)

        def work() -> list[list[Answer]]:
            try:
                return self.predict([source], settings=settings.model_copy(update={"beam_size": 1}), on_token=hear)
            finally:
                news.put(None)

        def hear(sentence: int, token: int, logprob: float) -> bool:
            news.put(token)
            return gone

        ids: list[int] = []
        said, gone = 0, False
        with ThreadPoolExecutor(1, "stream", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
            job = pool.submit(work)
            try:
                while (token := news.get()) is not None:
                    ids += [token] if token != EOS else []
                    written = self.target.continued(before, ids)
                    end = settled(written, self.target.composed)
                    if end > said:
                        yield written[said:end]
                        said = end
            finally:
                gone = True
            yield job.result()[0][0].text[said:]

    def encode(self, sources: Iterable[Source], what: str = "text", first: int = 1) -> list[Encoded]:
        """Sources as the model reads them; those that are cut are counted. Errors count from `first`."""
        if isinstance(sources, str):
            raise InputError("several texts are wanted, as a list; one text alone came.")
        if not isinstance(sources, Iterable):
            raise InputError(f"a text or a list of texts is wanted, {type(sources).__name__} came.")
        found = self.encode_each(list(sources), what, first)
        for one in found:
            if isinstance(one, InputError):
                raise one
        return [one for one in found if not isinstance(one, InputError)]

    def encode_each(self, sources: Sequence[Source], what: str = "text", first: int = 1) -> list[Encoded | InputError]:
        """Sources as the model reads them, tokenized together, or what is wrong with each; nothing for white space.
        What is too long is cut by setting, else wrong."""
        found: list[Encoded | InputError] = []
        for number, source in enumerate(sources, first):
            try:
                self.task.check_source(source, f"{what} {number}")
                found.append(Encoded(source, str(source), [], [], 0))
            except InputError as error:
                found.append(error)
        places = [i for i, one in enumerate(found) if not isinstance(one, InputError) and one.source.strip()]
        most = self.config.text.max_length
        for place, encoded in zip(places, self.task.encode([sources[i] for i in places]), strict=True):
            found[place] = encoded
            if encoded.length > most and self.longer != "cut":
                found[place] = InputError(
                    f"{what} {place + first} has {encoded.length:,} tokens, this model takes at most {most:,}. Split "
                    "it, or let whoever runs the model cut it (text.longer=cut)."
                )
            self.cut += encoded.length > most and self.longer == "cut"
        return found


def group_by_length(rows: Sequence[Sequence[int]], budget: int, most: int | None = None) -> Iterator[list[int]]:
    """The indices of rows that are not empty, shortest first, in groups whose padded size is within the budget, of at
    most so many rows."""
    group: list[int] = []
    for index in sorted((i for i, row in enumerate(rows) if row), key=lambda i: len(rows[i])):
        if group and (len(rows[index]) * (len(group) + 1) > budget or len(group) == most):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
