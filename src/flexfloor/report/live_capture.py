"""What anybody writes to the terminal while the view is on it: workers, libraries, everything that inherits stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TextIO

_MOST_BYTES = 1 << 20  # that are read at a time


class Capture:
    """From now to `close`, stdout and stderr of this process and of those it starts go to a file, where they are
    terminals. `terminal` is what stderr was.

    A file and no pipe: nobody waits when nobody reads.
    """

    def __init__(self, stderr: TextIO) -> None:
        """stderr: a terminal with a file number. Raises OSError, with nothing changed, where there is no room."""
        sys.stdout.flush()
        stderr.flush()
        # Appending: whoever writes, nothing is overwritten.
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        saved = os.dup(stderr.fileno())
        self.terminal: TextIO = os.fdopen(saved, "w", encoding=stderr.encoding, errors="replace")
        self._at, self._rest = 0, b""
        self._saved = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        for fd in self._saved:
            os.dup2(self._file.fileno(), fd)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        return os.get_terminal_size(self.terminal.fileno())

    def lines(self) -> list[str]:
        """The lines that were written since the last call."""
        data = os.pread(self._file.fileno(), _MOST_BYTES, self._at)
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [_decode(line) for line in whole]

    def close(self) -> list[str]:
        """Back to the terminal. Returns what is left."""
        sys.stdout.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        left = self.lines()
        while more := self.lines():
            left += more
        left += [_decode(self._rest)] if self._rest else []
        self._file.close()
        self.terminal.close()
        return left


def _decode(line: bytes) -> str:
    """Of what overwrote itself, like a progress bar, the end."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
