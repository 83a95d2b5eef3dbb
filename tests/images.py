"""Small runs that read images, and files of images: good, odd and hostile ones."""

import io
import struct
import zlib

from PIL import Image

import regard
from regard.config.toml import read
from regard.evaluation.fit import fit
from regard.training.prepare import start_run

SMALL = (
    *("data.examples=40", "data.valid=8", "data.test=8", "train.steps=2", "train.validate_every=2", "train.warmup=1"),
    *("train.batch_tokens=256", "model.grid_size=8"),
)
SCENES = ("data.pixels=24", "model.image_size=24", "model.size=16", "model.embedding=8", "model.feedforward=16")


def image_run(folder, recipe, *changes):
    """A run of a recipe, trained for a moment."""
    own = SCENES if recipe == "shapes" else ("train.patience=0",)
    config = read(recipe, [*SMALL, *own, *changes])
    fit(start_run(config, folder), folder, lambda event: None, device="cpu")
    return regard.load(folder, device="cpu")


def scene(size=(30, 20), mode="RGB"):
    """An image with a red square in its upper left quarter, on white."""
    image = Image.new("RGB", size, "white")
    image.paste((220, 30, 30), (size[0] // 10, size[1] // 10, size[0] // 2, size[1] // 2))
    return image.convert(mode)


def saved(image, kind="PNG", **options):
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animated():
    """A GIF of two frames: the red square, and nothing."""
    return saved(scene(), "GIF", save_all=True, append_images=[Image.new("RGB", (30, 20), "blue")])


def huge_png(columns=40_000, rows=40_000):
    """A PNG file whose header promises more pixels than fit anywhere."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )
