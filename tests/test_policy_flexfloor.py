"""The flexfloor policy: the smallest set of workers that holds everything and is fast enough, if the change pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statuses import live, make_status

import flexfloor
from flexfloor.policy.base import ForcedLengths, Lengths, NoLengths
from flexfloor.policy.elastic import FlexFloorPolicy
from flexfloor.requests import Prompt, Request, SamplingParams
from flexfloor.world.costs import DeviceProfile, iteration_seconds
from flexfloor.world.resize import ResizePlan
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


def make(
    placed: Mapping[int, Sequence[int]],
    *,
    max_slowdown: float = 10.0,
    min_workers: int = 1,
    lengths: Lengths | None = None,
    prompt: int = 1,
    longest: int = 8,
    **status: object,
) -> tuple[FlexFloorPolicy, FleetStatus]:
    """placed: worker → tokens so far of each of its requests; they go up to 100."""
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
    ours.admit(requests, make_status(pages=10**6))  # it knows what it has bound
    options: dict = {"pages": 10**4, "iteration_s": 10.0, "iteration": 5} | status
    return ours, make_status(states, longest=longest, **options)


def decide(ours: FlexFloorPolicy, status: FleetStatus) -> ResizePlan | None:
    return ours.decide([], status)


def iteration(status: FleetStatus, homes: Mapping[str, int], workers: Sequence[int]) -> float:
    batch, kv = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    for name, (_, request) in status.requests.items():
        batch[homes[name]] += 1
        kv[homes[name]] += request.prompt_tokens + request.response_tokens
    return iteration_seconds(
        READING,
        status.model,
        batch=[batch[w] for w in workers],
        kv_tokens=[kv[w] for w in workers],
        prefill_tokens=[0] * len(workers),
    )


def test_everything_moves_together_when_time_and_memory_allow() -> None:
    plan = decide(*make({0: [3, 4], 1: [50], 2: [2], 3: [1]}))
    assert plan is not None
    assert plan.members == (1,), "the worker with the most KV stays"
    assert len(plan.request_moves) == 4
    assert all(m.with_kv for m in plan.request_moves)
    assert plan.reason.startswith("1 hold what is live")


@settings(max_examples=60, deadline=None)
@given(
    placed=st.dictionaries(st.integers(0, 3), st.lists(st.integers(1, 90), max_size=5), max_size=4),
    slower=st.tuples(st.floats(0, 0.5), st.floats(0, 3)),
    pages=st.integers(60, 400),
)
def test_more_patience_never_keeps_more_workers_and_the_limit_is_honoured(
    placed: dict[int, list[int]], slower: tuple[float, float], pages: int
) -> None:
    sizes = []
    for max_slowdown in (min(slower), max(slower)):
        ours, status = make(placed, max_slowdown=max_slowdown, pages=pages)
        plan = decide(ours, status)
        sizes.append(len(plan.members) if plan else 4)
        if plan is None or not plan.leaving:
            continue
        homes = {name: worker for name, (worker, _) in status.requests.items()}
        homes |= {m.request_id: m.target for m in plan.request_moves}
        total = sum(r.prompt_tokens + r.response_tokens for _, r in status.requests.values())
        even = iteration_seconds(
            READING,
            status.model,
            batch=[-(-status.live // 4)] * 4,
            kv_tokens=[-(-total // 4)] * 4,
            prefill_tokens=[0] * 4,
        )
        assert iteration(status, homes, plan.members) <= even * (1 + max_slowdown) * (1 + 1e-9)
    assert sizes[0] >= sizes[1]


def test_the_smallest_set_that_is_fast_enough_is_taken() -> None:
    placed = {w: [80] * 6 for w in range(4)}
    ours, status = make(placed, max_slowdown=0.0)
    assert decide(ours, status) is None
    members = {}
    for percent in range(0, 400, 5):
        plan = decide(*make(placed, max_slowdown=percent / 100))
        members[percent] = len(plan.members) if plan else 4
    assert set(members.values()) == {1, 2, 3, 4}
    assert list(members.values()) == sorted(members.values(), reverse=True)


def test_the_yardstick_is_the_whole_fleet_also_after_workers_have_left() -> None:
    """Otherwise every release would allow a slowdown of its own."""
    placed = {0: [80] * 12, 1: [80] * 12}
    ours, status = make(placed, max_slowdown=1.2)
    first = decide(ours, status)
    assert first is not None
    assert first.members == (0, 1)
    left = make_status(
        {w: status.workers[w].requests for w in (0, 1)},
        placement=first.placement,
        active=[0, 1],
        pages=10**4,
        iteration_s=10.0,
    )
    assert decide(ours, left) is None


def test_memory_decides_how_many_stay() -> None:
    """16 experts of 10 pages; four workers with 40 pages of experts and `pages` of KV each."""
    placed = {w: [10] for w in range(4)}
    for pages, wanted in ((10**4, 1), (100, 2), (75, 3), (28, 4)):
        plan = decide(*make(placed, pages=pages, longest=100))
        assert (len(plan.members) if plan else 4) == wanted, pages
        assert plan is None or plan.leaving


def test_a_batch_that_is_full_keeps_its_worker() -> None:
    placed = {w: [10] * 3 for w in range(4)}
    plan = decide(*make(placed, max_batch=6))
    assert plan is not None
    assert len(plan.members) == 2


def test_nobody_leaves_when_the_change_costs_more_than_it_saves() -> None:
    placed = {0: [98], 1: [99]}
    ours, status = make(placed, iteration_s=0.001)  # two iterations are left
    assert decide(ours, status) is None
    plan = decide(*make({0: [5], 1: [9]}, iteration_s=0.01))
    assert plan is not None
    assert plan.leaving


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_never_below_the_least_number_of_workers(least: int) -> None:
    plan = decide(*make({0: [5], 1: [9]}, min_workers=least))
    assert (len(plan.members) if plan else 4) == least


def test_nothing_live_is_nothing_to_decide() -> None:
    assert decide(*make({})) is None


def test_without_knowledge_memory_is_set_aside_for_what_may_come() -> None:
    placed = {w: [30] * 2 for w in range(4)}  # each may go up to 90, is forced to 100
    for lengths in (NoLengths(), ForcedLengths()):
        plan = decide(*make(placed, lengths=lengths, pages=330, longest=100))
        assert plan is not None
        assert plan.members == (0,)
        tight = decide(*make(placed, lengths=lengths, pages=200, longest=100))
        assert tight is None or len(tight.members) > 1, "the pages in use would fit, those to come do not"


# -- rebalancing ---------------------------------------------------------------------------------------------------


def full(pages: Sequence[int], others: int = 1, **status: object) -> tuple[FlexFloorPolicy, FleetStatus]:
    """Worker 0 has `pages` of its 30 pages in use by requests of these sizes; it may not leave."""
    placed = {0: [4 * p - 1 for p in pages]} | {w: [3] * others for w in (1, 2, 3)}
    return make(placed, min_workers=4, pages=30, **status)  # type: ignore[arg-type]


def test_a_full_worker_hands_its_largest_request_to_the_emptiest() -> None:
    plan = decide(*full([8, 12, 9]))
    assert plan is not None
    assert not plan.leaving
    assert [(m.request_id, m.source, m.target, m.with_kv) for m in plan.request_moves] == [("p1#0/0", 0, 1, True)]
    assert plan.reason == "its worker is full"


def test_a_worker_with_pages_to_spare_keeps_its_requests() -> None:
    assert decide(*full([8, 9, 9])) is None  # 4 are free, 3 may be wanted next


def test_a_request_alone_is_not_sent_from_one_worker_to_the_next() -> None:
    assert decide(*full([30])) is None


def test_nothing_moves_to_where_it_does_not_fit_or_no_batch_is_free() -> None:
    placed = {
        0: [47, 71],
        1: [71],
        2: [71],
        3: [71],
    }  # 12 + 18 pages; 12 are free elsewhere, and room to grow is wanted
    assert decide(*make(placed, min_workers=4, pages=30)) is None
    assert decide(*full([8, 12, 9], max_batch=1)) is None


# -- what waits ----------------------------------------------------------------------------------------------------


def waiting(count: int, tokens: int = 100) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return flexfloor.make_requests([Prompt((1,), f"w{i}") for i in range(count)], sampling=params)


def before_the_start(max_slowdown: float, count: int, pages: int = 10**4, max_batch: int = 64) -> int:
    ours = FlexFloorPolicy(ForcedLengths(), READING, max_slowdown)
    plan = ours.decide(waiting(count), make_status(pages=pages, max_batch=max_batch, longest=101))
    return len(plan.members) if plan else 4


def test_a_fleet_starts_as_small_as_its_whole_work_allows() -> None:
    """Nothing is live yet: what waits sets the pace."""
    assert before_the_start(0.0, 40) == 4
    assert before_the_start(100.0, 40) == 1
    sizes = [before_the_start(percent / 100, 40) for percent in range(0, 400, 20)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def test_a_batch_that_holds_few_at_once_makes_a_small_fleet_slow() -> None:
    assert before_the_start(1.5, 8, max_batch=64) < before_the_start(1.5, 8, max_batch=2)


def test_a_memory_that_holds_few_at_once_makes_a_small_fleet_slow() -> None:
    """Each takes 26 pages at its end; 16 experts take 160."""
    assert before_the_start(3.5, 8) == 1
    assert before_the_start(3.5, 8, pages=160) > 1
