"""Is bigger better? The encoder-decoder Transformer with one size changed at a time (Vaswani 2017, table 3).

Width, depth, heads, feed-forward size and dropout vary around a small base, at equal updates and at equal time: with
enough data a larger model wins at equal updates, and may lose at equal time. Scores are those of validation data,
decoded greedily. What was trained is kept in a JSON file and not trained again.

    python benchmarks/sizes.py dates --updates 300 --minutes 0.3
    REGARD_DATA=data python benchmarks/sizes.py multi30k --updates 400 --minutes 1
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from long import Cell, Reporter, find_or_make, write_table

from regard.config.toml import read
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit, spread
from regard.inference.load import load
from regard.training.prepare import start_run

BASE: dict[str, Any] = {"size": 128, "layers": 2, "heads": 4, "feedforward": 512, "dropout": 0.1}
VARIED: dict[str, list[Any]] = {
    "size": [32, 64, 256],
    "layers": [1, 4],
    "heads": [1, 2, 16],
    "feedforward": [64, 128, 1024],
    "dropout": [0.0, 0.3],
}
COMMON = [
    *("train.learning_rate=2e-3", "train.schedule=cosine", "train.warmup=50", "train.batch_tokens=2048"),
    *("train.label_smoothing=0.1", "train.average_checkpoints=1", "train.patience=0", "decode.beam_size=1"),
]
DATA = {"multi30k": (["text.source.size=4000"], "bleu"), "dates": ([], "exact")}
"""By recipe: its own changes, and the metric."""


def plan_cells(options: argparse.Namespace) -> list[Cell]:
    """The base and every change of one size, each with every budget."""
    varied = [BASE, *(BASE | {name: value} for name, values in VARIED.items() for value in values)]
    if options.only:
        varied = [one for one in varied if describe(one).split()[0] in ("base", *options.only)]
    budgets = [{"updates": options.updates}] * bool(options.updates) + [{"minutes": options.minutes}] * bool(
        options.minutes
    )
    common = {"recipe": options.recipe, "seed": options.seed, "threads": options.threads, "examples": options.examples}
    return [common | {"sizes": one, "changes": options.set} | budget for one in varied for budget in budgets]


def describe(sizes: dict[str, Any]) -> str:
    """What differs from the base."""
    return ", ".join(f"{name} {value}" for name, value in sizes.items() if value != BASE[name]) or "base"


def configure(cell: Cell) -> list[str]:
    """The changes to the recipe. It is validated at its end, on a few examples: what counts is scored behind it."""
    own, metric = DATA[cell["recipe"]]
    sizes = dict(cell["sizes"])
    depth = sizes.pop("layers")
    model = {"kind": "transformer", **sizes, "encoder_layers": depth, "decoder_layers": depth}
    most = cell.get("updates", 10**6)
    ends = [f"train.steps={most}", f"train.validate_every={most}", "train.validate_examples=10"]
    ends += [f"train.minutes={cell['minutes']}"] if "minutes" in cell else []
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.items())
    metrics = f'evaluate.metrics=["{metric}", "perplexity"]'
    return [f"model={{ {table} }}", *COMMON, *own, *cell["changes"], *ends, f"train.seed={cell['seed']}", metrics]


def train_and_score(cell: Cell, say: Callable[[str], None]) -> Cell:
    """What became of one cell."""
    torch.set_num_threads(cell["threads"])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        prepared = start_run(read(cell["recipe"], configure(cell)), run, device="cpu")
        progress = fit(prepared, run, Reporter(say), device="cpu")
        predictor = load(run, device="cpu")
        found = evaluate(predictor, spread(prepared.splits.valid, cell["examples"], False)).metrics
    return {
        "parameters": sum(part.numel() for part in predictor.model.parameters()),
        "steps": progress.step,
        "seconds": progress.seconds,
        "loss": math.log(found["perplexity"]),
        "score": found[DATA[cell["recipe"]][1]],
    }


def make_table(cells: Sequence[Cell]) -> str:
    """A row for every change, a group of columns for every budget."""
    metric = {"bleu": "BLEU", "exact": "exact %"}[DATA[cells[0]["recipe"]][1]]
    groups = {"updates": [cell for cell in cells if "updates" in cell]}
    groups["minutes"] = [cell for cell in cells if "minutes" in cell]
    rows = {describe(cell["sizes"]): [f"{cell['parameters']:,}"] for cell in cells}
    head = ["changed", "parameters"]
    for budget, own in groups.items():
        if own:
            head += [f"{own[0][budget]:g} {budget}: loss", metric, "updates" if budget == "minutes" else "seconds"]
        for cell in own:
            took = f"{cell['steps']:,}" if budget == "minutes" else f"{cell['seconds']:,.0f}"
            rows[describe(cell["sizes"])] += [f"{cell['loss']:.3f}", f"{cell['score']:.1f}", took]
    return write_table([head, *([name, *row] for name, row in rows.items() if len(row) == len(head) - 1)])


def main() -> None:
    """Train what is not done yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=list(DATA))
    parser.add_argument("--updates", type=int, help="of each, for the part at equal updates")
    parser.add_argument("--minutes", type=float, help="of each, for the part at equal time")
    parser.add_argument("--only", nargs="+", choices=list(VARIED), default=[], help="sizes to vary; else all")
    parser.add_argument("--examples", type=int, default=500, help="validation examples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/sizes.json"), help="what was trained already")
    options = parser.parse_args()
    if not (options.updates or options.minutes):
        parser.error("give --updates, --minutes or both")
    cells, found = plan_cells(options), list[Cell]()
    for number, cell in enumerate(cells, 1):
        budget = f"{cell['updates']:,} updates" if "updates" in cell else f"{cell['minutes']:g} minutes"
        name = f"{number} of {len(cells)}: {describe(cell['sizes'])}, {budget}"
        found.append(find_or_make(cell, options.out, name, train_and_score))
        figures = f"loss {found[-1]['loss']:.3f}, score {found[-1]['score']:.1f}, {found[-1]['seconds']:,.0f} s"
        print(f"{name}: {figures}", flush=True)
    print(make_table(found))


if __name__ == "__main__":
    main()
