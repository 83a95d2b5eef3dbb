"""Why an answer came out so: the maps of every attention behind it, as numbers, as JSON, as a picture, as a page.

One form for all of them (docs/maps.md). Nothing is averaged before it is shown. A look encodes its source once, and
after the search one pass over the answer gives everything.
"""

import itertools
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config.run import DecodeConfig
from regard.data.batching import Batch
from regard.data.encoding import Encoded
from regard.data.examples import Source
from regard.data.vocabulary import clean, unframed
from regard.errors import InputError
from regard.explain.attention_maps import (
    WHOLE,
    Calculation,
    Form,
    Map,
    choose_forms,
    make_page,
    pack_vectors,
    rank_maps,
)
from regard.explain.overlays import save_overlays
from regard.explain.plots import find_dark, save_grid, save_map
from regard.explain.recorder import watch
from regard.explain.strips import name_tiles, round_all
from regard.explain.uses import Use
from regard.inference.degeneration import find_flags
from regard.inference.engine import Request, TorchEngine
from regard.inference.predictor import Predictor
from regard.tasks.axes import Piece, Shown, Structure, Tokens, find_word
from regard.tasks.task import Answer
from regard.training.checkpoint import write_file

ROOM, WORK = 2, 2**32
"""Gigabytes of a map whose rows depend on each other, and weights that are made for one look, at most."""
NUMBERS, BYTES = 2**24, 2**26
"""How much of all maps is written at most, as numbers, each of which is an object of Python's, and as bytes."""


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
        """What stands on the sides of the maps: the source (key), the answer (query), what a decoder read (input), and
        Linformer's slots, if there are any."""
        found = self.predictor.task.axes(self.source, self.answer)
        slots = max((use.slots for use in self.uses.values()), default=0)
        return found | ({"slot": [Piece(f"slot {number + 1}", 0, 0) for number in range(slots)]} if slots else {})

    @cached_property
    def image(self) -> Shown | None:
        """The source, if it is an image."""
        return self.predictor.task.show_source(self.source)

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
    def outlines(self) -> dict[str, Map]:
        """Every map by its name, in the order in which the model uses them; no weight is made for that."""
        found = [one for name, use in self.uses.items() for one in use.outlines(name)]
        found += [Map.of(one.name, one.kind, 0, *one.axes, one.weights) for one in self.structures.values()]
        return {one.name: one for one in found}

    @cached_property
    def heads(self) -> dict[str, int]:
        """The name of every map and how many heads it has; no map is made for that."""
        return {name: one.shape[0] for name, one in self.outlines.items()}

    @cached_property
    def maps(self) -> list[Map]:
        """Every map, in the order in which the model uses them; what would take too long is refused."""
        made = sum(math.prod(one.shape) for one in self.outlines.values() if not one.gathered)
        if made > WORK:
            raise InputError(
                f"all maps of this text have {made:,} weights, {WORK:,} are made at most. Look at a shorter text, or "
                "at one map alone."
            )
        return [self.make_map(name) for name in self.heads]

    def make_map(self, name: str, heads: slice = slice(None)) -> Map:
        """One map, of all its heads or of some: its weights are made when they are asked for."""
        one = self.outlines[name] if heads == slice(None) else replace(self.outlines[name], heads=heads)
        size = 4 * math.prod(one.shape) / 2**30
        if one.kind in ("tree", "matching") and size > ROOM:
            words = f"{name} would take {size:.1f} GB, for its rows depend on each other; {ROOM} are the most."
            raise InputError(f"{words} Look at a shorter text.")
        return one

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

    def calculate(self, row: int, head: int = 0, name: str | None = None) -> Calculation:
        """The numbers behind one row of one head."""
        name = self.find_map(name)
        if name not in self.uses:
            raise InputError(f"{name} shows marginals: there are no queries and keys to calculate with.")
        heads, rows, _ = self.uses[name].shape
        if not 0 <= row < rows or not 0 <= head < heads:
            asked = f"row {row} of head {head} was asked for"
            raise InputError(f"{asked}; {name} has {heads} heads (from 0) of {rows} rows.")
        return self.uses[name].calculate(row, head)

    def align(self, name: str | None = None, head: int | None = None) -> list[tuple[int, int]]:
        """Hard alignment: each row and the column it looks at most, in one head or in the mean of all."""
        return list(enumerate(self.map(name, head).align()))

    def align_words(self) -> list[tuple[int, int]]:
        """Hard alignment of words parted by white space: each word of the answer and the one it looks at most."""
        keys, queries = self.tokens["key"], self.tokens["query"]
        if not keys or (self.answer.text.strip() and not any(piece.end for piece in queries)):
            raise InputError("words are aligned between a text and its translation: this model does not translate.")
        of_row = [find_word(self.answer.text, piece) for piece in queries]
        of_column = [find_word(self.text, piece) for piece in keys]
        if (chosen := self.map()).is_long:
            raise InputError(f"{chosen.name} is too long for words to be aligned: align a shorter text.")
        weights = chosen.weights.mean(0)
        sums = torch.zeros(len(self.answer.text.split()), len(self.text.split()))
        for (row, word), (column, other) in itertools.product(enumerate(of_row), enumerate(of_column)):
            if word is not None and other is not None:
                sums[word, other] += weights[row, column]
        return list(enumerate(sums.argmax(-1).tolist()))

    def names(self, axis: str) -> list[str]:
        """What the tokens of an axis are called; a dot for white space."""
        return [piece.text.strip() or "·" for piece in self.tokens[axis]]

    def label(self, name: str | None = None, head: int | None = None) -> tuple[Tensor, list[str], list[str]]:
        """One head of a map, or the mean of its heads, (query, key), and the names of its rows and columns; of a map
        that is too long, its tiles and the numbers of the tokens that they begin with."""
        chosen = self.map(name, head)
        rows, columns = self.names(chosen.rows), self.names(chosen.columns)
        if chosen.is_long:
            rows, columns = (name_tiles(*pair) for pair in zip(chosen.shape[1:], chosen.drawn_tile, strict=True))
        return chosen.drawing().mean(0), rows, columns

    def name_heads(self, name: str | None = None, head: int | None = None) -> str:
        """One head of a map, or the mean of its heads, in words."""
        name = self.find_map(name)
        if head is not None:
            return f"{name}, head {head}"
        return name if self.heads[name] == 1 else f"{name}, mean of {self.heads[name]} heads"

    def title(self, name: str | None = None, head: int | None = None) -> str:
        """What `label` gives, in words."""
        title, (high, wide) = self.name_heads(name, head), self.map(name, head).drawn_tile
        return title if high * wide == 1 else f"{title}; each cell the largest of {high:,} x {wide:,} weights"

    def is_tree(self, name: str | None = None) -> bool:
        """Whether the weights of a map are soft parents, which can be drawn as arcs."""
        use = self.uses.get(self.find_map(name))
        return use is not None and use.attention.kind == "tree"

    def plan(self, *, packed: bool, full: Collection[str] | None = None, room: int | None = None) -> dict[str, Form]:
        """How much of every map a tree has, by name, so that all of them have room: bytes, or numbers if they are not
        packed. Of a map whose name is not in `full`, a small picture."""
        room = (BYTES if packed else NUMBERS) if room is None else room
        return choose_forms(self.outlines.values(), lambda name: full is None or name in full, room, packed)

    def tree(
        self,
        *,
        packed: bool = False,
        full: Collection[str] | None = None,
        vectors: Collection[str] = (),
        room: int | None = None,
    ) -> dict[str, Any]:
        """What docs/maps.md describes. `packed`: weights in base64 instead of numbers; of maps whose name is not in
        `full`, only a small picture; names of no map do not matter there, for old links have them. `vectors`: maps
        that come with their queries, keys and values. `room`: as in `plan`."""
        wanted = {self.find_map(name) for name in vectors}
        forms, maps = self.plan(packed=packed, full=full, room=room), []
        for one in self.maps:
            entry = one.tree(packed=packed, form=forms[one.name])
            if one.name in wanted and one.name in self.uses:
                use = self.uses[one.name]
                entry["vectors"] = pack_vectors(use.vectors(), one.columns == "input", use.hidden())
            maps.append(entry)
        task = self.predictor.task
        logprobs = task.look_logprobs(self.predictor.model, self.batch, self.answer)
        return {
            "version": 3,
            "kind": task.config.model.kind,
            "form": task.form._asdict(),
            "text": {"source": self.text, "target": self.answer.text},
            "tokens": {axis: [piece._asdict() for piece in found] for axis, found in self.tokens.items()},
            "scores": {"score": self.answer.score, "logprobs": round_all(logprobs, 6)},
            "answers": [{"text": one.text, "score": one.score, **one.details} for one in self.answers],
            "maps": maps,
            "flags": list(self.answer.flags),
            **({} if self.image is None else {"image": self.image.tree()}),
        }

    def save(self, path: str | Path, name: str | None = None, head: int | None = None, row: int | None = None) -> None:
        """Write .json, .html (one file that opens offline), or a picture (.png, .svg, .pdf) of one map, or of every
        head of every map if `name` is "all". A map of an image is laid over it, for every row or for one."""
        match (path := Path(path)).suffix.lower():
            case ".json":
                write_file(path, json.dumps(self.tree(), ensure_ascii=False).encode())
            case ".html":
                write_file(path, make_page(self.fitting_tree()).encode())
            case ".png" | ".svg" | ".pdf" if name == "all" and self.find_map():
                save_grid(path, [(one.name, one.drawing()) for one in self.maps])
            case ".png" | ".svg" | ".pdf" if self.image and self.map(name, head).columns in self.image.grids:
                chosen, title = self.map(name, head), f"{self.text}\n{self.answer.text}\n{self.name_heads(name, head)}"
                save_overlays(path, self.image, chosen, self.names(chosen.rows), title, row)
            case ".png" | ".svg" | ".pdf" if row is not None:
                raise InputError("--out and --token are different views of a text: ask for one of them at a time.")
            case ".png" | ".svg" | ".pdf":
                chosen, (weights, rows, columns) = self.map(name, head), self.label(name, head)
                text = self.text if len(self.text) < 1000 else " ".join(self.text.split())  # four lines of it
                title = f"{text}\n{self.answer.text}\n{self.title(name, head)}"
                seen = None if chosen.blocks is None else chosen.blocks.mask(*chosen.drawn_tile)
                top = find_dark(weights) if chosen.is_long else None
                save_map(path, weights, rows, columns, title, seen, top, arcs=self.is_tree(name))
            case other:
                raise InputError(f"{path} ends in {other!r}; expected .html, .json, .png, .svg or .pdf.")

    def fitting_tree(self, most: int = 3_000_000) -> dict[str, Any]:
        """The packed tree that fits into a file of about `most` bytes: as much of every map as has room, then the
        vectors of those that are whole."""
        forms, vectors = self.plan(packed=True, room=most), []
        left = most - sum(one.measure(forms[name], packed=True) for name, one in self.outlines.items())
        for one in rank_maps(self.outlines.values()):
            if one.name in self.uses and forms[one.name] == WHOLE and (size := self.measure_vectors(one.name)) <= left:
                vectors.append(one.name)
                left -= size
        return self.tree(packed=True, vectors=vectors, room=most)

    def measure_vectors(self, name: str) -> int:
        """How many bytes of base64 the queries, keys and values of a map take; none of marginals."""
        if name not in self.uses:
            return 0
        (heads, rows, columns), size = (use := self.uses[name]).shape, use.kv.keys.shape[-1]
        return heads * (rows + 2 * columns) * size * 16 // 3


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
            answers[0] = answers[0]._replace(flags=[*answers[0].flags, *flags])
        yield Look(predictor, encoded, answers)
