"""`worker_memory` is a limit on what a worker takes beyond its imports, on a checkpoint above one gigabyte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import PRESETS, make_tiny_model

import flexfloor
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.plan import plan_memory
from flexfloor.policy.static import StaticPolicy
from flexfloor.requests import Request
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous
from flexfloor.world.resize import ResizePlan, plan_shrink
from flexfloor.world.status import FleetStatus

MIB = 2**20
WORKERS = 4


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "small"
    make_tiny_model(path, **PRESETS["small"], max_shard_size="400MB")
    assert sum(f.stat().st_size for f in path.glob("*.safetensors")) > 10**9
    return path


class Leaving(StaticPolicy):
    """One worker leaves in the middle."""

    def __init__(self, worker: int) -> None:
        super().__init__(grouped=False)
        self._worker = worker

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        ready = status.iteration > 0 and self._worker in status.active
        return plan_shrink(status, [self._worker]) if ready else None


def import_only_bytes() -> int:
    """Anonymous and shared memory of a process that has the worker's imports and nothing else."""
    code = (
        "import importlib; from flexfloor.fleets.engine import nursery; "
        "[importlib.import_module(n) for n in nursery._PRELOAD]; "
        "from flexfloor.fleets.engine.worker import process_memory; print(process_memory())"
    )
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.timeout(300)
def test_a_worker_stays_within_its_budget_and_experts_are_loaded_once(big_model: Path) -> None:
    info = inspect_checkpoint(big_model)
    placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, WORKERS)
    wide = EngineSettings.parse(worker_memory="4GiB", prefill_tokens=128, max_batch=64)
    plan = plan_memory(info, placement, WORKERS, wide)[0]
    # Room for the weights and a few hundred tokens of KV: the requests fill it and push each other out.
    budget = plan.least(350) + plan.slots * plan.slot // 3 + 2 * plan.slot  # and for the experts of one who leaves
    requests = flexfloor.make_requests(
        [[7 + i] * 150 for i in range(12)], sampling=flexfloor.SamplingParams(max_tokens=40, ignore_eos=True)
    )
    sizes: dict[str, Any] = {"prefill_tokens": 128, "max_batch": 64}
    with flexfloor.Fleet.launch(big_model, workers=WORKERS, worker_memory=budget, worker_timeout=120, **sizes) as fleet:
        result = flexfloor.rollout(fleet, requests)
        details = result.summary.to_json()["workers_detail"]
        assert sum(fleet.info.expert_bytes_loaded) == fleet.info.shape.all_expert_bytes
        # The fleet fits on three workers once the first responses have ended; who leaves keeps the dense weights only.
        freed: dict[int, int] = {}

        def on_release(worker: int) -> None:
            freed[worker] = fleet.status().workers[worker].memory_bytes

        run = flexfloor.Rollout(fleet, policy=Leaving(2), on_release=on_release)
        run.submit(requests[:4])
        run.seal()
        assert run.run().summary.responses_sha256
        assert len(freed) == 1
    imports = import_only_bytes()
    assert freed[2] <= imports + plan.dense + 64 * MIB, (freed, imports, plan.dense)
    limit = imports + budget + 64 * MIB
    for detail in details:
        assert detail["peak_memory_bytes"] <= limit, (detail, limit)
        # The figure means something: the weights of this worker alone are most of it.
        assert detail["peak_memory_bytes"] > plan.dense + plan.slots * plan.slot
        assert detail["peak_kv_bytes"] > 0.5 * plan.page * (350 // plan.page_tokens)
