"""Sources as models read them: texts as token ids, each with the characters it came from, cut to what a model takes;
images as pictures, which are as long as their grid, and tensors only when a batch is made.

What a frozen encoder makes of an image never changes, so it is kept on disk (`Features`) and read from there.
"""

import contextlib
import functools
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.config.text import TextConfig
from regard.data.examples import Dropped, Example, Image, Ledger, Source
from regard.data.images.pixels import check_size, open_files, read_image, to_pixels
from regard.data.vocabulary import SPECIAL, Vocabulary, clean
from regard.errors import DataError

BATCH, SHARD = 32, 256
"""Images that are encoded at once, and images of one file of features."""
Report = Callable[[int, int], None]
"""Hears how many of how many are done."""


class Encoded(NamedTuple):
    """A source as ids with character offsets into its text, special tokens included."""

    source: Source
    text: str  # what the offsets count in; of a question, question and context on two lines
    ids: Sequence[int]  # of an image, a `Picture`
    offsets: list[tuple[int, int]]
    length: int  # tokens before anything was cut, without special ones; of a prompt, with its <bos>


def encode_texts(
    texts: Sequence[str], vocabulary: Vocabulary, most: int, *, lead: Sequence[int] = (), tail: Sequence[int] = ()
) -> list[Encoded]:
    """Texts as at most `most` ids each, cut at the end, with special tokens before (`lead`) and behind (`tail`)."""
    out = []
    for text, (ids, offsets) in zip(texts, vocabulary.encode_all(texts), strict=True):
        end = (len(text), len(text))
        inside = [*[(0, 0)] * len(lead), *offsets[:most], *[end] * len(tail)]
        out.append(Encoded(text, text, [*lead, *ids[:most], *tail], inside, len(ids)))
    return out


def reject_surrogates(example: Example) -> Example | Dropped:
    """An example, unless its JSON spelled half a character (a lone surrogate)."""
    if any(clean(side) != side for side in (str(example.source), example.target)):
        return Dropped("not valid Unicode", example.where)
    return example if example.target.strip() else example._replace(target="")


def fits(tokens: int, text: TextConfig, ledger: Ledger, where: str) -> bool:
    """Whether an example of so many tokens is taken; one that is too long is dropped, cut or an error, and counted."""
    if tokens <= text.max_length:
        return True
    if text.longer == "error":
        raise DataError(
            f"{where} has {tokens:,} tokens, at most {text.max_length:,} fit (text.max_length). "
            "Set text.longer to drop or cut."
        )
    if text.longer == "drop":
        ledger.discard("too long", where)
        return False
    ledger.cut += 1
    return True


def read_file(image: Image) -> bytes:
    """The bytes of an image's file."""
    if image.data:
        return image.data
    if image.place:
        return open_files(image.place).read(image.name)
    path = Path(image.name)
    try:
        check_size(image.name, path.stat().st_size)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{image.name} does not exist, expected the path of an image.") from error
    except (OSError, ValueError) as error:  # a path may hold a zero byte
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{image.name} cannot be read: {reason}.") from error


class Picture(Sequence[int]):
    """An image in the place of ids. It has a token for every cell of its grid, numbered behind the special ones, so
    that whatever counts, groups or names tokens can; what a model reads is `pixels`, or `features` where they are
    kept."""

    def __init__(self, image: Image, size: int, cells: int, features: "Features") -> None:
        """An image of any size becomes a square of `size` pixels on a side."""
        self.image, self.size, self.kept = image, size, features
        self.cells = range(len(SPECIAL), len(SPECIAL) + cells)
        self.note: str | None = None  # what a user should know of how it was read, once it was

    def __len__(self) -> int:
        return len(self.cells)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return self.cells[place]

    @functools.cached_property
    def key(self) -> str:
        """A hash of the bytes of its file."""
        return hashlib.blake2b(read_file(self.image), digest_size=16).hexdigest()

    def pixels(self) -> Tensor:
        """What is seen: bytes (3, size, size). Of images that are sent, whoever checked one has decoded it before."""
        if not self.image.data:
            return self.decode().pixels
        place = (self.key, self.size)
        square = SQUARES.pop(place, None) or self.decode()
        SQUARES[place] = square
        while len(SQUARES) > MOST_SQUARES:
            SQUARES.popitem(last=False)
        self.note = square.note
        return square.pixels

    def decode(self) -> "Square":
        """What is seen, and what a user should know of how it was read."""
        image, self.note = read_image(read_file(self.image), str(self.image))
        return Square(torch.from_numpy(to_pixels(image, self.size)).permute(2, 0, 1), self.note)

    def features(self) -> Tensor | None:
        """What a frozen encoder made of it (cells, depth), if that was kept."""
        return self.kept.get(self.key) if self.kept else None


