"""Starting worker processes on this machine."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from flexfloor.errors import FlexFloorError
from flexfloor.fleets.engine.machine import THIS_MACHINE, Machine

# glibc reads these at a process's start. Intermediates of an iteration stay in the heap: mapping and unmapping them
# each time costs page faults, a fifth of the time of a large model. One heap serves all threads.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",
}


class WorkerHandle(Protocol):
    """A started worker as the driver sees it. `pipe` speaks the messages of `process`."""

    pipe: Connection
    machine: Machine
    sees_one_device: bool
    """Whether its process sees no GPU but its own; else it sees all of them, and takes the one of its number."""

    def exit_reason(self) -> str | None:
        """How the process ended, in words; None while it runs."""

    def kill(self) -> None:
        """End the process at once and wait until it is gone. Safe to call twice."""

    def wait(self, seconds: float) -> bool:
        """Give the process time to end by itself. True if it has."""


class Launcher:
    """Starts workers for one fleet, knows where they are, and what others count as taken by them."""

    home: Machine = THIS_MACHINE
    """The driver's machine, known from the first start on. Its address is one that all workers reach."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def start(self, workers: Sequence[int], environment: Mapping[str, str]) -> Sequence[WorkerHandle]:
        """A process for each of these worker numbers, in their order. Raises InputError when there is no place."""
        raise NotImplementedError

    def yield_device(self, handle: Any) -> None:
        """A released worker keeps its process and computes nothing: others may take what it reserves."""

    def reclaim_devices(self, handles: Mapping[int, Any]) -> None:
        """Before workers that yielded compute again, by number. Raises InputError when others are still there."""

    def copy_folder(self, folder: Path, machines: Sequence[Machine]) -> Mapping[Machine, Path]:
        """Copies of a folder of files in the memory of other machines, for `remove_folders`. Raises FlexFloorError,
        after which there are none."""
        raise NotImplementedError

    def remove_folders(self, copies: Mapping[Machine, Path]) -> None:
        """Never raises: a machine that is gone has taken its copy along."""


class Nursery:
    """The driver's side of the nursery process. One a driver, kept for the next fleet, ended with the driver."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flexfloor.fleets.engine.nursery", str(theirs.fileno())],
                env={**os.environ, **_ALLOCATOR},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._socket = ours
        self._turn = threading.Lock()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        """Raises FlexFloorError when the nursery has ended."""
        with self._turn:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                answer = self._socket.recv(4096)
            except OSError:
                answer = b""
        if not answer:
            raise FlexFloorError(f"the process that starts workers has ended (exit code {self._process.wait()})")
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


_nursery: Nursery | None = None


def _get_nursery() -> Nursery:
    global _nursery
    if _nursery is None or not _nursery.is_alive:
        _nursery = Nursery()
        atexit.register(_nursery.close)
    return _nursery


class LocalHandle:
    """A worker forked by the nursery."""

    machine = THIS_MACHINE
    sees_one_device = False

    def __init__(self, nursery: Nursery, environment: Mapping[str, str]) -> None:
        self._nursery = nursery
        ours, theirs = socket.socketpair()
        # Never shown unless the process ends by accident: then its last line says why.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill
        stderr = 2 if os.environ.get("FLEXFLOOR_DEBUG") else self._stderr.fileno()
        with theirs:
            self.pid: int = nursery.ask({"fork": dict(environment)}, (theirs.fileno(), stderr))
        self.pipe = Connection(ours.detach())
        self._code: int | None = None

    def exit_reason(self) -> str | None:
        code = self._poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if self._stderr.closed:
            return f"ended with exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f": {lines[-1][:300]}" if lines else "")

    def kill(self) -> None:
        if self._poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10.0)
        self.pipe.close()
        self._stderr.close()

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _poll(self) -> int | None:
        if self._code is None:
            try:
                self._code = self._nursery.ask({"poll": self.pid})
            except FlexFloorError:
                # Without its nursery nobody can reap the worker; it ends with its pipe.
                self._code = 1
        return self._code


class LocalLauncher(Launcher):
    """One process a worker, on this machine."""

    def start(self, workers: Sequence[int], environment: Mapping[str, str]) -> list[LocalHandle]:
        nursery = _get_nursery()
        return [LocalHandle(nursery, environment) for _ in workers]


class Stopwatch:
    """Tells what a launch is doing, and keeps how long each phase took: name → seconds."""

    def __init__(self, seconds: dict[str, float], on_phase: Callable[[str], None]) -> None:
        self._seconds, self._on_phase = seconds, on_phase

    @contextlib.contextmanager
    def phase(self, name: str, text: str) -> Any:
        self._on_phase(text)
        begin = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - begin
