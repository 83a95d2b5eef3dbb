"""Maps laid over images: bilinear by the formula, bright where the weight is, and what the tree says of grids."""

import base64
import io
import json
import math

import numpy as np
import pytest
import torch
from images import image_run, saved, scene
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image as Pillow
from torch.testing import assert_close

import regard
from regard.data.examples import Image
from regard.errors import InputError
from regard.explain.attention_maps import Map
from regard.explain.overlays import Panel, choose_cells, draw_panel, make_panels, pick_rows, spread
from regard.explain.strips import Strip


def spread_by_hand(weights, height, width):
    """The bilinear formula at the middle of every pixel: weights (rows, columns) stand in the middles of cells."""
    rows, columns = weights.shape
    out = torch.zeros(height, width, dtype=weights.dtype)
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * rows / height - 0.5, 0), rows - 1)
            x = min(max((j + 0.5) * columns / width - 0.5, 0), columns - 1)
            top, left = min(math.floor(y), max(rows - 2, 0)), min(math.floor(x), max(columns - 2, 0))
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            down, across = y - top, x - left
            upper = (1 - across) * weights[top, left] + across * weights[top, right]
            lower = (1 - across) * weights[bottom, left] + across * weights[bottom, right]
            out[i, j] = (1 - down) * upper + down * lower
    return out


@pytest.mark.parametrize(
    ("grid", "height", "width"), [((3, 5), 17, 13), ((1, 1), 4, 7), ((2, 3), 2, 3), ((7, 7), 5, 11)]
)
def test_weights_are_spread_by_the_bilinear_formula(grid, height, width):
    torch.manual_seed(1)
    weights = torch.rand(2, grid[0] * grid[1], dtype=torch.float64)
    found = spread(weights, grid, height, width)
    for own, one in zip(found, weights, strict=True):
        assert_close(own, spread_by_hand(one.view(grid), height, width), rtol=0, atol=1e-10)
    assert_close(
        spread(torch.full((1, grid[0] * grid[1]), 0.25), grid, height, width), torch.full((1, height, width), 0.25)
    )


