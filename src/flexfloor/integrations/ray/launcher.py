"""Starting workers as Ray actors: the same Worker, commands and replies, over TCP instead of pipes.

An actor reserves one CPU for as long as it lives, which `ray.available_resources()` shows. With `release = "end"` a
released worker's actor ends, and Ray may give the CPU to somebody else while the rollout goes on; at its end a new one
asks for it again, and waits no longer than PATIENCE for it. A parked worker keeps what it has.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.fleets.engine.process import WorkerProcess

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise InputError("launcher 'ray' needs Ray: pip install 'flexfloor[ray]'", settings=("launcher",)) from None

PATIENCE = 120.0
"""Seconds that a worker may wait for its place in the cluster and for its process."""

_TOKEN_BYTES = 32


class RayWorker:
    """The actor. It calls the driver back, and then does what the driver says until the connection ends."""

    def serve(self, address: tuple[str, int], token: bytes, index: int) -> None:
        line = socket.create_connection(address, timeout=PATIENCE)
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(token + index.to_bytes(4, "little"))
        WorkerProcess(Connection(line.detach())).run()


class _Line(Connection):
    """The driver's end. Closed, it ends the actor through Ray, which would call an end by itself an accident."""

    def __init__(self, descriptor: int, actor: Any) -> None:
        super().__init__(descriptor)
        self._actor = actor

    def close(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)
        super().close()


class RayHandle:
    """A worker in an actor. See `flexfloor.fleets.engine.launcher.WorkerHandle`."""

    def __init__(self, actor: Any, serving: Any) -> None:
        self._actor, self._serving = actor, serving
        self.pipe: Connection

    def connect(self, descriptor: int) -> None:
        self.pipe = _Line(descriptor, self._actor)

    def exit_reason(self) -> str | None:
        if not self.wait(0.0):
            return None
        try:
            ray.get(self._serving)
        except Exception as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            return f"has lost its actor: {told[0][:200]}"
        return "ended"

    def kill(self) -> None:
        ray.kill(self._actor)
        self.wait(10.0)
        if hasattr(self, "pipe"):
            self.pipe.close()

    def wait(self, seconds: float) -> bool:
        return bool(ray.wait([self._serving], timeout=seconds)[0])


class RayLauncher:
    """One actor a worker, on the machine of the driver. Connects to Ray, or starts one that ends with the driver."""

    def start(self, workers: int, environment: Mapping[str, str]) -> list[RayHandle]:
        """Raises InputError when the cluster has no place for the workers within PATIENCE."""
        _connect(workers)
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server(("127.0.0.1", 0)) as door:
            actor_of: Any = ray.remote(RayWorker).options(
                num_cpus=1,
                max_restarts=0,
                # Weights, and exchanges of the fleet, go through this machine's memory.
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
                runtime_env={"env_vars": dict(environment)},
            )
            actors = [actor_of.remote() for _ in range(workers)]
            address = ("127.0.0.1", door.getsockname()[1])
            handles = [RayHandle(a, a.serve.remote(address, token, index)) for index, a in enumerate(actors)]
            try:
                _admit(door, token, handles)
            except BaseException:
                for actor in actors:
                    ray.kill(actor)
                raise
        return handles


def _connect(workers: int) -> None:
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("FLEXFLOOR_DEBUG"))}
    if not os.environ.get("RAY_ADDRESS"):
        options |= {"num_cpus": max(workers, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(**options)
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise InputError(f"launcher 'ray': no cluster can be reached ({told})", settings=("launcher",)) from None


def _admit(door: socket.socket, token: bytes, handles: list[RayHandle]) -> None:
    """Take the calls of all actors."""
    deadline, waiting = time.monotonic() + PATIENCE, set(range(len(handles)))
    door.settimeout(0.5)
    while waiting:
        for index in sorted(waiting):
            if (reason := handles[index].exit_reason()) is not None:
                raise FlexFloorError(f"worker {index} {reason}")
        if time.monotonic() > deadline:
            free = ray.available_resources().get("CPU", 0)
            raise InputError(
                f"launcher 'ray': {len(waiting)} of {len(handles)} workers found no place within {PATIENCE:g} s; each "
                f"needs a CPU on this machine, and Ray has {free:g} free: take fewer workers or a larger cluster",
                settings=("launcher",),
            )
        try:
            line, _ = door.accept()
        except TimeoutError:
            continue
        line.settimeout(10.0)
        said = line.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
        if not hmac.compare_digest(said[:_TOKEN_BYTES], token):
            line.close()  # somebody else's call
            continue
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        index = int.from_bytes(said[_TOKEN_BYTES:], "little")
        handles[index].connect(line.detach())
        waiting.discard(index)
