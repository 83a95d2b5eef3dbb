"""Captioners beside each other: what they score on the validation data, and whether the difference is one of chance.

The first run is what the others are compared with, image by image: BLEU-4 by paired approximate randomization (Riezler
2005: the captions of an image change sides at random), CIDEr-D, a mean over images, by a paired t-test. Captions are
decoded as the run's settings say; `--set` decodes otherwise.

    python benchmarks/captions.py runs/a3 runs/a4 runs/transformer
    python benchmarks/captions.py runs/a4 --set decode.length_penalty=0.8
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
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


def count_matches(found: Evaluation) -> NDArray[np.int64]:
    """What BLEU-4 is made of, image by image: words, words of the reference nearest in length, then right n-grams and
    all n-grams of every n (images, 10)."""
    counter = BLEU(tokenize="none", force=True)
    rows = []
    for text, wanted in zip(found.outputs, found.references, strict=True):
        own, *others = (" ".join(tokenize_caption(one)) for one in (text, *wanted))
        score = counter.corpus_score([own], [[other] for other in others])
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return np.array(rows)


def score_counts(sums: NDArray[np.int64]) -> float:
    """BLEU-4 of added counts."""
    words, wanted, right, every = sums[0], sums[1], sums[2:6], sums[6:]
    if not right.all():
        return 0.0
    return float(min(1.0, np.exp(1 - wanted / words)) * np.exp(np.log(right / every).mean()))


def compare_bleu(first: Evaluation, other: Evaluation) -> float:
    """How likely chance alone gives such a difference of BLEU-4 (two-sided)."""
    counts = [count_matches(one) for one in (first, other)]
    difference = abs(score_counts(counts[0].sum(0)) - score_counts(counts[1].sum(0)))
    both, moved, draw = counts[0].sum(0) + counts[1].sum(0), counts[1] - counts[0], np.random.default_rng(1)
    as_large = 1
    for _ in range(SAMPLES):
        sums = counts[0].sum(0) + moved[draw.random(len(moved)) < 0.5].sum(0)
        as_large += abs(score_counts(sums) - score_counts(both - sums)) >= difference
    return as_large / (SAMPLES + 1)


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
            if (first.sources, first.references) != (found.sources, found.references):
                raise SystemExit(f"{run} and {options.runs[0]} have other validation data: nothing can be paired.")
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
