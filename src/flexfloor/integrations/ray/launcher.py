"""Starting workers as Ray actors: the same Worker, commands and replies, over TCP instead of pipes.

An actor reserves nothing itself. A lease holds a CPU (and a GPU) for it in Ray's books, which is dropped when the
worker is released, parked or ended, and taken again before it computes.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.fleets.engine.launcher import Launcher
from flexfloor.fleets.engine.machine import THIS_MACHINE, Machine, family_of, listen, read_greeting
from flexfloor.fleets.engine.process import WorkerProcess

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise InputError("launcher 'ray' needs Ray: pip install 'flexfloor[ray]'", settings=("launcher",)) from None

from flexfloor.integrations.ray.copies import copy_folder, remove_folders
from flexfloor.integrations.ray.leases import Lease, Place, one_line, take_leases

PATIENCE = 120.0
"""Seconds that a worker may wait for its place in the cluster, and for its process."""

_TOKEN_BYTES = 32
_KNOCK = 5.0  # seconds for an answer from the head of a cluster
_GREETING = 5.0  # most seconds between a call at the door and its token


class RayWorker:
    """The actor. It calls the driver back, and then does what the driver says until the connection ends."""

    def serve(self, address: tuple[str, int], token: bytes, worker: int, devices: tuple[str, ...]) -> None:
        if devices:  # Ray shows none to an actor that reserves none; torch looks when it first uses one
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        line = socket.socket(family_of(address[0]))
        line.settimeout(PATIENCE)
        line.connect(address)
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(token + worker.to_bytes(4, "little"))
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
    """A worker in an actor. See `flexfloor.fleets.engine.launcher.WorkerHandle`.

    lease: what it has in Ray's books; None while it is parked, or where somebody else holds its place.
    """

    def __init__(self, actor: Any, serving: Any, place: Place) -> None:
        self.place, self.machine, self.sees_one_device = place, place.machine, bool(place.devices)
        self.lease: Lease | None = None
        self._actor, self._serving = actor, serving
        self._lost_lease: str | None = None
        self.pipe: Connection

    def connect(self, descriptor: int) -> None:
        self.pipe = _Line(descriptor, self._actor)

    def hold(self, lease: Lease) -> None:
        """Live and die with this lease."""
        self.lease = lease
        lease.watch(self._lose_lease)

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.drop()
            self.lease = None

    def exit_reason(self) -> str | None:
        if self._lost_lease is not None:
            return f"has lost its lease in Ray: {self._lost_lease}"
        if not self.wait(0.0):
            return None
        try:
            ray.get(self._serving)
        except Exception as error:
            return f"has lost its actor on machine {self.machine.address}: {one_line(error)}"
        return "ended"

    def kill(self) -> None:
        self.drop_lease()
        if ray.is_initialized():
            ray.kill(self._actor)
            self.wait(10.0)
        if hasattr(self, "pipe"):
            self.pipe.close()

    def wait(self, seconds: float) -> bool:
        return bool(ray.wait([self._serving], timeout=seconds)[0]) if ray.is_initialized() else True

    def _lose_lease(self, reason: str) -> None:
        self._lost_lease = reason
        if ray.is_initialized():
            ray.kill(self._actor)  # it would compute on what Ray gives to somebody else


class RayLauncher(Launcher):
    """One actor a worker, on as many machines as the cluster has. Connects to Ray, or starts one that ends with the
    driver.

    places: of each worker, by number, where somebody else holds their devices; nothing is reserved then.
    """

    def __init__(self, device: str = "cpu", places: Sequence[Place] = ()) -> None:
        super().__init__(device)
        self._places = places

    def start(self, workers: Sequence[int], environment: Mapping[str, str]) -> list[RayHandle]:
        _connect(len(workers))
        if self.home is THIS_MACHINE:
            self.home = _find_home()
        leases: list[Lease] = []
        places = [self._places[worker] for worker in workers] if self._places else []
        if not places:
            # A cluster of one machine may grow, but nobody else could reach a driver that listens on loopback.
            node = self.home.name if self.home.address == THIS_MACHINE.address else None
            leases = take_leases(workers, self._gpus, PATIENCE, node)
            leases.sort(key=lambda lease: _order(lease.place, self.home))
            places = [lease.place for lease in leases]
        handles: list[RayHandle] = []
        try:
            token = secrets.token_bytes(_TOKEN_BYTES)
            with listen(self.home.address) as door:
                address = (self.home.address, door.getsockname()[1])
                for worker, place in zip(workers, places, strict=True):
                    actor = _hire(place, environment)
                    devices = place.devices if self.device == "cuda" else ()
                    handles.append(RayHandle(actor, actor.serve.remote(address, token, worker, devices), place))
                _admit(door, token, dict(zip(workers, handles, strict=True)))
            for handle, lease in zip(handles, leases, strict=bool(leases)):
                handle.hold(lease)
        except BaseException:
            for lease in leases:
                lease.drop()
            for handle in handles:
                handle.kill()
            raise
        return handles

    def yield_device(self, handle: RayHandle) -> None:
        handle.drop_lease()

    def reclaim_devices(self, handles: Mapping[int, RayHandle]) -> None:
        if self._places or not handles:
            return
        places = [handle.place for handle in handles.values()]
        leases = take_leases(list(handles), self._gpus, PATIENCE, places=places)
        for handle, lease in zip(handles.values(), leases, strict=True):
            handle.hold(lease)

    def copy_folder(self, folder: Path, machines: Sequence[Machine]) -> dict[Machine, Path]:
        return copy_folder(folder, machines)

    def remove_folders(self, copies: Mapping[Machine, Path]) -> None:
        remove_folders(copies)

    @property
    def _gpus(self) -> int:
        return int(self.device == "cuda")


def _connect(workers: int) -> None:
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("FLEXFLOOR_DEBUG"))}
    if address := os.environ.get("RAY_ADDRESS"):
        _check_address(address)
    else:
        options |= {"address": "local", "num_cpus": max(workers, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(**options)
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise InputError(f"launcher 'ray': no cluster can be reached ({told})", settings=("launcher",)) from None


def _check_address(address: str) -> None:
    """Raises InputError at once for what Ray would try for minutes, or what its client cannot do."""
    if address.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS is {address}, for Ray Client, which launcher 'ray' does not support; give HOST:PORT of the "
            "cluster's head (`ray start` shows it) and run on one of its machines",
            settings=("launcher",),
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # auto, local, or something that Ray itself explains
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"RAY_ADDRESS is {address}, where nobody answers ({error}); start the cluster or give its address",
            settings=("launcher",),
        ) from None


def _find_home() -> Machine:
    """The driver's machine. In a cluster of one, nothing of the driver is open to a network."""
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    address = ray.util.get_node_ip_address() if several else THIS_MACHINE.address
    return Machine(ray.get_runtime_context().get_node_id(), address)


