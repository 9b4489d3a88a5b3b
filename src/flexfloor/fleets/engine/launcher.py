"""Starting worker processes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Protocol


class WorkerHandle(Protocol):
    """A started worker as the driver sees it. `pipe` speaks the messages of `process`."""

    pipe: Connection

    def exit_reason(self) -> str | None:
        """How the process ended, in words; None while it runs."""

    def kill(self) -> None:
        """End the process at once and wait until it is gone. Safe to call twice."""

    def wait(self, seconds: float) -> bool:
        """Give the process time to end by itself. True if it has."""


class Launcher(Protocol):
    def start(self, workers: int, environment: Mapping[str, str]) -> list[WorkerHandle]: ...


class LocalHandle:
    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # Never shown unless the process ends by accident: then its last line says why.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexfloor.fleets.engine.process", str(theirs.fileno())],
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if os.environ.get("FLEXFLOOR_DEBUG") else self._stderr,
            )
        self.pipe = Connection(ours.detach())

    def exit_reason(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f": {lines[-1][:300]}" if lines else "")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.pipe.close()
        self._stderr.close()

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class LocalLauncher:
    """One process a worker, on this machine."""

    def start(self, workers: int, environment: Mapping[str, str]) -> list[WorkerHandle]:
        return [LocalHandle(environment) for _ in range(workers)]
