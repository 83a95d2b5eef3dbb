"""Every kind of text by every road: the command line, Python, HTTP in each content type, each engine, alone and in a
batch. The answer of a model of bytes changes with every byte it reads; by every road, it must be the same."""

import json
import re
import unicodedata
from urllib.parse import quote

import httpx
import pytest
from random_runs import drawn
from serving import live

import regard

TEXTS = [
    "fünfundzwanzig Äpfel, ß",
    "\ufeffa\u202eb\u200bc",
    "나는 학교에 갑니다.",
    "👩‍👩‍👧 sind 😀",
    unicodedata.normalize("NFD", "fünf 각 é"),
    "1+1=2 & 100% ; %41 a+b c&d=e %",
    "%C3%BC is not ü",
    "\"a\" 'b' <c> \\d \\u00fc",
    "a\x01b\x7fc",
    "Straße " * 400 + "!",
]
LINES = "erste Zeile\n  zweite Zeile\r\n\nüber\n"
DECODE = [f"decode.{change}" for change in ("beam_size=1", "max_extra=20", "max_ratio=0.0", "min_length=12")]
DECODE.append("decode.no_repeat_ngram=1")  # else it says one thing for ever, whatever it reads
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    changes = ("text.source.kind=byte", "text.source.normalize=none", "text.max_length=6000")
    return drawn(tmp_path_factory.mktemp("roads") / "run", "transformer", *changes)


@pytest.fixture(scope="module")
def predictor(run):
    return regard.load(run, [*DECODE, "text.languages=['de','en']"], "cpu", "torch")


@pytest.fixture(scope="module")
def wanted(predictor):
    """The answer to each text, asked alone; no two are the same, so that a text which arrives changed is noticed."""
    answers = [predictor(text) for text in TEXTS]
    assert len(set(answers)) == len(TEXTS)
    return answers


@pytest.fixture(scope="module")
def client(predictor, tiny_run):
    models = {"run": predictor, "letters": regard.load(tiny_run, ["text.languages=['ko','en']"], "cpu")}
    with live(models) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def raw_form(fields):
    """As `curl -d q=fünf` sends it: UTF-8, percent-encoded only where a sign has a meaning of its own."""
    pairs = (f"{name}={re.sub('[%&+]', lambda sign: quote(sign[0]), text)}" for name, text in fields.items())
    return {"content": "&".join(pairs).encode(), "headers": FORM}


def raw_json(fields):
    return {"content": json.dumps(fields, ensure_ascii=False).encode(), "headers": {"content-type": "application/json"}}


ROADS = {
    "raw form": raw_form,
    "percent-encoded form": lambda fields: {"data": fields},
    "query": lambda fields: {"params": fields},
    "multipart": lambda fields: {"files": {name: (None, text) for name, text in fields.items()}},
    "raw json": raw_json,
    "escaped json": lambda fields: {"content": json.dumps(fields), "headers": {"content-type": "application/json"}},
}


@pytest.mark.parametrize("road", ROADS)
def test_translate(client, predictor, wanted, road):
    for text, answer in zip(TEXTS, wanted, strict=True):
        fields = {"q": text, "source": "de", "target": "en"}
        assert client.post("/translate", **ROADS[road](fields)).json()["translatedText"] == answer
    fields = {"q": LINES, "source": "de", "target": "en"}
    one, two, four = (predictor(line) for line in ("erste Zeile", "zweite Zeile", "über"))
    assert client.post("/translate", **ROADS[road](fields)).json()["translatedText"] == f"{one}\n  {two}\r\n\n{four}\n"


@pytest.mark.parametrize("road", ROADS)
def test_detect(client, road):
    for text in [*TEXTS, LINES]:
        guesses = client.post("/detect", json={"q": text}).json()
        assert client.post("/detect", **ROADS[road]({"q": text})).json() == guesses
    umlaut, letters = (client.post("/detect", json={"q": text}).json() for text in ("ü" * 9, "a" * 9))
    assert umlaut != letters


def test_predict(client, predictor, wanted):
    """Alone and in a batch, with line breaks as any other letter."""
    for body, answers in (({"texts": TEXTS}, wanted), ({"text": LINES}, [predictor(LINES)])):
        for road in ("raw json", "escaped json"):
            found = client.post("/v1/predict", **ROADS[road](body)).json()["answers"]
            assert [first["text"] for first, *_ in found] == answers
    for text, answer in zip(TEXTS, wanted, strict=True):
        assert client.post("/v1/predict", json={"text": text}).json()["answers"][0][0]["text"] == answer


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_command_line_and_python(run, wanted, typed, engine):
    """Both engines; a line is a text."""
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    other = regard.load(run, DECODE, "cpu", engine)
    assert [other(text) for text in TEXTS] == other(TEXTS) == wanted
    words = ["predict", run, "--json", "--engine", engine, "--device", "cpu"]
    for change in DECODE:
        words += ["--set", change]
    status, out, _ = typed(*words, text="\n".join(TEXTS) + "\n")
    assert (status, [json.loads(line)[0]["text"] for line in out.splitlines()]) == (0, wanted)


def test_what_is_no_utf8_is_refused(client):
    """Rather than guessed at: it may be any text."""
    latin, words = "q=fünf&source=de&target=en".encode("latin-1"), "UTF-8"
    boundary = {"content-type": "multipart/form-data; boundary=x"}
    part = '--x\r\nContent-Disposition: form-data; name="q"\r\n\r\nfünf\r\n--x--\r\n'.encode("latin-1")
    for response in (
        client.post("/translate", content=latin, headers=FORM),
        client.post("/translate", content=b"q=f%FCnf&source=de&target=en", headers=FORM),
        client.post("/translate?q=f%FCnf&source=de&target=en"),
        client.post("/detect", content=part, headers=boundary),
    ):
        assert response.status_code == 400
        assert words in response.json()["error"]


def test_unfinished_forms_are_refused(client):
    """A multipart form that breaks off would lose its last field in silence."""
    boundary = {"content-type": "multipart/form-data; boundary=x"}
    fields = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in {"q": "<b>a</b>", "source": "de", "target": "en", "format": "html"}.items()
    )
    whole = client.post("/translate", content=fields + "--x--\r\n", headers=boundary)
    assert whole.json()["translatedText"].startswith("<b>")
    for end in ("", "--x", "--x\r\n"):
        response = client.post("/translate", content=(fields + end).removesuffix("l\r\n"), headers=boundary)
        assert (response.status_code, response.json()) == (
            400,
            {"error": "the form breaks off: its last boundary is missing."},
        )
