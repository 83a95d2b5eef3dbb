"""Decoding with CTranslate2, the fastest engine for Transformers on a CPU.

The numbers are the model's own, the search is CTranslate2's: it is asked for every hypothesis it finds, and these are
ranked as ours are (docs/engine.md says what can differ). What it cannot do the same (samples, streams, sliding
contexts, being recorded) our own engine does.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.data.encoding import Encoded
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL
from regard.errors import InputError, RunError
from regard.inference.beam_search import Found
from regard.inference.constraints import BROKEN, length_penalty, max_tokens
from regard.inference.ctranslate2_model import get_library, name_entries
from regard.inference.engine import Request, TorchEngine
from regard.inference.predictor import group_by_length
from regard.inference.sampling import make_hypothesis
from regard.nn.state import Hypothesis
from regard.tasks.task import Task

PATIENCE = 2.0
"""How many hypotheses must have ended before CTranslate2 stops, as a multiple of the beam."""
BUDGET = 8192
"""Padded tokens that are scored again at once."""
LONG = 256
"""Outputs that may be longer than so many tokens are waited for in pieces, so that others get their turn."""
Steps = Iterator[None]


class Absent(nn.Module):
    """Stands for a model whose weights only CTranslate2 has."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        what = "a CTranslate2 model, which answers but cannot be looked into"
        raise InputError(f"this folder holds {what}, sample or stream. Use the run that it was exported from.")


class Row(NamedTuple):
    """One output to search for."""

    source: list[int]  # what is read; of a language model, the prompt and what the output must begin with
    begin: list[int]  # what the decoder must begin with
    lead: list[int]  # what comes before all that is decoded
    most: int  # tokens that are decoded at most


class Candidate(NamedTuple):
    """A hypothesis as CTranslate2 gave it."""

    tokens: list[int]
    ended: bool  # whether <eos> came; if not, the limit did
    total: float
    """Its log-probability as CTranslate2 adds it up: without a prefix, and renormalized where tokens are forbidden."""
    forced: bool = False  # whether some tokens were forbidden


