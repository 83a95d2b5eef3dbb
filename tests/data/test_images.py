"""Images from good, odd and hostile bytes, and the folders and archives that hold them."""

import contextlib
import io
import struct
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.images import pixels
from regard.data.images.pixels import MOST_BYTES, ImageFiles, check_image, read_image, to_pixels
from regard.errors import DataError

Image = pytest.importorskip("PIL.Image")

RGB = np.random.default_rng(1).integers(0, 256, (5, 7, 3)).astype(np.uint8)
"""Five rows of seven pixels."""


def save(image, kind, **settings):
    """An image as the bytes of a file."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **settings)
    return file.getvalue()


def read_pixels(data):
    return np.asarray(read_image(data, "x").image)


def make_png(width, height, rows=b"\0\0"):
    """A PNG whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_formats_without_loss(kind):
    opened = read_image(save(RGB, kind, **({"lossless": True} if kind == "WEBP" else {})), "x")
    assert (opened.image.mode, opened.note) == ("RGB", None)
    assert np.array_equal(np.asarray(opened.image), RGB)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg(mode):
    flat = Image.new("RGB", (16, 16), (200, 200, 200)).convert(mode)
    assert abs(read_pixels(save(flat, "JPEG", quality=95)).astype(int) - 200).max() <= 3


