"""Runs of one task side by side on the same test data: every metric, and whether a difference from the first is luck.

Right answers are compared one by one (exact McNemar test, two-sided); scores of summaries by a paired bootstrap.
Summaries are also compared with two baselines that need no model: the whole source (copy), and its first words (lead),
as many as the training targets have in the mean.

    REGARD_DATA=... python benchmarks/tasks.py runs/trec-classes runs/trec-mean runs/trec-cls
"""

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from regard.evaluation.evaluate import Evaluation, evaluate
from regard.evaluation.metrics import score
from regard.inference.load import load
from regard.training.prepare import read_examples


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The probability of such a difference, or a larger one, if neither is better."""
    wins = sum(a and not b for a, b in zip(first, second, strict=True))
    losses = sum(b and not a for a, b in zip(first, second, strict=True))
    total = wins + losses
    tail = sum(math.comb(total, k) for k in range(min(wins, losses) + 1)) / 2**total if total else 1.0
    return min(1.0, 2 * tail)


def bootstrap(first: Sequence[float], second: Sequence[float], rounds: int = 2000) -> float:
    """The share of resamples in which the difference of the means changes its sign, twice."""
    rng = random.Random(1)
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(gaps)
    flips = sum(statistics.fmean(rng.choices(gaps, k=len(gaps))) * mean <= 0 for _ in range(rounds))
    return min(1.0, 2 * flips / rounds)


def row(name: str, figures: dict[str, float], outputs: list[str], base: Evaluation) -> list[str]:
    """One line of the table: figures, and the chance that they differ from the first's by luck."""
    wanted = base.references
    if "rougel" in figures:
        single = [
            [score("rougel", [output], [refs]) for output, refs in zip(texts, wanted, strict=True)]
            for texts in (base.outputs, outputs)
        ]
        chance = bootstrap(*single)
    else:
        right = [[o in refs for o, refs in zip(texts, wanted, strict=True)] for texts in (base.outputs, outputs)]
        chance = mcnemar(*right)
    return [name, *(f"{figure:.2f}" for figure in figures.values()), "" if outputs is base.outputs else f"{chance:.3f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    base: Evaluation | None = None
    table = Table()
    for run in options.runs:
        predictor = load(run)
        splits = read_examples(predictor.config)
        found = evaluate(predictor, getattr(splits, options.split), predictor.config.evaluate)
        if base is None:
            base = found
            for name in ("run", *found.metrics, "p (by luck)"):
                table.add_column(name)
            table.title = f"{found.examples:,} examples of {options.split}"
        assert found.sources == base.sources, f"{run} has other test data than {options.runs[0]}"
        table.add_row(*row(run.name, found.metrics, found.outputs, base))
    assert base is not None
    if "rougel" in base.metrics:
        words = round(statistics.fmean(len(example.target.split()) for example in splits.train))
        for name, outputs in {
            "copy": base.sources,
            f"lead, {words} words": [" ".join(source.split()[:words]) for source in base.sources],
        }.items():
            metrics = {metric: score(metric, outputs, base.references) for metric in base.metrics}  # type: ignore[arg-type]
            table.add_row(*row(name, metrics, outputs, base))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
