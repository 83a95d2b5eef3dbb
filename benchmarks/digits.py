"""What self-attention adds to a CNN of the same number of weights, on handwritten digits.

The recipe `digits` (self-attention behind the first stage) against the same network without it, whose stages are wider,
so that both have as many weights; every seed draws weights and batches, and both see the same data. Accuracy on the
test, which nothing was chosen by, with 95 % intervals (Student's t) of means and of the differences seed by seed.

    python benchmarks/digits.py --seeds 5
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transduce import show_interval

from regard.config.toml import read
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.training.prepare import read_examples, start_run

NETWORKS = {
    "CNN": ["model.self_attention=[]", "model.grid_size=66"],
    "CNN with self-attention (B7)": [],
}


def train_and_score(changes: list[str], seed: int) -> tuple[float, int, float]:
    """Accuracy in percent, weights, and seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        run, began = Path(folder) / "run", time.perf_counter()
        fit(start_run(read("digits", [*changes, f"train.seed={seed}"]), run), run, lambda event: None)
        took, predictor = time.perf_counter() - began, load(run)
        found = evaluate(predictor, read_examples(predictor.config, "test").test)
    weights = sum(part.numel() for part in predictor.model.parameters())
    return found.metrics["accuracy"], weights, took


def main() -> None:
    """Train both with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in NETWORKS}
    for seed in range(1, options.seeds + 1):
        for name, changes in NETWORKS.items():
            found[name].append(train_and_score(changes, seed))
            accuracy, weights, took = found[name][-1]
            print(f"seed {seed}, {name}: {accuracy:.2f} %, {weights:,} weights, {took:.0f} s", flush=True)
    table = Table("network", "weights", "accuracy %", "minus CNN", title=f"digits, {options.seeds} seeds")
    first = [accuracy for accuracy, *_ in found["CNN"]]
    for name, rows in found.items():
        accuracies = [accuracy for accuracy, *_ in rows]
        differences = [one - other for one, other in zip(accuracies, first, strict=True)]
        shown = "" if name == "CNN" else show_interval(differences, 2)
        table.add_row(name, f"{rows[0][1]:,}", show_interval(accuracies, 2), shown)
    Console().print(table)


if __name__ == "__main__":
    main()