@pytest.mark.parametrize("grid", [(1, 1), (2, 9), (4, 4), (5, 7), (56, 56)])
def test_chosen_cells_lie_evenly(grid):
    cells = choose_cells(grid)
    assert cells == sorted(set(cells))
    assert len(cells) == min(4, grid[0]) * min(4, grid[1])
    assert set(cells) <= set(range(grid[0] * grid[1]))
    flipped = [grid[0] * grid[1] - 1 - cell for cell in reversed(cells)]
    distances = [
        abs(a // grid[1] - b // grid[1]) + abs(a % grid[1] - b % grid[1]) for a, b in zip(cells, flipped, strict=True)
    ]
    assert max(distances) <= 2  # as far from one end as from the other


def test_panels():
    weights = torch.eye(6)[:, :4]
    chosen = Map.of("it", "spatial", 0, "query", "key", torch.stack([weights + 0.5, weights - 0.5]))
    words = make_panels(chosen, list("abcdef"), None, None)
    assert [(panel.name, panel.cell) for panel in words] == [(name, None) for name in "abcdef"]
    assert_close(words[2].weights, weights[2])
    (one,) = make_panels(chosen, list("abcdef"), (2, 3), 4)
    assert (one.name, one.cell) == ("e", 4)
    with pytest.raises(InputError, match=r"token 6 was asked for; this map has 6 rows, from 0\."):
        make_panels(chosen, list("abcdef"), None, 6)


def test_rows_of_a_long_map_are_picked_from_its_strips():
    weights = torch.rand(3, 11, 7)

    def strips(heads):
        yield from (Strip(weights[heads, first : first + 4]) for first in range(0, 11, 4))

    chosen = Map("it", "spatial", 0, "key", "key", (3, 11, 7), strips)
    for places in ([0, 3, 4, 10], [5], list(range(11))):
        assert_close(pick_rows(chosen, places), weights.mean(0)[places])


def test_a_panel_is_bright_where_the_weight_is():
    """On a grey image nothing else differs: the brightest place is in the cell that is seen, wherever that is."""
    pixels = np.full((40, 60, 3), 200, dtype=np.uint8)
    for cell in (0, 7, 13, 19):
        figure = Figure(figsize=(5, 4), dpi=50)
        canvas = FigureCanvasAgg(figure)
        axis = figure.add_axes((0, 0, 1, 1))
        draw_panel(axis, pixels, Panel("", torch.full((20,), 0.01).index_fill(0, torch.tensor(cell), 0.8)), (4, 5))
        axis.set_aspect("auto")
        axis.axis("off")
        canvas.draw()
        drawn = torch.tensor(np.asarray(canvas.buffer_rgba())[..., 0]).float()
        row, column = divmod(int(drawn.flatten().argmax()), drawn.shape[1])
        assert (row * 4 // drawn.shape[0], column * 5 // drawn.shape[1]) == divmod(cell, 5)
        assert drawn.min() < 80 < 190 < drawn.max()


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    return image_run(tmp_path_factory.mktemp("runs") / "captions", "shapes", "model.self_attention=[1]")


@pytest.fixture(scope="module")
def found(captioner):
    return regard.look(captioner, Image("a scene", data=saved(scene((600, 400)), "JPEG")), target="a red square")


def test_every_map_has_tokens_for_its_rows_and_columns(found):
    tree = found.tree()
    grids = tree["image"]["grids"]
    assert grids == {"key": [3, 3], "6x6": [6, 6]}
    for axis, (rows, columns) in grids.items():
        assert [token["text"] for token in tree["tokens"][axis]] == [
            f"{i},{j}" for i in range(rows) for j in range(columns)
        ]
    spatial = {entry["name"]: entry for entry in tree["maps"] if entry["kind"] == "spatial"}
    assert {(entry["rows"], entry["columns"]) for entry in spatial.values()} == {("query", "key"), ("6x6", "6x6")}
    for entry in tree["maps"]:
        assert entry["shape"][1:] == [len(tree["tokens"][entry[side]]) for side in ("rows", "columns")]
        assert (entry["distance"] is None) == (entry["rows"] != entry["columns"])


def test_the_image_is_small_and_as_it_was_seen(found):
    image = found.tree()["image"]
    assert (image["width"], image["height"]) == (512, 341)
    kind, data = image["data"].split(",")
    assert kind in ("data:image/png;base64", "data:image/jpeg;base64")
    opened = Pillow.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert opened.size == (512, 341)
    red, white = opened.getpixel((128, 100)), opened.getpixel((400, 300))
    assert max(abs(a - b) for a, b in zip(red + white, (220, 30, 30, 255, 255, 255), strict=True)) < 12


def test_a_photo_is_sent_as_jpeg_and_a_drawing_as_png(captioner):
    noise = Pillow.effect_noise((300, 300), 80).convert("RGB")
    for image, kind in ((noise, "image/jpeg"), (scene((300, 300)), "image/png")):
        (source,) = captioner.encode([Image("it", data=saved(image))])
        assert captioner.task.show_source(source).kind == kind


def test_pictures_of_a_look(found, tmp_path):
    inner = next(one for one in found.heads if one.startswith("encoder"))
    sizes = {}
    for name, row in ((None, None), (inner, None), (inner, 7), (None, 0)):
        path = tmp_path / "why.png"
        found.save(path, name, None, row)
        sizes[name, row] = Pillow.open(io.BytesIO(path.read_bytes())).size
    assert sizes[inner, None][1] > sizes[inner, 7][1]
    assert sizes[None, 0] == sizes[inner, 7]  # the image and one panel
    with pytest.raises(InputError, match="token 36 was asked for; this map has 36 rows"):
        found.save(tmp_path / "why.png", inner, None, 36)
    found.save(tmp_path / "why.html")
    page = (tmp_path / "why.html").read_text(encoding="utf-8")
    assert json.dumps(found.tree()["image"]["data"])[1:-1] in page


def test_a_text_has_no_image(tiny_run, tmp_path):
    found = regard.look(regard.load(tiny_run, device="cpu"), "abc")
    assert "image" not in found.tree()
    with pytest.raises(InputError, match="--out and --token are different views of a text"):
        found.save(tmp_path / "why.png", row=1)
