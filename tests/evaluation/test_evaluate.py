"""Evaluation: what is measured once, and that the parts are those of the whole."""

import itertools
import json
import math
from unicodedata import normalize

import pytest
from conftest import tiny
from models import build

import regard
from regard.config.run import Config, EvaluateConfig
from regard.config.text import Tokenization
from regard.data.examples import Example, Question
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import DataError
from regard.evaluation.evaluate import evaluate, measure_nats
from regard.evaluation.fit import fit
from regard.evaluation.metrics import SMALLER_IS_BETTER
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.tasks import make_task
from regard.tasks.task import Answer
from regard.training.prepare import check_metrics, prepare, read_examples, start_run

WORDS = Vocabulary.learn(["a b c d e f g ? . who sees"], Tokenization(kind="word"))
LABELS = Vocabulary.learn(["x", "y", "z"], Tokenization(kind="label"))
SEVERAL = Vocabulary.learn(["x|y|z"], Tokenization(kind="label", separator="|"))
SMALL = {"size": 8, "feedforward": 8, "heads": 2}
TARGET = {"kind": "label"}
TEXTS = ["a", "b c", "a b c", "d e f g", "g f e d c", "a b", "c c c c c c c"]
LABELLED = [Example(text, "xyz"[n % 3], f"f{n % 2}:{n}") for n, text in enumerate(TEXTS)]
SPLIT = {
    "transformer": [Example(text, text[::-1], f"f{n % 2}:{n}") for n, text in enumerate(TEXTS)],
    "classifier": LABELLED,
    "several": [one._replace(target=target) for one, target in zip(LABELLED, ["x|y", "", "z", "y"] * 2, strict=False)],
    "word": [one._replace(source=Question("who ?", one.source)) for one in LABELLED],
    "span": [one._replace(source=Question("who ?", one.source), target=one.source[-1]) for one in LABELLED],
}
"""Kind of task -> examples of two files, whose sources have one to seven words."""
KINDS = pytest.mark.parametrize("kind", SPLIT)


def make_predictor(kind: str) -> Predictor:
    """A model with its first weights."""
    models = {
        "transformer": {"kind": "transformer", "encoder_layers": 1, "decoder_layers": 1, **SMALL},
        "classifier": {"kind": "classifier", "layers": 1, "ensemble_size": 2, **SMALL},
        "several": {"kind": "classifier", "layers": 1, "multi_label": True, **SMALL},
        "word": {"kind": "reader", "layers": 1, "answer": "word", **SMALL},
        "span": {"kind": "reader", "layers": 1, **SMALL},
        "language": {"kind": "language model", "layers": 1, **SMALL},
    }
    labels = {"classifier": LABELS, "several": SEVERAL, "word": LABELS}
    text = {"max_length": 8}
    if kind in labels:
        text["target"] = TARGET | ({"separator": "|"} if kind == "several" else {})
    parts = {"data": {"kind": "reverse"}, "model": models[kind], "text": text, "train": {"batch_tokens": 20}}
    config, vocabularies = Config.model_validate(parts), Vocabularies(WORDS, labels.get(kind, WORDS))
    return Predictor(make_task(config, vocabularies), build(config, *vocabularies))


@pytest.fixture
def counted(monkeypatch):
    """Counts how often the surprise of a batch is computed."""

    def counting(predictor: Predictor) -> list[int]:
        calls, own = [], predictor.task.surprise
        monkeypatch.setattr(predictor.task, "surprise", lambda *given: calls.append(1) or own(*given))
        return calls

    return counting


@KINDS
def test_a_perplexity_is_computed_once(kind, counted):
    """However many buckets, files and metrics there are: every batch is read once."""
    predictor, examples = make_predictor(kind), SPLIT[kind]
    calls = counted(predictor)
    batches = list(predictor.task.scoring_batches(examples))
    found = evaluate(predictor, examples, EvaluateConfig(metrics=("perplexity", "exact"), buckets=(1, 2, 3, 4)))
    assert len(found.buckets) > 2
    assert len(found.files) == 2
    assert len(calls) == len(batches) > 1
    assert sorted(number for _, numbers in batches for number in numbers) == list(range(len(examples)))


