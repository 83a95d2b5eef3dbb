"""A real server on a free loopback port, for the tests of what is around it."""

import contextlib
import json
import random
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

from conftest import tiny

import regard
from regard.config.run import Config
from regard.evaluation.fit import fit
from regard.inference.predictor import Predictor
from regard.server.app import make_app
from regard.server.middleware import Server
from regard.server.service import Service
from regard.server.settings import ServeSettings
from regard.training.prepare import start_run


class Live(NamedTuple):
    """A running server."""

    url: str
    port: int
    service: Service
    server: Server


@contextmanager
def live(predictors, **settings):
    """Serve predictors by name while the block runs."""
    app = make_app(predictors, ServeSettings(threads=1, **settings))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `serve` does
    port = listener.getsockname()[1]
    server = Server(app, app.state.service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Live(f"http://127.0.0.1:{port}", port, app.state.service, server)
    finally:
        server.should_exit = True
        thread.join()


class Held(Predictor):
    """A predictor that begins to decode when it is let go, and remembers what it was asked together."""

    def __init__(self, inner: Predictor) -> None:
        super().__init__(inner.task, inner.model, inner.engine)
        self.begun, self.go = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def answer(self, sources, request, budget=4096):
        self.batches.append([source.text for source in sources])
        self.begun.set()
        assert self.go.wait(5)
        return super().answer(sources, request, budget)


def wait_until(condition, seconds=10.0):
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# --- a small run of every task ---------------------------------------------------------------------------------------

SIZES = {"size": 24, "heads": 3, "feedforward": 48, "layers": 2, "dropout": 0.0}
LABELS = {
    "weather": "rain sun snow wind cloud",
    "food": "bread soup rice apple cake",
    "sport": "goal race swim run ball",
}
NAMES, PLACES = ("Mary", "John", "Sandra", "Daniel"), ("kitchen", "garden", "office", "hallway")


def small(folder, data, text, model, *changes, metric="exact", steps=60):
    """A run of given parts, trained for a moment."""
    base = tiny(
        "train.learning_rate=0.01",
        f"train.steps={steps}",
        f"train.validate_every={steps}",
        "decode.beam_size=1",
        *changes,
    )
    parts = {"data": data, "text": text, "model": {**SIZES, **model}, "evaluate": {"metrics": (metric,)}}
    config = Config.model_validate({**base.model_dump(), **parts})
    fit(start_run(config, folder), folder, lambda event: None, device="cpu")
    return regard.load(folder, device="cpu")


def language_run(folder, text, kind, *, steps=60, **options):
    """A language model over one text."""
    path = folder.parent / f"{folder.name}.txt"
    path.write_text(text, encoding="utf-8")
    data = {"kind": "text", "train": (str(path),), "valid_share": 0.1}
    words = {"source": {"kind": kind, "normalize": "none", "size": 300}, "max_length": 64}
    return small(folder, data, words, {"kind": "language model", **options}, metric="nats", steps=steps)


def classifier_run(folder, steps=60, **options):
    """Whether words are about weather, food or sport; of several things, if `multi_label`."""
    random.seed(1)
    lines = []
    for _ in range(300):
        labels = sorted(random.sample(sorted(LABELS), 1 + bool(options.get("multi_label") and random.random() < 0.5)))
        words = [random.choice(LABELS[label].split()) for label in labels for _ in range(2)]
        lines.append(f"{'+'.join(labels)} the {' and the '.join(words)}")
    path = folder.parent / f"{folder.name}.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    data = {"kind": "labelled", "train": (str(path),), "cut_valid": 20}
    target = {"kind": "label", "separator": "+" if options.get("multi_label") else ""}
    text = {"source": {"kind": "word"}, "target": target, "max_length": 600}
    return small(folder, data, text, {"kind": "classifier", **options}, steps=steps)


def story(count=3):
    """Who went where, of whom it is asked, and where that is."""
    facts = [(random.choice(NAMES), random.choice(PLACES)) for _ in range(count)]
    name, _ = random.choice(facts)
    place = [place for who, place in facts if who == name][-1]
    return [f"{who} went to the {where}." for who, where in facts], f"Where is {name}?", place


def reader_run(folder, answer, steps=60, **options):
    """Where somebody is: as a word, or as a part of the story."""
    random.seed(2)
    stories = [story() for _ in range(200)]
    path = folder.parent / f"{folder.name}.json"
    if answer == "word":
        lines = []
        for facts, question, place in stories:
            lines += [f"{number} {fact}" for number, fact in enumerate(facts, 1)]
            lines.append(f"{len(facts) + 1} {question}\t{place}\t1")
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        paragraphs = []
        for number, (facts, question, place) in enumerate(stories):
            context = " ".join(facts)
            answers = [{"text": place, "answer_start": context.rindex(place)}]
            paragraphs.append(
                {"context": context, "qas": [{"id": str(number), "question": question, "answers": answers}]}
            )
        path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}), encoding="utf-8")
    data = {"kind": "babi" if answer == "word" else "squad", "train": (str(path),), "cut_valid": 20}
    text = {"source": {"kind": "bpe", "size": 300}, "max_length": 600}
    if answer == "word":
        text["target"] = {"kind": "label"}
    metric = "exact" if answer == "word" else "span_f1"
    return small(folder, data, text, {"kind": "reader", "answer": answer, **options}, metric=metric, steps=steps)


def every_task(folder, steps=60):
    """Predictors of every task but translation, by name."""
    text = "the quick brown fox jumps over the lazy dog. " * 60
    return {
        "classes": classifier_run(folder / "classes", steps),
        "several": classifier_run(folder / "several", steps, multi_label=True),
        "pooled": classifier_run(folder / "pooled", 2, pooling="mean"),
        "word": reader_run(folder / "word", "word", steps, unit="sentence", share_layers=True),
        "span": reader_run(folder / "span", "span", steps),
        "letters": language_run(folder / "letters", text, "char", steps=steps, add_bos=False),
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def served(words, port, folder, tools):
    """A server that runs in the background, and is asked to stop at the end."""
    server = subprocess.Popen(words, cwd=folder, env=tools, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            assert server.poll() is None, f"{words} ended with {server.returncode}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1):
                break
            time.sleep(0.1)
        yield
        server.terminate()
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()
