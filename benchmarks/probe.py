"""Do soft parents find the heads of a treebank? UD Korean GSD: train to learn from, dev to score (issue 21).

Two kinds of soft parents, each the marginals of trees, projective or not:

- task: a tagger of parts of speech whose Transformer attends by trees, or by softmax. It never sees a head of the
  treebank. Of all layers and heads of attention the one is scored that finds most heads in sentences cut from train,
  which the tagger did not learn from; the same is done before training.
- heads: arcs scored over a bidirectional LSTM that learned the likelihood of the treebank's trees.

The score is the unlabeled attachment score: the share of words, punctuation among them, whose head is right; the root
counts as its own head. From marginals, the tree is decoded of which most heads are expected to be right. Intervals are
of 1,000 bootstrap samples of the dev sentences, so they do not tell how seeds differ. Beside them stand: every word's
head is its neighbour.

    REGARD_DATA=... python benchmarks/probe.py --sentences 4400 --steps 300
"""

import argparse
import functools
import gzip
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from regard.attention import trees
from regard.config.run import Config
from regard.config.structure import TaggerConfig
from regard.config.toml import change, read
from regard.data.batching import Batch, Row, collate, plan_epoch
from regard.data.columns import parse_sentence, read_blocks
from regard.data.examples import Example
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.explain.recorder import record
from regard.inference.load import load
from regard.nn.recurrent import RecurrentEncoder
from regard.tasks.tagging.model import Tagger
from regard.tasks.tagging.task import TaggingTask
from regard.training.prepare import prepare, start_run

WORDS = 768
"""Words of a batch."""
FEATURES = ["word[0]", "shape[0]", "prefix1[0]", "prefix2[0]", "suffix1[0]", "suffix2[0]", "suffix3[0]", "jamo1[0]"]
"""Of the word itself alone: what is around it, attention has to find."""
NORMALIZERS = ("softmax", "nonprojective trees", "projective trees")
Heads = dict[str, list[int]]
"""Where a sentence stands -> the places of its words' heads; the root's is its own."""
Parents = Callable[[Batch], Tensor]
"""Soft parents (batch, map, word, head) of a batch."""
Decode = Callable[[Tensor, Tensor], Tensor]
"""The heads (batch, word) of the best tree, by soft parents (batch, word, head) and lengths (batch,)."""


def read_heads(path: str) -> Heads:
    """The heads of every sentence of a treebank."""
    found = {}
    for begin, lines in read_blocks(path, ""):
        tokens = parse_sentence(lines or [], f"{path}:{begin}")
        found[f"{path}:{begin}"] = [int(one["head"]) - 1 if one["head"] else at for at, one in enumerate(tokens)]
    return found


def is_projective(heads: Sequence[int]) -> bool:
    """Whether no arcs cross, that from outside to the root among them."""
    arcs = [(-1, word) if word == head else (min(word, head), max(word, head)) for word, head in enumerate(heads)]
    return not any(a < c < b < d for a, b in arcs for c, d in arcs)


def make_rows(task: TaggingTask, examples: Sequence[Example], heads: Heads) -> list[Row]:
    """The features of every sentence's words, and their heads; longest sentences last."""
    pairs = zip(task.encode([one.source for one in examples]), examples, strict=True)
    rows = [Row(encoded.ids, heads[one.where], sequence=False) for encoded, one in pairs]
    return sorted(rows, key=lambda row: len(row.target))


def score_maps(rows: Sequence[Row], find: Parents, decode: Decode) -> Tensor:
    """How many heads of every sentence each map finds: (sentence, map)."""
    found = []
    for begin in range(0, len(rows), 32):
        some = rows[begin : begin + 32]
        batch, lengths = collate(some), torch.tensor([len(row.target) for row in some])
        every = [decode(one, lengths) == batch.answer for one in find(batch).unbind(1)]
        real = torch.arange(batch.answer.shape[1]) < lengths[:, None]
        found.append(torch.stack([(one & real).sum(1) for one in every], 1))
    return torch.cat(found)


