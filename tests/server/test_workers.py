"""Several processes behind one address: real ones, asked, killed and stopped."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from regard.errors import ConfigError
from regard.server import workers
from regard.server.app import serve
from regard.server.settings import ServeSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share a port on Linux only")
started = pytest.mark.slow
"""Starts a server of several processes."""
STARTED = """
import sys
import time
from pathlib import Path
from regard.inference.predictor import Predictor
from regard.server import workers
from regard.server.app import read_settings, serve

def answer(self, sources, request, budget=4096, own=Predictor.answer):
    while sources[0].text == "hang":
        time.sleep(1)
    return own(self, sources, request, budget)

Predictor.answer = answer
workers.QUIET = float(sys.argv[2])
changes = ["serve.port=0", "serve.workers=2", "serve.linger=0.1", "serve.step_timeout=1"]
serve([Path(sys.argv[1])], read_settings(changes)[0], device="cpu")
"""


@pytest.fixture
def served(tiny_run: Path, tmp_path: Path, quiet: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with two workers: its process and its address. Its temporary files are in `tmp_path`."""
    command = [sys.executable, "-c", STARTED, str(tiny_run), str(quiet)]
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split(" at ")[1].split()[0]
        process.kill()


@pytest.fixture
def quiet() -> int:
    """Seconds that a worker may give no sign of life."""
    return 20


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ended(process: int) -> bool:
    return not Path(f"/proc/{process}").exists() or ") Z " in Path(f"/proc/{process}/stat").read_text()


def until(what) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(url: str, times: int) -> set[str]:
    """The answers to one text, asked over connections of their own."""
    found = set()
    for _ in range(times):
        answer = httpx.post(f"{url}/v1/predict", json={"text": "abc"})
        assert answer.status_code == 200
        found.add(answer.text)
    return found


@started
def test_answer_count_and_stop(served: tuple[subprocess.Popen[str], str]):
    """Both answer, and alike; /metrics has what both counted, whoever is asked; SIGTERM ends all of them."""
    process, url = served
    answers = ask(url, 20)
    assert len(answers) == 1
    pattern = r'regard_requests_total\{route="/v1/predict",status="200"\} 20.0'
    assert all(re.search(pattern, httpx.get(f"{url}/metrics").text) for _ in range(8))
    assert "regard_waiting_texts 0.0" in httpx.get(f"{url}/metrics").text
    working = children(process.pid)
    assert len(working) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    until(lambda: all(map(ended, working)))


@started
def test_replace_the_dead(served: tuple[subprocess.Popen[str], str]):
    """A worker that is killed is replaced, and what it had counted is not lost."""
    process, url = served
    before = ask(url, 10)
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    until(lambda: len(children(process.pid)) == 2 and first not in children(process.pid))
    assert second in children(process.pid)
    assert ask(url, 10) == before
    assert 'status="200"} 20.0' in httpx.get(f"{url}/metrics").text
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == f"worker {first} broke down (status -9); another takes its place.\n"