def _order(place: Place, home: Machine) -> tuple[bool, str, tuple[str, ...]]:
    """Workers of one machine are neighbours, those on the driver's come first."""
    return place.machine.name != home.name, place.machine.name, place.devices


def _hire(place: Place, environment: Mapping[str, str]) -> Any:
    actor_of: Any = ray.remote(RayWorker).options(
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.machine.name, soft=False),
        runtime_env={"env_vars": dict(environment)},
    )
    return actor_of.remote()


def _admit(door: socket.socket, token: bytes, handles: Mapping[int, RayHandle]) -> None:
    """Take the calls of all actors. handles: by worker."""
    deadline, waiting = time.monotonic() + PATIENCE, set(handles)
    door.settimeout(0.5)
    while waiting:
        for worker in sorted(waiting):
            if (reason := handles[worker].exit_reason()) is not None:
                raise FlexFloorError(f"worker {worker} {reason}")
        if time.monotonic() > deadline:
            raise FlexFloorError(
                f"worker {min(waiting)} on machine {handles[min(waiting)].machine.address} has not reached the driver "
                f"at {door.getsockname()[0]} within {PATIENCE:g} s"
            )
        try:
            line, _ = door.accept()
        except TimeoutError:
            continue
        worker = _greeted(line, token)
        if worker not in waiting:
            line.close()  # somebody else's call
            continue
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handles[worker].connect(line.detach())
        waiting.discard(worker)


def _greeted(line: socket.socket, token: bytes) -> int:
    """The worker that calls, -1 if it is none."""
    said = read_greeting(line, _TOKEN_BYTES + 4, _GREETING)
    if len(said) < _TOKEN_BYTES + 4 or not hmac.compare_digest(said[:_TOKEN_BYTES], token):
        return -1
    return int.from_bytes(said[_TOKEN_BYTES:], "little")
