"""Maps laid over the image that they look at: a panel for every word, or for every cell that looks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.images.pixels import read_image
from regard.errors import InputError
from regard.explain.attention_maps import Map
from regard.explain.plots import open_figure, wrap_title
from regard.tasks.axes import Shown

ACROSS = 6
"""Panels in a line."""
CELLS = 16
"""Cells of a grid whose looks are drawn at most, unless one is chosen."""
SHADE = 0.8
"""How dark it is where nobody looks."""
SMOOTH = 256
"""Pixels on the longer side of what lies over a small image, at least."""


class Panel(NamedTuple):
    """Where one row of a map looked."""

    name: str
    weights: Tensor  # (cells,)
    cell: int | None = None  # the one that looks, if it is one of the same grid


def spread(weights: Tensor, grid: tuple[int, int], height: int, width: int) -> Tensor:
    """Weights (n, cells) of a grid over an image (n, height, width): each stands in the middle of its cell, and what
    lies between is interpolated (bilinear); at the edges they stay as they are."""
    cells = weights.reshape(-1, 1, *grid)
    return F.interpolate(cells, (height, width), mode="bilinear", align_corners=False)[:, 0]


def choose_cells(grid: tuple[int, int], most: int = CELLS) -> list[int]:
    """At most so many cells of a grid, evenly over it, line by line."""
    side = max(1, math.isqrt(most))
    rows, columns = ([(2 * i + 1) * count // (2 * min(side, count)) for i in range(min(side, count))] for count in grid)
    return [row * grid[1] + column for row in rows for column in columns]


def make_panels(chosen: Map, names: Sequence[str], grid: tuple[int, int] | None, row: int | None) -> list[Panel]:
    """A panel for every row of a map, or for one, of the mean of its heads. Rows that are cells themselves have their
    `grid`; of many, some are taken."""
    if row is not None and not 0 <= row < len(names):
        raise InputError(f"token {row} was asked for; this map has {len(names)} rows, from 0.")
    places = choose_cells(grid) if grid else list(range(len(names)))
    places = places if row is None else [row]
    parts = zip(places, pick_rows(chosen, places), strict=True)
    return [Panel(names[place], weights, place if grid else None) for place, weights in parts]


def pick_rows(chosen: Map, places: Sequence[int]) -> Tensor:
    """Some rows of a map (rows, columns), in order, of the mean of its heads; it may be long."""
    found, first = [], 0
    for strip in chosen.strips():
        last = first + strip.weights.shape[1]
        own = [place - first for place in places if first <= place < last]
        found.append(strip.dense(chosen.shape[2])[:, own].mean(0))
        first = last
    return torch.cat(found)


def draw_panel(axis: Any, pixels: Any, panel: Panel, grid: tuple[int, int]) -> None:
    """The image, dark where nothing was looked at, under the lines of its grid; the cell that looks is framed."""
    from matplotlib.patches import Rectangle

    height, width = pixels.shape[:2]
    top = max(float(panel.weights.max()), 1e-9)
    fine = -(-SMOOTH // max(height, width))
    light = spread(panel.weights[None] / top, grid, fine * height, fine * width)[0].numpy()
    shade = np.zeros((*light.shape, 4), dtype=np.float32)
    shade[..., 3] = SHADE * (1 - light)
    box = (0, grid[1], grid[0], 0)  # cells are the units
    axis.imshow(pixels, extent=box, interpolation="bilinear")
    axis.imshow(shade, extent=box, interpolation="nearest")
    for lines, draw in ((grid[0], axis.axhline), (grid[1], axis.axvline)):
        for place in range(1, lines):
            draw(place, color="white", alpha=0.35, linewidth=0.5)
            draw(place, color="black", alpha=0.25, linewidth=0.25)
    if panel.cell is not None:
        row, column = divmod(panel.cell, grid[1])
        axis.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor="#e4007c", linewidth=1.5))
    axis.set_title(panel.name, fontsize=9, parse_math=False, pad=3)
    axis.set_xlabel(f"{top:.0%}" if top >= 0.01 else f"{top:.1%}", fontsize=7, labelpad=2)
    frame(axis, height * grid[1] / (width * grid[0]))


def frame(axis: Any, aspect: float) -> None:
    """A panel without ticks."""
    axis.set_aspect(aspect)
    axis.set_xticks([])
    axis.set_yticks([])


def save_overlays(
    path: Path, shown: Shown, chosen: Map, names: Sequence[str], title: str, row: int | None = None
) -> None:
    """The image, and a panel for each row of a map or for one; below each is its largest weight, which is the brightest
    place. `names` are those of the rows."""
    grid, panels = shown.grids[chosen.columns], make_panels(chosen, names, shown.grids.get(chosen.rows), row)
    pixels = np.asarray(read_image(shown.file, "image").image)
    count = len(panels) + 1
    columns = min(ACROSS, count)
    rows = -(-count // columns)
    high = min(2.5, max(0.4, shown.height / shown.width))
    heading = wrap_title(title, round(26 * columns))
    size = (1.9 * columns, (1.9 * high + 0.42) * rows + 0.17 * (heading.count("\n") + 1))
    with open_figure(path, columns, rows, size) as drawn:
        first, *others = drawn.flat
        first.imshow(pixels, extent=(0, grid[1], grid[0], 0), interpolation="bilinear")
        first.set_title("image", fontsize=9, pad=3, style="italic")
        frame(first, shown.height * grid[1] / (shown.width * grid[0]))
        for axis, panel in zip(others, panels, strict=False):
            draw_panel(axis, pixels, panel, grid)
        for axis in others[len(panels) :]:
            axis.axis("off")
        first.figure.suptitle(heading, fontsize=9, parse_math=False)
