"""Plans against a model of a fleet's memory that knows nothing of how plans are made: what lies in which slot, whose
pages are where, and that they fit at every moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from statuses import PAGE_BYTES, PAGE_TOKENS, live, make_status, pages_used, shape, with_requests

from flexfloor.errors import PlanRefusedError
from flexfloor.progress import RequestStatus
from flexfloor.world.experts import place_contiguous
from flexfloor.world.resize import ResizePlan, check_plan, plan_moves, plan_regrow, plan_shrink
from flexfloor.world.status import FleetStatus


@dataclass
class Memory:
    """One worker's arena: slots from one end up to the cut, pages from the other."""

    arena: int
    cut: int = 0
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot → (layer, expert)
    requests: dict[str, RequestStatus] = field(default_factory=dict)
    arriving: dict[str, RequestStatus] = field(default_factory=dict)

    def pages(self) -> set[tuple[str, int]]:
        """A page of a shared prompt has the same name for all siblings."""
        everyone = [*self.requests.values(), *self.arriving.values()]
        shared = {(r.group, i) for r in everyone for i in range(min(r.shared_pages, r.kv_pages))}
        return shared | {(r.request_id, i) for r in everyone for i in range(r.shared_pages, r.kv_pages)}

    def check(self, expert_bytes: int) -> None:
        assert all(0 <= slot < self.cut for slot in self.slots)
        assert self.cut * expert_bytes + len(self.pages()) * PAGE_BYTES <= self.arena


def memory_of(status: FleetStatus) -> dict[int, Memory]:
    made = {}
    for state in status.workers:
        made[state.worker] = memory = Memory(state.arena_bytes, state.slots)
        if state.active:
            experts = status.placement.experts_on(state.worker)
            memory.slots = {slot: (layer, expert) for layer, expert, slot in experts}
            memory.requests = {r.request_id: r for r in state.requests}
        memory.check(status.model.expert_bytes)
    return made


def carry_out(plan: ResizePlan, status: FleetStatus) -> FleetStatus:
    """The fleet after `plan`, moved piece by piece; asserts what has to hold on the way."""
    size, memory, old = status.model.expert_bytes, memory_of(status), status.placement
    for move in plan.expert_moves:  # copies: nothing is taken away before the commit
        assert move.source is not None
        assert (move.layer, move.expert) == memory[move.source].slots[int(old.slot[move.layer, move.expert])]
        target = memory[move.target]
        assert move.target in plan.members
        assert move.slot not in target.slots
        target.cut = max(target.cut, move.slot + 1)
        target.slots[move.slot] = (move.layer, move.expert)
    for step in plan.request_moves:
        request = memory[step.source].requests[step.request_id]
        assert request.decoding or not step.with_kv
        assert step.target in plan.members
        waiting = replace(request, kv_pages=0, shared_pages=0, decoding=False)
        memory[step.target].arriving[step.request_id] = request if step.with_kv else waiting
    for one in memory.values():
        one.check(size)
    for step in plan.request_moves:
        del memory[step.source].requests[step.request_id]
    for worker, one in memory.items():
        one.requests |= one.arriving
        one.arriving = {}
        assert worker in plan.members or not one.requests, "a request is left behind"
        held = set(one.slots.values())
        wanted = {slot: (layer, expert) for layer, expert, slot in plan.placement.experts_on(worker)}
        assert set(wanted.values()) <= held, "an expert is not where the placement has it"
        assert all(slot < one.cut for slot in wanted), "an expert would be moved beyond the cut"
        one.slots, one.cut = wanted, max(wanted, default=-1) + 1
        one.check(size)
    everywhere = Counter(entry for w in plan.members for entry in memory[w].slots.values())
    assert set(everywhere) == {(la, ex) for la, ex in np.ndindex(*old.worker.shape)}
    assert set(everywhere.values()) == {1}
    names = Counter(name for one in memory.values() for name in one.requests)
    assert names == Counter(status.requests.keys())
    workers = []
    for state in status.workers:
        one, own = memory[state.worker], tuple(memory[state.worker].requests.values())
        active = state.worker in plan.members
        pages = (one.arena - one.cut * size) // PAGE_BYTES if active else 0
        workers.append(
            replace(
                state,
                active=active,
                slots=one.cut,
                kv_pages=pages,
                kv_pages_free=pages - pages_used(own),
                requests=own,
                live_requests=len(own),
            )
        )
    return replace(status, workers=tuple(workers), placement=plan.placement, epoch=plan.placement.epoch)


def draw_requests(draw: st.DrawFn, workers: int) -> dict[int, list[RequestStatus]]:
    """Groups of siblings all over the fleet, decoding, computing their prompt, or waiting."""
    placed: dict[int, list[RequestStatus]] = {w: [] for w in range(workers)}
    for group in range(draw(st.integers(0, 5))):
        shared = draw(st.integers(0, 3))
        for sample in range(draw(st.integers(1, 4))):
            name, worker = f"p{group}#0/{sample}", draw(st.integers(0, workers - 1))
            kind, own = draw(st.sampled_from(["decoding", "decoding", "prompt", "waiting"])), draw(st.integers(1, 9))
            if kind == "waiting":
                made = live(name, prompt=(shared + 1) * PAGE_TOKENS)
            else:
                pages, decoding = shared + own, kind == "decoding"
                made = live(name, pages, prompt=shared * PAGE_TOKENS + 1, shared=shared, decoding=decoding)
            placed[worker].append(made)
    return placed


