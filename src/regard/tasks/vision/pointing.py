"""Whether words look where they should: the map of a word has its maximum inside the box of what the word names."""

import math
from collections.abc import Sequence

from torch import Tensor

from regard.data.examples import Box
from regard.tasks.axes import Piece
from regard.tasks.task import Answer


def find_words(text: str, pieces: Sequence[Piece], words: str) -> int | None:
    """The number of the token that begins the last of some words, where a text has them."""
    start = f" {text} ".find(f" {words} ")
    last = start + words.rfind(" ") + 1
    return next((number for number, piece in enumerate(pieces) if piece.end > last), None) if start >= 0 else None


def is_inside(box: Box, cell: int, grid: tuple[int, int]) -> bool:
    """Whether the middle of a cell lies in a box."""
    row, column = divmod(cell, grid[1])
    down, right = (row + 0.5) / grid[0], (column + 0.5) / grid[1]
    return box.left <= right <= box.right and box.top <= down <= box.bottom


def point(
    text: str, pieces: Sequence[Piece], boxes: Sequence[Box], weights: Tensor, grid: tuple[int, int]
) -> dict[str, bool]:
    """Of every box whose words are in a text: whether their map, a row of weights (tokens, cells), has its maximum
    there."""
    found = {}
    for box in boxes:
        place = find_words(text, pieces, box.words)
        if place is not None:
            found[box.words] = is_inside(box, int(weights[place].argmax()), grid)
    return found


def score_pointing(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> float:
    """The share, in percent, of words of known places that looked there; not a number where there are none."""
    hits = [hit for answer in answers for hit in answer.details.get("pointing", {}).values()]
    return 100 * sum(hits) / len(hits) if hits else math.nan