def stop_quietly(process: subprocess.Popen[str]) -> str:
    """Stop a server; what it said."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stderr is not None
    return process.stderr.read()


@started
@pytest.mark.parametrize("quiet", [3])
def test_replace_the_stopped(served: tuple[subprocess.Popen[str], str], tmp_path: Path):
    """A worker that is stopped gives no sign of life; who waited at its socket is answered by the next. That nobody can
    find the files in which requests are counted any more harms neither."""
    process, url = served
    before = ask(url, 10)
    (counts,) = tmp_path.glob("regard-metrics-*")
    shutil.rmtree(counts)
    assert "regard_batch_texts_count" in httpx.get(f"{url}/metrics").text
    first, second = children(process.pid)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(httpx.post, f"{url}/v1/predict", json={"text": "abc"}, timeout=30) for _ in range(8)]
        until(lambda: len(children(process.pid)) == 2 and first not in children(process.pid))
        assert {one.result().text for one in asked} == before
    assert second in children(process.pid)
    for _ in range(8):
        assert "regard_batch_texts_count" in httpx.get(f"{url}/metrics").text
    said = f"worker {first} hangs, and is ended.\nworker {first} broke down (status -9); another takes its place.\n"
    assert stop_quietly(process) == said


@started
@pytest.mark.parametrize("quiet", [3])
def test_replace_the_hanging(served: tuple[subprocess.Popen[str], str]):
    """A worker whose model does not finish its step says so, and is replaced; the other one is not disturbed."""
    process, url = served
    before, workers_ = ask(url, 10), set(children(process.pid))
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(httpx.post, f"{url}/v1/predict", json={"text": "hang"}, timeout=30)
        until(lambda: any(httpx.get(f"{url}/health").status_code == 503 for _ in range(8)))
        until(lambda: len(set(children(process.pid)) & workers_) == 1)
        assert isinstance(lost.exception(30), httpx.RemoteProtocolError | httpx.ReadError)
    until(lambda: len(children(process.pid)) == 2)
    assert ask(url, 10) == before
    (gone,) = workers_ - set(children(process.pid))
    said = f"worker {gone} hangs, and is ended.\nworker {gone} broke down (status -9); another takes its place.\n"
    assert stop_quietly(process) == said


def test_seconds_in_which_nobody_looked_do_not_count(monkeypatch: pytest.MonkeyPatch, capsys):
    """All may have been stopped together; each may give its sign first. One that gives none is ended."""
    monkeypatch.setattr(workers.Worker, "start", lambda self: None)
    worker = workers.Worker(lambda listener, beat: None, socket.socket())
    worker.process, worker.seen, worker.quiet = Mock(pid=7), 0, 0.0
    for _ in range(300):
        worker.beat()
        worker.look(workers.LOOK)
    for _ in range(20):
        worker.look(workers.LOOK)
    worker.process.kill.assert_not_called()
    worker.look(workers.LOOK)
    worker.process.kill.assert_called_once()
    assert capsys.readouterr().err == "worker 7 hangs, and is ended.\n"
    worker.listener.close()


@started
def test_stop_while_a_dead_one_is_being_replaced(served: tuple[subprocess.Popen[str], str]):
    """Nobody is started whom no signal would reach."""
    process, url = served
    ask(url, 1)
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.3)  # of the second in which it rests
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    until(lambda: ended(second))


@started
def test_newcomers_are_refused_while_answers_are_finished(served: tuple[subprocess.Popen[str], str]):
    """Once the sockets are closed nobody waits at them, though the supervisor holds them too."""
    process, url = served
    ask(url, 8)  # until both are there
    host, port = url.removeprefix("http://").rsplit(":", 1)
    slow = [socket.create_connection((host, int(port))) for _ in range(8)]
    body = json.dumps({"text": "abc"})
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    for one in slow:
        one.sendall(head.encode() + body[:5].encode())  # keeps its worker from ending
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert process.poll() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5).close()
    for one in slow:
        one.close()
    assert process.wait(20) == 0


@started
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])
def test_stop_as_soon_as_it_says_that_it_serves(tiny_run: Path, number: int, delay: float):
    command = [sys.executable, "-c", STARTED, str(tiny_run), "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(number)
        try:
            assert process.wait(15) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@started
def test_end_with_the_parent(served: tuple[subprocess.Popen[str], str]):
    process, url = served
    ask(url, 1)
    working = children(process.pid)
    process.kill()
    until(lambda: all(map(ended, working)))


@started
def test_address_of_others(served: tuple[subprocess.Popen[str], str], tiny_run: Path):
    """A port that several processes share is not shared with another server."""
    port = int(served[1].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"127.0.0.1 port {port} cannot be listened on: Address already in use"):
        serve([tiny_run], ServeSettings(port=port, workers=2), device="cpu")


def test_refuse_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"serve.workers=2 is for models on the CPU, not on cuda\. Leave it at 1"):
        workers.check_workers(2, "cuda")
    workers.check_workers(1, "cuda")
    workers.check_workers(2, "cpu")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"serve.workers=3 needs Linux"):
        workers.check_workers(3, "cpu")
