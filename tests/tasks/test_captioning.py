"""Captioners against their equations written out (A3, A4), and what no batch, cache or file may change."""

import base64
import io
import json
import math

import numpy
import pytest
import torch
from oracles import EXACT, shaken
from oracles import exact as exact
from PIL import Image as Pillow
from pydantic import ValidationError
from torch.testing import assert_close

from regard.config.data import ShapesData
from regard.config.run import Config, DecodeConfig
from regard.config.text import TextConfig, Tokenization
from regard.config.toml import read
from regard.config.vision import CaptionerConfig
from regard.data.batching import Row, collate, pad_sources
from regard.data.encoding import Picture
from regard.data.examples import Box, Example, Image, Question
from regard.data.vocabulary import UNK, Vocabularies, Vocabulary
from regard.errors import ConfigError, InputError
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.explain.look import look
from regard.explain.recorder import record
from regard.explain.vectors import embed, nearest_words
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.tasks import make_task
from regard.tasks.axes import Piece
from regard.tasks.vision.images import ImageTask
from regard.tasks.vision.model import Captioner, augment, penalize_neglect
from regard.tasks.vision.pointing import find_words, is_inside, point, score_pointing
from regard.training.checkpoint import load_config
from regard.training.prepare import read_examples, start_run

pytestmark = pytest.mark.usefixtures("exact")

WORDS = Vocabulary.learn(["red circle above blue square below green star and"], Tokenization(kind="word"))
SMALL = {"size": 6, "embedding": 5, "heads": 3, "feedforward": 7, "image_size": 16, "grid_size": 8, "strides": (2, 2)}


def settings(**changes):
    return CaptionerConfig(**{"kind": "captioner", "dropout": 0.0, **SMALL, **changes})


