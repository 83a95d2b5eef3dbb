"""The main job on built-in data: train `numbers`, score it on numbers it never saw, translate a few, look at one."""

import tempfile
import time
from pathlib import Path

from regard.cli.console import TrainingView, err, out, show_evaluation
from regard.config.toml import read
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.explain.look import look
from regard.explain.plots import draw_map
from regard.inference.load import load
from regard.training.prepare import start_run

SHOWN = ("einundzwanzig", "siebenhundertachtundneunzig", "vierundfünfzigtausenddreihundertzwei")


def demo(run: Path | None) -> None:
    """Everything, with its time; in a temporary directory unless one is given."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = run or Path(folder) / "numbers"
        config = read("numbers")
        out.print(f"[bold]1. train[/bold]: {config.about}")
        prepared = start_run(config, place)
        with TrainingView(config, None) as view:
            fit(prepared, place, view, device="cpu")
        predictor = load(place, device="cpu")
        out.print("\n[bold]2. score[/bold]: exact match on numbers that training never saw")
        seen = {example.source for example in prepared.splits.train}
        unseen = [example for example in prepared.splits.test if example.source not in seen]
        found = evaluate(predictor, unseen, config.evaluate)
        show_evaluation(found)
        out.print(f"exact match {found.metrics['exact']:.2f} % of {found.examples:,} unseen numbers")
        out.print("\n[bold]3. translate[/bold]")
        for text, answer in zip(SHOWN, predictor(SHOWN), strict=True):
            out.print(f"  {text} -> {answer}")
        out.print("\n[bold]4. look[/bold]: where each digit looked; German says the ones before the tens\n")
        for text in SHOWN[:2]:
            out.print(draw_map(*look(predictor, text).label(), most=out.width))
    out.print(f"done in {time.monotonic() - began:.0f} s. Your own data: see README.md and `regard recipes`.")
    if run is not None:
        err.print(f"the run is kept in {run}")
