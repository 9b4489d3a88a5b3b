"""Resizes that go wrong: what is lost (nothing), what is said (one line), what is left behind (no process)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from test_resize import Scripted, consolidate, digests, forced_requests, hashes, leave, merged, run

import flexfloor
from flexfloor.fleets.engine.fleet import EngineFleet
from flexfloor.policy.static import StaticPolicy
from flexfloor.world.resize import plan_shrink


def launch(model: object, workers: int = 3, **options: Any) -> EngineFleet:
    fleet = flexfloor.Fleet.launch(model, workers=workers, **options)
    assert isinstance(fleet, EngineFleet)
    return fleet


def pids(fleet: EngineFleet) -> list[int]:
    return [handle.pid for handle in fleet._crew.handles.values()]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable) -> tuple:
    with launch(checkpoint("qwen3_moe"), 1) as fleet:
        return hashes(run(fleet, "static"))


@pytest.mark.parametrize("phase", ["prepare", "transfer"])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_failed_preparation_changes_nothing_and_the_rollout_goes_on(
    checkpoint: Callable, expected: tuple, monkeypatch: pytest.MonkeyPatch, phase: str, worker: int
) -> None:
    monkeypatch.setenv("FLEXFLOOR_FAULT", f"{phase}:{worker}")
    with launch(checkpoint("qwen3_moe"), page_tokens=4, worker_timeout=5) as fleet:
        fleet.start()
        requests = forced_requests()
        fleet.submit(requests)
        fleet.assign(StaticPolicy(grouped=False).admit(requests, fleet.status()))
        fleet.advance(5)
        before, epoch = digests(fleet), fleet.status().epoch
        outcome = fleet.apply(plan_shrink(fleet.status(), [1]))
        assert outcome.failed is not None
        assert f"worker {worker}: RuntimeError: fault injected into {phase}" in outcome.failed
        after = digests(fleet)
        for what in ("experts", "kv"):
            assert merged(after, what) == merged(before, what)
        assert (fleet.status().epoch, fleet.status().active) == (epoch, (0, 1, 2))

        summary = run(fleet, Scripted([(4, leave(1)), (8, leave(2))]))
        assert hashes(summary) == expected
        assert [r["failed"] is not None for r in summary.resizes] == [True] * len(summary.resizes)
        assert all(d.released_at_s is None for d in summary.workers_detail)
        assert summary.resizes


def test_a_failed_commit_ends_the_run_with_one_line(checkpoint: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXFLOOR_FAULT", "commit:1")
    fleet = launch(checkpoint("qwen3_moe"))
    running = pids(fleet)
    message = r"^worker 1 failed: RuntimeError: fault injected into commit$"
    with pytest.raises(flexfloor.WorkerFailedError, match=message):
        run(fleet, Scripted([(4, leave(2))]))
    assert not any(psutil.pid_exists(pid) for pid in running)


@pytest.fixture
def shrunk(checkpoint: Callable) -> Iterator[tuple[EngineFleet, Iterator[flexfloor.Response]]]:
    """A rollout that goes on for long with two of three workers; worker 1 is parked."""
    fleet = launch(checkpoint("tiny"), worker_timeout=3)
    sampling = flexfloor.SamplingParams(max_tokens=1500, ignore_eos=True)
    run_ = flexfloor.Rollout(fleet, policy=Scripted([(4, leave(1))]), chunk=4)
    run_.submit(flexfloor.make_requests([flexfloor.Prompt((5,) * 4, key="short", max_tokens=30)], sampling=sampling))
    run_.submit(flexfloor.make_requests([(9, 8, 7), (6, 5), (4, 5)], sampling=sampling))
    run_.seal()
    responses = iter(run_)
    next(responses)
    assert fleet.status().active == (0, 2)
    yield fleet, responses
    fleet.close()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_killed_after_a_resize_is_named(shrunk: tuple, victim: int) -> None:
    """The parked one too: it is needed again."""
    fleet, responses = shrunk
    running = pids(fleet)
    begin = time.monotonic()
    threading.Timer(0.1, os.kill, (running[victim], signal.SIGKILL)).start()
    with pytest.raises(flexfloor.WorkerFailedError, match=rf"^worker {victim} was killed by SIGKILL$"):
        list(responses)
    assert time.monotonic() - begin < 5
    assert not any(psutil.pid_exists(pid) for pid in running)


def test_a_worker_stopped_in_a_resize_is_named_within_worker_timeout(shrunk: tuple) -> None:
    fleet, _ = shrunk
    running = pids(fleet)
    plan = plan_shrink(fleet.status(), [0])
    os.kill(running[2], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(flexfloor.WorkerFailedError, match=r"^worker 2 gave no sign of life for 3 s"):
        fleet.apply(plan)
    assert time.monotonic() - begin < 3 + 3
    assert not any(psutil.pid_exists(pid) for pid in running)


def test_a_worker_that_is_late_by_ten_seconds_causes_no_false_alarm(checkpoint: Callable, expected: tuple) -> None:
    with launch(checkpoint("qwen3_moe"), worker_timeout=20) as fleet:
        late = pids(fleet)[1]
        os.kill(late, signal.SIGSTOP)
        threading.Timer(10, os.kill, (late, signal.SIGCONT)).start()
        assert hashes(run(fleet, consolidate())) == expected


def test_a_rollout_that_was_given_up_leaves_the_fleet_usable(checkpoint: Callable, expected: tuple) -> None:
    with launch(checkpoint("qwen3_moe")) as fleet:
        responses = iter(_running(fleet))
        next(responses)
        responses.close()  # type: ignore[attr-defined]
        assert len(fleet.status().active) < 3
        assert hashes(run(fleet, "static")) == expected


def _running(fleet: EngineFleet) -> flexfloor.Rollout:
    run_ = flexfloor.Rollout(fleet, policy=Scripted([(0, leave(1))]), chunk=4)
    run_.submit(forced_requests())
    run_.seal()
    return run_


def test_fifty_cycles_leave_memory_files_threads_and_processes_flat(checkpoint: Callable, expected: tuple) -> None:
    requests = forced_requests(4, 1)
    with launch(checkpoint("qwen3_moe"), 3) as fleet:
        processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids(fleet))]

        def footprint() -> list[tuple[int, int]]:
            return [(p.num_fds(), p.num_threads()) for p in processes]

        def memory() -> list[int]:
            return [p.memory_info().rss for p in processes]

        def cycle(index: int) -> None:
            script = Scripted([(0, leave(index % 3)), (4, leave((index + 1) % 3))])
            assert len(run(fleet, script, requests).resizes) == 2

        for index in range(10):
            cycle(index)
        before, used = footprint(), memory()
        for index in range(50):
            cycle(index)
        assert footprint() == before
        assert [p.pid for p in psutil.Process().children(recursive=True) if p.pid in pids(fleet)] == pids(fleet)
        grown = [now - then for now, then in zip(memory(), used, strict=True)]
        assert max(grown) < 4 * 2**20, grown
        assert hashes(run(fleet, "static")) == expected
