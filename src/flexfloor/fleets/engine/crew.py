"""The driver's line to its worker processes: numbered commands, replies, heartbeats, and who has failed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import wait as wait_for_pipes
from typing import Any, NoReturn

from flexfloor.errors import FlexFloorError, InputError, WorkerFailedError
from flexfloor.fleets.engine.launcher import WorkerHandle
from flexfloor.fleets.engine.process import ERROR, HEARTBEAT, INPUT_ERROR, OK, READY

_IMPORT_TIMEOUT = 300.0  # seconds; a first import on a cold disk is slow, and no heartbeat can tell


_PEER_GONE = ("closed by peer", "Broken pipe", "reset by peer", "timed out")  # what a failure causes elsewhere


class PhaseFailedError(Exception):
    """A command that may fail has failed on a worker, which goes on."""

    def __init__(self, worker: int, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")


class Crew:
    """All worker processes of a fleet, active or not. timeout: seconds without a sign of life until one has failed."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._number = 0
        self.handles: dict[int, WorkerHandle] = {}
        self.parked: set[int] = set()  # outside every group: one that is lost is started anew when it is needed
        self._interrupted = False

    def add(self, started: Mapping[int, WorkerHandle]) -> None:
        """Take on processes that were just started, and wait until they can be told something."""
        self.handles |= started
        self._await_ready(set(started))

    def dismiss(self, worker: int) -> None:
        """End one process that is no longer needed."""
        handle = self.handles.pop(worker)
        with contextlib.suppress(OSError):
            handle.pipe.close()
        handle.wait(0.5)
        handle.kill()

    def close(self) -> None:
        """End every process. Safe to call twice."""
        handles, self.handles = self.handles, {}
        # Closing the pipes tells the workers to end; who is stuck is killed.
        for handle in handles.values():
            with contextlib.suppress(OSError):
                handle.pipe.close()
        deadline = time.monotonic() + 0.5
        for handle in handles.values():
            handle.wait(max(0.0, deadline - time.monotonic()))
            handle.kill()

    def call(self, verb: str, payloads: Mapping[int, tuple], may_fail: bool = False) -> dict[int, Any]:
        """Send one numbered command and wait for every addressed worker.

        may_fail: a worker that raises has not failed; once all have answered PhaseFailedError names it.
        Raises InputError, WorkerFailedError.
        """
        if not self.handles:
            raise FlexFloorError("the fleet is closed")
        if self._interrupted:
            raise FlexFloorError("the fleet was interrupted in the middle of a command; close it and launch a new one")
        self._interrupted = True  # until all have answered: nobody knows what they did meanwhile
        try:
            replies = self._exchange(verb, payloads, may_fail)
        except (PhaseFailedError, FlexFloorError):
            self._interrupted = False
            raise
        self._interrupted = False
        return replies

    def _exchange(self, verb: str, payloads: Mapping[int, tuple], may_fail: bool) -> dict[int, Any]:
        self._number += 1
        heard = dict.fromkeys(self.handles, time.monotonic())
        for worker, arguments in payloads.items():
            self._send(worker, verb, arguments)
        replies: dict[int, Any] = {}
        refused: list[str] = []
        failed: dict[int, str] = {}
        pending = set(payloads) & set(self.handles)
        timeout = self._timeout
        while pending:
            for worker in self._receivable(set(self.handles), min(1.0, timeout / 4)):
                if (message := self._receive(worker)) is None:
                    pending.discard(worker)
                    continue
                number, status, value = message
                heard[worker] = time.monotonic()
                if number == HEARTBEAT:
                    continue
                assert number == self._number, f"worker {worker} answered command {number}, not {self._number}"
                if status == ERROR and not may_fail:
                    self._fail_after_error(worker, value)
                elif may_fail and status != OK:
                    reason = value[0] if status == ERROR else value
                    failed.setdefault(worker, " ".join(reason.split())[:300])
                elif status == INPUT_ERROR:
                    refused.append(value)
                pending.discard(worker)
                replies[worker] = value
            silent = min(self.handles, key=heard.__getitem__)
            if time.monotonic() - heard[silent] > timeout and not self._lose(silent):
                self._fail(silent, f"gave no sign of life for {timeout:g} s (`worker_timeout`)")
            pending &= set(self.handles)
        if failed:
            raise PhaseFailedError(*self._culprit(failed))
        if refused:
            self.close()
            raise InputError(refused[0])
        return replies

    def _culprit(self, failed: Mapping[int, str]) -> tuple[int, str]:
        """Who failed first, not who only lost its peer by that; a peer that is dead is worse than either."""
        for worker, handle in self.handles.items():
            if worker not in self.parked and (reason := handle.exit_reason()):
                self._fail(worker, reason)
        first = ((w, m) for w, m in failed.items() if not any(sign in m for sign in _PEER_GONE))
        return next(first, next(iter(failed.items())))

    def _send(self, worker: int, verb: str, arguments: tuple) -> None:
        try:
            self.handles[worker].pipe.send((self._number, verb, arguments))
        except OSError:
            if not self._lose(worker):
                self._fail(worker, self._exit_reason(worker))

    def _receivable(self, workers: set[int], seconds: float) -> list[int]:
        pipes: dict[Any, int] = {self.handles[w].pipe: w for w in sorted(workers)}
        return [pipes[pipe] for pipe in wait_for_pipes(list(pipes), timeout=max(0.0, seconds))]

    def _receive(self, worker: int) -> tuple[int, str, Any] | None:
        """A message, None from a parked worker that is lost."""
        try:
            return self.handles[worker].pipe.recv()
        except (EOFError, OSError):
            if not self._lose(worker):
                self._fail(worker, self._exit_reason(worker))
        return None

    def _lose(self, worker: int) -> bool:
        """Do without a worker that is gone or silent, if it is a parked one: nobody depends on it now."""
        if worker not in self.parked:
            return False
        self.parked.discard(worker)
        self.handles.pop(worker).kill()
        return True

    def _exit_reason(self, worker: int) -> str:
        handle = self.handles[worker]
        handle.wait(1.0)
        return handle.exit_reason() or "closed its pipe"

    def _fail_after_error(self, worker: int, value: tuple[str, str]) -> NoReturn:
        """An exchange breaks on every survivor when a peer dies: look for who is really gone before naming one."""
        message, trace = value
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for other, handle in self.handles.items():
                if other not in self.parked and (reason := handle.exit_reason()):
                    self._fail(other, reason)
            time.sleep(0.05)
        if os.environ.get("FLEXFLOOR_DEBUG"):
            print(trace)
        self._fail(worker, f"failed: {' '.join(message.split())[:500]}")

    def _fail(self, worker: int, reason: str) -> NoReturn:
        for handle in self.handles.values():
            handle.kill()
        self.close()
        raise WorkerFailedError(worker, reason)

    def _await_ready(self, waiting: set[int]) -> None:
        deadline = time.monotonic() + _IMPORT_TIMEOUT
        while waiting:
            for worker in self._receivable(waiting, deadline - time.monotonic()):
                message = self._receive(worker)
                if message is not None and message[:2] == (HEARTBEAT, READY):
                    waiting.discard(worker)
            if time.monotonic() > deadline:
                self._fail(min(waiting), f"did not start within {_IMPORT_TIMEOUT:.0f} s")
