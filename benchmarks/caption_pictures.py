"""Captions with their maps, as pictures: of images that are chosen by a fixed rule, not by hand.

    python benchmarks/caption_pictures.py runs/f --count 10 --out docs/captions

Every hundredth image of the run's validation data is taken, in its order, from the first. A picture has the caption and
where every word looked; captions.md lists them. Flickr8k may not be passed on, so what lies under the maps is the image
with one pixel for each cell, and no caption of people is shown; `--whole` shows both, for data that are yours.
"""

import argparse
import io
from pathlib import Path

from PIL import Image

import regard
from regard.explain.look import Look
from regard.explain.overlays import save_overlays
from regard.tasks.axes import Shown
from regard.training.checkpoint import write_file
from regard.training.prepare import read_examples

EVERY = 100


def reduce_image(shown: Shown, grid: tuple[int, int]) -> Shown:
    """The image with one pixel for each cell of a grid."""
    small, file = Image.open(io.BytesIO(shown.file)).resize(grid[::-1], Image.Resampling.BOX), io.BytesIO()
    small.save(file, "PNG")
    return shown._replace(file=file.getvalue(), kind="image/png")


def save_reduced(found: Look, path: Path) -> None:
    """As `Look.save`, over the reduced image."""
    chosen, shown = found.map(), found.image
    assert shown is not None
    title = f"{found.text}\n{found.answer.text}\n{found.name_heads()}"
    save_overlays(path, reduce_image(shown, shown.grids[chosen.columns]), chosen, found.names(chosen.rows), title)
    large = Image.open(path).convert("RGB")
    large.reduce(2).quantize(256).save(path, optimize=True)


def draw(run: Path, folder: Path, count: int, *, whole: bool) -> None:
    """Write the pictures of `count` images and the page that lists them."""
    predictor = regard.load(run)
    references: dict[object, list[str]] = {}
    for example in read_examples(predictor.config, "valid").valid:
        references.setdefault(example.source, []).append(example.target)
    chosen = list(references)[::EVERY][:count]
    if len(chosen) < count:
        print(f"only {len(chosen)} images: the validation data have {len(references):,}, and every {EVERY}th is taken")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# Captions of {run.name}", "", f"Every {EVERY}th image of the validation data, chosen by nobody."]
    lines += [""] if whole else ["An image is shown with one pixel for each cell of the grid.", ""]
    for number, image in enumerate(chosen, 1):
        found = regard.look(predictor, image)
        name = f"{number:02}-{Path(str(image)).stem}.png"
        found.save(folder / name) if whole else save_reduced(found, folder / name)
        print(f"{name}: {found.answer.text}", flush=True)
        lines += [f"## {number}. {found.answer.text}", "", f"![{found.answer.text}]({name})", ""]
        lines += [*(f"- {text}" for text in references[image]), ""] if whole else []
    write_file(folder / "captions.md", "\n".join(lines).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/captions"))
    parser.add_argument("--whole", action="store_true", help="show the images themselves, and what people wrote")
    given = parser.parse_args()
    draw(given.run, given.out, given.count, whole=given.whole)
