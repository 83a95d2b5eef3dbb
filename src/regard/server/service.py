"""What the server does, apart from HTTP: models by name, what they are asked, and what they answer."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from regard.config.run import DecodeConfig
from regard.config.toml import suggest
from regard.data.examples import Image, Source
from regard.data.images.pixels import FormatError, PixelsError, open_image
from regard.errors import DataError, InputError
from regard.explain.look import Look, look_steps
from regard.inference.degeneration import flag_answers
from regard.inference.engine import Request
from regard.inference.predictor import Predictor
from regard.server.batcher import Batcher, Metrics
from regard.server.settings import RefusedError, ServeSettings
from regard.tasks.task import Answer

DIGITS = 9
"""Bytes that a weight takes as a number."""


class Service:
    """Models by name behind one queue."""

    def __init__(self, predictors: Mapping[str, Predictor], settings: ServeSettings) -> None:
        self.predictors, self.settings, self.metrics = dict(predictors), settings, Metrics()
        self.batcher = Batcher(settings, self.metrics)
        self.since = int(time.time())
        self.decoder = ThreadPoolExecutor(1)
        """Decodes images one by one, for each may need a hundred megabytes; also those of clients that have gone."""

    def speaking(self, protocol: str) -> dict[str, Predictor]:
        """The models that can be asked by another server's protocol."""
        return {name: one for name, one in self.predictors.items() if protocol in one.task.protocols}

    def find(self, name: str | None) -> str:
        """The name of a model; without one, the first."""
        known = list(self.predictors)
        if name is None:
            return known[0]
        if name not in self.predictors:
            served = ", ".join(known)
            raise RefusedError(404, f"no model is named {name[:100]!r}.{suggest(name[:100], known)} Served: {served}.")
        return name

    def check(self, texts: Sequence[Source]) -> None:
        """Refuse texts that are beyond the limits."""
        most, longest = self.settings.max_items, self.settings.max_characters
        if len(texts) > most:
            words = f"{len(texts):,} texts came, at most {most:,} are taken at once. Split the request."
            raise RefusedError(413, words)
        for number, length in enumerate((len(str(text)) for text in texts), 1):
            if length > longest:
                words = f"text {number} has {length:,} characters, at most {longest:,} are taken. Split it."
                raise RefusedError(413, words)

    def takes_images(self) -> bool:
        """Whether any model is asked with an image."""
        return any(field["name"] == "image" for one in self.predictors.values() for field in one.task.form.fields)

    async def check_images(self, predictor: Predictor, sources: Sequence[Source]) -> None:
        """Refuse images that are beyond the limits, or that cannot be decoded. The model finds the pixels of those that
        can be where its task keeps them."""
        for image in (source for source in sources if isinstance(source, Image)):
            if len(image.data) > self.settings.max_image:
                size = f"{len(image.data):,} bytes, at most {self.settings.max_image:,}"
                raise RefusedError(413, f"{image} has {size} are taken. Shrink it.")
            try:
                open_image(image.data, str(image), self.settings.max_pixels)
                decoded = asyncio.get_running_loop().run_in_executor(
                    self.decoder, predictor.task.check_source, image, str(image)
                )
                await decoded
            except (DataError, InputError) as error:
                statuses: dict[type, int] = {PixelsError: 413, FormatError: 415}
                kind = type(error.__cause__ if isinstance(error, InputError) else error)
                raise RefusedError(statuses.get(kind, 422), str(error)) from error

    async def answers(
        self, name: str, sources: Sequence[Source], best: int, settings: DecodeConfig, *, logprobs: bool = False
    ) -> list[list[Answer]]:
        """The `best` answers of a model to every source, with their flags."""
        predictor = self.predictors[name]
        request = Request(settings, best, logprobs=logprobs)
        key, items = (name, settings, best, logprobs), list(enumerate(sources, 1))
        return await self.batcher.submit(key, lambda items: self.answer_batch(predictor, items, request), items)

    def answer_batch(
        self, predictor: Predictor, items: list[tuple[int, Source]], request: Request
    ) -> Iterator[tuple[int, list[Answer] | InputError] | None]:
        """The place of every source and its answers, as they come, and None whenever a step is done; a source that the
        model cannot take gets its error, and the others do not notice."""
        places, sources = [], []
        for place, one in enumerate(predictor.encode_each([source for _, source in items])):
            if isinstance(one, InputError):
                yield place, InputError(str(one).replace(f"text {place + 1}", f"text {items[place][0]}", 1))
            else:
                places.append(place)
                sources.append(one)
        self.metrics.tokens.labels("source").inc(sum(source.length for source in sources))
        for found in predictor.answer(sources, request):
            if found is None:
                yield None
                continue
            number, outputs = found
            answers = flag_answers(predictor, sources[number], outputs, request.settings, retry=self.settings.retry)
            self.metrics.tokens.labels("output").inc(len(outputs[0].tokens))
            self.metrics.flagged.inc(bool(answers[0].flags))
            yield places[number], answers

    async def look(
        self, name: str, source: Source, best: int, settings: DecodeConfig, options: dict[str, Any], target: str | None
    ) -> bytes:
        """What a model looked at while it answered a source, or would have while it gave the answer `target`, as JSON;
        `options` are those of `Look.tree`. The search is made step by step, long maps one by one; they are bounded."""
        most = self.settings.max_look
        options = options | {"room": most if options["packed"] else most // DIGITS}

        def work(items: list[None]) -> Iterator[tuple[int, bytes | RefusedError] | None]:
            for found in look_steps(self.predictors[name], source, settings, best, target):
                if found is None:
                    yield None
                elif (size := measure_maps(found, options)) > most:
                    words = f"the maps of this text take {size:,} bytes, at most {most:,} are sent."
                    yield 0, RefusedError(413, f"{words} Look at a shorter text, or with `regard look`.")
                else:
                    yield from (None for one in found.maps if one.is_long and one.summary)  # made one by one
                    yield 0, json.dumps(found.tree(**options), allow_nan=False).encode()

        (found,) = await self.batcher.submit(object(), work, [None])
        return bytes(found)


def measure_maps(found: Look, options: Mapping[str, Any]) -> int:
    """Roughly how many bytes of JSON the maps of a look are, in the forms that they are sent in; no map is made for
    that. `options` are those of `Look.tree`."""
    packed = options["packed"]
    forms = found.plan(packed=packed, full=options["full"], room=options["room"])
    size = sum(one.measure(forms[name], packed) for name, one in found.outlines.items()) * (1 if packed else DIGITS)
    return size + sum(map(found.measure_vectors, options["vectors"]))
