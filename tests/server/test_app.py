"""The server's own API over a real connection: answers, and the status and words of every refusal."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest
import torch
from long_runs import long_predictor, long_text
from pydantic import ValidationError
from saying import saying
from serving import every_task, live, wait_until
from tokenizers import normalizers

import regard
from regard.errors import ConfigError
from regard.explain.look import Look, look, look_steps
from regard.inference.degeneration import flag_answers
from regard.server.app import STUDIO, open_runs, read_settings, serve
from regard.server.completions import CompletionBody
from regard.server.keys import check_host
from regard.server.libretranslate import Detect, Translate
from regard.server.middleware import POLICY
from regard.server.schemas import LookBody, PredictBody
from regard.server.service import measure_maps
from regard.server.settings import RefusedError, ServeSettings


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return regard.load(tiny_run, ["text.languages=['en','de']", "text.max_length=40"], device="cpu")


@pytest.fixture(scope="module")
def client(predictor, tiny_run):
    models = {"first": predictor, "plain": regard.load(tiny_run, device="cpu")}
    with live(models, max_items=20) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def refused(response, status, words):
    """Whether a response is an error in our form."""
    assert (response.status_code, list(response.json())) == (status, ["error"])
    assert words in response.json()["error"]
    return True


# --- answers ---------------------------------------------------------------------------------------------------------


def test_models(client, predictor):
    found = client.get("/v1/models").json()
    assert [model["id"] for model in found["data"]] == ["first", "plain"]
    first, plain = found["data"]
    assert (first["kind"], first["source"], first["target"], first["max_length"]) == ("rnn", "en", "de", 40)
    assert (plain["source"], plain["target"]) == (None, None)
    assert first["decode"] == predictor.config.decode.model_dump()
    assert first["about"] == predictor.config.about
    assert first["form"] == predictor.task.form._asdict()


def test_predict(client, predictor):
    decode = predictor.config.decode
    found = client.post("/v1/predict", json={"texts": ["abc", "", "dd"], "best": 2}).json()
    assert found["model"] == "first"
    for text, answers in zip(["abc", "", "dd"], found["answers"], strict=True):
        wanted = flag_answers(predictor, *predictor.encode([text]), *predictor.predict([text], best=2), decode)
        assert [answer["flags"] for answer in answers] == [output.flags for output in wanted]
        assert [answer["text"] for answer in answers] == [output.text for output in wanted]
        for answer, output in zip(answers, wanted, strict=True):
            assert [token["text"] for token in answer["tokens"]] == [token.text for token in output.tokens]
            logprobs = [token.logprob for token in output.tokens]
            assert [token["logprob"] for token in answer["tokens"]] == pytest.approx(logprobs)
    assert found["answers"][1] == [{"text": "", "score": 0.0, "tokens": [], "flags": []}]
    bare = client.post("/v1/predict", json={"text": "abc", "logprobs": False}).json()["answers"][0][0]
    assert {token["logprob"] for token in bare["tokens"]} == {None}


def test_what_is_suspicious_is_said_of_its_own_text():
    told = {"abc": "", "cab": "ab", "abcdabcdabcd": "dcb", "ba": "no no no no "}
    with live({"told": saying(lambda text: [told[text]])}) as server:
        found = httpx.post(f"{server.url}/v1/predict", json={"texts": list(told), "best": 2}, timeout=30).json()
        counted = httpx.get(f"{server.url}/metrics").text
    assert [(answer["text"], answer["flags"]) for (answer,) in found["answers"]] == [
        ("", ["is empty"]),
        ("ab", []),
        ("dcb", ["is short: 3 tokens for a source of 12"]),
        ("no no no no ", ["repeats 'no' 4 times in a row"]),
    ]
    assert "regard_flagged_answers_total 3.0" in counted


def test_settings_of_a_request(client, predictor):
    def ask(**settings):
        return client.post("/v1/predict", json={"text": "abcd", "settings": settings}).json()["answers"][0][0]["text"]

    for changes in ({"beam_size": 1, "max_extra": 3}, {"sample": True, "seed": 7, "top_k": 5}, {"no_repeat_ngram": 1}):
        settings = predictor.config.decode.model_copy(update=changes)
        assert ask(**changes) == predictor.predict(["abcd"], settings=settings)[0][0].text
    assert ask(beam_size=None) == predictor("abcd")


def test_look(client):
    tree = client.post("/v1/look", json={"text": "abc", "best": 2, "packed": False}).json()
    assert tree["text"]["source"] == "abc"
    assert [len(tree["maps"][0]["heads"][0]), len(tree["tokens"]["key"])] == [len(tree["tokens"]["query"]), 4]
    packed = client.post("/v1/look", json={"text": "abc", "vectors": [tree["maps"][0]["name"]]}).json()
    assert packed["maps"][0]["packed"]
    assert refused(client.post("/v1/look", json={"text": " "}), 400, "empty text")
    assert refused(client.post("/v1/look", json={"text": "a", "vectors": ["x"]}), 400, "there is no map 'x'.")
    assert refused(client.post("/v1/look", json={"text": "a", "target": "b" * 5001}), 413, "text 2 has 5,001")
    for target in ("cab", ""):
        forced = client.post("/v1/look", json={"text": "abc", "target": target}).json()
        assert (forced["text"]["target"], len(forced["tokens"]["query"])) == (target, len(target) + 1)


def test_a_look_is_bounded_before_its_maps_are_made(predictor, monkeypatch):
    with live({"tiny": predictor}, max_look=100) as server:
        monkeypatch.setattr(Look, "make_map", None)
        response = httpx.post(f"{server.url}/v1/look", json={"text": "abcdef" * 6, "target": "cab"})
        assert refused(response, 413, "bytes, at most 100 are sent. Look at a shorter text")


def test_a_long_text_is_looked_at_in_part():
    """As much of its maps as there is room for; and numbers, if they are asked for."""
    models = {"long": long_predictor("classifier", "bigbird", 3000)}
    with live(models, max_characters=3000, max_look=1_200_000) as server:
        for packed in (True, False):
            asked = {"text": long_text(3000), "packed": packed}
            tree = httpx.post(f"{server.url}/v1/look", json=asked, timeout=60).json()
            jsonschema.validate(tree, SCHEMA)
            assert len(json.dumps(tree["maps"])) < 1_300_000
            first, last, classes = tree["maps"]
            assert first["pooled"]
            assert last["top"]["count"] in (4, 8, 16, 32)
            assert classes["pooled"] is None
        asked["vectors"] = [last["name"]]
        assert refused(httpx.post(f"{server.url}/v1/look", json=asked, timeout=60), 413, "at most 1,200,000 are sent")


def test_the_size_of_maps_is_known(predictor):
    """To the letter, apart from the padding of base64."""
    found = look(predictor, "abcabc", target="cbacb")
    names = list(found.heads)
    tree = found.tree(packed=True, vectors=names)
    parts = [head for entry in tree["maps"] for head in entry["packed"]]
    parts += [entry["vectors"][name] for entry in tree["maps"] for name in ("queries", "keys", "values")]
    options = {"packed": True, "full": None, "vectors": names, "room": None}
    assert abs(measure_maps(found, options) - sum(map(len, parts))) < 4 * len(parts)
    numbers = sum(torch.tensor(entry["heads"]).numel() for entry in found.tree()["maps"])
    assert measure_maps(found, options | {"packed": False, "vectors": ()}) == 9 * numbers


def test_the_search_of_a_look_is_made_step_by_step(predictor):
    """So that others take their turns meanwhile."""
    *steps, found = look_steps(predictor, "abc", predictor.config.decode)
    assert len(steps) >= len(found.answer.tokens) - 1  # the last one gives the answer
    assert set(steps) == {None}
    assert found.tree() == look(predictor, "abc").tree()


# --- every task ------------------------------------------------------------------------------------------------------

STORY = {"question": "Where is Mary?", "context": "Mary went to the kitchen. John went to the garden."}
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "maps.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    predictors = every_task(tmp_path_factory.mktemp("tasks"), steps=8)
    with live(predictors) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client, predictors


def test_a_server_without_translation(tasks):
    client, _ = tasks
    found = {model["id"]: model["task"] for model in client.get("/v1/models").json()["data"]}
    assert found == {
        **dict.fromkeys(("classes", "several", "pooled"), "classify"),
        **dict.fromkeys(("word", "span"), "answer"),
        "letters": "continue",
    }
    assert client.get("/languages").json() == []
    assert client.get("/frontend/settings").json()["language"]["target"]["code"] == ""
    body = {"q": "the rain", "source": "en", "target": "de"}
    assert refused(client.post("/translate", json=body), 400, "en is not supported")
    assert refused(client.post("/translate", json={**body, "source": "auto"}), 400, "de is not supported")
    assert refused(
        client.post("/translate", json={**body, "model": "span"}), 400, "span does not translate. Ask it with"
    )
    assert client.post("/detect", json={"q": "the rain"}).json() == []


def test_predicting_labels(tasks):
    client, predictors = tasks
    answers = client.post("/v1/predict", json={"text": "the rain", "model": "classes", "best": 3}).json()["answers"][0]
    want = predictors["classes"].predict(["the rain"], best=3)[0]
    assert [answer["text"] for answer in answers] == [output.text for output in want]
    assert sum(answer["probability"] for answer in answers) == pytest.approx(1, abs=1e-4)
    assert all(answer["probability"] == pytest.approx(math.exp(answer["score"])) for answer in answers)
    (several,) = client.post("/v1/predict", json={"text": "the rain", "model": "several"}).json()["answers"][0]
    assert sorted(token["text"] for token in several["tokens"]) == ["food", "sport", "weather"]
    assert several.get("probability") is None


def test_predicting_answers(tasks):
    client, _ = tasks
    joined = {"text": "\t".join(STORY.values())}
    for model in ("word", "span"):
        both = [client.post("/v1/predict", json={"model": model, "best": 3, **body}).json() for body in (STORY, joined)]
        assert both[0] == both[1]
        for answer in both[0]["answers"][0]:
            assert 0 < answer["probability"] <= 1
            if model == "span":
                start, end = answer["span"]
                assert STORY["context"][start:end] == answer["text"] == answer["text"].strip()
    assert refused(client.post("/v1/predict", json={"model": "span", "text": "Where?"}), 400, "text 1 has no context")
    empty = {"model": "word", "question": "Where?", "context": " "}
    assert refused(client.post("/v1/predict", json=empty), 400, "text 1 has no context")
    assert refused(client.post("/v1/look", json=empty), 400, "has no context")
    tabs = {"model": "span", "question": "Where\tis Mary?", "context": STORY["context"]}
    assert client.post("/v1/predict", json=tabs).status_code == 200
    for path in ("/v1/predict", "/v1/look"):
        words = "question and context belong together: give both."
        assert refused(client.post(path, json={"question": "Where?"}), 422, words)
        assert refused(client.post(path, json={**STORY, **joined}), 422, "give ")
        words = "question and context came, but this model's task is to classify: send text."
        assert refused(client.post(path, json={"model": "classes", **STORY}), 400, words)


def test_predicting_continuations(tasks):
    client, predictors = tasks
    answer = client.post("/v1/predict", json={"text": "the qu", "model": "letters"}).json()["answers"][0][0]
    assert answer["text"] == predictors["letters"]("the qu")
    assert "probability" not in answer


def test_looking_at_every_task(tasks):
    client, predictors = tasks
    for model in predictors:
        body = STORY if model in ("word", "span") else {"text": "the rain"}
        names = [one["name"] for one in client.post("/v1/look", json={"model": model, **body}).json()["maps"]]
        tree = client.post("/v1/look", json={"model": model, "best": 2, "vectors": names, **body}).json()
        jsonschema.validate(tree, SCHEMA)
        for entry in tree["maps"]:
            assert entry["shape"][1:] == [len(tree["tokens"][entry[axis]]) for axis in ("rows", "columns")]
        if "class" in predictors[model].config.model.kind:
            assert len(tree["scores"]["logprobs"]) == len(tree["tokens"]["query"]) == 3
        assert tree["form"] == predictors[model].task.form._asdict()
    spans = client.post("/v1/look", json={"model": "span", "best": 2, **STORY}).json()["answers"]
    assert all(STORY["context"][slice(*answer["span"])] == answer["text"] for answer in spans)
    forced = client.post("/v1/look", json={"model": "letters", "text": "the", "target": " fox"}).json()
    assert "".join(token["text"] for token in forced["tokens"]["query"][2:-1]) == " fox"
    wrong = client.post("/v1/look", json={"model": "classes", "text": "the", "target": "food"})
    assert refused(wrong, 400, "they cannot begin with a prefix, nor can a target be given.")


def test_page_and_documentation(client):
    for path in ["/", *(f"/studio/{path.name}" for path in STUDIO.glob("*.*"))]:
        response = client.get(path)
        assert response.status_code == (200 if (STUDIO / (path[8:] or "index.html")).exists() else 404)
    docs = client.get("/docs").text
    assert "/v1/predict" in docs
    assert "http://" not in docs
    assert "<script" not in docs
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/translate", "/languages", "/detect", "/v1/models", "/v1/look", "/metrics", "/health"} < set(paths)
    assert client.get("/health").json() == {"status": "ok"}
    wait_until(lambda: 'regard_request_seconds_count{route="/health"}' in client.get("/metrics").text)


def test_whoever_tries_paths_makes_no_new_series_of_the_metrics(client):
    assert client.get("/of/strangers").status_code == 404
    wait_until(lambda: 'route="other",status="404"}' in client.get("/metrics").text)
    assert "strangers" not in client.get("/metrics").text


def test_every_answer_has_the_security_headers(client):
    for response in (client.get("/"), client.get("/nothing"), client.post("/translate"), client.put("/v1/models")):
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in response.headers


# --- refusals --------------------------------------------------------------------------------------------------------

WRONG = [
    ({}, 422, "give either text or texts (or question and context, to a model that answers; or an image"),
    (
        {"text": "a", "texts": ["b"]},
        422,
        "give either text or texts (or question and context, to a model that answers; or an image",
    ),
    ({"texts": []}, 422, "texts: list should have at least 1 item"),
    ({"text": 5}, 422, "text: input should be a valid string."),
    ({"texts": "abc"}, 422, "texts: input should be a valid list."),
    ({"text": "a", "tex": "b"}, 422, "unknown field tex. Did you mean text?"),
    ({"text": "a", "best": 0}, 422, "best: input should be greater than or equal to 1."),
    ({"text": "a", "best": 21}, 422, "best: input should be less than or equal to 20."),
    ({"text": "a", "best": "2"}, 422, "best: input should be a valid integer."),
    ({"text": "a", "settings": {"beem_size": 3}}, 422, "unknown field settings.beem_size. Did you mean beam_size?"),
    ({"text": "a", "settings": {"quantization": "int8"}}, 422, "unknown field settings.quantization."),
    ({"text": "a", "logprobs": 1}, 422, "logprobs: input should be a valid boolean."),
    ({"text": "a", "settings": {"beam_size": 65}}, 422, "beam_size: input should be less than or equal to 64."),
    (
        {"text": "a", "settings": {"beam_size": 10**30}},
        422,
        "settings.beam_size: input should be less than or equal to 64.",
    ),
    ({"text": "a", "settings": {"seed": 2**32}}, 422, "settings.seed: input should be less than 4294967296."),
    ({"text": "a", "settings": {"no_repeat_ngram": 10**9}}, 422, "settings.no_repeat_ngram: "),
    ({"text": "a", "settings": {"temperature": 0}}, 422, "settings.temperature: "),
    ({"text": "a", "settings": {"length_penalty": 1e308}}, 422, "settings.length_penalty: "),
    ({"text": "a", "settings": {"sample": 1}}, 422, "settings.sample: input should be a valid boolean."),
    ({"text": "a", "model": "firs"}, 404, "no model is named 'firs'. Did you mean first? Served: first, plain."),
    ({"text": "a", "model": "../../etc/passwd"}, 404, "no model is named '../../etc/passwd'."),
    ({"text": "a", "model": "first\0"}, 404, "no model is named 'first\\x00'."),
    ({"text": "a", "model": ""}, 404, "no model is named ''."),
    ({"text": "a" * 5001}, 413, "text 1 has 5,001 characters, at most 5,000 are taken. Split it."),
    ({"texts": ["a"] * 1000}, 413, "1,000 texts came, at most 20 are taken at once."),
    ({"texts": ["a", "b" * 41]}, 400, "text 2 has 41 tokens, this model takes at most 40."),
]


@pytest.mark.parametrize(("body", "status", "words"), WRONG)
def test_bodies_that_are_wrong(client, body, status, words):
    assert refused(client.post("/v1/predict", json=body), status, words)


@pytest.mark.parametrize(
    ("body", "words"),
    [({"texts": ["a"]}, "unknown field texts. Did you mean text?"), ({"text": "a", "ful": []}, "Did you mean full?")],
)
def test_looking_knows_its_own_fields(client, body, words):
    assert refused(client.post("/v1/look", json=body), 422, words)


RAW = [
    (b"{", 400, "the body is not JSON"),
    (b"", 422, "there is no body: send a JSON object"),
    (b"[1]", 422, "the body must be a JSON object"),
    (b'{"text": "a\0"}', 400, "the body is not JSON"),
    (b'{"text": "\xff"}', 400, "the body cannot be read: it is no UTF-8, nested too deeply, or has a number"),
    (b"[" * 100_000, 400, "the body cannot be read: it is no UTF-8, nested too deeply, or has a number"),
    (b'{"text": "a", "settings": {"temperature": NaN}}', 422, "settings.temperature: "),
    (
        b'{"text": "a", "settings": {"seed": %s}}' % (b"9" * 5000),
        400,
        "the body cannot be read: it is no UTF-8, nested too deeply, or has a number",
    ),
    (b'{"text": "a\\ud800"}', 422, "text: a lone surrogate at 1 is no character. Send valid Unicode."),
    (b'{"text": "a", "\\ud800": 1}', 422, ""),
    (b'{"text": "a", "model": "\\udfff"}', 404, "no model is named '\\udfff'."),
    (b'{"texts": ["a", "\\udfff"]}', 422, "texts.1: a lone surrogate at 0"),
]


@pytest.mark.parametrize(("body", "status", "words"), RAW)
def test_bytes_that_are_wrong(client, body, status, words):
    response = client.post("/v1/predict", content=body, headers={"content-type": "application/json"})
    assert refused(response, status, words)


HOSTILE = [
    *({name: [[]] * 1000} for name in ("prompt", "texts", "q", "stop", "full", "vectors")),
    *({name: [5] * 1000} for name in ("texts", "q", "stop", "full", "vectors")),
    *({name: [{}] * 1000} for name in ("prompt", "texts", "q", "text", "settings", "logit_bias")),
    {"prompt": [[[]] * 1000] * 1000},
    {"prompt": [["a"] * 1000] * 1000},
    {"prompt": ["a", *[1] * 1000]},
    {"text": "a", "settings": {f"x{n}": n for n in range(1000)}},
    {"logit_bias": {str(n): "a" for n in range(1000)}},
    {f"x{n}": n for n in range(1000)},
]


@pytest.mark.parametrize("body", [PredictBody, LookBody, CompletionBody, Translate, Detect])
def test_a_wrong_body_makes_few_errors(body):
    """Not one for each item and each thing that it might have been."""
    for tree in HOSTILE:
        with pytest.raises(ValidationError) as wrong:
            body.model_validate({**tree, "format": 5, "best": "many", "api_key": 5})
        assert wrong.value.error_count() <= 12


def test_names_that_stand_twice(client):
    """Nobody can know which of two values is meant."""
    twice = b'{"text": "a", "settings": {"seed": 1, "seed": 2}}'
    for path in ("/v1/predict", "/v1/look", "/v1/completions", "/translate", "/detect"):
        response = client.post(path, content=twice, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "the body is not JSON: 'seed' stands twice in one object." in response.text


def test_nul_and_strange_characters_are_text(client):
    for text in ("a\0b", "\ufeff", "a\u202eb", "😀", "\x1b[31m"):
        assert client.post("/v1/predict", json={"text": text}).status_code == 200


def test_paths_and_methods_that_are_wrong(client):
    assert refused(client.get("/nothing"), 404, "nothing is at /nothing; /docs lists what is.")
    assert refused(client.delete("/v1/predict"), 405, "DELETE is not possible at /v1/predict, only POST.")
    assert client.delete("/v1/predict").headers["allow"] == "POST"
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "%00", "....//index.html"):
        assert httpx.get(f"{client.base_url}/studio/{name}").status_code == 404
    assert refused(client.get("/studio/app.py"), 404, "there is no page file 'app.py'.")


def test_a_breakdown_is_said_and_logged(predictor, monkeypatch, caplog):
    def broken(*texts, **options):
        raise ZeroDivisionError("a bug")

    with live({"tiny": predictor}) as server:
        monkeypatch.setattr(predictor, "answer", broken)
        response = httpx.post(f"{server.url}/v1/predict", json={"text": "a"})
        assert refused(response, 500, "the server made a mistake; its log says which.")
    assert "ZeroDivisionError: a bug" in caplog.text


@pytest.mark.parametrize("path", ["/v1/predict", "/translate", "/detect"])
def test_a_panic_is_said_and_logged_and_others_go_on(tiny_run, predictor, caplog, path):
    """In the thread of the models, and where texts are read beside it."""
    broken = regard.load(tiny_run, ["text.languages=['ko','en']"], "cpu")
    broken.source.tokenizer.normalizer = normalizers.Precompiled(b"\x04\0\0\0\xff\xff\xff\xff")
    with live({"tiny": predictor, "broken": broken}) as server, httpx.Client(base_url=server.url) as client:
        body = {"text": "a", "model": "broken"} if path == "/v1/predict" else {"q": "a", "source": "ko", "target": "en"}
        assert refused(client.post(path, json=body), 500, "the server made a mistake; its log says which.")
        assert client.get("/health").status_code == 200
        assert client.post("/v1/predict", json={"text": "a"}).status_code == 200
    assert "PanicException: index out of bounds" in caplog.text


# --- who may ---------------------------------------------------------------------------------------------------------


def test_keys(predictor):
    with live({"tiny": predictor}, keys=("right", "other")) as server, httpx.Client(base_url=server.url) as client:
        body = {"text": "a"}
        assert refused(client.post("/v1/predict", json=body), 401, "an API key is needed, and none came")
        for key, status in (("right", 200), ("other", 200), ("wrong", 401), ("ü", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert client.post("/v1/predict", json=body, headers=headers).status_code == status
        assert refused(client.get("/metrics"), 401, "an API key is needed")
        for path in ("/health", "/languages", "/frontend/settings", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        assert client.get("/frontend/settings").json()["keyRequired"] is True


HOSTS = [
    (
        (),
        "127.0.0.1",
        "localhost:5000 LOCALHOST app.localhost 127.0.0.1:5000 192.168.1.5 [::1]:5000",
        "evil.org a.b:80",
    ),
    ((), "::1", "localhost [::1]", "evil.org"),
    ((), "localhost", "localhost 127.0.0.1", "evil.org localhost.evil.org 127.0.0.1.evil.org [ ["),
    ((), "0.0.0.0", "translate.example.org myserver:5000 10.0.0.2", ""),
    ((), "myserver", "myserver:5000", ""),
    (("translate.example.org",), "127.0.0.1", "translate.example.org localhost 127.0.0.1", "example.org evil.org"),
    (("translate.example.org",), "0.0.0.0", "translate.example.org:80 localhost 10.0.0.2", "evil.org"),
    (("*",), "127.0.0.1", "evil.org", ""),
]


@pytest.mark.parametrize(("hosts", "host", "right", "wrong"), HOSTS)
def test_names_of_the_server(hosts, host, right, wrong):
    settings = ServeSettings(host=host, hosts=hosts)
    check_host("", settings)  # HTTP/1.0; no browser leaves it out
    for name in right.split():
        check_host(name, settings)
    for name in wrong.split():
        with pytest.raises(RefusedError, match=r"this server is not called '.*'\. Ask for localhost") as refusal:
            check_host(name, settings)
        assert refusal.value.status == 403


def test_pages_of_other_sites_cannot_ask_by_a_name_of_theirs(client):
    """DNS rebinding: to the browser it is the attacker's own site, so no other rule would keep it out."""
    for path in ("/", "/v1/predict", "/health"):
        response = client.get(path, headers={"Host": "evil.org:5000"})
        assert refused(response, 403, "this server is not called 'evil.org'.")


