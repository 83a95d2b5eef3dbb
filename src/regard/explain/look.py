"""Why an answer came out so: the maps of every attention behind it, as numbers, as JSON, as a picture, as a page.

One form for all of them (docs/maps.md). Nothing is averaged before it is shown.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.attention.positions import linear_bias
from regard.config.config import DecodeConfig
from regard.data.batching import Batch, Framed, Pair, collate
from regard.data.vocabulary import BOS, EOS, SPECIAL, clean, unframed
from regard.errors import InputError
from regard.explain.attention_maps import (
    LARGEST,
    Asked,
    Calculation,
    Map,
    Piece,
    described,
    page,
    pieces,
    read,
    rounded,
    sentences,
    shown,
    times,
    vectored,
    word_at,
)
from regard.explain.plots import save_grid, save_map
from regard.explain.recorder import record, watch
from regard.inference.degeneration import judged
from regard.inference.predictor import Output, Predictor
from regard.nn.attention import Additive, Attention, Memory, dot, shared, softmax
from regard.tasks.encoders import LABELS, Classifier, Reader, TextEncoder
from regard.tasks.models import Language
from regard.training.checkpoint import replace

ROOM = 2 * 2**30
"""Bytes that all maps of one look may take."""
NUMBERS = 2**24
"""Weights that are written as numbers at most: each is an object of Python's, eight times as large."""


