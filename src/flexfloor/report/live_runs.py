"""How far many runs are: a bar with the view of the one that runs on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flexfloor.report.live import Drawn, can_draw
from flexfloor.report.live_state import LiveState
from flexfloor.report.live_view import Line, describe_progress, draw
from flexfloor.report.words import format_count, line_gap

SHOW_AFTER_S = 1.0
"""Seconds that a run has lasted before it is shown: those that flicker by could not be read."""


class Runs(Protocol):
    def done(self, count: int) -> None:
        """So many more have ended."""

    def now(self, what: str) -> None:
        """What runs now."""

    def record(self, record: Mapping[str, Any]) -> None:
        """The next record of the ledger of the run that runs now."""


@contextmanager
def show_runs(
    total: int, *, quiet: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Runs]:
    """Inside the block it can be told of `total` runs; of the bar and the view nothing stays."""
    stream = stream or sys.stderr
    if quiet or not can_draw(stream):
        yield _Lines(total, None if quiet else stream, clock)
        return
    console = Console(file=stream)
    view = _View(clock, plain=not (console.encoding or "").lower().startswith("utf"))
    bar = _BarAndView(
        BarColumn(bar_width=10 if console.width < 80 else 20),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=2,  # a drawing takes 2 ms from the simulation
        redirect_stdout=sys.stdout.isatty(),
    )
    bar.view = view
    with bar:
        # What is left beside the other columns: one that wraps would squeeze them.
        yield _OnBar(bar, bar.add_task("", total=total), console.width - (50 if console.width >= 80 else 40), view)


class _View:
    """The run that runs now, drawn by the thread of the bar while records come from another."""

    def __init__(self, clock: Callable[[], float], *, plain: bool) -> None:
        self._clock, self._plain = clock, plain
        self._lock = threading.Lock()
        self._state: LiveState | None = None
        self._begun = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            if record["type"] == "start":
                self._state, self._begun = LiveState(record), self._clock()
            elif self._state is not None:
                self._state.take(record)

    def lines(self, width: int, height: int) -> list[Line]:
        """height: with the line of the bar."""
        with self._lock:
            if self._state is None or self._clock() - self._begun < SHOW_AFTER_S:
                return []
            return draw(self._state, width, height - 1, plain=self._plain)


class _BarAndView(Progress):
    """The bar, the view below it, and the row of the cursor."""

    view: _View

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if hasattr(self, "view"):  # rich asks while it is made, too
            yield Drawn(self.view.lines)


class _OnBar:
    def __init__(self, bar: Progress, task: TaskID, room: int, view: _View) -> None:
        self._bar, self._task, self._room, self._view = bar, task, room, view

    def done(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=what[: self._room])

    def record(self, record: Mapping[str, Any]) -> None:
        self._view.take(record)


class _Lines:
    """A line after the first second, then about every second, later less often. stream: None is quiet."""

    def __init__(self, total: int, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._total, self._stream, self._clock = total, stream, clock
        self._begun = self._last = clock()
        self._done = 0
        self._what = ""
        self._state: LiveState | None = None

    def done(self, count: int) -> None:
        self._done += count

    def now(self, what: str) -> None:
        self._what, self._state = what, None
        self._print()

    def record(self, record: Mapping[str, Any]) -> None:
        if record["type"] == "start":
            self._state = LiveState(record)
        elif self._state is not None:
            self._state.take(record)
            self._print()

    def _print(self) -> None:
        age = self._clock() - self._begun
        if self._stream is None or self._begun + age - self._last < line_gap(age):
            return
        self._last = self._begun + age
        done = f"{format_count(self._done)} of {format_count(self._total)} runs done"
        where = f"  {describe_progress(self._state)}" if self._state is not None else ""
        print(f"{age:7.1f}s  {done}  now {self._what}{where}", file=self._stream, flush=True)
