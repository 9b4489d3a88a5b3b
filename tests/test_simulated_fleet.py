"""The fleet in virtual time against seconds worked out by hand, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import DEVICE, PAGE, PAGE_TOKENS, SHAPE, lengths_of, make_requests, with_pages

import flexfloor
from flexfloor.errors import FlexFloorError, InputError, PlanRefusedError
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import LedgerWriter
from flexfloor.policy.static import StaticPolicy
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile
from flexfloor.world.resize import ResizePlan, plan_moves, plan_shrink
from flexfloor.world.status import FleetStatus

# The two requests of `PAIR`, prompts of 3 tokens and responses of 2 and 4, on one worker: 1 fixed, 1 dense weights,
# 0.01 a token of context, 0.1 a request, 0.8·(1 − ½^rows) experts read, 0.14 a prompt token.
BOTH_PREFILL = 1 + 1 + 0.2 + 0.8 * (1 - 0.5**8) + 6 * 0.14
BOTH_DECODE = 1 + 1 + 0.08 + 0.2 + 0.6  # 2·(3 + 1) tokens of context
ONE_DECODES = [1 + 1 + tokens * 0.01 + 0.1 + 0.4 for tokens in (5, 6)]
PAIR = BOTH_PREFILL + BOTH_DECODE + sum(ONE_DECODES)


def fleet_of(
    requests: Sequence[Request], workers: int = 1, *, pages: int = 100, device: DeviceProfile = DEVICE, **options: Any
) -> SimulatedFleet:
    lengths = {r.request_id: r.sampling.max_tokens for r in requests}
    profile = with_pages(pages, workers, device)
    return SimulatedFleet(SHAPE, profile, workers, lengths=lengths, page_tokens=PAGE_TOKENS, **options)


def bound(workers: int = 2, lengths: Sequence[int] = (40, 40), **options: Any) -> SimulatedFleet:
    """One request a worker, in the middle of its response."""
    requests = make_requests(lengths, prompt=3)
    fleet = fleet_of(requests, workers, **options)
    fleet.submit(requests)
    fleet.assign({w: [r.request_id] for w, r in enumerate(requests)})
    fleet.advance(6)
    return fleet


def run(fleet: SimulatedFleet, requests: Sequence[Request], **options: object) -> tuple[Summary, list[dict]]:
    ledger = LedgerWriter()
    flexfloor.rollout(fleet, requests, ledger=ledger, profile=DEVICE, **options)  # type: ignore[arg-type]
    return summarize(ledger.records), ledger.records


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 100])
def test_the_wall_is_the_sum_of_the_iterations(chunk: int) -> None:
    requests = make_requests([2, 4], prompt=3)
    summary, records = run(fleet_of(requests), requests, chunk=chunk)
    assert summary.wall_s == pytest.approx(PAIR)
    assert (summary.iterations, summary.response_tokens, summary.simulated) == (4, 6, True)
    assert summary.occupied_worker_s == pytest.approx(PAIR)
    assert sum(r["t1"] - r["t0"] for r in records if r["type"] == "chunk") == pytest.approx(PAIR)
    assert (summary.responses_sha256, summary.logprobs_sha256, summary.numerics) == (None, None, "none")


def test_the_drivers_looks_take_their_time() -> None:
    requests = make_requests([2, 4], prompt=3)
    for chunk, looks in ((1, 4), (2, 2), (3, 2), (4, 1)):
        fleet = fleet_of(requests, device=replace(DEVICE, look_s=0.25))
        assert run(fleet, requests, chunk=chunk)[0].wall_s == pytest.approx(PAIR + looks * 0.25)


def test_a_model_may_take_its_time_from_another_one() -> None:
    requests = make_requests([2, 4], prompt=3)
    twice = replace(SHAPE, dense_bytes=2400)  # another second for 1000 bytes of dense weights, and 0.1 a token for them
    fleet = SimulatedFleet(
        SHAPE, with_pages(100, 1), 1, lengths=lengths_of(requests, [2, 4]), page_tokens=PAGE_TOKENS, timed_as=twice
    )
    assert run(fleet, requests)[0].wall_s == pytest.approx(PAIR + 4 * 1 + 0.1 * (2 + 6 + 2 + 1 + 1))
    assert fleet.status().timed_model is twice


def test_siblings_compute_their_prompt_once() -> None:
    """Full pages are shared: of 9 tokens the first 8; the second one computes the last token alone."""
    requests = make_requests([3, 3], prompt=9, samples=2)
    _, records = run(fleet_of(requests), requests, chunk=1)
    computed = [sum(sum(w["prefill_tokens"]) for w in r["workers"]) for r in records if r["type"] == "chunk"]
    assert sum(computed) == 9 + 1
    alone = make_requests([3, 3], prompt=9)
    _, records = run(fleet_of(alone), alone, chunk=1)
    assert sum(sum(sum(w["prefill_tokens"]) for w in r["workers"]) for r in records if r["type"] == "chunk") == 18


def test_responses_end_by_their_length_and_say_why() -> None:
    requests = make_requests([9, 9], most=9)
    fleet = SimulatedFleet(
        SHAPE, with_pages(50, 1), 1, lengths={requests[0].request_id: 4}, page_tokens=PAGE_TOKENS, model="made"
    )
    result = flexfloor.rollout(fleet, requests, policy="static")
    assert [r.finish_reason for r in result.responses] == ["stop", "length"]
    assert [r.tokens for r in result.responses] == [[], []]
    assert (result.summary.response_tokens, result.summary.model) == (4 + 9, "made")


# -- resizes -------------------------------------------------------------------------------------------------------


def test_a_resize_stalls_for_what_it_moves() -> None:
    """8 s fixed; the one that leaves sends its 4 experts of 100 bytes and the pages of its request at 100 bytes/s."""
    fleet = bound()
    before, status = fleet.clock(), fleet.status()
    outcome = fleet.apply(plan_shrink(status, [1], reason="because", predicted={"stall_s": 12.0}))
    assert (outcome.expert_bytes, outcome.kv_bytes) == (400, 2 * PAGE), "3 + 6 − 1 tokens are computed"
    assert fleet.clock() - before == pytest.approx(8 + 4.8)
    assert (outcome.commit_s, outcome.prepare_s) == (8, pytest.approx(4.8))
    assert (outcome.members, outcome.leaving, outcome.left_live, outcome.iteration) == ((0,), (1,), (1,), 6)
    assert (outcome.reason, outcome.predicted, outcome.failed) == ("because", {"stall_s": 12.0}, None)
    after = fleet.status()
    assert after.active == (0,)
    assert after.clock_s == fleet.clock()
    assert {name: worker for name, (worker, _) in after.requests.items()} == dict.fromkeys(status.requests, 0)
    assert fleet.advance(100).iterations == 34, "both go on where they were"


def test_workers_send_and_receive_side_by_side() -> None:
    """Two of four leave, and each one that stays takes in two experts: the busiest worker counts, not the sum."""
    fleet = fleet_of([], 4)
    before = fleet.clock()
    outcome = fleet.apply(plan_shrink(fleet.status(), [1, 3]))
    assert outcome.expert_bytes == 400
    assert fleet.clock() - before == pytest.approx(8 + 2)


def test_moves_without_a_resize_pause_for_what_they_move() -> None:
    fleet = bound()
    before, status = fleet.clock(), fleet.status()
    (name,) = [n for n, (w, _) in status.requests.items() if w == 1]
    outcome = fleet.apply(plan_moves(status, {name: 0}, "evened out"))
    assert outcome.epoch == status.epoch
    assert (outcome.requests, outcome.requests_recomputed, outcome.expert_bytes) == (1, 0, 0)
    assert fleet.clock() - before == pytest.approx(2 + outcome.kv_bytes / 100)
    assert fleet.status().active == (0, 1)


def test_workers_come_back_for_what_it_takes_to_bring_their_experts() -> None:
    fleet = bound()
    home = fleet.status()
    fleet.apply(plan_shrink(home, [1]))
    fleet.advance(100)
    before = fleet.clock()
    assert fleet.regrow() == pytest.approx(8 + 4)
    assert fleet.clock() - before == pytest.approx(12)
    back = fleet.status()
    assert back.active == (0, 1)
    assert (back.placement.worker == home.placement.worker).all()
    assert (back.placement.slot == home.placement.slot).all()
    assert [w.kv_pages for w in back.workers] == [w.kv_pages for w in home.workers]
    assert fleet.regrow() == 0.0
    fleet.load_weights(None)


def test_weights_are_not_replaced_while_a_worker_is_away() -> None:
    fleet = bound()
    fleet.apply(plan_shrink(fleet.status(), [0]))
    with pytest.raises(FlexFloorError, match="between rollouts"):
        fleet.load_weights(None)


class Leaves(StaticPolicy):
    """Worker 1 leaves at the third look."""

    def __init__(self) -> None:
        super().__init__(grouped=False)
        self.looks = 0

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        self.looks += 1
        return plan_shrink(status, [1], reason="third look") if self.looks == 4 else None


def test_a_rollout_counts_iterations_stalls_and_looks() -> None:
    requests = make_requests([40, 30], prompt=3)
    fleet = fleet_of(requests, 2, device=replace(DEVICE, look_s=0.5))
    summary, records = run(fleet, requests, policy=Leaves(), chunk=4)
    chunks = [r for r in records if r["type"] == "chunk"]
    iterations = sum(sum(np.array(c["workers"][0]["seconds"]) * np.array(c["spans"])) for c in chunks if c["workers"])
    (resize,) = summary.resizes
    assert resize["t1"] - resize["t0"] == pytest.approx(8 + (400 + resize["kv_bytes"]) / 100)
    assert summary.stall_s == pytest.approx(resize["t1"] - resize["t0"])
    assert summary.wall_s == pytest.approx(iterations + summary.stall_s + 0.5 * len(chunks), rel=1e-6)
    assert summary.occupied_worker_s == pytest.approx(summary.wall_s + resize["t1"])
    assert summary.regrow_s == pytest.approx(8 + 4)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_refused_plan_changes_nothing() -> None:
    fleet = bound(3, (40, 40, 40), pages=30)
    status, clock = fleet.status(), fleet.clock()
    good = plan_shrink(status, [1])
    for broken in (
        ResizePlan((0, 2), (1,), (), status.placement),
        ResizePlan((0, 2), (1,), (), good.placement, good.expert_moves, ()),
        ResizePlan((0, 2), (1,), (), good.placement, good.expert_moves[1:], good.request_moves),
        ResizePlan((0, 9), (1,), (9,), good.placement, good.expert_moves, good.request_moves),
        "leave",
    ):
        with pytest.raises(PlanRefusedError):
            fleet.apply(broken)  # type: ignore[arg-type]
    after = fleet.status()
    assert fleet.clock() == clock
    assert after.requests == status.requests
    assert after.workers == status.workers
    assert after.placement is status.placement
    fleet.apply(good)
    with pytest.raises(PlanRefusedError):
        fleet.apply(good)
    assert fleet.advance(100).iterations == 34


def test_the_same_request_is_not_taken_twice() -> None:
    requests = make_requests([5, 5], prompt=3)
    fleet = fleet_of(requests)
    fleet.submit(requests[:1])
    for again in (requests[:1], requests, [requests[1], requests[1]]):
        with pytest.raises(InputError, match="submitted twice"):
            fleet.submit(again)
    fleet.submit(requests[1:])
    fleet.start()
    fleet.submit(requests)


def test_memory_that_is_too_small_is_refused_with_its_parts() -> None:
    small = replace(with_pages(1, 2), memory_bytes=with_pages(1, 2).memory_bytes - 1)
    with pytest.raises(InputError, match=r"too small for 2 workers: dense weights .*; give more workers or memory$"):
        SimulatedFleet(SHAPE, small, 2, page_tokens=PAGE_TOKENS)
    SimulatedFleet(SHAPE, with_pages(1, 2), 2, page_tokens=PAGE_TOKENS)
    with pytest.raises(InputError, match="workers is 0"):
        SimulatedFleet(SHAPE, DEVICE, 0)


def test_a_request_that_no_worker_holds_is_refused_before_it_runs() -> None:
    requests = make_requests([20, 200], prompt=3)
    fleet = fleet_of(requests, 2, pages=20)
    with pytest.raises(
        InputError, match=r"request p1#0/0 may take 207 tokens of KV, a worker has room for 80 .*; lower"
    ):
        flexfloor.rollout(fleet, requests, policy="static")
    assert fleet.status().live == 0


@pytest.mark.parametrize("length", [0, -1, 10])
def test_a_length_that_no_response_can_have_is_refused(length: int) -> None:
    requests = make_requests([9], most=9)
    fleet = SimulatedFleet(SHAPE, with_pages(50, 1), 1, lengths={requests[0].request_id: length}, page_tokens=4)
    with pytest.raises(InputError, match=r"the length of request p0#0/0 is not in 1 … 9"):
        fleet.submit(requests)


def test_who_has_left_gets_no_requests() -> None:
    fleet = bound()
    fleet.apply(plan_shrink(fleet.status(), [1]))
    (late,) = make_requests([3], first=7)
    fleet.submit([late])
    with pytest.raises(FlexFloorError, match="worker 1, which is not active"):
        fleet.assign({1: [late.request_id]})


def test_cancelled_requests_give_their_pages_back() -> None:
    fleet = bound()
    fleet.cancel(list(fleet.status().requests))
    assert fleet.status().live == 0
    assert all(w.kv_pages_used == 0 for w in fleet.status().workers)
    assert fleet.advance(5).iterations == 0


def test_more_workers_than_experts_have_none_of_some_layers() -> None:
    requests = make_requests([5] * 12, prompt=3)
    summary, _ = run(fleet_of(requests, 6), requests, policy="release")
    assert summary.response_tokens == 60
