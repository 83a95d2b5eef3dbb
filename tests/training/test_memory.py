"""The memory plan: predicted as measured, and refused before anything is made."""

import itertools

import pytest
import torch
from conftest import tiny
from ready_models import MODELS, make_batch, make_model, prepare_task

from regard.config.toml import read
from regard.errors import ConfigError
from regard.training import memory
from regard.training.prepare import build_model, find_doubts, prepare, start_run
from regard.training.trainer import accumulate_gradients

LISTS = (
    *(
        "data.examples=120",
        "data.valid=2",
        "data.test=2",
        "data.shortest=80",
        "data.longest=260",
        "text.max_length=300",
    ),
    *("model.size=16", "model.feedforward=32", "model.heads=2", "model.layers=2", "model.slots=32"),
    *("model.block=16", "model.window_size=16", "train.batch_tokens=3000", "train.steps=1", "train.validate_every=1"),
)
FACTOR = 1.25
"""How far a prediction may be from what is measured."""


def build(*changes):
    prepared = prepare(read("listops", [*LISTS, *changes]))
    build_model(prepared)
    return prepared, prepared.task.largest_batch(prepared.rows)


@pytest.mark.parametrize("checkpoint", ["false", "true"])
@pytest.mark.parametrize("kind", ["full", "window", "bigbird", "linformer"])
def test_what_is_predicted_of_two_rows_is_measured_of_all(kind, checkpoint):
    prepared, batch = build(f"model.attention={kind}", f"train.checkpoint_activations={checkpoint}")
    assert len(batch.answer) > 8
    plan = memory.plan_memory(prepared.model, batch, prepared.config.train, torch.float32)
    prepared.model.train()
    with memory.TensorBytes() as alive:
        accumulate_gradients(prepared.model, [batch], prepared.config.train, torch.float32)
    assert 1 / FACTOR < plan.batch / alive.most < FACTOR
    assert plan.batch < memory.bound_memory(prepared.model, batch)
    assert plan.optimizer == 2 * sum(part.nbytes for part in prepared.model.parameters() if part.requires_grad)


def test_checkpointing_is_predicted_to_need_less():
    totals = []
    for checkpoint in ("false", "true"):
        prepared, batch = build("model.layers=6", f"train.checkpoint_activations={checkpoint}")
        totals.append(memory.plan_memory(prepared.model, batch, prepared.config.train, torch.float32).batch)
    assert totals[1] < 0.6 * totals[0]


def test_a_plan_changes_nothing():
    prepared, batch = build()
    before = {name: part.clone() for name, part in prepared.model.named_parameters()}
    random, mode = torch.get_rng_state(), prepared.model.training
    memory.plan_memory(prepared.model, batch, prepared.config.train, torch.float32)
    assert all(torch.equal(part, before[name]) for name, part in prepared.model.named_parameters())
    assert all(part.grad is None for part in prepared.model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert prepared.model.training == mode


def test_images_are_always_measured():
    """No bound is known of what convolutions keep."""
    assert memory.bound_memory(make_model("image classifier"), make_batch("image classifier")) == float("inf")


def test_no_batch_is_larger_than_the_largest():
    for prepared in (prepare(tiny()), prepare(read("listops", LISTS))):
        largest = prepared.task.largest_batch(prepared.rows)
        updates = itertools.islice(prepared.batches(0), prepared.epoch)
        for batch in (batch for group in updates for batch in group):
            for side in ("source", "target"):
                assert getattr(batch, side).shape[1] <= getattr(largest, side).shape[1]
            assert batch.source.numel() <= 1.1 * largest.source.numel()


def test_what_would_not_fit_is_refused_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda place: 6e6)
    config = read("listops", [*LISTS, "model.attention=full", "model.layers=8"])
    advice = (
        r"lower train.batch_tokens \(now 3,000\), or set train.checkpoint_activations = true, or lower text.max_length "
        r'\(now 300\), or choose a model.attention of linear cost, as "bigbird"\.'
    )
    wanted = r"the largest batch, 11 x 2\d\d tokens, would need about 0\.0 GB"
    with pytest.raises(ConfigError, match=f"{wanted} to train on, forward and backward, and 0.0 GB are free: {advice}"):
        start_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "free_memory", lambda place: 3e5)  # not even for one row: it is stopped on the way
    with pytest.raises(ConfigError, match="would need more than"):
        start_run(config, tmp_path / "run")
    monkeypatch.setattr(memory, "free_memory", lambda place: 1e9)
    start_run(config, tmp_path / "run")


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_counted_without_memory(name):
    task, made = prepare_task(name)[0], []
    counted = memory.count_weights(lambda: made.append(task.build()) or made[0])
    assert counted == sum(part.nbytes for part in task.build().parameters())
    assert all(part.is_meta for part in made[0].parameters())


