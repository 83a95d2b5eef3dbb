"""The page, in a real browser: the server it comes from, and the file that stands alone."""

import base64
import copy
import functools
import json
import re
import shutil
import socket
import threading
import time
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import taggers
import torch
from conftest import tiny, train_tiny
from long_runs import LONG, long_predictor, long_text
from oracles import hardmax
from serving import every_task

import regard
from regard.attention.normalizers import softmax
from regard.config.model import TransformerConfig
from regard.config.toml import read
from regard.evaluation.fit import fit
from regard.explain.attention_maps import STUDIO, make_page
from regard.explain.look import look
from regard.server.app import make_app
from regard.server.settings import ServeSettings
from regard.tasks import TASKS
from regard.tasks.language_model import LanguageModel
from regard.tasks.page import FORMS
from regard.training.prepare import start_run

uvicorn = pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed"),
]
KEY = "open sesame"
STORY = "Mary went to the kitchen. John went to the garden. Mary went to the office."
HOSTILE = "</script><img src=x onerror=document.title='broken'> 👩‍👩‍👧 שלום 안녕 &amp; ${1}"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that remembers what it asked for and what went wrong in it."""
    page = browser.new_page(locale="en-US", viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(20_000)
    page.asked, page.wrong = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.wrong.append(f"{error} {error.stack}"))
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    yield page
    page.close()


@pytest.fixture(scope="module")
def predictors(tmp_path_factory):
    """A run that has learned to turn strings round, and small ones of every kind of attention."""
    folder = tmp_path_factory.mktemp("studio")
    config = read("reverse", ["train.steps=400", "train.validate_every=400", "data.longest=8"])
    fit(start_run(config, folder / "reverse"), folder / "reverse", lambda event: None, device="cpu")
    train_tiny(folder / "additive", "model.attention=additive")
    sizes = {"size": 12, "heads": 3, "feedforward": 8, "encoder_layers": 2, "decoder_layers": 2}
    for positions in ("alibi", "rotary"):
        model = TransformerConfig(kind="transformer", positions=positions, **sizes)
        config = tiny().model_copy(update={"model": model})
        fit(start_run(config, folder / positions), folder / positions, lambda event: None, device="cpu")
    found = {name: regard.load(folder / name, device="cpu") for name in ("reverse", "additive", "alibi", "rotary")}
    return {**found, **every_task(folder)}


def served(predictors, settings):
    """The server in a thread: its address, and what stops it."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(predictors, settings), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop():
        server.should_exit = True
        thread.join()
        listener.close()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", stop


@pytest.fixture(scope="module")
def studio(predictors):
    address, stop = served(predictors, ServeSettings())
    yield address
    stop()


def token(page, line, text):
    return page.locator(f".line[data-of={line}] .token", has_text=text).first


def painted(page, line):
    """How strongly each token of a line is lit."""
    script = "all => all.map(token => Number(token.style.getPropertyValue('--weight')))"
    return page.locator(f".line[data-of={line}] .token").evaluate_all(script)


def answered(page, text):
    playwright.expect(page.locator(".others li").first).to_contain_text(text)


def link(page):
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).fragment).items()}


def test_typing_looking_calculating_and_sharing(studio, page, browser):
    page.goto(studio)
    page.fill("#field-text", "abcdef")
    answered(page, "fedcba")
    token(page, "query", "e").hover()
    lit = painted(page, "key")
    assert lit.index(max(lit)) == "abcdef".index("e")
    playwright.expect(page.locator(".looks h3")).to_have_text("‘e’ looks at")
    assert page.locator(".line[data-of=query] .token").first.get_attribute("data-percent").endswith("%")
    token(page, "key", "b").hover()
    lit = painted(page, "query")
    assert lit.index(max(lit)) == "fedcba".index("b")

    page.select_option("#model", "alibi")
    thumb = page.get_by_role("button", name="Encoder: the source looks at itself · Layer 2, head 3")
    thumb.click()
    playwright.expect(thumb).to_have_attribute("aria-pressed", "true")
    assert link(page)["map"] == "encoder.blocks.1.self_attention"
    assert link(page)["head"] == "2"
    page.select_option("select[name=row]", "1")
    page.get_by_text("Calculator").click()
    playwright.expect(page.locator(".calculator tbody tr")).to_have_count(7)
    weights = page.locator(".calculator tbody tr").evaluate_all("rows => rows.map(row => Number(row.dataset.weight))")
    assert sum(weights) == pytest.approx(1)

    page.select_option("#language", "ko")
    playwright.expect(page.locator("#submit")).to_have_text("답하기")
    playwright.expect(page.locator(".calculator h2")).to_have_text("계산기")
    assert page.locator("html").get_attribute("lang") == "ko"

    other = browser.new_page(viewport={"width": 360, "height": 700})
    other.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    other.goto(page.url)
    playwright.expect(other.locator("#submit")).to_have_text("답하기")
    playwright.expect(other.locator("#field-text")).to_have_value("abcdef")
    playwright.expect(other.locator("select[name=map]")).to_have_value("encoder.blocks.1.self_attention")
    playwright.expect(other.locator("select[name=head]")).to_have_value("2")
    playwright.expect(other.locator("select[name=row]")).to_have_value("1")
    playwright.expect(other.locator(".calculator tbody tr")).to_have_count(7)
    assert link(other) == link(page)
    assert other.evaluate("document.documentElement.scrollWidth") <= 360
    other.close()

    assert not page.wrong
    assert {urlsplit(url)._replace(path="", query="", fragment="").geturl() for url in page.asked} == {studio}


SLOPES = [2**-4, 2**-8, 2**-2]  # ALiBi's of three heads: those of two, and the first of four


