"""Scenes of coloured shapes that are made, with a caption that is the only right one and a box for every shape word.

A scene has one to three shapes, each of another colour. They are mentioned in the order of COLOURS, and the first is
placed against each other one by the axis on which the two are farther apart:
"a red circle above a green square and left of a blue star".
"""

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.config.data import ShapesData
from regard.data.examples import Box as Known
from regard.data.examples import Image
from regard.data.images.pixels import make_png

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; the last two are the first pixels outside."""
Offsets = NDArray[np.floating[Any]]

COLOURS = {
    "red": (220, 30, 30),
    "orange": (250, 140, 20),
    "yellow": (240, 220, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "purple": (150, 50, 180),
    "black": (20, 20, 20),
}
SHAPES: dict[str, Callable[[Offsets, Offsets], NDArray[np.bool_]]] = {
    "circle": lambda x, y: x**2 + y**2 <= 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 0.9,
    "triangle": lambda x, y: (abs(y) <= 0.9) & (abs(x) <= (y + 0.9) / 1.8),
    "star": lambda x, y: abs(x) ** 0.7 + abs(y) ** 0.7 <= 1,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 0.95),
}
"""Whether a point is inside, by its offset from the middle to the right and down, in units of the radius."""
WHITE = 255


class Scene(NamedTuple):
    """A picture, what is to be said of it, and where each shape word's shape is."""

    pixels: Pixels  # (size, size, 3)
    caption: str
    boxes: dict[int, Box]  # by the number of the word in the caption


class Shape(NamedTuple):
    """A shape with its middle and radius in pixels."""

    colour: str
    name: str
    x: float
    y: float
    radius: float


def draw_scene(seed: int, size: int = 64) -> Scene:
    """The scene of a seed, `size` pixels wide and high."""
    rng = random.Random(seed)
    shapes = place_shapes(rng, size)
    pixels: Pixels = np.full((size, size, 3), WHITE, dtype=np.uint8)
    words: list[str] = []
    boxes: dict[int, Box] = {}
    for number, shape in enumerate(shapes):
        if number:
            words += [*(["and"] if number > 1 else []), *relate(shapes[0], shape).split()]
        words += ["a" if shape.colour != "orange" else "an", shape.colour, shape.name]
        boxes[len(words) - 1] = draw_shape(pixels, shape)
    return Scene(pixels, " ".join(words), boxes)


def place_shapes(rng: random.Random, size: int) -> list[Shape]:
    """One to three shapes that do not touch, of which the first lies clearly on one side of each other one."""
    count = rng.randint(1, 3)
    colours = sorted(rng.sample(list(COLOURS), count), key=list(COLOURS).index)
    while True:  # about every third try succeeds
        shapes = []
        for colour in colours:
            radius = size * rng.uniform(0.1, 0.16)
            x, y = (rng.uniform(radius + 1, size - radius - 1) for _ in range(2))
            shapes.append(Shape(colour, rng.choice(list(SHAPES)), x, y, radius))
        apart = all(
            max(abs(one.x - two.x), abs(one.y - two.y)) > one.radius + two.radius + 1
            for one, two in itertools.combinations(shapes, 2)
        )
        clear = all(abs(abs(shapes[0].x - one.x) - abs(shapes[0].y - one.y)) > size / 8 for one in shapes[1:])
        if apart and clear:
            return shapes


def relate(one: Shape, other: Shape) -> str:
    """Where one shape is, seen from another."""
    right, down = one.x - other.x, one.y - other.y
    if abs(right) > abs(down):
        return "right of" if right > 0 else "left of"
    return "below" if down > 0 else "above"


def draw_shape(pixels: Pixels, shape: Shape) -> Box:
    """Colour the pixels whose middle is inside a shape; returns the box around them."""
    middles = np.arange(len(pixels)) + 0.5
    x, y = (middles - shape.x) / shape.radius, (middles - shape.y) / shape.radius
    inside = SHAPES[shape.name](x[None, :], y[:, None])
    pixels[inside] = COLOURS[shape.colour]
    columns, rows = np.flatnonzero(inside.any(0)), np.flatnonzero(inside.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def generate_shapes(settings: ShapesData, seed: int) -> tuple[list[tuple[Image, str]], ...]:
    """Scenes to train on, to validate on and to test on: of numbers that no other seed has."""
    first = seed * 2**32
    ends = list(itertools.accumulate((settings.examples, settings.valid, settings.test), initial=first))
    return tuple(
        [make_example(number, settings.pixels) for number in range(*part)] for part in itertools.pairwise(ends)
    )


def make_example(number: int, size: int) -> tuple[Image, str]:
    """A scene as an image with its boxes, and its caption."""
    pixels, caption, boxes = draw_scene(number, size)
    words = caption.split()
    known = [
        Known(" ".join(words[place - 1 : place + 1]), *(side / size for side in box)) for place, box in boxes.items()
    ]
    return Image(f"scene-{number}", data=make_png(pixels), boxes=tuple(known)), caption
