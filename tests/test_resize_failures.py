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
from flexfloor.fleets.engine.resizing import ResizeRun
from flexfloor.policy.static import StaticPolicy
from flexfloor.world.resize import plan_shrink


def launch(model: object, workers: int = 3, **options: Any) -> EngineFleet:
    fleet = flexfloor.Fleet.launch(model, workers=workers, **options)
    assert isinstance(fleet, EngineFleet)
    return fleet


def pids(fleet: EngineFleet) -> list[int]:
    return list(fleet.processes.values())


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


@pytest.mark.parametrize(("phase", "worker"), [("commit", 1), ("release", 2)])
def test_a_failure_that_cannot_be_undone_ends_the_run_with_one_line(
    checkpoint: Callable, monkeypatch: pytest.MonkeyPatch, phase: str, worker: int
) -> None:
    monkeypatch.setenv("FLEXFLOOR_FAULT", f"{phase}:{worker}")
    fleet = launch(checkpoint("qwen3_moe"))
    running = pids(fleet)
    message = rf"^worker {worker} failed: RuntimeError: fault injected into {phase}$"
    with pytest.raises(flexfloor.WorkerFailedError, match=message):
        run(fleet, Scripted([(4, leave(2))]))
    assert not any(psutil.pid_exists(pid) for pid in running)


def test_a_member_that_disagrees_after_a_resize_ends_the_run(
    checkpoint: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What verify is for: here the driver's own account is falsified."""
    fleet = launch(checkpoint("qwen3_moe"))
    running, verify = pids(fleet), ResizeRun._verify

    def falsified(self: ResizeRun, answers: dict) -> None:
        live, table = answers[0]
        verify(self, answers | {0: ([*live, live[0]], table)})

    monkeypatch.setattr(ResizeRun, "_verify", falsified)
    with pytest.raises(flexfloor.FlexFloorError, match="worker 0 disagrees with the driver after a resize"):
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


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_killed_after_a_resize_is_named(shrunk: tuple, victim: int) -> None:
    fleet, responses = shrunk
    running = pids(fleet)
    begin = time.monotonic()
    threading.Timer(0.1, os.kill, (running[victim], signal.SIGKILL)).start()
    with pytest.raises(flexfloor.WorkerFailedError, match=rf"^worker {victim} was killed by SIGKILL$"):
        list(responses)
    assert time.monotonic() - begin < 5
    assert not any(psutil.pid_exists(pid) for pid in running)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parked_worker_may_be_lost(checkpoint: Callable, expected: tuple, how: signal.Signals) -> None:
    """Whoever has taken its device over may end it: the rollout completes, and it is started anew."""
    with launch(checkpoint("qwen3_moe"), worker_timeout=3) as fleet:
        running = pids(fleet)

        def on_release(worker: int) -> None:
            os.kill(running[worker], how)
            if how == signal.SIGSTOP:
                time.sleep(3.5)

        summary = run(fleet, Scripted([(4, leave(1))]), on_release=on_release)
        assert hashes(summary) == expected
        assert pids(fleet)[0] == running[0]
        assert len(pids(fleet)) == 3
        assert not psutil.pid_exists(running[1])
        assert hashes(run(fleet, "static")) == expected
        fleet.load_weights(checkpoint("qwen3_moe"))
        with pytest.raises(flexfloor.WorkerFailedError, match=r"^worker 2 was lost while it was parked"):
            run(fleet, Scripted([(4, leave(2))]), on_release=lambda w: os.kill(sorted_pids(fleet)[w], signal.SIGKILL))


def sorted_pids(fleet: EngineFleet) -> list[int]:
    return [pid for _, pid in sorted(fleet.processes.items())]


def test_an_interrupted_fleet_says_so(checkpoint: Callable) -> None:
    def interrupt(progress: flexfloor.RolloutProgress) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.005)

    def raise_interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        with launch(checkpoint("tiny"), 2) as fleet:
            sampling = flexfloor.SamplingParams(max_tokens=1500, ignore_eos=True)
            requests = flexfloor.make_requests([(5, 6), (7, 8)], sampling=sampling)
            with pytest.raises(KeyboardInterrupt):
                flexfloor.rollout(fleet, requests, chunk=200, on_progress=interrupt)
            with pytest.raises(flexfloor.FlexFloorError, match="launch a new one"):
                flexfloor.rollout(fleet, requests)
    finally:
        signal.signal(signal.SIGALRM, before)


class Nonsense(StaticPolicy):
    """A policy of a user who is still learning."""

    def __init__(self, admits: Any = None, decides: Any = None) -> None:
        super().__init__(grouped=False)
        self.admits, self.decides = admits, decides

    def admit(self, queue: Any, status: Any) -> Any:
        return super().admit(queue, status) if self.admits is None else self.admits(queue)

    def decide(self, queue: Any, status: Any) -> Any:
        return self.decides


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Nonsense(admits=lambda queue: {}), "admits nothing, though 24 requests wait"),
        (Nonsense(admits=lambda queue: [r.request_id for r in queue]), "not worker → request ids"),
        (Nonsense(admits=lambda queue: {0: [r.request_id for r in queue] * 2}), "which is not waiting"),
        (Nonsense(admits=lambda queue: {9: [queue[0].request_id]}), "worker 9, which is not active"),
        (Nonsense(decides="leave"), "'leave' is no ResizePlan"),
        (Nonsense, "has no name, admit and decide"),
        (object(), "has no name, admit and decide"),
    ],
)
def test_nonsense_of_a_policy_is_refused_in_one_line_and_the_fleet_lives(
    nonsense_fleet: EngineFleet, expected: tuple, policy: Any, message: str
) -> None:
    with pytest.raises(flexfloor.FlexFloorError, match=message) as caught:
        run(nonsense_fleet, policy)
    assert "\n" not in str(caught.value)
    assert hashes(run(nonsense_fleet, "static")) == expected


@pytest.fixture(scope="module")
def nonsense_fleet(checkpoint: Callable) -> Iterator[EngineFleet]:
    with launch(checkpoint("qwen3_moe"), 2) as fleet:
        yield fleet


def test_a_rollout_inside_another_one_is_refused(nonsense_fleet: EngineFleet, expected: tuple) -> None:
    def again(progress: flexfloor.RolloutProgress) -> None:
        run(nonsense_fleet, "static")

    with pytest.raises(flexfloor.FlexFloorError, match="a rollout is running on this fleet"):
        run(nonsense_fleet, "static", on_progress=again)
    assert hashes(run(nonsense_fleet, "static")) == expected


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

        def cycle(index: int) -> list[int]:
            """Memory of each process after it."""
            script = Scripted([(0, leave(index % 3)), (4, leave((index + 1) % 3))])
            assert len(run(fleet, script, requests).resizes) == 2
            return [p.memory_info().rss for p in processes]

        def lows(cycles: int) -> list[int]:
            """Least memory of each process in the last five: a heap breathes by some MiB, a leak lifts the lows too."""
            return [min(own) for own in zip(*[cycle(index) for index in range(cycles)][-5:], strict=True)]

        used, before = lows(10), footprint()
        middle, later = lows(25), lows(25)
        assert footprint() == before
        assert [p.pid for p in psutil.Process().children(recursive=True) if p.pid in pids(fleet)] == pids(fleet)
        # What leaks grows on; a heap that has found its size does not.
        grown = [(mid - then, now - mid) for then, mid, now in zip(used, middle, later, strict=True)]
        assert max(map(min, grown)) < 2 * 2**20, grown
        assert hashes(run(fleet, "static")) == expected