def weigh(predictor, one, entry, head):
    """A map (query, key) by the formulas of the papers, in float64, and its values (key, size)."""
    model, (_, rows, columns) = predictor.config.model, entry["shape"]
    vectors = {
        name: np.frombuffer(base64.b64decode(entry["vectors"][name]), "<f4") for name in ("queries", "keys", "values")
    }
    queries, keys, values = (
        vectors[name].astype(float).reshape(one.weights.shape[0], count, -1)[head]
        for name, count in (("queries", rows), ("keys", columns), ("values", columns))
    )
    if model.kind == "rnn" and model.attention == "additive":
        vector = predictor.model.get_submodule(one.name).score.vector.detach().double().numpy()
        scores = np.tanh(queries[:, None] + keys) @ vector
    else:
        scores = queries @ keys.T / (1 if model.kind == "rnn" else keys.shape[-1] ** 0.5)
    if one.kind == "self" and model.positions == "alibi":
        scores -= SLOPES[head] * abs(np.arange(rows)[:, None] - np.arange(columns))
    if one.columns == "input":
        scores[np.triu_indices(rows, 1, columns)] = -np.inf
    scores[:, (one.weights == 0).all(0).all(0).numpy()] = -np.inf  # the question, for a question
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True), values


def test_the_calculator_and_every_map_follow_the_formulas(studio, page, predictors):
    page.goto(studio)
    script = """(maps) => maps.map((entry) => Array.from({length: entry.shape[0]}, (_, head) =>
        Array.from({length: entry.shape[1]}, (_, row) => {
            const {steps, context, known} = Regard.calculate(entry, head, row);
            return {weights: steps.map(({weight}) => weight), context, known};
        })))"""
    for name, predictor in predictors.items():
        source = regard.Question("Where is Mary?", STORY) if name in ("word", "span") else "abcd"
        found = regard.look(predictor, source)
        entries = found.tree(packed=True, vectors=list(found.heads))["maps"]
        assert entries
        for one, entry, heads in zip(found.maps, entries, page.evaluate(script, entries), strict=True):
            for head, lines in enumerate(heads):
                weights, values = weigh(predictor, one, entry, head)
                np.testing.assert_allclose(one.weights[head].numpy(), weights, atol=1e-5)
                assert all(line["known"] for line in lines)
                np.testing.assert_allclose([line["weights"] for line in lines], weights, atol=1e-5)
                np.testing.assert_allclose([line["context"] for line in lines], weights @ values, atol=1e-5)


def halved(scores, mask):
    """A softmax of another temperature."""
    return softmax(scores / 2, mask)


halved.__name__ = halved.__qualname__ = "softmax"


@pytest.mark.parametrize(
    ("change", "formula"),
    [
        ({"normalize": hardmax}, "hardmax( q · k / √d ) · values"),
        ({"score": functools.partial(torch.cdist, p=1.0)}, "softmax( cdist p=1.0 ) · values"),
        ({"normalize": halved}, "softmax( q · k / √d ) · values"),
    ],
)
def test_what_the_page_cannot_recompute_has_the_weights_of_the_map(predictors, page, tmp_path, change, formula):
    predictor = copy.copy(predictors["rotary"])
    predictor.model = copy.deepcopy(predictor.model)
    name = "decoder.blocks.1.cross_attention"
    for what, function in change.items():
        setattr(predictor.model.get_submodule(name), what, function)
    found = regard.look(predictor, "abcd", target="dcba")
    found.save(tmp_path / "why.html")
    page.goto(f"{(tmp_path / 'why.html').as_uri()}#map={name}&head=1&row=2&calculator=true")
    playwright.expect(page.locator(".calculator p").first).to_contain_text("the weights are those of the map")
    playwright.expect(page.locator(".calculator .formula")).to_contain_text(formula)
    weights = page.locator(".calculator tbody tr").evaluate_all("rows => rows.map(row => Number(row.dataset.weight))")
    np.testing.assert_allclose(weights, found.map(name).weights[1, 2].numpy(), atol=0.5 / 255 + 1e-6)
    titles = page.locator(".calculator th[scope=col]")
    assert titles.all_inner_texts() == ["looks at", "key k", "weight", "value v", "weight × v"]
    page.select_option("#language", "ko")
    assert titles.all_inner_texts() == ["보는 토큰", "키 k", "가중치", "값 v", "가중치 × v"]
    page.select_option("select[name=map]", "decoder.blocks.0.cross_attention")
    assert titles.all_inner_texts() == ["보는 토큰", "키 k", "q · k", "÷ √4", "가중치", "값 v", "가중치 × v"]
    assert not page.wrong


def classes(page):
    """The bars: classes and how likely each is, in percent."""
    items = page.locator(".bars li").all()
    return {
        item.locator("button").inner_text(): float(item.locator(".gauge").inner_text().split()[0]) for item in items
    }


def test_classes_and_what_each_looked_at(studio, page):
    page.goto(f"{studio}/#model=classes&text=the rain and the snow")
    playwright.expect(page.locator(".given")).to_have_text("weather")
    playwright.expect(page.locator("#submit")).to_have_text("Classify")
    playwright.expect(page.locator("#settings")).to_be_hidden()
    found = classes(page)
    assert next(iter(found)) == "weather"
    assert set(found) == {"weather", "food", "sport"}
    assert sum(found.values()) == pytest.approx(100, abs=0.2)
    playwright.expect(page.locator(".looks h3")).to_have_text("‘weather’ looks at")
    before = painted(page, "key")
    page.get_by_role("button", name="Look at food").click()
    playwright.expect(page.locator(".looks h3")).to_have_text("‘food’ looks at")
    assert painted(page, "key") != before
    assert link(page)["map"] == "attention"
    page.keyboard.press("ArrowUp")
    playwright.expect(page.locator(".looks h3")).to_have_text("‘weather’ looks at")
    page.fill("#field-text", "the soup and the cake")
    playwright.expect(page.locator(".given")).to_have_text("food")
    playwright.expect(page.locator("[aria-current=true]")).to_contain_text("food")
    token(page, "key", "soup").hover()
    playwright.expect(page.locator(".looks h3")).to_have_text("Who looks at ‘soup’")
    page.select_option("#model", "several")
    page.fill("#field-text", "the rain and the soup and the snow")
    playwright.expect(page.locator(".given")).to_have_text("weather+food")
    page.select_option("#model", "pooled")
    playwright.expect(page.locator(".bars li")).to_have_count(3)
    assert not page.wrong


