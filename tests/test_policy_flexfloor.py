"""The flexfloor policy on fleets made by hand: what holds whatever its constants are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statuses import live, make_status

import flexfloor
from flexfloor.policy.flexfloor import FlexFloorPolicy
from flexfloor.progress import Decision
from flexfloor.requests import Prompt, Request, SamplingParams
from flexfloor.world.costs import DeviceProfile, MoveCosts
from flexfloor.world.lengths.base import ForcedLengths, Lengths
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.resize import ResizePlan, check_plan
from flexfloor.world.status import FleetStatus

# Only the reading of weights and KV takes time here, so that fewer workers are always slower.
READING = DeviceProfile(
    name="reading",
    bandwidth=1e6,
    flops=1e15,
    fixed_s=0.0,
    latency_s=((8, 0.0),),
    node_link=1e15,
    cross_link=1e15,
    ranks_per_node=8,
    imbalance=1.0,
)
PATIENT = 1e6  # a slowdown that lets everything pass
FREE = MoveCosts(bytes_per_s=1e18, recompute_tokens_per_s=1.0, switch_s=0.0, pause_s=0.0)


def make(
    placed: Mapping[int, Sequence[int]],
    *,
    max_slowdown: float = PATIENT,
    min_workers: int = 1,
    lengths: Lengths | None = None,
    prompt: int = 1,
    longest: int = 101,
    moves: MoveCosts = FREE,
    **status: object,
) -> tuple[FlexFloorPolicy, FleetStatus]:
    """placed: worker → tokens so far of each of its requests; they go up to 100. The policy has seen them arrive."""
    ours = FlexFloorPolicy(lengths or ForcedLengths(), READING, max_slowdown, min_workers)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    requests: list[Request] = []
    states: dict[int, list] = {}
    for worker, own in placed.items():
        for tokens in own:
            (request,) = flexfloor.make_requests([Prompt((1,) * prompt, f"p{len(requests)}")], sampling=params)
            requests.append(request)
            pages = -(-(prompt + tokens) // 4)
            states.setdefault(worker, []).append(live(request.request_id, pages, prompt=prompt, response=tokens))
    options: dict = {"pages": 10**4, "iteration_s": 10.0, "iteration": 5} | status
    before = make_status(**{**options, "iteration": 0, "iteration_s": 0.0, "longest": longest})
    if requests:
        ours.decide(requests, before)
        ours.admit(requests, make_status(pages=10**6))
    return ours, replace(make_status(states, longest=longest, **options), move_costs=moves)


def decide(ours: FlexFloorPolicy, status: FleetStatus) -> ResizePlan | None:
    plan = ours.decide([], status)
    if plan is not None:
        check_plan(plan, status)
    return plan


def stay(plan: ResizePlan | None, of: int = 4) -> int:
    return of if plan is None else len(plan.members)


def test_everything_moves_together_when_time_and_memory_allow() -> None:
    plan = decide(*make({0: [3, 4], 1: [50], 2: [2], 3: [1]}))
    assert plan is not None
    assert plan.members == (1,), "the worker with the most KV stays"
    assert len(plan.request_moves) == 4
    assert all(m.with_kv for m in plan.request_moves)


def test_nobody_leaves_when_fewer_are_slower_and_no_slowdown_is_allowed() -> None:
    for placed in ({w: [80] * 6 for w in range(4)}, {0: [3, 4], 1: [50], 2: [2], 3: [1]}):
        ours, status = make(placed, max_slowdown=0.0)
        assert stay(decide(ours, replace(status, clock_s=1e9))) == 4, "late already"


PLACED = st.dictionaries(st.integers(0, 3), st.lists(st.integers(1, 90), max_size=5), max_size=4)


@settings(max_examples=60, deadline=None)
@given(placed=PLACED, slower=st.tuples(st.floats(0, 0.5), st.floats(0, 3)), pages=st.integers(60, 400))
def test_more_patience_never_predicts_more_occupied_time(
    placed: dict[int, list[int]], slower: tuple[float, float], pages: int
) -> None:
    plans = [decide(*make(placed, max_slowdown=s, pages=pages)) for s in sorted(slower)]
    told = [p.predicted["remaining_occupied_s"] for p in plans if p is not None and p.leaving]
    assert told == sorted(told, reverse=True)
    for plan in plans:
        if plan is not None and plan.leaving:
            assert plan.reason
            assert {"stall_s", "remaining_s", "remaining_occupied_s", "saved_worker_s"} <= set(plan.predicted)
            assert plan.predicted["saved_worker_s"] > 0


@settings(max_examples=60, deadline=None)
@given(
    placed=PLACED,
    knowledge=st.sampled_from(["none", "oracle"]),
    pages=st.integers(30, 300),
    least=st.integers(1, 4),
    max_batch=st.integers(5, 12),
    slowdown=st.sampled_from([0.0, 0.02, 0.3, PATIENT]),
)
def test_every_decision_can_be_carried_out(
    placed: dict[int, list[int]], knowledge: str, pages: int, least: int, max_batch: int, slowdown: float
) -> None:
    """`decide` checks the plan: experts, requests, memory."""
    ours, status = make(
        placed, lengths=make_lengths(knowledge), pages=pages, min_workers=least, max_batch=max_batch,
        max_slowdown=slowdown,
    )  # fmt: skip
    plan = decide(ours, status)
    assert stay(plan) >= least
    if plan is None:
        return
    homes = {name: worker for name, (worker, _) in status.requests.items()}
    homes |= {m.request_id: m.target for m in plan.request_moves}
    for worker in plan.members:
        arrived = [m for m in plan.request_moves if m.target == worker]
        assert not arrived or sum(home == worker for home in homes.values()) <= max_batch
    assert set(homes.values()) <= set(plan.members)


def test_memory_decides_how_many_stay() -> None:
    """16 experts of 10 pages; four workers with 40 pages of experts and `pages` of KV each; requests end with 26."""
    placed = {w: [10] for w in range(4)}
    sizes = [stay(decide(*make(placed, pages=pages))) for pages in (10**4, 230, 130, 90, 60, 30)]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4, "120 pages of experts of three who leave do not fit beside a request"


def test_a_batch_that_is_full_keeps_its_worker() -> None:
    placed = {w: [10] * 3 for w in range(4)}
    plan = decide(*make(placed, max_batch=6))
    assert stay(plan) == 2


def test_nobody_leaves_when_the_change_costs_more_than_it_saves() -> None:
    """Two iterations are left, of about a hundredth of a second."""
    placed = {0: [98], 1: [99]}
    dear, cheap = MoveCosts(switch_s=50.0), MoveCosts(switch_s=0.0)
    assert stay(decide(*make(placed, iteration_s=0.01, moves=dear))) == 4
    plan = decide(*make({0: [5], 1: [9]}, iteration_s=10.0, moves=cheap))
    assert plan is not None
    assert plan.leaving


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_never_below_the_least_number_of_workers(least: int) -> None:
    assert stay(decide(*make({0: [5], 1: [9]}, min_workers=least))) == least


def test_nothing_live_is_nothing_to_decide() -> None:
    assert decide(*make({})) is None


def test_without_knowledge_memory_is_set_aside_for_what_may_come() -> None:
    placed = {w: [30] * 2 for w in range(4)}  # each may go up to 90 pages more in all, and is forced to 100
    for knowledge in ("none", "oracle"):
        assert stay(decide(*make(placed, lengths=make_lengths(knowledge), pages=400))) == 1
        tight = decide(*make(placed, lengths=make_lengths(knowledge), pages=200))
        assert stay(tight) > 1, "the pages in use would fit, those to come do not"


# -- evening out ---------------------------------------------------------------------------------------------------


def full(pages: Sequence[int], others: int = 1, **status: object) -> tuple[FlexFloorPolicy, FleetStatus]:
    """Worker 0 has `pages` of its 30 pages in use by requests of these sizes; nobody may leave."""
    placed = {0: [4 * p - 1 for p in pages]} | {w: [3] * others for w in (1, 2, 3)}
    return make(placed, min_workers=4, pages=30, **status)  # type: ignore[arg-type]


def test_a_full_worker_gives_requests_away_before_it_preempts() -> None:
    plan = decide(*full([8, 12, 9]))
    assert plan is not None
    assert not plan.leaving
    moved = {m.request_id: m.source for m in plan.request_moves}
    assert moved.get("p1#0/0") == 0, "the largest one of the full worker"
    assert all(m.with_kv for m in plan.request_moves)
    assert "stall_s" in plan.predicted


def test_a_request_alone_is_not_sent_from_one_worker_to_the_next() -> None:
    assert decide(*full([24])) is None


def test_nothing_moves_where_no_batch_is_free() -> None:
    assert decide(*full([8, 12, 9], max_batch=1)) is None


# -- what waits ----------------------------------------------------------------------------------------------------


def waiting(count: int, tokens: int = 100) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return flexfloor.make_requests([Prompt((1,), f"w{i}") for i in range(count)], sampling=params)


def before_the_start(max_slowdown: float, count: int, moves: MoveCosts = FREE) -> int:
    ours = FlexFloorPolicy(ForcedLengths(), READING, max_slowdown)
    status = replace(make_status(pages=10**4, max_batch=64, longest=101), move_costs=moves)
    return stay(ours.decide(waiting(count), status))


def test_a_fleet_starts_as_small_as_its_whole_work_allows() -> None:
    """Nothing is live yet: what waits sets the pace."""
    assert before_the_start(0.0, 40) == 4
    sizes = [before_the_start(percent / 100, 40) for percent in range(0, 1000, 50)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 4


def test_a_start_on_fewer_workers_is_worth_what_it_stalls() -> None:
    """All workers are occupied until the experts of those who leave have arrived elsewhere."""
    assert before_the_start(PATIENT, 40) < 4
    assert before_the_start(PATIENT, 40, replace(FREE, switch_s=1e4)) == 4
    # Patience is for the stall too: with a little of it, a cheap change is made and a dear one is not.
    some = next(share for share in range(1, 20) if before_the_start(share, 40) < 4)
    assert before_the_start(some, 40, replace(FREE, switch_s=1e-6)) < 4
    assert before_the_start(some, 40, replace(FREE, switch_s=1.0)) == 4


def test_the_order_of_what_waits_is_told_as_a_decision() -> None:
    ours = FlexFloorPolicy(ForcedLengths(), READING, 0.02)
    ours.decide(waiting(12), make_status(pages=10**4, longest=101))
    told = [d for d in ours.take_decisions() if isinstance(d, Decision)]
    assert [d.what for d in told] == ["order"]
    assert told[0].reason
    assert told[0].predicted["remaining_s"] > 0
    assert ours.take_decisions() == []


def test_an_uneven_batch_does_not_make_the_device_look_slow() -> None:
    """Six long requests on one worker and a short one on another take longer than seven that are spread evenly; the
    device is as fast as its profile says all the same, and what is told of all workers must not grow by that."""
    ours, status = make({0: [80] * 6, 1: [3]}, pages=40)
    kv = sum(1 + 80 + status.page_tokens / 2 for _ in range(6))
    exact = float(ours.cost(status).seconds(4, 6, 7, kv))
    decide(ours, replace(status, iteration_s=exact))
    assert ours.scale == pytest.approx(1.0, rel=0.01)
    ours, status = make({0: [80] * 6, 1: [3]}, pages=40)
    decide(ours, replace(status, iteration_s=3 * exact))
    assert ours.scale == pytest.approx(3.0, rel=0.01)


def test_what_moves_gain_is_in_seconds_of_the_fleet() -> None:
    gained = []
    for scale in (1.0, 16.0):
        ours, status = make({0: [80] * 6, 1: [3]}, min_workers=4, iteration_s=0.0)
        ours.scale = scale
        plan = decide(ours, status)
        assert plan is not None
        assert not plan.leaving
        gained.append(plan.predicted["saved_s"])
    assert gained[1] == pytest.approx(16 * gained[0])
