"""A soak: good and hostile requests against a server of two processes for minutes, one of which is killed and one
stopped meanwhile. Every answer is compared with the one that the model gives by itself.

A request may fail only if its connection broke (its process was killed or stopped) or the server is busy or
stopping (429, 503); an accepted request that a living process loses, a wrong answer, or a status that a hostile request
should not have, is counted and named. Memory is that of all processes, as the system counts it (PSS).

    python benchmarks/soak.py runs/n --minutes 10
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

WORDS = ("eins zwei drei zwanzig dreißig fünfundzwanzig hundert neunundneunzig tausend zwölf elf sechzehn").split()  # noqa: SIM905
Client = httpx.AsyncClient


def hostile_requests() -> list[tuple[str, dict[str, Any], set[int]]]:
    """Path, what is sent, and the statuses that are right."""
    raw = {"headers": {"content-type": "application/json"}}
    return [
        ("/translate", {**raw, "content": b"{"}, {400, 422}),
        ("/translate", {**raw, "content": b"[" * 100_000}, {400, 422}),
        ("/translate", {"json": {"q": [[]] * 100_000, "source": "source", "target": "target"}}, {400, 413, 422}),
        ("/translate", {"json": {"q": "x" * 900_000, "source": "source", "target": "target"}}, {400, 413, 422}),
        (
            "/translate",
            {"content": b"q=" + b"\xff\xfe" * 100, "headers": {"content-type": "text/plain"}},
            {400, 415, 422},
        ),
        ("/translate", {**raw, "content": os.urandom(5000)}, {400, 422}),
        (
            "/translate",
            {"headers": {**raw["headers"], "content-encoding": "gzip"}, "content": b"\x1f\x8b"},
            {400, 415, 422},
        ),
        ("/v1/predict", {"json": {"texts": [{}] * 50_000}}, {400, 413, 422}),
        (
            "/v1/predict",
            {"json": {"text": "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace")}},
            {200, 422},
        ),
        ("/v1/look", {"json": {"text": "a " * 20_000}}, {400, 413, 422}),
        ("/v1/predict", {**raw, "content": b"x" * 3_000_000}, {413}),
        ("/nothing", {"json": {}}, {404, 405}),
    ]


@contextlib.contextmanager
def serve(run: str, port: int) -> Iterator[int]:
    """A server of two processes; gives the number of the first process, the others are its children."""
    words = [sys.executable, "-m", "regard", "serve", run, "--set", f"serve.port={port}", "--set", "serve.workers=2"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        for _ in itertools.repeat(None, 600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield process.pid
        process.terminate()
        print(f"the server ended with {process.wait(60)}")
    finally:
        process.kill()


def children(parent: int) -> list[int]:
    """The processes that work for another."""
    return [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def memory(parent: int) -> float:
    """Megabytes of a process and its children, shared pages once."""
    total = 0
    for number in [parent, *children(parent)]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class Soak:
    """What is asked, and what came of it."""

    def __init__(self, url: str, expected: dict[str, str], language: str, end: float) -> None:
        self.url, self.expected, self.language, self.end = url, expected, language, end
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    async def ask(self, client: Client, chance: random.Random) -> None:
        """One good request, by one of the roads."""
        text = chance.choice(list(self.expected))
        tree = {"q": text, "source": "auto", "target": self.language}
        road = chance.randrange(3)
        if road == 0:
            response = await client.post("/translate", json=tree)
            found = response.json().get("translatedText") if response.status_code == 200 else None
        elif road == 1:
            raw = f"q={text}&source=auto&target={self.language}".encode()
            form = {"content-type": "application/x-www-form-urlencoded"}
            response = await client.post("/translate", content=raw, headers=form)
            found = response.json().get("translatedText") if response.status_code == 200 else None
        else:
            response = await client.post("/v1/predict", json={"text": text})
            found = response.json()["answers"][0][0]["text"] if response.status_code == 200 else None
        if response.status_code in (429, 503):
            self.counts["asked to come again"] += 1
        elif found == self.expected[text]:
            self.counts["right answers"] += 1
        else:
            self.counts["WRONG"] += 1
            self.wrong.append(f"{text}: {response.status_code} {response.text[:200]}")

    async def attack(self, client: Client, chance: random.Random) -> None:
        """One hostile request."""
        path, sent, right = chance.choice(hostile_requests())
        response = await client.post(path, **sent)
        good = response.status_code in right | {429, 503}
        self.counts["hostile, refused rightly" if good else "HOSTILE, WRONG STATUS"] += 1
        if not good:
            self.wrong.append(f"{path} {str(sent)[:80]}: {response.status_code} {response.text[:200]}")

    async def work(self, number: int) -> None:
        """A client until the end; every fourth is hostile, and hangs up now and then in the middle of a request."""
        chance = random.Random(number)
        while time.monotonic() < self.end:
            async with Client(base_url=self.url, timeout=90) as client:
                for _ in range(50):
                    if time.monotonic() > self.end:
                        return
                    try:
                        await (self.attack if number % 4 == 3 else self.ask)(client, chance)
                    except httpx.HTTPError as error:
                        self.counts[f"connection lost ({type(error).__name__})"] += 1
                        break
            if number % 4 == 3:
                await self.hang_up()

    async def hang_up(self) -> None:
        """A request that is never finished."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
            writer.write(b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
            await asyncio.sleep(0.1)
            writer.close()

    async def disturb(self, parent: int, began: float) -> None:
        """After a third of the time, kill a process; after half of it, stop one. Memory is told on the way."""
        minutes = (self.end - began) / 60
        deeds = [(minutes / 3, signal.SIGKILL), (minutes / 2, signal.SIGSTOP)]
        while time.monotonic() < self.end:
            passed = (time.monotonic() - began) / 60
            if deeds and passed > deeds[0][0]:
                victim = children(parent)[0]
                print(f"{passed:4.1f} min: {deeds[0][1].name} to process {victim}", flush=True)
                os.kill(victim, deeds.pop(0)[1])
            print(
                f"{passed:4.1f} min: {memory(parent):6.0f} MB, processes {children(parent)}, {dict(self.counts)}",
                flush=True,
            )
            await asyncio.sleep(min(30.0, minutes * 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run that translates, as of the recipe numbers")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    options = parser.parse_args()
    import regard

    predictor = regard.load(options.run)
    texts = WORDS + ["".join(pair) for pair in itertools.product(WORDS, repeat=2)][:100]
    expected = dict(zip(texts, predictor(texts), strict=True))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve(options.run, port) as parent:
        began = time.monotonic()
        soak = Soak(
            f"http://127.0.0.1:{port}", expected, predictor.config.text.languages[1], began + 60 * options.minutes
        )

        async def all_of_it() -> None:
            await asyncio.gather(*(soak.work(number) for number in range(options.clients)), soak.disturb(parent, began))

        asyncio.run(all_of_it())
        print(f"at the end: {memory(parent):.0f} MB")
    print(json.dumps(soak.counts, indent=2))
    for line in soak.wrong[:20]:
        print(line)
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