def test_tags_are_coloured_spans_with_their_certainty(tmp_path, page):
    (tmp_path / "chunks.txt").write_text(taggers.CHUNKS, encoding="utf-8")
    predictor = taggers.train(taggers.settings(tmp_path / "chunks.txt"), tmp_path / "run")
    address, stop = served({"chunks": predictor}, ServeSettings())
    try:
        page.goto(f"{address}/#model=chunks&text=She saw the old dog .")
        marks = page.locator(".tagged mark")
        playwright.expect(marks).to_have_count(3)
        playwright.expect(page.locator(".tagged")).to_contain_text(" .")
        texts, labels = (page.locator(f".tagged mark{inside}").all_inner_texts() for inside in ("", " small"))
        assert [text.split(label)[0].strip() for text, label in zip(texts, labels, strict=True)] == [
            *("She", "saw", "the old dog"),
        ]
        assert [label.split()[0] for label in labels] == ["NP", "VP", "NP"]
        ((answer,),) = predictor.predict(["She saw the old dog ."])
        sure = [word["probability"] for word in answer.details["words"]]
        assert [label.split()[1] for label in labels] == [
            f"{100 * min(sure[i:j]):.0f}" for i, j in ((0, 1), (1, 2), (2, 5))
        ]
        hues = marks.evaluate_all("all => all.map(mark => mark.style.getPropertyValue('--hue'))")
        assert hues[0] == hues[2] != hues[1]
        assert not page.wrong
    finally:
        stop()


def test_a_question_and_where_its_answer_is(studio, page):
    page.goto(studio)
    page.select_option("#model", "span")
    page.fill("#field-question", "Where is Mary?")
    playwright.expect(page.locator(".empty")).to_contain_text("Ask a question")
    page.fill("#field-context", STORY)
    answer = page.locator(".given")
    playwright.expect(answer).to_have_text(page.locator(".others li").first.inner_text().split("\n")[0])

    def marked():
        return "".join(page.locator(".line[data-of=key] .found").all_inner_texts())

    assert marked() == answer.inner_text().replace(" ", "")
    page.locator(".others li button").nth(1).click()
    playwright.expect(answer).to_have_text(page.locator(".others li button").nth(1).inner_text())
    assert marked() == answer.inner_text().replace(" ", "")
    token(page, "query", "end").hover()
    playwright.expect(page.locator(".looks h3")).to_have_text("‘end’ looks at")
    assert link(page)["question"] == "Where is Mary?"
    assert link(page)["context"] == STORY

    page.select_option("#model", "word")
    playwright.expect(page.locator(".line[data-of=key] .token")).to_have_count(4)
    lines = page.locator(".line[data-of=key]").inner_text()
    assert lines.split("\n") == ["Where is Mary?", STORY]  # as it was written, though it is read the latest first
    assert answer.inner_text() in ("kitchen", "garden", "office", "hallway")
    page.get_by_role("button", name="Question and context look at each other · Layer 2, head 3").click()
    assert link(page)["map"] == "encoder.blocks.0.self_attention#1"
    page.select_option("select[name=map]", "attention")
    page.get_by_text("Calculator").click()
    playwright.expect(page.locator(".calculator tr.hidden th")).to_have_text("Where is Mary?")
    page.reload()
    playwright.expect(page.locator("#field-question")).to_have_value("Where is Mary?")
    playwright.expect(page.locator(".calculator tr.hidden th")).to_have_text("Where is Mary?")
    assert not page.wrong


def test_old_links_are_still_read(studio, page):
    """They have a context as text, and other names of settings."""
    page.goto(f"{studio}/#model=span&question=Where is Mary?&text={STORY}")
    playwright.expect(page.locator(".given")).to_be_visible()
    playwright.expect(page.locator("#field-context")).to_have_value(STORY)
    assert link(page)["context"] == STORY
    page.goto("about:blank")
    page.goto(f"{studio}/#model=reverse&text=abcdef&beam=3&no_repeat=2")
    answered(page, "fedcba")
    assert (link(page)["beam_size"], link(page)["no_repeat_ngram"]) == ("3", "2")
    assert not {"beam", "no_repeat"} & set(link(page))
    assert not page.wrong


def test_another_form_keeps_what_was_typed(studio, page):
    """The last field is the text itself, whatever it is called."""
    page.goto(f"{studio}/#model=span&question=Where is Mary?&context={STORY}")
    playwright.expect(page.locator(".given")).to_be_visible()
    assert [page.locator(f"#field-{name}").evaluate("one => one.localName") for name in ("question", "context")] == [
        "input",
        "textarea",
    ]
    page.select_option("#model", "classes")
    playwright.expect(page.locator(".bars li")).to_have_count(3)
    playwright.expect(page.locator("#field-text")).to_have_value(STORY)
    playwright.expect(page.get_by_label("Text", exact=True)).to_have_value(STORY)
    playwright.expect(page.locator("#field-question")).to_have_count(0)
    assert "question" not in link(page)
    page.select_option("#model", "word")
    playwright.expect(page.get_by_label("Question", exact=True)).to_have_value("Where is Mary?")
    playwright.expect(page.get_by_label("Context", exact=True)).to_have_value(STORY)
    page.select_option("#language", "ko")
    playwright.expect(page.get_by_label("질문", exact=True)).to_have_value("Where is Mary?")
    page.select_option("#model", "letters")
    playwright.expect(page.get_by_label("첫머리", exact=True)).to_have_value(STORY)
    playwright.expect(page.locator(".empty")).to_contain_text("첫머리를 입력하면")
    assert not page.wrong


