"""Commands on a pseudo-terminal of a given size, with what a user would see of them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Seen:
    """code: exit code. screens: different screens, in order, the last one as the command left it. output: all bytes."""

    code: int = -1
    screens: list[list[str]] = field(default_factory=list)
    output: bytes = b""
    cursor_hidden: bool = False

    @property
    def last(self) -> list[str]:
        return self.screens[-1]

    def find(self, *told: str) -> list[str] | None:
        """The first screen that shows all of it."""
        return next((s for s in self.screens if all(any(part in line for line in s) for part in told)), None)


def run_on_terminal(
    arguments: Sequence[str],
    *,
    program: Sequence[str | Path] = ("-m", "flexfloor"),
    columns: int = 80,
    rows: int = 30,
    environment: Mapping[str, str] | None = None,
    when: Callable[[list[str]], bool] = lambda screen: False,
    then: signal.Signals | bytes = b"",
    stdout: Path | None = None,
    timeout: float = 100.0,
) -> Seen:
    """`python -m flexfloor`, or another program, with `arguments`.

    then: keys, or a signal for the command alone, once the screen is such that `when`. stdout: goes to this file
    instead of the terminal.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    own = {"PYTHONPATH": str(REPOSITORY / "src"), "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}

    def take_terminal() -> None:
        # A test run in the background of a shell has SIGINT ignored, which children inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    with open(stdout or os.devnull, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, program), *arguments],
            stdin=theirs,
            stdout=file if stdout else theirs,
            stderr=theirs,
            env={**inherited, **own, **(environment or {})},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
    os.close(theirs)
    screen = pyte.Screen(columns, rows)
    stream, seen, until = pyte.ByteStream(screen), Seen(), time.monotonic() + timeout
    try:
        while (data := _read(ours, until)) is not None:
            seen.output += data
            stream.feed(data)
            shown = [line.rstrip() for line in screen.display]
            if not seen.screens or shown != seen.screens[-1]:
                seen.screens.append(shown)
            if then and when(shown):
                if isinstance(then, bytes):
                    os.write(ours, then)
                else:
                    process.send_signal(then)
                then = b""
        seen.code = process.wait(timeout=20)
    finally:
        process.kill()
        os.close(ours)
    seen.cursor_hidden = screen.cursor.hidden
    return seen


def _read(file: int, until: float) -> bytes | None:
    """What comes next; None when the other side has been closed. Raises TimeoutError."""
    if not select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
        raise TimeoutError("the command goes on and on")
    try:
        return os.read(file, 65536) or None
    except OSError:  # EIO: nobody has the terminal open any more
        return None
