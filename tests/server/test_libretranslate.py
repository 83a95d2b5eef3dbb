"""The LibreTranslate protocol: its real clients, its forms and errors, documents, languages."""

import time
import urllib.error
from types import SimpleNamespace

import httpx
import pytest
from deep_translator import LibreTranslator
from deep_translator.exceptions import AuthorizationException, ServerException
from hypothesis import given
from hypothesis import strategies as st
from libretranslatepy import LibreTranslateAPI
from saying import saying
from serving import live

import regard
from regard.config.text import Tokenization
from regard.data.vocabulary import Vocabulary
from regard.server.libretranslate import Segment, detect_language, fill_document, language_name, split_document
from regard.server.service import Service
from regard.server.settings import ServeSettings


@pytest.fixture(scope="module")
def predictors(tiny_run):
    pairs = {"tiny": ("en", "de"), "back": ("ko", "en"), "other": ("en", "de")}
    return {name: regard.load(tiny_run, [f"text.languages={list(pair)}"], device="cpu") for name, pair in pairs.items()}


@pytest.fixture(scope="module")
def url(predictors):
    with live(predictors) as server:
        yield server.url


@pytest.fixture(scope="module")
def locked(predictors):
    with live(predictors, keys=("sesame",)) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def answer(predictors):
    return predictors["tiny"]


def test_keys_may_come_in_a_header(locked):
    body = {"q": "abc", "source": "en", "target": "de"}
    for header, status in {"Bearer sesame": 200, "bearer sesame": 200, "sesame": 401, "Bearer": 401, "": 401}.items():
        assert httpx.post(f"{locked}/translate", json=body, headers={"Authorization": header}).status_code == status


# --- the clients that people have ------------------------------------------------------------------------------------


def test_libretranslatepy(url, answer):
    api = LibreTranslateAPI(url)
    assert api.translate("abca", "en", "de") == answer("abca")
    assert [language["code"] for language in api.languages()] == ["en", "de", "ko"]
    assert api.languages()[0] == {"code": "en", "name": "English", "targets": ["de"]}
    assert {guess["language"] for guess in api.detect("abc")} == {"en", "ko"}
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        api.translate("abc", "en", "fr")
    assert refused.value.read() == b'{"error": "fr is not supported"}'


def test_libretranslatepy_with_a_key(locked, answer):
    assert LibreTranslateAPI(locked, "sesame").translate("abc", "en", "de") == answer("abc")
    assert LibreTranslateAPI(locked, "sesame").detect("abc")
    assert LibreTranslateAPI(locked, "wrong").languages()
    for key, status in (("wrong", "403"), (None, "401")):
        with pytest.raises(urllib.error.HTTPError, match=status) as refused:
            LibreTranslateAPI(locked, key).translate("abc", "en", "de")
        refused.value.close()


def test_deep_translator(url, answer):
    translator = LibreTranslator(source="en", target="de", api_key="any", custom_url=f"{url}/")
    assert translator.translate("abca & ü?") == answer("abca & ü?")
    assert translator.translate_batch(["ab", "c"]) == [answer("ab"), answer("c")]
    with pytest.raises(ServerException):
        LibreTranslator(source="de", target="ko", api_key="any", custom_url=f"{url}/").translate("abc")


def test_deep_translator_with_a_key(locked, answer):
    translator = LibreTranslator(source="en", target="de", api_key="sesame", custom_url=f"{locked}/")
    assert translator.translate("abc") == answer("abc")
    with pytest.raises(AuthorizationException):
        LibreTranslator(source="en", target="de", api_key="wrong", custom_url=f"{locked}/").translate("abc")


# --- /translate ------------------------------------------------------------------------------------------------------


def body(q, **more):
    return {"q": q, "source": "en", "target": "de", **more}


def test_json_form_multipart_and_query_say_the_same(client, answer):
    want = {"translatedText": answer("abc")}
    got = client.post("/translate", json=body("abc")).json()
    assert {name: value for name, value in got.items() if name != "flags"} == want
    assert client.post("/translate", data=body("abc")).json() == got
    assert client.post("/translate", params=body("abc")).json() == got
    parts = {name: (None, value) for name, value in body("abc").items()}
    assert client.post("/translate", files=parts).json() == got


def test_lists_and_alternatives():
    """Other answers come beside the best, each once; an empty text has none; a text alone has no list around it."""
    told = {"abc": ["x", "y", "x", "z"], "dd": ["u", "v", "w", "t"]}
    with live({"told": saying(told.__getitem__, "text.languages=['en','de']")}) as server:
        client = httpx.Client(base_url=server.url, timeout=30)
        got = client.post("/translate", json=body(["abc", "", "dd"], alternatives=3)).json()
        assert (got["translatedText"], got["alternatives"]) == (["x", "", "u"], [["y", "z"], [], ["v", "w", "t"]])
        one = client.post("/translate", data=body("dd", alternatives="2")).json()
        assert (one["translatedText"], one["alternatives"]) == ("u", ["v", "w"])
        several = client.post("/translate", data={**body("x"), "q": ["abc", "dd"]}).json()
        assert several == {"translatedText": ["x", "u"]}
        client.close()


