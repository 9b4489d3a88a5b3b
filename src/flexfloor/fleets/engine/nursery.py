"""A process that imports once what every worker needs and then forks workers on demand.

Importing torch and transformers takes seconds of processor time; a fork takes milliseconds. The nursery never
computes anything, so that a worker's environment (threads, reproducible modes of the BLAS) still applies when set
after the fork. It ends when its driver does. Run as `python -m … FD`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "flexfloor.fleets.engine.worker",
)


def serve(driver: socket.socket) -> None:
    """Answer requests, one JSON object each: fork a worker (its pipe and stderr come as descriptors) or poll one."""
    for name in _PRELOAD:
        importlib.import_module(name)
    from flexfloor.fleets.engine import kernels

    kernels.warm_up()
    # A collection in a forked worker would walk and copy all that is inherited, in the middle of a rollout.
    gc.collect()
    gc.freeze()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(driver, 65536, 2)
        except ConnectionResetError:
            return
        if not message:
            return
        request = json.loads(message)
        if "fork" in request:
            answer: Any = _fork(driver, request["fork"], descriptors)
        else:
            answer = _poll(request["poll"])
        driver.send(json.dumps(answer).encode())


def _fork(driver: socket.socket, environment: dict[str, str], descriptors: list[int]) -> int:
    pipe, stderr = descriptors
    pid = os.fork()
    if pid == 0:
        driver.close()
        os.environ.update(environment)
        os.dup2(stderr, 2)
        os.close(stderr)
        from flexfloor.fleets.engine.process import WorkerProcess

        WorkerProcess(Connection(pipe)).run()
    os.close(pipe)
    os.close(stderr)
    return pid


def _poll(pid: int) -> int | None:
    """Exit code of a worker, negative for a signal; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    # Ctrl-C reaches the whole process group; what it means is the driver's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
