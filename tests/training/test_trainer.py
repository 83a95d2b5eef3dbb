"""Learning: the right loss, exact resuming, whole checkpoints, clear stops."""

import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny, train_tiny

from regard.config.run import TrainConfig
from regard.config.toml import change as with_changes
from regard.config.toml import merge, parse, read, recipes, validate
from regard.data.batching import collate, plan_epoch
from regard.data.examples import Example
from regard.data.vocabulary import PAD
from regard.errors import ConfigError, DataError, RunError, TrainError
from regard.evaluation.fit import fit, forget_after, spread
from regard.inference.load import load
from regard.tasks.seq2seq import Seq2SeqTask
from regard.training.checkpoint import load_state, load_tensors, save_state
from regard.training.prepare import build_model, initialize, prepare, resume_run, start_run
from regard.training.trainer import (
    Event,
    accumulate_gradients,
    append_event,
    learning_rate,
    make_optimizer,
    train,
)

VARIANTS = {
    "rnn": ("model.layers=2",),
    "transformer": (
        'model={kind="transformer", size=16, feedforward=8, heads=2, encoder_layers=1, decoder_layers=1}',
        "train.average_checkpoints=2",
        "train.accumulate=2",
    ),
}


def settings(name):
    """The changes of a variant; a Transformer has other settings than the recipe's RNN."""
    changes = [c for c in TINY if name == "rnn" or not c.startswith("model.")]
    return [*changes, *VARIANTS[name]]


def config_of(name):
    tree = parse(recipes()["reverse"]).model_dump(exclude_none=True)
    return validate(merge(tree, settings(name)), "test")


def build(prepared):
    """A model of its own, with its first weights."""
    build_model(prepared)
    initialize(prepared)
    return prepared.model


def assert_same_run(left, right):
    """Weights, optimizer and random state are equal bit for bit."""
    a, b = load_state(left)[0], load_state(right)[0]
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    one, two = load_tensors(left / "model.safetensors"), load_tensors(right / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stop_at", [3, 4, 7])
def test_stopping_and_resuming_changes_nothing(tmp_path, name, stop_at):
    config = config_of(name)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(start_run(config, whole), whole, lambda event: None, device="cpu")
    steps = []
    fit(
        start_run(config, parts),
        parts,
        lambda e: steps.append(e.step),
        device="cpu",
        stop=lambda: max(steps, default=0) >= stop_at,
    )
    assert load_state(parts)[1]["step"] == stop_at
    torch.manual_seed(99)  # whatever happens between
    fit(resume_run(parts), parts, lambda event: None, device="cpu")
    assert_same_run(whole, parts)
    logged = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if line["kind"] == "step"] == list(range(1, 9))


@pytest.fixture
def builds(monkeypatch):
    """Every model that a task has built."""
    found, own = [], Seq2SeqTask.build
    monkeypatch.setattr(Seq2SeqTask, "build", lambda task: found.append(own(task)) or found[-1])
    return found


def test_the_model_is_built_once(tmp_path, builds):
    run, steps = tmp_path / "run", []
    prepared = start_run(tiny(), run)
    (model,) = builds
    assert prepared.model is model
    fit(
        prepared,
        run,
        lambda event: steps.append(event.step),
        device="cpu",
        stop=lambda: max(steps, default=0) >= 5,
    )
    assert len(builds) == 1
    assert prepared.model is None  # it has been trained in place
    trained = load_state(run)[0]
    assert all(torch.equal(weight, trained[f"model.{name}"]) for name, weight in model.named_parameters())
    fit(resume_run(run), run, lambda event: None, device="cpu")
    assert len(builds) == 2


def test_a_second_training_builds_another_model(tmp_path, builds):
    first, second = tmp_path / "first", tmp_path / "second"
    prepared = start_run(tiny(), first)
    shutil.copytree(first, second)
    for run in (first, second):
        torch.manual_seed(99)  # whatever happens between
        fit(prepared, run, lambda event: None, device="cpu")
    assert len(builds) == 2
    assert_same_run(first, second)


def test_random_numbers_between_start_and_training_change_nothing(tmp_path, tiny_run):
    prepared = start_run(tiny(), tmp_path / "run")
    torch.rand(7)
    fit(prepared, tmp_path / "run", lambda event: None, device="cpu")
    assert_same_run(tmp_path / "run", tiny_run)


