"""The line-up game: softmax doubles players up, matching does not.

Both have the same score (cosine), data and updates; each position of softmax has whom it likes best, a matching is
answered by its best assignment.

    python benchmarks/lineup.py --seeds 5
"""

import argparse

from rich.console import Console
from rich.table import Table
from transduce import show_interval, train_and_score


def main() -> None:
    """Train both with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    table = Table("normalizer", "line-ups right %", "positions right %", "doubles a line-up")
    for normalize in ("softmax", "matching"):
        found = [
            train_and_score(
                "lineup", [f"model.normalize={normalize}", f"train.seed={seed}", f"train.steps={options.steps}"]
            ).metrics
            for seed in range(1, options.seeds + 1)
        ]
        names = ("exact", "accuracy", "doubles")
        table.add_row(normalize, *(show_interval([one[name] for one in found]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    main()