def show_score(right: Tensor, rows: Sequence[Row]) -> list[str]:
    """The share of heads that are right, of `right` (sentence,), and the bounds of its 95 % interval."""
    words = torch.tensor([len(row.target) for row in rows])
    drawn = torch.randint(len(rows), (1000, len(rows)), generator=torch.Generator().manual_seed(1))
    low, high = (right[drawn].sum(1) / words[drawn].sum(1)).quantile(torch.tensor([0.025, 0.975])).mul(100).tolist()
    return [f"{100 * int(right.sum()) / int(words.sum()):.1f}", f"{low:.1f} - {high:.1f}"]


def score_neighbours(rows: Sequence[Row], step: int) -> Tensor:
    """How many heads (sentence,) are the neighbour `step` words on; the word that has none is the root."""
    guesses = [[min(max(word + step, 0), len(row.target) - 1) for word in range(len(row.target))] for row in rows]
    pairs = zip(guesses, rows, strict=True)
    return torch.tensor([sum(map(int.__eq__, guess, row.target)) for guess, row in pairs])


def score_best_map(model: Tagger, decode: Decode, valid: Sequence[Row], test: Sequence[Row]) -> tuple[Tensor, int]:
    """How many heads (sentence,) of `test` the map finds that finds most in `valid`, and its number."""

    def find(batch: Batch, which: slice = slice(None)) -> Tensor:
        with torch.no_grad(), record(model.eval()) as maps:
            model.word_scores(batch)
        return torch.cat(list(maps.values()), 1)[:, which]

    best = int(score_maps(valid, find, decode).sum(0).argmax())
    return score_maps(test, functools.partial(find, which=slice(best, best + 1)), decode)[:, 0], best


def probe_tagger(config: Config, normalize: str, heads: Heads) -> list[list[str]]:
    """Rows of the table: the best map of a tagger that attends by `normalize`, before and after its training."""
    decode = trees.best_projective if normalize == "projective trees" else trees.best_tree
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        prepared = start_run(change(config, [f"model.normalize={normalize}"]), run)
        task, model = prepared.task, prepared.model
        assert isinstance(task, TaggingTask)
        assert isinstance(model, Tagger)
        valid, test = (make_rows(task, part, heads) for part in (prepared.splits.valid, prepared.splits.test))
        first, _ = score_best_map(model, decode, valid, test)
        fit(prepared, run, lambda event: None, device="cpu")
        predictor = load(run, device="cpu")
    accuracy = evaluate(predictor, prepared.splits.test, warn=lambda text: None).metrics["accuracy"]
    assert isinstance(predictor.model, Tagger)
    right, best = score_best_map(predictor.model, decode, valid, test)
    told = f"map {best} of layers and heads, from 0; tags {accuracy:.1f} % right"
    return [
        [f"task, {normalize}, untrained", *show_score(first, test), ""],
        [f"task, {normalize}", *show_score(right, test), told],
    ]


