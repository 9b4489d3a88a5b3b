"""Groups of workers on one machine and on several: what is exchanged arrives, and nobody else gets in.

Members are threads here; "machines" are names, so that TCP really carries what would go between two computers.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.errors import InputError
from flexfloor.fleet import Fleet
from flexfloor.fleets.engine.comm import EpochGroup, SocketGroup, Transport, join_group, open_store
from flexfloor.fleets.engine.machine import Machine, listen, read_greeting

HOST = "127.0.0.1"
TIMEOUT = 20.0
_tags = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return open_store(HOST)


def together(
    store: dist.TCPStore, machines: Sequence[str], work: Callable[[EpochGroup], Any], transport: Transport = "socket"
) -> list[Any]:
    """What `work` gives in each member of a group; machines: the name of each member's."""
    tag, members = f"g{next(_tags)}", tuple(range(10, 10 + len(machines)))

    def run(rank: int) -> Any:
        own = dist.TCPStore(HOST, store.port, is_master=False, wait_for_workers=False)
        machine = Machine(machines[rank], HOST)
        group = join_group(transport, own, tag, 1, members, members[rank], TIMEOUT, machine)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(run, range(len(machines))))


def families(group: EpochGroup) -> dict[int, str]:
    assert isinstance(group, SocketGroup)
    return {peer: "unix" if line.family == socket.AF_UNIX else "tcp" for peer, line in group._peers.items()}


def test_pairs_of_one_machine_use_unix_sockets_and_others_tcp(store: dist.TCPStore) -> None:
    a, b, c, d = together(store, ["m", "n", "m", "n"], families)
    assert a == {1: "tcp", 2: "unix", 3: "tcp"}
    assert b == {0: "tcp", 2: "tcp", 3: "unix"}
    assert c == {0: "unix", 1: "tcp", 3: "tcp"}
    assert d == {0: "tcp", 1: "unix", 2: "tcp"}


def test_between_machines_nothing_waits_to_be_sent(store: dist.TCPStore) -> None:
    def undelayed(group: EpochGroup) -> list[int]:
        assert isinstance(group, SocketGroup)
        return [line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for line in group._peers.values()]

    assert all(value != 0 for values in together(store, ["m", "n"], undelayed) for value in values)


@settings(max_examples=12, deadline=None)
@given(
    machines=st.lists(st.sampled_from("mn"), min_size=2, max_size=4),
    rows=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_rows_arrive_as_they_were_sent(store: dist.TCPStore, machines: list[str], rows: int, seed: int) -> None:
    size = len(machines)
    splits = torch.randint(0, rows + 1, (size, size), generator=torch.Generator().manual_seed(seed))

    def made(source: int, target: int) -> torch.Tensor:
        count = int(splits[source, target])
        return torch.arange(count * 3, dtype=torch.float32).view(count, 3) + 1000 * source + 100 * target

    def work(group: EpochGroup) -> None:
        me = group.rank
        source = torch.cat([made(me, target) for target in range(size)])
        wanted = torch.cat([made(other, me) for other in range(size)])
        out = torch.full_like(wanted, -1)
        group.all_to_all(out, source, splits[:, me].tolist(), splits[me].tolist())
        assert torch.equal(out, wanted)
        assert group.share_counts([me, rows], torch.device("cpu")) == [[r, rows] for r in range(size)]

    together(store, machines, work)


def test_more_than_any_buffer_holds_goes_between_machines_both_ways(store: dist.TCPStore) -> None:
    def work(group: EpochGroup) -> bool:
        mine = torch.full((24 * 2**20,), group.rank + 1, dtype=torch.uint8)
        out = torch.empty(2 * len(mine), dtype=torch.uint8)
        group.all_gather(out, mine, [len(mine)] * 2)
        return bool((out[: len(mine)] == 1).all() and (out[len(mine) :] == 2).all())

    assert together(store, ["m", "n"], work) == [True, True]


@pytest.mark.parametrize("machines", [["m", "m"], ["m", "n"]], ids=["one machine", "two"])
def test_gloo_on_one_machine_and_on_two(store: dist.TCPStore, machines: list[str]) -> None:
    def work(group: EpochGroup) -> list[list[int]]:
        return group.share_counts([group.rank], torch.device("cpu"))

    assert together(store, machines, work, "gloo") == [[[0], [1]]] * 2


@pytest.mark.parametrize("said", [b"", b"x" * 7, b"0" * 64 + struct.pack("i", 1), struct.pack("i", 1)])
def test_who_does_not_know_the_token_does_not_get_in(store: dist.TCPStore, said: bytes) -> None:
    """A stranger calls a member before its peer does, and greets as one who guesses."""
    tag = f"g{next(_tags)}"

    def join(rank: int, name: str) -> list[list[int]]:
        own = dist.TCPStore(HOST, store.port, is_master=False, wait_for_workers=False)
        if rank == 1:
            # Rank 0 opens its port when it has seen a member on another machine: the stranger is one, for a moment.
            prefixed = dist.PrefixStore(tag, own)
            prefixed.set("member1", json.dumps([name, "\0nobody"]))
            with socket.create_connection(tuple(json.loads(prefixed.get("address0")))) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b"", "hung up on"
        group = join_group("socket", own, tag, 1, (0, 1), rank, TIMEOUT, Machine(name, HOST))
        try:
            return group.share_counts([rank], torch.device("cpu"))
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, (0, 1), ("m", "n"))) == [[[0], [1]]] * 2


def test_a_greeting_may_come_in_pieces_and_may_not_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_greeting, ours, 6, 10.0)
        for piece in (b"ab", b"c", b"def+"):
            theirs.sendall(piece)
            time.sleep(0.05)
        assert reading.result() == b"abcdef"
        assert read_greeting(ours, 6, 0.2) == b"+"
        theirs.close()
        assert read_greeting(ours, 6, 10.0) == b""


def test_the_store_listens_at_its_own_address_only(store: dist.TCPStore) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=1.0)  # loopback too, and another address
    with listen(HOST) as door, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", door.getsockname()[1]), timeout=1.0)


def test_a_member_that_never_comes_is_named(store: dist.TCPStore) -> None:
    tag, begin = f"g{next(_tags)}", time.monotonic()
    prefixed = dist.PrefixStore(tag, store)
    prefixed.set("member1", json.dumps(["n", "\0nobody"]))
    with pytest.raises(RuntimeError, match=r"waiting for workers \[7\]"):
        join_group("socket", store, tag, 1, (3, 7), 3, 1.0, Machine("m", HOST))
    assert time.monotonic() - begin < 10


def test_a_machine_that_cannot_read_the_checkpoint_is_named_with_the_file(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_moe"), folder)

    def hide(phase: str) -> None:
        if phase == "loading weights":  # the driver has looked at the files
            folder.rename(tmp_path / "elsewhere")

    told = rf"machine 127.0.0.1 cannot read {folder}/\S+; a checkpoint must lie at the same path on every machine"
    with pytest.raises(InputError, match=told):
        Fleet.launch(folder, workers=2, worker_memory="48MiB", on_phase=hide)
