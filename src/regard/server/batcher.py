"""The queue before the models: limits, texts that wait and are decoded together, batches that take turns.

One thread owns the models. While it decodes one batch, the texts of the next gather; a text is answered as soon as it
is finished, and its answer does not depend on what else is in its batch. Whoever has waited for a second because of a
long one begins beside it: batches take turns, some milliseconds each.
"""

import asyncio
import os
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
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

    def counted(self) -> CollectorRegistry:
        """What was counted here, and by the processes beside this one if there are any."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return self.registry
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together


Work = Callable[[list[Any]], Iterable[tuple[int, Any] | None]]
"""Items -> the place of each and its outcome, as they come: a result, or the exception to raise where it was asked for.
None between them is a moment in which others may take their turn."""
Steps = Generator[tuple[int, Any] | None]
PATIENCE = 1.0
"""Seconds that batches work alone before others begin beside them: a large batch is faster than two small ones."""
BESIDE = 16
"""Batches that take turns at most: each holds memory."""
ALIKE = 2
"""Batches of one key among them: whoever comes later gathers, for a row more in a batch costs less than a batch."""
TURN = 0.02
"""Seconds of a turn: some steps of a small model, or one of a large one."""


class Job(NamedTuple):
    """One item that waits. Jobs of equal keys may be worked on together."""

    key: Hashable
    work: Work
    item: Any
    future: asyncio.Future[Any]


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

    async def __aenter__(self) -> "Batcher":
        threads = self.settings.threads or torch.get_num_threads()
        self.pool = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self.news, self.closing = asyncio.Event(), False
        self.task = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *problem: object) -> None:
        """Finish what was accepted, then stop."""
        self.closing = True
        self.news.set()
        await self.task
        self.pool.shutdown()

    async def submit(self, key: Hashable, work: Work, items: Sequence[Any]) -> list[Any]:
        """The outcomes of items; whoever stops waiting for them takes those that have not begun out of the queue."""
        self.admit(len(items))
        loop = asyncio.get_running_loop()
        jobs = [Job(key, work, item, loop.create_future()) for item in items]
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

    def admit(self, came: int) -> None:
        """Refuse what the queue cannot take."""
        waiting, most = len(self.waiting), self.settings.max_queue
        if self.closing:
            raise RefusedError(503, "the server is stopping. Try another, or again later.")
        if came > most:
            raise RefusedError(413, f"the request holds {came:,} pieces of text, at most {most:,} are taken. Split it.")
        if waiting + came > most:
            raise RefusedError(429, f"the queue is full: {waiting:,} texts wait, at most {most:,} may. Try later.")

    async def run(self) -> None:
        """Work until the server stops and nobody waits any more."""
        self.loop = asyncio.get_running_loop()
        while self.waiting or self.running or not self.closing:
            if self.due():
                await self.gathered()
                if jobs := self.taken():
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
        """The job that waited longest of those that may begin."""
        running = [batch.jobs[0].key for batch in self.running]
        return next((job for job in self.waiting if running.count(job.key) < ALIKE), None)

    async def gathered(self) -> None:
        """Wait as long as others join."""
        count = 0
        while count < len(self.waiting) < self.settings.batch_items:
            count = len(self.waiting)
            await asyncio.sleep(self.settings.wait_ms / 1000)

    def taken(self) -> list[Job]:
        """The first job and those that can be worked on with it, out of the queue."""
        first, batch, rest = self.first(), list[Job](), list[Job]()
        for job in self.waiting:
            fits = first is not None and job.key == first.key and len(batch) < self.settings.batch_items
            (batch if fits else rest).append(job)
        self.queue(rest)
        if batch:
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
        if all(job.future.done() for job in batch.jobs):
            batch.steps.close()
            return False
        try:
            found = next(batch.steps)
        except StopIteration:
            return False
        except Exception as error:
            self.loop.call_soon_threadsafe(self.broken, batch.jobs, error)
            return False
        if found is not None:
            self.loop.call_soon_threadsafe(settle, batch.jobs[found[0]].future, found[1])
        return True

    def broken(self, jobs: list[Job], error: Exception) -> None:
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
    """Tell whoever waits; perhaps nobody does any more."""
    if not future.done() and isinstance(outcome, Exception):
        future.set_exception(outcome)
    elif not future.done():
        future.set_result(outcome)
