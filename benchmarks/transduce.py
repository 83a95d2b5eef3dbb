"""Soft parents against softmax and no attention: arithmetic from prefix to infix, by depth (Kim 2017, table 1).

The decoder sees of every symbol its embedding (words), or also what the symbol attends to: by softmax, or as its
parents in projective trees. All get the same data and updates; training has depths 2 to 4. The score is the share of a
target's tokens before the first error, the mean over seeds with its 95 % interval (Student's t).

    python benchmarks/transduce.py --seeds 5 --steps 1500
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from regard.config.toml import read
from regard.evaluation.evaluate import Evaluation, evaluate
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.training.prepare import read_examples, start_run

ENCODERS = ("words", "softmax", "projective trees")


def show_interval(values: Sequence[float], digits: int = 1) -> str:
    """The mean and half of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def train_and_score(recipe: str, changes: Sequence[str]) -> Evaluation:
    """A recipe with changes, trained in a folder that does not stay, and scored on its test."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fit(start_run(read(recipe, changes), run), run, lambda event: None)
        predictor = load(run)
        return evaluate(predictor, read_examples(predictor.config, "test").test)


def main() -> None:
    """Train every encoder with every seed, and print a table after each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    scores: dict[str, dict[str, list[float]]] = {encoder: {} for encoder in ENCODERS}
    for seed in range(1, options.seeds + 1):
        for encoder in ENCODERS:
            steps = [f"train.steps={options.steps}", f"train.validate_every={options.steps}"]
            found = train_and_score("transduce", [f"model.encoder={encoder}", f"train.seed={seed}", *steps])
            for part in found.files:
                scores[encoder].setdefault(part["file"].removeprefix("test "), []).append(part["prefix"])
            print(seed, encoder, {part["file"]: round(part["prefix"], 1) for part in found.files}, flush=True)
        table = Table("% before the first error", *ENCODERS, title=f"{seed} seeds, {options.steps:,} updates")
        for depth in scores["words"]:
            table.add_row(depth, *(show_interval(scores[encoder][depth]) for encoder in ENCODERS))
        Console().print(table)


if __name__ == "__main__":
    main()
