"""A trained run as a function: text in, text out."""

import math
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from regard.config.config import Config, DecodeConfig
from regard.config.toml import changed
from regard.data.batching import Batch, Framed, framed, source_batch
from regard.data.vocabulary import BOS, EOS, Vocabulary, settled
from regard.errors import InputError, RunError
from regard.inference.constraints import Asked, Hypothesis, asked
from regard.inference.decoding import Tell, flow
from regard.nn.layers import settle
from regard.tasks.encoders import LABELS, Classifier, Reader, TextEncoder
from regard.tasks.models import AnyModel, Language, build
from regard.training.checkpoint import fill, load_config, load_tensors, load_vocabularies
from regard.training.device import choose, keep_memory


class Token(NamedTuple):
    """One token of an output and the log-probability the model gave it; the last is <eos>."""

    text: str
    logprob: float
    id: int


class Output(NamedTuple):
    """One answer: a text that was written, the name of a class, or a part of the context."""

    text: str
    score: float
    """What answers are ranked by: the log-probability, of a written text over the length penalty."""
    tokens: list[Token]
    """Of a text that was written; or the labels."""
    span: tuple[int, int] | None = None
    """Of an answer that is a part of the context: its place in there, in characters."""

    def tree(self) -> dict[str, Any]:
        """For machines."""
        found = {"text": self.text, "score": self.score, "tokens": [token._asdict() for token in self.tokens]}
        return found | ({"span": list(self.span)} if self.span else {})


EMPTY = Output("", 0.0, [])
"""The answer to an empty text."""
CELLS = 2**26
"""Probabilities that one step gives at most: hypotheses times the vocabulary, in 256 MB."""
Answered = tuple[int, list[Output]] | None
"""The place of a text and its answers; None: nothing yet, and a moment to do something else."""


