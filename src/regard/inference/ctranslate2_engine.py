"""A predictor that decodes with CTranslate2.

The numbers are the model's own, the search is CTranslate2's: it is asked for every hypothesis it finds, and these are
ranked as decode.py ranks them (docs/engine.md says what can differ).
"""

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.config.config import DecodeConfig, LanguageConfig
from regard.config.toml import changed
from regard.data.batching import Framed
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL
from regard.errors import ConfigError, InputError, RunError
from regard.inference import predictor as predict
from regard.inference.constraints import Hypothesis, longest, penalty
from regard.inference.ctranslate2_model import library, names, write
from regard.inference.decoding import Tell
from regard.inference.predictor import Answered, Predictor
from regard.tasks.models import Language, Transformer
from regard.training.checkpoint import load_config, load_vocabularies
from regard.training.device import choose

ENGINES = ("regard", "ctranslate2")
DAY = 24 * 3600.0
PATIENCE = 2.0
"""How many hypotheses must have ended before CTranslate2 stops, as a multiple of the beam."""


class Row(NamedTuple):
    """One answer to search for."""

    source: list[int]
    """What is read; of a language model, the prompt and what the answer must begin with."""
    begin: list[int]
    """What the decoder must begin with."""
    lead: list[int]
    """What comes before all that is decoded."""
    most: int
    """Tokens that are decoded at most."""


class Found(NamedTuple):
    """A hypothesis as CTranslate2 gave it."""

    tokens: list[int]
    ended: bool
    """Whether <eos> came; if not, the limit did."""
    total: float
    """Its log-probability as CTranslate2 adds it up: without a prefix, and renormalized where tokens are forbidden."""
    logprobs: list[float] | None = None
    """Of every token and of <eos>, where they were heard."""


