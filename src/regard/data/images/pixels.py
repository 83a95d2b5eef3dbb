"""Images from untrusted bytes, and the folders and zip archives that hold them.

What comes out is always an upright RGB image. Its size is read from the header and judged before a pixel is decoded;
nothing is ever written, and no name leads out of its folder or archive.
"""

import functools
import io
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
"""Formats that are read, by Pillow's names: the common ones alone, because every decoder can be attacked."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
MOST_PIXELS = 50_000_000
"""Pixels of the largest image that is decoded."""
MOST_BYTES = 2**26
"""Bytes of the largest file that is read."""
DAMAGE = (OSError, ValueError, TypeError, LookupError, SyntaxError, ArithmeticError, EOFError, MemoryError, zlib.error)
"""What Pillow raises for a damaged file."""
JPEG_SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"
"""Marks of a JPEG file that its compressed pixels cannot contain."""
ORIENTATION = 0x0112
"""EXIF's number for how a camera was held."""

Fit = Literal["stretch", "crop"]


class FormatError(DataError):
    """Bytes that are no image of a format that is read."""


class PixelsError(DataError):
    """An image of more pixels than are decoded."""


class Opened(NamedTuple):
    """An upright RGB image, and what a user should know of how it was read."""

    image: "Image"
    note: str | None


def import_pillow() -> Any:
    """Pillow's modules of images, if it is installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("images need Pillow: pip install 'regard[images]'.") from error
    return Image


@functools.lru_cache(1)  # whoever checks, reads and shows an image decodes it once
def read_image(data: bytes, where: str) -> Opened:
    """The image in the bytes of a file, turned as its EXIF data say, in RGB; alpha lies over white. Of several frames
    the first is taken, and the note says so. Raises a DataError that names `where` for what cannot be read. Others may
    be given the same image: copy it before changing it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images and of odd metadata: judged below, or of no matter
        image = open_image(data, where)
        try:
            several = getattr(image, "is_animated", False)
            upright = to_rgb(turn(image))
        except DAMAGE as error:
            raise DataError(f"{where} is cut short or damaged: {error}. Fetch it again.") from error
    return Opened(upright, f"{where} has several frames: the first is taken." if several else None)


def open_image(data: bytes, where: str, most: int = MOST_PIXELS) -> "Image":
    """An image of which only the header was read, and judged: it has at most so many pixels."""
    pillow = import_pillow()
    if not data:
        raise DataError(f"{where} is empty (0 bytes), expected an image.")
    try:
        image: Image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise PixelsError(f"{where} is too large, expected at most {most:,} pixels. Shrink it.") from error
    except DAMAGE as error:
        raise FormatError(f"{where} is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF.") from error
    columns, rows = image.size
    if columns * rows > most:
        size = f"{columns:,} x {rows:,} pixels"
        raise PixelsError(f"{where} has {size}, expected at most {most:,} in all. Shrink it.")
    return image


def check_image(data: bytes, where: str) -> None:
    """Raise what `read_image` would, without decoding a pixel where the file itself can tell: a few times as fast. A
    PNG file has checksums; a JPEG file has an end behind its last scan, unless something else stands behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = open_image(data, where)
        try:
            image.verify()
        except DAMAGE as error:
            raise DataError(f"{where} is cut short or damaged: {error}. Fetch it again.") from error
    ended = image.format != "JPEG" or data.rfind(JPEG_END) > data.rfind(JPEG_SCAN)
    if not ended or image.format not in ("JPEG", "PNG") or image.mode in ("I", "F"):
        read_image(data, where)


def turn(image: "Image") -> "Image":
    """The image as it was seen: cameras write how they were held into the EXIF data. Damaged data turn nothing."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    image.load()  # TIFF turns itself while it is decoded, and then no longer says so
    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # the pixels are good; parsers of metadata fail each in its own way
        return image
    return image.transpose(turns[orientation]) if orientation in turns else image


