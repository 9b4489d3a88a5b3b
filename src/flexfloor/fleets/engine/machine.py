"""The machine that a worker is on: who else is there, how others reach it, where its memory takes files."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """name: equal for those that share memory, files in it and Unix sockets. address: of a network, for the others."""

    name: str
    address: str


THIS_MACHINE = Machine("this machine", "127.0.0.1")
"""Of workers that a driver starts beside it: nothing of theirs is open to a network."""

_SHARED_MEMORY = Path("/dev/shm")


def listen(address: str, backlog: int = 128) -> socket.socket:
    """A TCP listener at a free port of this address, and at no other address of the machine."""
    return socket.create_server((address, 0), family=family_of(address), backlog=backlog)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def read_greeting(line: socket.socket, count: int, seconds: float) -> bytes:
    """The first bytes of a call, fewer than `count` if the caller has not sent them in time."""
    said, deadline = b"", time.monotonic() + seconds
    try:
        while len(said) < count:
            line.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := line.recv(count - len(said))):
                break
            said += part
    except OSError:
        pass  # as good as silence
    return said


def make_folder(size: int) -> Path:
    """A new folder for so many bytes: in memory, or on disk if there are fewer, which is slower and takes any size."""
    home = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= size else None
    return Path(tempfile.mkdtemp(prefix="flexfloor-weights-", dir=home))