def test_a_training_that_goes_on_needs_no_vectors(tmp_path):
    """Those that it began with are in its saved state."""
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"{letter} {' '.join(['0.5'] * 8)}\n" for letter in "abc"))
    config, steps = tiny(f"model.source_vectors={vectors}"), []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(start_run(config, whole), whole, lambda event: None, device="cpu")
    prepared = start_run(config, parts)
    fit(prepared, parts, lambda e: steps.append(e.step), device="cpu", stop=lambda: max(steps, default=0) >= 3)
    vectors.unlink()
    fit(prepared, parts, lambda event: None, device="cpu")
    assert_same_run(whole, parts)


def test_what_cannot_be_built_leaves_no_run(tmp_path, monkeypatch):
    def fail(task):
        raise ConfigError("too large")

    monkeypatch.setattr(Seq2SeqTask, "build", fail)
    with pytest.raises(ConfigError, match="too large"):
        start_run(tiny(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


EVERY = (
    *("train.epochs=3", "train.steps=20", "train.batch_tokens=64", "train.accumulate=2", "train.optimizer=adamw"),
    *("train.learning_rate=0.02", "train.schedule=cosine", "train.warmup=3", "train.betas=[0.8, 0.95]"),
    *("train.weight_decay=0.3", "train.clip_norm=0.5", "train.label_smoothing=0.2", "train.precision=float32"),
    *("train.average_checkpoints=2", "train.validate_every=2", "train.validate_examples=7", "train.save_every=3"),
    *("train.patience=2", "train.seed=5", "train.checkpoint_activations=true", "train.minutes=1e9"),
)
"""Every setting of [train], none of them the default."""


def test_training_is_a_plain_loop_with_every_setting(tmp_path, monkeypatch):
    """A loop of torch's own parts, with the settings written into it as numbers, comes to the same weights."""
    config, scores, looked, events = tiny("model.dropout=0.3", *EVERY), iter([1.0, 3.0, 2.0, 2.5]), [], []
    assert {change.partition("=")[0] for change in EVERY} == {f"train.{name}" for name in TrainConfig.model_fields}
    assert not [name for name, value in config.train if value == getattr(TrainConfig(), name)]

    def score(predictor, examples, *rest, **options):
        torch.rand(7)  # which must not change what training draws
        looked.append((len(examples), predictor.model.training))
        return SimpleNamespace(sources=[], outputs=[], references=[], metrics={"exact": next(scores)})

    monkeypatch.setattr("regard.evaluation.fit.evaluate", score)
    prepared, run = start_run(config, tmp_path / "run"), tmp_path / "run"
    progress = fit(prepared, run, events.append, device="cpu")
    assert (progress.step, progress.best, progress.best_step) == (8, 3.0, 4)  # two validations brought nothing better
    assert looked == [(7, False)] * 4
    assert [event.step for event in events if event.kind == "saved"] == [2, 3, 4, 6, 8]

    torch.manual_seed(5)
    model, rows, kept, told = prepared.task.build().train(), prepared.rows, [], []
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95), weight_decay=0.3)
    batches = (collate([rows[i] for i in batch]) for epoch in range(9) for batch in plan_epoch(rows, 64, 5, epoch))
    for step in range(1, 9):
        pair, losses = [next(batches), next(batches)], []
        tokens = sum(int((batch.answer != PAD).sum()) for batch in pair)
        for batch in pair:
            logits, options = model.logits(batch).transpose(1, 2), {"ignore_index": PAD, "reduction": "sum"}
            losses.append([F.cross_entropy(logits, batch.answer, label_smoothing=a, **options) for a in (0.2, 0.0)])
            (losses[-1][0] / tokens).backward()
        norm = math.sqrt(sum(float(part.grad.square().sum()) for part in model.parameters()))
        for part in model.parameters():
            part.grad *= min(1.0, 0.5 / norm)
        decayed = 0.5 + 0.5 * math.cos(math.pi * (step - 3) / (20 - 3))
        rate = optimizer.param_groups[0]["lr"] = 0.02 * (step / 3 if step < 3 else decayed)
        loss, nats = (float(sum(parts).detach()) / tokens for parts in zip(*losses, strict=True))
        told.append({"loss": loss, "nats": nats, "norm": norm, "rate": rate, "tokens": tokens})
        optimizer.step()
        optimizer.zero_grad()
        kept += [{name: part.detach().clone() for name, part in model.named_parameters()}] * (step % 2 == 0)
    reported = [event.values for event in events if event.kind == "step"]
    assert [{name: one[name] for name in told[0]} for one in reported] == [pytest.approx(one, rel=1e-4) for one in told]
    assert max(one["norm"] for one in told) > 0.5  # else nothing was clipped
    best, last = load_tensors(run / "model.safetensors"), load_state(run)[0]
    for name in best:
        torch.testing.assert_close(best[name], (kept[0][name] + kept[1][name]) / 2, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(last[f"model.{name}"], kept[3][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_near_and_used(name):
    """Products are of 16 bits, the loss and what the optimizer sees of 32, and both are near those of float32."""
    config = config_of(name)
    prepared, found, kinds = prepare(config), [], set()
    batches = [collate(prepared.rows[:32])]
    for kind in (torch.float32, torch.bfloat16):
        model = build(prepared).eval()
        layer = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
        layer.register_forward_hook(lambda part, inputs, output: kinds.add(output.dtype))
        loss = accumulate_gradients(model, batches, config.train, kind)
        assert loss.total.dtype == torch.float32
        assert all(part.grad.dtype == torch.float32 for part in model.parameters())
        found.append((float(loss.total), torch.cat([part.grad.flatten() for part in model.parameters()])))
    assert kinds == {torch.float32, torch.bfloat16}
    (wide, exact), (near, rounded) = found
    assert near == pytest.approx(wide, rel=2**-8)
    assert F.cosine_similarity(rounded, exact, dim=0) > 0.999
    assert float(rounded.norm()) == pytest.approx(float(exact.norm()), rel=2**-6)


def test_accumulated_gradients_are_those_of_one_large_batch():
    config = tiny("model.dropout=0.0")
    prepared = prepare(config)
    rows = prepared.rows[:12]
    both = []
    for groups in ([rows], [rows[:3], rows[3:4], rows[4:]]):
        model = build(prepared).double()
        loss = accumulate_gradients(model, [collate(group) for group in groups], config.train, torch.float32)
        both.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (one, whole), (many, parts) = both
    assert one.tokens == many.tokens
    assert float(one.total) == pytest.approx(float(many.total))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-12, rtol=1e-10)


def test_learning_rates():
    config = TrainConfig(learning_rate=0.5, warmup=4, steps=20, schedule="inverse sqrt")
    assert [learning_rate(step, config) for step in (1, 2, 4, 16)] == [0.125, 0.25, 0.5, 0.25]
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert learning_rate(4, cosine) == 0.5
    assert learning_rate(12, cosine) == pytest.approx(0.25)
    assert learning_rate(20, cosine) == pytest.approx(0.0)
    assert learning_rate(17, config.model_copy(update={"schedule": "constant"})) == 0.5
    timed = cosine.model_copy(update={"minutes": 2.0})  # whichever ends first: the steps or the time
    assert [learning_rate(4, timed, seconds) for seconds in (0, 60, 120)] == pytest.approx([0.5, 0.25, 0.0])
    assert learning_rate(20, timed, 60) == pytest.approx(0.0)


def test_adam_equals_the_formula():
    config = TrainConfig(learning_rate=0.1, betas=(0.9, 0.98))
    model = build(prepare(tiny()))
    optimizer = make_optimizer(model, config)
    assert optimizer.defaults["betas"] == (0.9, 0.98)
    assert optimizer.defaults["fused"]
    before = model.output.bias.detach().clone()
    model.output.bias.grad = torch.full_like(before, 0.3)
    optimizer.step()
    torch.testing.assert_close(model.output.bias, before - 0.1, atol=1e-6, rtol=0)  # the first step is the rate


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_optimizers_are_torchs(name, kind):
    """Bit for bit, through a save and a load."""
    grads = torch.randn(6, 3, 4)
    config = TrainConfig(optimizer=name, learning_rate=0.1, betas=(0.9, 0.98), weight_decay=0.1)

    def ours(model):
        return make_optimizer(model, config)

    def theirs(model):
        return kind(model.parameters(), lr=0.1, betas=(0.9, 0.98), weight_decay=0.1, fused=True)

    found = []
    for make in (ours, theirs):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = make(model)
        assert type(optimizer) is kind
        for number, grad in enumerate(grads):
            if number == 3:
                state = optimizer.state_dict()
                optimizer = make(model)
                optimizer.load_state_dict(state)
            model.weight.grad = grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_what_is_frozen_is_not_optimized():
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    (group,) = make_optimizer(model, TrainConfig()).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight)]


