"""Label bias: the case in which an MEMM must fail and a CRF must not (Lafferty, McCallum and Pereira 2001).

`r i b` and `r o b` begin alike, and `rib` is the more frequent. Tags are BIOES: behind the beginning of RIB only RIB
may go on. An MEMM divides the probability of a step among what may follow, so whatever the second letter is, all of it
goes on where the first letter, which is the same in both, has led: to the more frequent word, for any amount of data. A
CRF weighs whole taggings, and the second letter counts.

    python benchmarks/label_bias.py --out docs/label_bias.png
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regard.config.toml import validate
from regard.evaluation.fit import fit
from regard.explain.look import look
from regard.explain.plots import draw_map
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.training.prepare import start_run

OFTEN, SELDOM = "rib", "rob"
STRUCTURES = ("memm", "crf")


def write_words(path: Path, count: int) -> None:
    """So many words, a letter a line with its tag: three of five are the frequent one."""

    def spell(word: str) -> str:
        return "".join(f"{letter} {mark}-{word.upper()}\n" for letter, mark in zip(word, "BIE", strict=True))

    path.write_text("\n".join(spell(SELDOM if n % 5 < 2 else OFTEN) for n in range(count)), encoding="utf-8")


def train(structure: str, count: int, folder: Path) -> Predictor:
    """A tagger of letters, fitted to so many words; they are all the validation it needs, too."""
    data = folder / f"{count}.txt"
    write_words(data, count)
    settings: dict[str, Any] = {
        "data": {"kind": "columns", "train": [str(data)], "valid": [str(data)]},
        "text": {"source": {"kind": "word"}, "target": {"kind": "label", "separator": " "}},
        "model": {
            "kind": "tagger",
            "structure": structure,
            "features": ["word[0]"],
            "constraints": "spans",
            "l2": 0.01,
        },
        "train": {"steps": 50, "validate_examples": 5},
        "evaluate": {"metrics": ["accuracy"]},
    }
    run = folder / f"{structure}-{count}"
    fit(start_run(validate(settings, __file__), run), run, lambda event: None, device="cpu")
    return load(run, device="cpu")


def probability(predictor: Predictor, word: str) -> float:
    """How likely the right tagging of a word is."""
    wanted = " ".join(f"{mark}-{word.upper()}" for mark in "BIE")
    (answers,) = predictor.predict([" ".join(word)], best=8)
    return sum(answer.details["probability"] for answer in answers if answer.text == wanted)


def compare(counts: list[int], folder: Path) -> dict[int, dict[str, tuple[float, float]]]:
    """By the amount of data and the structure: how likely the right taggings of both words are."""
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for count in counts:
        models = {structure: train(structure, count, folder) for structure in STRUCTURES}
        found[count] = {name: (probability(one, OFTEN), probability(one, SELDOM)) for name, one in models.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 500, 5000])
    parser.add_argument("--out", type=Path, help="Draw the lattices of both models here: NAME-memm.png, NAME-crf.png.")
    options = parser.parse_args()
    console, table = Console(highlight=False), Table("words to learn from")
    for structure in STRUCTURES:
        for word in (OFTEN, SELDOM):
            table.add_column(f"{structure}: p(right | {word})", justify="right")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for count, row in compare(options.counts, folder).items():
            table.add_row(f"{count:,}", *(f"{chance:.3f}" for pair in row.values() for chance in pair))
        console.print(table)
        for structure in STRUCTURES:
            seen = look(load(folder / f"{structure}-{options.counts[-1]}", device="cpu"), " ".join(SELDOM))
            console.print(f"{structure}: {seen.text} -> {seen.answer.text}; how likely every tag of every letter is:")
            weights, rows, columns = seen.label()
            console.print(draw_map(weights, rows, columns, most=console.width))
            if options.out:
                seen.save(options.out.with_stem(f"{options.out.stem}-{structure}"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
