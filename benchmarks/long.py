"""Kinds of attention on long texts: the same data and seeds, at equal updates or at equal time.

Every kind is trained with every seed, one after the other, and scored on validation data (or on the test, which nothing
was chosen by). The table has means over seeds with their 95 % intervals (Student's t), and what each kind is better or
worse than the first one with the same seed. What was trained is kept in a JSON file and not trained again, so a run
that was stopped goes on where it was.

    python benchmarks/long.py listops --steps 600
    python benchmarks/long.py listops --minutes 3
    python benchmarks/long.py shakespeare-long --minutes 5 --set text.max_length=4096
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transduce import show_interval

from regard.config.run import Config
from regard.config.toml import read
from regard.data.examples import Example
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.training.checkpoint import write_file
from regard.training.prepare import start_run
from regard.training.trainer import Event

SMALL: dict[str, list[str]] = {
    "listops": [
        *("data.examples=4000", "data.valid=1000", "data.test=1000"),
        *("model.size=64", "model.feedforward=128", "model.heads=2", "model.layers=2", "model.pooling=cls"),
        *("model.conv_window=2", "model.dropout=0.0"),
        *("train.batch_tokens=8192", "train.warmup=50", "train.learning_rate=2e-3", "train.label_smoothing=0.0"),
    ],
    "bytes": [
        *("model.size=64", "model.feedforward=128", "model.layers=1", "model.dropout=0.0"),
        *("data.cut_valid=8000", "train.batch_tokens=8192"),
    ],
    "shakespeare-long": ["train.batch_tokens=4096", "train.warmup=50"],
}
"""What makes a recipe small enough for one core; --set comes behind it."""
KINDS = ["full", "linformer", "bigbird", "window"]
Cell = dict[str, Any]


def plan_cells(options: argparse.Namespace) -> list[Cell]:
    """What is to be trained, seed by seed, so that kinds can be compared after each."""
    changes = [*SMALL.get(options.recipe, []), *options.set]
    budget = {"steps": options.steps} if options.steps else {"minutes": options.minutes}
    common = {"recipe": options.recipe, "split": options.split, "threads": options.threads, "changes": changes}
    return [common | budget | {"kind": kind, "seed": seed} for seed in options.seeds for kind in options.kinds]


def configure(cell: Cell) -> Config:
    """The settings of a cell. It is validated once, at its end, on a few examples: what counts is scored behind it."""
    most = cell.get("steps", 10**6)
    ends = [f"train.steps={most}", f"train.validate_every={most}", "train.validate_examples=20", "train.patience=0"]
    ends += [f"train.minutes={cell['minutes']}"] if "minutes" in cell else []
    ends += ["train.average_checkpoints=1", f"train.seed={cell['seed']}", f"model.attention={cell['kind']}"]
    return read(cell["recipe"], [*cell["changes"], *ends])


def train_and_score(cell: Cell, say: Callable[[str], None]) -> Cell:
    """The scores of one cell, over all and by length, and what it took."""
    config = configure(cell)
    torch.set_num_threads(cell["threads"])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        prepared = start_run(config, run)
        examples = getattr(prepared.splits, cell["split"])
        progress = fit(prepared, run, Reporter(say), device="cpu")
        predictor = load(run, device="cpu")
        found = evaluate(predictor, examples)
    return {
        "parameters": sum(part.numel() for part in predictor.model.parameters()),
        "updates": progress.step,
        "seconds": progress.seconds,
        "metrics": found.metrics,
        "buckets": {part["length"]: part for part in found.buckets},
        "baselines": measure_baselines(prepared.splits.train, examples),
    }


class Reporter:
    """Says every half minute how far a training is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.last, self.nats = say, time.monotonic(), list[float]()

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self.nats.append(event.values["nats"])
            if time.monotonic() - self.last > 30:
                mean = sum(self.nats) / len(self.nats)
                self.say(f"update {event.step:,}, {event.values['seconds']:,.0f} s, {mean:.3f} nats")
                self.last, self.nats = time.monotonic(), []