def test_only_what_a_page_needs_first_is_open_to_everybody(predictor):
    """Every other route of the document wants a key, whatever is sent to it."""
    open_ = {"/health", "/languages", "/frontend/settings"}
    with live({"tiny": predictor}, keys=("right",)) as server, httpx.Client(base_url=server.url) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert open_ < set(paths)
        for path, operations in paths.items():
            for method in operations:
                answer = client.request(method, path.format(model="tiny"), json={})
                assert (answer.status_code == 200) == (path in open_)
                assert path in open_ or answer.status_code == 401, path


def test_cors(predictor):
    with (
        live({"tiny": predictor}, cors=("https://example.org",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for origin, allowed in (("https://example.org", "https://example.org"), ("https://other.org", None)):
            response = client.post("/v1/predict", json={"text": "a"}, headers={"Origin": origin})
            assert response.headers.get("access-control-allow-origin") == allowed
            response = client.post("/v1/predict", json={"text": 1}, headers={"Origin": origin})
            assert response.headers.get("access-control-allow-origin") == allowed


def test_pages_elsewhere_can_read_the_refusals_of_the_middleware(predictor, monkeypatch):
    def broken(*texts, **options):
        raise ZeroDivisionError("a bug")

    settings = {"cors": ("https://example.org",), "max_body": 100, "read_timeout": 0.3}

    def slowly():
        yield b'{"text": '
        time.sleep(0.8)
        yield b'"a"}'

    monkeypatch.setattr(predictor, "answer", broken)
    with live({"tiny": predictor}, **settings) as server, httpx.Client(base_url=server.url) as client:
        bodies = {413: b"x" * 200, 408: slowly(), 500: b'{"text": "a"}'}
        for status, content in bodies.items():
            for path in ("/v1/predict", "/v1/completions") if status == 413 else ("/v1/predict",):
                headers = {"Origin": "https://example.org", "Content-Type": "application/json"}
                response = client.post(path, content=content, headers=headers)
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == "https://example.org"
                assert response.headers["content-security-policy"] == POLICY
        asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/predict", headers=asked).headers["access-control-allow-methods"] == "GET, POST"
        asked["Access-Control-Request-Headers"] = "authorization, content-type"
        assert client.options("/v1/predict", headers=asked).status_code == 200


# --- starting and stopping -------------------------------------------------------------------------------------------


def test_settings_come_from_changes():
    changes = ["serve.port=0", "text.longer=cut", 'serve.keys=["a"]']
    assert read_settings(changes) == (ServeSettings(port=0, keys=("a",)), ["text.longer=cut"])
    with pytest.raises(ConfigError, match=r"unknown setting serve\.prt\. Did you mean serve\.port\?"):
        read_settings(["serve.prt=1"])
    with pytest.raises(ConfigError, match=r"setting serve\.port is 70000: "):
        read_settings(["serve.port=70000"])
    with pytest.raises(ConfigError, match=r"setting serve\.timeout is inf: Input should be a finite number"):
        read_settings(["serve.timeout=inf"])
    with pytest.raises(ConfigError, match=r"setting serve\.keys\.0: ") as refused:
        read_settings(["serve.keys=[123456]"])
    assert "123456" not in str(refused.value)


def test_every_setting_is_documented():
    rows = [
        f"| `{name}` | `{field.default}` | {' '.join(str(field.description).split())} |"
        for name, field in ServeSettings.model_fields.items()
    ]
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    assert text.endswith("\n".join(["| setting | default | what |", "| --- | --- | --- |", *rows, ""]))


def test_guarantees_name_tests_that_are_there():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "serve.md").read_text(encoding="utf-8")))
    there = "".join(path.read_text(encoding="utf-8") for path in (root / "tests" / "server").glob("test_*.py"))
    assert len(named) > 10
    assert named <= set(re.findall(r"^def (test_\w+)", there, re.MULTILINE))