def test_typing_begins_before_the_server_has_said_what_it_serves(studio, page):
    """What was typed is asked, and the cursor stays where it is."""
    held = []

    def hold(route):
        held.append(route)

    page.route("**/v1/models", hold)
    page.goto(f"{studio}/#model=reverse")
    page.locator("#field-text").press_sequentially("abd")
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator(".empty")).to_have_text("Type something, and the answer appears here.")
    playwright.expect(page.locator("#settings")).to_be_hidden()
    held[0].continue_()
    answered(page, "dba")
    playwright.expect(page.locator("#field-text")).to_be_focused()
    page.keyboard.type("c")
    answered(page, "dcba")
    assert not page.wrong


# --- tasks that the page has never seen ------------------------------------------------------------------------------


def disguised(predictor, form):
    """A predictor whose task says something else of itself."""
    other = copy.copy(predictor)
    other.task = copy.copy(predictor.task)
    other.task.form = form
    return other


def test_the_scripts_know_no_task():
    """Neither a kind of model nor a task is named in them."""
    names = {*TASKS, *(task.verb for task in TASKS.values())}
    for script in sorted(STUDIO.glob("*.js")):
        text = script.read_text(encoding="utf-8")
        for name in names - {"answer"}:  # which is the word for what every task gives
            assert not re.search(rf"[\"'`]{name}\b", text), f"{script.name} names {name}"
        assert not re.search(r"\b(tree|model\(\))\??\.(kind|task)\b", text)


def test_a_task_that_says_nothing_of_itself(predictors, page):
    """One from elsewhere has the plain form: its answers, best first, and its maps."""
    address, stop = served({"one": disguised(predictors["classes"], FORMS["text"])}, ServeSettings())
    try:
        with page.expect_request("**/v1/look") as asked:
            page.goto(f"{address}/#text=the rain and the snow&language=en")
        assert asked.value.post_data_json["best"] == 1
        assert "settings" not in asked.value.post_data_json
        playwright.expect(page.locator(".given")).to_have_text("weather")
        playwright.expect(page.locator("#submit")).to_have_text("Answer")
        playwright.expect(page.locator("#settings")).to_be_hidden()
        assert page.locator(".lines h3").all_inner_texts() == ["Text"]
        playwright.expect(page.locator(".others h3")).to_have_text("Best answers")
        playwright.expect(page.locator(".others li")).to_have_count(1)
        playwright.expect(page.locator(".others .gauge")).to_contain_text("%")
        assert page.locator(".others button").count() == 0
        titles = page.locator("select[name=map] option").all_inner_texts()
        assert titles == ["The text looks at itself · Layer 1", "The text looks at itself · Layer 2",
                          "The answer looks at the text"]  # fmt: skip
        playwright.expect(page.locator("select[name=map]")).to_have_value("attention")
        assert page.locator(".heads h3").all_inner_texts() == ["The answer looks at the text", titles[0][:24]]
        page.select_option("#language", "ko")
        playwright.expect(page.locator(".empty, .lines h3")).to_have_text("텍스트")
        page.fill("#field-text", "")
        playwright.expect(page.locator(".empty")).to_contain_text("무엇이든 입력하면")
        assert not page.wrong
    finally:
        stop()


def test_a_form_of_other_words(predictors, page):
    """Fields, settings and titles are what the form says; what it does not say is in English, or in plain words."""
    form = FORMS["seq2seq"]._replace(
        fields=[{"name": "text", "label": {"en": "Letters"}}],
        submit={"en": "Turn round", "ko": "뒤집기"},
        empty={"en": "Nothing yet."},
        groups=[],
        lines=FORMS["seq2seq"].lines[:1],
        settings=["beam_size", "min_length", "slide"],
        answer="large",
        best=2,
    )
    address, stop = served({"one": disguised(predictors["reverse"], form)}, ServeSettings())
    try:
        page.goto(address)
        playwright.expect(page.locator(".empty")).to_have_text("Nothing yet.")
        page.select_option("#language", "ko")
        playwright.expect(page.locator("#submit")).to_have_text("뒤집기")
        letters = page.get_by_label("Letters", exact=True)
        assert letters.evaluate("one => one.localName") == "input"
        page.click("#settings summary")
        assert page.locator("#fields input").evaluate_all("all => all.map(one => [one.name, one.type])") == [
            ["beam_size", "number"],
            ["min_length", "number"],
            ["slide", "checkbox"],
        ]
        letters.fill("abcdef")
        answered(page, "fedcba")
        playwright.expect(page.locator(".given")).to_have_text("fedcba")
        playwright.expect(page.locator(".others li")).to_have_count(1)
        page.fill("[name=beam_size]", "3")
        playwright.expect(page.locator(".others li")).to_have_count(2)
        assert page.locator(".line").count() == 1
        assert page.locator(".token[data-percent]").count() == 0
        assert page.locator(".heads h3").all_inner_texts() == ["크로스 어텐션"]
        with page.expect_request("**/v1/look") as asked:
            page.fill("[name=min_length]", "1")
        assert asked.value.post_data_json["settings"] == {"beam_size": 3, "min_length": 1}
        assert asked.value.post_data_json["best"] == 2
        playwright.expect(page.locator("#view")).to_have_attribute("aria-busy", "false")
        other = page.locator(".others li button").nth(1)
        text = other.inner_text()
        other.click()
        playwright.expect(page.locator(".given")).to_have_text(text)
        assert not page.wrong
    finally:
        stop()


