"""The queue before the model: batches, order, limits, those who leave, and stopping."""

import asyncio
import itertools
import signal
import threading

import httpx
import pytest
from prometheus_client import generate_latest
from random_runs import drawn
from saying import saying
from serving import Held, live, wait_until
from tokenizers import Tokenizer, models, normalizers

import regard
from regard.errors import InputError
from regard.server.batcher import CLIENT, Batcher, Metrics
from regard.server.service import Service
from regard.server.settings import RefusedError, ServeSettings


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return regard.load(tiny_run, ["text.languages=['en','de']"], device="cpu")


@pytest.fixture
def held(predictor):
    held = Held(predictor)
    yield held
    held.go.set()


def doubled(items):
    return enumerate(item * 2 for item in items)


def inside(test, *given, **settings):
    """Run a coroutine with a batcher."""

    async def main():
        async with Batcher(ServeSettings(threads=1, **settings), Metrics()) as batcher:
            return await test(batcher, *given)

    return asyncio.run(main())


# --- the queue -------------------------------------------------------------------------------------------------------


def test_equal_keys_are_worked_on_together_and_answers_keep_their_places():
    batches = []

    def work(items):
        batches.append(items)
        return doubled(items)

    async def test(batcher):
        keys = ["x", "y", "x", "x", "y"]
        return await asyncio.gather(*(batcher.submit(key, work, [n, n + 10]) for n, key in enumerate(keys)))

    assert inside(test) == [[2 * n, 2 * n + 20] for n in range(5)]
    assert batches == [[0, 10, 2, 12, 3, 13], [1, 11, 4, 14]]


def test_a_batch_has_a_largest_size():
    sizes = []

    def work(items):
        sizes.append(len(items))
        return enumerate(items)

    async def test(batcher):
        return await batcher.submit("x", work, range(10))

    assert inside(test, batch_items=4) == list(range(10))
    assert sizes == [4, 4, 2]


def test_one_that_fails_does_not_fail_the_others():
    def work(items):
        return enumerate(InputError("bad") if item == 1 else item for item in items)

    def breaks(items):
        if 1 in items:
            raise ZeroDivisionError
        return enumerate(items)

    async def test(batcher):
        for function in (work, breaks):
            jobs = (batcher.submit("x", function, [n]) for n in range(3))
            found = await asyncio.gather(*jobs, return_exceptions=True)
            assert found[::2] == [[0], [2]]
            assert isinstance(found[1], InputError | ZeroDivisionError)

    inside(test)


def test_a_panic_is_an_error_of_its_request():
    """What is no Exception, as a panic in Rust, reaches the one who asked, and the thread goes on."""
    tokenizer = Tokenizer(models.WordLevel())
    tokenizer.normalizer = normalizers.Precompiled(b"\x04\0\0\0\xff\xff\xff\xff")  # has no entry for any letter

    def work(items):
        return enumerate(tokenizer.encode("a") if item == 1 else item for item in items)

    async def test(batcher):
        found = await asyncio.gather(*(batcher.submit("x", work, [n]) for n in range(3)), return_exceptions=True)
        assert found[::2] == [[0], [2]]
        assert isinstance(found[1], RuntimeError)
        assert "PanicException: index out of bounds" in str(found[1])
        assert batcher.problem() is None
        return await batcher.submit("x", doubled, [5])

    assert inside(test) == [10]


def test_a_thread_that_ended_is_told():
    """To those who wait, to newcomers and to /health, at once."""
    told = []

    async def test(batcher):
        batcher.turns = None  # breaks down where no work could
        asked = [asyncio.create_task(batcher.submit(key, doubled, [1])) for key in "xy"]
        told.extend(await asyncio.gather(*asked, return_exceptions=True))
        told.extend(await asyncio.gather(batcher.submit("x", doubled, [1]), return_exceptions=True))
        told.append(batcher.problem())

    with pytest.raises(TypeError):
        inside(test, timeout=2)
    words = "the model's thread has ended."
    assert [str(one) for one in told] == [*[f"{words} Try again later."] * 3, words]


