"""A configuration -> all that training needs: examples, vocabularies, rows, and the model with its first weights."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.config.run import Config
from regard.config.text import Tokenization
from regard.config.toml import suggest
from regard.data.batching import Batch, Row
from regard.data.examples import Example, Ledger, Splits
from regard.data.splits import read_raw, read_splits
from regard.data.vocabulary import SPECIAL, UNK, Vocabularies
from regard.errors import DataError, RunError
from regard.nn.loss import Trainable
from regard.tasks import find_task, make_task
from regard.tasks.task import Metric, Task
from regard.training.checkpoint import (
    check_numbers,
    check_vacant,
    create_run,
    load_config,
    load_tensors,
    load_vocabularies,
)
from regard.training.lock import lock_run
from regard.training.manifest import (
    check_manifest,
    fingerprint_examples,
    fingerprint_settings,
    hash_sources,
    identify,
)
from regard.training.memory import build_within, check_memory, free_memory

Say = Callable[[str], None]


@dataclass
class Prepared:
    """All that training needs."""

    config: Config
    splits: Splits
    task: Task
    rows: list[Row]
    epoch: int  # batches of an epoch
    description: str  # of the rows, in words
    model: Trainable | None = None  # with its first weights; of a run that is resumed, the weights come later
    random: Tensor | None = None
    """The state of torch's random numbers behind the model's first weights: training goes on from there."""

    def batches(self, start: int) -> Iterator[list[Batch]]:
        """Endless updates from number `start` on."""
        return self.task.batches(self.rows, start)

    def facts(self) -> str:
        """What a user wants to know before training: sizes, lengths, padding, epochs."""
        both, train = self.task.vocabularies, self.config.train
        sizes = " / ".join(f"{one.size:,}" for one in (both[:1] if both.shared else both))
        if (target := self.config.text.target) and target.kind == "label":
            sizes = f"{both.source.size:,}, {both.target.size - len(SPECIAL):,} labels"
        steps = train.steps or 0
        length = f"{steps:,} updates are {steps * train.accumulate / self.epoch:,.1f} epochs"
        length += f", at most {train.minutes:g} minutes" if train.minutes else ""
        early = f", fewer if {train.patience} validations bring nothing better" if train.patience else ""
        return f"vocabulary {sizes}; {self.description}; {length}{early}"


def read_examples(config: Config, only: str | None = None) -> Splits:
    """The examples of a run; where `only` one split is wanted that has files of its own, no others are read."""
    task = find_task(config)
    return read_splits(config.data, config.train.seed, lambda example: task.accept(example, config), only)


def read_raw_text(config: Config, ledgers: dict[str, Ledger]) -> list[str]:
    """The lines of text.raw, with a ledger of their own if there are any."""
    if not config.text.raw:
        return []
    ledgers["raw"] = Ledger()
    return read_raw(config.text.raw, getattr(config.data, "obtain", ""), ledgers["raw"])


def check_metrics(config: Config) -> None:
    """Refuse a metric that a task does not have."""
    known = [one.name if isinstance(one, Metric) else one for one in find_task(config).fitting_metrics(config)]
    for metric in config.evaluate.metrics:
        if metric not in known:
            fitting = f"set evaluate.metrics to some of {', '.join(known)}" if known else "it is not scored"
            raise DataError(f"a model of kind {config.model.kind} has no {metric}: {fitting}.{suggest(metric, known)}")


def prepare(config: Config, run: Path | None = None) -> Prepared:
    """Read everything; the vocabularies of a run that exists already are taken from it, and a new run that begins with
    a pretrained one takes that one's vocabulary and form."""
    kind = find_task(config)
    kind.check(config)
    check_metrics(config)
    pretrained = None if run else kind.pretrained_run(config)
    config = kind.adopt(config, load_config(pretrained)) if pretrained else config
    splits = read_examples(config)
    vocabularies = load_vocabularies(run) if run else learn_vocabularies(config, splits, pretrained)
    task, ledger = make_task(config, vocabularies), splits.ledgers["train"]
    task.check_examples(splits.valid)
    task.check_examples(splits.train)
    rows = task.encode_examples(splits.train, ledger)
    if not rows:
        hint = ' Raise text.max_length, or set text.longer = "cut".' if "too long" in ledger.dropped else ""
        raise DataError(f"no training example is left. {'; '.join(map(str.strip, ledger.lines()))}.{hint}")
    epoch, description = task.describe_rows(rows)
    task.config = config.model_copy(update={"train": config.train.resolve(epoch)})
    return Prepared(task.config, splits, task, rows, epoch, description)


def learn_vocabularies(config: Config, splits: Splits, pretrained: Path | None) -> Vocabularies:
    """Vocabularies of the training data and of raw text; of the source, the pretrained run's if there is one."""
    text = config.text.model_copy(update={"source": Tokenization(kind="char")}) if pretrained else config.text
    task, settings = find_task(config), config.model_copy(update={"text": text})
    learned = task.learn_vocabularies(settings, splits.train, read_raw_text(config, splits.ledgers))
    if pretrained is None:
        return learned
    source = load_vocabularies(pretrained).source
    return Vocabularies(source, source if learned.shared else learned.target)