def test_flags_stand_at_their_own_text():
    told = {"abc": ["no no no no "], "dd": ["v"]}
    with live({"told": saying(told.__getitem__, "text.languages=['en','de']")}) as server:
        got = httpx.post(f"{server.url}/translate", json=body(["dd", "abc"]), timeout=30).json()
    assert got["flags"] == [[], ["repeats 'no' 4 times in a row"]]


def test_lines_are_translated_one_by_one(client, answer):
    got = client.post("/translate", json=body("abc\n\n  dd \r\n")).json()
    assert got["translatedText"] == f"{answer('abc')}\n\n  {answer('dd')} \r\n"


def test_auto_and_models(client, answer):
    got = client.post("/translate", json=body("abc", source="auto")).json()
    assert got["translatedText"] == answer("abc")
    assert got["detectedLanguage"] == {"confidence": 100.0, "language": "en"}
    got = client.post("/translate", json=body(["abc"], source="auto", target="en", model="back")).json()
    assert got["detectedLanguage"] == [{"confidence": 100.0, "language": "ko"}]
    assert client.post("/translate", json=body("abc", model="other")).status_code == 200


WRONG = [
    (body(""), 400, "Invalid request: missing q parameter"),
    (body([]), 400, "Invalid request: missing q parameter"),
    (body(None), 400, "Invalid request: missing q parameter"),
    ({"q": "a", "target": "de"}, 400, "Invalid request: missing source parameter"),
    ({"q": "a", "source": "en"}, 400, "Invalid request: missing target parameter"),
    (body(5), 400, "Invalid request: parameter q: input should be a valid string."),
    (body([["a"]]), 400, "Invalid request: parameter q: "),
    (body("a", format="xml"), 400, "Invalid request: parameter format: input should be 'text' or 'html'."),
    (body("a", alternatives=-1), 400, "Invalid request: parameter alternatives: "),
    (body("a", alternatives=10**40), 400, "Invalid request: parameter alternatives: "),
    (body("a", alternatives="many"), 400, "Invalid request: parameter alternatives: "),
    (body("a", target="xx"), 400, "xx is not supported"),
    (body("a", source="xx"), 400, "xx is not supported"),
    (body("a", source="auto", target="xx"), 400, "xx is not supported"),
    (body("a", source="de", target="en"), 400, "en is not available as a target language from de"),
    (body("a", model="../tiny"), 404, "no model is named '../tiny'. Did you mean tiny?"),
    (body("a", model="back"), 400, "back translates ko to en, not en to de"),
    (body(["a"] * 1000), 413, "1,000 texts came, at most 100 are taken at once."),
    (body("a" * 5001), 413, "text 1 has 5,001 characters"),
    (body("a\n" * 300), 413, "the request holds 300 pieces of text, at most 256 are taken."),
]


@pytest.mark.parametrize(("sent", "status", "words"), WRONG)
def test_what_is_wrong(client, sent, status, words):
    response = client.post("/translate", json=sent)
    assert response.status_code == status
    assert response.json()["error"].startswith(words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "the body is not JSON: "),
        (b"[]", "the body is a JSON list, expected an object with q."),
        (b"[" * 100_000, "the body is not JSON: "),
        (b'{"q": "a\0"}', "the body is not JSON: "),
        (b'{"q": "\\ud800", "source": "en", "target": "de"}', "Invalid request: parameter q: a lone surrogate at 0"),
        (b'{"q": "a", "source": "\\ud800", "target": "de"}', "? is not supported"),
        (b'{"q": %s}' % (b"1" * 5000), "the body is not JSON: "),
    ],
)
def test_bytes_that_are_wrong(client, raw, words):
    response = client.post("/translate", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"].startswith(words)


def test_what_is_odd_but_right(client):
    for text in ("a\0b", " ", "\u2028", "😀"):
        assert client.post("/translate", json=body(text)).status_code == 200
    assert client.post("/translate", json=body("a", unknown=[1])).status_code == 200
    assert client.post("/translate", data=body("a"), files={"q": b"a"}).status_code == 400
    broken = client.post("/translate", content=b"--x", headers={"content-type": "multipart/form-data"})
    assert (broken.status_code, list(broken.json())) == (400, ["error"])


# --- documents and languages -----------------------------------------------------------------------------------------


def upper(document, form):
    """A document with its texts in capitals."""
    return "".join(piece.raw.upper() if piece.is_text else piece.raw for piece in split_document(document, form))


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        ("<p>one</p>", "<p>ONE</p>"),
        ('<a title="x > y" href=z>one</a> two<br/>', '<a title="x > y" href=z>ONE</a> TWO<br/>'),
        ("<script>if (a<b) c()</script>d", "<script>if (a<b) c()</script>D"),
        ("<style>p{}</style><!-- no -->\n<b>yes</b>", "<style>p{}</style><!-- no -->\n<b>YES</b>"),
        ("<!DOCTYPE html><title>one</title>", "<!DOCTYPE html><title>ONE</title>"),
        ("a < b &amp; c", "A < B &AMP; C"),
        ("<SCRIPT src='>'>x</script >y<![CDATA[z]]><?php z ?>", "<SCRIPT src='>'>x</script >Y<![CDATA[z]]><?php z ?>"),
        ("<scripted>x", "<scripted>X"),
        ("x <!-- never closed", "X <!-- never closed"),
        ("no tags <", "NO TAGS <"),
        ("", ""),
    ],
)
def test_tags_stay_as_they_are(document, wanted):
    assert upper(document, "html") == wanted