@st.composite
def fleets(draw: st.DrawFn, roomy: bool = False) -> FleetStatus:
    workers = draw(st.integers(2, 8))
    model = shape(
        draw(st.integers(workers, 13)), draw(st.integers(1, 3)), expert_bytes=draw(st.sampled_from([130, 1000]))
    )
    requests = draw_requests(draw, workers)
    longest = draw(st.integers(1, 60))
    home = place_contiguous(len(model.moe_layers), model.experts, workers)
    alone = -(-longest // PAGE_TOKENS) + 1
    arenas = []
    for worker in range(workers):
        pages = max(alone, pages_used(requests[worker])) + draw(st.integers(0, 60))
        arenas.append(10**6 if roomy else home.slots_on(worker) * model.expert_bytes + pages * PAGE_BYTES)
    seed = draw(st.integers(0, 99))
    load = np.random.default_rng(seed).geometric(0.02, size=home.worker.shape).astype(np.int64) * (seed > 0)
    max_batch = 64 if roomy else draw(st.integers(2, 20))
    return make_status(
        requests, workers=workers, model=model, arenas=arenas, load=load, longest=longest, max_batch=max_batch
    )


@settings(max_examples=250, deadline=None)
@given(data=st.data(), status=fleets())
def test_a_shrink_is_refused_or_keeps_every_expert_and_request_within_memory(
    data: st.DataObject, status: FleetStatus
) -> None:
    leaving = data.draw(_sets(status))
    homes = data.draw(_homes(status, leaving))
    try:
        plan = plan_shrink(status, leaving, homes)
    except PlanRefusedError:
        event("refused")
        assert homes or slots_left(status, leaving) < status.placement.worker.size
        return
    event("accepted")
    check_plan(plan, status)
    after = carry_out(plan, status)
    assert after.active == tuple(w for w in status.active if w not in leaving)
    assert all(after.requests[name][0] == home for name, home in homes.items())
    assert {(m.layer, m.expert) for m in plan.expert_moves} == {
        (la, ex) for w in leaving for la, ex, _ in status.placement.experts_on(w)
    }


def slots_left(status: FleetStatus, leaving: list[int]) -> int:
    """Expert slots that fit beside what the others hold and the longest request."""
    total = 0
    for state in (w for w in status.active_workers() if w.worker not in leaving):
        pages = max(pages_used(state.requests), status.pages_for(status.longest_tokens))
        total += (state.arena_bytes - pages * PAGE_BYTES) // status.model.expert_bytes
    return total


def _sets(status: FleetStatus) -> st.SearchStrategy[list[int]]:
    """Any set of active workers but all of them."""
    active = list(status.active)
    return st.lists(st.sampled_from(active), min_size=1, max_size=len(active) - 1, unique=True)


def _homes(status: FleetStatus, leaving: list[int]) -> st.SearchStrategy[dict[str, int]]:
    """Some requests, of any worker, are to go to a worker that stays."""
    stay = [w for w in status.active if w not in leaving]
    if not status.requests:
        return st.just({})
    return st.dictionaries(st.sampled_from(sorted(status.requests)), st.sampled_from(stay), max_size=4)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), status=fleets(roomy=True))
def test_with_enough_memory_no_shrink_is_refused_and_all_complete_kv_travels(
    data: st.DataObject, status: FleetStatus
) -> None:
    plan = plan_shrink(status, data.draw(_sets(status)))
    carry_out(plan, status)
    assert all(m.with_kv == status.requests[m.request_id][1].decoding for m in plan.request_moves)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), status=fleets())
def test_moves_alone_are_refused_or_keep_every_request(data: st.DataObject, status: FleetStatus) -> None:
    homes = data.draw(_homes(status, []))
    try:
        plan = plan_moves(status, homes)
    except PlanRefusedError:
        return
    after = carry_out(plan, status)
    assert (after.epoch, after.active) == (status.epoch, status.active)
    assert all(after.requests[name][0] == home for name, home in homes.items())


@settings(max_examples=150, deadline=None)
@given(data=st.data(), status=fleets())
def test_after_any_history_of_shrinks_everything_comes_back_home(data: st.DataObject, status: FleetStatus) -> None:
    home = status.placement
    for _ in range(data.draw(st.integers(1, 4))):
        if len(status.active) == 1:
            break
        try:
            plan = plan_shrink(status, data.draw(_sets(status)))
        except PlanRefusedError:
            continue
        status = carry_out(plan, status)
        if data.draw(st.booleans()):  # other requests live on what is left
            held = {w: [r for r in status.workers[w].requests if r.decoding] for w in status.active}
            status = with_requests(status, {w: own[1:] for w, own in held.items()})
    idle = replace(with_requests(status, {}), longest_tokens=1)
    plan = plan_regrow(idle, home)  # refusing would leave the fleet without some of its workers
    after = carry_out(plan, idle)
    assert after.active == tuple(range(len(status.workers)))
    assert np.array_equal(after.placement.worker, home.worker)
    assert np.array_equal(after.placement.slot, home.slot)
    assert after.epoch == idle.epoch + bool(plan.joining)
