"""Chunking on cuts of CoNLL-2000's training data: taggers of every kind beside CRFsuite, on the same features.

The last tenth of the sentences is held out; nothing else is seen of it. CRFsuite and regard's CRF get the same feature
strings, the same L2 penalty and as many iterations of L-BFGS, one after the other on one thread; their times are CPU
seconds of everything from the sentences to the weights. F1 counts spans as CoNLL's script does, with a 95 % interval
from 1,000 bootstrap samples of the held-out sentences.

    python benchmarks/chunk.py --rows crfsuite hmm memm crf rnn
"""

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import regard
from regard.data.examples import Words
from regard.tasks.tagging.features import Templates
from regard.tasks.tagging.spans import Count, count_spans
from regard.training.checkpoint import write_file

Sentence = list[list[str]]
"""Rows of a word, its part of speech and its tag."""


class Result(NamedTuple):
    """One tagger after its training."""

    tags: list[list[str]]  # that it gave to the held-out sentences
    seconds: float  # of CPU time, from the sentences to the weights


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a gzipped file of columns."""
    text = gzip.decompress(path.read_bytes()).decode()
    return [[line.split() for line in block.splitlines()] for block in text.split("\n\n") if block.strip()]


def train_crfsuite(train: list[Sentence], held: list[Sentence], folder: Path, iterations: int) -> Result:
    """CRFsuite with the features of the recipe."""
    import pycrfsuite

    settings = regard.read("chunk").model
    templates = Templates(settings.features, ["pos"], lambda word: True)

    def extract(sentence: Sentence) -> list[list[str]]:
        return templates.extract(Words(tuple(row[0] for row in sentence), tuple((row[1],) for row in sentence)))

    began = time.process_time()
    trainer = pycrfsuite.Trainer(verbose=False)
    for sentence in train:
        trainer.append(extract(sentence), [row[2] for row in sentence])
    trainer.set_params({"c1": 0.0, "c2": settings.l2, "max_iterations": iterations})
    trainer.train(str(folder / "crfsuite"))
    seconds = time.process_time() - began
    tagger = pycrfsuite.Tagger()
    tagger.open(str(folder / "crfsuite"))
    return Result([tagger.tag(extract(sentence)) for sentence in held], seconds)


def train_regard(recipe: str, changes: Sequence[str], files: dict[str, Path], run: Path) -> Result:
    """A recipe on the same cut; its validation is cut from what it learns from."""
    paths = [f'data.{name}=["{path}"]' for name, path in files.items()]
    began = time.process_time()
    prepared = regard.start_run(regard.read(recipe, [*paths, "data.cut_test=0", *changes]), run)
    regard.fit(prepared, run, lambda event: None, device="cpu")
    seconds = time.process_time() - began
    predictor = regard.load(run, device="cpu")
    found = regard.evaluate(predictor, prepared.splits.test, warn=lambda text: None)
    return Result([output.split() for output in found.outputs], seconds)


def bootstrap(given: list[list[str]], wanted: list[list[str]], samples: int = 1000) -> tuple[float, float, float]:
    """F1 in percent, and the bounds of its 95 % interval: sentences are drawn anew."""
    counts = torch.tensor([count_spans([one], [other])[""] for one, other in zip(given, wanted, strict=True)])
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(len(counts), (samples, len(counts)), generator=generator)
    scores = sorted(Count(*map(int, counts[rows].sum(0))).figures()["f1"] for rows in drawn)
    whole = Count(*map(int, counts.sum(0))).figures()["f1"]
    return whole, scores[int(samples * 0.025)], scores[int(samples * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="The training file; that of the recipe by default.")
    names = ["crfsuite", "crf", "hmm", "memm", "rnn"]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--set", nargs="*", default=[], dest="changes", help="Changes of the recurrent tagger.")
    options = parser.parse_args()
    path = options.data or Path(regard.read("chunk").data.train[0])
    sentences = read_sentences(path)
    cut = len(sentences) * 9 // 10
    train, held = sentences[:cut], sentences[cut:]
    steps = f"train.steps={options.iterations}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = {"train": folder / "train.txt", "test": folder / "test.txt"}
        for file, some in zip(files.values(), (train, held), strict=True):
            text = "\n\n".join("\n".join(" ".join(row) for row in sentence) for sentence in some)
            write_file(file, text.encode())
        run = folder / "runs"
        own: dict[str, Callable[[], Result]] = {
            "crfsuite": lambda: train_crfsuite(train, held, folder, options.iterations),
            "crf": lambda: train_regard("chunk", [steps, "data.cut_valid=1"], files, run / "crf"),
            "memm": lambda: train_regard(
                "chunk", [steps, "data.cut_valid=1", "model.structure=memm"], files, run / "memm"
            ),
            "hmm": lambda: train_regard(
                "chunk",
                ["data.cut_valid=1", "model.structure=hmm", 'model.features=["rare[0]"]'],
                files,
                run / "hmm",
            ),
            "rnn": lambda: train_regard("chunk-rnn", options.changes, files, run / "rnn"),
        }
        wanted = [[row[2] for row in sentence] for sentence in held]
        table = Table("tagger", "F1", "95 % interval", "CPU seconds", title=f"{len(train):,} / {len(held):,} sentences")
        for name in options.rows:
            result = own[name]()
            whole, low, high = bootstrap(result.tags, wanted)
            table.add_row(name, f"{whole:.2f}", f"{low:.2f} - {high:.2f}", f"{result.seconds:.0f}")
            Console(highlight=False).print(f"{name}: {whole:.2f} in {result.seconds:.0f} s")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