def test_a_model_that_hangs_is_told():
    """While it stands still, and not when there is nothing to do or steps are finished."""
    begun, go = threading.Event(), threading.Event()

    def work(items):
        begun.set()
        assert go.wait(5)
        return enumerate(items)

    async def test(batcher):
        assert batcher.problem() is None
        asked = asyncio.create_task(batcher.submit("x", work, [1]))
        await asyncio.to_thread(begun.wait)
        assert batcher.problem() is None
        batcher.moved -= 100
        assert batcher.problem() == "the model hangs: it has not finished a step for 100 seconds."
        with pytest.raises(RefusedError, match="the model hangs") as refused:
            await batcher.submit("x", work, [2])
        assert refused.value.status == 503
        go.set()
        assert await asked == [1]
        return batcher.problem(), await batcher.submit("x", work, [3])

    assert inside(test, step_timeout=99) == (None, [3])


def test_a_full_queue_refuses_and_who_leaves_frees_a_place():
    begun, go = threading.Event(), threading.Event()

    def work(items):
        begun.set()
        assert go.wait(2)
        return enumerate(items)

    async def test(batcher):
        running = asyncio.create_task(batcher.submit("x", work, [0]))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.create_task(batcher.submit("x", work, [1, 2, 3]))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match=r"the queue is full: 3 texts wait, at most 3 may") as refused:
            await batcher.submit("x", work, [4])
        assert refused.value.status == 429
        assert refused.value.headers == {"Retry-After": "1"}
        with pytest.raises(RefusedError, match="holds 4 pieces of text, at most 3"):
            await batcher.submit("x", work, [1, 2, 3, 4])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not batcher.waiting
        last = asyncio.create_task(batcher.submit("x", work, [5]))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="the queue is full: 1 texts wait, at most 3 may"):
            await batcher.submit("x", work, [6, 7, 8])  # there is a place, but not for all of them
        go.set()
        return await running, await last

    assert inside(test, max_queue=3, max_items=3) == ([0], [5])


def test_who_is_finished_is_told_at_once_and_a_breakdown_is_for_those_left():
    first_told = threading.Event()

    def work(items):
        if items[0] != 1:
            yield 0, items[0]
        assert len(items) == 1 or first_told.wait(2)
        if 1 in items:
            raise ZeroDivisionError
        yield from list(enumerate(items))[1:]

    async def test(batcher):
        tasks = [asyncio.create_task(batcher.submit("x", work, [n])) for n in range(3)]
        tasks[0].add_done_callback(lambda done: first_told.set())
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, broken, last = inside(test)
    assert (first, last) == ([0], [2])
    assert isinstance(broken, ZeroDivisionError)


def test_a_long_one_lets_others_take_their_turn(monkeypatch):
    """The long one goes on until the short one, which came later, has been answered."""
    monkeypatch.setattr("regard.server.batcher.PATIENCE", 0.0)
    begun, answered = threading.Event(), threading.Event()

    def long(items):
        for _ in range(100_000):
            begun.set()
            if answered.wait(1e-3):
                yield 0, "at last"
                return
            yield None

    async def test(batcher):
        first = asyncio.create_task(batcher.submit("x", long, [0]))
        await asyncio.to_thread(begun.wait)
        others = await asyncio.gather(*(batcher.submit(key, doubled, [n]) for n, key in enumerate("xyz")))
        answered.set()
        return await first, others

    assert inside(test) == (["at last"], [[0], [2], [4]])


def test_who_comes_behind_long_ones_of_the_same_model_gathers(monkeypatch):
    """Two batches of one key take turns; the third waits until one has ended, so five texts are three batches, not
    five that each get a fifth of the time. Other keys do not wait for them."""
    monkeypatch.setattr("regard.server.batcher.PATIENCE", 0.0)
    sizes, begun, end = [], threading.Semaphore(0), threading.Event()

    def long(items):
        sizes.append(len(items))
        begun.release()
        while not end.wait(1e-3):
            yield None
        yield from enumerate(items)

    async def test(batcher):
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(batcher.submit("x", long, [number])))
            if number < 2:
                await asyncio.to_thread(begun.acquire)
            assert await batcher.submit("y", doubled, [7]) == [14]
        end.set()
        return await asyncio.gather(*tasks)

    assert inside(test) == [[0], [1], [2], [3], [4]]
    assert sizes == [1, 1, 3]


