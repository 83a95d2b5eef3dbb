"""The line-up game: softmax doubles players up, matching does not.

Both have the same score (cosine), data and updates; each position of softmax has whom it likes best, a matching is
answered by its best assignment. What that answer does by itself shows the row between: the softmax model, answered by
the best assignment of its own weights.

    python benchmarks/lineup.py --seeds 5
"""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transduce import show_interval

from regard.config.toml import read
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.training.prepare import read_examples, start_run

ASSIGNED = "softmax, answered by the best assignment"
NAMES = ("exact", "accuracy", "doubles")


def train_and_score(normalize: str, seed: int, steps: int) -> dict[str, dict[str, float]]:
    """The metrics of one training, by row of the table. A model that learned with softmax is scored twice."""
    changes = [f"model.normalize={normalize}", f"train.seed={seed}", f"train.steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fit(start_run(read("lineup", changes), run), run, lambda event: None)
        rows = {normalize: load(run)}
        if normalize == "softmax":  # its own weights; only the task, which answers, is that of a matching
            rows[ASSIGNED] = Predictor(load(run, ["model.normalize=matching"]).task, rows[normalize].model)
        test = read_examples(rows[normalize].config, "test").test
        return {name: evaluate(predictor, test).metrics for name, predictor in rows.items()}


def main() -> None:
    """Train both with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    scores: dict[str, list[dict[str, float]]] = {}
    for normalize in ("softmax", "matching"):
        for seed in range(1, options.seeds + 1):
            for row, metrics in train_and_score(normalize, seed, options.steps).items():
                scores.setdefault(row, []).append(metrics)
                print(seed, row, {name: round(metrics[name], 2) for name in NAMES}, flush=True)
    title = f"{options.seeds} seeds, {options.steps:,} updates"
    table = Table("normalizer", "line-ups right %", "positions right %", "doubles a line-up", title=title)
    for row, found in scores.items():
        table.add_row(row, *(show_interval([one[name] for one in found]) for name in NAMES))
    Console().print(table)


if __name__ == "__main__":
    main()