@given(st.text("<>/!-?ab&;#'\" \n=") | st.text())
def test_pieces_make_up_the_document(document):
    for form in ("text", "html"):
        assert "".join(piece.raw for piece in split_document(document, form)) == document


@pytest.mark.parametrize("bad", ["<!--", '<a"', "<a ", "</", "<![", "&#", "<a b='", "<script>", "<style ", "a\n"])
def test_splitting_does_not_backtrack(bad):
    began = time.perf_counter()
    split_document((bad * 20_000)[:20_000], "html")
    assert time.perf_counter() - began < 10  # what backtracks takes minutes


def test_signs_alone_are_not_translated():
    assert [piece.is_text for piece in split_document("<b>a</b>.", "html")] == [False, True, False, False]
    assert split_document(".", "text") == [Segment(".", True)]


def test_entities_are_what_they_stand_for():
    assert upper("<p>&nbsp;</p>", "html") == "<p>&nbsp;</p>"
    assert upper("<b>&copy; &raquo;</b>&nbsp; a&nbsp;b&#160;\n", "html") == (
        "<b>&copy; &raquo;</b>&nbsp; A&NBSP;B&#160;\n"
    )
    assert [piece.is_text for piece in split_document("&eacute;", "html")] == [True]


def test_text_is_one_piece_across_entities():
    assert split_document("<b> a &lt; b </b>", "html")[2] == Segment("a &lt; b", True)


def test_html_is_read_and_written(client, answer):
    got = client.post("/translate", json=body("<p>a&amp;b</p>", format="html")).json()
    assert got["translatedText"] == f"<p>{answer('a&b').replace('<', '&lt;')}</p>"
    assert got["translatedText"].count("<unk>") == 0
    assert fill_document(["<b>", "</b>"], 0, "html") == "<b></b>"


def test_detection(client, predictors):
    found = client.post("/detect", json={"q": "abc"}).json()
    assert sum(guess["confidence"] for guess in found) == pytest.approx(100, abs=0.2)
    assert client.post("/detect", json={}).json() == {"error": "Invalid request: missing q parameter"}


def speaker(letters, source, target):
    """As much of a predictor as a guess needs."""
    vocabulary = Vocabulary.learn([letters], Tokenization(kind="char"))
    config = SimpleNamespace(text=SimpleNamespace(languages=(source, target)))
    return SimpleNamespace(source=vocabulary, config=config, task=SimpleNamespace(protocols={"libretranslate"}))


def test_a_language_is_guessed_by_what_its_vocabulary_knows():
    """A letter that is unknown costs four tokens; the cost of a text is that by character, and the shares of languages
    are its fourth powers."""
    known = {"en": speaker("abc", "en", "de"), "ru": speaker("абв", "ru", "de"), "cs": speaker("abc", "cs", "ko")}
    service = Service(known, ServeSettings())
    costs = {"en": 1.0, "ru": (1 + 4 * 3) / (1 + 3), "cs": 1.0}
    for target, names in ((None, ["en", "cs", "ru"]), ("de", ["en", "ru"]), ("ko", ["cs"]), ("fr", [])):
        total = sum(costs[name] ** -4 for name in names)
        wanted = [{"confidence": round(100 * costs[name] ** -4 / total, 1), "language": name} for name in names]
        assert detect_language(service, "abc", target) == wanted


def test_language_names():
    assert [language_name(code) for code in ("de", "ko", "pt-BR", "source", "x" * 99)] == [
        "German",
        "Korean",
        "Portuguese (Brazil)",
        "source",
        "x" * 99,
    ]


def test_a_model_reads_what_html_means():
    with live({"told": saying(lambda text: [text.replace("e", "a")], "text.languages=['en','de']")}) as server:
        html = {"q": "<p>b&#101;e</p>", "source": "en", "target": "de", "format": "html"}
        assert httpx.post(f"{server.url}/translate", json=html, timeout=30).json()["translatedText"] == "<p>baa</p>"