class CTranslate2Engine:
    """Decodes the sources of one task; `find_folder` gives the folder of the model when it is first needed."""

    def __init__(
        self, task: Task, model: nn.Module, find_folder: Callable[[], Path], device: str = "cpu", threads: int = 1
    ) -> None:
        self.task, self.model, self.find_folder, self.device, self.threads = task, model, find_folder, device, threads
        self.own, self.parts = TorchEngine(task, model), list(model.modules())
        self.decoder_only = not task.architecture().encoder
        self.names, self.target_names = name_entries(task.source), name_entries(task.target)
        self.ids = {name: index for index, name in enumerate(self.target_names)}

    @functools.cached_property
    def folder(self) -> Path:
        """Where the model is."""
        return self.find_folder()

    @functools.cached_property
    def translator(self) -> Any:
        """CTranslate2's engine: as many replicas as there are threads, each with one, which share the rows among them.
        Several threads for one row were slower, several times in a process that has torch's beside it (docs/log.md)."""
        kind = get_library().Generator if self.decoder_only else get_library().Translator
        try:
            return kind(str(self.folder), device=self.device, inter_threads=self.threads, intra_threads=1)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{self.folder} cannot be opened by CTranslate2: {error}.") from error

    def generate(self, sources: Sequence[Encoded], request: Request) -> Iterator[Found]:
        """As `Engine.generate`."""
        if self.needs_own(request):
            yield from self.own.generate(sources, request)
            return
        rows = self.make_rows(sources, request)
        found: dict[int, list[Candidate]] = {}
        yield from self.search(rows, request, found)
        chosen = [self.rank(row, found[i], request) for i, row in enumerate(rows)]
        yield from enumerate(self.score(sources, rows, chosen, request))

    def needs_own(self, request: Request) -> bool:
        """Whether only our own engine does what is asked for. A model with hooks is looked at, and has to run itself; a
        language model's prefix, which limits count, is a part of the prompt to CTranslate2."""
        settings = request.settings
        watched = any(part._forward_hooks for part in self.parts)
        if settings.sample or settings.slide or request.on_token is not None or watched:
            return True
        counted = self.decoder_only and any(request.prefixes) and not isinstance(self.model, Absent)
        return counted and bool(settings.no_repeat_ngram or settings.min_length)

    def make_rows(self, sources: Sequence[Encoded], request: Request) -> list[Row]:
        """Sources with their limits, which are those of our own engine."""
        settings, rows = request.settings, []
        for source, given in zip(sources, request.prefixes or [()] * len(sources), strict=True):
            length, begin = len(source.ids), list(given)
            limit, wanted = self.task.output_limit(length, settings), max_tokens(length, settings)
            tokens = max(wanted if limit is None else min(wanted, limit), len(begin))
            if self.decoder_only:
                rows.append(Row([*source.ids, *begin], [], begin, tokens - len(begin)))
            else:
                rows.append(Row(list(source.ids), begin, [], tokens))
        return rows

    def search(self, rows: Sequence[Row], request: Request, found: dict[int, list[Candidate]]) -> Steps:
        """The candidates of every row. A batch is searched up to the largest limit of its rows, and at first with
        nothing forbidden, for then the numbers are the model's own. A row that has gone beyond its limit, or has
        written <pad> or <bos>, is searched once more. Prompts or prefixes of other lengths are other batches: the end
        of a longer one would be decoded, and spoil the beam, and each leaves another part of the context free."""
        lengths = [len(row.source if self.decoder_only else row.begin) for row in rows]

        def batch(key: Callable[[int], tuple[int, ...]], numbers: Iterable[int], strict: bool) -> Steps:
            for _, group in itertools.groupby(sorted(numbers, key=key), key):
                members = list(group)
                most = max(rows[i].most for i in members)
                answers = yield from self.ask([rows[i] for i in members], most, request, strict)
                found.update(zip(members, answers, strict=True))

        def odd(row: Row, one: Candidate) -> bool:
            return len(one.tokens) > row.most or PAD in one.tokens or BOS in one.tokens

        everybody = range(len(rows))
        yield from batch(lambda i: (lengths[i],), everybody, False)
        if max(request.settings.beam_size, request.best) == 1:
            found.update((i, [cut(found[i][0], row.most)]) for i, row in enumerate(rows))
        again = [i for i in everybody if any(odd(rows[i], one) for one in found[i])]
        yield from batch(lambda i: (lengths[i], rows[i].most), again, True)

    def ask(self, rows: Sequence[Row], most: int, request: Request, strict: bool) -> Any:
        """The candidates of every row, each of at most so many tokens; `strict` ones have neither <pad> nor <bos>."""
        if most == 0:
            return [[Candidate([], False, 0.0)] for _ in rows]
        settings = request.settings
        width = max(settings.beam_size, request.best)
        patience = PATIENCE if width > 1 else 1.0
        least, forced = min(settings.min_length, most), bool(strict or settings.no_repeat_ngram or settings.min_length)
        options: dict[str, Any] = {
            "beam_size": width,
            "patience": patience,
            "num_hypotheses": round(width * patience),
            "length_penalty": 0,
            "no_repeat_ngram_size": settings.no_repeat_ngram,
            "suppress_sequences": [[SPECIAL[PAD]], [SPECIAL[BOS]]] if strict else None,
            "return_end_token": True,
            "return_scores": True,
            "max_batch_size": -(-len(rows) // self.threads),
            "asynchronous": most > LONG,
        }
        source, engine = [[self.names[i] for i in row.source] for row in rows], self.translator
        if self.decoder_only:
            limits = {"max_length": most, "min_length": least, "include_prompt_in_result": False}
            results = engine.generate_batch(source, **limits, **options)
        else:
            limits = {"max_decoding_length": most, "min_decoding_length": least, "max_input_length": 0}
            begins = [[self.target_names[i] for i in row.begin] for row in rows]
            results = engine.translate_batch(source, begins if any(begins) else None, **limits, **options)
        if most > LONG:
            while not all(result.done() for result in results):
                yield None
                time.sleep(0.002)
            results = [result.result() for result in results]
        return [
            [self.read(tokens, score, forced) for tokens, score in zip(texts, result.scores, strict=True)]
            for result in results
            for texts in [result.sequences if self.decoder_only else result.hypotheses]
        ]

    def read(self, tokens: list[str], score: float, forced: bool) -> Candidate:
        """One hypothesis in our words."""
        if math.isnan(score):
            raise RunError(BROKEN)
        ids = list(map(self.ids.__getitem__, tokens))
        ended = ids[-1:] == [EOS]
        return Candidate(ids[:-1] if ended else ids, ended, score, forced)

    def rank(self, row: Row, found: list[Candidate], request: Request) -> list[Candidate]:
        """The `best` of what was found, by our own length penalty. Where CTranslate2's sums cannot be compared, all
        that was found is kept, to be scored again."""
        settings, found = request.settings, [end_early(one) for one in found]
        if len(found) == 1:
            return found
        if row.begin and settings.beam_size > 1 and settings.min_length <= len(row.begin):
            bare = Candidate(row.begin, True, 0.0)  # CTranslate2 does not always try to end right behind a prefix
            found = found if any(one.tokens == row.begin for one in found) else [bare, *found]
        if not self.is_exact(row, found, request):
            return found
        alpha = settings.length_penalty
        return sorted(found, key=lambda one: -one.total / length_penalty(len(one.tokens) + 1.0, alpha))[: request.best]

    def is_exact(self, row: Row, found: list[Candidate], request: Request) -> bool:
        """Whether CTranslate2's sums can be compared: nothing was forced or forbidden; and all have ended, for one that
        reached its limit has not paid for its <eos>. Where none has, they are compared without, unless it is known."""
        if row.begin or row.lead or any(one.forced for one in found):
            return False
        ends = {one.ended for one in found}
        return ends == {True} or len(found) == 1 or (ends == {False} and not request.logprobs)

    def score(
        self, sources: Sequence[Encoded], rows: Sequence[Row], chosen: Sequence[list[Candidate]], request: Request
    ) -> list[list[Hypothesis]]:
        """Candidates as hypotheses. Where log-probabilities are wanted, or CTranslate2's sums cannot be compared, they
        are scored by one pass of our model, in which an output that reached its limit pays for its <eos>."""
        alpha = request.settings.length_penalty
        outputs = [[[*row.lead, *one.tokens] for one in found] for row, found in zip(rows, chosen, strict=True)]
        again = [i for i, row in enumerate(rows) if request.logprobs or not self.is_exact(row, chosen[i], request)]
        scored = iter(self.rescore([(sources[i], output) for i in again for output in outputs[i]]))
        out: list[list[Hypothesis]] = []
        for i, found in enumerate(chosen):
            if i in again:
                ones = [make_hypothesis(output, next(scored), alpha) for output in outputs[i]]
                out.append(sorted(ones, key=lambda one: -one.score)[: request.best])
            else:
                totals = [one.total / length_penalty(len(one.tokens) + 1.0, alpha) for one in found]
                out.append([Hypothesis(*pair, None) for pair in zip(outputs[i], totals, strict=True)])
        return out

    def rescore(self, pairs: Sequence[tuple[Encoded, list[int]]]) -> list[list[float]]:
        """The log-probabilities of the tokens of outputs to sources, and of <eos>: our model's, or CTranslate2's where
        we have no weights."""
        if not isinstance(self.model, Absent):
            found: dict[int, list[float]] = {}
            for group in group_by_length([[*source.ids, *output] for source, output in pairs], BUDGET):
                some = zip(*(pairs[i] for i in group), strict=True)
                found.update(zip(group, self.task.score(self.model, *some), strict=True))  # type: ignore[attr-defined]
            return [found[i] for i in range(len(pairs))]
        read = [[self.names[i] for i in source.ids] for source, _ in pairs]
        written = [[self.target_names[i] for i in output] for _, output in pairs]
        if self.decoder_only:
            read, written = [[*one, *other, SPECIAL[EOS]] for one, other in zip(read, written, strict=True)], []
        results = self.translator.score_batch(read, *([written] if written else []), max_input_length=0)
        return [list(one.log_probs)[-len(output) - 1 :] for one, (_, output) in zip(results, pairs, strict=True)]


def cut(candidate: Candidate, most: int) -> Candidate:
    """A greedy candidate of at most so many tokens: what it would have been, but for its sum, which is made again."""
    if len(candidate.tokens) <= most:
        return candidate
    return candidate._replace(tokens=candidate.tokens[:most], ended=False, forced=True)


def end_early(candidate: Candidate) -> Candidate:
    """A candidate that ends where no token was allowed any more: CTranslate2 writes <pad> there."""
    places = [candidate.tokens.index(token) for token in (PAD, BOS) if token in candidate.tokens]
    return candidate._replace(tokens=candidate.tokens[: min(places)]) if places else candidate
