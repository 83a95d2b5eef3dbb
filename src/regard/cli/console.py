"""What people see in the terminal: progress with rate and time left, ledgers, tables of scores."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.config.run import Config
from regard.data.examples import Ledger
from regard.evaluation.evaluate import Evaluation
from regard.training.trainer import Event

err = Console(stderr=True, highlight=False, emoji=False)
out = Console(highlight=False, emoji=False)


def say(text: str) -> None:
    """A line as it is, however long: nothing in it is markup."""
    out.print(text, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """A line as it is, on standard error."""
    err.print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """A doubt, on standard error."""
    tell(f"regard: warning: {text}")


def show_ledgers(ledgers: dict[str, Ledger], say: Callable[[str], None]) -> None:
    """What became of the data, split by split."""
    for name, ledger in ledgers.items():
        if ledger.read:
            first, *rest = ledger.lines()
            for line in (f"{name}: {first}", *rest):
                say(line)


SHOWN = 200
"""Letters of a text that an example shows at most."""


def shorten(text: str) -> str:
    """A text, or its beginning and how much there is of it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} letters)"


class TrainingView:
    """Reports a training: a bar in a terminal, a line now and then elsewhere, everything worth keeping in log.txt."""

    def __init__(self, config: Config, run: Path | None, seconds_between_lines: float = 10.0) -> None:
        self.config, self.run, self.pause = config, run, seconds_between_lines
        bar = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
        figures = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.progress = Progress(*bar, figures, *times, console=err, disable=not err.is_terminal)
        self.task = self.progress.add_task("", total=config.train.steps, loss=float("nan"), speed=0.0)
        self.shown = time.monotonic()
        self.tokens, self.loss, self.speed = 0, float("nan"), 0.0
        self.first: Event | None = None  # this training's, which may go on from a saved step
        self.time_limit = 60 * (config.train.minutes or math.inf)  # seconds
        self.board = open_board(run)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()
        if self.board:
            with contextlib.suppress(OSError):
                self.board.close()

    def say(self, text: str) -> None:
        """A line to the terminal and to the log."""
        tell(text)
        if self.run is not None and self.run.is_dir():
            with contextlib.suppress(OSError), (self.run / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def __call__(self, event: Event) -> None:
        """Take one event of the trainer."""
        values = event.values
        match event.kind:
            case "step":
                self.step(event)
            case "warning":
                self.say(f"warning: {values['text']}")
            case "warming":
                figures = f"{values['done']:,} of {values['of']:,} images encoded, {values['rate']:.1f} a second"
                self.say(f"{figures}, {values['left'] / 60:.1f} min left")
            case "sample":
                source, output, wanted = (shorten(str(values[name])) for name in ("source", "output", "wanted"))
                self.say(f"  {source} -> {output} (wanted {wanted})")
            case "validation":
                figures = ", ".join(f"{name} {value:.2f}" for name, value in values.items() if name != "best_step")
                self.say(f"step {event.step:,}: {figures} (at step {values['best_step']:,})")
                self.plot("valid", event)

    def step(self, event: Event) -> None:
        """Smooth the figures of one update and move the bar."""
        now = time.monotonic()
        values = event.values
        self.foretell(event)
        self.tokens += values["tokens"]
        self.loss = 0.95 * self.loss + 0.05 * values["loss"] if math.isfinite(self.loss) else values["loss"]
        self.progress.update(self.task, completed=event.step, loss=self.loss, speed=self.speed)
        if now - self.shown >= (1.0 if err.is_terminal else self.pause):
            self.speed = self.tokens / (now - self.shown)
            self.shown, self.tokens = now, 0
            if not err.is_terminal:
                total = self.config.train.steps or 0
                left = (total - event.step) * values["seconds"] / max(1, event.step)
                left = min(left, self.time_limit - values["seconds"])
                figures = f"loss {self.loss:.3f}  {self.speed:,.0f} tokens/s"
                self.say(f"step {event.step:,}/{total:,}  {figures}  {left / 60:.1f} min left")
        if event.step % 10 == 0:
            self.plot("train", event)

    def foretell(self, event: Event) -> None:
        """Say about how long training takes, once ten updates have been made (the first one is slow)."""
        self.first = self.first or event
        if event.step - self.first.step == 10 and (steps := self.config.train.steps):
            each = (event.values["seconds"] - self.first.values["seconds"]) / 10
            minutes = each * (steps - event.step) / 60
            if 60 * minutes > self.time_limit:
                limit = self.time_limit / 60
                self.say(f"{limit:,.1f} minutes (train.minutes) of updates of {each:.2g} s, and then a validation")
            else:
                self.say(
                    f"about {minutes:,.1f} minutes for {steps:,} updates of {each:.2g} s, and time for validations"
                )

    def plot(self, group: str, event: Event) -> None:
        """Scalars for TensorBoard, as long as there is room for them."""
        with contextlib.suppress(OSError):
            for name, value in event.values.items() if self.board else ():
                self.board.add_scalar(f"{group}/{name}", value, event.step)


def open_board(run: Path | None) -> Any:
    """A TensorBoard writer, if that is installed and there is a run to write to."""
    with contextlib.suppress(ImportError, OSError):
        if run is not None:
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(run / "board"))
    return None


def show_evaluation(found: Evaluation) -> None:
    """Scores of all examples, then by file, and by source length; and how labels were confused."""
    names = list(found.metrics)
    table = Table("source tokens", "examples", *names)
    for row in (*found.files, *found.buckets):
        name = row["length"] if "length" in row else Path(row["file"]).name
        table.add_row(Text(name), f"{row['examples']:,}", *(f"{row[name]:.2f}" for name in names))
    table.add_section()
    table.add_row("all", f"{found.examples:,}", *(f"{found.metrics[name]:.2f}" for name in names), style="bold")
    show_table(table)
    if found.confusion and len(found.confusion) <= 20:
        given = list(next(iter(found.confusion.values())))
        counts = Table("right \\ given", title="confusion")
        for name in given:
            counts.add_column(Text(name))
        for label, row in found.confusion.items():
            counts.add_row(Text(label), *(f"{row[name]:,}" for name in given))
        show_table(counts)
    for title, rows in found.tables.items():
        own = Table(*rows[0], title=title)
        for row in rows:
            own.add_row(
                *(
                    Text(f"{cell:.2f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell)
                    for cell in row.values()
                )
            )
        show_table(own)
    if found.cut:
        out.print(f"{found.cut:,} sources were longer than the model takes, and cut", style="dim")
    for name, signature in found.signatures.items():
        out.print(f"{name}: {signature}", style="dim", soft_wrap=True, markup=False)


def show_table(table: Table) -> None:
    """A table in its full width: in a narrow place lines may wrap, but no number is cut."""
    wide = Console(highlight=False, emoji=False, width=10_000)
    most = Measurement.get(wide, wide.options, table).maximum
    Console(highlight=False, emoji=False, width=max(out.width, most)).print(table)


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C (or SIGTERM) into a wish to stop, which is the number of the signal, 0 before; a second one
    stops at once."""
    wished: list[int] = []

    def wish(number: int, frame: Any) -> None:
        if wished:
            raise KeyboardInterrupt
        wished.append(number)
        print("\nstopping after this step ...", file=sys.stderr)

    before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: wished[0] if wished else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error that counts up."""
    with Progress(console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
