"""The bottleneck: what one vector cannot carry, and attention can.

Three models turn strings of 1 to 25 letters round: an RNN whose decoder sees the encoder's last state alone (A1), the
same with attention (A2), and a small Transformer (D4). All get the same data, batches and number of updates; what they
make of unseen strings is scored by their length.

    python benchmarks/bottleneck.py --steps 1200
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from regard.cli.console import TrainingView
from regard.config.toml import validate
from regard.evaluation.evaluate import Evaluation, evaluate
from regard.evaluation.fit import fit
from regard.evaluation.metrics import edit_distance, mean
from regard.inference.load import load
from regard.training.prepare import start_run

LONGEST, BUCKET = 25, 5
RNN = {"kind": "rnn", "size": 256, "embedding": 64, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "A1 RNN without attention": RNN | {"attention": "none"},
    "A2 RNN with attention": RNN | {"attention": "additive"},
    "D4 Transformer": {
        "kind": "transformer",
        "size": 128,
        "feedforward": 512,
        "heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
    },
}


class Result(NamedTuple):
    """One model after its training."""

    evaluation: Evaluation
    parameters: int
    tokens: int
    seconds: float

    def inside(self, low: int, high: int) -> tuple[int, float, float]:
        """Of sources with low to high letters: how many, exact ones in percent, edits per 100 letters."""
        found = self.evaluation
        rows = [
            (output, wanted[0])
            for source, output, wanted in zip(found.sources, found.outputs, found.references, strict=True)
            if low <= len(source) <= high
        ]
        letters = sum(len(wanted) for _, wanted in rows)
        edits = sum(edit_distance(output, wanted) for output, wanted in rows)
        return len(rows), 100 * mean([output == wanted for output, wanted in rows]), 100 * edits / max(1, letters)


def train(model: dict[str, Any], options: argparse.Namespace, folder: Path) -> Result:
    """Train on the common data within the common budget; score on the common test."""
    letters = {"kind": "char"}
    config = validate(
        {
            "data": {"kind": "reverse", "longest": LONGEST, "examples": options.examples, "test": options.test},
            "text": {"source": letters, "target": letters},
            "model": model,
            "train": {
                "steps": options.steps,
                "batch_tokens": 2048,
                "rate": 2e-3,
                "schedule": "cosine",
                "warmup": min(100, options.steps),
                "smoothing": 0.0,
                "precision": "float32",
                "validate_every": options.steps,
                "validate_examples": 100,
                "seed": options.seed,
            },
            "decode": {"beam_size": 1},
            "evaluate": {"metrics": ["exact"]},
        },
        __file__,
    )
    prepared = start_run(config, folder)
    with TrainingView(config, None) as view:
        progress = fit(prepared, folder, view, device="cpu")
    predictor = load(folder, device="cpu")
    parameters = sum(part.numel() for part in predictor.model.parameters())
    return Result(
        evaluate(predictor, prepared.splits.test, config.evaluate), parameters, progress.tokens, progress.seconds
    )


def show(results: dict[str, Result], out: Console) -> None:
    """Exact match, and wrong letters (edits per 100), by source length."""
    table = Table("source letters", "examples")
    for name in results:
        table.add_column(f"{name}\nexact % (errors %)", justify="right")
    for low, high in [*((end - BUCKET + 1, end) for end in range(BUCKET, LONGEST + 1, BUCKET)), (1, LONGEST)]:
        parts = [result.inside(low, high) for result in results.values()]
        if high - low == LONGEST - 1:
            table.add_section()
        table.add_row(
            f"{low}-{high}", f"{parts[0][0]:,}", *(f"{exact:.1f}  ({error:.1f})" for _, exact, error in parts)
        )
    out.print(table)
    for name, result in results.items():
        tokens, seconds = result.tokens, result.seconds
        out.print(f"{name}: {result.parameters:,} parameters, {tokens:,} target tokens in {seconds:,.0f} s")


def draw(results: dict[str, Result], path: Path) -> None:
    """Exact match against source length, where at least 20 examples say so (there are 26 strings of one letter)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, result), mark in zip(results.items(), "osD", strict=True):
        points = [(length, *result.inside(length, length)) for length in range(1, LONGEST + 1)]
        shown = [(length, exact) for length, count, exact, _ in points if count >= 20]
        axes.plot(*zip(*shown, strict=True), marker=mark, markersize=4, label=name)
    axes.set(xlabel="letters in the source", ylabel="turned round exactly, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--test", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "bottleneck.png")
    options = parser.parse_args()
    out = Console(highlight=False, width=110)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: train(MODELS[name], options, Path(folder) / name.split()[0]) for name in MODELS}
    show(results, out)
    draw(results, options.picture)


if __name__ == "__main__":
    main()
