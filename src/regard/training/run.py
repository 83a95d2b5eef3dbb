"""A configuration -> a run: read the data, make the vocabularies, build the model, train it, score it."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch

from regard.config.config import BlockConfig, ClassifierConfig, Config, EncoderConfig, LanguageConfig, ReaderConfig
from regard.config.data import DocumentData, FileData
from regard.data.batching import (
    Batch,
    Pair,
    answerable,
    encode,
    epoch,
    joined,
    known_labels,
    padding_share,
    updates,
    windows,
)
from regard.data.files import Example
from regard.data.splits import Ledger, Splits, fingerprint, read_files, read_raw, remedy
from regard.data.synthetic import generate
from regard.data.vocabulary import UNK, Vocabulary
from regard.errors import ConfigError, DataError, RunError
from regard.evaluation.evaluate import evaluate, refuse_unfit, temperature
from regard.evaluation.metrics import better
from regard.inference.predictor import Predictor
from regard.nn import word_vectors as embeddings
from regard.nn.loss import Trainable
from regard.tasks.encoders import LABELS, Classifier
from regard.tasks.models import AnyModel, build
from regard.training.checkpoint import (
    create,
    fill,
    load_config,
    load_state,
    load_tensors,
    load_vocabularies,
    replace,
    save_weights,
    vacant,
)
from regard.training.device import choose, keep_memory, precision
from regard.training.trainer import Event, Progress, Score, append, train


class Prepared(NamedTuple):
    """All that training needs."""

    config: Config
    splits: Splits
    source: Vocabulary
    target: Vocabulary | None
    pairs: list[Pair]

    def batches(self, start: int) -> Iterator[list[Batch]]:
        """Endless updates from number `start` on."""
        config = self.config
        if isinstance(config.model, LanguageConfig):
            stream = joined(self.pairs, config.model.begin)
            return windows(stream, config.text.max_length, config.train, start)
        return updates(self.pairs, config.train, start)

    def facts(self) -> str:
        """What a user wants to know before training: sizes, lengths, padding."""

        def both(numbers: Iterable[int]) -> str:
            return " / ".join(f"{number:,}" for number in numbers)

        budget, sizes = self.config.train.batch_tokens, [self.source.size, *([self.target.size] if self.target else [])]
        if isinstance(self.config.model, LanguageConfig):
            tokens = sum(len(pair.target) + 1 for pair in self.pairs)
            counts = f"{len(self.pairs):,} documents of {tokens:,} tokens"
            return f"vocabulary {both(sizes)}; {counts}; {max(1, tokens // budget):,} batches an epoch"
        batches = epoch(self.pairs, budget, self.config.train.seed, 0)
        sides = [sorted(map(len, side)) for side in ([p.source for p in self.pairs], [p.target for p in self.pairs])]
        return (
            f"vocabulary {both(sizes)}; tokens {both(map(sum, sides))} (source / target); median length "
            f"{both(side[len(side) // 2] for side in sides)}, longest {both(side[-1] for side in sides)}; "
            f"{len(batches):,} batches an epoch, {padding_share(self.pairs, batches):.1%} padding"
        )


def read_splits(config: Config, only: str | None = None) -> Splits:
    """The examples of a configuration, from files or from a generator; where `only` one split is wanted that has files
    of its own, no others are read."""
    data = config.data
    if not isinstance(data, FileData):
        return generate(data, config.train.seed)
    if only in ("valid", "test") and getattr(data, only):
        others = {name: () for name in ("train", "valid", "test") if name != only}
        data = data.model_copy(update={**others, "cut_valid": 0, "cut_test": 0})
    found = read_files(data, isinstance(config.model, ClassifierConfig) and config.model.multiple)
    train, valid, test = (answerable(getattr(found, n), ledger, config.model) for n, ledger in found.ledgers.items())
    return Splits(train, valid, test, found.ledgers)


def vocabularies(config: Config, splits: Splits) -> tuple[Vocabulary, Vocabulary | None]:
    """Learn the vocabularies from the training examples, that of the source from raw text too."""
    sources = [example.source for example in splits.train] + raw_text(config, splits.ledgers)
    targets = [example.target for example in splits.train]
    if isinstance(config.model, ReaderConfig) and config.model.answer == "span":
        parts = dict.fromkeys(part for text in sources for part in text.split("\t"))
        return Vocabulary.learn(parts, config.text.source), None
    if config.text.target is None:
        return Vocabulary.learn(itertools.chain(sources, targets), config.text.source), None
    target = Vocabulary.learn(targets, config.text.target)
    if config.text.target.kind == "label" and target.size < LABELS + 2 and all(targets):
        raise DataError(
            f"all {len(targets):,} training examples have the label {targets[0]!r}: there is nothing to tell apart. "
            f"Give examples of at least two labels."
        )
    return Vocabulary.learn(sources, config.text.source), target


def raw_text(config: Config, ledgers: dict[str, Ledger]) -> list[str]:
    """The lines of text.raw, with a ledger of their own if there are any."""
    if not config.text.raw:
        return []
    ledgers["raw"] = Ledger()
    return read_raw(config.text.raw, getattr(config.data, "obtain", ""), ledgers["raw"])


def prepare(config: Config, run: Path | None = None) -> Prepared:
    """Read everything; the vocabularies of a run that exists already are taken from it, and a new run that begins with
    a pretrained encoder takes that one's vocabulary and form."""
    if isinstance(config.model, LanguageConfig) and not isinstance(config.data, DocumentData):
        raise ConfigError(
            f'a model of kind language continues texts: it needs data.kind = "text", not {config.data.kind!r}, of '
            "whose pairs it would read one side."
        )
    refuse_unfit(config.evaluate.metrics, config.model)
    pretrained = None if run else pretrained_run(config)
    config = like(config, load_config(pretrained)) if pretrained else config
    splits = read_splits(config)
    source, target = load_vocabularies(run) if run else vocabularies(config, splits)
    source = load_vocabularies(pretrained)[0] if pretrained else source
    ledger = splits.ledgers["train"]
    pairs = encode(splits.train, source, target or source, config.text, ledger, config.model)
    if target and config.text.target and config.text.target.kind == "label":
        known_labels(splits.valid, target)
    if not pairs:
        hint = ' Raise text.max_length, or set text.longer = "cut".' if "too long" in ledger.dropped else ""
        raise DataError(f"no training example is left. {'; '.join(map(str.strip, ledger.lines()))}.{hint}")
    return Prepared(config, splits, source, target, pairs)