class Absent(nn.Module):
    """Stands for a model whose weights only CTranslate2 has."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        what = "a CTranslate2 model, which answers but cannot be looked into"
        raise InputError(f"this folder holds {what}. Use the run that it was exported from.")


class AbsentTransformer(Absent, Transformer):
    """An encoder-decoder."""


class AbsentLanguage(Absent, Language):
    """A decoder alone."""


class Fast(Predictor):
    """A predictor whose answers CTranslate2 decodes."""

    own = False

    def __init__(self, like: Predictor, folder: Path, device: str = "cpu", threads: int = 1) -> None:
        """`folder` holds the model and is read again later: it must stay. Several threads work on several texts."""
        super().__init__(like.model, like.config, like.source, like.target)
        self.folder, self.device, self.threads = folder, device, threads
        self.alone = isinstance(self.config.model, LanguageConfig)
        self.words, self.answer_words = names(self.source), names(self.target)
        self.ids = {name: index for index, name in enumerate(self.answer_words)}
        self.engine = self.start(threads)

    def start(self, threads: int) -> Any:
        """A new engine, its random numbers from the beginning."""
        kind = library().Generator if self.alone else library().Translator
        try:
            return kind(str(self.folder), device=self.device, inter_threads=threads, intra_threads=1)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{self.folder} cannot be opened by CTranslate2: {error}.") from error

    def written(
        self,
        sources: Sequence[Framed],
        settings: DecodeConfig,
        best: int,
        prefixes: Sequence[Sequence[int]] | None,
        tell: Tell | None = None,
    ) -> Iterator[Answered]:
        """Answers that CTranslate2 decodes, ranked and scored as decode.py does."""
        if settings.slide:
            raise InputError("decode.slide: a CTranslate2 model cannot go on past its context. Use our own engine.")
        begins = prefixes or [[]] * len(sources)
        rows = [self.row(source.ids, list(begin), settings) for source, begin in zip(sources, begins, strict=True)]
        if tell is not None and len(rows) == 1 and best == 1 and (settings.sample or settings.beam == 1):
            yield 0, [self.output(self.told(rows[0], settings, tell))]
            return
        ranked = self.ranked(rows, self.search(rows, settings, best), settings, best)
        yield from enumerate([self.output(hypothesis) for hypothesis in one] for one in ranked)

    def row(self, source: list[int], begin: list[int], settings: DecodeConfig) -> Row:
        """A source with its limit, which is that of Predictor.written and decode.decode."""
        length, most = len(source), self.config.text.max_length
        wanted = int(longest(torch.tensor(length), settings))
        tokens = max(min(wanted, max(0, most - length) if self.alone else 2 * most), len(begin))
        if self.alone:
            return Row([*source, *begin], [], begin, tokens - len(begin))
        return Row(source, begin, [], tokens)

    # --- searching

    def search(self, rows: Sequence[Row], settings: DecodeConfig, best: int) -> list[list[Found]]:
        """The hypotheses of every row. First all are searched up to the largest limit, for that is one batch, and with
        nothing forbidden, for then the numbers are the model's own. A row that has gone beyond its limit, or has
        written <pad> or <bos>, is searched once more. Prompts or prefixes of other lengths are other batches: the end
        of a longer one would be decoded, and spoil the beam."""
        found: dict[int, list[Found]] = {}
        lengths = [len(row.source if self.alone else row.begin) for row in rows]

        def together(key: Callable[[int], tuple[int, int]], numbers: Iterable[int], strict: bool) -> None:
            for same, group in itertools.groupby(sorted(numbers, key=key), key):
                members = list(group)
                answers = self.ask([rows[i] for i in members], same[1], settings, best, strict=strict)
                found.update(zip(members, answers, strict=True))

        def odd(row: Row, one: Found) -> bool:
            return len(one.tokens) > row.most or PAD in one.tokens or BOS in one.tokens

        everybody = range(len(rows))
        together(lambda i: (lengths[i], max(row.most for row in rows)), everybody, settings.sample)
        again = [i for i in everybody if any(odd(rows[i], one) for one in found[i])]
        together(lambda i: (lengths[i], rows[i].most), again, True)
        return [found[i] for i in everybody]

    def ask(
        self,
        rows: Sequence[Row],
        most: int,
        settings: DecodeConfig,
        best: int,
        *,
        strict: bool = True,
        callback: Callable[[Any], bool] | None = None,
    ) -> list[list[Found]]:
        """The hypotheses of every row, each of at most so many tokens; `strict` ones have neither <pad> nor <bos>."""
        if most == 0:
            return [[Found([], False, 0.0)] * (best if settings.sample else 1) for _ in rows]
        width = 1 if settings.sample else max(settings.beam, best)
        patience = PATIENCE if width > 1 else 1.0
        options: dict[str, Any] = {
            "beam_size": width,
            "patience": patience,
            "num_hypotheses": best if settings.sample else round(width * patience),
            "length_penalty": 0,
            "no_repeat_ngram_size": settings.no_repeat,
            "suppress_sequences": [[SPECIAL[PAD]], [SPECIAL[BOS]]] if strict else None,
            "return_end_token": True,
            "return_scores": True,
            "callback": callback,
            "max_batch_size": -(-len(rows) // self.threads),
        }
        if settings.sample:
            library().set_random_seed(settings.seed)  # threads that are there already would not hear of it
            options |= {
                "sampling_topk": min(settings.top_k or 0, self.target.size),
                "sampling_topp": settings.top_p or 1.0,
                "sampling_temperature": settings.temperature,
            }
            return self.answered(self.start(1), rows, most, settings.min_length, options)
        forced = strict or settings.no_repeat or settings.min_length or any(row.begin or row.lead for row in rows)
        if width > 1 or callback or forced:
            return self.answered(self.engine, rows, most, settings.min_length, options)
        heard: list[list[float]] = [[] for _ in rows]

        def hear(step: Any) -> bool:
            heard[step.batch_id].append(step.log_prob)
            return False

        options["callback"] = hear
        found = self.answered(self.engine, rows, most, settings.min_length, options)
        return [[one._replace(logprobs=own) if one.ended else one] for (one,), own in zip(found, heard, strict=True)]

    def answered(
        self, engine: Any, rows: Sequence[Row], most: int, least: int, options: dict[str, Any]
    ) -> list[list[Found]]:
        """What the engine says, as ids."""
        source = [[self.words[i] for i in row.source] for row in rows]
        if self.alone:
            limits = {"max_length": most, "min_length": min(least, most), "include_prompt_in_result": False}
            results = engine.generate_batch(source, **limits, **options)
            texts = [result.sequences for result in results]
        else:
            limits = {"max_decoding_length": most, "min_decoding_length": min(least, most), "max_input_length": 0}
            begins = [[self.answer_words[i] for i in row.begin] for row in rows]
            results = engine.translate_batch(source, begins if any(begins) else None, **limits, **options)
            texts = [result.hypotheses for result in results]
        return [
            [self.found(tokens, score) for tokens, score in zip(text, result.scores, strict=True)]
            for text, result in zip(texts, results, strict=True)
        ]

    def found(self, tokens: list[str], score: float) -> Found:
        """One hypothesis in our words."""
        ids = [self.ids[token] for token in tokens]
        ended = ids[-1:] == [EOS]
        return Found(ids[:-1] if ended else ids, ended, score)

    # --- judging what was found

    def ranked(
        self, rows: Sequence[Row], found: Sequence[list[Found]], settings: DecodeConfig, best: int
    ) -> list[list[Hypothesis]]:
        """The `best` of what was found, by our own penalty. CTranslate2's sums decide where they are ours, which they
        are unless something was forced or forbidden; there, all that was found is scored again."""
        forced = bool(settings.no_repeat or settings.min_length)
        chosen: list[list[Found]] = []
        for row, ones in zip(rows, found, strict=True):
            if row.begin and not settings.sample and settings.beam > 1 and settings.min_length <= len(row.begin):
                bare = Found(row.begin, True, 0.0)  # CTranslate2 does not always try to end right behind a prefix
                ones = ones if any(one.tokens == row.begin for one in ones) else [bare, *ones]
            exact = not (forced or row.begin or row.lead) and all(one.ended for one in ones)
            if exact and not settings.sample:
                ones = sorted(ones, key=lambda one: -one.total / penalty(len(one.tokens) + 1, settings.length_penalty))
            chosen.append(ones[:best] if exact or settings.sample else ones)
        pairs = [(row, one) for row, ones in zip(rows, chosen, strict=True) for one in ones]
        judged = (
            hypothesis([*row.lead, *one.tokens], logprobs, settings.length_penalty)
            for (row, one), logprobs in zip(pairs, self.scored(pairs), strict=True)
        )
        out = [[next(judged) for _ in ones] for ones in chosen]
        return out if settings.sample else [sorted(ones, key=lambda one: -one.score)[:best] for ones in out]

    def scored(self, pairs: Sequence[tuple[Row, Found]]) -> list[list[float]]:
        """The model's log-probabilities of each token that was decoded, those before them, and <eos>."""
        unheard = [(row, one) for row, one in pairs if one.logprobs is None]
        options = {"max_input_length": 0, "max_batch_size": 1024, "batch_type": "tokens"}
        source = [[self.words[i] for i in row.source] for row, _ in unheard]
        target = [[self.answer_words[i] for i in one.tokens] for _, one in unheard]
        if self.alone:
            joined = [[*text, *tokens, SPECIAL[EOS]] for text, tokens in zip(source, target, strict=True)]
            results = iter(self.engine.score_batch(joined, **options) if joined else [])
        else:
            results = iter(self.engine.score_batch(source, target, **options) if source else [])
        return [
            list(next(results).log_probs)[-len(row.lead) - len(one.tokens) - 1 :]
            if one.logprobs is None
            else one.logprobs
            for row, one in pairs
        ]

    def told(self, row: Row, settings: DecodeConfig, tell: Tell) -> Hypothesis:
        """One answer, told token by token as it is written; who hears it may end it, as in decode.walk."""
        ids: list[int] = []
        logprobs: list[float] = []

        def hear(token: int, logprob: float) -> bool:
            ids.append(token)
            logprobs.append(logprob)
            return tell(0, token, logprob) or token == EOS

        def over() -> bool:
            if row.lead or row.begin:
                given = self.scored([(row, Found(row.begin, False, 0.0))])[0]
                if any(hear(*pair) for pair in zip([*row.lead, *row.begin], given[:-1], strict=True)):
                    return True
            ended: list[bool] = []

            def step(result: Any) -> bool:
                before = result.step < len(row.begin)  # has been told
                ended.append(not before and hear(result.token_id, result.log_prob))
                return ended[-1]

            self.ask([row], row.most, settings, 1, callback=step)
            return any(ended)

        if not over():  # the limit was reached: only <eos> can follow
            hear(EOS, self.scored([(row, Found(ids[len(row.lead) :], False, 0.0))])[0][-1])
        return hypothesis(ids[:-1], logprobs, settings.length_penalty)