def test_a_loss_that_is_not_a_number_stops_with_advice(tmp_path):
    prepared = start_run(tiny(), tmp_path / "run")
    model = prepared.model
    with torch.no_grad():
        model.output.bias[5] = math.nan
    with pytest.raises(TrainError, match=r"loss at step 1 is nan .*batch of \(\d+, \d+\).*smaller train.learning_rate"):
        train(
            model,
            prepared.batches,
            prepared.config.train,
            tmp_path / "run",
            validate=lambda model: {"exact": 0.0},
            better=lambda new, old: new > old,
            report=lambda event: None,
        )


def test_patience_ends_training_and_the_best_is_kept(tmp_path):
    prepared = start_run(tiny("train.steps=100", "train.validate_every=2", "train.patience=2"), tmp_path / "run")
    scores = iter([math.nan, 9.0, 7.0, 8.0])  # any number is better than none
    progress = train(
        prepared.model,
        prepared.batches,
        prepared.config.train,
        tmp_path / "run",
        validate=lambda model: {"exact": next(scores)},
        better=lambda new, old: new > old,
        report=lambda event: None,
    )
    assert (progress.step, progress.best, progress.best_step) == (8, 9.0, 4)


@pytest.fixture
def clock(monkeypatch):
    """The trainer's seconds, which pass when somebody adds some."""
    seconds = [1000.0]
    monkeypatch.setattr("regard.training.trainer.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def train_by_clock(run, clock, *changes, saving=0.0, stop_at=math.inf):
    """Train or resume, where an update takes ten seconds, and a save as many as are given: the step, the seconds, and
    the steps of validations."""
    prepared = resume_run(run) if run.exists() else start_run(tiny(*changes), run)
    validated, steps = [], [0]

    def slow(start):
        for group in prepared.batches(start):
            clock[0] += 10
            yield group

    def report(event):
        steps.append(event.step)
        clock[0] += saving * (event.kind == "saving")
        validated.extend([event.step] * (event.kind == "validation"))

    progress = train(
        prepared.model,
        slow,
        prepared.config.train,
        run,
        validate=lambda model: {"exact": 1.0},
        better=lambda new, old: new > old,
        report=report,
        stop=lambda: steps[-1] >= stop_at,
    )
    return progress.step, progress.seconds, validated


def test_minutes_end_training_with_a_validation(tmp_path, clock):
    limit = ("train.steps=100", "train.validate_every=4", "train.minutes=1.1")
    assert train_by_clock(tmp_path / "a", clock, *limit) == (7, 70, [4, 7])
    clock[0] += 500  # time between two trainings is not counted
    assert train_by_clock(tmp_path / "a", clock) == (7, 70, [])  # it is finished
    assert train_by_clock(tmp_path / "b", clock, *limit, stop_at=3) == (3, 30, [])
    assert train_by_clock(tmp_path / "b", clock) == (7, 70, [4, 7])
    assert train_by_clock(tmp_path / "c", clock, "train.steps=5", "train.minutes=9")[0] == 5


def test_a_save_that_takes_the_last_minute_is_followed_by_a_validation(tmp_path, clock):
    changes = ("train.steps=100", "train.validate_every=50", "train.save_every=3", "train.minutes=1")
    step, _, validated = train_by_clock(tmp_path / "run", clock, *changes, saving=40.0)
    assert (step, validated) == (4, [4])


def test_scores_of_zero_spend_no_patience_and_the_newest_weights_are_kept(tmp_path):
    """BLEU is 0 at first, however much has been learned."""
    prepared = start_run(tiny("train.steps=100", "train.validate_every=2", "train.patience=2"), tmp_path / "run")
    scores, kept = iter([0.0, 0.0, 0.0, 0.0, 5.0, 5.0, 4.0]), []

    def report(event):
        if event.kind == "validation":
            kept.append((event.values["best"], event.values["best_step"]))

    train(
        prepared.model,
        prepared.batches,
        prepared.config.train,
        tmp_path / "run",
        validate=lambda model: {"bleu": next(scores)},
        better=lambda new, old: new > old,
        report=report,
    )
    assert kept == [(0.0, 2), (0.0, 4), (0.0, 6), (0.0, 8), (5.0, 10), (5.0, 10), (5.0, 10)]


def test_the_kept_model_is_the_mean_of_the_last_checkpoints(tmp_path):
    seen = []
    prepared = start_run(tiny("train.average_checkpoints=2", "train.validate_every=2"), tmp_path / "run")

    def validate(model):
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {"exact": float(len(seen))}

    raw = []

    def report(event: Event):
        if event.kind == "saved":
            raw.append(load_state(tmp_path / "run")[0])

    train(
        prepared.model, prepared.batches, prepared.config.train, tmp_path / "run",
        validate=validate, better=lambda new, old: new > old, report=report,
    )  # fmt: skip
    for name, tensor in load_tensors(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(tensor, (raw[-1][f"model.{name}"] + raw[-2][f"model.{name}"]) / 2)
        assert torch.equal(tensor, seen[-1][name])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, facts: facts.update(color="red"),
        lambda tensors, facts: tensors.pop("random"),
        lambda tensors, facts: tensors.update({"optimizer.first.step": torch.ones(1)}),
        lambda tensors, facts: tensors.update({"random": torch.ones(3)}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, tiny_run, damage):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    tensors, facts = load_state(run)
    damage(tensors, facts)
    shutil.rmtree(run / "state")
    save_state(run, facts["step"], tensors, facts)
    prepared = resume_run(run)
    with pytest.raises(RunError, match=r"run/state is damaged: "):
        fit(prepared, run, lambda event: None, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": "many"}, "tokens in state.json is 'many', input should be a valid integer"),
        ({"checkpoints": 3}, "checkpoints in state.json is 3, input should be a valid array"),
        ({"checkpoints": ["last"]}, "checkpoints.0 in state.json is 'last', input should be a valid integer"),
        ({"precision": None}, "precision in state.json is None, input should be a valid string"),
        ({"best": [1]}, "best in state.json is [1], input should be a valid number"),
        ({"seconds": {}}, "seconds in state.json is {}, input should be a valid number"),
    ],
)
def test_a_state_of_wrong_types_is_refused(tmp_path, tiny_run, wrong, said):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (path,) = (run / "state").glob("*/state.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(RunError) as caught:
        fit(resume_run(run), run, lambda event: None, device="cpu")
    assert str(caught.value) == f"{run}/state is damaged: {said}. Train anew, or put another copy of it there."


def test_files_among_the_checkpoints_that_do_not_belong_are_left_alone(tmp_path):
    folder = tmp_path / "run" / "checkpoints"

    def report(event):
        if event.kind == "step" and event.step == 1:
            folder.mkdir()
            for name in ("best.safetensors", "2²", "notes.txt"):
                (folder / name).write_text("mine")

    train_tiny(tmp_path / "run", "train.average_checkpoints=2", "train.validate_every=2", report=report)
    assert {path.name for path in folder.iterdir()} == {
        *("6.safetensors", "8.safetensors"), *("best.safetensors", "2²", "notes.txt"),
    }  # fmt: skip


def test_other_threads_are_said(tmp_path):
    """The sums of other numbers of threads differ in their last digits."""
    run, steps, said = tmp_path / "run", [], []
    train_tiny(run, report=lambda event: steps.append(event.step), stop=lambda: max(steps, default=0) >= 5)
    path = next((run / "state").glob("*/state.json"))
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 3'))

    def report(event):
        said.extend(event.values.values() if event.kind == "warning" else ())

    fit(resume_run(run), run, report, device="cpu")
    assert said == [
        "it goes on with 1 threads, where it had 3: the last digits may differ. OMP_NUM_THREADS=3 keeps them."
    ]
    fit(resume_run(run), run, report, device="cpu")
    assert len(said) == 1


@pytest.mark.parametrize("every", [2, 100])
def test_a_trained_run_without_its_state_does_not_begin_again(tmp_path, every):
    run = tmp_path / "run"
    train_tiny(run, f"train.validate_every={every}")
    before = (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "state")
    with pytest.raises(RunError, match=r"run cannot go on: it has been trained, but its folder state/ is gone"):
        resume_run(run)
    assert (run / "model.safetensors").read_bytes() == before


def test_metrics_that_are_no_text_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 3}\n')
    forget_after(path, 2)
    assert path.read_text() == '{"step": 1}\n'


def test_validation_decodes_and_shows_samples(tmp_path):
    events = []
    train_tiny(tmp_path / "run", report=events.append)
    kinds = [event.kind for event in events]
    assert kinds.count("validation") == 2
    assert kinds.count("sample") == 6
    assert kinds[-1] == "done"
    assert set(events[kinds.index("validation")].values) >= {"exact", "best", "best_step"}


def test_frozen_vectors_stay(tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"{letter} {' '.join(['0.5'] * 8)}\n" for letter in "abc"))
    run = tmp_path / "run"
    changes = (f"model.source_vectors={vectors}", "model.freeze_vectors=true")
    said = []
    train_tiny(run, *changes, say=said.append)
    predictor = load(run)
    rows = [predictor.source.find(letter) for letter in "abc"]
    assert torch.equal(predictor.model.source_embedding.weight[rows], torch.full((3, 8), 0.5))
    assert said == [f"3 of the {predictor.source.size} source entries have a vector in {vectors}"]
    vectors.unlink()  # resuming needs it no more
    assert not resume_run(run).model.source_embedding.weight.requires_grad