async def submit_as(client, batcher, *job):
    """Submit what a client asks."""
    CLIENT.set(client)
    return await batcher.submit(*job)


def test_clients_take_turns():
    """One text waits behind one of another client's forty, not behind all of them: in the queue, and in a batch that
    has no room for all."""
    order, begun, go = [], threading.Event(), threading.Event()

    def work(items):
        begun.set()
        assert go.wait(5)
        order.append(items)
        return enumerate(items)

    async def test(batcher, keys):
        first = asyncio.create_task(batcher.submit("first", work, ["first"]))
        await asyncio.to_thread(begun.wait)
        many = [asyncio.create_task(submit_as("A", batcher, next(keys), work, [n])) for n in range(40)]
        await asyncio.sleep(0)
        one = asyncio.create_task(submit_as("B", batcher, next(keys), work, ["one"]))
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, one, *many)

    inside(test, map(str, itertools.count()))
    assert order == [["first"], [0], ["one"], *([n] for n in range(1, 40))]
    order.clear()
    inside(test, itertools.repeat("x"), batch_items=10)
    assert order[1] == [0, "one", *range(1, 9)]


def test_a_short_text_does_not_wait_for_long_ones_of_another_client(monkeypatch):
    """Though they take all batches that one client may have, of one model or of many."""
    monkeypatch.setattr("regard.server.batcher.PATIENCE", 0.0)
    begun, end = threading.Semaphore(0), threading.Event()

    def work(items):
        begun.release()
        yield from ((place, item) for place, item in enumerate(items) if item == "short")
        while not end.wait(1e-3):
            yield None
        yield from ((place, item) for place, item in enumerate(items) if item != "short")

    async def test(batcher, keys, batches):
        tasks = []
        for number in range(40):
            tasks.append(asyncio.create_task(submit_as("A", batcher, next(keys), work, [number])))
            if number < batches:
                await asyncio.to_thread(begun.acquire)
        assert await submit_as("B", batcher, next(keys), work, ["short"]) == ["short"]
        end.set()
        return await asyncio.gather(*tasks)

    for keys, batches in ((itertools.repeat("x"), 2), (map(str, itertools.count()), 8)):
        end.clear()
        assert inside(test, keys, batches, timeout=5) == [[n] for n in range(40)]


def test_one_client_does_not_fill_the_queue():
    begun, go = threading.Event(), threading.Event()

    def work(items):
        begun.set()
        assert go.wait(5)
        return enumerate(items)

    async def test(batcher):
        tasks = [asyncio.create_task(submit_as("A", batcher, "x", work, [0]))]
        await asyncio.to_thread(begun.wait)
        tasks += [asyncio.create_task(submit_as(name, batcher, "x", work, [1, 2])) for name in "ABCD"]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match=r"the queue is full: 2 texts wait, at most 2 may"):
            await submit_as("A", batcher, "x", work, [3])
        with pytest.raises(RefusedError, match=r"the queue is full: 8 texts wait, at most 8 may"):
            await submit_as("E", batcher, "x", work, [3])
        go.set()
        return await asyncio.gather(*tasks)

    assert inside(test, max_queue=2) == [[0], *[[1, 2]] * 4]


def test_work_that_nobody_waits_for_is_dropped():
    begun, dropped = threading.Event(), threading.Event()

    def work(items):
        try:
            while True:
                begun.set()
                yield None
        finally:
            dropped.set()

    async def test(batcher):
        task = asyncio.create_task(batcher.submit("x", work, [0]))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        return await asyncio.to_thread(dropped.wait, 5)

    assert inside(test)


def test_who_waits_too_long_is_told():
    go = threading.Event()

    async def test(batcher):
        with pytest.raises(RefusedError, match=r"no answer within 0\.05 seconds") as refused:
            await batcher.submit("x", lambda items: go.wait(10) and enumerate(items), [0])
        go.set()
        assert refused.value.status == 503

    inside(test, timeout=0.05)


