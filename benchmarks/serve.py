"""The server under load: 64 clients whose requests are batched against one client and no batching, then ten times as
many requests at once as may wait. The one client asks two servers without batching: one with the same --workers
processes as the 64 have, and one with a single process and all threads, which is the fastest for one.

Clients, in a process of their own, send one sentence after the other over connections they keep. Without --run the
model has the sizes of the multi30k recipe and random weights, and answers are about as long as their sources.

    REGARD_DATA=... python benchmarks/serve.py --seconds 60

Without $REGARD_DATA the sentences are made up, their lengths those of Multi30k.
"""

import argparse
import asyncio
import collections
import contextlib
import functools
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

QUEUE = 256
"""Texts that may wait in the server."""


# --- the work --------------------------------------------------------------------------------------------------------


def made_up(count: int) -> list[str]:
    """Sentences of made-up words, 6 to 20 of them."""
    chance = random.Random(1)
    consonants = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "sch", "st"]
    syllables = [first + vowel for first in consonants for vowel in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(8000)]
    return [" ".join(chance.choices(words, k=chance.randint(6, 20))) + "." for _ in range(count)]


def sentences() -> list[str]:
    """What clients send: the test set of Multi30k, or something like it."""
    if "REGARD_DATA" in os.environ:
        path = Path(os.environ["REGARD_DATA"]) / "multi30k" / "test_2016_flickr.en.gz"
        return gzip.decompress(path.read_bytes()).decode().splitlines()
    return made_up(1000)


def untrained(folder: Path) -> Path:
    """A run with the sizes of the multi30k recipe and random weights."""
    import torch

    from regard.config.toml import find, parse
    from regard.data.vocabulary import Vocabularies, Vocabulary
    from regard.tasks import make_task
    from regard.training.checkpoint import create_run, get_weights, save_weights

    torch.manual_seed(1)
    config = parse(find("multi30k"), ["decode.max_ratio=1.0", "decode.max_extra=2"])
    vocabulary = Vocabulary.learn(made_up(10_000), config.text.source)
    vocabularies = Vocabularies(vocabulary, vocabulary)
    create_run(folder, config, vocabularies, {})
    save_weights(folder / "model.safetensors", get_weights(make_task(config, vocabularies).build()), 0)
    return folder


# --- clients ---------------------------------------------------------------------------------------------------------


def request(text: str) -> bytes:
    """What asks for a translation."""
    body = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Client(asyncio.Protocol):
    """Asks until it is time; without time, once; and notes what came, and after how many seconds. It does as little as
    it can, for the server has the same processors."""

    def __init__(self, requests: list[bytes], until: float, found: list[tuple[str, float]]) -> None:
        self.requests, self.until, self.found = requests, until, found
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.answer, self.began = b"", time.perf_counter()
        self.transport.write(random.choice(self.requests))

    def data_received(self, data: bytes) -> None:
        self.answer += data
        head, end, body = self.answer.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            return
        now = time.perf_counter()
        self.found.append((head.split()[1].decode(), now - self.began))
        if now < self.until:
            self.ask()
        else:
            self.answer = None
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None:
            self.found.append((type(error).__name__ if error else "closed", 0.0))
        self.gone.set_result(None)


async def client(port: int, requests: list[bytes], until: float, found: list[tuple[str, float]]) -> None:
    """One `Client`, to its end."""
    try:
        make = functools.partial(Client, requests, until, found)
        _, one = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
        await one.gone
    except OSError as error:
        found.append((type(error).__name__, 0.0))


def load(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """What `clients` at once get from a server, and how fast."""
    found: list[tuple[str, float]] = []

    async def everybody() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client(port, requests, until, found) for _ in range(clients)))

    requests, began = list(map(request, sentences())), time.perf_counter()
    asyncio.run(everybody())
    good = sorted(duration for status, duration in found if status == "200")
    quantiles = statistics.quantiles(good, n=100) if len(good) > 1 else [0.0] * 99
    return {
        "statuses": collections.Counter(status for status, _ in found),
        "speed": len(good) / (time.perf_counter() - began),
        "p50": 1000 * quantiles[49],
        "p99": 1000 * quantiles[98],
    }


# --- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(run: Path, options: argparse.Namespace, *changes: str) -> Iterator[tuple[int, int]]:
    """A server in processes of its own: its port and the id of the first."""
    own = [f"serve.max_queue={QUEUE}", "serve.port=0", "text.languages=['en', 'de']", *changes]
    own += [f"serve.threads={options.threads}"] if options.threads else []
    own += [f"decode.beam_size={options.beam}"] if options.beam else []
    command = [sys.executable, __file__, "--serve", str(run), *own]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield int(line.split(" at http://127.0.0.1:")[1].split()[0]), process.pid
    finally:
        process.terminate()
        process.wait()


def loaded(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """As `load`, from a process of its own."""
    command = [sys.executable, __file__, "--load", str(port), "--clients", str(clients), "--seconds", str(seconds)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def memory(process: int) -> float:
    """Megabytes that a process and its children hold, each its part of what they share (Linux)."""
    family = [process, *map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    lines = [line for one in family for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def row(table: Table, name: str, clients: int, found: dict[str, Any], note: str = "") -> None:
    statuses = ", ".join(f"{status}: {count:,}" for status, count in sorted(found["statuses"].items()))
    times = (f"{found['speed']:,.1f}", f"{found['p50']:,.0f}", f"{found['p99']:,.0f}")
    table.add_row(name, f"{clients:,}", statuses, *times, note)


def compared(run: Path, options: argparse.Namespace) -> None:
    """Measure, and print one table."""
    table = Table("what", "clients", "statuses", "requests/s", "p50 ms", "p99 ms", "memory MB")
    alone = {}
    for workers in sorted({1, options.workers}):
        changes = ("serve.batch_items=1", "serve.wait_ms=0.0", f"serve.workers={workers}")
        with server(run, options, *changes) as (port, _):
            loaded(port, 1, 1)
            alone[workers] = loaded(port, 1, options.seconds / 3)
        row(table, f"no batches, {workers} process{'es' * (workers > 1)}", 1, alone[workers])
    with server(run, options, f"serve.workers={options.workers}") as (port, process):
        loaded(port, options.clients, 1)
        many = loaded(port, options.clients, options.seconds)
        row(table, f"batches, {options.workers} processes", options.clients, many, f"{memory(process):,.0f}")
        for number in range(1, 4):
            flood = loaded(port, 10 * QUEUE, 0)
            row(table, f"all at once, {number}", 10 * QUEUE, flood, f"{memory(process):,.0f}")
        row(table, "one client, afterwards", 1, loaded(port, 1, 1), f"{memory(process):,.0f}")
    out = Console(highlight=False, width=110)
    out.print(table)
    for workers, found in alone.items():
        ratio = many["speed"] / found["speed"]
        out.print(f"batches / one client without, {workers} process{'es' * (workers > 1)}: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run; by default one that is not trained")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--threads", type=int, help="of the model")
    parser.add_argument("--workers", type=int, default=2, help="processes of the server that batches")
    parser.add_argument("--beam", type=int, help="hypotheses; by default as the run has it")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from regard.server.app import read_settings, serve

        settings, changes = read_settings(options.serve[1:])
        serve([Path(options.serve[0])], settings, changes, device="cpu")
    elif options.load:
        from regard.server.app import allow_connections

        allow_connections()
        print(json.dumps(load(options.load, options.clients, options.seconds)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            compared(options.run or untrained(Path(folder) / "run"), options)


if __name__ == "__main__":
    main()