@KINDS
def test_where_no_perplexity_is_wanted_none_is_computed(kind, counted):
    predictor = make_predictor(kind)
    calls = counted(predictor)
    assert list(evaluate(predictor, SPLIT[kind], EvaluateConfig(metrics=("exact",))).metrics) == ["exact"]
    assert not calls


@KINDS
@pytest.mark.parametrize("together", [False, True])
def test_figures_of_a_part_are_those_of_its_examples_alone(kind, together):
    again = SPLIT[kind][2]._replace(target="b" if kind == "span" else SPLIT[kind][0].target)  # a source of two targets
    predictor, examples = make_predictor(kind), [*SPLIT[kind], again]
    buckets = (4, 6) if kind in ("word", "span") else (2, 4)  # a question has two words
    settings = EvaluateConfig(metrics=("perplexity", "exact", "accuracy"), buckets=buckets, multi_reference=together)
    found = evaluate(predictor, examples, settings)
    assert len(found.buckets) == 3
    assert sum(part["examples"] for part in found.buckets) == found.examples == len(examples) - together
    edges = [0, *settings.buckets, math.inf]
    for part, (low, high) in zip(found.buckets, itertools.pairwise(edges), strict=True):
        inside = [one for one in examples if low < len(WORDS.encode(str(one.source)).ids) <= high]
        alone = evaluate(predictor, inside, settings)
        assert part["examples"] == alone.examples
        assert {name: part[name] for name in settings.metrics} == pytest.approx(alone.metrics, rel=1e-5)
    for part in found.files:
        alone = evaluate(predictor, [one for one in examples if one.where.startswith(f"{part['file']}:")], settings)
        assert {name: part[name] for name in settings.metrics} == pytest.approx(alone.metrics, rel=1e-5)
    whole = measure_nats(predictor, examples).figures(range(len(examples)))
    assert found.metrics["perplexity"] == whole["perplexity"] == pytest.approx(math.exp(whole["nats"]))


def test_an_answer_that_cannot_be_given_has_no_perplexity():
    """Of a span that is not in the context, nothing is foreseen; the others are not shifted by it."""
    predictor, examples = make_predictor("span"), SPLIT["span"]
    lost = [examples[0]._replace(target="zzz"), *examples[1:], examples[1]._replace(target="not there")]
    nats = measure_nats(predictor, lost, lambda text: None)
    assert [bool(count) for count in nats.tokens] == [False, *[True] * (len(examples) - 1), False]
    assert nats.nats.tolist()[1:-1] == pytest.approx(measure_nats(predictor, examples).nats.tolist()[1:], rel=1e-5)
    assert math.isnan(nats.figures([0, len(examples)])["perplexity"])
    others = measure_nats(predictor, examples[1:]).figures(range(len(examples) - 1))
    assert nats.figures(range(len(lost)))["nats"] == pytest.approx(others["nats"], rel=1e-5)


def test_examples_without_perplexity_are_counted_and_said():
    predictor, examples = make_predictor("span"), SPLIT["span"]
    lost = [examples[0], *(one._replace(target="zzz", where=f"f:{n}") for n, one in enumerate(examples[1:4]))]
    said = []
    found = evaluate(predictor, lost, EvaluateConfig(metrics=("exact", "perplexity")), warn=said.append)
    left_out = "the model cannot give the other answers (answer not in context: 3 (f:0, f:1, f:2))"
    assert said == [f"perplexity is that of 1 of 4 examples: {left_out}."]
    assert (found.examples, found.unscored, found.tree()["unscored"]) == (4, 3, 3)
    assert evaluate(predictor, lost, EvaluateConfig(metrics=("exact",))).unscored == 0
    assert evaluate(predictor, examples, EvaluateConfig(metrics=("exact", "perplexity"))).unscored == 0


@pytest.mark.parametrize("together", [False, True])
def test_texts_without_sources_are_scored_themselves(together, counted):
    predictor = make_predictor("language")
    calls = counted(predictor)
    examples = [Example("", text, f"f{n}:1") for n, text in enumerate(TEXTS)]
    found = evaluate(
        predictor, examples, EvaluateConfig(metrics=("bpb", "nats", "perplexity"), multi_reference=together)
    )
    assert list(found.metrics) == ["bpb", "nats", "perplexity"]
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.metrics["nats"]))
    assert (found.examples, found.outputs, found.buckets, found.files) == (len(TEXTS), [], [], [])
    assert len(calls) == len(list(predictor.task.scoring_batches(examples)))
    stream = predictor.task.join(predictor.task.encode_examples(examples, None))
    total = found.metrics["nats"] * (len(stream) - len(TEXTS))  # nobody writes <bos>
    assert found.metrics["bpb"] == pytest.approx(total / math.log(2) / sum(map(len, TEXTS)))


