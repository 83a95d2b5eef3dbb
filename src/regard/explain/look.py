"""Why an answer came out so: the maps of every attention behind it, as numbers, as JSON, as a picture, as a page.

One form for all of them (docs/maps.md). Nothing is averaged before it is shown. A look encodes its source once, and
after the search one pass over the answer gives everything.
"""

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.attention.equation import KeyValues
from regard.attention.positions import alibi
from regard.attention.scores import dot, scaled_dot
from regard.config.run import DecodeConfig
from regard.data.batching import Batch
from regard.data.encoding import Encoded
from regard.data.examples import Source
from regard.data.vocabulary import clean, unframed
from regard.errors import InputError
from regard.explain.attention_maps import LARGEST, Calculation, Map, Vectors, make_page, pack_vectors, round_all
from regard.explain.plots import save_grid, save_map
from regard.explain.recorder import watch
from regard.inference.degeneration import find_flags
from regard.inference.engine import Request, TorchEngine
from regard.inference.predictor import Predictor
from regard.nn.attention import Attention
from regard.tasks.axes import Structure, Tokens, find_word
from regard.tasks.task import Answer
from regard.training.checkpoint import write_file

ROOM = 2 * 2**30
"""Bytes that all maps of one look may take."""
NUMBERS = 2**24
"""Weights that are written as numbers at most: each is an object of Python's, eight times as large."""


class Use:
    """One use of an attention in a forward pass: what it was given. Of those that were used one after another (a
    recurrent decoder's), the queries stand below each other."""

    def __init__(self, attention: Attention, queries: Tensor, kv: KeyValues, mask: Tensor | None) -> None:
        shape = (1, 1, queries.shape[-2], kv.keys.shape[-2])
        allowed = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu().expand(shape)
        self.attention, self.kv = attention, kv
        self.queries, self.masks, self.allowed = [queries], [mask], [allowed[0, 0]]

    def extend(self, other: "Use") -> None:
        """Let more queries follow."""
        self.queries += other.queries
        self.masks += other.masks
        self.allowed += other.allowed

    def weights(self, heads: slice = slice(None)) -> Tensor:
        """The map (heads, query, key), of all heads or of some."""
        parts = zip(self.queries, self.masks, strict=True)
        made = [self.attention.weights(queries, self.kv, mask, heads)[0] for queries, mask in parts]
        return torch.cat(made, dim=-2).float().cpu()

    def vectors(self) -> Vectors:
        """What the map was made of."""
        keys, values = KeyValues(self.kv.keys[:1], self.kv.values[:1]).repeat_heads(self.attention.heads)
        given = torch.cat([queries[0] for queries in self.queries], dim=-2)
        queries, keys, values = (part.float().cpu() for part in (given, keys[0], values[0]))
        return Vectors(self.attention, queries, keys, values, torch.cat(self.allowed))