def test_grey_and_palette():
    grey = RGB[..., 0]
    assert np.array_equal(read_pixels(save(grey, "PNG")), np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(read_pixels(save(Image.fromarray(grey > 99), "PNG"))[..., 1], np.where(grey > 99, 255, 0))
    palette = Image.fromarray(RGB).convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    assert np.array_equal(read_pixels(save(palette, "PNG")), RGB)


def test_alpha_lies_over_white():
    alpha = np.random.default_rng(2).integers(0, 256, (5, 7, 1)).astype(np.uint8)
    expected = RGB * (alpha / 255) + 255 * (1 - alpha / 255)
    for kind in ("PNG", "TIFF"):
        assert abs(read_pixels(save(np.concatenate([RGB, alpha], axis=2), kind)) - expected).max() <= 1
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert read_pixels(save(palette, "PNG", transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_of_sixteen_bits_the_upper_eight_are_kept():
    deep = np.array([[0, 255, 256, 65535]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        assert read_pixels(save(Image.fromarray(deep), kind))[0, :, 0].tolist() == [0, 0, 1, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_orientation(orientation, kind):
    """As by the table of EXIF: which side of what is stored is the top, and which is the left."""
    tops = {1: "tl", 2: "tr", 3: "br", 4: "bl", 5: "lt", 6: "rt", 7: "rb", 8: "lb"}  # of row 0, of column 0
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.kron(RGB[:2, :3] // 128 * 255, np.ones((16, 16, 1), dtype=np.uint8))
    first, second = tops[orientation]
    upright = stored if first in "tb" else stored.transpose(1, 0, 2)
    if "b" in (first, second):
        upright = upright[::-1]
    if "r" in (first, second):
        upright = upright[:, ::-1]
    found = read_pixels(save(stored, kind, exif=exif, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {})))
    assert found.shape == upright.shape
    assert abs(found.astype(int) - upright).max() <= 8


def test_damaged_orientation_turns_nothing():
    data = save(RGB, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01nonsense")
    assert np.array_equal(read_pixels(data), RGB)


def test_of_several_frames_the_first_is_taken():
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "green")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = save(
            frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
        opened = read_image(data, "film.x")
        assert opened.note == "film.x has several frames: the first is taken."
        assert opened.image.getpixel((1, 1)) == (255, 0, 0)
    assert read_image(save(frames[0], "GIF"), "x").note is None


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "dog.jpg is empty (0 bytes), expected an image."),
        (b"GIF89a", "dog.jpg is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF."),
        (b"hello", "dog.jpg is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF."),
        (save(RGB, "PPM"), "dog.jpg is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF."),
        (make_png(40_000, 40_000), "dog.jpg is too large, expected at most 50,000,000 pixels. Shrink it."),
        (make_png(10_001, 5_000), "dog.jpg has 10,001 x 5,000 pixels, expected at most 50,000,000 in all. Shrink it."),
        (
            save(np.zeros((2, 2), dtype=np.float32), "TIFF"),
            "dog.jpg is cut short or damaged: its pixels are numbers of 32 bits, expected 8 or 16. Fetch it again.",
        ),
    ],
)  # fmt: skip
def test_refused(data, message):
    with pytest.raises(DataError) as caught:
        read_image(data, "dog.jpg")
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP", "PNG", "JPEG"])
def test_a_check_notices_half_a_file(kind):
    data = save(np.random.default_rng(3).integers(0, 256, (64, 64, 3)).astype(np.uint8), kind)
    check_image(data, "x")
    with pytest.raises(DataError, match=r"^x is (cut short or damaged|not an image)"):
        check_image(data[: len(data) // 2], "x")


def test_a_check_knows_what_cannot_be_read_and_what_can():
    with pytest.raises(DataError, match="its pixels are numbers of 32 bits"):
        check_image(save(np.zeros((2, 2), dtype=np.float32), "TIFF"), "x")
    check_image(save(RGB, "JPEG") + b"film \xff\xd9 of \xff\xda a phone", "x")  # with both marks behind the end


def test_a_truncated_jpeg():
    data = save(np.random.default_rng(3).integers(0, 256, (64, 64, 3)).astype(np.uint8), "JPEG")
    with pytest.raises(
        DataError, match=r"^dog.jpg is cut short or damaged: image file is truncated .*Fetch it again\.$"
    ):
        read_image(data[: len(data) // 2], "dog.jpg")


@pytest.mark.parametrize("side", [40_000, 8_000])
def test_nothing_large_is_allocated_for_a_large_image(side):
    tracemalloc.start()
    with pytest.raises(DataError, match="50,000,000"):
        read_image(make_png(side, side), "x")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


KINDS = ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"]
GOOD = [save(RGB, kind) for kind in KINDS]


@given(
    st.sampled_from(GOOD),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=8),
    st.integers(0, 600),
)
def test_damaged_bytes_are_an_image_or_an_error(data, changes, end):
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    with contextlib.suppress(DataError):
        assert read_image(bytes(damaged[:end]), "x").image.mode == "RGB"


def test_images_need_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"images need Pillow: pip install 'regard\[images\]'\."):
        read_image(b"x", "x")


# --- pixels ----------------------------------------------------------------------------------------------------------


def test_pixels_are_stretched_or_cut():
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 200  # the middle square
    image = Image.fromarray(wide)
    cut, stretched = to_pixels(image, 10, "crop"), to_pixels(image, 30)
    assert (cut.shape, cut.dtype, stretched.shape) == ((10, 10, 3), np.uint8, (30, 30, 3))
    assert (cut == 200).all()
    assert (stretched[:, 12:18] == 200).all()
    assert not stretched[:, :8].any()
    assert (to_pixels(image, 30)[0] == stretched).all()  # what is stretched downwards has equal rows
    assert (to_pixels(Image.fromarray(wide.transpose(1, 0, 2)), 10, "crop") == 200).all()


def test_pixels_of_the_right_size_stay():
    square = np.random.default_rng(4).integers(0, 256, (11, 11, 3)).astype(np.uint8)
    assert np.array_equal(to_pixels(Image.fromarray(square), 11), square)


# --- folders and archives --------------------------------------------------------------------------------------------


def pack(path, names, data=b"data"):
    """A zip with these names, which is made by hand where zipfile would clean a name up."""
    with zipfile.ZipFile(path, "w") as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of names that come twice
        for name in names:
            entry = zipfile.ZipInfo("x")
            entry.filename = name
            archive.writestr(entry, data)
    return str(path)


@pytest.fixture(params=["folder", "zip"])
def place(request, tmp_path):
    """Makes a folder or a zip with these files."""

    def make(*names):
        if request.param == "zip":
            return ImageFiles(pack(tmp_path / "images.zip", names))
        for name in names:
            (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name).write_bytes(b"data")
        return ImageFiles(str(tmp_path / "images"))

    return make


def test_names_of_images(place):
    files = place("b.JPG", "a.png", "in/c.webp", "notes.txt", ".a.png", "__MACOSX/a.png", "in/.git/d.png")
    assert files.names() == ["a.png", "b.JPG", "in/c.webp"]
    assert files.read("a.png") == files.read("in/c.webp") == files.read("c.webp") == b"data"
    assert files.find("d.png") is None


def test_names_that_are_not_there(place):
    files = place("one/a.png", "two/a.png")
    with pytest.raises(
        DataError, match=r"images(\.zip)? has 2 files called a\.png \(one/a\.png, \.\.\): name their folders\."
    ):
        files.read("a.png")
    assert files.read("two/a.png") == b"data"
    for name in ("b.png", "../images.zip", "/etc/passwd", "one", ""):
        with pytest.raises(DataError, match="has no file"):
            files.read(name)


@pytest.mark.parametrize("name", ["../a.png", "in/../../a.png", "/a.png", "in\\a.png", "C:/a.png", "c:a.png"])
def test_names_that_lead_out_of_a_zip(tmp_path, name):
    path = pack(tmp_path / "images.zip", ["b.png", name])
    with pytest.raises(DataError) as caught:
        ImageFiles(path)
    assert str(caught.value) == f"{path} has a file called {name!r}, expected names inside the archive. Pack it again."


def test_names_that_come_twice_in_a_zip(tmp_path):
    path = pack(tmp_path / "images.zip", ["a.png", "a.png"])
    with pytest.raises(DataError, match=r"images\.zip has two files called 'a\.png'\. Pack it again\."):
        ImageFiles(path)


def test_a_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels, "MOST_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", b"\0" * 100_000)
    files = ImageFiles(str(tmp_path / "bomb.zip"))
    with pytest.raises(
        DataError, match=r"bomb\.zip:a\.png has 100,000 bytes, expected at most 1,000 of an image\. Shrink it\."
    ):
        files.read("a.png")
    raw = (tmp_path / "bomb.zip").read_bytes()
    (tmp_path / "bomb.zip").write_bytes(raw.replace(struct.pack("<I", 100_000), struct.pack("<I", 900)))  # a lie
    with pytest.raises(DataError, match=r"bomb\.zip:a\.png is damaged or locked"):
        ImageFiles(str(tmp_path / "bomb.zip")).read("a.png")
    assert MOST_BYTES == 2**26


def test_a_file_that_is_packed_in_a_way_of_its_own(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", b"data")
    with pytest.raises(DataError, match=r"a\.png is damaged or locked: it is packed by method 14\. Pack it again\."):
        ImageFiles(str(tmp_path / "images.zip")).read("a.png")


def test_what_is_no_zip(tmp_path):
    (tmp_path / "images.zip").write_bytes(b"PK\3\4 but no more")
    with pytest.raises(
        DataError, match=r"images\.zip cannot be read as a zip: .* Expected a folder or a zip of images\."
    ):
        ImageFiles(str(tmp_path / "images.zip"))
    with pytest.raises(DataError, match=r"nothing does not exist, expected a folder or a zip of images\."):
        ImageFiles(str(tmp_path / "nothing"))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_zip_is_read_or_refused(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("zip") / "images.zip"
    pack(path, ["a.png", "b.png"])
    raw = bytearray(path.read_bytes())
    for place, value in changes:
        raw[place % len(raw)] = value
    path.write_bytes(raw)
    with contextlib.suppress(DataError):
        files = ImageFiles(str(path))
        assert all(len(files.read(name)) < 1000 for name in files.readers)


def test_nothing_is_written(place, tmp_path):
    files = place("a.png")
    before = sorted(tmp_path.rglob("*"))
    files.read("a.png")
    assert sorted(tmp_path.rglob("*")) == before