def pretrained_run(config: Config) -> Path | None:
    """The run that an encoder begins with, if any."""
    name = getattr(config.model, "pretrained", None)
    return Path(name) if name else None


def like(config: Config, pretrained: Config) -> Config:
    """The same settings, with the form of a pretrained encoder and at most its length."""
    form, model = pretrained.model, config.model
    if type(form) is not EncoderConfig:
        raise ConfigError(f"model.pretrained is a run of kind {form.kind}, expected encoder, as `regard import` makes.")
    if getattr(model, "shared", False):
        raise ConfigError("model.shared is one block for all layers, but those of model.pretrained are not the same.")
    taken = {name: getattr(form, name) for name in (*BlockConfig.model_fields, "layers") if name != "dropout"}
    taken |= {"members": 1} if isinstance(model, ClassifierConfig) else {}
    room = pretrained.text.max_length - isinstance(model, ReaderConfig)  # a context has an end of its own
    text = {"source": pretrained.text.source, "max_length": min(config.text.max_length, room), "raw": ()}
    return config.model_copy(
        update={"model": model.model_copy(update=taken), "text": config.text.model_copy(update=text)}
    )


def begin_with(model: AnyModel, run: Path) -> None:
    """Fill embedding and encoder from a pretrained run; of its positions, those that the model has."""
    path = run / "model.safetensors"
    tensors, wanted = load_tensors(path), dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in wanted or tensor[: len(wanted[name])].shape != wanted[name].shape:
                raise RunError(f"{path}: {name} has no place of its shape {tuple(tensor.shape)} in this model.")
            wanted[name].copy_(tensor[: len(wanted[name])])


