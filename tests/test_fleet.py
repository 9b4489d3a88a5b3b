"""The life of a fleet: late requests, idle workers, dead and stopped ones, and nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import make_requests

import flexfloor
from flexfloor.fleets.engine.fleet import EngineFleet


@pytest.fixture(scope="module")
def fleet(checkpoint: Callable) -> Iterator[EngineFleet]:
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2) as launched:
        assert isinstance(launched, EngineFleet)
        yield launched


def request(name: str, length: int = 5, max_tokens: int = 20) -> flexfloor.Request:
    sampling = flexfloor.SamplingParams(max_tokens=max_tokens)
    return flexfloor.make_requests([flexfloor.Prompt((9,) * length, key=name)], sampling=sampling)[0]


def test_a_request_that_arrives_as_the_last_one_ends(fleet: EngineFleet) -> None:
    run = flexfloor.Rollout(fleet, chunk=4)
    run.submit([request("first")])
    order = []
    for response in run:
        order.append(response.prompt_key)
        if response.prompt_key == "first":
            run.submit([request("second"), request("third")])
        else:
            run.seal()
    assert order[0] == "first"
    assert sorted(order) == ["first", "second", "third"]
    assert run.summary.requests == 3
    assert run.summary.response_tokens == sum(d["tokens"] for d in run.summary.to_json()["workers_detail"])


def test_submit_from_another_thread_while_nothing_is_live(fleet: EngineFleet) -> None:
    run = flexfloor.Rollout(fleet)

    def later() -> None:
        for name in ("a", "b"):
            time.sleep(0.5)
            run.submit([request(name)])
        run.seal()

    thread = threading.Thread(target=later)
    thread.start()
    result = run.run()
    thread.join()
    assert [r.prompt_key for r in result.responses] == ["a", "b"]
    with pytest.raises(flexfloor.FlexFloorError, match="sealed"):
        run.submit([request("c")])
    alone = flexfloor.rollout(fleet, [request("a")])
    assert alone.responses[0].tokens == result.responses[0].tokens


def test_a_request_that_cannot_run_is_refused_to_its_submitter_and_the_rollout_goes_on(fleet: EngineFleet) -> None:
    run = flexfloor.Rollout(fleet, chunk=4)
    run.submit([request("first")])
    for response in run:
        if response.prompt_key == "first":
            with pytest.raises(flexfloor.InputError, match="leaves no room in the model's context"):
                run.submit([request("good"), request("long", length=fleet.info.shape.max_context)])
            with pytest.raises(flexfloor.InputError, match="submitted twice"):
                run.submit([request("good"), request("good")])
            run.submit([request("good")])
            run.seal()
    assert run.summary.requests == 2


def test_an_empty_sealed_rollout_runs_no_iteration(fleet: EngineFleet) -> None:
    run = flexfloor.Rollout(fleet)
    run.seal()
    assert run.run().responses == []
    assert run.summary.iterations == 0


def test_one_request_on_one_of_two_workers(fleet: EngineFleet) -> None:
    result = flexfloor.rollout(fleet, [request("only", max_tokens=9)])
    details = result.summary.to_json()["workers_detail"]
    assert sorted(d["requests"] for d in details) == [0, 1]
    assert result.summary.post_finish_share_iterations >= 0.5
    assert len(result.responses[0].tokens) == len(result.responses[0].logprobs) <= 9


def test_the_same_request_twice_is_refused_and_the_fleet_lives_on(fleet: EngineFleet) -> None:
    with pytest.raises(flexfloor.InputError, match="submitted twice"):
        flexfloor.rollout(fleet, [request("x"), request("x")])
    assert flexfloor.rollout(fleet, [request("x")]).responses


def test_cancel_forgets_waiting_and_live_requests(fleet: EngineFleet) -> None:
    fleet.start()
    fleet.submit([request("live", max_tokens=500), request("waiting")])
    fleet.assign({0: ["live#0/0"]})
    fleet.advance(3)
    fleet.cancel(["live#0/0", "waiting#0/0", "unknown"])
    status = fleet.status()
    assert all(w.live_requests == 0 and w.kv_pages_free == w.kv_pages for w in status.workers)
    assert fleet.advance(5).iterations == 0


def test_experts_are_loaded_once(fleet: EngineFleet) -> None:
    assert sum(fleet.info.expert_bytes_loaded) == fleet.info.shape.all_expert_bytes


def test_ledger_is_valid_while_it_grows_and_the_summary_comes_from_it(fleet: EngineFleet, tmp_path: Path) -> None:
    from flexfloor.ledger.accounting import summarize
    from flexfloor.ledger.events import read_ledger

    path = tmp_path / "ledger.jsonl"
    seen = []
    result = flexfloor.rollout(
        fleet, make_requests(4, 2), ledger=path, on_progress=lambda p: seen.append(len(read_ledger(path)))
    )
    assert seen == sorted(seen)
    assert len(seen) > 1
    records = read_ledger(path)
    assert records[-1]["type"] == "end"
    assert summarize(records) == result.summary
    for record in records:
        if record["type"] == "chunk":
            for worker in record["workers"]:
                arrays = (worker[k] for k in ("seconds", "batch", "prefill_tokens", "kv_tokens", "experts_touched"))
                assert {len(a) for a in arrays} == {record["iterations"]}


def start_long_rollout(fleet: EngineFleet) -> Iterator[flexfloor.Response]:
    """A rollout that is well under way."""
    run = flexfloor.Rollout(fleet, chunk=2)
    run.submit([request("short", max_tokens=3), *(request(f"long{i}", max_tokens=1500) for i in range(4))])
    run.seal()
    responses = iter(run)
    next(responses)
    return responses


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_run_at_once_and_by_name(checkpoint: Callable, victim: int) -> None:
    fleet = flexfloor.Fleet.launch(checkpoint("tiny"), workers=3)
    assert isinstance(fleet, EngineFleet)
    pids = list(fleet.processes.values())
    responses = start_long_rollout(fleet)
    killed_at = time.monotonic()
    threading.Timer(0.05, os.kill, (pids[victim], signal.SIGKILL)).start()
    with pytest.raises(flexfloor.WorkerFailedError, match=rf"^worker {victim} was killed by SIGKILL$"):
        list(responses)
    assert time.monotonic() - killed_at < 5
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(flexfloor.FlexFloorError, match="closed"):
        fleet.advance(1)


def test_a_stopped_worker_is_named_within_worker_timeout(checkpoint: Callable) -> None:
    fleet = flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, worker_timeout=3)
    assert isinstance(fleet, EngineFleet)
    pids = list(fleet.processes.values())
    responses = start_long_rollout(fleet)
    os.kill(pids[1], signal.SIGSTOP)
    stopped_at = time.monotonic()
    with pytest.raises(flexfloor.WorkerFailedError, match=r"^worker 1 gave no sign of life for 3 s"):
        list(responses)
    assert time.monotonic() - stopped_at < 3 + 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_raises_is_named_with_its_reason(checkpoint: Callable) -> None:
    fleet = flexfloor.Fleet.launch(checkpoint("tiny"), workers=2)
    assert isinstance(fleet, EngineFleet)
    with pytest.raises(flexfloor.WorkerFailedError, match="worker 1 failed: AttributeError"):
        fleet._call("no_such_verb", {1: ()})


def test_launch_and_close_leave_nothing_behind(checkpoint: Callable) -> None:
    def footprint() -> tuple[int, int, int]:
        me = psutil.Process()
        return me.num_fds(), me.num_threads(), len(me.children(recursive=True))

    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2):
        pass
    before = footprint()
    for _ in range(4):
        with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2) as fleet:
            flexfloor.rollout(fleet, [request("x", max_tokens=2)])
    assert footprint() == before


def test_options_of_other_engines_are_refused_in_words(checkpoint: Callable) -> None:
    from flexfloor.fleets.engine.fleet import UNSUPPORTED_OPTIONS

    for name in UNSUPPORTED_OPTIONS:
        with pytest.raises(flexfloor.UnsupportedError, match=f"^{name}: .* is not supported"):
            flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, kind="engine", **{name: 2})
    with pytest.raises(flexfloor.InputError, match="no_such_option"):
        flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, no_such_option=2)


@pytest.mark.parametrize(("device", "transport"), [("cpu", "nccl"), ("cuda", "socket"), ("cuda", "gloo")])
def test_a_transport_that_does_not_go_with_the_device_is_refused(
    checkpoint: Callable, device: str, transport: str
) -> None:
    with pytest.raises(flexfloor.InputError, match=f"transport '{transport}' does not go with device {device}"):
        flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, device=device, transport=transport)
