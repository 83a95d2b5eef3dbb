"""Training that is validated: which checkpoint is kept, and what is fitted to it."""

import json

import pytest
import torch
from conftest import tiny

from regard.config.run import Config
from regard.evaluation import fit as fitting
from regard.evaluation.evaluate import Evaluation
from regard.evaluation.fit import calibrate, fit, forget_after
from regard.inference.load import load
from regard.training.checkpoint import load_tensors
from regard.training.prepare import start_run


def judged(monkeypatch, scores):
    """Let validations have these scores, one after the other."""
    following = (Evaluation(score, {}, [], 1, ["x"], ["x"], [["x"]]) for score in scores)
    monkeypatch.setattr(fitting, "evaluate", lambda *given, **options: next(following))


@pytest.mark.parametrize(("metrics", "best"), [(("exact", "perplexity"), 4), (("perplexity", "exact"), 8)])
def test_the_first_metric_decides(monkeypatch, tmp_path, metrics, best):
    values = [{"exact": 30.0, "perplexity": 9.0}, {"exact": 20.0, "perplexity": 5.0}]
    judged(monkeypatch, ({metric: one[metric] for metric in metrics} for one in values))
    config = tiny(f"evaluate.metrics={json.dumps(metrics)}", "train.average_checkpoints=1")
    progress = fit(start_run(config, tmp_path / "run"), tmp_path / "run", lambda event: None, device="cpu")
    assert (progress.best, progress.best_step) == (values[best // 4 - 1][metrics[0]], best)


def test_the_temperature_is_that_of_the_best_weights(monkeypatch, tmp_path):
    """It is fitted to the weights that are kept, which are not the last ones here, and kept with them."""
    for name, wrong in (("train", 99), ("valid", 4)):  # every fourth label of the validation data is wrong
        labels = ["xy"[(n + (n % wrong == 3)) % 2] for n in range(60)]
        lines = [json.dumps({"source": f"{'ab'[n % 2]} {n}", "target": label}) for n, label in enumerate(labels)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    raw = tiny("train.steps=30", "train.validate_every=10", "train.learning_rate=0.03").model_dump(exclude_unset=True)
    raw |= {
        "data": {"kind": "jsonl"} | {name: (str(tmp_path / f"{name}.jsonl"),) for name in ("train", "valid")},
        "text": {"source": {"kind": "word"}, "target": {"kind": "label"}},
        "model": {"kind": "classifier", "size": 8, "feedforward": 8, "heads": 1, "layers": 1},
        "evaluate": {"metrics": ("accuracy",)},
    }
    raw["train"] |= {"average_checkpoints": 1}
    judged(monkeypatch, [{"accuracy": value} for value in (60.0, 50.0, 40.0)])
    prepared = start_run(Config.model_validate(raw), tmp_path / "run")
    assert fit(prepared, tmp_path / "run", lambda event: None, device="cpu").best_step == 10
    model = load(tmp_path / "run", device="cpu").model
    kept = model.temperature.item()
    assert kept != 1.0
    calibrate(tmp_path / "run", prepared, model, 10)  # once more, to what was kept
    assert load(tmp_path / "run", device="cpu").model.temperature.item() == pytest.approx(kept)


def test_metrics_up_to_the_step_that_was_saved_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    forget_after(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_what_is_drawn_between_preparing_and_training_changes_nothing(tmp_path):
    weights = []
    for name, count in (("one", 0), ("other", 7)):
        prepared = start_run(tiny("model.dropout=0.5", "train.average_checkpoints=1"), tmp_path / name)
        torch.rand(count)
        fit(prepared, tmp_path / name, lambda event: None, device="cpu")
        weights.append(load_tensors(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