@dataclass(frozen=True)
class Look:
    """An answer and every map behind it."""

    predictor: Predictor
    source: Encoded
    answers: list[Answer]  # best first; the maps are those of the first

    @property
    def text(self) -> str:
        """The source."""
        return self.source.text

    @cached_property
    def answer(self) -> Answer:
        return self.answers[0]

    @cached_property
    def tokens(self) -> Tokens:
        """What stands on the sides of the maps: the source (key), the answer (query), what a decoder read (input)."""
        return self.predictor.task.axes(self.source, self.answer)

    @cached_property
    def batch(self) -> Batch:
        """The answer as if it were to be learned: one pass gives all that decoding saw, step by step."""
        device = next(self.predictor.model.parameters()).device
        return self.predictor.task.replay(self.source, self.answer).to(device)

    @cached_property
    def uses(self) -> dict[str, Use]:
        """Every use of an attention in one pass, in their order; no map is made for that. A block whose weights all
        layers share has one for each time: NAME#0, NAME#1, .."""
        found: dict[str, list[Use]] = {}

        def seen(name: str, *given: Any) -> None:
            use, uses = Use(*given), found.setdefault(name, [])
            if uses and not use.attention.is_self:
                uses[0].extend(use)
            else:
                uses.append(use)

        with torch.inference_mode(), watch(self.predictor.model, seen):
            self.predictor.task.run(self.predictor.model, self.batch)
        return {
            name if len(uses) == 1 else f"{name}#{number}": use
            for name, uses in found.items()
            for number, use in enumerate(uses)
        }

    @cached_property
    def structures(self) -> dict[str, Structure]:
        """Marginals that no attention made, by the names of their maps."""
        with torch.inference_mode():
            found = self.predictor.task.structures(self.predictor.model, self.batch)
        return {one.name: one._replace(weights=one.weights.float().cpu()) for one in found}

    @cached_property
    def heads(self) -> dict[str, int]:
        """The name of every map and how many heads it has; no map is made for that."""
        uses = {name: use.attention.heads for name, use in self.uses.items()}
        return uses | {name: len(one.weights) for name, one in self.structures.items()}

    @cached_property
    def maps(self) -> list[Map]:
        """Every attention, in the order in which the model uses them; too many and too large ones are refused."""
        longest = max(len(axis) for axis in self.tokens.values())
        if (size := 4 * longest**2 * sum(self.heads.values())) > ROOM:
            raise InputError(
                f"all maps of {longest:,} tokens would take {size / 2**30:.1f} GB, {ROOM / 2**30:.0f} are the most. "
                "Look at a shorter text, or at one map alone."
            )
        return [self.make_map(name) for name in self.heads]

    @torch.inference_mode()
    def make_map(self, name: str, heads: slice = slice(None)) -> Map:
        """One map, of all its heads or of some."""
        if own := self.structures.get(name):
            return Map(name, own.kind, 0, *own.axes, own.weights[heads])
        use = self.uses[name]
        attention, number = use.attention, int(name.partition("#")[2] or 0)  # of the uses of one block
        return Map(name, attention.kind, attention.layer + number, *attention.axes, use.weights(heads))

    def find_map(self, name: str | None = None) -> str:
        """The name of a map; the last that goes from answer to source, or else the last, if none is given."""
        if not self.heads:
            raise InputError("this model has no attention to look at.")
        if name is None:
            crosses = [one for one, use in self.uses.items() if not use.attention.is_self]
            return [*self.heads, *crosses, *self.structures][-1]
        if name not in self.heads:
            raise InputError(f"there is no map {name!r}. This model has {', '.join(self.heads)}.")
        return name

    def map(self, name: str | None = None, head: int | None = None) -> Map:
        """A map, of all its heads or of one; no other is made for it."""
        name = self.find_map(name)
        if head is not None and not 0 <= head < self.heads[name]:
            raise InputError(f"head {head} was asked for; {name} has heads 0 to {self.heads[name] - 1}.")
        return self.make_map(name, slice(None) if head is None else slice(head, head + 1))

    @torch.inference_mode()
    def calculate(self, row: int, head: int = 0, name: str | None = None) -> Calculation:
        """The numbers behind one row of one head."""
        name = self.find_map(name)
        if name not in self.uses:
            raise InputError(f"{name} shows marginals: there are no queries and keys to calculate with.")
        given = self.uses[name].vectors()
        heads, rows, _ = given.queries.shape
        if not 0 <= row < rows or not 0 <= head < heads:
            asked = f"row {row} of head {head} was asked for"
            raise InputError(f"{asked}; {name} has {heads} heads (from 0) of {rows} rows.")
        query, keys, values = given.queries[head, row], given.keys[head], given.values[head]
        attention, seen = given.attention, given.seen[row]
        plain = dot if attention.score is scaled_dot else attention.score
        scores, scaled = (score(query[None], keys)[0] for score in (plain, attention.score))
        if attention.positions == "alibi":
            scaled = scaled + alibi(attention.heads, (torch.arange(len(keys)) - row)[None])[head, 0]
        weights = self.uses[name].weights(slice(head, head + 1))[0, row]  # a structure's depend on all rows
        return Calculation(query, keys, values, scores, scaled, seen, weights, weights @ values)

    def align(self, name: str | None = None, head: int | None = None) -> list[tuple[int, int]]:
        """Hard alignment: each row and the column it looks at most, in one head or in the mean of all."""
        return list(enumerate(self.label(name, head)[0].argmax(-1).tolist()))

    def align_words(self) -> list[tuple[int, int]]:
        """Hard alignment of words parted by white space: each word of the answer and the one it looks at most."""
        keys, queries = self.tokens["key"], self.tokens["query"]
        if not keys or (self.answer.text.strip() and not any(piece.end for piece in queries)):
            raise InputError("words are aligned between a text and its translation: this model does not translate.")
        of_row = [find_word(self.answer.text, piece) for piece in queries]
        of_column = [find_word(self.text, piece) for piece in keys]
        weights, _, _ = self.label()
        sums = torch.zeros(len(self.answer.text.split()), len(self.text.split()))
        for (row, word), (column, other) in itertools.product(enumerate(of_row), enumerate(of_column)):
            if word is not None and other is not None:
                sums[word, other] += weights[row, column]
        return list(enumerate(sums.argmax(-1).tolist()))

    def label(self, name: str | None = None, head: int | None = None) -> tuple[Tensor, list[str], list[str]]:
        """One head of a map, or the mean of its heads, (query, key), and the names of its rows and columns."""
        chosen = self.map(name, head)
        axes = (self.tokens[axis] for axis in (chosen.rows, chosen.columns))
        rows, columns = ([piece.text.strip() or "·" for piece in pieces] for pieces in axes)  # a dot for white space
        return chosen.weights.mean(0), rows, columns

    def title(self, name: str | None = None, head: int | None = None) -> str:
        """What `label` gives, in words."""
        name = self.find_map(name)
        if head is None:
            return name if self.heads[name] == 1 else f"{name}, mean of {self.heads[name]} heads"
        return f"{name}, head {head}"

    def is_tree(self, name: str | None = None) -> bool:
        """Whether the weights of a map are soft parents, which can be drawn as arcs."""
        use = self.uses.get(self.find_map(name))
        return use is not None and use.attention.kind == "tree"

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
        wanted = {self.find_map(name) for name in vectors}
        maps = []
        for one in self.maps:
            entry = one.tree(packed=packed, full=full is None or one.name in full)
            if one.name in wanted and one.name in self.uses:
                entry["vectors"] = pack_vectors(self.uses[one.name].vectors(), one.columns == "input")
            maps.append(entry)
        task = self.predictor.task
        logprobs = task.look_logprobs(self.predictor.model, self.batch, self.answer)
        return {
            "version": 2,
            "kind": task.config.model.kind,
            "form": task.form._asdict(),
            "text": {"source": self.text, "target": self.answer.text},
            "tokens": {axis: [piece._asdict() for piece in found] for axis, found in self.tokens.items()},
            "scores": {"score": self.answer.score, "logprobs": round_all(logprobs, 6)},
            "answers": [{"text": one.text, "score": one.score, **one.details} for one in self.answers],
            "maps": maps,
            "flags": list(self.answer.flags),
        }

    def save(self, path: str | Path, name: str | None = None, head: int | None = None) -> None:
        """Write .json, .html (one file that opens offline), or a picture (.png, .svg, .pdf) of one map, or of every
        head of every map if `name` is "all"."""
        path = Path(path)
        match path.suffix.lower():
            case ".json":
                write_file(path, json.dumps(self.tree(), ensure_ascii=False).encode())
            case ".html":
                write_file(path, make_page(self.fitting_tree()).encode())
            case ".png" | ".svg" | ".pdf" if name == "all" and self.find_map():
                save_grid(path, [(one.name, one.weights) for one in self.maps])
            case ".png" | ".svg" | ".pdf":
                weights, rows, columns = self.label(name, head)
                title = f"{self.text}\n{self.answer.text}\n{self.title(name, head)}"
                save_map(path, weights, rows, columns, title, arcs=self.is_tree(name))
            case other:
                raise InputError(f"{path} ends in {other!r}; expected .html, .json, .png, .svg or .pdf.")

    def fitting_tree(self, most: int = 3_000_000) -> dict[str, Any]:
        """The packed tree that fits into a file of about `most` bytes: as many maps in full as have room, the one from
        answer to source first, then as many of their vectors."""
        left, full, vectors = most, [], []
        small = {one.name: len(one.weights) * min(LARGEST**2, one.weights[0].numel()) * 4 // 3 for one in self.maps}
        left -= sum(small.values())  # every map is there at least as a small picture
        for one in sorted(reversed(self.maps), key=Map.is_self):
            size = one.weights.numel() * 4 // 3 - small[one.name]
            if size <= left:
                full.append(one.name)
                left -= size
        for name in filter(self.uses.__contains__, full):
            given = self.uses[name].vectors()
            size = sum(part.numel() for part in (given.queries, given.keys, given.values)) * 16 // 3
            if size <= left:
                vectors.append(name)
                left -= size
        return self.tree(packed=True, full=full, vectors=vectors)


def look(
    predictor: Predictor,
    source: Source,
    *,
    settings: DecodeConfig | None = None,
    best: int = 1,
    target: str | None = None,
) -> Look:
    """Answer a source, or take `target` for the answer, and look at why. Our own engine answers: the maps are its."""
    steps = look_steps(predictor, source, settings or predictor.config.decode, best, target)
    return next(filter(None, steps))


def look_steps(
    predictor: Predictor, source: Source, settings: DecodeConfig, best: int = 1, target: str | None = None
) -> Iterator[Look | None]:
    """As `look`: None whenever a step of the search is done, and at last the look."""
    task = predictor.task
    (encoded,) = predictor.encode([clean(source) if isinstance(source, str) else source], "text")
    if not encoded.ids:
        raise InputError("there is nothing to look at in an empty text.")
    if not task.gives_answers:
        yield Look(predictor, encoded, [Answer("", 0.0)])
        return
    settings = settings.model_copy(update={"slide": False})  # one pass sees it all
    prefixes = [] if target is None else [task.prefix_ids(encoded, target)]
    if target is not None:
        settings = settings.model_copy(update={"beam_size": 1, "sample": False, "max_ratio": 0.0, "max_extra": 0})
    own = Predictor(task, predictor.model, TorchEngine(task, predictor.model))
    request = Request(settings, best if target is None else 1, prefixes, logprobs=True)
    for found in own.answer([encoded], request):
        if found is None:
            yield None
            continue
        answers = found[1]
        if target is None:
            flags = find_flags(task, unframed(encoded.ids), answers[0], settings)
            answers[0] = answers[0]._replace(flags=flags)
        yield Look(predictor, encoded, answers)


def agree(there: Look, back: Look) -> list[tuple[str, str]]:
    """Words that look at each other both ways: of a translation, and of its translation back by a run of the other
    direction, whose source is the answer. Pairs (word of the answer, word of the text), in the answer's order."""
    forth = there.align_words()
    other = {(source, answer) for answer, source in back.align_words()}
    words = there.answer.text.split(), there.text.split()
    return [(words[0][answer], words[1][source]) for answer, source in forth if (answer, source) in other]
