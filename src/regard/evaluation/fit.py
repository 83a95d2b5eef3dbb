"""Training a run, scored on its validation data as it goes."""

from collections.abc import Callable
from pathlib import Path

import torch

from regard.data.examples import Example
from regard.evaluation.evaluate import evaluate
from regard.evaluation.metrics import better
from regard.inference.predictor import Predictor
from regard.nn.loss import Trainable
from regard.training.checkpoint import fill_weights, load_state, load_tensors, save_weights, write_file
from regard.training.device import choose, keep_memory, precision
from regard.training.prepare import Prepared, build_model, initialize, step_of
from regard.training.trainer import Event, Progress, Score, append_event, train


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
    run, config, task = Path(run), prepared.config, prepared.task
    place, settings = choose(device), config.train
    saved = load_state(run)
    device_before, _, products = (saved[1].get("precision", "") if saved else "").partition(" ")
    model = take_model(prepared, fresh=saved is None).to(place)
    forget_after(run / "metrics.jsonl", saved[1]["step"] if saved else 0)
    examples = spread(prepared.splits.valid, settings.validate_examples, config.evaluate.multi_reference)

    def validate(current: Trainable) -> Score:
        found = evaluate(Predictor(task, current), examples, config.evaluate)
        for source, output, wanted in list(zip(found.sources, found.outputs, found.references, strict=True))[:3]:
            report(Event("sample", 0, {"source": str(source), "output": output, "wanted": wanted[0]}))
        return found.metrics

    def note(event: Event) -> None:
        if event.kind != "saved":
            append_event(run / "metrics.jsonl", event)
        report(event)

    kind = precision(place, products if device_before == place.type else settings.precision)
    wins = better(task, config.evaluate.metrics[0])
    progress = train(
        model, prepared.batches, settings, run, validate=validate, better=wins, report=note, precision=kind, stop=stop
    )
    if not stop():
        calibrate(run, prepared, model, progress.best_step)
    return progress


def take_model(prepared: Prepared, *, fresh: bool) -> Trainable:
    """The model as it was built, with the random numbers behind it; it is trained in place, so a second training
    builds another. Only a fresh one needs its first weights: others come with the saved state."""
    if prepared.model is None:
        build_model(prepared)
        if fresh:
            initialize(prepared)
    model, prepared.model = prepared.model, None
    assert model is not None
    assert prepared.random is not None
    torch.set_rng_state(prepared.random)
    return model


def spread(examples: list[Example], count: int, together: bool) -> list[Example]:
    """At most `count` examples, as evenly from all of them as can be: files may be sorted by task or length. Those that
    belong together stay together, so then they are the first."""
    if together or len(examples) <= count:
        return examples[:count]
    return [examples[number * len(examples) // count] for number in range(count)]


def calibrate(run: Path, prepared: Prepared, model: Trainable, step: int) -> None:
    """Let the task fit what it fits to validation data after training, and keep it with the best weights, which are of
    some step."""
    path, device = run / "model.safetensors", next(model.parameters()).device
    if not path.exists() or not prepared.splits.valid:
        return
    tensors = load_tensors(path)
    fill_weights(model, tensors, path)
    model.eval()
    task, valid = prepared.task, prepared.splits.valid
    if fitted := task.calibrate(model, lambda: [batch.to(device) for batch, _ in task.scoring_batches(valid)]):
        save_weights(path, tensors | fitted, step)


def forget_after(path: Path, step: int) -> None:
    """Drop the metrics of steps that will be made again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        write_file(path, "".join(f"{line}\n" for line in lines if step_of(line) <= step).encode())
