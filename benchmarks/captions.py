"""Captioners beside each other: what they score on the validation data, and whether the difference is one of chance.

The first run is what the others are compared with, image by image: BLEU-4 by sacreBLEU's paired approximate
randomization, CIDEr-D, which is a mean over images, by a paired t-test. Captions are decoded as the run's settings say;
`--set` decodes otherwise.

    python benchmarks/captions.py runs/a3 runs/a4 runs/transformer
    python benchmarks/captions.py runs/a4 --set decode.length_penalty=0.8
"""

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from scipy.stats import ttest_rel

from regard.evaluation.evaluate import Evaluation, evaluate
from regard.inference.load import load
from regard.tasks.vision.caption_metrics import score_bleu, score_cider, score_rouge_l, tokenize_caption
from regard.training.prepare import read_examples

SAMPLES = 10_000


def write_captions(run: Path, changes: list[str]) -> Evaluation:
    """The captions of the run's validation images, with their references."""
    predictor = load(run, changes)
    return evaluate(predictor, read_examples(predictor.config, "valid").valid)


def compare_bleu(first: Evaluation, other: Evaluation) -> float:
    """How likely chance alone gives such a difference of BLEU-4 (two-sided)."""

    def split(texts: list[str]) -> list[str]:
        return [" ".join(tokenize_caption(text)) for text in texts]

    systems = [(name, split(found.outputs)) for name, found in (("first", first), ("other", other))]
    streams = [split(list(stream)) for stream in zip(*first.references, strict=True)]
    metric = {"BLEU": BLEU(tokenize="none", force=True, references=streams)}
    _, scores = PairedTest(systems, metric, None, test_type="ar", n_samples=SAMPLES)()
    return float(scores["BLEU"][1].p_value)


def main() -> None:
    """Decode every run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    options = parser.parse_args()
    headings = ["run", "BLEU-1", "-2", "-3", "-4", "p", "CIDEr-D", "p", "ROUGE-L", "words"]
    table = Table(*headings, title=f"p: against {options.runs[0].name}, paired by image")
    first, ciders = None, []
    for run in options.runs:
        found = write_captions(run, options.changes)
        texts, wanted = found.outputs, found.references
        bleus = [100 * score_bleu(texts, wanted, order).corpus for order in range(1, 5)]
        cider = score_cider(texts, wanted)
        ciders.append(cider.each)
        chance = ["", ""]
        if first is not None:
            likely = (compare_bleu(first, found), ttest_rel(ciders[0], ciders[-1]).pvalue)
            chance = [f"{value:.4f}" for value in likely]
        first = first or found
        rouge = score_rouge_l(texts, wanted).corpus
        words = statistics.fmean(len(tokenize_caption(text)) for text in texts)
        shown = [f"{value:.1f}" for value in (*bleus, 100 * cider.corpus, 100 * rouge, words)]
        table.add_row(run.name, *shown[:4], chance[0], shown[4], chance[1], *shown[5:])
        print(f"{run}: {found.examples:,} captions, decoded", flush=True)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