def test_raw_text_gives_words_and_their_vectors(tmp_path):
    """What stands in text without targets is known, and words with like neighbours there begin alike; the frozen
    embedding stays, and a run that goes on does not need the text."""
    raw = tmp_path / "raw.txt.gz"
    lines = [f"{one}{other}{one}" for one in "αβ" for other in "ξη"] * 3
    raw.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n\n\xff\n"))
    run = tmp_path / "run"
    notes = []
    train_tiny(run, f'text.raw=["{raw}"]', "model.freeze_vectors=true", say=notes.append)
    predictor = load(run)
    table = predictor.model.source_embedding.weight
    one, other, far = (F.normalize(table[predictor.source.find(letter)], dim=0) for letter in "ξηβ")
    assert one @ other > 0.9 > one @ far
    assert notes[0] == "counting which words stand near which ..."
    assert re.fullmatch(r"\d+ of the \d+ source entries have a vector from their neighbours in the text", notes[1])
    assert json.loads((run / "data.json").read_bytes())["raw"] == {
        **{"read": 13, "kept": 12, "cut": 0},
        "dropped": {"undecodable": [f"{raw}:14"]},
    }
    raw.unlink()
    assert not resume_run(run).model.source_embedding.weight.requires_grad


def test_all_members_begin_with_the_vectors(tmp_path):
    (tmp_path / "vectors.txt").write_text(f"who {' '.join(['0.5'] * 8)}\n")
    (tmp_path / "data.txt").write_text("".join(f"{n % 2} who is {n}\n" for n in range(30)))
    files = [f'data.train=["{tmp_path}/data.txt"]', "text.raw=[]", f"model.source_vectors={tmp_path}/vectors.txt"]
    sizes = ["model.size=8", "model.heads=2", "model.ensemble_size=3", "model.freeze_vectors=false", "data.cut_valid=5"]
    prepared = prepare(read("trec", [*files, *sizes, "data.cut_test=5"]))
    model, row = build(prepared), prepared.task.source.find("who")
    tables = [member.source_embedding.weight for member in (model, *model.ensemble)]
    assert len({id(table) for table in tables}) == 3
    assert all(torch.equal(table[row], torch.full((8,), 0.5)) for table in tables)