def test_a_source_that_is_empty_has_the_empty_answer():
    """It is scored as any other: a score is over all examples."""
    predictor = make_predictor("transformer")
    predictor.predict = lambda texts: [[Answer("a" if text else "", 0.0)] for text in texts]
    settings = EvaluateConfig(metrics=("exact",))
    found = evaluate(predictor, [Example("", "a", "x:1"), Example("b", "a", "x:2")], settings)
    assert (found.metrics, found.examples, found.outputs) == ({"exact": 50.0}, 2, ["", "a"])
    assert evaluate(predictor, [Example("", "a", "x:1")], settings).metrics == {"exact": 0.0}


ACCENTED = ["한국어 문장 네 개", "schöne Grüße aus Köln", "un café"]


@pytest.mark.parametrize("kind", ["transformer", "span"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_references_in_another_form_of_unicode_score_the_same(kind, form):
    """As files from a Mac are written."""
    predictor = make_predictor(kind)
    predictor.predict = lambda sources: [
        [Answer(normalize("NFC", str(source).split("\t")[-1]), 0.0)] for source in sources
    ]
    texts = [normalize(form, text) for text in ACCENTED]
    sources = texts if kind == "transformer" else [Question("who ?", text) for text in texts]
    examples = [Example(source, text, "x:1") for source, text in zip(sources, texts, strict=True)]
    metrics = tuple(one for one in predictor.task.fitting_metrics(predictor.config) if one != "perplexity")
    found = evaluate(predictor, examples, EvaluateConfig(metrics=metrics)).metrics
    assert found == pytest.approx({metric: 0.0 if metric in SMALLER_IS_BETTER else 100.0 for metric in metrics})


def test_bits_are_those_of_a_byte_of_composed_text():
    examples = [Example("", text, "x:1") for text in ACCENTED]
    apart = [one._replace(target=normalize("NFD", one.target)) for one in examples]
    predictor, settings = make_predictor("language"), EvaluateConfig(metrics=("bpb", "nats"))
    assert evaluate(predictor, apart, settings).metrics == evaluate(predictor, examples, settings).metrics


def test_training_on_decomposed_text_is_validated_rightly(tmp_path):
    pairs = [normalize("NFD", f"{text}\t{text}\n") for text in ("가나", "öü", "é")]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(pairs * 8), encoding="utf-8")
    raw = tiny().model_dump(exclude_unset=True)
    raw["data"] = {"kind": "tsv", "train": (str(path),), "valid": (str(path),)}
    raw["train"] |= {"steps": 60, "validate_every": 60, "learning_rate": 1e-2}
    events = []
    fit(start_run(Config.model_validate(raw), tmp_path / "run"), tmp_path / "run", events.append, device="cpu")
    (score,) = [event.values for event in events if event.kind == "validation"]
    assert score["exact"] == 100


def test_what_is_cut_is_counted_and_the_predictor_stays_as_it_was():
    predictor = make_predictor("transformer")
    predictor.cut = 5
    examples = [Example("a b", "b a", "x:1"), Example("a " * 20, "a", "x:2")]
    assert evaluate(predictor, examples, EvaluateConfig(metrics=("exact",))).cut == 1
    assert (predictor.cut, predictor.longer) == (5, predictor.config.text.longer) == (5, "drop")


def test_sources_that_were_learned_are_counted_said_and_left_out(tiny_run):
    """Whatever file they come from, and without the training data."""
    predictor, splits = load(tiny_run, device="cpu"), read_examples(tiny())
    mixed = [*splits.train[:3], *splits.test[:4], Example(splits.train[0].source, "x", "mine:1")]
    settings, said = EvaluateConfig(metrics=("exact",)), []
    found = evaluate(predictor, mixed, settings, warn=said.append)
    assert (found.seen, found.examples, found.tree()["seen"]) == (4, 8, 4)
    assert said == [
        "4 of 8 sources are in the training data: new ones will score worse. Leave them out with evaluate.unseen=true."
    ]
    with pytest.warns(UserWarning, match="4 of 8 sources are in the training data"):
        evaluate(predictor, mixed, settings)
    unseen = EvaluateConfig(metrics=("exact",), unseen=True)
    found = evaluate(predictor, mixed, unseen)
    assert (found.seen, found.examples) == (4, 4)
    assert found.sources == [example.source for example in splits.test[:4]]
    assert evaluate(predictor, splits.test, settings).seen == 0
    with pytest.raises(DataError, match=r"all 3 examples are in the training data: evaluate\.unseen leaves none"):
        evaluate(predictor, splits.train[:3], unseen)


@pytest.mark.parametrize("unseen", [False, True])
def test_validation_leaves_out_what_was_learned(tmp_path, unseen):
    pairs = [f"{one}{two}\t{two}{one}\n" for one in "abcd" for two in "abcd"]
    (tmp_path / "t.tsv").write_text("".join(pairs[:12]))
    (tmp_path / "v.tsv").write_text("".join(pairs[9:]))
    raw, events = tiny("train.steps=1").model_dump(exclude_unset=True), []
    raw["data"] = {"kind": "tsv", "train": (str(tmp_path / "t.tsv"),), "valid": (str(tmp_path / "v.tsv"),)}
    raw["evaluate"] |= {"unseen": unseen}
    fit(start_run(Config.model_validate(raw), tmp_path / "run"), tmp_path / "run", events.append, device="cpu")
    sampled = [event.values["source"] for event in events if event.kind == "sample"]
    assert sampled[0] == ("da" if unseen else "cb")
    said = [event.values["text"] for event in events if event.kind == "warning"]
    assert "3 of 7 valid sources are in the training data too." in said
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["text"] for line in kept if line["kind"] == "warning"] == said


