"""A task from outside the package does everything that one of its own does: check, train, resume, predict, evaluate,
look, embed, serve and the page; and refuses what it does not offer."""

import json
import random
import shutil

import httpx
import pytest
import torch
from rating import RatingConfig, RatingTask
from serving import live

import regard
from regard.config.run import MODELS, register_models
from regard.tasks import TASKS, register
from regard.training.checkpoint import load_tensors

SETTINGS = """
[data]
kind = "tsv"
train = ["{data}"]
cut_valid = 40
cut_test = 40

[text]
source = {{ kind = "word" }}

[model]
kind = "rating"
size = 16
feedforward = 32
heads = 2
layers = 1
dropout = 0.0

[train]
steps = 200
learning_rate = 1e-2
warmup = 20
batch_tokens = 1024
validate_every = 100
precision = "float32"

[evaluate]
metrics = ["mae"]
"""
WORDS = {"superb": 5, "good": 4, "fair": 3, "poor": 2, "awful": 1}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register(RatingTask)
    yield
    del TASKS["rating"], MODELS["rating"]
    register_models()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("rating"), random.Random(3)
    rows = []
    for _ in range(500):
        word, fillers = (
            rng.choice(list(WORDS)),
            rng.sample(["the", "film", "was", "on", "a", "long", "day", "with", "them"], 4),
        )
        place = rng.randrange(5)
        rows.append(f"{' '.join([*fillers[:place], word, *fillers[place:]])}\t{WORDS[word]}\n")
    (folder / "data.tsv").write_text("".join(rows), encoding="utf-8")
    (folder / "rating.toml").write_text(SETTINGS.format(data=folder / "data.tsv"), encoding="utf-8")
    return folder / "rating.toml"


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "rating"
    regard.fit(regard.start_run(regard.read(str(config)), folder), folder, lambda event: None, device="cpu")
    return folder


def test_settings_are_checked(config, typed):
    assert MODELS["rating"] is RatingConfig
    status, _, err = typed("check", config, "--set", "model.sprad=2")
    assert (status, "Did you mean model.spread?" in err) == (2, True)
    status, _, err = typed("check", config, "--set", 'evaluate.metrics=["bleu"]')
    assert (status, "a model of kind rating has no bleu: set evaluate.metrics to some of mae." in err) == (2, True)


def test_check(config, typed):
    status, out, _ = typed("check", config)
    assert (status, "kept 420" in out) == (0, True)


def test_resumed_is_the_same_run(config, run, tmp_path, typed):
    settings = regard.read(str(config))
    prepared = regard.start_run(settings, tmp_path / "run")
    steps = []
    regard.fit(
        prepared, tmp_path / "run", lambda event: steps.append(event), stop=lambda: len(steps) > 130, device="cpu"
    )
    status, _, err = typed("train", "--resume", tmp_path / "run", "--device", "cpu")
    assert (status, "done: 200 steps" in err) == (0, True)
    resumed, whole = (load_tensors(one / "model.safetensors") for one in (tmp_path / "run", run))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_predict_and_evaluate(run, typed):
    status, out, _ = typed("predict", run, text="the film was superb\nan awful day\n")
    high, low = map(float, out.split())
    assert (status, high > 4, low < 2) == (0, True, True)
    status, out, _ = typed("predict", run, "--json", text="good\n")
    assert json.loads(out)[0]["value"] == pytest.approx(4, abs=0.7)
    status, out, _ = typed("evaluate", run, "--json")
    assert (status, json.loads(out)["metrics"]["mae"] < 0.5) == (0, True)


def test_look(run, tmp_path, typed):
    found = regard.look(regard.load(run), "the film was superb")
    weights, rows, columns = found.label()
    assert (rows, columns[1:-1]) == (["number"], ["the", "film", "was", "superb"])
    assert columns[int(weights[0].argmax())] == "superb"
    status, _, _ = typed("look", run, "the film was superb", "--out", tmp_path / "why.html")
    assert (status, "superb" in (tmp_path / "why.html").read_text(encoding="utf-8")) == (0, True)


def test_vectors_and_what_is_not_offered(run, tmp_path, typed):
    assert regard.embed(regard.load(run), ["good", "poor"]).shape == (2, 16)
    status, _, err = typed("export", run, tmp_path / "out")
    assert (status, "its task is to rate, which is not offered for export" in err) == (2, True)
    status, _, err = typed("predict", run, "--prefix", "x", text="good\n")
    assert (status, "they cannot begin with a prefix" in err) == (2, True)
    status, _, err = typed("predict", run, "--engine", "ctranslate2", text="good\n")
    assert (status, "this model cannot run on CTranslate2: its task is to rate" in err) == (2, True)


def test_served(run):
    with live({"rating": regard.load(run)}) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (model["task"], model["kind"], model["form"]["fields"][0]["name"]) == ("rate", "rating", "text")
        answers = httpx.post(f"{server.url}/v1/predict", json={"texts": ["good", "poor"]}).json()["answers"]
        assert answers[0][0]["value"] > answers[1][0]["value"]
        tree = httpx.post(f"{server.url}/v1/look", json={"text": "so good"}).json()
        assert [one["rows"] for one in tree["maps"]] == ["key", "query"]
        refused = httpx.post(f"{server.url}/v1/predict", json={"question": "how", "context": "good"})
        assert (refused.status_code, "this model's task is to rate: send text" in refused.text) == (400, True)
        assert httpx.get(f"{server.url}/languages").json() == []
        assert (
            "does not continue texts: its task is to rate"
            in httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).text
        )


@pytest.mark.slow
def test_the_page(run, tmp_path):
    """A real browser: the number in large letters, and the text lit where the number looked."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or pytest.skip("there is no chromium")
    with live({"rating": regard.load(run)}) as server, api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#field-text").fill("the film was superb")
        page.locator(".given").wait_for()
        assert float(page.locator(".given").inner_text()) > 4
        assert "superb" in page.locator(".looks li").first.inner_text()
        titles = page.locator(".heads h3").all_inner_texts()
        assert titles == ["The answer looks at the text", "The text looks at itself"]
        page.screenshot(path=tmp_path / "page.png")
        browser.close()
