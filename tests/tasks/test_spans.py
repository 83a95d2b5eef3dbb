"""A reader of SQuAD's form, trained on a small generated file: it finds the place a question asks for."""

import json
import random

import pytest

import regard
from regard.config.config import DecodeConfig
from regard.training.run import fit, fresh, read_splits

NAMES = ["Ann", "Bob", "Cem", "Dai", "Eva", "Fei", "Gus", "Hana"]
PLACES = ["Rome", "Paris", "Seoul", "New York", "Lima", "Oslo", "Busan", "Cairo"]


def squad(count: int) -> dict:
    """Who lives where, of three; and for one of them, where. Only the name tells which place is asked for."""
    rng, paragraphs = random.Random(5), []
    for number in range(count):
        names, places = rng.sample(NAMES, 3), rng.sample(PLACES, 3)
        context = " ".join(f"{name} lives in {place}." for name, place in zip(names, places, strict=True))
        which = rng.randrange(3)
        answer = {"text": places[which], "answer_start": context.index(places[which])}
        question = {"id": str(number), "question": f"Where does {names[which]} live?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "places", "paragraphs": paragraphs}]}


@pytest.mark.slow
def test_spans_are_learned_and_have_their_place(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(squad(4000)), encoding="utf-8")
    config = regard.read(
        "squad-form",
        [
            f'data.train=["{tmp_path / "train.json"}"]',
            *("data.cut_valid=100", "data.cut_test=300", "text.source.size=400", "model.size=64", "model.layers=2"),
            *("model.feedforward=128", "train.steps=350", "train.validate_every=350", "train.batch_tokens=2048"),
            *("train.warmup=50", "train.rate=2e-3"),
        ],
    )
    run = tmp_path / "run"
    fit(fresh(config, run), run, lambda event: None, device="cpu")
    predictor = regard.load(run, device="cpu")
    found = regard.evaluate(predictor, read_splits(config).test, config.evaluate)
    assert found.metrics["span_exact"] >= 95
    assert found.metrics["span_f1"] >= found.metrics["span_exact"]
    context = "Eva lives in Lima. Bob lives in New York. Fei lives in Oslo."
    ((best, second),) = predictor.predict([f"Where does Bob live?\t{context}"], best=2, settings=DecodeConfig())
    assert best.text == "New York"
    assert best.score > second.score
    assert context[slice(*best.span)] == "New York"