def to_rgb(image: "Image") -> "Image":
    """An image of any mode in RGB; alpha lies over white, and of 16 bits the upper 8 are kept."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers of 32 bits, expected 8 or 16")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def to_pixels(image: "Image", size: int, fit: Fit = "stretch") -> NDArray[np.uint8]:
    """An RGB image as a square (size, size, 3): stretched, so that everything is seen, or cut to its middle, so that
    nothing changes its shape. Bicubic, and smoothed where it shrinks."""
    from PIL.Image import Resampling

    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side) if fit == "crop" else None
    if (width, height) != (size, size):
        image = image.resize((size, size), Resampling.BICUBIC, box=box)
    return np.array(image, dtype=np.uint8)


def make_png(pixels: NDArray[np.uint8]) -> bytes:
    """Pixels (height, width, 3) as the bytes of a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


class ImageFiles:
    """The files of a folder, or of a zip archive, by name. Names are paths inside it, with slashes. A name without
    folders also finds the only file of that name in any folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.readers = list_archive(path) if Path(path).is_file() else list_folder(path)
        self.inner: dict[str, list[str]] = {}
        """The last part of a name -> the names that end in it."""
        for name in self.readers:
            self.inner.setdefault(PurePosixPath(name).name, []).append(name)

    def names(self) -> list[str]:
        """The names of all files that end as images do, in order; hidden ones are left out."""
        return sorted(name for name in self.readers if name.lower().endswith(SUFFIXES) and not is_hidden(name))

    def find(self, name: str) -> str | None:
        """The whole name of a file that is given by it or by its last part; None if there is none."""
        if name in self.readers:
            return name
        found = [one for one in self.inner.get(name, []) if not is_hidden(one)]
        if len(found) > 1:
            raise DataError(f"{self.path} has {len(found)} files called {name} ({found[0]}, ..): name their folders.")
        return found[0] if found else None

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        whole = self.find(name)
        if whole is None:
            raise DataError(f"{self.path} has no file {name}.")
        return self.readers[whole]()


@functools.lru_cache(8)
def open_files(place: str) -> ImageFiles:
    """The images of a folder or zip archive, listed once."""
    return ImageFiles(place)


def is_hidden(name: str) -> bool:
    """Whether a file is one that systems leave behind beside what people put there."""
    return any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def list_folder(path: str) -> dict[str, Callable[[], bytes]]:
    """Every file below a folder -> what reads it."""
    if not Path(path).is_dir():
        raise DataError(f"{path} does not exist, expected a folder or a zip of images.")

    def reader(file: Path) -> Callable[[], bytes]:
        def read() -> bytes:
            try:
                check_size(str(file), file.stat().st_size)
                return file.read_bytes()
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror}.") from error

        return read

    return {file.relative_to(path).as_posix(): reader(file) for file in Path(path).rglob("*") if file.is_file()}


def list_archive(path: str) -> dict[str, Callable[[], bytes]]:
    """Every file in a zip archive -> what reads it. Names that lead out of it, or that come twice, are refused."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path} cannot be read as a zip: {error}. Expected a folder or a zip of images.") from error

    def reader(member: zipfile.ZipInfo) -> Callable[[], bytes]:
        def read() -> bytes:
            where = f"{path}:{member.filename}"
            check_size(where, member.file_size)  # zipfile never unpacks more than what is declared
            try:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise zipfile.BadZipFile(f"it is packed by method {member.compress_type}")
                return archive.read(member)
            except (zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
                raise DataError(f"{where} is damaged or locked: {error}. Pack it again.") from error

        return read

    found: dict[str, Callable[[], bytes]] = {}
    for member in archive.infolist():
        if member.is_dir():
            continue
        name = member.orig_filename  # before zipfile cleans it up
        if "\\" in name or "\0" in name or name.startswith("/") or ".." in name.split("/") or name[1:2] == ":":
            raise DataError(f"{path} has a file called {name!r}, expected names inside the archive. Pack it again.")
        if name in found:
            raise DataError(f"{path} has two files called {name!r}. Pack it again.")
        found[name] = reader(member)
    return found


def check_size(where: str, size: int) -> None:
    """Refuse a file that no image needs."""
    if size > MOST_BYTES:
        raise DataError(f"{where} has {size:,} bytes, expected at most {MOST_BYTES:,} of an image. Shrink it.")