def test_raw_text_that_is_missing_leaves_no_run(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt does not exist\."):
        start_run(with_changes(tiny(), [f'text.raw=["{tmp_path}/none.txt"]']), tmp_path / "run")
    assert not (tmp_path / "run").exists()


COMMAND = (sys.executable, "-m", "regard")


@pytest.mark.parametrize(
    "wanted", [pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.weekly)]
)
def test_a_killed_run_resumes_exactly(tmp_path, wanted):
    """SIGKILL at random instants: no half-written run is ever loaded, and the end is the same bit for bit."""
    changes = [
        *TINY,
        f"train.steps={100 * wanted}",
        f"train.validate_every={10 * wanted}",
        "train.save_every=5",
        "train.average_checkpoints=3",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = with_changes(tiny(), [change for change in changes if change.startswith("train.")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = [part for change in changes for part in ("--set", change)]
    subprocess.run([*COMMAND, "train", "reverse", "--run", whole, *options], check=True, env=environment)
    start = [*COMMAND, "train", "reverse", "--run", parts, *options]
    dice, kills = random.Random(7), 0
    start_run(config, parts)
    start = [*COMMAND, "train", "--resume", parts]
    while kills < wanted:
        process = subprocess.Popen(start, env=environment, stderr=subprocess.DEVNULL)
        reached = (load_state(parts) or (None, {"step": 0}))[1]["step"]
        while process.poll() is None:  # wait until it has begun to save, then strike at a random instant
            state = load_state_or_none(parts)
            if state is not None and state > reached:
                break
            time.sleep(0.01)
        time.sleep(dice.random() * 0.3)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        load_state(parts)
    assert kills == wanted, f"the run ended after {kills} kills: make it longer"
    subprocess.run([*COMMAND, "train", "--resume", parts], check=True, env=environment)
    assert_same_run(whole, parts)


def load_state_or_none(run):
    """The newest saved step, while another process may be replacing it."""
    steps = [int(path.name) for path in (run / "state").glob("[0-9]*")]
    return max(steps, default=None)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    options = [part for change in (*TINY, "train.steps=100000") for part in ("--set", change)]
    process = subprocess.Popen(
        [*COMMAND, "train", "reverse", "--run", tmp_path / "run", *options], stderr=subprocess.PIPE, text=True
    )
    while not load_state_or_none(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130  # as of any program that Ctrl-C ends: `train && evaluate` does not go on
    assert f"Go on with: regard train --resume {tmp_path / 'run'}" in said
    assert load_state(tmp_path / "run")[1]["step"] > 0


def test_validation_examples_come_from_everywhere():
    examples = [Example(str(n), "x", f"f:{n}") for n in range(10)]
    assert [example.source for example in spread(examples, 4, together=False)] == ["0", "2", "5", "7"]
    assert spread(examples, 20, together=False) == examples
    assert spread(examples, 3, together=True) == examples[:3]


def test_labels_are_counted_without_the_special_entries(tmp_path):
    (tmp_path / "t.txt").write_text("".join(f"{'abc'[n % 3]} text {n}\n" for n in range(30)))
    text = '[data]\nkind = "labelled"\ntrain = "t.txt"\n[text]\nsource = {kind = "char"}\ntarget = {kind = "label"}\n'
    text += '[model]\nkind = "classifier"\nsize = 8\nheads = 2\n[evaluate]\nmetrics = ["accuracy"]\n'
    (tmp_path / "my.toml").write_text(text)
    prepared = prepare(read(str(tmp_path / "my.toml")))
    assert prepared.facts().startswith(f"vocabulary {prepared.task.source.size}, 3 labels; ")


def test_the_length_of_training_follows_the_data(tmp_path):
    (tmp_path / "t.tsv").write_text("".join(f"{n}\t{n}\n" for n in range(100)))
    text = """
[data]
kind = "tsv"
train = ["t.tsv"]
cut_valid = 10
[text]
source = { kind = "char" }
[model]
kind = "rnn"
size = 8
embedding = 8
[train]
batch_tokens = 30
epochs = 3
[evaluate]
metrics = ["perplexity"]
"""
    (tmp_path / "my.toml").write_text(text)
    prepared = start_run(read(str(tmp_path / "my.toml")), tmp_path / "run")
    batches = len(plan_epoch(prepared.rows, 30, 1, 0))
    assert (prepared.epoch, prepared.config.train.steps) == (batches, 3 * batches)
    assert prepared.task.config == prepared.config == parse(tmp_path / "run" / "config.toml")
    said = f"{3 * batches} updates are 3.0 epochs, fewer if 10 validations bring nothing better"
    assert prepared.facts().endswith(said)
    progress = fit(prepared, tmp_path / "run", lambda event: None, device="cpu")
    assert progress.step == 3 * batches


# --- what is refused before the first step ---------------------------------------------------------------------------


def pairs_config(folder, *changes):
    """The tiny recipe on a file of three pairs."""
    (folder / "t.tsv").write_text("one two\teins zwei\nthree four\tdrei vier\nfive six\tfünf sechs\n", encoding="utf-8")
    data = f'data={{kind="tsv", train=["{folder / "t.tsv"}"], cut_valid=1}}'
    return read("reverse", [*(change for change in TINY if not change.startswith("data.")), data, *changes])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.cut_valid=0"], r"there is no validation data, .*: set data\.valid or data\.cut_valid\.$"),
        (
            ["text.max_length=1"],
            r"no training example is left\. read 2, kept 0, dropped 2; too long: 2 \(.*t\.tsv:\d, .*t\.tsv:\d\)\. "
            r'Raise text\.max_length, or set text\.longer = "cut"\.$',
        ),
        (
            ['evaluate.metrics=["bleu", "nats"]'],
            r"a model of kind rnn has no nats: set evaluate\.metrics to some of bleu,",
        ),
        (['evaluate.metrics=["f1"]'], "a model of kind rnn has no f1"),
    ],
)
def test_what_cannot_be_trained_makes_no_run(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        start_run(pairs_config(tmp_path, *changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_language_model_needs_its_share(tmp_path):
    (tmp_path / "t.txt").write_text("abc " * 100)
    config = read("shakespeare", [f'data.train=["{tmp_path / "t.txt"}"]', "data.valid_share=0.0"])
    with pytest.raises(DataError, match=r"set data\.valid or data\.valid_share\.$"):
        start_run(config, tmp_path / "run")
    with pytest.raises(DataError, match=r"a model of kind language model has no bleu: .* nats, perplexity, bpb"):
        prepare(with_changes(config, ['evaluate.metrics=["bleu"]']))


@pytest.mark.parametrize(
    "change",
    [
        "train.betas=[0.9, 1.0]",
        "train.betas=[-0.1, 0.9]",
        "train.betas=[nan, 0.9]",
        "evaluate.buckets=[0, 5]",
        "evaluate.buckets=[10, 5]",
        "evaluate.buckets=[5, 5]",
        "decode.max_ratio=inf",
        "decode.max_ratio=1001.0",
        "decode.length_penalty=10.5",
        "decode.length_penalty=nan",
    ],
)
def test_settings_out_of_range(change):
    with pytest.raises(ConfigError, match=re.escape(change.partition("=")[0].rpartition(".")[2])):
        tiny(change)


def test_a_log_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(RunError, match=r"cannot be written: .* The last saved state is whole; make room and resume"):
        append_event(tmp_path, Event("step", 1, {}))


def test_a_resumed_training_multiplies_as_it_began(tmp_path, monkeypatch):
    """What is faster is measured once: another measurement might say otherwise, and it would not be the same run."""
    config = with_changes(tiny(), ["train.steps=20"])
    prepared = start_run(config, tmp_path / "run")
    monkeypatch.setattr("regard.evaluation.fit.precision", lambda place, wanted: torch.float32)
    fit(prepared, tmp_path / "run", lambda event: None, device="cpu", stop=lambda: True)
    assert load_state(tmp_path / "run")[1]["precision"] == "cpu float32"
    wanted = []
    monkeypatch.setattr("regard.evaluation.fit.precision", lambda place, kind: wanted.append(kind) or torch.float32)
    fit(prepared, tmp_path / "run", lambda event: None, device="cpu")
    assert wanted == ["float32"]


def test_a_model_is_validated_without_dropout_and_trained_with_it(tmp_path):
    modes = []
    prepared = start_run(tiny(), tmp_path / "run")
    model = build(prepared)
    step = model.forward
    model.forward = lambda *given: modes.append(("train", model.training)) or step(*given)
    train(
        *(model, prepared.batches, prepared.config.train, tmp_path / "run"),
        validate=lambda validated: modes.append(("valid", validated.training)) or {"exact": 1.0},
        better=lambda new, old: new > old,
        report=lambda event: None,
    )
    assert set(modes) == {("train", True), ("valid", False)}
