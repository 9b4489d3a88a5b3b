"""How far many runs are: a bar with the one that runs on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flexfloor.report.live import can_draw
from flexfloor.report.words import format_count, line_gap


class Runs(Protocol):
    def done(self, count: int) -> None:
        """So many more have ended."""

    def now(self, what: str) -> None:
        """What runs now."""


@contextmanager
def show_runs(
    total: int, *, quiet: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Runs]:
    """Inside the block it can be told of `total` runs; of the bar nothing stays."""
    stream = stream or sys.stderr
    if quiet or not can_draw(stream):
        yield _Lines(total, None if quiet else stream, clock)
        return
    console = Console(file=stream)
    bar = Progress(
        BarColumn(bar_width=10 if console.width < 80 else 20),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),
    )
    with bar:
        # What is left beside the other columns: one that wraps would squeeze them.
        yield _OnBar(bar, bar.add_task("", total=total), room=console.width - (50 if console.width >= 80 else 40))


class _OnBar:
    def __init__(self, bar: Progress, task: TaskID, room: int) -> None:
        self._bar, self._task, self._room = bar, task, room

    def done(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=what[: self._room])


class _Lines:
    """A line after the first second, then about every second, later less often. stream: None is quiet."""

    def __init__(self, total: int, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._total, self._stream, self._clock = total, stream, clock
        self._begun = self._last = clock()
        self._done = 0

    def done(self, count: int) -> None:
        self._done += count

    def now(self, what: str) -> None:
        age = self._clock() - self._begun
        if self._stream is None or self._begun + age - self._last < line_gap(age):
            return
        self._last = self._begun + age
        done = f"{format_count(self._done)} of {format_count(self._total)} runs done"
        print(f"{age:7.1f}s  {done}  now {what}", file=self._stream, flush=True)