def measure_baselines(train: Sequence[Example], examples: Sequence[Example]) -> dict[str, float]:
    """What needs no model, in percent: the commonest answer, and the commonest behind the same first word."""
    if not train[0].source:
        return {}  # a text has no answer
    commonest = Counter(example.target for example in train).most_common(1)[0][0]

    def score(key: Callable[[Example], str]) -> float:
        counts: dict[str, Counter[str]] = {}
        for example in train:
            counts.setdefault(key(example), Counter())[example.target] += 1
        best = {word: count.most_common(1)[0][0] for word, count in counts.items()}
        right = sum(best.get(key(example), commonest) == example.target for example in examples)
        return 100 * right / len(examples)

    return {
        "the commonest answer": score(lambda example: ""),
        "the commonest behind the first word": score(lambda example: str(example.source).split()[0]),
    }


def make_table(cells: Sequence[Cell], metric: str) -> str:
    """The cells that are done as a markdown table."""
    kinds = list(dict.fromkeys(cell["kind"] for cell in cells))
    lengths = list(dict.fromkeys(length for cell in cells for length in cell["buckets"]))
    seeds = len({cell["seed"] for cell in cells})
    title = f"{metric}, {seeds} seeds, {cells[0]['split']} data"
    head = ["attention", "parameters", "updates", "seconds", "ms an update", title, *lengths, f"minus {kinds[0]}"]
    first = {cell["seed"]: cell["metrics"][metric] for cell in cells if cell["kind"] == kinds[0]}
    rows = []
    for kind in kinds:
        own = [cell for cell in cells if cell["kind"] == kind]
        mean = {name: sum(cell[name] for cell in own) / len(own) for name in ("parameters", "updates", "seconds")}
        differences = [cell["metrics"][metric] - first[cell["seed"]] for cell in own if cell["seed"] in first]
        inside = [[cell["buckets"][length][metric] for cell in own if length in cell["buckets"]] for length in lengths]
        digits = 3 if metric == "bpb" else 1
        rows.append(
            [
                *(kind, *(f"{mean[name]:,.0f}" for name in mean), f"{1000 * mean['seconds'] / mean['updates']:,.0f}"),
                show_interval([cell["metrics"][metric] for cell in own], digits),
                *(show_interval(values, digits) if values else "" for values in inside),
                "" if kind == kinds[0] or not differences else show_interval(differences, digits),
            ]
        )
    for name in cells[0]["baselines"]:
        values = [cell["baselines"][name] for cell in cells if cell["kind"] == kinds[0]]
        rows.append([name, *[""] * 4, show_interval(values), *[""] * (len(lengths) + 1)])
    return write_table([head, *rows])


def find_or_make(cell: Cell, out: Path, name: str, make: Callable[[Cell, Callable[[str], None]], Cell]) -> Cell:
    """A cell with its results: from the file of what is done, or made now and kept there."""
    done: list[Cell] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    for one in done:
        if cell.items() <= one.items():
            return one
    print(f"{name} ...", flush=True)
    made = cell | make(cell, lambda text: print(f"  {name}: {text}", flush=True))
    write_file(out, json.dumps([*done, made], indent=1).encode())
    return made


def write_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the head, as markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="updates of each")
    budget.add_argument("--minutes", type=float, help="time of each")
    parser.add_argument("--split", choices=["valid", "test"], default="valid")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/long.json"), help="what was trained already")
    return parser.parse_args()


def main() -> None:
    """Train what is not done yet, and print the table after every seed."""
    options = parse_options()
    cells = plan_cells(options)
    found: list[Cell] = []
    for number, cell in enumerate(cells, 1):
        name = f"{number} of {len(cells)}: {cell['kind']}, seed {cell['seed']}"
        found.append(find_or_make(cell, options.out, name, train_and_score))
        metric = "bpb" if "bpb" in found[0]["metrics"] else next(iter(found[0]["metrics"]))
        print(f"{name}: {metric} {found[-1]['metrics'][metric]:.3f}, {found[-1]['seconds']:,.0f} s", flush=True)
        if number % len(options.kinds) == 0:
            print(make_table(found, metric), flush=True)


if __name__ == "__main__":
    main()