def test_a_text_goes_on_token_by_token(studio, page):
    page.goto(f"{studio}/#model=letters")
    playwright.expect(page.locator("#submit")).to_have_text("Continue")
    playwright.expect(page.locator("#live-label")).to_be_hidden()
    page.fill("#field-text", "the quick")
    page.get_by_text("Decoding").click()
    for name, value in {"max_tokens": 24, "temperature": 0.5, "seed": 3, "top_p": 0.9}.items():
        page.fill(f"[name={name}]", str(value))
    with page.expect_request("**/v1/completions") as asked, page.expect_request("**/v1/look") as looked:
        page.keyboard.press("Control+Enter")
    body = asked.value.post_data_json
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 24, 3)
    written = looked.value.post_data_json["target"]
    assert len(written) == 24
    playwright.expect(page.locator(".heads")).to_be_visible()
    playwright.expect(page.locator(".line[data-of=query] .token")).to_have_count(8 + 24 + 1)
    assert page.locator(".line[data-of=query] .token[data-percent]").count() == 24 + 1
    assert page.locator(".line[data-of=input] .token.prompt").count() == 9
    playwright.expect(page.locator(".line[data-of=key]")).to_have_count(0)
    playwright.expect(page.locator("select[name=row]")).to_have_value("8")
    token(page, "query", "k").hover()
    lit = painted(page, "input")
    assert sum(weight**2 for weight in lit) == pytest.approx(1, abs=0.05)
    page.reload()
    playwright.expect(page.locator(".heads")).to_be_visible()
    assert page.locator(".line[data-of=query]").inner_text().replace("·", "").startswith("the quick")
    page.fill("[name=max_tokens]", "9999")
    page.click("#submit")
    playwright.expect(page.locator("#error")).to_contain_text("maximum context length is 64 tokens")
    assert page.wrong == ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]


def test_writing_can_be_stopped(predictors, page, monkeypatch):
    predictor = predictors["letters"]
    step = LanguageModel.step

    def slowly(self, tokens, state):
        time.sleep(0.15)
        return step(self, tokens, state)

    monkeypatch.setattr(LanguageModel, "step", slowly)
    address, stop = served({"letters": predictor}, ServeSettings())
    try:
        page.goto(f"{address}/#text=the quick&max_tokens=50&temperature=0")
        playwright.expect(page.locator(".written .token").nth(2)).to_be_visible()
        assert page.locator(".heads").count() == 0
        page.get_by_role("button", name="Stop").click()
        playwright.expect(page.locator(".heads")).to_be_visible()
        assert 3 < page.locator(".line[data-of=query] .token[data-percent]").count() < 45
        playwright.expect(page.locator("#stop")).to_be_hidden()
        assert not page.wrong
    finally:
        stop()


def test_another_answer_can_be_looked_at(studio, page):
    page.goto(f"{studio}/#model=reverse&text=abcdef&best=3&beam_size=4")
    answered(page, "fedcba")
    other = page.locator(".others li").nth(1).locator("button")
    text = other.inner_text()
    other.click()
    playwright.expect(page.locator(".others [aria-current=true] button")).to_have_text(text)
    playwright.expect(page.locator(".others li")).to_have_count(3)
    shown = page.locator(".line[data-of=query] .token:not(.special)").all_inner_texts()
    assert "".join(shown) == text != "fedcba"
    playwright.expect(page.locator(".others [aria-current=true] button")).to_be_focused()
    assert link(page)["answer"] == text
    page.reload()
    playwright.expect(page.locator(".others [aria-current=true] button")).to_have_text(text)
    page.locator(".others li").first.locator("button").click()
    playwright.expect(page.locator(".others [aria-current=true] button")).to_have_text("fedcba")
    assert not page.wrong


def test_long_texts_of_every_task(studio, page):
    """500 tokens: the page answers, and a hover is quick."""
    for name, text in {"classes": "rain " * 498, "span": STORY + " he" * 240}.items():
        asked = f"&question=Where is Mary?&context={text}" if name == "span" else f"&text={text}"
        page.goto("about:blank")
        page.goto(f"{studio}/#model={name}{asked}")
        playwright.expect(page.locator(".line.long .token").first).to_be_visible()
        assert page.locator(".line[data-of=key] .token").count() >= 490
        took = page.evaluate("""() => {
            const tokens = document.querySelectorAll(".line[data-of=key] .token"), start = performance.now();
            for (let index = 0; index < 20; index++) {
                tokens[index * 20].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
                document.body.getBoundingClientRect();
            }
            return (performance.now() - start) / 20;
        }""")
        assert took < 100, f"one hover takes {took:.0f} ms"
    assert not page.wrong


def test_the_keyboard_reaches_everything(studio, page):
    page.goto(f"{studio}/#model=reverse&text=abc")
    answered(page, "cba")
    page.wait_for_load_state("networkidle")  # what comes later would draw the words again
    token(page, "query", "c").focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator(".looks h3")).to_have_text("‘b’ looks at")
    page.keyboard.press("Enter")
    assert link(page)["row"] == "1"
    assert page.locator(".line[data-of=query] .token[tabindex='0']").count() == 1
    page.locator(".stage").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    playwright.expect(page.locator("#spoken")).to_contain_text("row 3 ‘a’ looks at column 2 ‘b’:")
    page.focus("#field-text")
    page.keyboard.press("End")
    page.locator("#live").uncheck()
    page.locator("#field-text").press_sequentially("d")
    page.keyboard.press("Control+Enter")
    answered(page, "dcba")
    assert not page.wrong


def test_settings_reach_the_server_and_the_link(studio, page):
    page.goto(f"{studio}/#model=reverse&text=abcdef&beam_size=3&best=2")
    answered(page, "fedcba")
    playwright.expect(page.locator(".others li")).to_have_count(2)
    assert link(page)["beam_size"] == "3"
    with page.expect_response(lambda one: '"sample":true' in (one.request.post_data or "")) as came:
        page.check("[name=sample]")
    assert came.value.request.post_data_json["settings"] == {"beam_size": 3, "sample": True}
    playwright.expect(page.locator("[name=beam_size]")).to_be_disabled()
    playwright.expect(page.locator("[name=temperature]")).to_be_enabled()
    page.wait_for_timeout(500)  # until the answer is shown, and its link
    page.evaluate("location.hash = '#model=reverse&text=abc'")
    answered(page, "cba")
    playwright.expect(page.locator("[name=sample]")).not_to_be_checked()


