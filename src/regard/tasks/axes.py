"""What stands on the two sides of an attention map: tokens, each with the characters it came from."""

import base64
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.data.encoding import Encoded
from regard.data.vocabulary import EOS, SPECIAL, UNK, Vocabulary


class Piece(NamedTuple):
    """A token and the characters it came from; a special one came from none."""

    text: str
    start: int
    end: int


def find_word(text: str, piece: Piece) -> int | None:
    """The number of the word, parted by white space, that a token is in; none for a special one."""
    letters = [place for place in range(piece.start, piece.end) if not text[place].isspace()]
    return len(text[: letters[0] + 1].split()) - 1 if letters else None


Tokens = dict[str, list[Piece]]
"""The axes of docs/maps.md by name: key, query, input, and further grids of an image."""


class Shown(NamedTuple):
    """An image to be shown, small, and the grids that lie over it."""

    file: bytes
    kind: str  # of the file: image/png
    width: int
    height: int
    grids: dict[str, tuple[int, int]]  # axis -> rows and columns of its cells

    def tree(self) -> dict[str, Any]:
        """As docs/maps.md has it."""
        data = f"data:{self.kind};base64,{base64.b64encode(self.file).decode()}"
        grids = {axis: list(grid) for axis, grid in self.grids.items()}
        return {"width": self.width, "height": self.height, "grids": grids, "data": data}


class Structure(NamedTuple):
    """Marginals that are shown as a map, though no attention made it."""

    name: str
    kind: str
    axes: tuple[str, str]  # of its rows and columns
    weights: Tensor  # (heads, row, column)
    chain: tuple[Tensor, Tensor, Tensor]  # whose they are: unary scores, transitions, lengths (attention/chain.py)


def read_pieces(source: Encoded) -> list[Piece]:
    """A source's tokens; special ones by their names."""
    pairs = zip(source.ids, source.offsets, strict=True)
    return [Piece(SPECIAL[i] if i <= EOS and i != UNK else source.text[a:b], a, b) for i, (a, b) in pairs]


def written_pieces(vocabulary: Vocabulary, ids: list[int], text: str, prompt: Sequence[int] = ()) -> list[Piece]:
    """The characters that each token of an output brought; one that does not complete a character brought none."""
    ends = [0]
    for count in range(1, len(ids) + 1):
        begun = vocabulary.continued(prompt, ids[:count])
        while not text.startswith(begun):
            begun = begun[:-1]
        ends.append(max(ends[-1], len(begun)))
    return [Piece(text[start:end], start, end) for start, end in itertools.pairwise(ends)]