def find_doubts(prepared: Prepared) -> list[str]:
    """What a careful colleague would mention before training."""
    splits, found = prepared.splits, []
    known = {"training": splits.train, "validation": splits.valid}
    sources = {name: {one.source or one.target for one in examples} for name, examples in known.items()}
    for name in ("valid", "test"):  # a document has no source
        examples = getattr(splits, name)
        if not examples:
            found.append(f"there is no {name} data: set {prepared.config.data.remedy(name)}.")
        for other in ("training", "validation") if name == "test" else ("training",):
            if shared := sum((one.source or one.target) in sources[other] for one in examples):
                found.append(f"{shared:,} of {len(examples):,} {name} sources are in the {other} data too.")
    counts = Counter((example.source, example.target) for example in splits.train)
    if surplus := len(splits.train) - len(counts):
        repeated = sum(count > 1 for count in counts.values())
        found.append(f"{repeated:,} training examples occur more than once: {surplus:,} surplus copies.")
    if unknown := sum(row.source.count(UNK) + row.target.count(UNK) for row in prepared.rows):
        found.append(f"{unknown:,} training tokens are <unk>: their words are rarer than min_count.")
    copied = sum(example.source == example.target for example in splits.train)
    if copied * 10 > len(splits.train):
        found.append(f"{copied:,} training examples have the same text on both sides.")
    largest = prepared.task.largest_batch(prepared.rows)
    longest = max(largest.source.shape[1] // prepared.task.ids_per_token, largest.target.shape[1])
    return found + prepared.config.model.find_doubts(longest)


def start_run(config: Config, run: str | Path, say: Say = lambda text: None, *, device: str = "auto") -> Prepared:
    """Make a new run directory, ready to be trained on a device. What cannot be built, or does not fit into its memory,
    leaves no directory behind."""
    check_vacant(Path(run))  # before what takes long
    prepared = require_validation(prepare(config))
    build_model(prepared)
    initialize(prepared, say)
    assert prepared.model is not None
    check_memory(prepared.model, prepared.task.largest_batch(prepared.rows), prepared.config, device)
    ledgers = {name: ledger.tree() for name, ledger in prepared.splits.ledgers.items()}
    create_run(Path(run), prepared.config, prepared.task.vocabularies, ledgers, prepared.splits)
    return prepared


def resume_run(run: str | Path) -> Prepared:
    """A run that was stopped, ready to go on; it must be as it was, and nobody may be training it."""
    run = Path(run)
    config = load_config(run)
    if not identify(run):
        raise RunError(f"{run} has no manifest.json, which says what belongs to it: it can be used, but not resumed.")
    with lock_run(run):
        check_manifest(run, fingerprint_settings((run / "config.toml").read_text("utf-8")))
    prepared = require_validation(prepare(config, run))
    check_manifest(run, fingerprint_examples(prepared.splits))
    every = prepared.config.train.validate_every or 0
    trained = last_step(run / "metrics.jsonl") > every  # where it was saved first
    saved = any((run / "state").glob("[0-9]*"))
    if trained and not saved:
        raise RunError(
            f"{run} cannot go on: it has been trained, but its folder state/ is gone, so training would begin again "
            "and overwrite its model. Put the folder back, or start another run."
        )
    build_model(prepared)
    if not saved:
        initialize(prepared)
    return prepared


def build_model(prepared: Prepared) -> None:
    """Build the model, its weights drawn from the run's seed."""
    torch.manual_seed(prepared.config.train.seed)
    prepared.model = build_within(prepared.task.build, free_memory(torch.device("cpu")), prepared.config)
    prepared.task.freeze(prepared.model)
    prepared.random = torch.get_rng_state()


def initialize(prepared: Prepared, say: Say = lambda text: None) -> None:
    """First weights that are not random: embeddings from raw text and vector files, encoders from other runs."""

    def texts() -> list[str]:
        return [*read_raw_text(prepared.config, {}), *(str(example.source) for example in prepared.splits.train)]

    assert prepared.model is not None
    prepared.task.initialize(prepared.model, texts, say)
    if pretrained := prepared.task.pretrained_run(prepared.config):
        load_pretrained(prepared.model, pretrained)


def load_pretrained(model: Trainable, run: Path) -> None:
    """Fill what a model shares with a pretrained run, by name; of its positions, those that the model has."""
    path = run / "model.safetensors"
    tensors, wanted = load_tensors(path, run), dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in wanted or tensor[: len(wanted[name])].shape != wanted[name].shape:
                raise RunError(f"{path}: {name} has no place of its shape {tuple(tensor.shape)} in this model.")
            check_numbers(name, tensor, path)
            wanted[name].copy_(tensor[: len(wanted[name])])


def find_seen(run: Path, examples: Sequence[Example]) -> list[bool]:
    """Of each example, whether a run learned from its source, as far as the run says."""
    path = run / "seen.safetensors"
    if not path.exists():
        return [False] * len(examples)
    return torch.isin(hash_sources(examples), load_tensors(path, run)["sources"]).tolist()


def require_validation(prepared: Prepared) -> Prepared:
    """The same, if there is something to validate on: the weights that do best there are the ones that are kept."""
    if not prepared.splits.valid:
        raise DataError(
            "there is no validation data, and training keeps the weights that do best on it: "
            f"set {prepared.config.data.remedy('valid')}."
        )
    return prepared


def last_step(path: Path) -> float:
    """The last step that the metrics of a run tell of; inf: that it is done."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    if any(line.startswith('{"kind": "done"') for line in lines):
        return torch.inf
    return max((step for step in map(step_of, lines) if step < torch.inf), default=0)


def step_of(line: str) -> float:
    """The step of a line of metrics; one that was cut short by a kill is forgotten."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return torch.inf