def test_stopping_finishes_what_was_accepted():
    async def test(batcher):
        accepted = [asyncio.create_task(batcher.submit(n % 3, doubled, [n])) for n in range(9)]
        await asyncio.sleep(0)
        batcher.closing = True
        with pytest.raises(RefusedError, match="the server is stopping") as refused:
            await batcher.submit("x", doubled, [1])
        assert refused.value.status == 503
        assert refused.value.headers == {"Retry-After": "1"}
        return await asyncio.gather(*accepted)

    assert inside(test) == [[2 * n] for n in range(9)]


def test_stopping_when_the_last_one_has_just_left():
    """Nobody waits any more, though a batch was about to be gathered: the end is not slept through."""

    async def main():
        async with Batcher(ServeSettings(threads=1, wait_ms=200.0), Metrics()) as batcher:
            task = asyncio.create_task(batcher.submit("x", doubled, [1]))
            await asyncio.sleep(0.05)
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 5))


@pytest.mark.parametrize("keys", [("",), ("a", ""), (" a",), ("clé",), ("a\n",)])
def test_keys_that_no_header_can_carry(keys):
    with pytest.raises(ValueError, match=f"key {len(keys)} of {len(keys)} is empty, or not plain ASCII"):
        ServeSettings(keys=keys)


# --- what models are asked -------------------------------------------------------------------------------------------


def asked_together(predictor, *requests, **settings):
    """The outcomes of requests (texts, decoding settings) that come at once."""
    service = Service({"run": predictor}, ServeSettings(threads=1, wait_ms=20.0, **settings))

    async def main():
        async with service.batcher:
            calls = [service.answers("run", texts, 1, decode) for texts, decode in requests]
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(main())


def test_every_request_has_its_own_settings(tmp_path):
    predictor = regard.load(drawn(tmp_path / "run", "transformer"), device="cpu", engine="torch")
    base = predictor.config.decode
    limits = [base.model_copy(update={"max_ratio": 0.0, "max_extra": extra, "beam_size": 1}) for extra in range(1, 6)]
    found = asked_together(predictor, *((["abc"], limit) for limit in limits))
    wanted = [predictor.predict(["abc"], settings=limit) for limit in limits]
    assert [answers[0][0].text for answers in found] == [answers[0][0].text for answers in wanted]
    assert [len(answers[0][0].tokens) for answers in found] == [2, 3, 4, 5, 6]


def test_an_error_is_that_of_its_own_text():
    """Of those that are worked on together, who cannot be taken is told by the number in the own request, and the
    others get their own answers."""
    predictor = saying()
    decode, long = predictor.config.decode, "a" * 41
    ones = [(["ab"], decode), ([long, "b"], decode), (["cd", "ef"], decode), (["gh", long], decode)]
    first, second, third, last = asked_together(predictor, *ones)
    assert [[answers[0].text for answers in some] for some in (first, third)] == [["ab"], ["cd", "ef"]]
    assert str(second).startswith("text 1 has 41 tokens")
    assert str(last).startswith("text 2 has 41 tokens")
    assert len(predictor.engine.asked) <= 2


@pytest.mark.parametrize("retry", [False, True])
def test_a_second_try_is_made_if_the_server_is_told_so(retry):
    predictor = saying(lambda text: ["no no no no "])
    asked_together(predictor, (["ab"], predictor.config.decode), retry=retry)
    assert [request.settings.no_repeat_ngram for _, request in predictor.engine.asked] == ([0, 3] if retry else [0])


# --- through HTTP ----------------------------------------------------------------------------------------------------


def translate(text):
    return {"q": text, "source": "en", "target": "de"}


