"""What the server does, apart from HTTP: models by name, what they are asked, and what they answer."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regard.config.config import DecodeConfig
from regard.config.toml import suggestion
from regard.errors import InputError
from regard.explain.look import look
from regard.inference.degeneration import Answer, guarded
from regard.inference.predictor import Predictor
from regard.server.batcher import Batcher, Metrics, RefusedError, ServeSettings

TASKS = {
    "rnn": "translate",
    "transformer": "translate",
    "language": "continue",
    "classifier": "classify",
    "reader": "answer",
    "encoder": "embed",
}
"""What a kind of model does for a client."""


class Service:
    """Models by name behind one queue."""

    def __init__(self, predictors: Mapping[str, Predictor], settings: ServeSettings) -> None:
        self.predictors, self.settings, self.metrics = dict(predictors), settings, Metrics()
        self.batcher = Batcher(settings, self.metrics)
        self.since = int(time.time())

    def doing(self, task: str) -> dict[str, Predictor]:
        """The models that do one of TASKS."""
        return {name: one for name, one in self.predictors.items() if TASKS[one.config.model.kind] == task}

    def find(self, name: str | None) -> str:
        """The name of a model; without one, the first."""
        known = list(self.predictors)
        if name is None:
            return known[0]
        if name not in self.predictors:
            served = ", ".join(known)
            raise RefusedError(
                404, f"no model is named {name[:100]!r}.{suggestion(name[:100], known)} Served: {served}."
            )
        return name

    def check(self, texts: Sequence[str]) -> None:
        """Refuse texts that are beyond the limits."""
        most, longest = self.settings.max_items, self.settings.max_characters
        if len(texts) > most:
            raise RefusedError(
                413, f"{len(texts):,} texts came, at most {most:,} are taken at once. Split the request."
            )
        for number, text in enumerate(texts, 1):
            if len(text) > longest:
                raise RefusedError(
                    413, f"text {number} has {len(text):,} characters, at most {longest:,} are taken. Split it."
                )

    async def answers(
        self, name: str, texts: Sequence[str], best: int = 1, settings: DecodeConfig | None = None
    ) -> list[list[Answer]]:
        """The `best` answers of a model to every text, with their flags."""
        predictor = self.predictors[name]
        settings = settings or predictor.config.decode
        items = list(enumerate(texts, 1))
        return await self.batcher.submit(
            (name, settings, best), lambda items: self.decoded(predictor, items, settings, best), items
        )

    def decoded(
        self, predictor: Predictor, items: list[tuple[int, str]], settings: DecodeConfig, best: int
    ) -> Iterator[tuple[int, list[Answer] | InputError] | None]:
        """The place of every text and its answers, as they come, and None whenever a step is done; a text that the
        model cannot take gets its error, and the others do not notice."""
        places, sources = [], []
        for place, (number, text) in enumerate(items):
            try:
                sources.append(predictor.encode(text, f"text {number}"))
                places.append(place)
            except InputError as error:
                yield place, error
        self.metrics.tokens.labels("source").inc(sum(source.length for source in sources))
        for one in predictor.flow(sources, settings, best):
            if one is None:
                yield None
                continue
            number, outputs = one
            answers = guarded(predictor, sources[number], outputs, settings, retry=self.settings.retry)
            self.metrics.tokens.labels("output").inc(len(outputs[0].tokens))
            self.metrics.flagged.inc(bool(answers[0].flags))
            yield places[number], answers

    async def look(
        self,
        name: str,
        text: str,
        best: int,
        settings: DecodeConfig,
        options: dict[str, Any],
        target: str | None = None,
    ) -> bytes:
        """What a model looked at while it answered a text, or would have while it gave the answer `target`, as JSON;
        `options` are those of `Look.tree`."""

        def work(items: list[None]) -> Iterator[tuple[int, bytes]]:
            found = look(self.predictors[name], text, settings=settings, best=best, target=target)
            tree = found.tree(**options)
            yield 0, json.dumps(tree, allow_nan=False).encode()

        (found,) = await self.batcher.submit(object(), work, [None])
        return bytes(found)
