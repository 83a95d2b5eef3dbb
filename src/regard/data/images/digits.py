"""Scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, in three splits that never change."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.config.data import DigitsData
from regard.data.examples import Image, fingerprint
from regard.data.images.pixels import make_png
from regard.errors import DataError

VALID = TEST = 300
"""Images that are held out for each; the other 1,197 are for training."""


class Digit(NamedTuple):
    """An image (8, 8, 3), black on white, and the digit that somebody wrote."""

    pixels: NDArray[np.uint8]
    label: str


def read_digits() -> dict[str, list[Digit]]:
    """The digits of train, valid and test. Neighbours in the original order are often of one writer, so images are
    dealt out by a hash of their number."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install 'regard[digits]'.") from error
    found = load_digits()
    grey = (255 - found.images * (255 / 16)).round().astype(np.uint8)  # ink is from 0 to 16
    order = sorted(range(len(grey)), key=lambda number: fingerprint(str(number)))
    digits = [Digit(np.repeat(grey[number, :, :, None], 3, axis=2), str(found.target[number])) for number in order]
    return {"train": digits[VALID + TEST :], "valid": digits[:VALID], "test": digits[VALID : VALID + TEST]}


def generate_digits(settings: DigitsData, seed: int) -> tuple[list[tuple[Image, str]], ...]:
    """Images and labels to train on, to validate on and to test on; the seed changes nothing."""
    counts = {"train": settings.examples, "valid": settings.valid, "test": settings.test}
    return tuple(
        [
            (Image(f"digit-{split}-{number}", data=make_png(pixels)), label)
            for number, (pixels, label) in enumerate(digits[: counts[split]], 1)
        ]
        for split, digits in read_digits().items()
    )