def test_runs_have_different_names(tiny_run, tmp_path):
    (tmp_path / "tiny").symlink_to(tiny_run)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="two runs are named tiny, and a model is asked for by name"):
        open_runs([tiny_run, tmp_path / "other" / ".." / "tiny"], [], "cpu")
    with pytest.raises(ConfigError, match="give at least one run"):
        serve([], ServeSettings())


def test_a_port_that_is_taken(tiny_run, predictor):
    with live({"tiny": predictor}) as server, pytest.raises(ConfigError, match=r"cannot be listened on: .*in use"):
        serve([tiny_run], ServeSettings(port=server.port), device="cpu")


def test_without_the_extra_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "regard.server.app")
    with pytest.raises(ConfigError, match=r"serving needs fastapi: pip install 'regard\[serve\]'\."):
        importlib.import_module("regard.server.app")


STARTED = """
import sys
from pathlib import Path
from regard.server.app import read_settings, serve
serve([Path(sys.argv[1])], read_settings(["serve.port=0", "serve.threads=1", "text.languages=['en','de']"])[0])
"""


@pytest.mark.slow
def test_kill_under_load(tiny_run: Path):
    """A process of its own, asked by 16 clients at once and killed: each request is answered, and the process ends."""
    process = subprocess.Popen([sys.executable, "-c", STARTED, str(tiny_run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].split()[0]
    asked, answered = [], []

    def client(number):
        with httpx.Client(base_url=url, timeout=60) as http:
            while not answered or answered[-1] != 503:
                asked.append(number)
                answered.append(http.post("/v1/predict", json={"text": "abc"}).status_code)
                if len(answered) == 100:
                    os.kill(process.pid, signal.SIGTERM)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    assert process.wait(30) == 0
    process.stdout.close()
    assert len(answered) == len(asked)
    assert set(answered) == {200, 503}
