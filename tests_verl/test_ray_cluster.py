"""A fleet on two machines: two nodes of Ray on this computer, which share nothing but the checkpoint.

Workers of different nodes are told apart by the node, so that TCP and the copies of weights really run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

import flexfloor
from flexfloor.errors import FlexFloorError, InputError, WorkerFailedError
from flexfloor.fleets.engine.machine import Machine
from flexfloor.integrations.ray import copies, launcher
from flexfloor.integrations.ray.leases import take_leases
from flexfloor.ledger.accounting import Summary
from flexfloor.rollout import Rollout, rollout
from flexfloor.world.resize import plan_shrink

pytest_plugins = ("serving",)
WORKERS, CPUS = 4, 2
MARK = uuid.uuid4().hex
OPTIONS: dict[str, Any] = {"workers": WORKERS, "worker_memory": "48MiB"}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with two CPUs each; the driver is on the first."""
    os.environ["FLEXFLOOR_TEST_MARK"] = MARK
    made = Cluster()
    made.add_node(num_cpus=CPUS, include_dashboard=False)
    made.add_node(num_cpus=CPUS)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    del os.environ["FLEXFLOOR_TEST_MARK"]


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


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of weights on any machine, those that were copied and their copies, from now on."""
    folders: list[Path] = []

    def record(folder: Path, targets: Any) -> Any:
        made = copies.copy_folder(folder, targets)
        folders.extend([folder, *made.values()])
        return made

    monkeypatch.setattr(launcher, "copy_folder", record)
    monkeypatch.setattr(copies, "CHUNK_BYTES", 2**20 + 1)  # several chunks, none of which ends where a tensor does
    return folders


def left(folders: list[Path]) -> list[Path]:
    return [folder for folder in folders if folder.exists()]


def actors() -> list[str]:
    """Processes of this cluster in which workers or leases live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[0]
            if line.startswith(("ray::RayWorker", "ray::_Holder")) and MARK in (process / "environ").read_text(
                "latin-1"
            ):
                found.append(line)
        except OSError:
            continue
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
    cluster: Cluster, models: Callable[[int], Path], local: Any, copied: list[Path]
) -> None:
    with flexfloor.Fleet.launch(models(0), **OPTIONS, launcher="ray", release="end", transport="gloo") as launched:
        fleet: Any = launched
        fleet.load_weights(parameters(models(1)))
        assert len(left(copied)) == len(copied) == 2, "one a machine, for those that start anew"
        assert hashes(leave_a_machine(fleet)) == local[1]
        assert len(set(machines(fleet)[2:])) == 1
        wait_for(lambda: free_cpus() == 0)
    assert not left(copied)
    wait_for(lambda: free_cpus() == 2 * CPUS and not actors())


def test_leases_go_to_as_few_machines_as_have_room(cluster: Cluster) -> None:
    two = take_leases((0, 1), 0, 30.0)
    assert two[0].place.machine == two[1].place.machine
    other = take_leases((2,), 0, 30.0)
    assert other[0].place.machine != two[0].place.machine
    for lease in [*two, *other]:
        lease.drop()
    wait_for(lambda: free_cpus() == 2 * CPUS and not actors())


def test_a_copy_that_fails_leaves_nothing(
    cluster: Cluster, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    remove = copies.remove_folders

    def record(made: Any) -> None:
        removed.extend(made.values())
        remove(made)

    monkeypatch.setattr(copies, "remove_folders", record)
    here, nowhere = Machine(ray.get_runtime_context().get_node_id(), "127.0.0.1"), Machine("0" * 56, "127.0.0.1")
    with pytest.raises(FlexFloorError, match=r"^weights cannot be copied to the other machines: [^\n]+$"):
        copies.copy_folder(models(0), [here, nowhere])
    assert len(removed) == 1
    assert not left(removed)


DRIVER = """
import sys, time
import flexfloor
fleet = flexfloor.Fleet.launch(sys.argv[1], workers=1, worker_memory="48MiB", launcher="ray")
print("up", flush=True)
time.sleep(600)
"""


def test_no_actor_outlives_a_driver_that_is_killed(cluster: Cluster, models: Callable[[int], Path]) -> None:
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(models(0))], env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert "up\n" in driver.stdout
        assert len(actors()) == 2, "a worker and its lease"
        driver.kill()
    wait_for(lambda: free_cpus() == 2 * CPUS and not actors())


def test_two_machines_generate_what_one_does_until_one_is_gone(
    cluster: Cluster, models: Callable[[int], Path], local: Any, copied: list[Path]
) -> None:
    """The last test of this file: the second machine does not come back."""
    free: list[float] = []
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
        for number, seed in enumerate((1, 2), start=1):
            fleet.load_weights(parameters(models(seed)))
            assert len(copied) == 2 * number, "one copy, for two workers"
            assert not left(copied)
            assert hashes(run(fleet, "release")) == local[seed]
        with pytest.raises(InputError, match="is missing"):
            fleet.load_weights(dict(list(parameters(models(1)).items())[1:]))
        assert hashes(run(fleet, "static")) == local[2], "the old ones stay in force"
        a_machine_that_is_gone_is_one_line_that_names_a_worker(cluster, fleet)
    wait_for(lambda: free_cpus() == CPUS and not actors(), 60)
    assert not left(copied)


def a_machine_that_is_gone_is_one_line_that_names_a_worker(cluster: Cluster, fleet: Any) -> None:
    gone: list[bool] = []

    def remove(progress: Any) -> None:
        if not gone:
            gone.append(True)
            cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    with pytest.raises(WorkerFailedError, match=r"^worker [23] [^\n]*$"):
        run(fleet, "static", on_progress=remove)
