"""The queue before the models: limits, texts that wait and are decoded together, batches that take turns.

One thread owns the models. While it decodes one batch, the texts of the next gather; a text is answered as soon as it
is finished, and its answer does not depend on what else is in its batch. Whoever has waited for a second because of a
long one begins beside it: batches take turns, some milliseconds each. Clients take turns too, text by text, so that
nobody waits behind all texts of another.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from regard.server.settings import RefusedError, ServeSettings


class Metrics:
    """What is counted, for Prometheus."""

    def __init__(self) -> None:
        self.registry = here = CollectorRegistry()
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.requests = Counter("regard_requests", "Requests answered.", ["route", "status"], registry=here)
        self.seconds = Histogram("regard_request_seconds", "From request to answer.", ["route"], registry=here)
        self.batch = Histogram("regard_batch_texts", "Texts decoded together.", registry=here, buckets=sizes)
        self.waiting = Gauge("regard_waiting_texts", "Texts in the queue.", registry=here, multiprocess_mode="livesum")
        self.tokens = Counter("regard_tokens", "Tokens read and written.", ["side"], registry=here)
        self.flagged = Counter("regard_flagged_answers", "Answers that the guard flagged.", registry=here)

    def write(self) -> bytes:
        """What was counted here and by the processes beside this one, for Prometheus; if somebody has removed the files
        that they share, what was counted here."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        with contextlib.suppress(OSError, ValueError):
            if folder is not None and any(Path(folder).glob(f"*_{os.getpid()}.db")):
                together = CollectorRegistry()
                MultiProcessCollector(together, folder)  # type: ignore[no-untyped-call]
                return generate_latest(together)
        return generate_latest(self.registry)


Work = Callable[[list[Any]], Iterable[tuple[int, Any] | None]]
"""Items -> the place of each and its outcome, as they come: a result, or the exception to raise where it was asked for.
None between them is a moment in which others may take their turn."""
Steps = Generator[tuple[int, Any] | None]
PATIENCE = 1.0
"""Seconds that batches work alone before others begin beside them: a large batch is faster than two small ones."""
BESIDE = 16
"""Batches that take turns at most: each holds memory. Half of them are kept for clients that have none."""
ALIKE = 4
"""Batches of one key among them, half of them likewise: whoever comes later gathers, for a row more in a batch costs
less than a batch."""
CLIENTS = 4
"""Clients that can fill the queue together, each to its own limit."""
TURN = 0.02
"""Seconds of a turn: some steps of a small model, or one of a large one."""
CLIENT: ContextVar[Hashable] = ContextVar("client", default=None)
"""Who is asking; the middleware knows."""


class Job(NamedTuple):
    """One item that waits. Jobs of equal keys may be worked on together."""

    key: Hashable
    work: Work
    item: Any
    future: asyncio.Future[Any]
    client: Hashable
    round: int  # the lowest goes first; the texts of a client have one after another


class Batch(NamedTuple):
    """Jobs that are being worked on."""

    jobs: list[Job]
    steps: Steps
    began: float


