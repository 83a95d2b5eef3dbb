"""Looking from outside: every attention map of a model, by module path, while nothing in the model knows of it.

The model runs as always, with the fast path; a hook on each attention recomputes its map from that layer's own queries
and keys. While a model decodes, what it read is remembered for every hypothesis, so the maps of the one that was chosen
can be put together afterwards.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.equation import KeyValues
from regard.data.batching import pad_sources
from regard.data.vocabulary import EOS
from regard.errors import InputError
from regard.nn.attention import Attention
from regard.nn.state import State, Steppable

Seen = Callable[[str, Attention, Tensor, KeyValues, Tensor | None], None]
"""Gets the module path, the attention, its queries, its keys and values, and its mask."""


@contextlib.contextmanager
def watch(model: nn.Module, seen: Seen, only: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Call `seen` whenever an attention whose path is wanted is used inside the block."""

    def call(name: str, module: Attention, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen(name, module, *(*inputs, None)[:3])

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Attention) and only(name):
                hooks.enter_context(module.register_forward_hook(functools.partial(call, name)))
        yield


class Trail(NamedTuple):
    """Rides along in a decoder's state, so that it is re-ordered with the hypotheses."""

    sentence: Tensor  # (rows,) number of the source
    tokens: Tensor  # (rows, n) what was read so far


class Maps(dict[str, Tensor]):
    """Module path -> (batch, heads, query, key), never averaged: of plain forward passes. Maps of one module that were
    made one after another (a recurrent decoder's) stand one below the other, as more queries. With Linformer, tokens
    look at its slots: (batch, heads, query, slots)."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[tuple[int, ...], dict[str, Tensor]] = {}
        """(source number, tokens read) -> the maps of the step that read the last of them, (heads, 1, key)."""
        self.sources: dict[tuple[int, ...], int] = {}
        """What a source is known by (`identify_source`) -> its number."""
        self.encoded: dict[int, dict[str, Tensor]] = {}
        """Source number -> the encoder's maps."""
        self.of_itself: dict[str, bool] = {}
        """Module path -> whether a text looks at itself there."""

    def add(self, name: str, weights: Tensor) -> None:
        self[name] = torch.cat([self[name], weights], dim=-2) if name in self else weights

    def take(self) -> dict[str, Tensor]:
        """What was added since the last time."""
        found = dict(self)
        self.clear()
        return found

    def of(self, source: Sequence[int], tokens: Sequence[int]) -> dict[str, Tensor]:
        """The maps (heads, query, key) that led to one output of decoding: the ids of its source, and of the output
        without <bos> and <eos>. The last query is the one that gave <eos>."""
        known = identify_source(pad_sources([source])[0][0])
        if known not in self.sources:
            raise InputError("nothing was decoded from this source while it was recorded.")
        number = self.sources[known]
        first = next(key[1] for key in self.steps if key[0] == number)  # <bos>, or a prompt's last token
        if EOS in tokens or (number, first, *tokens) not in self.steps:  # a beam may step on behind an end
            raise InputError(
                "these tokens were not decoded from this source while it was recorded: give those of an output, "
                "without <bos> and <eos>."
            )
        rows = [self.steps[number, first, *tokens[:length]] for length in range(len(tokens) + 1)]
        found = dict(self.encoded[number])
        for name in rows[-1]:
            parts = [row[name] for row in rows]
            if self.of_itself[name]:  # a row more is a key more; a prompt was read before
                prompt = [found[name]] if name in found else []
                ends = [sum(part.shape[-1] for part in prompt) + count for count in range(1, len(rows) + 1)]
                pairs = zip(parts, ends, strict=True)
                parts = [*prompt, *(F.pad(part[..., -end:], (max(0, end - part.shape[-1]), 0)) for part, end in pairs)]
                longest = ends[-1]
            else:
                longest = len(source)
                parts = [part[..., :longest] for part in parts]
            found[name] = torch.cat([F.pad(part, (0, longest - part.shape[-1])) for part in parts], dim=-2)
        return found


@contextlib.contextmanager
def record(
    model: nn.Module, only: Callable[[str], bool] = lambda name: True, heads: slice = slice(None)
) -> Iterator[Maps]:
    """Record the maps that the model makes inside the block: of every attention whose path is wanted, of all its heads
    or of some. What is not wanted is not computed. After decoding, ask `Maps.of` for the output that was chosen."""
    maps = Maps()

    def seen(name: str, module: Attention, queries: Tensor, kv: KeyValues, mask: Tensor | None) -> None:
        maps.add(name, module.weights(queries, kv, mask, heads).detach())
        maps.of_itself[name] = module.is_self and module.slots is None

    with watch(model, seen, only), follow_decoding(model, maps):
        yield maps


def identify_source(source: Tensor) -> tuple[int, ...]:
    """What a source is known by: its ids (source,); of an image, whatever its form, a hash of its numbers."""
    if source.dim() == 1:
        return tuple(source.tolist())
    return (hash(source.cpu().contiguous().view(torch.uint8).numpy().tobytes()),)


@contextlib.contextmanager
def follow_decoding(model: nn.Module, maps: Maps) -> Iterator[None]:
    """While a model decodes (`start`, `step`), file its maps by what each hypothesis has read."""
    if not isinstance(model, Steppable):
        yield
        return
    decoder: Any = model
    start, step = decoder.start, decoder.step

    def starting(source: Tensor, lengths: Tensor) -> State:
        state: State = start(source, lengths)
        encoded, numbers = maps.take(), []
        for row, length in enumerate(lengths.tolist()):
            text = source.dim() == 2
            own = source[row, :length] if text else source[row]
            number = maps.sources.setdefault(identify_source(own), len(maps.sources))
            begin = 0 if state.first is None else source.shape[1] - length  # prompts end in line
            read = slice(begin, begin + length) if text else slice(None)  # images have no padding
            maps.encoded[number] = {
                name: part[row, :, read, read if maps.of_itself[name] else slice(None)]
                for name, part in encoded.items()
            }
            numbers.append(number)
        trail = Trail(torch.tensor(numbers, device=source.device), lengths.new_empty(len(numbers), 0))
        return State(state.source, (state.cache, trail), state.first)

    def stepping(tokens: Tensor, state: State) -> tuple[Tensor, State]:
        cache, trail = state.cache
        logprobs, after = step(tokens, State(state.source, cache))
        trail = Trail(trail.sentence, torch.cat([trail.tokens, tokens[:, None]], dim=1))
        # hypotheses of one sentence may have been its queries: as rows again, (rows, heads, 1, key)
        found = maps.take().items()
        made = {name: part.transpose(1, 2).reshape(len(tokens), part.shape[1], 1, -1) for name, part in found}
        for row, (sentence, read) in enumerate(zip(trail.sentence.tolist(), trail.tokens.tolist(), strict=True)):
            maps.steps[sentence, *read] = {name: part[row] for name, part in made.items()}
        return logprobs, State(after.source, (after.cache, trail))

    own = vars(decoder)
    before = {name: own[name] for name in ("start", "step") if name in own}  # by a record around this
    decoder.start, decoder.step = starting, stepping
    try:
        yield
    finally:
        del decoder.start, decoder.step
        own.update(before)
