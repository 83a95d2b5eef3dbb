"""What tasks that read images share: paths and uploads become pictures, pictures a grid, and what a frozen encoder
makes of them is kept."""

import contextlib
import functools
import hashlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.config.model import EncoderConfig
from regard.config.vision import VisionConfig
from regard.data.encoding import Encoded, Features, Picture, Report, find_cache, read_file
from regard.data.examples import Example, Image, Source
from regard.data.images.pixels import Opened, read_image
from regard.errors import DataError, InputError
from regard.nn.vision.backbones import make_image_encoder
from regard.nn.vision.encoders import ImageEncoder
from regard.tasks.axes import Piece, Shown, Tokens
from regard.tasks.task import Answered, Generate, Say, Task

SHOWN = 512
"""Pixels on the longer side of an image that is shown."""


def make_encoder(settings: VisionConfig, *, pretrained: bool = False) -> ImageEncoder:
    """The image encoder of these settings; its weights are random unless it is `pretrained`."""
    own: dict[str, Any] = {}
    match settings.image_encoder:
        case "cnn":
            last = len(settings.strides) - 1
            channels = [settings.grid_size >> (last - stage) for stage in range(last + 1)]
            own = {"channels": channels, "strides": settings.strides, "blocks": settings.encoder_layers}
            own |= {"attention": settings.self_attention, "heads": settings.attention_heads}
            own["gate"] = settings.attention_gate
        case "patches":
            sizes = {"size": settings.grid_size, "feedforward": 4 * settings.grid_size}
            heads = {"heads": settings.attention_heads, "positions": "learned", "activation": "gelu"}
            block = EncoderConfig.model_validate({"kind": "encoder", **sizes, **heads})
            own = {"block": block, "patch": settings.patch, "layers": settings.encoder_layers}
    name, size = settings.image_encoder, settings.image_size
    return make_image_encoder(name, size, weights=settings.image_weights, pretrained=pretrained, **own)


class ImageTask(Task):
    """A task that reads images. On the command line, a source is the path of a file."""

    files_are_sources = True
    multi_reference = True
    settings: VisionConfig

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.features = Features()

    @functools.cached_property
    def grids(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every grid that is looked at, by the name of its axis."""
        with torch.random.fork_rng(devices=[]):  # on meta, torch would import its compiler to draw nothing
            return make_encoder(self.settings).grids

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of what the encoder makes of an image."""
        return self.grids["key"]

    # --- the model

    def initialize(self, model: Any, raw: Callable[[], Iterable[str]], say: Say) -> None:
        super().initialize(model, raw, say)
        if self.settings.image_encoder not in ("cnn", "patches"):
            say(f"the image encoder begins with the weights of {self.settings.image_encoder}")
            model.encoder.load_state_dict(make_encoder(self.settings, pretrained=True).state_dict())

    def freeze(self, model: Any) -> None:
        super().freeze(model)
        if self.settings.freeze_encoder:
            model.encoder.requires_grad_(False)

    def warm(self, model: Any, examples: Sequence[Example], report: Report) -> None:
        """Keep what a frozen encoder makes of all images. It is known by the bytes of the image, the name, weights and
        size of the encoder, so runs that share an encoder share it."""
        if not self.settings.freeze_encoder:
            return
        name = self.settings.image_encoder.replace("/", "-").replace(":", "-")
        mark = hash_weights(model.encoder)
        self.features.open(find_cache() / "features" / f"{name}-{self.settings.image_size}-{mark}")
        device = next(model.parameters()).device

        def encode(pixels: Tensor) -> Tensor:
            with torch.inference_mode():
                found: Tensor = model.encoder(pixels.to(device))
                return found

        pictures = [self.picture(image) for image in dict.fromkeys(one.source for one in examples)]
        self.features.fill(pictures, encode, report)

    def states(self, model: Any, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return model.encoder_states(ids, lengths), lengths

    # --- sources

    @classmethod
    def parse(cls, text: str) -> Source:
        return Image(text.strip())

    def make_source(self, fields: Mapping[str, Any]) -> Source:
        """From the bytes of an image's file. A path is not taken: it would open files of the server's."""
        if list(fields) != ["image"]:
            raise InputError(f"{' and '.join(fields)} came, but this model reads images: send image, a file.")
        if not isinstance(fields["image"], bytes) or not fields["image"]:
            raise InputError("image is empty or no bytes, expected the bytes of an image's file.")
        return Image("image", data=fields["image"])

    def check_source(self, source: Source, where: str) -> None:
        image = self.parse(source) if isinstance(source, str) else source
        if not isinstance(image, Image):
            raise InputError(f"{where} is {type(source).__name__}, expected an image.")
        if image.strip() and not image.place:  # what lies in a folder of data was checked when that was read
            with said_of_input():
                self.picture(image).pixels()

    def picture(self, source: Source) -> Picture:
        """A source as the model reads it."""
        image = self.parse(source) if isinstance(source, str) else source
        assert isinstance(image, Image)
        return Picture(image, self.settings.image_size, self.grid[0] * self.grid[1], self.features)

    def encode(self, sources: Sequence[Source]) -> list[Encoded]:
        made = {source: self.picture(source) for source in sources}  # captions of one image share it
        return [Encoded(source, str(source), made[source], [], 0) for source in sources]

    def source_lengths(self, sources: Sequence[Source]) -> list[int]:
        """Images are all alike."""
        return [0] * len(sources)

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        """As of every task; where only a part of an image was read, the first answer says so."""
        for one in super().answer(model, sources, best, generate):
            picture = one and sources[one[0]].ids
            if one and isinstance(picture, Picture) and picture.note:
                one[1][0] = one[1][0]._replace(flags=[*one[1][0].flags, picture.note])
            yield one

    # --- looking

    def cells(self) -> Tokens:
        """The cells of every grid, by row and column from the top left, counted from 0."""
        return {
            axis: [Piece(f"{i},{j}", 0, 0) for i, j in itertools.product(*map(range, grid))]
            for axis, grid in self.grids.items()
        }

    def show_source(self, source: Encoded) -> Shown:
        """The image, and the grids that lie over it; as PNG or JPEG, whichever is smaller."""
        image = open_source(get_image(source.ids)).image.copy()
        image.thumbnail((SHOWN, SHOWN))
        files = {}
        for kind, options in (("PNG", {}), ("JPEG", {"quality": 90})):
            file = io.BytesIO()
            image.save(file, kind, **options)
            files[kind] = file.getvalue()
        kind = min(files, key=lambda kind: len(files[kind]))
        return Shown(files[kind], f"image/{kind.lower()}", image.width, image.height, self.grids)


def get_image(ids: Sequence[int]) -> Image:
    """The image that stands in the place of ids."""
    assert isinstance(ids, Picture)
    return ids.image


def open_source(image: Image) -> Opened:
    """The image that a user sent or named."""
    with said_of_input():
        return read_image(read_file(image), str(image))


@contextlib.contextmanager
def said_of_input() -> Iterator[None]:
    """What is wrong with the data of an image that a user sent or named is wrong input."""
    try:
        yield
    except DataError as error:
        raise InputError(str(error)) from error


def hash_weights(encoder: ImageEncoder) -> str:
    """What an encoder's weights are known by."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