def test_together_is_as_alone(predictor):
    texts = [("abcdefgh" * 2)[n % 7 : n % 7 + 1 + n % 4] for n in range(40)]
    alone = {text: predictor.predict([text], best=2) for text in texts}

    async def ask(url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            bodies = [{"text": text, "best": 2} for text in texts]
            return await asyncio.gather(*(client.post("/v1/predict", json=body) for body in bodies))

    with live({"tiny": predictor}, wait_ms=20.0) as server:
        found = asyncio.run(ask(server.url))
        counted = 'regard_requests_total{route="/v1/predict",status="200"} 40.0'
        wait_until(lambda: counted in generate_latest(server.service.metrics.registry).decode())  # after the answer
        metrics = generate_latest(server.service.metrics.registry).decode()
    for text, response in zip(texts, found, strict=True):
        ((want, _),) = alone[text]
        got = response.json()["answers"][0][0]
        assert got["text"] == want.text
        assert got["score"] == pytest.approx(want.score, rel=1e-4)
    batches = float(metrics.split("\nregard_batch_texts_count ")[1].split()[0])
    assert batches < 20
    assert f'regard_tokens_total{{side="source"}} {sum(map(len, texts))}.0' in metrics
    assert "regard_waiting_texts 0.0" in metrics


def test_a_client_that_goes_away_frees_its_place(held):
    with live({"tiny": held}, max_queue=2, max_items=2) as server, httpx.Client(base_url=server.url) as client:
        first = threading.Thread(target=lambda: httpx.post(server.url + "/translate", json=translate("a"), timeout=30))
        first.start()
        assert held.begun.wait(10)
        waiting = server.service.batcher
        with pytest.raises(httpx.ReadTimeout):
            client.post("/translate", json=translate(["b", "c"]), timeout=0.2)
        wait_until(lambda: not waiting.waiting)
        wait_until(lambda: b'route="/translate",status="499"} 1.0' in generate_latest(server.service.metrics.registry))
        held.go.set()
        assert client.post("/translate", json=translate("d"), timeout=30).status_code == 200
        first.join()
    assert held.batches == [["a"], ["d"]]


def test_health_is_true(held):
    """A model that does not finish its step is told, and when it has, that all is well."""
    with live({"tiny": held}, step_timeout=0.2) as server:
        first = threading.Thread(target=lambda: httpx.post(server.url + "/translate", json=translate("a"), timeout=30))
        first.start()
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 503)
        assert "the model hangs: it has not finished a step" in httpx.get(server.url + "/health").json()["error"]
        held.go.set()
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 200)
        first.join()


def test_clients_are_known_by_address_or_key(predictor, monkeypatch):
    """A bearer's key, if it is one; what is no key is not."""
    seen = []

    async def submit(self, key, work, items):
        seen.append(CLIENT.get())
        raise RefusedError(503, "enough")

    monkeypatch.setattr(Batcher, "submit", submit)
    with live({"tiny": predictor}, keys=("one",)) as server:
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "Bearer other"}):
            httpx.post(server.url + "/translate", json={**translate("a"), "api_key": "one"}, headers=headers)
    assert seen == ["one", "127.0.0.1"]


def test_a_full_queue_is_429_and_then_all_is_well(held):
    async def flood(url):
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:
            calls = [asyncio.create_task(client.post("/translate", json=translate("ab"))) for _ in range(50)]
            while sum(call.done() for call in calls) < 50 - 4 - 1:
                await asyncio.sleep(0.01)
            held.go.set()
            return [response.status_code for response in await asyncio.gather(*calls)]

    with live({"tiny": held}, max_queue=4, max_items=4, batch_items=1) as server:
        statuses = asyncio.run(flood(server.url))
        after = httpx.post(server.url + "/translate", json=translate("ab"), timeout=30)
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) in (4, 5)
    assert after.status_code == 200


def test_sigterm_loses_nothing_that_was_accepted(predictor):
    """Clients that never stop asking: each gets an answer to every request, the last of them 503."""
    asked, answered = [], []

    async def client(url):
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            while True:
                asked.append(1)
                response = await http.post("/translate", json=translate("abc"))
                answered.append(response.status_code)
                if response.status_code != 200:
                    assert response.json() == {"error": "the server is stopping. Try another, or again later."}
                    assert response.headers["connection"] == "close"
                    return

    async def load(server):
        clients = [asyncio.create_task(client(server.url)) for _ in range(8)]
        while len(answered) < 40:
            await asyncio.sleep(0.01)
        server.server.handle_exit(signal.SIGTERM, None)
        await asyncio.gather(*clients)

    with live({"tiny": predictor}) as server:
        asyncio.run(load(server))
        wait_until(lambda: not server.server.servers[0].is_serving())
    assert len(asked) == len(answered)
    assert answered.count(503) == 8
