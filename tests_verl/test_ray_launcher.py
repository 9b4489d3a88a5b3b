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
from flexfloor.rollout import Rollout, RolloutResult, rollout

pytest_plugins = ("serving",)
MEMORY = "48MiB"
CPUS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
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


def test_actors_generate_the_same_bits_and_return_what_they_reserve(
    cluster: None, models: Callable[[int], Path]
) -> None:
    with flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY) as fleet:
        local = run(fleet).summary
    while_it_ran: list[float] = []

    def look(worker: int) -> None:
        wait_for(CPUS - 1)
        while_it_ran.append(free_cpus())

    with flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY, launcher="ray", release="end") as fleet:
        assert free_cpus() == CPUS - 2
        for _ in range(2):
            account = run(fleet, on_release=look).summary
            assert account.responses_sha256 == local.responses_sha256
            assert account.logprobs_sha256 == local.logprobs_sha256
            wait_for(CPUS - 2)  # the worker is back
    assert while_it_ran == [CPUS - 1, CPUS - 1], "in each of two rollouts, before its end"
    wait_for(CPUS)


def test_an_actor_that_dies_is_named(cluster: None, models: Callable[[int], Path]) -> None:
    fleet: Any = flexfloor.Fleet.launch(models(0), workers=2, worker_memory=MEMORY, launcher="ray")

    def kill(progress: Any) -> None:
        ray.kill(fleet._crew.handles[1]._actor)

    try:
        going = Rollout(fleet, policy="static", chunk=2, on_progress=kill)
        going.submit(requests())
        going.seal()
        with pytest.raises(WorkerFailedError, match="worker 1 "):
            going.run()
    finally:
        fleet.close()
    wait_for(CPUS)


def test_too_small_a_cluster_is_told_within_the_deadline(
    cluster: None, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "PATIENCE", 3.0)
    with pytest.raises(InputError, match="found no place within 3 s"):
        flexfloor.Fleet.launch(models(0), workers=4, worker_memory=MEMORY, launcher="ray")
    wait_for(CPUS)
