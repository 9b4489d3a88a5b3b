"""The live view of a terminal: redrawn as records come, lines and warnings scroll by above it, nothing stays of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from flexfloor.ledger.accounting import Summary
from flexfloor.report.live_capture import Capture
from flexfloor.report.live_state import LiveState
from flexfloor.report.live_view import Line, draw
from flexfloor.report.words import describe_summary

REDRAW_S = 0.25
"""Seconds between two drawings: each takes about a millisecond from the driver, for which all workers wait."""


def can_draw(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _is_stderr(stream: TextIO) -> bool:
    return stream is sys.__stderr__


class LiveDisplay:
    """Shows rollouts on a terminal, from the records of their ledgers. It has no thread: what draws is a record.

    A context manager; however its block is left, the terminal is as before. The methods are those of
    `flexfloor.cli.display.Display`.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False, force_terminal=True)
        self._capture: Capture | None = None
        self._plain = not (self._console.encoding or "").lower().startswith("utf")
        self._live = Live(
            Drawn(self._lines),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file must get there
            vertical_overflow="crop",
        )
        self._clock = clock
        self._begun = clock()
        self._drawn = -REDRAW_S
        self._state: LiveState | None = None
        self._done: list[str] = []  # a line for each rollout that has ended
        self._status = ""

    def __enter__(self) -> Self:
        if _is_stderr(self._stream):
            with suppress(OSError):  # without it, what others write may land in the view
                self._capture = Capture(self._stream)
                self._console.file = self._capture.terminal
                self._console.size = ConsoleDimensions(*self._capture.size)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the view away. Safe to call twice."""
        try:
            self._let_others_speak()
            self._live.stop()
        finally:
            if self._state is not None:
                self._console.show_cursor(True)
            if (capture := self._capture) is not None:
                self._capture, self._console.file = None, self._stream
                self._print(*capture.close())

    def _let_others_speak(self) -> None:
        """Put above the view what was written beside it."""
        if self._capture is not None and (lines := self._capture.lines()):
            self._print(*lines)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def phase(self, text: str) -> None:
        self._let_others_speak()
        self._print(f"{self._clock() - self._begun:7.1f}s  {text}")

    def status(self, text: str) -> None:
        self._status = text
        self._draw(force=True)

    def begin_rollout(self, policy: str) -> None:
        pass  # the start record names it

    def end_rollout(self, summary: Summary) -> None:
        self._done.append(describe_summary(summary))

    def record(self, record: Mapping[str, Any]) -> None:
        if record["type"] == "start":
            self._state = LiveState(record)
            self._live.start()
        if self._state is not None:
            self._state.take(record)
            self._draw(force=record["type"] == "end")

    def _draw(self, force: bool) -> None:
        now = self._clock()
        if self._live.is_started and (force or now - self._drawn >= REDRAW_S):
            if self._capture is not None:
                self._console.size = ConsoleDimensions(*self._capture.size)
            self._let_others_speak()
            self._live.refresh()
            self._drawn = self._clock()

    def _lines(self, width: int, height: int) -> list[Line]:
        if self._state is None:
            return []
        above = [*self._done, *([self._status] if self._status else [])]
        return draw(self._state, width, height, above=above, plain=self._plain)


class Drawn:
    """Lines as rich wants them; made anew whenever it draws, for the size that the terminal has then.

    Below them is an empty row for the cursor: what a terminal echoes, like ^C, stands there and moves nothing.
    """

    def __init__(self, lines: Callable[[int, int], list[Line]]) -> None:
        self._lines = lines
        self._styles: dict[str, Style] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # When the view is taken away, rich moves the cursor down once more; the screen must not scroll by that.
        for line in self._lines(options.max_width, max(console.height - 2, 0)):
            yield from self._segments(line)
            yield Segment.line()
        yield Segment(" ")

    def _segments(self, line: Line) -> Iterator[Segment]:
        for text, style in line:
            if style not in self._styles:
                self._styles[style] = Style.parse(style)
            yield Segment(text, self._styles[style])
