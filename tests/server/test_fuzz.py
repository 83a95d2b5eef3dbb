"""Machines that try to break the server: schemathesis on its OpenAPI document, hypothesis on /translate."""

import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import classifier_run, language_run, live, reader_run

import regard

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def url(tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    predictors = {
        "tiny": regard.load(tiny_run, ["text.languages=['en','de']"], device="cpu"),
        "letters": language_run(folder / "letters", "the quick brown fox. " * 40, "byte", steps=4),
        "classes": classifier_run(folder / "classes", steps=2),
        "span": reader_run(folder / "span", "span", steps=2),
    }
    with live(predictors) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def document(url):
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def explored(document, examples):
    """Call every operation with what fits its schema and with what does not, and check: no 5xx, no status, content
    type or body that is not documented, nothing wrong accepted. (What fits may still be refused: a language that nobody
    serves.)"""
    for result in document.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(ANY, max_examples=examples)
            def keeps_its_word(case):
                case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)

            keeps_its_word()


def test_the_document_is_kept(document):
    explored(document, 5)


@pytest.mark.weekly
def test_the_document_is_kept_for_long(document):
    explored(document, 300)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "q": anything | st.text(max_size=30) | st.lists(st.text(max_size=10), max_size=3),
        "source": anything | st.sampled_from(["en", "auto"]),
        "target": anything | st.just("de"),
        "format": anything | st.sampled_from(["text", "html"]),
        "alternatives": anything | st.integers(0, 3),
        "api_key": anything,
        "model": anything | st.just("tiny"),
    },
)


def translated(client, body):
    """What /translate says to a body: an answer, or an error in words."""
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = client.post("/translate", content=content, headers={"content-type": "application/json"})
    tree = response.json()
    assert response.status_code in (200, 400, 404, 413)
    assert ("translatedText" in tree) if response.status_code == 200 else (list(tree) == ["error"] and tree["error"])


@given(body=bodies)
@settings(ANY, max_examples=30)
def test_translate_bodies(client, body):
    translated(client, body)


@pytest.mark.weekly
@given(body=bodies)
@settings(ANY, max_examples=600)
def test_translate_bodies_for_long(client, body):
    translated(client, body)


asking = st.fixed_dictionaries(
    {"model": st.sampled_from(["classes", "span", "letters"])},
    optional={
        "text": st.text(max_size=30) | st.just("Where?\tHere it is."),
        "question": st.text(max_size=10),
        "context": st.text(max_size=30),
        "target": st.text(max_size=5),
        "best": st.integers(1, 20),
        "vectors": st.lists(st.sampled_from(["attention", "pointer", "decoder.blocks.0.self_attention"]), max_size=2),
    },
)
completing = st.fixed_dictionaries(
    {"model": st.just("letters")},
    optional={
        "prompt": anything | st.text(max_size=30) | st.lists(st.text(max_size=10) | st.integers(0, 300), max_size=3),
        "max_tokens": st.integers(0, 70),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "logprobs": st.integers(0, 5),
        "echo": st.booleans(),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
        "seed": st.integers(),
        "presence_penalty": st.floats(-2, 2),
    },
)


def posted(client, path, body):
    """The status of an answer, which is never the server's fault."""
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 413, 422), response.text
    assert response.status_code == 200 or response.json()["error"]


@given(body=asking, path=st.sampled_from(["/v1/predict", "/v1/look"]))
@settings(ANY, max_examples=60)
def test_bodies_of_every_task(client, body, path):
    posted(client, path, body)


@given(body=completing)
@settings(ANY, max_examples=60)
def test_completion_bodies(client, body):
    posted(client, "/v1/completions", body)


@pytest.mark.weekly
@given(body=completing)
@settings(ANY, max_examples=600)
def test_completion_bodies_for_long(client, body):
    posted(client, "/v1/completions", body)