def doubts(prepared: Prepared) -> list[str]:
    """What a careful colleague would mention before training."""
    splits, found = prepared.splits, []
    train = {example.source or example.target for example in splits.train}  # a document has no source
    for name in ("valid", "test"):
        examples = getattr(splits, name)
        if not examples:
            found.append(f"there is no {name} data: set {remedy(prepared.config.data, name)}.")
        elif shared := sum((example.source or example.target) in train for example in examples):
            found.append(f"{shared:,} of {len(examples):,} {name} sources are in the training data too.")
    if doubled := len(splits.train) - len({(example.source, example.target) for example in splits.train}):
        found.append(f"{doubled:,} training examples occur more than once.")
    unknown = sum(pair.source.count(UNK) + pair.target.count(UNK) for pair in prepared.pairs)
    if unknown:
        found.append(f"{unknown:,} training tokens are <unk>: their words are rarer than min_count.")
    copied = sum(example.source == example.target for example in splits.train)
    if copied * 10 > len(splits.train):
        found.append(f"{copied:,} training examples have the same text on both sides.")
    return found


def fresh(config: Config, run: str | Path) -> Prepared:
    """Make a new run directory, ready to be trained."""
    vacant(Path(run))  # before what takes long
    prepared = validated(prepare(config))
    build_model(prepared, counted=False)  # what cannot be built leaves no directory behind
    ledgers = {name: ledger.tree() for name, ledger in prepared.splits.ledgers.items()}
    facts = {**ledgers, "fingerprint": learned_from(prepared.splits)}
    create(Path(run), prepared.config, prepared.source, prepared.target, facts)
    return prepared


def learned_from(splits: Splits) -> str:
    """A fingerprint of the training examples."""
    return fingerprint("\n".join(f"{example.source}\t{example.target}" for example in splits.train))


def same_data(run: Path, splits: Splits) -> bool:
    """Whether a run began with these training examples, as far as it says."""
    try:
        known = json.loads((run / "data.json").read_bytes()).get("fingerprint")
    except (OSError, ValueError, AttributeError):
        return True
    return known is None or known == learned_from(splits)


def validated(prepared: Prepared) -> Prepared:
    """The same, if there is something to validate on: the weights that do best there are the ones that are kept."""
    if not prepared.splits.valid:
        raise DataError(
            "there is no validation data, and training keeps the weights that do best on it: "
            f"set {remedy(prepared.config.data, 'valid')}."
        )
    return prepared