def test_light_and_dark(studio, page):
    page.goto(f"{studio}/#model=reverse&text=abc")
    answered(page, "cba")
    before = page.locator(".stage canvas").first.screenshot()
    page.click("#theme")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.locator(".stage canvas").first.screenshot() != before
    page.reload()
    answered(page, "cba")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert not page.wrong


def test_what_is_wrong_is_said(studio, page):
    page.goto(f"{studio}/#model=reverse&text={'a' * 300}")
    playwright.expect(page.locator("#error")).to_contain_text("this model takes at most 256")
    page.fill("#field-text", "ab")
    answered(page, "ba")
    playwright.expect(page.locator("#error")).to_be_hidden()
    page.context.set_offline(True)
    page.fill("#field-text", "abc")
    playwright.expect(page.locator("#error")).to_contain_text("The server does not answer")


def test_an_error_stands_beside_no_other_answer(studio, page):
    """What answers an earlier question goes, of whichever run it was; settings and the chosen map stay."""
    page.goto(f"{studio}/#model=reverse&text=ab")
    answered(page, "ba")
    page.fill("#field-text", "a" * 300)
    error = page.locator("#error")
    playwright.expect(error).to_contain_text("takes at most 256. Split it, or let whoever runs the model cut it")
    playwright.expect(page.locator("#view")).to_be_empty()
    assert "--set" not in error.inner_text()
    page.fill("#field-text", "ab")
    answered(page, "ba")
    page.select_option("#model", "letters")
    page.fill("#field-text", "the q")
    page.click("#submit")
    playwright.expect(page.locator(".heads")).to_be_visible()
    page.fill("#field-text", "the quick " * 30)
    page.click("#submit")
    playwright.expect(error).to_contain_text("maximum context length is 64 tokens")
    playwright.expect(page.locator("#view")).to_be_empty()
    page.fill("#field-text", "")
    page.click("#submit")
    playwright.expect(page.locator(".written .token").first).to_be_visible()
    playwright.expect(page.locator("#stop")).to_be_hidden()
    page.fill("#field-text", "a" * 300)
    page.select_option("#model", "reverse")
    playwright.expect(error).to_contain_text("has 300 tokens, this model takes at most 256")
    playwright.expect(page.locator("#view")).to_be_empty()
    assert {urlsplit(url).path for url in page.asked} >= {"/v1/look", "/v1/completions"}


def test_from_an_answer_to_a_run_that_continues(studio, page):
    """The view of the answer has ended: neither another width nor another theme draws it, and nothing is asked."""
    page.clock.install()
    page.goto(f"{studio}/#model=reverse&text=abcdef&calculator=true")
    playwright.expect(page.locator(".calculator table")).to_be_visible()
    page.fill("#field-text", "abcd")
    page.select_option("#model", "letters")
    playwright.expect(page.locator(".empty")).to_contain_text("Type a beginning")
    page.set_viewport_size({"width": 700, "height": 800})
    page.click("#theme")
    page.select_option("#language", "ko")
    page.clock.run_for(2000)  # what was typed for the other run is not asked of this one
    playwright.expect(page.locator(".empty")).to_contain_text("첫머리")
    assert not page.wrong
    assert not [url for url in page.asked if url.endswith("/v1/completions")]


def test_a_key_is_asked_for(predictors, page):
    address, stop = served(predictors, ServeSettings(keys=(KEY,)))
    try:
        page.goto(f"{address}/#text=abc")
        playwright.expect(page.locator("#key")).to_be_focused()
        page.fill("#key", KEY)
        page.keyboard.press("Tab")
        answered(page, "cba")
        playwright.expect(page.locator("#locked")).to_be_visible()
        assert KEY not in page.url
    finally:
        stop()


def test_a_key_loses_neither_the_link_nor_the_place(predictors, page):
    """Enter sends it; what the address asked for is done, and a later mistake does not bring the cursor back."""
    address, stop = served(predictors, ServeSettings(keys=(KEY,), max_characters=20))
    try:
        page.goto(f"{address}/#model=reverse&text=abcd&beam_size=2")
        playwright.expect(page.locator("#error")).to_have_text("This server wants an API key.")
        page.select_option("#language", "ko")
        assert link(page)["text"] == "abcd"
        page.fill("#key", "ключ")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#error")).to_contain_text("API 키에는")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        answered(page, "dcba")
        assert (link(page)["text"], link(page)["beam_size"]) == ("abcd", "2")
        page.fill("#field-text", "a" * 30)
        playwright.expect(page.locator("#error")).to_contain_text("20")
        playwright.expect(page.locator("#error")).to_have_attribute("lang", "en")
        playwright.expect(page.locator("#field-text")).to_be_focused()
        assert page.input_value("#key") == KEY
        page.fill("#field-text", "")
        playwright.expect(page.locator("#error")).to_be_hidden()
    finally:
        stop()


def test_links_of_what_is_gone(studio, page):
    """A run that is not served is named, and nothing is asked of another in its place; a map that is not there is the
    run's own instead."""
    page.goto(f"{studio}/#model=old&text=abc&map=gone&calculator=true")
    playwright.expect(page.locator("#error")).to_have_text("old is not served here. Choose a run, then ask.")
    assert link(page)["model"] == "old"
    assert page.locator(".others li").count() == 0
    page.goto(f"{studio}/#model=alibi&text=abc&map=gone&calculator=true")
    playwright.expect(page.locator(".calculator table")).to_be_visible()
    playwright.expect(page.locator("#error")).to_be_hidden()


