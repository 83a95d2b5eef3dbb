"""A configuration -> all that training needs: examples, vocabularies, rows, and the model with its first weights."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.config.run import Config
from regard.config.toml import suggest
from regard.data.batching import Batch, Row
from regard.data.examples import Ledger, Splits, fingerprint
from regard.data.splits import read_raw, read_splits
from regard.data.vocabulary import UNK
from regard.errors import DataError, RunError
from regard.nn.loss import Trainable
from regard.tasks import find_task, make_task
from regard.tasks.task import Metric, Task
from regard.training.checkpoint import check_vacant, create_run, load_config, load_tensors, load_vocabularies

Say = Callable[[str], None]


@dataclass
class Prepared:
    """All that training needs."""

    config: Config
    splits: Splits
    task: Task
    rows: list[Row]
    model: Trainable | None = None  # with its first weights; of a run that is resumed, the weights come later
    random: Tensor | None = None
    """The state of torch's random numbers behind the model's first weights: training goes on from there."""

    def batches(self, start: int) -> Iterator[list[Batch]]:
        """Endless updates from number `start` on."""
        return self.task.batches(self.rows, start)

    def facts(self) -> str:
        """What a user wants to know before training: sizes, lengths, padding."""
        both = self.task.vocabularies
        sizes = " / ".join(f"{one.size:,}" for one in (both[:1] if both.shared else both))
        return f"vocabulary {sizes}; {self.task.describe_rows(self.rows)}"


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
    if run is None:
        vocabularies = kind.learn_vocabularies(config, splits.train, read_raw_text(config, splits.ledgers))
    else:
        vocabularies = load_vocabularies(run)
    if pretrained:
        source = load_vocabularies(pretrained).source
        vocabularies = vocabularies._replace(source=source, target=source if vocabularies.shared else vocabularies[1])
    task, ledger = make_task(config, vocabularies), splits.ledgers["train"]
    task.check_examples(splits.valid)
    task.check_examples(splits.train)
    rows = task.encode_examples(splits.train, ledger)
    if not rows:
        hint = ' Raise text.max_length, or set text.longer = "cut".' if "too long" in ledger.dropped else ""
        raise DataError(f"no training example is left. {'; '.join(map(str.strip, ledger.lines()))}.{hint}")
    return Prepared(config, splits, task, rows)


def find_doubts(prepared: Prepared) -> list[str]:
    """What a careful colleague would mention before training."""
    splits, found = prepared.splits, []
    train = {example.source or example.target for example in splits.train}  # a document has no source
    for name in ("valid", "test"):
        examples = getattr(splits, name)
        if not examples:
            found.append(f"there is no {name} data: set {prepared.config.data.remedy(name)}.")
        elif shared := sum((example.source or example.target) in train for example in examples):
            found.append(f"{shared:,} of {len(examples):,} {name} sources are in the training data too.")
    if doubled := len(splits.train) - len({(example.source, example.target) for example in splits.train}):
        found.append(f"{doubled:,} training examples occur more than once.")
    if unknown := sum(row.source.count(UNK) + row.target.count(UNK) for row in prepared.rows):
        found.append(f"{unknown:,} training tokens are <unk>: their words are rarer than min_count.")
    copied = sum(example.source == example.target for example in splits.train)
    if copied * 10 > len(splits.train):
        found.append(f"{copied:,} training examples have the same text on both sides.")
    return found


def start_run(config: Config, run: str | Path, say: Say = lambda text: None) -> Prepared:
    """Make a new run directory, ready to be trained. What cannot be built leaves no directory behind."""
    check_vacant(Path(run))  # before what takes long
    prepared = require_validation(prepare(config))
    build_model(prepared)
    initialize(prepared, say)
    ledgers = {name: ledger.tree() for name, ledger in prepared.splits.ledgers.items()}
    facts = {**ledgers, "fingerprint": fingerprint_data(prepared.splits)}
    create_run(Path(run), prepared.config, prepared.task.vocabularies, facts)
    return prepared


def resume_run(run: str | Path) -> Prepared:
    """A run that was stopped, ready to go on."""
    run = Path(run)
    prepared = require_validation(prepare(load_config(run), run))
    if not same_data(run, prepared.splits):
        raise DataError(
            f"the training data is not what {run} began with: its files have changed, so this would not be the same "
            "run. Put them back, or start another."
        )
    trained = last_step(run / "metrics.jsonl") > prepared.config.train.validate_every  # where it was saved first
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
    prepared.model = prepared.task.build()
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
    tensors, wanted = load_tensors(path), dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in wanted or tensor[: len(wanted[name])].shape != wanted[name].shape:
                raise RunError(f"{path}: {name} has no place of its shape {tuple(tensor.shape)} in this model.")
            wanted[name].copy_(tensor[: len(wanted[name])])


def fingerprint_data(splits: Splits) -> str:
    """A fingerprint of the training examples."""
    return fingerprint("\n".join(f"{example.source}\t{example.target}" for example in splits.train))


def same_data(run: Path, splits: Splits) -> bool:
    """Whether a run began with these training examples, as far as it says."""
    try:
        known = json.loads((run / "data.json").read_bytes()).get("fingerprint")
    except (OSError, ValueError, AttributeError):
        return True
    return known is None or known == fingerprint_data(splits)


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
