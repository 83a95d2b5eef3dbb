"""OpenAI's protocol: the official client against a running server, and the rules by which text is sent."""

import json
import math
import socket
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import language_run, live, wait_until

import regard
from regard.config.text import Tokenization
from regard.data.vocabulary import BOS, EOS, Vocabulary
from regard.inference.ctranslate2_engine import CTranslate2Engine
from regard.inference.engine import TorchEngine
from regard.inference.predictor import Predictor
from regard.server.completions import Choice, CompletionBody, Prompt, held_back, write_choices
from regard.tasks.language_model import LanguageModel

KOREAN = "안녕하세요. 나는 학교에 갑니다. 저 숲에 새가 있다.\n" * 40
ENGLISH = "the quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def predictors(tmp_path_factory, tiny_run):
    folder = tmp_path_factory.mktemp("language")
    return {
        "turn": regard.load(tiny_run, device="cpu"),
        "letters": language_run(folder / "letters", ENGLISH, "char", add_bos=False),
        "bytes": language_run(folder / "bytes", KOREAN, "byte", steps=400),
        "words": language_run(folder / "words", ENGLISH, "bpe", steps=20, positions="rotary"),
    }


@pytest.fixture(scope="module")
def server(predictors):
    with live(predictors) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(client, **body):
    """The text of every choice of a stream, its finishes, its tokens and its usage."""
    texts, finishes, tokens, usage = {}, {}, {}, None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes[choice.index] = choice.finish_reason
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
    return texts, finishes, tokens, usage


# --- the official client ---------------------------------------------------------------------------------------------


def test_models(client):
    found = client.models.list().data
    assert [model.id for model in found] == ["turn", "letters", "bytes", "words"]
    assert {model.object for model in found} == {"model"}
    assert all(model.created > 1_700_000_000 and model.owned_by == "regard" for model in found)
    assert [model.task for model in found] == ["translate", "continue", "continue", "continue"]
    assert client.models.retrieve("bytes").id == "bytes"
    with pytest.raises(openai.NotFoundError, match="no model is named 'byte'"):
        client.models.retrieve("byte")


def test_a_greedy_completion_is_the_models(client, predictors):
    predictor = predictors["letters"]
    settings = predictor.config.decode.model_copy(update={"beam_size": 1, "max_ratio": 0.0, "max_extra": 20})
    want = predictor.predict(["the qu"], settings=settings)[0][0].text
    found = client.completions.create(model="letters", prompt="the qu", max_tokens=20, temperature=0)
    assert found.object == "text_completion"
    assert found.model == "letters"
    assert found.choices[0].text == want
    assert found.choices[0].finish_reason == "length"
    assert found.usage.to_dict() == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}


def test_a_prompt_is_counted_once(client):
    body = {"model": "letters", "prompt": ["the", "lazy"], "n": 3, "max_tokens": 2, "temperature": 0}
    usage = client.completions.create(**body).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3 + 4, 2 * 3 * 2)
    assert streamed(client, **body)[3] == usage