def hypothesis(tokens: list[int], logprobs: list[float], alpha: float) -> Hypothesis:
    """An output with the log-probabilities of its tokens and of <eos>, as decode.py ranks it."""
    return Hypothesis(tokens, sum(logprobs) / penalty(len(logprobs), alpha), logprobs)


# --- opening ---------------------------------------------------------------------------------------------------------


def load(
    run: str | Path,
    changes: Iterable[str] = (),
    device: str = "auto",
    engine: str = "regard",
    threads: int | None = None,
) -> Predictor:
    """Open a run, or a folder that `regard export --to ctranslate2` made, to be decoded by an engine. A run is written
    in CTranslate2's form once, into RUN/ctranslate2, and again when its weights have changed."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine is {engine!r}, expected {' or '.join(ENGINES)}.")
    if engine == "regard":
        return predict.load(run, changes, device)
    library()
    folder, chosen = Path(run), "cuda" if choose(device).type == "cuda" else "cpu"
    threads = threads or torch.get_num_threads()
    if (folder / "model.bin").exists():
        config = changed(load_config(folder), changes)
        model = AbsentLanguage() if isinstance(config.model, LanguageConfig) else AbsentTransformer()
        return Fast(Predictor(model, config, *load_vocabularies(folder)), folder, chosen, threads)
    predictor = predict.load(folder, changes, device)
    return Fast(predictor, converted(predictor, folder), chosen, threads)


def converted(predictor: Predictor, run: Path) -> Path:
    """The run in CTranslate2's form: as it was written before, if its weights are still those; else written now, and
    what is older than a day removed. A run that cannot be written to has its model in a temporary place."""
    state = (run / "model.safetensors").stat()
    home = run / "ctranslate2"
    folder = home / f"{state.st_size}-{state.st_mtime_ns}"
    if folder.exists():
        with contextlib.suppress(OSError):
            os.utime(folder)  # it is in use
        return folder
    try:
        write(predictor, run, folder, "float32")
    except (OSError, RunError):
        folder = Path(tempfile.mkdtemp(prefix="regard-")) / "model"
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        write(predictor, run, folder, "float32")
        return folder
    for other in home.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it, too
            if time.time() - other.stat().st_mtime > DAY:  # one that is younger may be in use by a server
                shutil.rmtree(other, ignore_errors=True)
    return folder
