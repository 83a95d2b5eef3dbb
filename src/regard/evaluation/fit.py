"""Training a run, scored on its validation data as it goes."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from regard.data.batching import Batch
from regard.data.examples import Example
from regard.errors import DataError
from regard.evaluation.evaluate import evaluate
from regard.evaluation.metrics import better
from regard.inference.predictor import Predictor
from regard.nn.loss import Trainable
from regard.training.checkpoint import fill_weights, load_tensors, save_weights, write_file
from regard.training.device import choose, keep_memory, precision
from regard.training.lock import lock_run
from regard.training.prepare import Prepared, build_model, find_doubts, find_seen, initialize, read_raw_text, step_of
from regard.training.trainer import Event, Progress, Score, append_event, load_progress, solve, train


def fit(
    prepared: Prepared,
    run: str | Path,
    report: Callable[[Event], None],
    *,
    device: str = "auto",
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train a run, from its start or from its last saved state. Meanwhile it is ours: another training is refused, and
    this one stops without writing should it lose its lock."""
    keep_memory()
    with lock_run(Path(run)) as check_owner:
        return fit_owned(prepared, Path(run), report, choose(device), stop, check_owner)


def fit_owned(
    prepared: Prepared,
    run: Path,
    report: Callable[[Event], None],
    place: torch.device,
    stop: Callable[[], bool],
    check_owner: Callable[[], None],
) -> Progress:
    """As `fit`; `check_owner` raises when the run is no longer ours, and is called before anything is written."""
    config, task, settings = prepared.config, prepared.task, prepared.config.train
    saved = load_progress(run)
    device_before, _, products = (saved.precision if saved else "").partition(" ")
    model = take_model(prepared, fresh=saved is None)
    passes = task.solve(model, prepared.rows, lambda: read_raw_text(config, {}))
    model = model.to(place) if passes is None else model  # a solver works on the CPU
    forget_after(run / "metrics.jsonl", saved.step if saved else 0)
    known = find_seen(run, prepared.splits.valid) if config.evaluate.unseen else [False] * len(prepared.splits.valid)
    valid = [example for example, seen in zip(prepared.splits.valid, known, strict=True) if not seen]
    if not valid:
        raise DataError("every validation example is in the training data: evaluate.unseen leaves none.")
    together = config.evaluate.multi_reference or task.multi_reference
    examples = spread(valid, settings.validate_examples, together)

    def validate(current: Trainable) -> Score:
        found = evaluate(Predictor(task, current), examples, config.evaluate, warn=say_once)
        for source, output, wanted in list(zip(found.sources, found.outputs, found.references, strict=True))[:3]:
            report(Event("sample", 0, {"source": str(source), "output": output, "wanted": wanted[0]}))
        check_owner()
        return found.metrics

    def note(event: Event) -> None:
        report(event)
        check_owner()
        if event.kind not in ("saving", "saved") and (passes is None or event.kind != "step"):
            append_event(run / "metrics.jsonl", event)

    @functools.cache
    def say_once(text: str) -> None:
        note(Event("warning", saved.step if saved else 0, {"text": text}))

    def iterate_batches(start: int) -> Iterator[list[Batch]]:
        task.warm(model, [*prepared.splits.train, *examples], tell_progress(report))  # the weights are there by now
        return prepared.batches(start)

    for doubt in list_doubts(prepared, saved, place):
        say_once(doubt)
    kind = precision(place, products if device_before == place.type else settings.precision)
    wins = better(task, config.evaluate.metrics[0])
    if passes is None:
        progress = train(
            model,
            iterate_batches,
            settings,
            run,
            validate=validate,
            better=wins,
            report=note,
            precision=kind,
            stop=stop,
        )
    else:
        tokens = sum(len(row.target) for row in prepared.rows)
        progress = saved or solve(
            model, passes, tokens, settings, run, validate=validate, better=wins, report=note, stop=stop
        )
    if not stop():
        check_owner()
        calibrate(run, prepared, model, progress.best_step)
    return progress


def tell_progress(report: Callable[[Event], None], pause: float = 10.0) -> Callable[[int, int], None]:
    """Says now and then how many images are read, how fast, and how long the rest takes."""
    began = said = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= pause or done == of:
            said, rate = now, done / max(1e-9, now - began)
            figures = {"done": done, "of": of, "rate": rate, "seconds": now - began, "left": (of - done) / rate}
            report(Event("warming", 0, figures))

    return tell


def list_doubts(prepared: Prepared, saved: Progress | None, place: torch.device) -> list[str]:
    """What to mention before training begins: of the data; or, where it goes on, that the last digits may differ."""
    if saved is None:
        return find_doubts(prepared)
    threads = torch.get_num_threads()
    if place.type != "cpu" or saved.threads == threads:
        return []
    before = f"it goes on with {threads} threads, where it had {saved.threads}"
    return [f"{before}: the last digits may differ. OMP_NUM_THREADS={saved.threads} keeps them."]


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
    tensors = load_tensors(path, run)
    fill_weights(model, tensors, path)
    model.eval()
    task, valid = prepared.task, prepared.splits.valid
    if fitted := task.calibrate(model, lambda: [batch.to(device) for batch, _ in task.scoring_batches(valid)]):
        save_weights(path, tensors | fitted, step, run)


def forget_after(path: Path, step: int) -> None:
    """Drop the metrics of steps that will be made again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        write_file(path, "".join(f"{line}\n" for line in lines if step_of(line) <= step).encode())