class Batcher:
    """A bounded queue in front of one thread."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.waiting: tuple[Job, ...] = ()
        self.running: list[Batch] = []
        self.closing = False
        self.round, self.moved = 0, 0.0  # the latest that was worked on, and when the latest step was finished

    async def __aenter__(self) -> "Batcher":
        threads = self.settings.threads or torch.get_num_threads()
        self.pool = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self.news, self.closing = asyncio.Event(), False
        self.task = asyncio.create_task(self.run())
        self.task.add_done_callback(self.give_up)
        return self

    async def __aexit__(self, *problem: object) -> None:
        """Finish what was accepted, then stop."""
        self.closing = True
        self.news.set()
        await self.task
        self.pool.shutdown()

    async def submit(self, key: Hashable, work: Work, items: Sequence[Any]) -> list[Any]:
        """The outcomes of items; whoever stops waiting for them takes those that have not begun out of the queue."""
        client = CLIENT.get()
        own = [job.round for job in self.waiting if job.client == client]
        self.admit(len(items), len(own))
        loop, start = asyncio.get_running_loop(), max(own, default=self.round) + 1
        jobs = [Job(key, work, item, loop.create_future(), client, turn) for turn, item in enumerate(items, start)]
        self.queue([*self.waiting, *jobs])
        self.news.set()
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await asyncio.gather(*(job.future for job in jobs))
        except TimeoutError:
            words = f"no answer within {self.settings.timeout:g} seconds: the server is busy. Try again later."
            raise RefusedError(503, words) from None
        finally:
            for job in jobs:
                job.future.cancel()
            if any(job.future.cancelled() for job in jobs):
                self.queue(job for job in self.waiting if not job.future.done())

    def queue(self, jobs: Iterable[Job]) -> None:
        """These wait from now on."""
        self.waiting = tuple(jobs)
        self.metrics.waiting.set(len(self.waiting))

    def admit(self, came: int, own: int) -> None:
        """Refuse what the queue cannot take from a client of whom some texts wait already."""
        most = self.settings.max_queue
        if self.closing:
            raise RefusedError(503, "the server is stopping. Try another, or again later.")
        if problem := self.problem():
            raise RefusedError(503, f"{problem} Try again later.")
        if came > most:
            raise RefusedError(413, f"the request holds {came:,} pieces of text, at most {most:,} are taken. Split it.")
        for waiting, limit in ((own, most), (len(self.waiting), CLIENTS * most)):
            if waiting + came > limit:
                raise RefusedError(429, f"the queue is full: {waiting:,} texts wait, at most {limit:,} may. Try later.")

    def problem(self) -> str | None:
        """Why nothing is answered, if that is so: the thread has ended, or a step does not."""
        if self.task.done() and not self.closing:
            return "the model's thread has ended."
        still = time.monotonic() - self.moved
        if self.running and still > self.settings.step_timeout:
            return f"the model hangs: it has not finished a step for {still:.0f} seconds."
        return None

    def give_up(self, task: asyncio.Task[None]) -> None:
        """Tell those who wait that the thread has ended, if it has before all were answered."""
        for job in [*self.waiting, *(job for batch in self.running for job in batch.jobs)]:
            settle(job.future, RefusedError(503, "the model's thread has ended. Try again later."))

    async def run(self) -> None:
        """Work until the server stops and nobody waits any more."""
        self.loop = asyncio.get_running_loop()
        while self.waiting or self.running or not self.closing:
            if self.due():
                await self.gathered()
                if jobs := self.taken():
                    self.moved = time.monotonic() if not self.running else self.moved
                    self.running.append(Batch(jobs, started(jobs), time.monotonic()))
            if self.running:
                await self.loop.run_in_executor(self.pool, self.turns)
            elif not self.waiting and not self.closing:
                self.news.clear()
                await self.news.wait()

    def due(self) -> bool:
        """Whether those who wait may begin: nobody is worked for, or everybody has been for a while."""
        if not self.waiting or not self.running:
            return bool(self.waiting)
        rested = time.monotonic() - self.running[-1].began > PATIENCE
        return rested and len(self.running) < BESIDE and self.first() is not None

    def first(self) -> Job | None:
        """The job whose turn it is, of those that may begin."""
        keys = [batch.jobs[0].key for batch in self.running]
        busy = [{job.client for job in batch.jobs if not job.future.done()} for batch in self.running]

        def may_begin(job: Job) -> bool:
            alike = [clients for key, clients in zip(keys, busy, strict=True) if key == job.key]
            limits = ((busy, BESIDE), (alike, ALIKE))
            return all(len(some) < most // (1 + any(job.client in one for one in some)) for some, most in limits)

        return min(filter(may_begin, self.waiting), key=lambda job: job.round, default=None)

    async def gathered(self) -> None:
        """Wait as long as others join."""
        count = 0
        while count < len(self.waiting) < self.settings.batch_items:
            count = len(self.waiting)
            await asyncio.sleep(self.settings.wait_ms / 1000)

    def taken(self) -> list[Job]:
        """The first job and those that can be worked on with it, out of the queue."""
        if (first := self.first()) is None:
            return []
        alike = sorted((job for job in self.waiting if job.key == first.key), key=lambda job: job.round)
        batch = alike[: self.settings.batch_items]
        gone = set(map(id, batch))
        self.queue(job for job in self.waiting if id(job) not in gone)
        self.round = max(self.round, first.round)
        self.metrics.batch.observe(len(batch))
        return batch

    def turns(self) -> None:
        """Let every batch do some steps in its turn, until one has ended or others may begin."""
        ended = False
        while not ended and not self.due():
            for batch in list(self.running):
                until = time.monotonic() + TURN
                while goes_on := self.stepped(batch):
                    if time.monotonic() > until:
                        break
                if not goes_on:
                    self.running.remove(batch)
                    ended = True

    def stepped(self, batch: Batch) -> bool:
        """Do a batch's next step; False if there was none, or nobody waits for it any more."""
        try:
            if all(job.future.done() for job in batch.jobs):
                batch.steps.close()
                return False
            found = next(batch.steps)
        except StopIteration:
            return False
        except BaseException as error:  # a panic in Rust is no Exception, and would end the thread
            self.loop.call_soon_threadsafe(self.broken, batch.jobs, error)
            return False
        finally:
            self.moved = time.monotonic()
        if found is not None:
            self.loop.call_soon_threadsafe(settle, batch.jobs[found[0]].future, found[1])
        return True

    def broken(self, jobs: list[Job], error: BaseException) -> None:
        """Jobs broke down: each that is left is done alone, so that nobody fails because of another."""
        if len(jobs) == 1:
            settle(jobs[0].future, error)
        else:
            left = [job._replace(key=object()) for job in jobs if not job.future.done()]
            self.queue([*left, *self.waiting])


def started(jobs: list[Job]) -> Steps:
    """The work of jobs, which begins with the first step."""
    yield from jobs[0].work([job.item for job in jobs])


def settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Tell whoever waits; perhaps nobody does any more. What is no Exception, as a panic in Rust, becomes one."""
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        panic, outcome = outcome, RuntimeError(f"{type(outcome).__name__}: {outcome}")
        outcome.__cause__ = panic
    if not future.done() and isinstance(outcome, Exception):
        future.set_exception(outcome)
    elif not future.done():
        future.set_result(outcome)
