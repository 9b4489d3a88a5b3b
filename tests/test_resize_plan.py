"""Plans as data: who moves where, what is refused, and in which words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from statuses import PAGE_TOKENS, live, make_status, shape, with_requests

from flexfloor.errors import PlanRefusedError
from flexfloor.progress import RequestStatus
from flexfloor.world.costs import MoveCosts
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.resize import (
    ExpertMove,
    RequestMove,
    ResizePlan,
    check_plan,
    plan_moves,
    plan_regrow,
    plan_shrink,
)
from flexfloor.world.status import FleetStatus


def refused(plan: ResizePlan, status: FleetStatus) -> str:
    with pytest.raises(PlanRefusedError) as caught:
        check_plan(plan, status)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def targets(plan: ResizePlan) -> dict[str, tuple[int, bool]]:
    return {m.request_id: (m.target, m.with_kv) for m in plan.request_moves}


# -- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaving", [s for n in (1, 2, 3) for s in itertools.combinations(range(4), n)], ids=str)
@pytest.mark.parametrize("experts", [8, 7])
def test_any_set_of_workers_can_leave(leaving: tuple[int, ...], experts: int) -> None:
    status = make_status(model=shape(experts, layers=3), pages=200)
    plan = plan_shrink(status, leaving)
    stay = tuple(w for w in range(4) if w not in leaving)
    assert (plan.members, plan.leaving, plan.joining) == (stay, leaving, ())
    assert plan.placement.epoch == status.epoch + 1
    plan.placement.check(stay)
    # Only experts of leaving workers move, each once, straight from their owner: fewer bytes are not possible.
    moved = {(m.layer, m.expert, m.source) for m in plan.expert_moves}
    assert moved == {(la, ex, w) for w in leaving for la, ex, _ in status.placement.experts_on(w)}
    assert len(moved) == len(plan.expert_moves)
    kept = np.isin(status.placement.worker, stay)
    assert np.array_equal(plan.placement.worker[kept], status.placement.worker[kept])
    assert np.array_equal(plan.placement.slot[kept], status.placement.slot[kept])
    # Without a measured load the counts are even, and every slot is the lowest there is.
    counts = [plan.placement.slots_on(w) for w in stay]
    assert max(counts) - min(counts) <= 1
    for worker in stay:
        assert [slot for _, _, slot in plan.placement.experts_on(worker)] == list(
            range(plan.placement.slots_on(worker))
        )


def test_holes_are_filled_before_the_cut_moves() -> None:
    home = make_status(workers=2).placement
    slot = home.slot.copy()
    slot[home.worker == 0] += 3  # slots 0 to 2 of worker 0 are empty
    status = make_status(workers=2, placement=ExpertPlacement(0, home.worker, slot), pages=200)
    plan = plan_shrink(status, [1])
    assert sorted(m.slot for m in plan.expert_moves)[:3] == [0, 1, 2]
    assert sorted(plan.placement.slot.ravel().tolist()) == list(range(16))


@pytest.mark.parametrize("seed", range(8))
def test_measured_load_is_spread_over_the_workers_that_stay(seed: int) -> None:
    model = shape(experts=32, layers=4)
    load = (np.random.default_rng(seed).pareto(1.2, size=(4, 32)) * 100).astype(np.int64)
    status = make_status(model=model, load=load, pages=2000)
    plan, blind = plan_shrink(status, [1, 3]), plan_shrink(make_status(model=model, pages=2000), [1, 3])
    heavier = 0
    for layer in range(4):
        work = [int(load[layer][plan.placement.worker[layer] == w].sum()) for w in (0, 2)]
        own = [int(load[layer][status.placement.worker[layer] == w].sum()) for w in (0, 2)]
        moved = max(int(load[layer][m.expert]) for m in plan.expert_moves if m.layer == layer)
        # Greedy, heaviest first: the busiest had that work before, or is above the mean by one expert at most.
        assert max(work) <= max(*own, sum(work) / 2 + moved)
        # Nobody who started above the other got more while the other was below.
        assert abs(work[0] - work[1]) <= max(abs(own[0] - own[1]), moved)
        unaware = [int(load[layer][blind.placement.worker[layer] == w].sum()) for w in (0, 2)]
        heavier += max(unaware) - max(work)
    assert heavier > 0, "the load that was measured made no difference"


def test_experts_go_where_there_is_memory_even_if_load_says_otherwise() -> None:
    home = make_status(workers=3, model=shape(6, layers=1))
    load = np.array([[1, 1, 9, 9, 100, 100]])  # worker 0 has the least work, and no room
    status = make_status(workers=3, model=home.model, load=load, pages=[3, 40, 3], longest=8)
    assert {m.target for m in plan_shrink(status, [2]).expert_moves} == {1}
    with pytest.raises(PlanRefusedError, match=r"worker \d lacks memory: \d expert slots leave"):
        plan_shrink(make_status(workers=3, model=home.model, load=load, pages=3, longest=8), [2])


def test_the_longest_request_keeps_its_room() -> None:
    model = shape(4, layers=1)
    roomy = make_status(workers=2, model=model, pages=30, longest=36)
    assert plan_shrink(roomy, [1]).members == (0,)  # 2 slots are 20 pages; 10 are left, 9 and one to spare are needed
    with pytest.raises(PlanRefusedError, match="worker 0 lacks memory: 4 expert slots leave no KV for a request of 37"):
        plan_shrink(replace(roomy, longest_tokens=37), [1])


# -- requests ------------------------------------------------------------------------------------------------------


def test_requests_go_largest_first_to_the_most_room_and_siblings_stay_together() -> None:
    twins = [live(f"twin#0/{i}", 9, prompt=29, shared=7) for i in range(2)]
    status = make_status(
        {
            0: [live("old#0/0", 10)],
            1: [live("small#0/0", 2), *twins, live("big#0/0", 12)],
            2: [live("twin#0/2", 8, prompt=29, shared=7)],
        },
        workers=3,
        pages=60,
        model=shape(3, layers=2),
    )
    plan = plan_shrink(status, [1])
    assert [m.request_id for m in plan.request_moves] == ["big#0/0", "twin#0/0", "twin#0/1", "small#0/0"]
    assert all(with_kv for _, with_kv in targets(plan).values())
    assert targets(plan)["big#0/0"][0] == 2  # 8 pages are taken there, 10 on worker 0
    assert targets(plan)["twin#0/0"][0] == targets(plan)["twin#0/1"][0]


def test_siblings_follow_the_pages_of_their_prompt() -> None:
    status = make_status(
        {0: [live("a#0/0", 12)], 1: [live("twin#0/1", 16, shared=14)], 2: [live("twin#0/2", 16, shared=14)]},
        workers=3,
        pages=60,
        model=shape(3, layers=2),
    )
    assert targets(plan_shrink(status, [1])) == {"twin#0/1": (2, True)}
    alone = with_requests(status, {0: [live("a#0/0", 12)], 1: status.workers[1].requests, 2: [live("b#0/0", 16)]})
    assert targets(plan_shrink(alone, [1])) == {"twin#0/1": (0, True)}


def test_homes_are_followed_also_between_workers_that_stay() -> None:
    status = make_status({0: [live("a#0/0", 2), live("b#0/0", 3)], 1: [live("c#0/0", 1)]}, pages=60)
    plan = plan_shrink(status, [1], {"a#0/0": 3, "c#0/0": 0, "b#0/0": 0})
    assert targets(plan) == {"a#0/0": (3, True), "c#0/0": (0, True)}
    assert targets(plan_moves(status, {"a#0/0": 1, "b#0/0": 0})) == {"a#0/0": (1, True)}


def test_kv_that_is_not_complete_or_does_not_fit_is_computed_again() -> None:
    one_layer = shape(2, layers=1)
    here = [live("prompt#0/0", 4, decoding=False), live("waits#0/0"), live("large#0/0", 21), live("fits#0/0", 5)]
    status = make_status({0: [live("stays#0/0", 5)], 1: here}, workers=2, pages=40, model=one_layer)
    plan = plan_shrink(status, [1])  # 40 pages, 10 of them for the expert that comes, 5 in use: 25 are free
    assert targets(plan) == {
        "large#0/0": (0, True),
        "fits#0/0": (0, False),  # 4 would be left
        "prompt#0/0": (0, False),
        "waits#0/0": (0, False),
    }
    assert "4 requests move; 3 of them by recompute" in str(plan)
    crowded = plan_shrink(replace(status, max_batch=1), [1])
    assert not any(with_kv for _, with_kv in targets(crowded).values())


def test_kv_moves_only_when_that_is_faster_than_computing_it_again() -> None:
    status = make_status({0: [live("a#0/0", 6)]}, workers=2, pages=200)
    fast, slow = MoveCosts(bytes_per_s=1e12), MoveCosts(bytes_per_s=1.0)
    assert targets(plan_shrink(status, [0], costs=fast)) == {"a#0/0": (1, True)}
    assert targets(plan_shrink(status, [0], costs=slow)) == {"a#0/0": (1, False)}
    assert targets(plan_moves(status, {"a#0/0": 1}, costs=slow)) == {"a#0/0": (1, False)}


def test_waiting_requests_are_spread_by_the_pages_they_are_going_to_take() -> None:
    waiting = [live(f"w{i}#0/0", prompt=10) for i in range(9)]
    status = make_status({0: waiting}, pages=60, model=shape(12, layers=1))
    plan = plan_shrink(status, [0])
    assert sorted(target for target, _ in targets(plan).values()) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_plan_reads_as_one_line() -> None:
    status = make_status({1: [live("a#0/0", 2), live("b#0/0")]}, pages=200)
    text = str(plan_shrink(status, [1, 3], reason="ran dry"))
    assert text == (
        "epoch 1: workers 0, 2; 1, 3 leave; 8 experts and 2 requests move; 1 of them by recompute (ran dry)"
    )
    assert str(plan_moves(status, {"a#0/0": 0})) == "epoch 0: workers 0, 1, 2, 3; 0 experts and 1 requests move"


# -- coming back ---------------------------------------------------------------------------------------------------


def test_regrow_leads_home() -> None:
    home = make_status(workers=3, pages=200)
    gone = plan_shrink(home, [0, 2])
    status = make_status(workers=3, placement=gone.placement, active=[1], pages=200)
    plan = plan_regrow(status, home.placement)
    assert (plan.members, plan.leaving, plan.joining) == ((0, 1, 2), (), (0, 2))
    assert np.array_equal(plan.placement.worker, home.placement.worker)
    assert np.array_equal(plan.placement.slot, home.placement.slot)
    assert {m.source for m in plan.expert_moves} == {1}
    assert str(plan).startswith("epoch 2: workers 0, 1, 2; 0, 2 join; 11 experts")
    # Where an arena is empty, an expert arrives in the slot where it is going to live.
    assert all(m.slot == home.placement.slot[m.layer, m.expert] for m in plan.expert_moves)


def test_regrow_without_a_change_is_nothing_and_waits_for_live_requests() -> None:
    status = make_status(pages=200)
    plan = plan_regrow(status, status.placement)
    assert (plan.placement.epoch, plan.expert_moves, plan.joining) == (0, (), ())
    busy = make_status({0: [live("a#0/0", 2)]}, pages=200)
    with pytest.raises(PlanRefusedError, match="1 requests are live"):
        plan_regrow(busy, busy.placement)


def test_regrow_undoes_moves_between_workers_that_stayed() -> None:
    home = make_status(workers=2, model=shape(4, layers=1), pages=35)
    worker, slot = home.placement.worker.copy(), home.placement.slot.copy()
    worker[0], slot[0] = [1, 1, 0, 0], [0, 1, 0, 1]  # all four have changed sides
    status = make_status(workers=2, model=home.model, placement=ExpertPlacement(5, worker, slot), pages=35)
    plan = plan_regrow(status, home.placement)
    assert plan.placement.epoch == 6
    assert sorted((m.target, m.slot) for m in plan.expert_moves) == [(0, 2), (0, 3), (1, 2), (1, 3)]


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaving", "told"),
    [
        ([9], "worker 9 is unknown"),
        ([-1], "worker -1 is unknown"),
        ([0, 1, 2, 3], "every worker would leave"),
        ([], "nobody would leave"),
    ],
)
def test_who_cannot_leave(leaving: list[int], told: str) -> None:
    with pytest.raises(PlanRefusedError, match=told):
        plan_shrink(make_status(pages=200), leaving)


def test_who_has_left_cannot_leave_again() -> None:
    home = make_status(pages=200)
    status = make_status(placement=plan_shrink(home, [2]).placement, active=[0, 1, 3], pages=200)
    with pytest.raises(PlanRefusedError, match="worker 2 would leave but is not active"):
        plan_shrink(status, [2])
    assert plan_shrink(status, [1, 1]).leaving == (1,)


@pytest.mark.parametrize(
    ("homes", "told"),
    [
        ({"nobody#0/0": 0}, "request nobody#0/0 is not live"),
        ({"a#0/0": 7}, "request a#0/0 would move to worker 7, which is not active"),
        ({"b#0/0": 1}, "request b#0/0 would move to worker 1, which is not active"),
        ({"a#0/0": 1}, "request a#0/0 would be left on worker 1"),
    ],
)
def test_homes_that_are_refused(homes: dict[str, int], told: str) -> None:
    status = make_status({0: [live("b#0/0", 2)], 1: [live("a#0/0", 2)]}, pages=200)
    with pytest.raises(PlanRefusedError, match=told):
        plan_shrink(status, [1], homes)


BUSY: dict[int, list[RequestStatus]] = {
    0: [live("old#0/0", 3)],
    1: [live("a#0/0", 2), live("b#0/0", 4), live("w#0/0")],
}


def first_expert(plan: ResizePlan, **change: object) -> ResizePlan:
    return replace(plan, expert_moves=(replace(plan.expert_moves[0], **change), *plan.expert_moves[1:]))  # type: ignore[arg-type]


def first_request(plan: ResizePlan, **change: object) -> ResizePlan:
    return replace(plan, request_moves=(replace(plan.request_moves[0], **change), *plan.request_moves[1:]))  # type: ignore[arg-type]


def placed(plan: ResizePlan, **change: int) -> ResizePlan:
    """The same plan with another entry in the placement for expert 0 of layer 0, which worker 0 has."""
    worker, slot = plan.placement.worker.copy(), plan.placement.slot.copy()
    worker[0, 0], slot[0, 0] = change.get("worker", worker[0, 0]), change.get("slot", slot[0, 0])
    return replace(plan, placement=ExpertPlacement(change.get("epoch", plan.placement.epoch), worker, slot))


WRONG: dict[str, Callable[[ResizePlan], ResizePlan]] = {
    "worker 7 is unknown": lambda p: replace(p, members=(0, 2, 3, 7)),
    "worker 8 is unknown": lambda p: replace(p, leaving=(1, 8)),
    "worker 2 would join but is active already": lambda p: replace(p, joining=(2,)),
    "every worker would leave": lambda p: replace(p, members=(), leaving=(0, 1, 2, 3)),
    r"members \(0, 3, 2\) are not the active": lambda p: replace(p, members=(0, 3, 2)),
    r"members \(0, 2\) are not the active": lambda p: replace(p, members=(0, 2)),
    "leads to epoch 3, the next one is 1": lambda p: placed(p, epoch=3),
    "leads to epoch 0, the next one is 1": lambda p: placed(p, epoch=0),
    "expert 0 of layer 0 would be lost": lambda p: placed(p, worker=1),
    "expert 0 of layer 0: its moves and the placement disagree": lambda p: placed(p, worker=2, slot=40),
    "two experts share a slot of worker 0": lambda p: placed(p, slot=1),
    "slot 99 of worker 0 is not among": lambda p: placed(p, slot=99),
    "slot -1 of worker 0 is not among": lambda p: placed(p, slot=-1),
    r"slot 0 of worker \d is taken": lambda p: first_expert(p, slot=0),
    r"slot -2 of worker \d is taken": lambda p: first_expert(p, slot=-2),
    r"slot \d of worker \d is taken": lambda p: first_expert(
        p, slot=next(m.slot for m in p.expert_moves[1:] if m.target == p.expert_moves[0].target)
    ),
    r"expert \d of layer \d: its moves and the placement": lambda p: first_expert(p, source=3),
    r"expert 7 of layer 1: its moves and": lambda p: replace(
        p, expert_moves=(*p.expert_moves, ExpertMove(1, 7, 3, 0, 50))
    ),
    r"expert 2 of layer 0: its moves": lambda p: replace(p, expert_moves=p.expert_moves[1:]),
    r"expert 2 of layer 0 would move twice": lambda p: replace(p, expert_moves=(*p.expert_moves, p.expert_moves[0])),
    "request nobody#0/0 is not on worker 1": lambda p: first_request(p, request_id="nobody#0/0"),
    "request b#0/0 is not on worker 2": lambda p: first_request(p, source=2),
    "request b#0/0 would be left on worker 1": lambda p: replace(p, request_moves=p.request_moves[1:]),
    "request b#0/0 would move twice": lambda p: replace(p, request_moves=(*p.request_moves, p.request_moves[0])),
    "request b#0/0 cannot move to worker 1": lambda p: first_request(p, target=1),
    "request w#0/0 has no complete KV": lambda p: replace(
        p, request_moves=(*p.request_moves[:-1], RequestMove("w#0/0", 1, 0, True))
    ),
}


@pytest.mark.parametrize("told", WRONG)
def test_what_a_plan_may_not_say(told: str) -> None:
    status = make_status(BUSY, pages=200)
    plan = plan_shrink(status, [1])
    assert (plan.expert_moves[0].layer, plan.expert_moves[0].expert) == (0, 2)
    assert [m.request_id for m in plan.request_moves] == ["b#0/0", "a#0/0", "w#0/0"]
    check_plan(plan, status)
    with pytest.raises(PlanRefusedError, match=told):
        check_plan(WRONG[told](plan), status)
    assert "\n" not in refused(WRONG[told](plan), status)


def test_a_placement_of_another_shape_is_refused() -> None:
    status = make_status(pages=200)
    other = make_status(model=shape(9), pages=200).placement
    plan = replace(plan_moves(status, {}), placement=ExpertPlacement(1, other.worker, other.slot))
    assert "(2, 9) experts, the model has (2, 8)" in refused(plan, status)


def test_kv_that_does_not_fit_is_refused() -> None:
    status = make_status({0: [live("old#0/0", 15)], 1: [live("new#0/0", 10)]}, pages=20)
    move = RequestMove("new#0/0", 1, 0, with_kv=True)
    plan = ResizePlan(status.active, (), (), status.placement, (), (move,))
    assert refused(plan, status) == (
        "worker 0 lacks memory: 4 expert slots leave 20 KV pages, 25 are needed; 5.9 KiB for both"
    )
    check_plan(replace(plan, request_moves=(replace(move, with_kv=False),)), status)
    # A sibling that is at home there brings less: its prompt's pages are there.
    near = make_status({0: [live("p#0/0", 15, shared=8)], 1: [live("p#0/1", 12, shared=8)]}, pages=20)
    check_plan(replace(plan, request_moves=(RequestMove("p#0/1", 1, 0, True),)), near)


def test_a_worker_takes_no_more_running_requests_than_its_batch_holds() -> None:
    status = make_status({0: [live("old#0/0", 2)], 1: [live("new#0/0", 2)]}, max_batch=1)
    plan = plan_moves(status, {"new#0/0": 0})
    assert not plan.request_moves[0].with_kv
    with_kv = replace(plan, request_moves=(replace(plan.request_moves[0], with_kv=True),))
    assert "request new#0/0 cannot run on worker 0" in refused(with_kv, status)
    swapped = (RequestMove("new#0/0", 1, 0, True), RequestMove("old#0/0", 0, 1, True))
    check_plan(replace(plan, request_moves=swapped), status)


def test_requests_live_in_pages_of_the_size_that_the_status_names() -> None:
    status = make_status({0: [live("a#0/0", 3)]})
    assert status.requests["a#0/0"][1].response_tokens + 1 == 3 * PAGE_TOKENS
    assert status.workers[0].kv_pages_used == 3
