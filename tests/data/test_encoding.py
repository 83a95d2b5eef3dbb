"""Pictures in the place of ids, and what frozen encoders made of them, kept on disk."""

import io

import pytest
import torch
from PIL import Image as Pillow
from safetensors import safe_open

from regard.data import encoding
from regard.data.encoding import Features, Picture, find_cache, read_file
from regard.data.examples import Image
from regard.data.vocabulary import EOS, UNK, unframed
from regard.errors import DataError


def png(shade, mode="RGB"):
    file = io.BytesIO()
    Pillow.new(mode, (6, 4), shade).save(file, "PNG")
    return file.getvalue()


def pictures(count, features):
    return [Picture(Image(f"{n}", data=png((n, 0, 255 - n))), 8, 4, features) for n in range(count)]


def test_a_picture_is_as_long_as_its_grid():
    picture = Picture(Image("x", data=png((1, 2, 3))), 8, 6, Features())
    assert len(picture) == 6
    assert picture.count(UNK) == 0
    assert unframed(picture) == list(range(EOS + 1, EOS + 7))
    assert picture.pixels().shape == (3, 8, 8)
    assert picture.pixels()[:, 0, 0].tolist() == [1, 2, 3]
    assert picture.features() is None


def test_where_images_are_read_from(tmp_path):
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    same = [Image("a.png", str(tmp_path)), Image(str(tmp_path / "a.png")), Image("x", data=png((1, 2, 3)))]
    assert len({read_file(image) for image in same}) == 1
    with pytest.raises(DataError, match=r"gone.png does not exist, expected the path of an image"):
        read_file(Image(str(tmp_path / "gone.png")))
    with pytest.raises(DataError, match="cannot be read: "):
        read_file(Image(str(tmp_path)))
    with pytest.raises(DataError, match="cannot be read: "):
        read_file(Image("a\0b"))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 2)
    monkeypatch.setattr(encoding, "SHARD", 4)


def encode(pixels):
    """The mean colour, four times."""
    return pixels.float().mean((2, 3))[:, None].expand(-1, 4, -1)


def test_every_image_is_decoded_once(tmp_path, small, monkeypatch):
    kept = Features()
    kept.open(tmp_path)
    decoded, told = [], []
    read = Picture.pixels
    monkeypatch.setattr(Picture, "pixels", lambda self: decoded.append(self.key) or read(self))
    own = pictures(7, kept)
    kept.fill([*own, *own], encode, lambda *counts: told.append(counts))
    assert len(decoded) == len(set(decoded)) == 7
    assert told == [(2, 7), (4, 7), (6, 7), (7, 7)]
    for number, picture in enumerate(own):
        assert picture.features().tolist() == [[number, 0, 255 - number]] * 4
        assert picture.features().dtype == torch.float16
    assert sorted(len(open_keys(path)) for path in tmp_path.iterdir()) == [3, 4]
    again = Features()
    again.open(tmp_path)
    again.fill(pictures(7, again), encode, lambda *counts: pytest.fail("nothing is missing"))


def open_keys(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()["keys"].split()


def test_a_stopped_computation_goes_on(tmp_path, small):
    kept = Features()
    kept.open(tmp_path)

    def stop(done, of):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.fill(pictures(9, kept), encode, stop)
    assert len(list(tmp_path.iterdir())) == 1  # a whole file of four; nothing half-written
    again, told = Features(), []
    again.open(tmp_path)
    again.fill(pictures(9, again), encode, lambda *counts: told.append(counts))
    assert told[-1] == (5, 5)
    assert all(picture.features() is not None for picture in pictures(9, again))


def test_damaged_files_are_computed_again(tmp_path, small):
    kept = Features()
    kept.open(tmp_path)
    kept.fill(pictures(3, kept), encode, lambda *counts: None)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    again, told = Features(), []
    again.open(tmp_path)
    assert not again
    again.fill(pictures(3, again), encode, lambda *counts: told.append(counts))
    assert told[-1] == (3, 3)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_said(tmp_path):
    kept = Features()
    (tmp_path / "file").write_bytes(b"")
    kept.open(tmp_path / "file" / "below")
    with pytest.raises(DataError, match=r"cannot be written: .* set REGARD_CACHE to a folder"):
        kept.fill(pictures(1, kept), encode, lambda *counts: None)


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "own"))
    assert find_cache() == tmp_path / "own"
    monkeypatch.delenv("REGARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert find_cache() == tmp_path / "caches" / "regard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache() == tmp_path / ".cache" / "regard"