def test_weights_that_do_not_fit_are_refused_before_they_are_drawn(monkeypatch):
    made = []

    def build():
        made[:] = [torch.nn.Linear(1000, 1000) for _ in range(1000)]
        return torch.nn.ModuleList(made)

    monkeypatch.setattr(memory, "LARGE", 1e5)
    said = r"the weights of this model need 4\.0 GB, and 0\.1 GB are free: lower model\.size or model\.layers\."
    for one in (build, lambda: torch.nn.ModuleList([torch.nn.Linear(200_000, 250_000), *build()])):
        with pytest.raises(ConfigError, match=said.replace("4", "204") if one is not build else said):
            memory.build_within(one, 0.1e9, read("listops", LISTS))
    assert made[0].weight.is_meta


def test_large_models_are_counted_before_they_are_built(monkeypatch):
    config = read("listops", LISTS)

    class Table(torch.nn.Linear):
        def __init__(self):
            super().__init__(100, 100)
            self.own = torch.nn.Parameter(torch.randn(3))

    def draw(free):
        torch.manual_seed(3)
        made = memory.build_within(
            lambda: torch.nn.Sequential(*(Table() for _ in range(10))), free, config
        )  # 40 kB each
        return [weight.tolist() for weight in made.parameters()], torch.rand(2).tolist()

    monkeypatch.setattr(memory, "LARGE", 1e6)
    small = draw(1e6)
    counted, own = [], memory.count_weights
    monkeypatch.setattr(memory, "count_weights", lambda build: counted.append(own(build)) or counted[-1])
    monkeypatch.setattr(memory, "LARGE", 1e5)
    assert draw(1e6) == small
    assert len(counted) == 1
    with pytest.raises(ConfigError, match=r"need 0\.0 GB"):
        draw(3e5)
    memory.build_within(lambda: torch.nn.Linear(9, 9), 1e3, config)
    assert len(counted) == 2  # a small one is not counted, nor is what others build


def test_weights_that_fit_but_cannot_be_learned_are_refused(monkeypatch):
    model, batch = make_model("image classifier"), make_batch("image classifier")
    learned = sum(part.nbytes for part in model.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda place: 2.0 * learned)
    said = (
        r"weights of this model, their gradient and what the optimizer keeps of them need .* lower model\.grid_size or"
    )
    with pytest.raises(ConfigError, match=said):
        memory.check_memory(model, batch, read("digits"), "cpu")


def test_advice_is_what_can_be_changed():
    config = read("listops", [*LISTS, "train.checkpoint_activations=true", "model.attention=bigbird"])
    said = memory.describe_shortage(memory.Plan(3 * 10**9, 10**9, 1, 70_000), 2e9, config)
    assert said == (
        "the largest batch, 1 x 70,000 tokens, would need about 4.0 GB to train on, forward and backward, and 2.0 GB "
        "are free: lower text.max_length (now 300)."
    )


def test_free_memory_is_known_or_endless():
    assert memory.free_memory(torch.device("cpu")) > 0
    assert memory.free_memory(torch.device("meta")) == float("inf")


def test_a_training_says_what_its_pattern_cannot_do(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400, encoding="utf-8")
    changes = [f'data.train=["{text}"]', "text.max_length=40", "model.attention=bigbird", "model.block=16"]
    found = find_doubts(prepare(read("shakespeare", changes)))
    assert "no multiple of model.block 16: it is padded to 48, and nobody sees the padding" in found[-2]
    assert "it sees the whole text" in found[-1]
