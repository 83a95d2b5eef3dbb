"""Classes of images: what they see, with self-attention between the stages of a CNN and without."""

import io

import pytest
import torch
import torch.nn.functional as F
from oracles import EXACT, shaken
from oracles import exact as exact
from PIL import Image as Pillow
from pydantic import ValidationError
from torch.testing import assert_close

from regard.config.toml import read
from regard.config.vision import ImageClassifierConfig
from regard.data.examples import Image
from regard.errors import ConfigError
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.explain.look import look
from regard.explain.vectors import embed
from regard.inference.load import load
from regard.tasks.encoder import LABELS
from regard.tasks.vision.classification import ImageClassifier
from regard.training.checkpoint import load_config
from regard.training.prepare import prepare, read_examples, start_run

TINY = (
    *("data.examples=40", "data.valid=12", "data.test=12", "model.grid_size=8", "train.steps=4", "train.warmup=1"),
    "train.validate_every=1",
)
pytest.importorskip("sklearn")


def png(shade):
    file = io.BytesIO()
    Pillow.new("L", (8, 8), shade).save(file, "PNG")
    return Image(f"shade {shade}", data=file.getvalue())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "run"
    events = []
    fit(start_run(read("digits", TINY), folder), folder, events.append, device="cpu")
    gates = [event.values["gate 0"] for event in events if event.kind == "validation"]
    assert gates[-1] != gates[0] == pytest.approx(0.1, abs=0.05)  # it is told, and it moves
    return folder


@pytest.mark.usefixtures("exact")
def test_classes_see_the_mean_of_the_grid():
    prepared = prepare(read("digits", TINY))
    model = shaken(prepared.task.build())
    (batch,) = next(prepared.batches(0))
    grid = model.encoder(batch.source)
    wanted = grid.mean(1) @ model.classes.weight.T + model.classes.bias
    assert_close(model.logits(batch), wanted, **EXACT)
    loss = F.cross_entropy(wanted, batch.answer[:, 0] - LABELS, reduction="sum")
    assert_close(model(batch).total, loss, **EXACT)
    assert_close(model.surprise(batch).nats.sum(), loss, **EXACT)
    assert_close(model.probabilities(batch).sum(-1), torch.ones(len(batch.source)), **EXACT)


def test_a_run_answers_scores_looks_and_embeds(run):
    predictor = load(run)
    answers = predictor.predict([png(0), png(255)], best=10)
    assert sorted(answer.text for answer in answers[0]) == list("0123456789")
    assert sum(answer.details["probability"] for answer in answers[0]) == pytest.approx(1.0)
    found = evaluate(predictor, read_examples(load_config(run), "test").test)
    assert set(found.metrics) == {"accuracy", "perplexity"}
    assert found.confusion
    (own,) = look(predictor, png(0)).tree()["maps"]
    assert (own["kind"], own["name"]) == ("spatial", "encoder.stages.0.1.attention")
    assert own["shape"] == [1, 64, 64]
    assert embed(predictor, [png(0), png(9)]).shape == (2, 8)


def test_labels_are_needed():
    with pytest.raises(ConfigError, match=r"a model of kind image classifier needs text.target"):
        read("digits", ["text.target.kind=word"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"self_attention": (3,)}, "has stages above 1, the last"),
        ({"grid_size": 7}, "grid_size 7 cannot be halved 1 times, for 2 stages"),
        ({"grid_size": 2}, "grid_size 2 gives the first of 2 stages one channel: raise it"),
        ({"grid_size": 5000}, "should be less than or equal to 4096"),
    ],
)
def test_stages_that_cannot_be(changes, message):
    with pytest.raises(ValidationError, match=message):
        ImageClassifierConfig(kind="image classifier", strides=(1, 2), **changes)


def test_equal_weights_with_and_without_self_attention():
    """What docs/captions.md takes for equal: within one in a hundred."""
    with_it = read("digits").model
    without = with_it.model_copy(update={"self_attention": (), "grid_size": 66})
    counts = [sum(part.numel() for part in ImageClassifier(one, 10).parameters()) for one in (with_it, without)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