@dataclass(frozen=True)
class Look:
    """An answer and every map behind it."""

    predictor: Predictor
    text: str
    answers: list[Output]
    """Best first; the maps are those of the first."""
    flags: Sequence[str] = ()
    """What is suspicious about the first, in words."""

    @cached_property
    def answer(self) -> Output:
        return self.answers[0]

    @cached_property
    def source(self) -> Framed:
        """The text as the model reads it."""
        return self.predictor.encode(self.text)

    @cached_property
    def written(self) -> list[int]:
        """The ids of an answer that was written, without its <eos>."""
        return [token.id for token in self.answer.tokens[:-1]]

    @cached_property
    def tokens(self) -> dict[str, list[Piece]]:
        """The source (key); the answer, the classes or the question (query); and what a decoder reads (input): the
        answer, one later. A language model reads its prompt and its answer as one text."""
        keys = read(self.source)
        match self.predictor.model:
            case Reader(answer="span"):
                return {"key": keys, "query": [Piece("start", 0, 0), Piece("end", 0, 0)], "input": []}
            case Reader(order=order):
                return {
                    "key": keys if order is None else sentences(self.source),
                    "query": [Piece("question", 0, 0)],
                    "input": [],
                }
            case Classifier():
                names = [self.predictor.target.token(i) for i in range(LABELS, self.predictor.target.size)]
                return {"key": keys, "query": [Piece(name, 0, 0) for name in names], "input": []}
            case TextEncoder():
                return {"key": keys, "query": [], "input": []}
        prompt = self.source.ids if isinstance(self.predictor.model, Language) else []
        queries = pieces(self.predictor.target, self.written, self.answer.text, prompt)
        end = Piece(SPECIAL[EOS], len(self.answer.text), len(self.answer.text))
        if isinstance(self.predictor.model, Language):
            both = [*keys, *(Piece(p.text, p.start + len(self.text), p.end + len(self.text)) for p in [*queries, end])]
            return {"key": [], "query": both[1:], "input": both[:-1]}
        return {"key": keys, "query": [*queries, end], "input": [Piece(SPECIAL[BOS], 0, 0), *queries]}

    @cached_property
    def maps(self) -> list[Map]:
        """Every attention, in the order in which the model uses them; too many and too large ones are refused."""
        attentions = [part for part in self.predictor.model.modules() if isinstance(part, Attention)]
        longest = max(len(axis) for axis in self.tokens.values())
        if (size := 4 * longest**2 * sum(part.heads for part in attentions)) > ROOM:
            raise InputError(
                f"all maps of {longest:,} tokens would take {size / 2**30:.1f} GB, {ROOM / 2**30:.0f} are the most. "
                "Look at one of them (--map, --head), or at a shorter text."
            )
        with torch.inference_mode(), record(self.predictor.model) as found:
            self.predictor.model(self.batch)
        return [one for name, weights in found.items() for one in self.parted(name, weights[0].float().cpu())]

    def parted(self, name: str, weights: Tensor) -> list[Map]:
        """A map; of a block whose weights all layers share, one for each time it was used: NAME#0, NAME#1, .."""
        one = described(name, weights)
        names = times(name, weights.shape[1] // weights.shape[2])
        if len(names) == 1:
            return [one]
        chunks = enumerate(weights.chunk(len(names), dim=1))
        return [one._replace(name=names[layer], layer=layer, weights=part) for layer, part in chunks]

    @cached_property
    def batch(self) -> Batch:
        """The answer as if it were to be learned: one pass gives all that decoding saw, step by step."""
        device = next(self.predictor.model.parameters()).device
        if isinstance(self.predictor.model, Language):
            ids = torch.tensor([[*self.source.ids, *self.written, EOS]])
            batch = Batch(ids[:, :0], torch.zeros(1, dtype=torch.long), ids[:, :-1], ids[:, 1:])
        else:
            batch = collate([Pair(self.source.ids, self.written)])
        return Batch(*(tensor.to(device) for tensor in batch))

    @cached_property
    def heads(self) -> dict[str, int]:
        """The name of every map and how many heads it has; no map is made for that."""
        if "maps" in vars(self):
            return {one.name: len(one.weights) for one in self.maps}
        used: dict[str, list[int]] = {}

        def seen(name: str, module: Attention, *given: object) -> None:
            used.setdefault(name, []).append(module.heads)

        with torch.inference_mode(), watch(self.predictor.model, seen):
            self.predictor.model(self.batch)
        return {one: heads[0] for name, heads in used.items() for one in times(name, len(heads))}

    def called(self, name: str | None = None) -> str:
        """The name of a map; the last that goes from answer to source, or else the last, if none is given."""
        if not self.heads:
            raise InputError("this model has no attention to look at.")
        if name is None:
            return ([one for one in self.heads if "self" not in one] or list(self.heads))[-1]
        if name not in self.heads:
            raise InputError(f"there is no map {name!r}. This model has {', '.join(self.heads)}.")
        return name

    def map(self, name: str | None = None, head: int | None = None) -> Map:
        """A map, of all its heads or of one; unless all maps are there already, no other is made for it."""
        name = self.called(name)
        if head is not None and not 0 <= head < self.heads[name]:
            raise InputError(f"head {head} was asked for; {name} has heads 0 to {self.heads[name] - 1}.")
        wanted = slice(None) if head is None else slice(head, head + 1)
        if "maps" in vars(self):
            found = next(one for one in self.maps if one.name == name)
            return found._replace(weights=found.weights[wanted])
        base = name.partition("#")[0]
        with torch.inference_mode(), record(self.predictor.model, lambda one: one == base, wanted) as maps:
            self.predictor.model(self.batch)
        return next(one for one in self.parted(base, maps[base][0].float().cpu()) if one.name == name)

    def asked(self, names: Collection[str]) -> dict[str, Asked]:
        """The vectors behind some maps. Of those that were made one after another, the queries stand below each other;
        a block that all layers share has keys of its own each time."""
        found: dict[str, list[Asked]] = {}
        names = [self.called(name) for name in names]

        def seen(name: str, module: Attention, queries: Tensor, memory: Memory, mask: Tensor | None) -> None:
            shape = (1, 1, queries.shape[-2], memory.keys.shape[-2])
            may = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu().expand(shape)
            keys, values = shared(Memory(memory.keys[:1], memory.values[:1]), module.heads)
            given, keys, values = (part[0].float().cpu() for part in (queries, keys, values))
            found.setdefault(name, []).append(Asked(module, given, keys, values, may[0, 0]))

        wanted = {name.partition("#")[0] for name in names}
        with torch.inference_mode(), watch(self.predictor.model, seen, lambda name: name in wanted):
            self.predictor.model(self.batch)
        parts = {name: name.partition("#") for name in names}
        uses = {
            name: found[base][int(time) :][:1] if mark else found[base] for name, (base, mark, time) in parts.items()
        }
        return {
            name: some[0]._replace(
                queries=torch.cat([one.queries for one in some], dim=-2), seen=torch.cat([one.seen for one in some])
            )
            for name, some in uses.items()
        }

    @torch.inference_mode()
    def calculation(self, row: int, head: int = 0, name: str | None = None) -> Calculation:
        """The numbers behind one row of one head."""
        name = self.called(name)
        asked = self.asked([name])[name]
        heads, rows, _ = asked.queries.shape
        if not 0 <= row < rows or not 0 <= head < heads:
            raise InputError(
                f"row {row} of head {head} was asked for; {name} has {heads} heads (from 0) of {rows} rows."
            )
        query, keys, values = asked.queries[head, row], asked.keys[head], asked.values[head]
        plain = asked.attention.score if isinstance(asked.attention.score, Additive) else dot
        scores = plain(query[None], keys)[0]
        scaled = asked.attention.score(query[None], keys)[0]
        places = torch.arange(len(keys))
        if asked.attention.order == "linear":
            scaled = scaled + linear_bias(asked.attention.heads, (places - row)[None])[head, 0]
        seen = asked.seen[row]
        weights = softmax(scaled, seen)
        return Calculation(query, keys, values, scores, scaled, seen, weights, weights @ values)

    def aligned(self, name: str | None = None, head: int | None = None) -> list[tuple[int, int]]:
        """Hard alignment: each row and the column it looks at most, in one head or in the mean of all."""
        return list(enumerate(self.labelled(name, head)[0].argmax(-1).tolist()))

    def words(self) -> list[tuple[int, int]]:
        """Hard alignment of words parted by white space: each word of the answer and the one it looks at most."""
        keys, queries = self.tokens["key"], self.tokens["query"]
        if not keys or (self.answer.text.strip() and not any(piece.end for piece in queries)):
            raise InputError("words are aligned between a text and its translation: this model does not translate.")
        of_row = [word_at(self.answer.text, piece) for piece in queries]
        of_column = [word_at(self.text, piece) for piece in keys]
        weights, _, _ = self.labelled()
        sums = torch.zeros(len(self.answer.text.split()), len(self.text.split()))
        for row, word in enumerate(of_row):
            for column, other in enumerate(of_column):
                if word is not None and other is not None:
                    sums[word, other] += weights[row, column]
        return list(enumerate(sums.argmax(-1).tolist()))

    def labelled(self, name: str | None = None, head: int | None = None) -> tuple[Tensor, list[str], list[str]]:
        """One head of a map, or the mean of its heads, (query, key), and the names of its rows and columns."""
        chosen = self.map(name, head)
        rows, columns = ([shown(piece) for piece in self.tokens[axis]] for axis in (chosen.rows, chosen.columns))
        return chosen.weights.mean(0), rows, columns

    def titled(self, name: str | None = None, head: int | None = None) -> str:
        """What `labelled` gives, in words."""
        name = self.called(name)
        if head is None:
            return name if self.heads[name] == 1 else f"{name}, mean of {self.heads[name]} heads"
        return f"{name}, head {head}"

    def tree(
        self, *, packed: bool = False, full: Collection[str] | None = None, vectors: Collection[str] = ()
    ) -> dict[str, Any]:
        """What docs/maps.md describes. `packed`: maps as bytes in base64 instead of numbers; of maps whose name is not
        in `full`, only a small picture; names of no map do not matter there, for old links have them. `vectors`: maps
        that come with their queries, keys and values."""
        if not packed and (many := sum(one.weights.numel() for one in self.maps)) > NUMBERS:
            raise InputError(
                f"the maps have {many:,} weights, at most {NUMBERS:,} are written as numbers. Save them as .html, ask "
                "a server for them packed, or look at a shorter text."
            )
        behind = self.asked(vectors) if vectors else {}
        maps = []
        for one in self.maps:
            entry = one.tree(packed=packed, full=full is None or one.name in full)
            if one.name in behind:
                entry["vectors"] = vectored(behind[one.name], one.columns == "input")
            maps.append(entry)
        return {
            "version": 1,
            "kind": self.predictor.config.model.kind,
            "text": {"source": self.text, "target": self.answer.text},
            "tokens": {axis: [piece._asdict() for piece in found] for axis, found in self.tokens.items()},
            "scores": {"score": self.answer.score, "logprobs": rounded(self.logprobs(), 6)},
            "answers": [{"text": one.text, "score": one.score, "span": one.span} for one in self.answers],
            "maps": maps,
            "flags": list(self.flags),
        }

    def logprobs(self) -> list[float]:
        """Of the tokens of an answer that was written, of an answer that was chosen, or of every class."""
        if isinstance(self.predictor.model, Classifier):
            with torch.inference_mode():
                chances = self.predictor.model.probabilities(self.batch)[0].cpu()
            return [float(chance) for chance in chances.clamp(min=1e-30).log()]
        return [token.logprob for token in self.answer.tokens]

    def save(self, path: str | Path, name: str | None = None, head: int | None = None) -> None:
        """Write .json, .html (one file that opens offline), or a picture (.png, .svg, .pdf) of one map, or of every
        head of every map if `name` is "all"."""
        path = Path(path)
        match path.suffix.lower():
            case ".json":
                replace(path, json.dumps(self.tree(), ensure_ascii=False).encode())
            case ".html":
                replace(path, page(self.fitting()).encode())
            case ".png" | ".svg" | ".pdf" if name == "all" and self.called():
                save_grid(path, [(one.name, one.weights) for one in self.maps])
            case ".png" | ".svg" | ".pdf":
                weights, rows, columns = self.labelled(name, head)
                save_map(path, weights, rows, columns, f"{self.text}\n{self.answer.text}\n{self.titled(name, head)}")
            case other:
                raise InputError(f"{path} ends in {other!r}; expected .html, .json, .png, .svg or .pdf.")

    def fitting(self, most: int = 3_000_000) -> dict[str, Any]:
        """The packed tree that fits into a file of about `most` bytes: as many maps in full as have room, the one from
        answer to source first, then as many of their vectors."""
        left, full, vectors = most, [], []
        small = {one.name: len(one.weights) * min(LARGEST**2, one.weights[0].numel()) * 4 // 3 for one in self.maps}
        left -= sum(small.values())  # every map is there at least as a small picture
        for one in sorted(reversed(self.maps), key=lambda one: one.kind != "cross"):
            size = one.weights.numel() * 4 // 3 - small[one.name]
            if size <= left:
                full.append(one.name)
                left -= size
        for name, asked in self.asked(full).items():
            size = sum(part.numel() for part in (asked.queries, asked.keys, asked.values)) * 16 // 3
            if size <= left:
                vectors.append(name)
                left -= size
        return self.tree(packed=True, full=full, vectors=vectors)


def look(
    predictor: Predictor,
    text: str,
    *,
    settings: DecodeConfig | None = None,
    best: int = 1,
    target: str | None = None,
) -> Look:
    """Answer a text, or take `target` for the answer, and look at why."""
    if not isinstance(text, str):
        raise InputError(f"one text is wanted to look at, not {type(text).__name__}.")
    text = clean(text)
    if not predictor.encode(text).ids:
        raise InputError("there is nothing to look at in an empty text.")
    settings = (settings or predictor.config.decode).model_copy(update={"slide": False})  # one pass sees it all
    if target is not None:
        if isinstance(predictor.model, TextEncoder):
            raise InputError("a target can be given to a model that writes; this one does not.")
        settings = settings.model_copy(update={"beam": 1, "sample": False, "max_ratio": 0.0, "max_extra": 0})
        return Look(predictor, text, predictor.predict([text], settings=settings, prefixes=[target])[0])
    if type(predictor.model) is TextEncoder:
        predictor.encoded([text])  # says whether it is cut
        return Look(predictor, text, [Output("", 0.0, [])])
    answers = predictor.predict([text], settings=settings, best=best)[0]
    source = predictor.encode(text)
    return Look(predictor, text, answers, judged(predictor, unframed(source.ids), answers[0], settings))


def agreed(there: Look, back: Look) -> list[tuple[str, str]]:
    """Words that look at each other both ways: of a translation, and of its translation back by a run of the other
    direction, whose source is the answer. Pairs (word of the answer, word of the text), in the answer's order."""
    forth = there.words()
    other = {(source, answer) for answer, source in back.words()}
    words = there.answer.text.split(), there.text.split()
    return [(words[0][answer], words[1][source]) for answer, source in forth if (answer, source) in other]