def test_defaults(client):
    found = client.completions.create(model="letters", prompt="")
    assert found.usage.completion_tokens <= 16
    assert found.usage.prompt_tokens == 1  # what begins a document
    texts = {client.completions.create(model="letters", prompt="t", temperature=2).choices[0].text for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("model", ["letters", "bytes", "words"])
def test_streaming_equals_not_streaming(client, model):
    body = {"model": model, "prompt": ["the quick", "나는 "], "max_tokens": 30, "n": 2, "seed": 5, "temperature": 0.9}
    found = client.completions.create(**body, logprobs=1)
    texts, finishes, tokens, usage = streamed(client, **body, logprobs=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice in found.choices:
        assert texts[choice.index] == choice.text
        assert finishes[choice.index] == choice.finish_reason
        assert tokens[choice.index] == choice.logprobs.tokens
    assert usage == found.usage
    again = client.completions.create(**body)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]
    assert len({choice.text for choice in found.choices}) > 2


def test_korean_streams_whole_characters(client):
    """A Korean letter is three tokens here, and each chunk a whole letter; one that the limit cuts is left out."""
    body = {"model": "bytes", "prompt": "안녕", "temperature": 0, "logprobs": 0}
    texts, _, tokens, usage = streamed(client, **body, max_tokens=40)
    assert texts[0].startswith("하세요")
    assert "\ufffd" not in texts[0]
    assert usage.completion_tokens == len(tokens[0]) == 40
    assert streamed(client, **body, max_tokens=5)[0] == {0: "하"}
    assert client.completions.create(**body, max_tokens=5).choices[0].text == "하"
    assert streamed(client, **body, max_tokens=40, stop=["세요"])[0] == {0: "하"}


def test_a_word_goes_on_where_the_prompt_ends(client):
    found = client.completions.create(model="words", prompt="the quick brown", max_tokens=3, temperature=0)
    echoed = client.completions.create(model="words", prompt="the quick brown", max_tokens=3, temperature=0, echo=True)
    assert echoed.choices[0].text == "the quick brown" + found.choices[0].text


def test_logprobs_are_the_models(client, predictors):
    """Of a prompt and its continuation: those of one pass over both."""
    for name in ("letters", "words"):
        predictor = predictors[name]
        body = {"model": name, "prompt": "the lazy", "max_tokens": 8, "temperature": 0}
        choice = client.completions.create(**body, logprobs=3, echo=True).choices[0]
        found = choice.logprobs
        ids = [*([BOS] if name == "words" else []), *predictor.source.encode("the lazy").ids]
        written = client.completions.create(**body).choices[0].text
        whole = [*ids, *predictor.task.prefix_ids(*predictor.encode(["the lazy"]), written)]
        row = torch.tensor([whole])
        with torch.inference_mode():
            logits = predictor.model.output(predictor.model.decoder(predictor.model.source_embedding(row[:, :-1]))[0])
            want = logits.log_softmax(-1).gather(2, row[:, 1:, None]).flatten().tolist()
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
        given = [logprob for logprob in found.token_logprobs if logprob is not None]
        assert given == pytest.approx(want, abs=1e-4)
        assert (found.token_logprobs[0] is None) == (name == "letters")
        assert "".join(found.tokens) == choice.text == "the lazy" + written
        assert [
            choice.text[place:].startswith(token) for token, place in zip(found.tokens, found.text_offset, strict=True)
        ]
        for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
            assert top[token] == logprob
            assert 3 <= len(top) <= 4
            assert sum(map(math.exp, top.values())) <= 1.001
        assert all(
            max(top.values()) == top[token]
            for token, top in zip(found.tokens[-8:], found.top_logprobs[-8:], strict=True)
        )


def test_logprobs_of_a_prompt_alone(client):
    found = client.completions.create(model="letters", prompt="fox", max_tokens=0, echo=True, logprobs=0).choices[0]
    assert (found.text, found.finish_reason) == ("fox", "length")
    assert found.logprobs.tokens == ["f", "o", "x"]
    assert found.logprobs.text_offset == [0, 1, 2]
    assert found.logprobs.top_logprobs is None


def test_stops(client):
    body = {"model": "letters", "prompt": "the quick", "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**body).choices[0].text
    stop = plain[5:9]
    for stops in (stop, [stop], ["not there", stop, "nor this"]):
        found = client.completions.create(**body, stop=stops, logprobs=0).choices[0]
        assert (found.text, found.finish_reason) == (plain[: plain.index(stop)], "stop")
        assert "".join(found.logprobs.tokens) == found.text
        texts, finishes, _, _ = streamed(client, **body, stop=stops)
        assert (texts[0], finishes[0]) == (found.text, "stop")
    with_end = [plain[-2:] + "!", "zzz"]  # the beginning of a stop at the end is text after all
    assert streamed(client, **body, stop=with_end)[0][0] == plain
    assert client.completions.create(**body, stop=with_end).choices[0].text == plain


def test_token_ids_are_taken(client, predictors):
    ids = predictors["letters"].source.encode("the qu").ids
    by_text, by_ids = (
        client.completions.create(model="letters", prompt=prompt, max_tokens=9, temperature=0).choices[0].text
        for prompt in ("the qu", ids)
    )
    assert by_text == by_ids
    both = client.completions.create(model="letters", prompt=[ids, ids[:3]], max_tokens=3, temperature=0, echo=True)
    assert [choice.text[:3] for choice in both.choices] == ["the", "the"]
    with pytest.raises(openai.BadRequestError, match="token 5000 is not in the vocabulary"):
        client.completions.create(model="letters", prompt=[5000])


def test_a_prompt_may_fill_the_context(client, predictors):
    """<bos> is counted once: the text and its own ids are taken or refused alike."""
    ids, most = predictors["words"].encode(["the"])[0].ids, predictors["words"].config.text.max_length
    assert ids[0] == 2
    for prompt in ("the", ids):
        client.completions.create(model="words", prompt=prompt, max_tokens=most - len(ids))
        with pytest.raises(openai.BadRequestError, match=rf"requested {most + 1} tokens \({len(ids)} in your prompt"):
            client.completions.create(model="words", prompt=prompt, max_tokens=most - len(ids) + 1)


def test_penalties_push_repeats_away(client):
    body = {"model": "letters", "prompt": "the ", "max_tokens": 25, "temperature": 0}
    plain, pushed = (
        client.completions.create(**body, presence_penalty=p, frequency_penalty=p).choices[0].text for p in (0, 2)
    )
    assert len(set(pushed)) > len(set(plain))


def test_every_engine_writes_the_same(client, predictors):
    """Completions are always written by our own engine, whichever answers the other questions."""
    pytest.importorskip("ctranslate2")
    fast = predictors["letters"]
    assert isinstance(fast.engine, CTranslate2Engine)
    with live({"letters": Predictor(fast.task, fast.model, TorchEngine(fast.task, fast.model))}) as server:
        other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"model": "letters", "prompt": "the quick", "max_tokens": 12}
        assert streamed(other, **body, temperature=0)[0] == streamed(client, **body, temperature=0)[0]
        two = other.completions.create(**body, temperature=1.5, seed=1, n=2, logprobs=0)
        assert len({choice.text for choice in two.choices}) == 2
        assert sum(len(choice.logprobs.tokens) for choice in two.choices) == two.usage.completion_tokens > 12
        found = other.completions.create(**body, temperature=0, stop=" ", echo=True).choices[0]
        assert (found.finish_reason, found.text[:9]) == ("stop", "the quick")
        for changes in (
            {"temperature": 1.5, "seed": 1, "n": 2, "logprobs": 0},
            {"temperature": 0, "stop": " ", "echo": True},
            {"temperature": 0, "logprobs": 1},
            {"seed": 3, "presence_penalty": 1},
            {"seed": 3, "echo": True, "logprobs": 0},
        ):
            one, two = (each.completions.create(**body, **changes) for each in (client, other))
            assert one.choices == two.choices
        other.close()


# --- refusals --------------------------------------------------------------------------------------------------------

WRONG = [
    (
        {"model": "turn"},
        400,
        "turn does not continue texts: its task is to translate. Ask it with POST /v1/predict.",
        "model",
    ),
    ({"model": "letter"}, 404, "no model is named 'letter'. Did you mean letters?", None),
    ({"prompt": 5}, 400, "prompt must be a text, a list of texts, a list of token ids", "prompt"),
    ({"prompt": []}, 400, "prompt must be", "prompt"),
    ({"max_tokens": -1}, 400, "max_tokens: input should be greater than or equal to 0.", "max_tokens"),
    ({"temperature": 3}, 400, "temperature: input should be less than or equal to 2.", "temperature"),
    ({"logprobs": 6}, 400, "logprobs: input should be less than or equal to 5.", "logprobs"),
    ({"stop": ["a"] * 5}, 400, "stop must be a text, or a list of at most 4 texts", "stop"),
    ({"stop": ""}, 400, "stop must be", "stop"),
    ({"best_of": 3}, 400, "best_of is 3, n is 1: only equal numbers are supported.", None),
    ({"suffix": "end"}, 400, "suffix is not supported: leave it out.", None),
    ({"logit_bias": {"50": 1}}, 400, "logit_bias is not supported: leave it out.", None),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options is only allowed when stream is true.", None),
    ({"temprature": 1}, 400, "unknown field temprature. Did you mean temperature?", "temprature"),
    ({"n": 101}, 413, "1 prompts, 101 times each, were asked for; at most 100 choices", "n"),
    (
        {"prompt": "a" * 5000, "max_tokens": 1},
        400,
        "5,001 tokens (5,000 in your prompt; 1 for the completion)",
        "prompt",
    ),
    (
        {"prompt": "the", "max_tokens": 62},
        400,
        "this model's maximum context length is 64 tokens, however you requested 65 tokens (3 in your prompt; 62 for "
        "the completion).",
        "max_tokens",
    ),
]


@pytest.mark.parametrize(("change", "status", "words", "param"), WRONG)
def test_what_is_refused(server, change, status, words, param):
    body = {"model": "letters", "prompt": "the", "max_tokens": 4, **change}
    for stream in ({}, {"stream": True}):
        if "stream_options" in change and stream:
            continue
        response = httpx.post(f"{server.url}/v1/completions", json={**body, **stream})
        error = response.json()["error"]
        assert (response.status_code, sorted(error)) == (status, ["code", "message", "param", "type"])
        assert words in error["message"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_the_client_raises_its_own_errors(client, predictors):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="letters", prompt="the", max_tokens=100)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nothing", prompt="the")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError, match="has 6,000 characters, at most 5,000") as long:
        client.completions.create(model="letters", prompt="the " * 1500)
    assert long.value.status_code == 413
    with live({"letters": predictors["letters"]}, keys=("right",), max_body=2000) as server:
        options = {"base_url": f"{server.url}/v1", "max_retries": 0}
        with (
            openai.OpenAI(**options, api_key="wrong") as wrong,
            pytest.raises(openai.AuthenticationError) as unknown,
        ):
            wrong.completions.create(model="letters", prompt="the")
        assert unknown.value.code == "invalid_api_key"
        with openai.OpenAI(**options, api_key="right") as right:
            assert right.completions.create(model="letters", prompt="the").choices
            with pytest.raises(openai.APIStatusError, match="more than 2,000 bytes") as large:
                right.completions.create(model="letters", prompt="the" * 1000)
            assert large.value.status_code == 413
            assert large.value.type == "invalid_request_error"
            server.service.batcher.closing = True
            with pytest.raises(openai.InternalServerError, match="the server is stopping") as stopping:
                right.completions.create(model="letters", prompt="the")
            assert stopping.value.status_code == 503


class Slow(Predictor):
    """A predictor whose model waits before every step until it may go."""

    def __init__(self, inner):
        super().__init__(inner.task, inner.model)
        self.steps, self.go = 0, threading.Semaphore(0)
        self.model = SlowModel(inner.model, self)


class SlowModel(LanguageModel):
    def __init__(self, inner, owner):
        torch.nn.Module.__init__(self)
        self.__dict__.update(inner.__dict__)
        object.__setattr__(self, "owner", owner)

    def step(self, tokens, state):
        assert self.owner.go.acquire(timeout=10)
        self.owner.steps += 1
        return super().step(tokens, state)


@pytest.fixture
def slow(predictors):
    return Slow(predictors["letters"])


def test_tokens_come_as_they_are_written(slow):
    with live({"slow": slow}) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": "the qui", "max_tokens": 3, "stream": True, "temperature": 0}
        slow.go.release()
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in response.iter_lines() if line)
            assert json.loads(next(lines)[6:])["choices"][0]["text"]
            assert slow.steps == 1  # and no other was needed
            slow.go.release(2)
            *_, last, done = lines
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_ends_the_writing(slow, stream):
    with live({"slow": slow}) as server:
        body = json.dumps({"prompt": "the qui", "max_tokens": 50, "stream": stream, "temperature": 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        slow.go.release(3)
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_until(lambda: slow.steps == 3)
        wait_until(lambda: 'status="499"' in httpx.get(f"{server.url}/metrics").text)
        slow.go.release(2)
        wait_until(lambda: not server.service.batcher.waiting)
        assert slow.steps <= 4
        slow.go.release(100)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_full_queue_and_a_breakdown(slow, monkeypatch):
    with live({"slow": slow}, max_queue=1, max_items=1) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"model": "slow", "prompt": "the", "max_tokens": 2}
        threads = [threading.Thread(target=lambda: client.completions.create(**body)) for _ in range(2)]
        threads[0].start()
        wait_until(lambda: server.service.batcher.news.is_set() and not server.service.batcher.waiting)
        threads[1].start()
        wait_until(lambda: len(server.service.batcher.waiting) == 1)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**body)
        assert (full.value.code, full.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        slow.go.release(4)
        for thread in threads:
            thread.join()

        def broken(*_):
            if slow.steps > 5:
                raise ZeroDivisionError("a bug")
            slow.steps += 1
            return LanguageModel.step(slow.model, *_)

        monkeypatch.setattr(slow.model, "step", broken, raising=False)
        with pytest.raises(openai.APIError, match="the server made a mistake"):
            list(client.completions.create(**{**body, "max_tokens": 20}, stream=True))
        with pytest.raises(openai.InternalServerError, match="the server made a mistake"):
            client.completions.create(**body)
        client.close()


# --- what may be sent ------------------------------------------------------------------------------------------------


def test_a_panic_ends_all_choices_and_none_is_tried_again():
    """They may have sent text."""

    class PanicError(BaseException):
        pass

    def begin(model):
        raise panic

    panic, choice = PanicError(), SimpleNamespace(begin=begin)
    assert list(write_choices(SimpleNamespace(model=None), [choice, choice])) == [(0, panic), (1, panic)]


def test_the_beginning_of_a_stop():
    assert held_back("ab", ["bcd"]) == 1
    assert held_back("abc", ["bcd", "cx"]) == 2
    assert held_back("", ["a"]) == 0
    assert held_back("aaa", ["aaaa"]) == 3
    assert held_back("abc", ["abc"]) == 0


BYTES = Vocabulary.learn(["abc"], Tokenization(kind="byte", normalize="none"))
JAMO = Vocabulary.learn(["한국어 각 abc"], Tokenization(kind="byte", jamo=True))


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.sampled_from([BYTES, JAMO]))
def test_parts_join_to_the_text_before_the_stop(text, stops, vocabulary):
    """Whatever the text and the stops: nothing is sent that is taken back, and nothing of a stop."""

    class Fake:
        target, config = vocabulary, regard.read("shakespeare", ['data.train=["x"]'])

    ids = vocabulary.encode(text).ids
    want = vocabulary.decode(ids)
    cut = min((want.find(stop) for stop in stops if stop in want), default=len(want))
    body = CompletionBody(max_tokens=len(ids) + 1, stop=stops, temperature=0, logprobs=0)
    parts = []
    choice = Choice(0, Prompt("", [EOS]), body, Fake, 0)
    choice.emit = parts.append
    for token in [*ids, EOS]:
        if choice.hear(token, -1.0):
            break
    sent = "".join(part.text for part in parts)
    assert [part.finish for part in parts][-1] == "stop"
    if vocabulary is BYTES and "\ufffd" not in want:
        assert sent == want[:cut]
        assert len([token for part in parts for token in part.tokens]) <= len(ids)
    assert not any(stop in sent for stop in stops)