KINDS = {
    "A3": {"spatial_attention": "none"},
    "A3 of all cells": {"spatial_attention": "none", "summary": "flat", "cell": "gru"},
    "A4": {},
    "A4 with a gate": {"gate": True, "cell": "gru", "layers": 2},
    "A4 by dot": {"spatial_attention": "scaled dot", "cell": "rnn"},
    "transformer": {"decoder": "transformer", "layers": 2, "size": 6},
    "self-attention": {"self_attention": (0, 1)},
    "patches": {"image_encoder": "patches", "patch": 4},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(**changes):
    """A task and its model."""
    config = Config(data=ShapesData(kind="shapes"), model=settings(**changes), text=TextConfig(max_length=9))
    task = make_task(config, Vocabularies(WORDS, WORDS))
    return task, shaken(task.build())


def png(seed, size=20):
    """The bytes of an image of noise."""
    noise = numpy.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Pillow.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def images(count):
    return [Image(f"image {number}", data=png(number)) for number in range(count)]


def batch_of(task, targets):
    return collate([Row(one.ids, ids) for one, ids in zip(task.encode(images(len(targets))), targets, strict=True)])


TARGETS = [[4, 5], [], [10, 9, 8, 7, 6]]


# --- equations -------------------------------------------------------------------------------------------------------


def grid_of(model, source):
    """z_ij = W x_ij + p_ij, cell by cell."""
    x = model.encoder(source)
    return torch.stack([model.project(x[:, cell]) + model.places[cell] for cell in range(x.shape[1])], dim=1)


def first_state(model, grid):
    """h_0 = MLP(z)."""
    decoder = model.decoder
    return torch.tanh(decoder.bridge(torch.tanh(model.summarize(grid.mean(1)))))


def logits_of(model, state, context, word):
    joined = torch.tanh(model.decoder.join(torch.cat([state, context, word], dim=-1)))
    return joined @ model.output.weight.T + model.output.bias


def test_without_attention_c_is_the_first_state_at_every_step():
    task, model = made(spatial_attention="none")
    batch = batch_of(task, TARGETS)
    h = c = cell = first_state(model, grid_of(model, batch.source))
    wanted = []
    for word in model.target_embedding(batch.target).unbind(1):
        h, cell = model.decoder.cells[0](torch.cat([word, c], dim=-1), (h, cell))
        wanted.append(logits_of(model, h, c, word))
    assert_close(model.logits(batch), torch.stack(wanted, dim=1), **EXACT)


def test_what_is_not_attended_to_has_no_gate():
    """The recipe flickr8k has a gate: without attention, nobody would read it, nor would it be learned."""
    _, model = made(gate=True, spatial_attention="none")
    assert model.decoder.gate is None


@pytest.mark.parametrize("gate", [False, True])
def test_with_attention_every_word_looks_anew(gate):
    task, model = made(gate=gate)
    batch, attention = batch_of(task, TARGETS), model.decoder.attention
    grid = grid_of(model, batch.source)
    h = cell = first_state(model, grid)
    wanted, looked = [], []
    for word in model.target_embedding(batch.target).unbind(1):
        query, keys = attention.projection.query(h), attention.projection.key(grid)
        e = torch.stack([torch.tanh(query + keys[:, i]) @ attention.score.vector for i in range(16)], dim=1)
        a = e.exp() / e.exp().sum(1, keepdim=True)
        c = sum(a[:, i, None] * grid[:, i] for i in range(16))
        c = torch.sigmoid(model.decoder.gate(h)) * c if gate else c
        h, cell = model.decoder.cells[0](torch.cat([word, c], dim=-1), (h, cell))
        wanted.append(logits_of(model, h, c, word))
        looked.append(a)
    assert_close(model.logits(batch), torch.stack(wanted, dim=1), **EXACT)
    hidden, (maps,) = model.follow(batch)
    assert_close(maps[:, 0], torch.stack(looked, dim=1), **EXACT)
    assert_close(hidden, model.hidden(batch), **EXACT)


def test_the_penalty_of_neglect_by_hand():
    task, model = made(doubly_stochastic=0.7)
    batch = batch_of(task, TARGETS)
    _, plain = made()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        _, (maps,) = model.follow(batch)
    total = 0.0
    for row, ids in enumerate(TARGETS):
        for cell in range(16):
            total += (1 - sum(float(maps[row, 0, t, cell]) for t in range(len(ids) + 1))) ** 2
    assert_close(float(penalize_neglect([maps], batch.answer)), total, **EXACT)
    assert_close(model(batch).total.item(), plain(batch).total.item() + 0.7 * total, **EXACT)
    model(batch).total.backward()
    assert model.decoder.attention.score.vector.grad.abs().sum() > 0


# --- one image or many, step by step or at once ----------------------------------------------------------------------


@every_kind
def test_steps_give_what_one_pass_gives(kind):
    task, model = made(**KINDS[kind])
    batch = batch_of(task, TARGETS)
    wanted = model.logits(batch).log_softmax(-1)
    state = model.start(batch.source, batch.lengths)
    for place, tokens in enumerate(batch.target.unbind(1)):
        found, state = model.step(tokens, state)
        assert (found[:, UNK] == -math.inf).all()  # no caption says it
        found[:, UNK] = wanted[:, place, UNK]
        assert_close(found, wanted[:, place], **EXACT)


@every_kind
@pytest.mark.parametrize("beam", [1, 3])
def test_captions_are_the_same_alone_and_together(kind, beam):
    task, model = made(**KINDS[kind])
    chosen, decode = Predictor(task, model), DecodeConfig(beam_size=beam)
    together = chosen.predict(images(5), settings=decode)
    alone = [chosen.predict([one], settings=decode)[0] for one in images(5)]
    assert [answers[0].text for answers in together] == [answers[0].text for answers in alone]
    scores = [[answers[0].score for answers in some] for some in (together, alone)]
    assert_close(*map(torch.tensor, scores), **EXACT)
    assert max(len(answers[0].tokens) for answers in together) <= 10  # text.max_length and <eos>


@pytest.mark.parametrize("kind", ["A4", "transformer"])
def test_maps_of_decoding_are_those_of_one_pass(kind):
    task, model = made(**KINDS[kind])
    with record(model) as maps:
        (answer,) = Predictor(task, model).predict(images(1), settings=DecodeConfig(beam_size=3))[0]
    source = task.encode(images(1))[0]
    found = maps.of(source.ids, [token.id for token in answer.tokens[:-1]])
    _, wanted = model.follow(task.replay(source, answer))
    crosses = [part for name, part in found.items() if not maps.of_itself[name]]
    for one, other in zip(crosses, wanted, strict=True):
        assert_close(one, other[0], **EXACT)
        assert one.shape[-1] == 16
    with pytest.raises(InputError, match="nothing was decoded from this source"):
        maps.of(task.encode(images(2))[1].ids, [])


# --- frozen encoders -------------------------------------------------------------------------------------------------

LITE = {"image_encoder": "efficientnet-lite0", "image_size": 64, "freeze_encoder": True, "strides": (2, 2, 2)}


def test_kept_features_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    torch.set_default_dtype(torch.float32)
    task, _ = made(**LITE)
    torch.manual_seed(3)
    model = task.build().eval()
    task.freeze(model)
    examples = [Example(image, "a", "x:1") for image in images(3)]
    batch = batch_of(task, TARGETS)
    fresh = model.logits(batch)
    told = []
    task.warm(model, examples, lambda *counts: told.append(counts))
    kept = batch_of(task, TARGETS)
    assert kept.source.dtype == torch.float16
    assert kept.source.shape == (3, 4, 1280)
    assert_close(model.logits(kept), fresh, rtol=0.0, atol=2e-5)
    assert told == [(3, 3)]
    assert not any(part.requires_grad for part in model.encoder.parameters())
    (folder,) = (tmp_path / "features").iterdir()
    assert folder.name.startswith("efficientnet-lite0-64-")
    again, _ = made(**LITE)
    monkeypatch.setattr(Picture, "pixels", None)  # nothing may be decoded any more
    again.warm(model, examples, lambda *counts: pytest.fail("nothing is missing"))
    assert_close(again.features.get(again.encode(images(1))[0].ids.key), kept.source[0], rtol=0, atol=0)
    mixed = pad_sources([again.encode([image])[0].ids for image in images(2)])[0]
    assert mixed.dtype == torch.float16


def test_a_batch_with_one_new_image_is_of_pixels(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    torch.set_default_dtype(torch.float32)
    task, _ = made(**LITE)
    model = task.build().eval()
    task.warm(model, [Example(image, "a", "x:1") for image in images(2)], lambda *counts: None)
    both = pad_sources([one.ids for one in task.encode(images(3))])[0]
    assert both.shape == (3, 3, 64, 64)
    assert both.dtype == torch.uint8


def test_random_or_moving_images_are_not_frozen():
    with pytest.raises(ValidationError, match=r"cnn begins with random weights: train it \(freeze_encoder = false\)"):
        settings(freeze_encoder=True)
    with pytest.raises(ValidationError, match="flip and shift change images that a frozen encoder has seen"):
        settings(**LITE, flip=True)
    with pytest.raises(ValidationError, match="self_attention is for the stages of a cnn"):
        settings(**LITE, self_attention=(1,))


# --- augmentation ----------------------------------------------------------------------------------------------------


def test_moved_and_mirrored_images():
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    assert augment(pixels, settings()) is pixels
    mirrored = augment(pixels, settings(flip=True))
    same = (mirrored == pixels).flatten(1).all(1)
    other = (mirrored == pixels.flip(-1)).flatten(1).all(1)
    assert (same | other).all()
    assert 16 < int(same.sum()) < 48
    moved = augment(pixels, settings(shift=2))
    for row in range(8):
        found = {
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if (moved[row, :, 2:-2, 2:-2] == pixels[row, :, 2 + down : 14 + down, 2 + right : 14 + right]).all()
        }
        assert len(found) == 1
    assert len({tuple(one.flatten()[:9].tolist()) for one in moved}) > 1


# --- pointing --------------------------------------------------------------------------------------------------------


def test_a_word_points_by_the_cell_it_looks_at_most():
    text = "a red circle above a blue square"
    starts = [0, 2, 6, 13, 19, 21, 26]
    pieces = [Piece(word, start, start + len(word)) for word, start in zip(text.split(), starts, strict=True)]
    assert find_words(text, pieces, "red circle") == 2
    assert find_words(text, pieces, "blue square") == 6
    assert find_words(text, pieces, "green square") is None
    assert find_words(text, pieces, "red circ") is None
    box = Box("red circle", 0.25, 0.5, 0.5, 1.0)
    assert [cell for cell in range(16) if is_inside(box, cell, (4, 4))] == [9, 13]
    weights = torch.zeros(7, 16)
    weights[2, 13] = weights[6, 0] = 1.0
    hits = point(text, pieces, [box, Box("blue square", 0.5, 0.5, 1.0, 1.0)], weights, (4, 4))
    assert hits == {"red circle": True, "blue square": False}


def test_pointing_comes_with_answers_of_known_scenes():
    task, model = made()
    everywhere = tuple(Box(WORDS.token(i), 0.0, 0.0, 1.0, 1.0) for i in range(4, 13))
    known = [one._replace(boxes=everywhere) for one in images(3)]
    decode = DecodeConfig(min_length=4)
    answers = [found[0] for found in Predictor(task, model).predict(known, settings=decode)]
    assert any(answer.details["pointing"] for answer in answers)
    assert score_pointing(answers, [[""]] * 3) == 100.0
    blind_task, blind = made(spatial_attention="none")
    answers = [found[0] for found in Predictor(blind_task, blind).predict(known)]
    assert math.isnan(score_pointing(answers, [[""]] * 3))


# --- runs ------------------------------------------------------------------------------------------------------------

TINY = (
    *("data.examples=12", "data.valid=4", "data.test=4", "model.image_size=32", "model.grid_size=8", "model.size=8"),
    *("model.embedding=8", "train.steps=4", "train.validate_every=2", "train.batch_tokens=64", "text.max_length=6"),
    "text.longer=cut",
)
"""The shapes recipe, too small to learn anything."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and what was reported while it was trained."""
    folder, events = tmp_path_factory.mktemp("caption") / "run", []
    fit(start_run(read("shapes", TINY), folder), folder, events.append, device="cpu")
    return folder, events


def test_training_reads_what_is_kept(tmp_path, monkeypatch):
    """Rows that are made before the features are computed find them afterwards."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ImageTask, "initialize", lambda *given: None)  # random weights will do
    lite = [f"model.{name}={json.dumps(value)}" for name, value in LITE.items() if name != "strides"]
    prepared = start_run(read("shapes", [*TINY, *lite]), tmp_path / "run")
    seen, events = [], []
    monkeypatch.setattr(Captioner, "encoder_states", keep_source(Captioner.encoder_states, seen))
    fit(prepared, tmp_path / "run", events.append, device="cpu")
    assert {source.dim() for source in seen} == {3}
    assert [event.values["of"] for event in events if event.kind == "warming"] == [16]


def keep_source(method, seen):
    def call(self, source, lengths):
        seen.append(source)
        return method(self, source, lengths)

    return call


def test_a_run_answers_as_the_model_that_was_trained(run):
    torch.set_default_dtype(torch.float32)
    folder, events = run
    first, again = (load(folder).predict([Image("x", data=png(3))], logprobs=True) for _ in range(2))
    assert first == again
    figures = [event.values for event in events if event.kind == "validation"]
    assert set(figures[0]) == {"exact", "pointing", "perplexity", "best", "best_step"}
    scored = evaluate(load(folder), read_examples(load_config(folder), "test").test)
    assert set(scored.metrics) == {"exact", "pointing", "perplexity"}
    assert scored.buckets == []


def test_a_look_has_the_image_and_its_grid(run, tmp_path):
    torch.set_default_dtype(torch.float32)
    found = look(load(run[0]), Image("noise.png", data=png(3)))
    tree = found.tree()
    (cross,) = [one for one in tree["maps"] if one["kind"] == "spatial"]
    assert (cross["rows"], cross["columns"]) == ("query", "key")
    assert cross["shape"] == [1, len(tree["tokens"]["query"]), 16]
    assert tree["image"]["grids"] == {"key": [4, 4]}
    shown = base64.b64decode(tree["image"]["data"].partition("base64,")[2])
    assert Pillow.open(io.BytesIO(shown)).size == (20, 20)
    assert [piece["text"] for piece in tree["tokens"]["key"][:5]] == ["0,0", "0,1", "0,2", "0,3", "1,0"]
    assert found.text == "noise.png"
    for name in ("map.json", "map.html", "map.png"):
        found.save(tmp_path / name)


def test_images_have_vectors_and_words_too(run):
    torch.set_default_dtype(torch.float32)
    predictor = load(run[0])
    vectors = embed(predictor, images(3))
    assert vectors.shape == (3, 8)
    source, lengths = pad_sources([one.ids for one in predictor.task.encode(images(3))])
    with torch.inference_mode():
        wanted = predictor.model.encoder_states(source, lengths).mean(1)
    assert_close(vectors, wanted, rtol=1e-5, atol=1e-6)
    assert len(nearest_words(predictor, "red", 3)) == 3


def test_what_is_no_image_is_refused(run):
    torch.set_default_dtype(torch.float32)
    predictor = load(run[0])
    with pytest.raises(InputError, match=r"gone.jpg does not exist, expected the path of an image"):
        predictor("gone.jpg")
    with pytest.raises(InputError, match=r"image is not an image, expected JPEG"):
        predictor([Image("image", data=b"hello")])
    with pytest.raises(InputError, match="text 1 is Question, expected an image"):
        predictor([Question("who?", "me")])
    task = predictor.task
    with pytest.raises(InputError, match="text came, but this model reads images: send image"):
        task.make_source({"text": "/etc/passwd"})
    for wrong in (b"", "/etc/passwd"):
        with pytest.raises(InputError, match="expected the bytes of an image's file"):
            task.make_source({"image": wrong})
    assert task.make_source({"image": png(3)}).data == png(3)
    with pytest.raises(ConfigError, match="its task is to caption, which is not offered for export"):
        task.architecture()


def test_of_an_animated_image_the_first_frame_is_taken_and_said(run):
    torch.set_default_dtype(torch.float32)
    file = io.BytesIO()
    frames = [Pillow.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    still = io.BytesIO()
    frames[0].save(still, "GIF")
    predictor = load(run[0])
    moving, alone = predictor.predict([Image("two.gif", data=file.getvalue()), Image("one.gif", data=still.getvalue())])
    assert moving[0].flags == ["two.gif has several frames: the first is taken."]
    assert alone[0].flags == ()
    assert moving[0].text == alone[0].text
