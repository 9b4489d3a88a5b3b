"""Communication of one membership epoch: exchanges between the workers that are in it, and nobody else."""

from __future__ import annotations

import hmac
import itertools
import json
import os
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from flexfloor.fleets.engine.machine import THIS_MACHINE, Machine, family_of, listen, read_greeting

Transport = Literal["socket", "gloo", "nccl"]


class EpochGroup(ABC):
    """The group of one epoch. members: worker numbers in rank order; this worker is members[rank].

    Every method is collective: all members call the same ones in the same order. A member that dies breaks the group:
    the others' exchanges raise, and nothing more may be asked of it.
    """

    def __init__(self, epoch: int, members: Sequence[int], worker: int) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self.rank = self.members.index(worker)

    @property
    def size(self) -> int:
        return len(self.members)

    @abstractmethod
    def all_to_all(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        """Send source_splits[r] rows of `source` to each rank r and receive out_splits[r] rows from it, in rank order.

        Both tensors are contiguous. Raises RuntimeError or OSError when a member is gone.
        """

    @abstractmethod
    def all_gather(self, out: torch.Tensor, rows: torch.Tensor, splits: Sequence[int]) -> None:
        """Every rank's `rows` (splits[r] of them), in rank order, for all. As for the rest like `all_to_all`."""

    @abstractmethod
    def close(self) -> None: ...

    def share_counts(self, counts: Sequence[int], device: torch.device) -> list[list[int]]:
        """Every member's small integers, in rank order."""
        rows = torch.tensor([counts], dtype=torch.int64, device=device)
        out = rows.new_empty(self.size, len(counts))
        self.all_gather(out, rows, [1] * self.size)
        return out.tolist()


_TOKEN = "token"


def open_store(address: str) -> dist.TCPStore:
    """The driver's store, in which members of a group find each other. It listens at this address of the driver's
    machine and nowhere else, and holds the token by which workers of several machines know each other."""
    listener = listen(address)
    port = listener.getsockname()[1]
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(_TOKEN, secrets.token_hex(32))
    return store


def join_group(
    transport: Transport,
    store: dist.Store,
    tag: str,
    epoch: int,
    members: Sequence[int],
    worker: int,
    timeout: float,
    machine: Machine = THIS_MACHINE,
) -> EpochGroup:
    """Enter the group of an epoch. store: the driver's; tag: never used before in it. timeout: seconds that one
    exchange may take. machine: this worker's. Collective."""
    prefixed = dist.PrefixStore(tag, store)
    prefixed.set_timeout(timedelta(seconds=timeout))
    if transport == "socket":
        return SocketGroup(prefixed, epoch, members, worker, timeout, machine, lambda: store.get(_TOKEN))
    return TorchGroup(transport, prefixed, epoch, members, worker, timeout, machine)


class TorchGroup(EpochGroup):
    """A process group of torch.distributed, without its global state."""

    def __init__(
        self,
        backend: Transport,
        store: dist.Store,
        epoch: int,
        members: Sequence[int],
        worker: int,
        timeout: float,
        machine: Machine,
    ) -> None:
        super().__init__(epoch, members, worker)
        limit = timedelta(seconds=timeout)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._devices = [self._device(store, machine)]
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _device(self, store: dist.Store, machine: Machine) -> Any:
        store.set(f"machine{self.rank}", machine.name)
        names = store.multi_get([f"machine{rank}" for rank in range(self.size)])
        if any(name.decode() != machine.name for name in names):
            return dist.ProcessGroupGloo.create_device(hostname=machine.address)
        # Over loopback: no host name has to resolve, no port is open to the network.
        return dist.ProcessGroupGloo.create_device(interface="lo")

    def all_to_all(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        self._group.alltoall_base(out, source, list(out_splits), list(source_splits), dist.AllToAllOptions()).wait()

    def all_gather(self, out: torch.Tensor, rows: torch.Tensor, splits: Sequence[int]) -> None:
        # Gloo's own all-gather takes equal parts only, and is the slower one of the two.
        repeated = rows.repeat(self.size, *[1] * (rows.dim() - 1))
        self.all_to_all(out, repeated, splits, [len(rows)] * self.size)

    def close(self) -> None:
        if hasattr(self._group, "abort"):
            self._group.abort()
        del self._group


class SocketGroup(EpochGroup):
    """Each pair of workers joined by a socket: a Unix socket on one machine, TCP between two.

    An exchange is a few system calls of the calling thread; a process group's own threads cost a change of context for
    every message, which is what small exchanges consist of.
    """

    _BUFFER = 4 * 2**20  # bytes a socket takes before its reader has to keep up
    _GREETING = 5.0  # most seconds between a peer's call and its greeting

    def __init__(
        self,
        store: dist.Store,
        epoch: int,
        members: Sequence[int],
        worker: int,
        timeout: float,
        machine: Machine,
        token: Callable[[], bytes],
    ) -> None:
        """token: what only members know; asked for when they are on several machines."""
        super().__init__(epoch, members, worker)
        self._timeout, self._token = timeout, b""
        self._peers: dict[int, socket.socket] = {}
        listeners = [socket.socket(socket.AF_UNIX)]
        try:
            # An address in the abstract namespace is no file: nothing is left behind.
            path = f"\0flexfloor-{os.getpid()}-{epoch}-{os.urandom(8).hex()}"
            listeners[0].bind(path)
            listeners[0].listen(self.size)
            store.set(f"member{self.rank}", json.dumps([machine.name, path]))
            told = [json.loads(m) for m in store.multi_get([f"member{rank}" for rank in range(self.size)])]
            near = {rank: path for rank, (name, path) in enumerate(told) if name == machine.name}
            if len(near) < self.size:
                self._token = token()
                listeners.append(listen(machine.address, self.size))
                store.set(f"address{self.rank}", json.dumps(listeners[1].getsockname()[:2]))
            for peer in range(self.rank):
                if peer in near:
                    self._connect(peer, near[peer])
                else:
                    self._connect(peer, tuple(json.loads(store.get(f"address{peer}"))))
            self._accept_all(listeners)
        except BaseException:
            self.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        for joined in self._peers.values():
            if joined.family == socket.AF_UNIX:  # the kernel makes those of TCP larger than it lets a program ask for
                joined.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._BUFFER)
            else:
                joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            joined.setblocking(False)

    def _connect(self, peer: int, address: str | tuple) -> None:
        near = isinstance(address, str)
        self._peers[peer] = line = socket.socket(socket.AF_UNIX if near else family_of(address[0]))
        line.settimeout(self._timeout)
        line.connect(address)
        line.sendall((b"" if near else self._token) + struct.pack("i", self.rank))

    def _accept_all(self, listeners: Sequence[socket.socket]) -> None:
        deadline = time.monotonic() + self._timeout
        while missing := set(range(self.rank + 1, self.size)) - self._peers.keys():
            ready, _, _ = select.select(listeners, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(self.members[rank] for rank in missing)
                raise RuntimeError(f"joining timed out after {self._timeout:g} s waiting for workers {late}")
            line, _ = ready[0].accept()
            rank = self._greeted(line)
            if rank in missing:
                self._peers[rank] = line
            else:
                line.close()  # somebody else's call

    def _greeted(self, line: socket.socket) -> int | None:
        """The rank that calls, None if it is none of the members."""
        token = b""
        if line.family == socket.AF_UNIX:
            _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                return None
        else:
            token = self._token
        said = read_greeting(line, len(token) + 4, self._GREETING)
        if len(said) != len(token) + 4 or not hmac.compare_digest(said[: len(token)], token):
            return None
        return struct.unpack("i", said[len(token) :])[0]

    def all_to_all(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        self._transfer(_parts(out, out_splits), _parts(source, source_splits))

    def all_gather(self, out: torch.Tensor, rows: torch.Tensor, splits: Sequence[int]) -> None:
        self._transfer(_parts(out, splits), _parts(rows, [len(rows)]) * self.size)

    def _transfer(self, taken: list[memoryview], given: list[memoryview]) -> None:
        """Fill taken[r] from each rank r and give it given[r]."""
        taken[self.rank][:] = given[self.rank]
        sends = {peer: given[rank] for rank, peer in self._peers.items() if len(given[rank])}
        receives = {peer: taken[rank] for rank, peer in self._peers.items() if len(taken[rank])}
        deadline = time.monotonic() + self._timeout
        while True:
            for peer, view in list(sends.items()):
                sends[peer] = view = view[_try(peer.send, view) :]
                if not len(view):
                    del sends[peer]
            for peer, view in list(receives.items()):
                receives[peer] = view = view[_try(peer.recv_into, view, must=True) :]
                if not len(view):
                    del receives[peer]
            if not sends and not receives:
                return
            self._wait(sends, receives, deadline)

    def _wait(self, sends: dict, receives: dict, deadline: float) -> None:
        poll = select.poll()
        for peer in sends.keys() | receives.keys():
            poll.register(peer, (select.POLLOUT if peer in sends else 0) | (select.POLLIN if peer in receives else 0))
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            late = sorted(self.members[r] for r, peer in self._peers.items() if peer in receives)
            raise RuntimeError(f"exchange timed out after {self._timeout:g} s waiting for workers {late}")

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _try(transfer: Callable[[memoryview], int], view: memoryview, must: bool = False) -> int:
    """Bytes moved without waiting. must: a transfer of nothing means that the peer is gone."""
    try:
        moved = transfer(view)
    except BlockingIOError:
        return 0
    if must and moved == 0:
        raise RuntimeError("connection closed by peer")
    return moved


def _parts(tensor: torch.Tensor, splits: Sequence[int]) -> list[memoryview]:
    """The bytes of `tensor`, cut by rows of its first axis."""
    row = tensor[0].nbytes if len(tensor) else 0
    whole = memoryview(tensor.view(torch.uint8).numpy().data).cast("B") if tensor.numel() else memoryview(bytearray())
    bounds = [0, *itertools.accumulate(n * row for n in splits)]
    return [whole[a:b] for a, b in itertools.pairwise(bounds)]