def test_settings_that_are_not_round_or_turned_off(predictors, page, monkeypatch):
    """The button works though a field's step does not divide the run's own number, and what is off stays off."""
    tiny_settings = {"length_penalty": 0.65, "sample": True, "top_k": 5, "top_p": 0.925}
    one = copy.copy(predictors["reverse"])
    one.config = one.config.model_copy(update={"decode": one.config.decode.model_copy(update=tiny_settings)})
    address, stop = served({"one": one}, ServeSettings())
    try:
        page.goto(address)
        page.uncheck("#live")
        page.fill("#field-text", "abc")
        page.click("#submit")
        playwright.expect(page.locator(".line[data-of=query]")).to_be_visible()
        page.click("#settings summary")
        page.fill("[name=top_k]", "")
        page.fill("[name=temperature]", "")
        page.uncheck("[name=sample]")
        assert page.input_value("[name=temperature]") == "1"
        with page.expect_request("**/v1/look") as sent:
            page.click("#submit")
        assert sent.value.post_data_json["settings"] == {"sample": False, "top_k": 1000000}
        playwright.expect(page.locator("#view")).to_have_attribute("aria-busy", "false")
        page.reload()
        playwright.expect(page.locator(".line[data-of=query]")).to_be_visible()
        assert not page.is_checked("[name=sample]")
    finally:
        stop()


def test_pictures_and_numbers_can_be_kept(studio, page, tmp_path):
    page.goto(f"{studio}/#model=reverse&text=abc&hard=true")
    answered(page, "cba")
    found = {}
    for kind in ("PNG", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save as {kind}").click()
        download.value.save_as(tmp_path / kind)
        found[kind] = (tmp_path / kind).read_bytes()
    assert found["PNG"].startswith(b"\x89PNG")
    assert json.loads(found["JSON"])["text"] == {"source": "abc", "target": "cba"}


# --- the file that stands alone --------------------------------------------------------------------------------------


def pieces(text):
    """Words and their places, and the end."""
    found, start = [], 0
    for word in text.split(" "):
        found.append({"text": word, "start": start, "end": start + len(word)})
        start += len(word) + 1
    return [*found, {"text": "<eos>", "start": len(text), "end": len(text)}]


def tree_of(source, target, heads=2, layers=3):
    """A tree made by hand: every head looks along the diagonal, the second one backwards."""
    tokens = {"key": pieces(source), "query": pieces(target)}
    rows, columns = len(tokens["query"]), len(tokens["key"])
    near = np.exp(-0.5 * (np.arange(rows)[:, None] * columns / rows - np.arange(columns)) ** 2)
    weights = [near / near.sum(-1, keepdims=True), near[:, ::-1] / near.sum(-1, keepdims=True)][:heads]
    return {
        "version": 2,
        "kind": "transformer",
        "form": FORMS["seq2seq"]._asdict(),
        "text": {"source": source, "target": target},
        "tokens": {**tokens, "input": [{"text": "<bos>", "start": 0, "end": 0}, *tokens["query"][:-1]]},
        "scores": {"score": -1.0, "logprobs": [-0.1] * rows},
        "answers": [{"text": target, "score": -1.0}],
        "maps": [
            {
                "name": f"decoder.blocks.{layer}.cross_attention",
                "kind": "cross",
                "layer": layer,
                "rows": "query",
                "columns": "key",
                "shape": [heads, rows, columns],
                "entropy": [1.0] * heads,
                "distance": None,
                "packed": [base64.b64encode((255 * one).round().astype("uint8").tobytes()).decode() for one in weights],
                "pooled": None,
            }
            for layer in range(layers)
        ],
        "flags": ["repeats itself"],
    }


def test_a_file_of_500_tokens_opens_and_answers(page, tmp_path):
    text = " ".join(f"word{number}" for number in range(499))
    file = tmp_path / "long.html"
    file.write_text(make_page(tree_of(text, text)), encoding="utf-8")
    page.goto(f"{file.as_uri()}#head=0")
    token(page, "query", "word7").hover()
    playwright.expect(page.locator(".looks h3")).to_have_text("‘word7’ looks at")
    page.evaluate("""() => {
        const tokens = document.querySelectorAll(".line[data-of=query] .token");
        for (let index = 0; index < 20; index++)
            tokens[index * 20].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
    }""")
    assert page.locator("*").count() < 4000, "elements grow with the tokens, not with their pairs"
    lit = painted(page, "key")
    assert lit.index(max(lit)) == 380
    page.locator(".stage").hover()
    playwright.expect(page.locator(".tip")).to_contain_text("→ word")
    assert not page.wrong
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.asked)


def test_the_matrix_stays_in_sight_and_covers_nothing(page, tmp_path):
    """While the heads are scrolled, it stands beside them; it does not follow into the calculator."""
    file = tmp_path / "file.html"
    file.write_text(make_page(tree_of("one two three", "drei zwei eins", layers=9)), encoding="utf-8")
    page.goto(f"{file.as_uri()}#calculator=true")
    page.locator(".calculator .note").evaluate("note => { note.style.minHeight = '2000px'; }")
    for scrolled in (600, 1500):
        page.evaluate(f"scrollTo(0, {scrolled})")
        matrix, heads, calculator = (page.locator(part).bounding_box() for part in (".matrix", ".heads", ".calculator"))
        below = matrix["y"] + matrix["height"]
        assert 0 < matrix["y"] < 20 or below == pytest.approx(heads["y"] + heads["height"])
        assert below <= calculator["y"]


def test_hostile_text_stays_text(page, tmp_path):
    file = tmp_path / "hostile.html"
    file.write_text(make_page(tree_of(HOSTILE, HOSTILE[::-1])), encoding="utf-8")
    page.goto(file.as_uri())
    playwright.expect(page.locator(".flags")).to_have_text("repeats itself")
    assert page.locator(".line[data-of=key]").inner_text() == f"{HOSTILE}<eos>"
    assert page.title() == "regard"
    assert page.locator("img").count() == 0
    page.select_option("#language", "ko")
    playwright.expect(page.locator(".answer h2")).to_have_text("답")
    page.get_by_text("계산기").click()
    playwright.expect(page.locator(".calculator .note")).to_have_text("이 파일에는 이 맵의 벡터가 없습니다.")
    assert not page.wrong


