"""Pictures that are made or come with a library: scenes of shapes, and handwritten digits."""

import sys

import numpy as np
import pytest

from regard.data.images.digits import read_digits
from regard.data.images.shapes import COLOURS, SHAPES, draw_scene
from regard.errors import DataError


def find_shapes(pixels):
    """What is in a picture, from its pixels alone: colour -> (shape, box), in the order of mention."""
    found = {}
    for colour, rgb in COLOURS.items():
        inside = (pixels == rgb).all(-1)
        if inside.any():
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
            found[colour] = tell_shape(inside[box[1] : box[3], box[0] : box[2]]), box
    return found


def tell_shape(inside):
    """The name of a shape, by how it fills the box around it."""
    if inside.all():
        return "square"
    if inside[-1].all():
        return "triangle"
    if (inside == (inside.all(1)[:, None] | inside.all(0))).all():  # whole rows and whole columns alone
        return "cross"
    return "circle" if inside.mean() > 0.65 else "star"


def write_caption(found):
    """The caption of what was found, by the rules that the module states."""
    names, middles = [], []
    for colour, (shape, (left, top, right, bottom)) in found.items():
        names.append(f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}")
        middles.append((left + right, top + bottom))
    text = names[0]
    for number in range(1, len(names)):
        right, down = (one - other for one, other in zip(middles[0], middles[number], strict=True))
        sideways = ("right of" if right > 0 else "left of") if abs(right) > abs(down) else None
        text += (
            (" and " if number > 1 else " ") + (sideways or ("below" if down > 0 else "above")) + f" {names[number]}"
        )
    return text


@pytest.mark.parametrize("size", [64, 97])
def test_a_caption_can_be_read_off_its_picture(size):
    counts = set()
    for seed in range(200):
        pixels, caption, boxes = draw_scene(seed, size)
        found = find_shapes(pixels)
        assert (pixels.shape, pixels.dtype) == ((size, size, 3), np.uint8)
        assert write_caption(found) == caption
        words = caption.split()
        assert [(words[place - 1], words[place]) for place in boxes] == [(name, one[0]) for name, one in found.items()]
        assert [*boxes.values()] == [box for _, box in found.values()]
        assert all(
            0 <= left < right <= size and 0 <= top < bottom <= size for left, top, right, bottom in boxes.values()
        )
        counts.add(len(boxes))
    assert counts == {1, 2, 3}


def test_a_scene_is_a_function_of_its_seed():
    one, again, other = draw_scene(5), draw_scene(5), draw_scene(6)
    assert np.array_equal(one.pixels, again.pixels)
    assert one[1:] == again[1:]
    assert not np.array_equal(one.pixels, other.pixels)


def test_every_word_comes():
    words = {word for seed in range(300) for word in draw_scene(seed).caption.split()}
    assert words == {*COLOURS, *SHAPES, "a", "an", "and", "above", "below", "left", "right", "of"}


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_dealt_out_once():
    load = pytest.importorskip("sklearn.datasets").load_digits
    splits = read_digits()
    assert {name: len(split) for name, split in splits.items()} == {"train": 1197, "valid": 300, "test": 300}
    every = [digit for split in splits.values() for digit in split]
    assert all(digit.pixels.shape == (8, 8, 3) and digit.pixels.dtype == np.uint8 for digit in every)
    # ink is from 0 to 16, and white from 255 down to 0: nothing is lost, and every image is there with its label
    ours = sorted((((255 - digit.pixels[..., 0]) / (255 / 16)).round().tolist(), digit.label) for digit in every)
    theirs = load()
    assert ours == sorted(
        (image.tolist(), str(label)) for image, label in zip(theirs.images, theirs.target, strict=True)
    )
    for split in splits.values():
        assert {digit.label for digit in split} == set("0123456789")


def test_digits_need_their_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"the digits come with scikit-learn: pip install 'regard\[digits\]'\."):
        read_digits()
