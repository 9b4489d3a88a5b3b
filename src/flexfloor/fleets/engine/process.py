"""The process around a Worker: commands in, replies and heartbeats out.

Messages to the worker are (number, verb, arguments); from it (number, status, value), with number 0 for heartbeats.
One thread owns the pipe's reading side, so that the end of the driver is noticed in the middle of any computation.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

HEARTBEAT = 0
READY, OK, INPUT_ERROR, ERROR = "ready", "ok", "input_error", "error"


class WorkerProcess:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[int, str, tuple]] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        from flexfloor.errors import InputError
        from flexfloor.fleets.engine import worker as module

        self._send(HEARTBEAT, READY, None)
        worker: Any = None
        while True:
            number, verb, arguments = self._commands.get()
            try:
                if verb == "init":
                    config, interval = arguments
                    worker = config.make_worker() if hasattr(config, "make_worker") else module.Worker(config)
                    threading.Thread(target=self._beat, args=(worker, interval), daemon=True).start()
                    value: Any = None
                else:
                    value = attrgetter(verb)(worker)(*arguments)
                self._send(number, OK, value)
            except InputError as error:
                self._send(number, INPUT_ERROR, str(error))
            except Exception as error:
                self._send(number, ERROR, (f"{type(error).__name__}: {error}", traceback.format_exc()))

    def _read(self) -> None:
        while True:
            try:
                self._commands.put(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(0)  # the driver is gone or has closed the fleet: nobody is left to report to

    def _beat(self, worker: Any, interval: float) -> None:
        pause = threading.Event()
        while not pause.wait(interval):
            worker.note_memory()
            self._send(HEARTBEAT, OK, worker.iteration)

    def _send(self, number: int, status: str, value: Any) -> None:
        with self._sending:
            try:
                self._pipe.send((number, status, value))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