def build_model(
    prepared: Prepared,
    *,
    resumed: bool = False,
    counted: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> AnyModel:
    """The model with its first weights; embeddings come from raw text (unless it shall not be `counted`) and vector
    files, encoders from other runs, by setting. One that is resumed gets its weights later."""
    config = prepared.config.model
    model = build(prepared.config, prepared.source.size, prepared.target.size if prepared.target else None)
    for side, vocabulary in (("source", prepared.source), ("target", prepared.target or prepared.source)):
        path, raw = getattr(config, f"{side}_vectors", None), prepared.config.text.raw if side == "source" else ()
        if not path and not raw:
            continue
        table = getattr(model, f"{side}_embedding")
        table.weight.requires_grad_(not config.freeze_vectors)
        if raw and counted and not resumed:
            say("counting which words stand near which ...")
            texts = raw_text(prepared.config, {}) + [example.source for example in prepared.splits.train]
            filled = embeddings.count(table, (tokens.ids for tokens in vocabulary.encode_all(texts)))
            say(f"{filled:,} of the {vocabulary.size:,} {side} entries have a vector from their neighbours in the text")
        if path and not resumed:
            filled = embeddings.load(table, path, vocabulary.find)
            say(f"{filled:,} of the {vocabulary.size:,} {side} entries have a vector in {path}")
        for member in getattr(model, "others", ()):
            member.source_embedding.load_state_dict(table.state_dict())
    pretrained = pretrained_run(prepared.config)
    if pretrained and not resumed:
        begin_with(model, pretrained)
    return model


def fit(
    prepared: Prepared,
    run: str | Path,
    report: Callable[[Event], None],
    *,
    device: str = "auto",
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train a run, from its start or from its last saved state."""
    keep_memory()
    run, config = Path(run), prepared.config
    place = choose(device)
    saved = load_state(run)
    device_before, _, products = (saved[1].get("precision", "") if saved else "").partition(" ")

    def say(text: str) -> None:
        report(Event("note", 0, {"text": text}))

    model = build_model(prepared, resumed=saved is not None, say=say).to(place)
    forget_after(run / "metrics.jsonl", saved[1]["step"] if saved else 0)
    examples = spread(prepared.splits.valid, config.train.validate_examples, config.evaluate.group)
    settings = config.evaluate

    def validate(current: Trainable) -> Score:
        found = evaluate(
            Predictor(cast(AnyModel, current), config, prepared.source, prepared.target), examples, settings
        )
        for source, output, wanted in list(zip(found.sources, found.outputs, found.references, strict=True))[:3]:
            report(Event("sample", 0, {"source": source, "output": output, "wanted": wanted[0]}))
        return found.metrics

    def note(event: Event) -> None:
        if event.kind != "saved":
            append(run / "metrics.jsonl", event)
        report(event)

    progress = train(
        model,
        prepared.batches,
        config.train,
        run,
        validate=validate,
        better=better(settings.metrics[0]),
        report=note,
        precision=precision(place, products if device_before == place.type else config.train.precision),
        stop=stop,
    )
    if isinstance(model, Classifier) and not stop():
        calibrate(run, prepared, model, progress.best_step)
    return progress


def spread(examples: list[Example], count: int, group: bool) -> list[Example]:
    """At most `count` examples, as evenly from all of them as can be: files may be sorted by task or length. Those that
    belong together (`group`) stay together, so then they are the first."""
    if group or len(examples) <= count:
        return examples[:count]
    return [examples[number * len(examples) // count] for number in range(count)]


def calibrate(run: Path, prepared: Prepared, model: Classifier, step: int) -> None:
    """Fit the temperature of a run's best weights, which are of some step, to its validation data, and keep it with
    them (Guo 2017): accuracy stays as it is, probabilities become honest."""
    path = run / "model.safetensors"
    if not path.exists() or not prepared.splits.valid:
        return
    tensors = load_tensors(path)
    fill(model, tensors | {"temperature": torch.ones(())}, path)
    predictor = Predictor(model, prepared.config, prepared.source, prepared.target)
    tensors["temperature"] = torch.tensor(temperature(predictor, prepared.splits.valid))
    save_weights(path, tensors, step)


def resumed(run: str | Path) -> Prepared:
    """A run that was stopped, ready to go on."""
    run = Path(run)
    prepared = validated(prepare(load_config(run), run))
    if not same_data(run, prepared.splits):
        raise DataError(
            f"the training data is not what {run} began with: its files have changed, so this would not be the same "
            "run. Put them back, or start another."
        )
    trained = furthest(run / "metrics.jsonl") > prepared.config.train.validate_every  # where it was saved first
    if trained and not any((run / "state").glob("[0-9]*")):
        raise RunError(
            f"{run} cannot go on: it has been trained, but its folder state/ is gone, so training would begin again "
            "and overwrite its model. Put the folder back, or start another run."
        )
    return prepared


def forget_after(path: Path, step: int) -> None:
    """Drop the metrics of steps that will be made again."""
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if known(line) <= step]
        replace(path, "".join(f"{line}\n" for line in kept).encode())


def furthest(path: Path) -> float:
    """The last step that the metrics of a run tell of; inf: that it is done."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    if any(line.startswith('{"kind": "done"') for line in lines):
        return torch.inf
    return max((step for step in map(known, lines) if step < torch.inf), default=0)


def known(line: str) -> float:
    """The step of a line of metrics; one that was cut short by a kill is forgotten."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return torch.inf
