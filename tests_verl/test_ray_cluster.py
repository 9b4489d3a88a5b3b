"""A fleet on two machines: two nodes of Ray on this computer, which share nothing but the checkpoint.

Workers of different nodes are told apart by the node, so that TCP and the copies of weights really run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

import flexfloor
from flexfloor.errors import InputError, WorkerFailedError
from flexfloor.integrations.ray import copies
from flexfloor.ledger.accounting import Summary
from flexfloor.rollout import Rollout, rollout
from flexfloor.world.resize import plan_shrink

pytest_plugins = ("serving",)
WORKERS, CPUS = 4, 2
OPTIONS: dict[str, Any] = {"workers": WORKERS, "worker_memory": "48MiB"}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with two CPUs each; the driver is on the first."""
    made = Cluster()
    made.add_node(num_cpus=CPUS, include_dashboard=False)
    made.add_node(num_cpus=CPUS)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def requests(seed: int) -> list[flexfloor.Request]:
    prompts = [list(range(5 + p, 9 + 3 * p)) for p in range(6)]
    return flexfloor.make_requests(prompts, samples=3, sampling=flexfloor.SamplingParams(max_tokens=60, seed=seed))


def run(fleet: Any, policy: str, seed: int = 0, **options: Any) -> Summary:
    return rollout(fleet, requests(seed), policy=policy, chunk=4, **options).summary


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


@pytest.fixture(scope="module")
def local(models: Callable[[int], Path]) -> dict[int, tuple[str | None, str | None]]:
    """By seed of the model: hashes of the tokens and log-probs that two processes of this machine generate."""
    with flexfloor.Fleet.launch(models(0), workers=2, worker_memory="48MiB") as fleet:
        found = {}
        for seed in (0, 1, 2):
            if seed:
                fleet.load_weights(models(seed))
            found[seed] = hashes(run(fleet, "static"))
    return found


def hashes(account: Summary) -> tuple[str | None, str | None]:
    return account.responses_sha256, account.logprobs_sha256


def machines(fleet: Any) -> list[str]:
    return [fleet._crew.handles[worker].machine.name for worker in range(WORKERS)]


def copied_weights() -> list[Path]:
    return sorted(Path("/dev/shm").glob("flexfloor-weights-*"))


def actors() -> list[str]:
    """Processes in which workers or leases live."""
    found = []
    for process in os.listdir("/proc"):
        try:
            line = Path("/proc", process, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if line.startswith(("ray::RayWorker", "ray::_Holder")):
            found.append(line.split("\0")[0])
    return found


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"CPUs free: {ray.available_resources().get('CPU', 0)}, actors: {actors()}"
        time.sleep(0.1)


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def leave_a_machine(fleet: Any) -> Summary:
    plans: list[Any] = []

    def shrink(progress: Any) -> None:
        if not plans:
            status = fleet.status()
            plan = plan_shrink(status, (2, 3))
            where = machines(fleet)
            every: list[Any] = [*plan.expert_moves, *plan.request_moves]
            moves = [m for m in every if where[m.source] != where[m.target]]
            assert {type(m).__name__ for m in moves} == {"ExpertMove", "RequestMove"}
            assert any(m.with_kv for m in plan.request_moves)
            outcome = fleet.apply(plan)
            assert outcome.failed is None
            assert outcome.kv_bytes > 0
            plans.append(plan)

    going = Rollout(fleet, policy="static", chunk=4, on_progress=shrink)
    going.submit(requests(0))
    going.seal()
    summary = going.run().summary
    assert plans
    return summary


def test_workers_that_end_start_anew_with_the_weights_of_then(
    cluster: Cluster, models: Callable[[int], Path], local: Any
) -> None:
    before = copied_weights()
    with flexfloor.Fleet.launch(models(0), **OPTIONS, launcher="ray", release="end", transport="gloo") as launched:
        fleet: Any = launched
        fleet.load_weights(parameters(models(1)))
        assert len(copied_weights()) == len(before) + 2, "one a machine, for those that start anew"
        assert hashes(leave_a_machine(fleet)) == local[1]
        assert len(set(machines(fleet)[2:])) == 1
        wait_for(lambda: free_cpus() == 0)
    assert copied_weights() == before
    wait_for(lambda: free_cpus() == 2 * CPUS and not actors())


DRIVER = """
import sys, time
import flexfloor
fleet = flexfloor.Fleet.launch(sys.argv[1], workers=2, worker_memory="48MiB", launcher="ray")
print("machines:", len({h.machine.name for h in fleet._crew.handles.values()}), flush=True)
time.sleep(600)
"""


def test_no_actor_outlives_a_driver_that_is_killed(cluster: Cluster, models: Callable[[int], Path]) -> None:
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(models(0))], env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        told = next(line for line in driver.stdout if line.startswith("machines:"))
        assert told == "machines: 1\n", "one that has room for all"
        assert len(actors()) == 4
        driver.kill()
    wait_for(lambda: free_cpus() == 2 * CPUS and not actors())


def test_two_machines_generate_what_one_does_until_one_is_gone(
    cluster: Cluster, models: Callable[[int], Path], local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this file: the second machine does not come back."""
    monkeypatch.setattr(copies, "CHUNK_BYTES", 2**20 + 1)  # several chunks, none of which ends where a tensor does
    before, free = copied_weights(), []
    with flexfloor.Fleet.launch(models(0), **OPTIONS, launcher="ray") as launched:
        fleet: Any = launched
        first, second = machines(fleet)[:2], machines(fleet)[2:]
        assert first == [ray.get_runtime_context().get_node_id()] * 2, "neighbours, the driver's first"
        assert second[0] == second[1] != first[0]
        for policy in ("release", "flexfloor"):
            account = run(fleet, policy, on_release=lambda worker: free.append(free_cpus()))
            assert hashes(account) == local[0], policy
        wait_for(lambda: free_cpus() == 0)
        assert free, "Ray saw what a parked worker had"
        # Requests and experts of the second machine go to the first, in the middle of a rollout, and come back.
        assert hashes(leave_a_machine(fleet)) == local[0]
        assert machines(fleet) == first + second
        for seed in (1, 2):
            fleet.load_weights(parameters(models(seed)))
            assert copied_weights() == before, "every copy is gone"
            assert hashes(run(fleet, "release")) == local[seed]
        with pytest.raises(InputError, match="is missing"):
            fleet.load_weights(dict(list(parameters(models(1)).items())[1:]))
        assert hashes(run(fleet, "static")) == local[2], "the old ones stay in force"
        fleet.load_weights(models(0))
        assert hashes(run(fleet, "static")) == local[0]
        a_machine_that_is_gone_is_one_line_that_names_a_worker(cluster, fleet)
    wait_for(lambda: free_cpus() == CPUS and not actors(), 60)
    assert copied_weights() == before


def a_machine_that_is_gone_is_one_line_that_names_a_worker(cluster: Cluster, fleet: Any) -> None:
    gone: list[bool] = []

    def remove(progress: Any) -> None:
        if not gone:
            gone.append(True)
            cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    with pytest.raises(WorkerFailedError, match=r"^worker [23] [^\n]*$"):
        run(fleet, "static", on_progress=remove)