def test_a_text_without_an_answer(page, tmp_path):
    """An encoder alone: one line, and what it looks at."""
    tree = tree_of("one two", "eins zwei")
    tokens = {"key": tree["tokens"]["key"], "query": [], "input": []}
    maps = [{**one, "kind": "self", "rows": "key", "columns": "key"} for one in tree["maps"]]
    alone = {"form": FORMS["embedding"]._asdict(), "tokens": tokens, "maps": maps}
    file = tmp_path / "encoder.html"
    alone |= {"text": {"source": "one two", "target": ""}, "answers": [{"text": "", "score": 0.0}]}
    alone |= {"scores": {"score": 0.0, "logprobs": []}, "flags": []}
    file.write_text(make_page({**tree, **alone}), encoding="utf-8")
    page.goto(file.as_uri())
    playwright.expect(page.locator(".line[data-of=key]")).to_be_visible()
    assert page.locator(".answer h2, .given, .others").count() == 0
    assert page.locator(".line").count() == 1
    token(page, "key", "two").hover()
    playwright.expect(page.locator(".looks h3")).to_have_text("‘two’ looks at")
    assert page.locator(".heads h3").all_inner_texts() == ["The text looks at itself"]
    assert not page.wrong


def test_a_model_without_attention_still_answers(page, tmp_path):
    file = tmp_path / "blind.html"
    file.write_text(make_page({**tree_of("one two", "eins zwei"), "maps": []}), encoding="utf-8")
    page.goto(file.as_uri())
    token(page, "query", "zwei").click()
    page.locator("h1").hover()
    playwright.expect(page.get_by_text("This model has no attention to look at.")).to_be_visible()
    assert not page.wrong


# --- long texts ------------------------------------------------------------------------------------------------------


def place_of(page, line, across):
    """Where a cell of the matrix is on the page."""
    place = page.evaluate("() => ({ ...document.getElementById('view').regard.matrix.place, values: null })")
    left, top, high, wide = (place[name] for name in ("left", "top", "high", "wide"))
    box = page.locator(".stage").bounding_box()
    return box["x"] + left + (across + 0.5) * wide, box["y"] + top + (line + 0.5) * high


def test_a_file_of_16384_tokens_shows_tiles_and_says_what_it_leaves_out(page, tmp_path):
    """Opened, moved in, zoomed into: no step hangs."""
    page.set_default_timeout(120_000)
    look(long_predictor("encoder", "bigbird"), long_text(LONG)).save(tmp_path / "long.html")
    page.goto((tmp_path / "long.html").as_uri())
    window = page.locator(".window[data-of=key]")
    playwright.expect(window).to_have_text("‹ Tokens 1–300 of 16,384; the others are left out here. ›", timeout=120_000)
    playwright.expect(page.locator(".matrix > .note")).to_contain_text("Tiles of 128 × 128 weights")
    playwright.expect(page.locator(".legend")).to_contain_text("not seen")
    playwright.expect(page.locator(".looks .note")).to_have_text(
        re.compile(r"^Of each head the \d+ largest of 16,384; \d+\.\d % of the weight is elsewhere\.$")
    )
    assert page.locator("*").count() < 3000
    page.mouse.move(*place_of(page, 64, 64))
    playwright.expect(page.locator(".tip")).to_contain_text("rows 8,193–8,320 look at columns 8,193–8,320: at most")
    page.mouse.click(*place_of(page, 64, 64))
    playwright.expect(page.locator(".matrix > .note")).to_contain_text(
        "Rows 8,193–8,320 and columns 8,193–8,320 of 16,384 × 16,384."
    )
    playwright.expect(page.locator(".matrix > .note")).to_contain_text("largest weights of each row are here")
    assert link(page)["zoom"] == "8192,8192"
    row = int(link(page)["row"])
    assert 8192 <= row < 8320
    assert page.locator(".line[data-of=key] .token.asked").get_attribute("data-index") == str(row)
    page.mouse.click(*place_of(page, 20, 20))
    assert link(page)["row"] == str(8192 + 20)
    playwright.expect(page.locator("input[name=row]")).to_have_value(str(8193 + 20))
    page.get_by_role("button", name="Later tokens").click()
    assert "of 16,384" in window.inner_text()
    assert page.locator(".line[data-of=key] .token.asked").count() == 0
    page.locator(".stage").focus()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("button", name="Whole map")).to_be_hidden()
    page.fill("input[name=row]", "12000")
    page.keyboard.press("Tab")
    playwright.expect(page.locator(".token.asked")).to_have_attribute("data-index", "11999")
    page.locator(".looks li button").first.click()
    page.select_option("#language", "ko")
    playwright.expect(page.locator(".looks .note")).to_contain_text("다른 곳에 있습니다")
    assert not page.wrong


def test_the_studio_looks_into_16384_tokens(page):
    """By the server: first the pictures of all maps, then the largest weights of the one that is shown."""
    page.set_default_timeout(120_000)
    predictors = {"slots": long_predictor("classifier", "linformer"), "window": long_predictor("encoder", "window")}
    address, stop = served(predictors, ServeSettings(max_characters=20_000))
    try:
        page.goto(f"{address}/#model=slots")
        page.fill("#field-text", long_text(LONG))
        playwright.expect(page.locator(".others li").first).to_be_visible(timeout=120_000)
        groups = page.locator(".heads h3")
        playwright.expect(groups.first).to_have_text("What each of Linformer’s slots gathers")
        playwright.expect(groups.nth(1)).to_have_text("Tokens look at Linformer’s slots")
        page.get_by_role("button", name="Tokens look at Linformer’s slots · Layer 1, head 1").click()
        playwright.expect(page.locator(".looks li").first).to_contain_text("slot", timeout=120_000)
        playwright.expect(page.locator(".looks h3")).to_have_text("‘<bos>’ looks at")
        page.get_by_text("Calculator").click()
        playwright.expect(page.locator(".calculator tbody tr")).to_have_count(16, timeout=120_000)
        page.select_option("#model", "window")
        playwright.expect(page.locator(".looks .note")).to_contain_text("of 16,384", timeout=120_000)
        assert page.locator("*").count() < 3000
    finally:
        stop()
    assert not page.wrong
