"""A trained run as a function: text in, text out."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

from regard.batch import source_batch
from regard.checkpoint import fill, load_config, load_tensors, load_vocabularies
from regard.config import Config, DecodeConfig
from regard.decode import Hypothesis, decode
from regard.device import choose, keep_memory
from regard.errors import InputError, RunError
from regard.layers import settle
from regard.models import Seq2Seq, build
from regard.text import EOS, Vocabulary
from regard.toml import changed


class Token(NamedTuple):
    """One token of an output and the log-probability the model gave it; the last is <eos>."""

    text: str
    logprob: float
    id: int


class Output(NamedTuple):
    """One answer."""

    text: str
    score: float
    """What answers are ranked by: the log-probability over the length penalty."""
    tokens: list[Token]


class Predictor:
    """A model with its vocabularies and settings."""

    def __init__(self, model: Seq2Seq, config: Config, source: Vocabulary, target: Vocabulary | None) -> None:
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
        budget: int = 2048,
        first: int = 1,
    ) -> list[list[Output]]:
        """The `best` answers to each text, best first. An empty text has the empty answer. `prefixes` are the texts
        that the answers must begin with; `budget` is how many source tokens are decoded at once; errors count texts
        from `first`."""
        settings = settings or self.config.decode
        sources = [self.encode(text, f"text {number}") for number, text in enumerate(texts, first)]
        begins = [self.target.encode(prefix).ids for prefix in prefixes or [""] * len(sources)]
        if len(begins) != len(sources):
            raise InputError(f"{len(begins)} prefixes came for {len(sources)} texts; each text needs its own.")
        if max(map(len, begins), default=0) > self.config.text.max_length:
            raise InputError(f"a prefix has more than {self.config.text.max_length:,} tokens (text.max_length).")
        answers: list[list[Output]] = [[Output("", 0.0, [])] for _ in sources]
        order = sorted((i for i in range(len(sources)) if sources[i]), key=lambda i: len(sources[i]))
        for group in grouped(order, sources, budget // max(1, settings.beam // 2)):
            ids, lengths = source_batch([[*sources[i], EOS] for i in group])
            device = next(self.model.parameters()).device
            found = decode(
                self.model,
                ids.to(device),
                lengths.to(device),
                settings,
                best=best,
                prefixes=[begins[i] for i in group] if prefixes else None,
                most=2 * self.config.text.max_length,
            )
            for index, hypotheses in zip(group, found, strict=True):
                answers[index] = [self.output(hypothesis) for hypothesis in hypotheses]
        return answers

    def encode(self, text: str, where: str = "the text") -> list[int]:
        """The ids of a text to predict; nothing for white space; too long is cut by setting, else an error."""
        if not text.strip():
            return []
        ids = self.source.encode(text).ids
        most = self.config.text.max_length
        if len(ids) > most and self.config.text.longer != "cut":
            raise InputError(
                f"{where} has {len(ids):,} tokens, this model takes at most {most:,}. Split it, or let it be cut "
                "with --set text.longer=cut."
            )
        self.cut += len(ids) > most
        return ids[:most]

    def output(self, hypothesis: Hypothesis) -> Output:
        """A hypothesis as text."""
        ids = [*hypothesis.tokens, EOS]
        tokens = [Token(self.target.token(i), logprob, i) for i, logprob in zip(ids, hypothesis.logprobs, strict=True)]
        return Output(self.target.decode(hypothesis.tokens), hypothesis.score, tokens)


def grouped(order: Sequence[int], sources: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Indices, shortest source first, in groups whose padded size is within the budget."""
    group: list[int] = []
    for index in order:
        if group and (len(sources[index]) + 1) * (len(group) + 1) > budget:
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
    source, target = load_vocabularies(folder)
    model = build(config, source.size, target.size if target else None)
    path = folder / "model.safetensors"
    if not path.exists():
        raise RunError(f"{folder} has no model yet: training has not reached its first validation.")
    fill(model, load_tensors(path), path)
    settle(model)
    return Predictor(model.to(choose(device)), config, source, target)


def chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lines by the `size`, as they come."""
    iterator = iter(lines)
    while group := list(itertools.islice(iterator, size)):
        yield group