class Parser(nn.Module):
    """Scores of arcs (batch, word, head), over the states of a tagger's words."""

    def __init__(self, tagger: Tagger, size: int, dropout: float = 0.33) -> None:
        super().__init__()
        self.tagger, self.dropout = tagger, nn.Dropout(dropout)
        self.word, self.head = (nn.Sequential(nn.Linear(size, size), nn.ReLU(), self.dropout) for _ in range(2))
        self.arc, self.root = nn.Linear(size, size), nn.Linear(size, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The scores, and how many words there are (batch,)."""
        x, lengths = self.tagger.bags(batch)
        assert isinstance(self.tagger.encoder, RecurrentEncoder)
        states = self.dropout(self.tagger.encoder(self.dropout(x), lengths)[0])
        scores = self.arc(self.word(states)) @ self.head(states).mT
        return torch.diagonal_scatter(scores, self.root(states)[..., 0], 0, 1, 2), lengths


def probe_parser(config: Config, projective: bool, heads: Heads) -> list[list[str]]:
    """A row of the table: soft parents that learned from the treebank's heads. A tree with crossing arcs has no
    likelihood among projective ones, so those learn without it."""
    assert isinstance(config.model, TaggerConfig)
    prepared = prepare(change(config, ["model.encoder=rnn", f"model.size={2 * config.model.size}"]))
    task, steps = prepared.task, config.train.steps or 0
    assert isinstance(task, TaggingTask)
    rows, test = (make_rows(task, part, heads) for part in (prepared.splits.train, prepared.splits.test))
    rows = [row for row in rows if not projective or is_projective(row.target)]
    torch.manual_seed(config.train.seed)
    tagger = task.build()
    parser = Parser(tagger, task.settings.size)
    optimizer = torch.optim.Adam(parser.parameters(), 2e-3, betas=(0.9, 0.9))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    epochs = (plan_epoch(rows, WORDS * tagger.width, config.train.seed, number) for number in range(steps))
    for numbers in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        batch = collate([rows[number] for number in numbers])
        scores, lengths = parser(batch)
        gold = scores.gather(-1, batch.answer[..., None])[..., 0]
        gold = (gold * (torch.arange(scores.shape[1]) < lengths[:, None])).sum(1)
        partition = (trees.eisner if projective else trees.matrix_tree)(scores, lengths)
        optimizer.zero_grad()
        torch.autograd.backward((partition - gold).sum() / lengths.sum())
        nn.utils.clip_grad_norm_(parser.parameters(), 5.0)
        optimizer.step()
        decay.step()
    marginals = trees.projective_marginals if projective else trees.tree_marginals

    def find(batch: Batch) -> Tensor:
        with torch.no_grad():
            return marginals(*parser.eval()(batch))[:, None]

    right = score_maps(test, find, trees.best_projective if projective else trees.best_tree)[:, 0]
    name = f"heads, {'' if projective else 'non'}projective trees"
    return [[name, *show_score(right, test), f"learned from {len(rows):,} trees"]]


def read_treebank(options: argparse.Namespace, train: Path) -> tuple[Config, Heads, list[Row]]:
    """The settings of the taggers, the heads of all sentences, and those of dev as rows. The first sentences of train
    are copied to `train`."""
    data: Any = read("pos").data
    blocks = gzip.decompress(Path(data.train[0]).read_bytes()).decode().split("\n\n")
    train.write_text("\n\n".join(blocks[: options.sentences]) + "\n\n", "utf-8")
    changes = [
        f'data.train=["{train}"]', f"model.features={FEATURES}", "model.structure=softmax",
        "model.encoder=transformer", f"model.size={options.size}", f"model.feedforward={2 * options.size}",
        f"model.layers={options.layers}", "model.heads=4", "text.source.min_count=2", "train.learning_rate=3e-3",
        "train.schedule=cosine", f"train.batch_tokens={WORDS * len(FEATURES)}", "train.precision=float32",
        f"train.steps={options.steps}", f"train.warmup={options.steps // 10}",
        f"train.validate_every={max(1, options.steps // 4)}",
    ]  # fmt: skip
    dev = read_heads(data.test[0])
    gold = [Row([], one, sequence=False) for one in dev.values()]
    return read("pos", changes), read_heads(str(train)) | dev, gold


def main() -> None:
    """Print a row as soon as it is there, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=4400, help="The first ones of train; 200 of them are cut off.")
    parser.add_argument("--steps", type=int, default=300, help="Updates of every model.")
    parser.add_argument("--size", type=int, default=64, help="Of the tagger; of the parser twice as much.")
    parser.add_argument("--layers", type=int, default=1, help="Of the tagger, and of the parser's LSTM.")
    options = parser.parse_args()
    title = f"of {options.sentences:,} sentences of train, 200 cut off; {options.steps:,} updates"
    table = Table("soft parents", "UAS %", "95 % interval", "", "CPU seconds", title=title)
    with tempfile.TemporaryDirectory() as folder:
        config, heads, gold = read_treebank(options, Path(folder) / "train.conllu")
        rows: list[Callable[[], list[list[str]]]] = [
            lambda: [["the word before", *show_score(score_neighbours(gold, -1), gold), ""]],
            lambda: [["the word behind", *show_score(score_neighbours(gold, 1), gold), ""]],
            *(functools.partial(probe_parser, config, projective, heads) for projective in (False, True)),
            *(functools.partial(probe_tagger, config, name, heads) for name in NORMALIZERS),
        ]
        for row in rows:
            began = time.process_time()
            for cells in row():
                table.add_row(*cells, f"{time.process_time() - began:.0f}")
                print(*cells, sep="; ", flush=True)
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
