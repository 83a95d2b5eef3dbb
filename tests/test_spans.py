"""A reader of SQuAD's form, trained on a small generated file: it finds the place a question asks for."""

import json
import random

import pytest

import regard
from regard.config import DecodeConfig
from regard.run import fit, fresh, read_splits

NAMES = ["Ann", "Bob", "Cem", "Dai", "Eva", "Fei", "Gus", "Hana"]
PLACES = ["Rome", "Paris", "Seoul", "New York", "Lima", "Oslo", "Busan", "Cairo"]


def squad(count: int) -> dict:
    """Who, where and when: a sentence, and a question for one of the three."""
    rng, paragraphs = random.Random(5), []
    for number in range(count):
        facts = {"Who": rng.choice(NAMES), "Where": rng.choice(PLACES), "When": str(rng.randrange(1900, 2000))}
        context = f"It was {facts['Who']} who lived in {facts['Where']} in {facts['When']}, they say."
        kind = rng.choice(list(facts))
        answer = {"text": facts[kind], "answer_start": context.index(facts[kind])}
        question = {"id": str(number), "question": f"{kind} was it?", "answers": [answer]}
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
    context = "It was Bob who lived in New York in 1987, they say."
    ((best, second),) = predictor.predict([f"Where was it?\t{context}"], best=2, settings=DecodeConfig())
    assert best.text == "New York"
    assert best.score > second.score
    assert context[slice(*best.span)] == "New York"