class Predictor:
    """A model with its vocabularies and settings."""

    own = True
    """Whether our own engine writes, which sees every token's probability."""

    def __init__(self, model: AnyModel, config: Config, source: Vocabulary, target: Vocabulary | None) -> None:
        self.model, self.config = model.eval(), config
        self.source, self.target = source, target or source
        self.cut = 0  # texts that were shortened to what the model takes

    @overload
    def __call__(self, text: str) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, text: Sequence[str]) -> list[str]: ...
    def __call__(self, text: str | Sequence[str]) -> str | list[str]:
        """The best answer to a text, or to each of several."""
        if isinstance(text, str):
            return self([text])[0]
        return [answers[0].text for answers in self.predict(text)]

    def predict(
        self,
        texts: Iterable[str],
        *,
        best: int = 1,
        settings: DecodeConfig | None = None,
        prefixes: Sequence[str] | None = None,
        budget: int = 4096,
        first: int = 1,
        tell: Tell | None = None,
    ) -> list[list[Output]]:
        """The `best` answers to each text, best first. An empty text has the empty answer. `prefixes` are the texts
        that written answers must begin with; `budget` is how many source tokens are worked on at once; errors count
        texts from `first`; `tell` hears of every token that is written (see decode.py), while there is one text."""
        settings = settings or self.config.decode
        if best < 1 or isinstance(texts, str) or isinstance(prefixes, str):
            raise InputError(
                "predict wants several texts, a prefix for each if any, and at least one answer; call it with one text."
            )
        sources = self.encoded(texts, first=first)
        prefixes = prefixes or [""] * len(sources)
        if len(prefixes) != len(sources):
            raise InputError(f"{len(prefixes)} prefixes came for {len(sources)} texts; each text needs its own.")
        if any(prefixes) and isinstance(self.model, TextEncoder):
            raise InputError("this model does not write its answers: they cannot begin with a prefix.")
        begins = [self.beginning(*pair) for pair in zip(sources, prefixes, strict=True)] if any(prefixes) else []
        if max(map(len, begins), default=0) > self.config.text.max_length:
            raise InputError(f"a prefix has more than {self.config.text.max_length:,} tokens (text.max_length).")
        answers: list[list[Output]] = [[] for _ in sources]
        for place, found in filter(None, self.flow(sources, settings, best, begins=begins, tell=tell, budget=budget)):
            answers[place] = found
        return answers

    def flow(
        self,
        sources: Sequence[Framed],
        settings: DecodeConfig,
        best: int = 1,
        *,
        begins: Sequence[Sequence[int]] = (),
        tell: Tell | None = None,
        budget: int = 4096,
    ) -> Iterator[Answered]:
        """The place of each source, as `encode` gives them, and its answers, as soon as it has them; None whenever a
        step is done."""
        yield from ((place, [EMPTY]) for place, source in enumerate(sources) if not source.ids)
        order = sorted((i for i in range(len(sources)) if sources[i].ids), key=lambda i: len(sources[i].ids))
        rows = max(1, CELLS // (max(best, settings.beam) * self.target.size))
        for group in grouped(order, [one.ids for one in sources], budget, rows):
            chosen = [sources[i] for i in group]
            found: Iterable[Answered]
            match self.model:
                case Reader(answer="span"):
                    found = enumerate(self.pointed(chosen, best))
                case Classifier() | Reader():
                    found = enumerate(self.labelled(chosen, best))
                case TextEncoder():
                    raise InputError("an encoder gives vectors, no answers: use `regard embed`.")
                case _:
                    found = self.written(
                        chosen, settings, best, [begins[i] for i in group] if any(begins) else None, tell
                    )
            yield from (one and (group[one[0]], one[1]) for one in found)

    def stream(self, text: str, settings: DecodeConfig | None = None) -> Iterator[str]:
        """The answer to one text that is written without beams, piece by piece as it comes, never half a character."""
        settings = settings or self.config.decode
        if isinstance(self.model, TextEncoder):
            raise InputError("this model does not write: there is nothing to stream.")
        news: queue.Queue[int | None] = queue.Queue()
        prompt = self.encode(text).ids if isinstance(self.model, Language) else []

        def work() -> list[list[Output]]:
            try:
                return self.predict([text], settings=settings.model_copy(update={"beam": 1}), tell=hear)
            finally:
                news.put(None)

        def hear(sentence: int, token: int, logprob: float) -> bool:
            news.put(token)
            return gone

        ids: list[int] = []
        said, gone = 0, False
        with ThreadPoolExecutor(1, "stream", torch.set_num_threads, (torch.get_num_threads(),)) as pool:
            task = pool.submit(work)
            try:
                while (token := news.get()) is not None:
                    ids += [token] if token != EOS else []
                    written = self.target.continued(prompt, ids)
                    end = settled(written, self.target.composed)
                    if end > said:
                        yield written[said:end]
                        said = end
            finally:
                gone = True
            yield task.result()[0][0].text[said:]

    def encoded(self, texts: Iterable[str], what: str = "text", first: int = 1) -> list[Framed]:
        """Texts as the model reads them; those that are cut are counted. Errors count from `first`."""
        found = [self.encode(text, f"{what} {number}") for number, text in enumerate(texts, first)]
        self.cut += sum(one.length > self.config.text.max_length for one in found)
        return found

    def encode(self, text: str, where: str = "the text") -> Framed:
        """A text to predict as the model reads it; nothing for white space; too long is cut by setting, else an
        error. A prompt that is cut leaves half of the context to what is written."""
        if not isinstance(text, str):
            raise InputError(f"{where} is {type(text).__name__}, expected str.")
        if not text.strip():
            return Framed(text, [], [], 0)
        if isinstance(self.model, Reader) and not text.partition("\t")[2].strip():
            raise InputError(f"{where} has no context: a question, a tab and the context are wanted.")
        framed_ = framed([text], self.source, self.config.text, self.config.model)[0]
        most = self.config.text.max_length
        if framed_.length > most and self.config.text.longer != "cut":
            raise InputError(
                f"{where} has {framed_.length:,} tokens, this model takes at most {most:,}. Split it, or let it be cut "
                "with --set text.longer=cut."
            )
        if isinstance(self.model, Language) and framed_.length > most:
            ids, offsets, lead, keep = framed_.ids, framed_.offsets, framed_.ids[:1] == [BOS], most // 2
            kept = ids[:lead] + ids[lead:][-keep:], offsets[:lead] + offsets[lead:][-keep:]
            return Framed(framed_.text, *kept, framed_.length)
        return framed_

    def beginning(self, source: Framed, prefix: str) -> list[int]:
        """The ids of the text that an answer must begin with; a language model's goes on where its prompt ends."""
        if isinstance(self.model, Language):
            before, both = (self.source.encode(text).ids for text in (source.text, source.text + prefix))
            if both[: len(before)] == before:
                return both[len(before) :]
        return self.target.encode(prefix).ids

    def tensors(self, sources: Sequence[Framed]) -> tuple[Tensor, Tensor]:
        """Sources as a batch (batch, source) and their lengths, where the model is."""
        device = next(self.model.parameters()).device
        ids, lengths = source_batch([one.ids for one in sources])
        return ids.to(device), lengths.to(device)

    def written(
        self,
        sources: Sequence[Framed],
        settings: DecodeConfig,
        best: int,
        prefixes: Sequence[Sequence[int]] | None,
        tell: Tell | None = None,
    ) -> Iterator[Answered]:
        """The place of each source and its answers, decoded token by token, as soon as it is finished; None whenever a
        step is done."""
        assert not isinstance(self.model, TextEncoder)
        for one in flow(self.model, self.asked(sources, settings, prefixes), settings, best=best, tell=tell):
            yield one and (one[0], self.outputs(sources[one[0]], one[1]))

    def asked(
        self, sources: Sequence[Framed], settings: DecodeConfig, prefixes: Sequence[Sequence[int]] | None = None
    ) -> Asked:
        """Sources as a search takes them, with the limits of the settings and of the model."""
        ids, lengths = self.tensors(sources)
        most: int | Tensor | None = 2 * self.config.text.max_length
        if isinstance(self.model, Language):
            most = None if self.slides(settings) else (self.model.context - lengths).clamp(min=0)
        return asked(ids, lengths, settings, prefixes, most)

    def outputs(self, source: Framed, found: Sequence[Hypothesis]) -> list[Output]:
        """The answers that a search found to a source."""
        return [self.output(one, source.ids if isinstance(self.model, Language) else ()) for one in found]

    def slides(self, settings: DecodeConfig) -> bool:
        """Whether a language model goes on past its context."""
        positions = getattr(self.config.model, "positions", "none")
        if settings.slide and positions not in ("rotary", "linear"):
            raise InputError(
                f"this model's positions are {positions}: it cannot go on past its "
                f"context of {self.config.text.max_length:,} tokens. Only rotary and linear positions slide."
            )
        return settings.slide

    def labelled(self, sources: Sequence[Framed], best: int) -> list[list[Output]]:
        """Classes, likeliest first; of a text that may have several, all that are likelier than not, as one answer."""
        assert isinstance(self.model, Classifier | Reader)
        multiple = isinstance(self.model, Classifier) and self.model.multiple
        ids, lengths = self.tensors(sources)
        with torch.inference_mode():
            found = self.model.probabilities(Batch(ids, lengths, ids, ids)).cpu()
        out = []
        for row in found:
            order = row.argsort(descending=True, stable=True).tolist()
            sure = row.clamp(min=1e-30).log().tolist()
            tokens = [Token(self.target.token(i + LABELS), sure[i], i + LABELS) for i in order]
            if multiple:
                likely = [token for token in tokens if token.logprob > math.log(0.5)]
                separator = self.config.text.target.separator if self.config.text.target else ""
                text = separator.join(token.text for token in likely)
                whole = float(torch.maximum(row, 1 - row).log().sum())  # these labels, and none of the others
                out.append([Output(text, whole, tokens)])
            else:
                out.append([Output(token.text, token.logprob, [token]) for token in tokens[:best]])
        return out

    def pointed(self, sources: Sequence[Framed], best: int) -> list[list[Output]]:
        """Parts of the context, likeliest first, of at most `model.longest` tokens."""
        assert isinstance(self.model, Reader)
        ids, lengths = self.tensors(sources)
        with torch.inference_mode():
            logits = self.model(Batch(ids, lengths, ids, ids)).float().log_softmax(-1).cpu()
        out = []
        for source, both in zip(sources, logits, strict=True):
            starts, ends = both[:, : len(source.ids)]
            totals = starts[:, None] + ends
            visible = torch.tensor([not source.text[a:b].isspace() for a, b in source.offsets])
            near = torch.ones_like(totals, dtype=torch.bool).triu().tril(self.model.longest - 1)
            allowed = near & visible & visible[:, None]
            most = min(4 * best + 8, totals.numel())  # tokens may be the bytes of one character
            scores, places = totals.masked_fill(~allowed, -torch.inf).flatten().topk(most)
            found: dict[Any, Output] = {}
            for score, place in zip(scores.tolist(), places.tolist(), strict=True):
                if score > -1e30:  # what is not in the context is impossible
                    answer = part(source, place // len(ends), place % len(ends), score)
                    found.setdefault(answer.span, answer)
            answers = [answer for answer in found.values() if answer.text]
            out.append(answers[:best] or [Output("", math.log(1e-30), [], (0, 0))])  # only white space is left of it
        return out

    def output(self, hypothesis: Hypothesis, prompt: Sequence[int] = ()) -> Output:
        """A hypothesis as text; what a language model wrote goes on where its prompt ends."""
        ids = [*hypothesis.tokens, EOS]
        spelled = self.target.spelled
        tokens = [Token(spelled(i), logprob, i) for i, logprob in zip(ids, hypothesis.logprobs, strict=True)]
        return Output(self.target.continued(prompt, hypothesis.tokens), hypothesis.score, tokens)


def part(source: Framed, first: int, last: int, score: float) -> Output:
    """The part of a context from one token to another, without white space around it."""
    inside = source.text[source.offsets[first][0] : source.offsets[last][1]]
    start = source.offsets[first][0] + len(inside) - len(inside.lstrip())
    shift = source.text.index("\t") + 1
    return Output(inside.strip(), score, [], (start - shift, start - shift + len(inside.strip())))


def grouped(
    order: Sequence[int], sources: Sequence[Sequence[int]], budget: int, rows: int | None = None
) -> Iterator[list[int]]:
    """Indices, shortest source first, in groups whose padded size is within the budget, of at most so many rows."""
    group: list[int] = []
    for index in order:
        if group and (len(sources[index]) * (len(group) + 1) > budget or len(group) == rows):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def load(run: str | Path, changes: Iterable[str] = (), device: str = "auto") -> Predictor:
    """Open a run that `regard train` made; `changes` are settings as in `--set`."""
    keep_memory()
    folder = Path(run)
    config = changed(load_config(folder), changes)
    if (folder / "model.bin").exists():
        raise RunError(
            f"{folder} is a CTranslate2 model, for `predict` and `serve` with --engine ctranslate2. All else needs the "
            "run that it was exported from."
        )
    source, target = load_vocabularies(folder)
    with torch.random.fork_rng(devices=[]):  # who opens a run keeps their own random numbers
        model = build(config, source.size, target.size if target else None)
    path = folder / "model.safetensors"
    if not path.exists():
        raise RunError(f"{folder} has no model yet: training has not reached its first validation.")
    fill(model, load_tensors(path), path)
    model = model.to(choose(device))
    settle(model)
    return Predictor(model, config, source, target)
