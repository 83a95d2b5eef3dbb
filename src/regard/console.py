"""What people see in the terminal: progress with rate and time left, ledgers, tables of scores."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from regard.config import Config
from regard.data import Ledger
from regard.errors import InputError, RegardError
from regard.evaluation import Evaluation
from regard.predict import Output, Predictor
from regard.run import fit
from regard.train import Event

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def show_ledgers(ledgers: dict[str, Ledger], say: Callable[[str], None]) -> None:
    """What became of the data, split by split."""
    for name, ledger in ledgers.items():
        if ledger.read:
            first, *rest = ledger.lines()
            say(f"{name}: {first}")
            for line in rest:
                say(line)


def show_facts(facts: dict[str, Any], say: Callable[[str], None]) -> None:
    """Sizes before training."""
    both = " / ".join
    if "documents" in facts:
        counts = f"{facts['documents']:,} documents of {facts['tokens'][0]:,} tokens"
        say(f"vocabulary {facts['vocabulary'][0]:,}; {counts}; {facts['batches']:,} batches an epoch")
        return
    say(
        f"vocabulary {both(f'{n:,}' for n in facts['vocabulary'])}; tokens {both(f'{n:,}' for n in facts['tokens'])} "
        f"(source / target); median length {both(map(str, facts['median length']))}, longest "
        f"{both(map(str, facts['longest']))}; {facts['batches']:,} batches an epoch, {facts['padding']:.1%} padding"
    )


class Training:
    """Reports a training: a bar in a terminal, a line now and then elsewhere, everything worth keeping in log.txt."""

    def __init__(self, config: Config, run: Path | None, seconds_between_lines: float = 10.0) -> None:
        self.config, self.run, self.pause = config, run, seconds_between_lines
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self.task = self.progress.add_task("", total=config.train.steps, loss=float("nan"), speed=0.0)
        self.shown = time.monotonic()
        self.tokens, self.loss, self.speed = 0, float("nan"), 0.0
        self.board = board(run)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.board:
            self.board.close()

    def say(self, text: str) -> None:
        """A line to the terminal and to the log."""
        err.print(text, markup=False, soft_wrap=True)
        if self.run is not None and self.run.is_dir():
            with (self.run / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def __call__(self, event: Event) -> None:
        """Take one event of the trainer."""
        match event.kind:
            case "step":
                self.step(event)
            case "sample":
                self.say(f"  {event.values['source']} -> {event.values['output']} (wanted {event.values['wanted']})")
            case "validation":
                figures = ", ".join(
                    f"{name} {value:.2f}" for name, value in event.values.items() if name != "best_step"
                )
                self.say(f"step {event.step:,}: {figures} (at step {event.values['best_step']:,})")
                self.plot("valid", event)

    def step(self, event: Event) -> None:
        """Smooth the figures of one update and move the bar."""
        now = time.monotonic()
        values = event.values
        self.tokens += values["tokens"]
        self.loss = 0.95 * self.loss + 0.05 * values["loss"] if math.isfinite(self.loss) else values["loss"]
        self.progress.update(self.task, completed=event.step, loss=self.loss, speed=self.speed)
        if now - self.shown >= (1.0 if err.is_terminal else self.pause):
            self.speed = self.tokens / (now - self.shown)
            self.shown, self.tokens = now, 0
            if not err.is_terminal:
                total = self.config.train.steps
                left = (total - event.step) * values["seconds"] / max(1, event.step)
                self.say(
                    f"step {event.step:,}/{total:,}  loss {self.loss:.3f}  {self.speed:,.0f} tokens/s  "
                    f"{left / 60:.1f} min left"
                )
        if event.step % 10 == 0:
            self.plot("train", event)

    def plot(self, group: str, event: Event) -> None:
        """Scalars for TensorBoard."""
        if self.board:
            for name, value in event.values.items():
                self.board.add_scalar(f"{group}/{name}", value, event.step)


def board(run: Path | None) -> Any:
    """A TensorBoard writer, if that is installed and there is a run to write to."""
    if run is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run / "board"))


def show_evaluation(found: Evaluation) -> None:
    """Scores of all examples, then by file, and by source length; and how labels were confused."""
    names = list(found.metrics)
    table = Table("source tokens", "examples", *names)
    for row in (*found.files, *found.buckets):
        name = row["length"] if "length" in row else Path(row["file"]).name
        table.add_row(name, f"{row['examples']:,}", *(f"{row[name]:.2f}" for name in names))
    table.add_section()
    table.add_row("all", f"{found.examples:,}", *(f"{found.metrics[name]:.2f}" for name in names), style="bold")
    out.print(table)
    if found.confusion and len(found.confusion) <= 20:
        given = list(next(iter(found.confusion.values())))
        counts = Table("right \\ given", *given, title="confusion")
        for label, row in found.confusion.items():
            counts.add_row(label, *(f"{row[name]:,}" for name in given))
        out.print(counts)
    if found.cut:
        out.print(f"{found.cut:,} sources were longer than the model takes, and cut", style="dim")
    for name, signature in found.signatures.items():
        out.print(f"{name}: {signature}", style="dim", soft_wrap=True, markup=False)


def trained(prepared: Any, run: Path, device: str) -> None:
    """Train with everything a person at a terminal wants around it."""
    with Training(prepared.config, run) as view, interruptible() as stop:
        show_ledgers(prepared.splits.ledgers, view.say)
        show_facts(prepared.facts(), view.say)
        progress = fit(prepared, run, view, device=device, stop=stop)
        if stop():
            view.say(f"stopped at step {progress.step:,}; everything is saved. Go on with: regard train --resume {run}")
            return
        best = "" if progress.best is None else f"; best {prepared.config.evaluate.metrics[0]} {progress.best:.2f}"
        view.say(
            f"done: {progress.step:,} steps in {progress.seconds / 60:.1f} min{best} at step {progress.best_step:,}"
        )
        view.say(f"next: regard evaluate {run}, regard predict {run} < input.txt")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C (or SIGTERM) into a wish to stop; a second one stops at once."""
    wished: list[int] = []

    def wish(number: int, frame: Any) -> None:
        if wished:
            raise KeyboardInterrupt
        wished.append(number)
        print("\nstopping after this step ...", file=sys.stderr)

    before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(wished)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error that counts up."""
    with Progress(console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def stdin_lines() -> Iterator[str]:
    """The lines of standard input; one that is not UTF-8 is an error that names it."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input, line {number}: byte 0x{line[error.start]:02x} at {error.start + 1} is not UTF-8. "
                "Convert the text first, for example with iconv -t UTF-8."
            ) from error


def chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lines by the `size`, as they come; those before a line that cannot be read come before its error."""
    group: list[str] = []
    try:
        for line in lines:
            group.append(line)
            if len(group) == size:
                yield group
                group = []
    except RegardError:
        if group:
            yield group
        raise
    if group:
        yield group


def answers_to(
    predictor: Predictor, lines: Sequence[str], best: int, prefix: str, first: int
) -> tuple[list[list[Output]], InputError | None]:
    """The answers to lines up to the first that cannot be taken, and what is wrong with that one: one bad line does not
    lose the answers to those before it."""

    def answered(some: Sequence[str]) -> list[list[Output]]:
        return predictor.predict(some, best=best, prefixes=[prefix] * len(some) if prefix else None, first=first)

    try:
        return answered(lines), None
    except InputError as error:
        count, cut = 0, predictor.cut
        with contextlib.suppress(InputError):
            for line in lines:
                predictor.encode(line)
                count += 1
        predictor.cut = cut
        if count == len(lines):
            raise
        return answered(lines[:count]), error