class Square(NamedTuple):
    """A decoded image."""

    pixels: Tensor  # bytes (3, size, size)
    note: str | None


SQUARES: OrderedDict[tuple[str, int], Square] = OrderedDict()
"""Images that were sent and decoded last, by the hash of their file and their size."""
MOST_SQUARES = 128


def stack_pictures(pictures: Sequence[Picture]) -> Tensor:
    """Features (batch, cells, depth) of 16 bits if those of all are kept, else pixels (batch, 3, size, size)."""
    kept = [picture.features() for picture in pictures]
    found = [one for one in kept if one is not None]
    return torch.stack(found) if len(found) == len(kept) else stack_pixels(pictures)


def stack_pixels(pictures: Sequence[Picture]) -> Tensor:
    """Bytes (batch, 3, size, size)."""
    return torch.stack([picture.pixels() for picture in pictures])


def find_cache() -> Path:
    """The folder of what can be computed again: $REGARD_CACHE, else regard's folder among the user's caches."""
    if own := os.environ.get("REGARD_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


class Features:
    """Tensors by key, in safetensors files that are mapped into memory, not read. Every file is written beside its
    place and renamed when it is whole; its name comes from its keys, so processes that compute the same do not
    disturb each other, and what was computed before a stop is found again."""

    def __init__(self) -> None:
        """Nothing is kept until a folder is opened."""
        self.folder: Path | None = None
        self.places: dict[str, tuple[Tensor, int]] = {}

    def open(self, folder: Path) -> None:
        """Keep tensors in a folder from now on, and know what is there."""
        if folder != self.folder:
            self.folder, self.places = folder, {}
            for path in sorted(folder.glob("*.safetensors")):
                self.map_file(path)

    def __bool__(self) -> bool:
        return bool(self.places)

    def get(self, key: str) -> Tensor | None:
        """The tensor of a key, if it is kept."""
        if key not in self.places:
            return None
        tensor, row = self.places[key]
        return tensor[row]

    def map_file(self, path: Path) -> None:
        """Learn what is in a file; one that is damaged is left alone, its images are computed again."""
        try:
            with safe_open(path, framework="pt") as file:
                keys, tensor = file.metadata()["keys"].split(), file.get_tensor("features")
        except (SafetensorError, OSError, KeyError, TypeError):
            return
        self.places |= {key: (tensor, row) for row, key in enumerate(keys)}

    def add(self, keys: Sequence[str], tensor: Tensor) -> None:
        """Keep tensors (n, ..), one for each key."""
        assert self.folder is not None
        path = self.folder / f"{hashlib.blake2b(' '.join(keys).encode(), digest_size=8).hexdigest()}.safetensors"
        beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"features": tensor.contiguous()}, beside, metadata={"keys": " ".join(keys)})
            os.replace(beside, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise DataError(
                f"{path} cannot be written: {error}. Make room, or set REGARD_CACHE to a folder that has some."
            ) from error
        self.map_file(path)

    def fill(self, pictures: Iterable[Picture], encode: Callable[[Tensor], Tensor], report: Report) -> None:
        """Compute what is missing: pixels (batch, 3, size, size) -> features (batch, cells, depth). Every image is
        decoded once."""
        missing = list({picture.key: picture for picture in pictures if picture.key not in self.places}.values())
        parts = [missing[start : start + BATCH] for start in range(0, len(missing), BATCH)]
        made: list[Tensor] = []
        keys: list[str] = []
        with ThreadPoolExecutor(1) as reader:  # the next images are decoded while these are encoded
            ahead = [reader.submit(stack_pixels, part) for part in parts[:1]]
            for number, part in enumerate(parts, 1):
                pixels = ahead.pop().result()
                ahead += [reader.submit(stack_pixels, following) for following in parts[number : number + 1]]
                made.append(encode(pixels).half().cpu())
                keys += [one.key for one in part]
                if len(keys) >= SHARD or number == len(parts):
                    self.add(keys, torch.cat(made))
                    made, keys = [], []
                report(min(number * BATCH, len(missing)), len(missing))