@pytest.mark.parametrize("metric", ["f1", "ece"])
def test_spans_are_no_labels(metric):
    settings = EvaluateConfig(metrics=("exact", metric))
    with pytest.raises(DataError, match=rf"a model of kind reader has no {metric}: .* exact, .*span_f1, perplexity"):
        evaluate(make_predictor("span"), SPLIT["span"], settings)
    assert metric in evaluate(make_predictor("word"), SPLIT["word"], settings).metrics


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("blue", r"a model of kind rnn has no blue: set evaluate\.metrics to some of bleu, .*\. Did you mean bleu\?$"),
        ("f1", r"a model of kind rnn has no f1: set evaluate\.metrics to some of bleu, chrf, .*span_f1\.$"),
    ],
)
def test_a_metric_that_a_task_does_not_have_is_named(metric, message):
    config = tiny(f'evaluate.metrics=["exact", "{metric}"]')
    with pytest.raises(DataError, match=message):
        check_metrics(config)
    with pytest.raises(DataError, match=message):
        prepare(config)


def test_an_encoder_is_not_scored():
    config = Config.model_validate({"data": {"kind": "reverse"}, "model": {"kind": "encoder"}})
    with pytest.raises(DataError, match="a model of kind encoder has no bleu: it is not scored"):
        check_metrics(config)


def test_pairs_are_examples_and_the_runs_own_metrics_are_the_default():
    predictor = make_predictor("transformer")
    predictor.predict = lambda texts: [[Answer(text, 0.0)] for text in texts]
    settings = predictor.config.evaluate.model_copy(update={"metrics": ("exact", "cer")})
    config = predictor.config.model_copy(update={"evaluate": settings})
    predictor.config = predictor.task.config = config
    assert evaluate(predictor, [("a b", "a b"), ["a", "b"]]).metrics == {"exact": 50.0, "cer": 25.0}
    for wrong in ("ab", ("a",), ("a", "b", "c"), ("a", 7), Question("a", "b"), None):
        with pytest.raises(DataError, match=r"^example 2 is .*, expected a source and its target, as \('two dogs', "):
            evaluate(predictor, [("a", "a"), wrong])


def test_evaluate_is_public():
    assert regard.evaluate is evaluate
