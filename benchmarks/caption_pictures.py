"""Captions with their maps, as pictures: of images that are chosen by a fixed rule, not by hand.

    python benchmarks/caption_pictures.py runs/f --count 10 --out docs/captions

Every hundredth image of the run's validation data is taken, in its order, from the first. A picture has the image, the
caption, and where every word looked; captions.md lists them, with what people wrote.
"""

import argparse
from pathlib import Path

import regard
from regard.training.checkpoint import write_file
from regard.training.prepare import read_examples

EVERY = 100


def draw(run: Path, folder: Path, count: int) -> None:
    """Write the pictures of `count` images and the page that lists them."""
    predictor = regard.load(run)
    references: dict[object, list[str]] = {}
    for example in read_examples(predictor.config, "valid").valid:
        references.setdefault(example.source, []).append(example.target)
    chosen = list(references)[::EVERY][:count]
    if len(chosen) < count:
        print(f"only {len(chosen)} images: the validation data have {len(references):,}, and every {EVERY}th is taken")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# Captions of {run.name}", "", f"Every {EVERY}th image of the validation data, chosen by nobody.", ""]
    for number, image in enumerate(chosen, 1):
        found = regard.look(predictor, image)
        name = f"{number:02}-{Path(str(image)).stem}.png"
        found.save(folder / name)
        print(f"{name}: {found.answer.text}", flush=True)
        people = "".join(f"- {text}\n" for text in references[image])
        lines += [f"## {number}. {found.answer.text}", "", f"![{found.answer.text}]({name})", "", people]
    write_file(folder / "captions.md", "\n".join(lines).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/captions"))
    given = parser.parse_args()
    draw(given.run, given.out, given.count)
