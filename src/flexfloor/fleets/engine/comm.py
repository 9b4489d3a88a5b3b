"""Communication of one membership epoch: exchanges between the workers that are in it, and nobody else."""

from __future__ import annotations

import itertools
import os
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


def join_group(
    transport: Transport, store: dist.Store, tag: str, epoch: int, members: Sequence[int], worker: int, timeout: float
) -> EpochGroup:
    """Enter the group of an epoch. store: the driver's; tag: never used before in it. timeout: seconds that one
    exchange may take. Collective."""
    prefixed = dist.PrefixStore(tag, store)
    prefixed.set_timeout(timedelta(seconds=timeout))
    if transport == "socket":
        return SocketGroup(prefixed, epoch, members, worker, timeout)
    return TorchGroup(transport, prefixed, epoch, members, worker, timeout)


class TorchGroup(EpochGroup):
    """A process group of torch.distributed, without its global state."""

    def __init__(
        self, backend: Transport, store: dist.Store, epoch: int, members: Sequence[int], worker: int, timeout: float
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
            # Over loopback: no host name has to resolve, no port is open to the network.
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)

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
    """Workers of one machine, each pair joined by a Unix socket.

    An exchange is a few system calls of the calling thread; a process group's own threads cost a change of context for
    every message, which is what small exchanges consist of.
    """

    _BUFFER = 4 * 2**20  # bytes a socket takes before its reader has to keep up

    def __init__(self, store: dist.Store, epoch: int, members: Sequence[int], worker: int, timeout: float) -> None:
        super().__init__(epoch, members, worker)
        self._timeout = timeout
        self._peers: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            # An address in the abstract namespace is no file: nothing is left behind.
            address = f"\0flexfloor-{os.getpid()}-{epoch}-{os.urandom(8).hex()}"
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(timeout)
            store.set(f"address{self.rank}", address)
            for peer in range(self.rank):
                self._peers[peer] = self._connect(store.get(f"address{peer}").decode())
            while len(self._peers) < self.size - 1:
                self._accept(listener)
        for joined in self._peers.values():
            joined.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._BUFFER)
            joined.setblocking(False)

    def _connect(self, address: str) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(self._timeout)
        peer.connect(address)
        peer.sendall(struct.pack("i", self.rank))
        return peer

    def _accept(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            peer.close()
            return
        peer.settimeout(self._timeout)
        self._peers[struct.unpack("i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer

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
