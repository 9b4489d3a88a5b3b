"""Workers as Ray actors: the same bits, resources that Ray shows as free while a rollout runs, clear ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import flexfloor
from flexfloor.errors import InputError, WorkerFailedError
from flexfloor.integrations.ray import launcher
from flexfloor.integrations.ray.leases import take_leases
from flexfloor.ledger.accounting import Summary
from flexfloor.rollout import Rollout, RolloutResult, rollout

pytest_plugins = ("serving",)
MEMORY = "48MiB"
CPUS = 3
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=CPUS, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def requests() -> list[flexfloor.Request]:
    prompts = [list(range(5 + p, 9 + 3 * p)) for p in range(6)]
    return flexfloor.make_requests(prompts, samples=3, sampling=flexfloor.SamplingParams(max_tokens=60))


def run(fleet: Any, **options: Any) -> RolloutResult:
    return rollout(fleet, requests(), policy="release", chunk=4, **options)


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def wait_for(cpus: float, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while free_cpus() != cpus:
        assert time.monotonic() < deadline, f"{free_cpus()} CPUs are free, not {cpus}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def local(models: Callable[[int], Path]) -> Summary:
    """The rollout by processes of this machine, without Ray."""
    with flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY) as fleet:
        return run(fleet).summary


@pytest.mark.parametrize("release", ["park", "end"])
def test_actors_generate_the_same_bits_and_a_release_returns_what_is_reserved(
    cluster: None, models: Callable[[int], Path], local: Summary, release: str
) -> None:
    while_it_ran: list[float] = []

    def look(worker: int) -> None:
        wait_for(CPUS - 1)
        while_it_ran.append(free_cpus())

    with flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY, launcher="ray", release=release) as fleet:
        assert free_cpus() == CPUS - 2
        for _ in range(2):
            account = run(fleet, on_release=look).summary
            assert account.responses_sha256 == local.responses_sha256
            assert account.logprobs_sha256 == local.logprobs_sha256
            wait_for(CPUS - 2)  # the worker is back
        assert while_it_ran == [CPUS - 1, CPUS - 1], "in each of two rollouts, before its end"
        (an_actor_that_dies_is_named if release == "park" else a_worker_whose_lease_is_lost_does_not_go_on)(fleet)
    wait_for(CPUS)


def an_actor_that_dies_is_named(fleet: Any) -> None:
    def kill(progress: Any) -> None:
        ray.kill(fleet._crew.handles[1]._actor)

    going = Rollout(fleet, policy="static", chunk=2, on_progress=kill)
    going.submit(requests())
    going.seal()
    with pytest.raises(WorkerFailedError, match="worker 1 has lost its actor"):
        going.run()


def a_worker_whose_lease_is_lost_does_not_go_on(fleet: Any) -> None:
    ray.kill(fleet._crew.handles[0].lease._actor)
    with pytest.raises(WorkerFailedError, match="worker 0 has lost its lease"):
        look_until_it_ends(fleet)


def look_until_it_ends(fleet: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        fleet._update_status()


@ray.remote(num_cpus=2)
class Greedy:
    """Takes what the released worker gave, and a CPU that nobody had."""

    def ready(self) -> bool:
        return True


def test_a_worker_whose_place_others_took_waits_and_then_says_what_is_free(
    cluster: None, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "PATIENCE", 30.0)
    taken: list[Any] = []

    def take(worker: int) -> None:
        taken.append(Greedy.remote())  # type: ignore[attr-defined]
        assert ray.get(taken[-1].ready.remote())
        monkeypatch.setattr(launcher, "PATIENCE", 2.0)

    fleet = flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY, launcher="ray")
    try:
        with pytest.raises(InputError, match=r"worker \d found no place within 2 s.* 0 CPUs free") as told:
            run(fleet, on_release=take)
        assert "\n" not in str(told.value)
    finally:
        fleet.close()
    for actor in taken:
        ray.kill(actor)
    wait_for(CPUS)


def test_too_small_a_cluster_is_told_within_the_deadline(
    cluster: None, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "PATIENCE", 3.0)
    with pytest.raises(InputError, match=r"workers 0, 1, 2, 3 found no place within 3 s; each needs a CPU.* free"):
        flexfloor.Fleet.launch(models(0), workers=4, worker_memory=MEMORY, launcher="ray")
    wait_for(CPUS)


def test_a_worker_gets_its_own_gpu_back(cluster: None) -> None:
    """GPUs in name only: Ray counts and numbers them. Which one it gives is its choice."""
    before = take_leases((0, 1), 1, 30.0)
    places = [lease.place for lease in before]
    assert sorted(place.devices for place in places) == [("0",), ("1",)]
    for lease in before:
        lease.drop()
    for wanted in (places[::-1], places[:1], places[1:]):
        leases = take_leases(range(len(wanted)), 1, 30.0, places=wanted)
        assert [lease.place for lease in leases] == wanted
        for lease in leases:
            lease.drop()
    wait_for(CPUS)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS is 127.0.0.1:1, where nobody answers"),
        ("127.0.0.1:99999", "where nobody answers"),
        ("ray://127.0.0.1:10001", "for Ray Client, which launcher 'ray' does not support"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, told: str) -> None:
    """Ray itself tries for minutes, and cannot be interrupted meanwhile."""
    begin = time.monotonic()
    with pytest.raises(InputError) as caught:
        launcher._check_address(address)
    assert told in str(caught.value)
    assert time.monotonic() - begin < 10
