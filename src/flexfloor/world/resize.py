"""Resizes as data: who leaves or joins, which experts and which requests move where.

A plan is made and checked by pure functions, before anything is touched. Moves without a change of the group are plans
that nobody leaves by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexfloor.errors import PlanRefusedError
from flexfloor.progress import RequestStatus
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.memory import format_bytes
from flexfloor.world.profiles import MoveCosts
from flexfloor.world.status import FleetStatus

_MANY = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """source: worker that has the expert, None to load it from the weight source. slot: where it arrives at `target`;
    the placement says where it lives once the resize is committed."""

    layer: int
    expert: int
    source: int | None
    target: int
    slot: int


@dataclass(frozen=True, slots=True)
class RequestMove:
    """with_kv: its pages travel; otherwise the target computes them again."""

    request_id: str
    source: int
    target: int
    with_kv: bool


@dataclass(frozen=True)
class ResizePlan:
    """members: active workers afterwards, ascending. placement: afterwards, in the epoch that the plan leads to.

    predicted: what the decision counted with, by name; of those that it has, the ledger shows what became of them:
    stall_s (of this change), remaining_s (from its end to the end of the rollout), remaining_occupied_s (worker-seconds
    of the same time). Others (saved_worker_s, …) stand alone.
    """

    members: tuple[int, ...]
    leaving: tuple[int, ...]
    joining: tuple[int, ...]
    placement: ExpertPlacement
    expert_moves: tuple[ExpertMove, ...] = ()
    request_moves: tuple[RequestMove, ...] = ()
    reason: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        def workers(numbers: Sequence[int]) -> str:
            return ", ".join(map(str, numbers))

        parts = [f"epoch {self.placement.epoch}: workers {workers(self.members)}"]
        if self.leaving:
            parts.append(f"{workers(self.leaving)} leave")
        if self.joining:
            parts.append(f"{workers(self.joining)} join")
        recomputed = sum(not m.with_kv for m in self.request_moves)
        parts.append(f"{len(self.expert_moves)} experts and {len(self.request_moves)} requests move")
        if recomputed:
            parts.append(f"{recomputed} of them by recompute")
        return "; ".join(parts) + (f" ({self.reason})" if self.reason else "")


def plan_shrink(
    status: FleetStatus,
    leaving: Collection[int],
    homes: Mapping[str, int] | None = None,
    reason: str = "",
    predicted: Mapping[str, float] | None = None,
    costs: MoveCosts | None = None,
) -> ResizePlan:
    """The plan by which `leaving` workers leave.

    homes: request id → worker for requests that move, also between workers that stay; those of leaving workers that it
    does not name go, largest KV first, to the worker that will have the most pages free. Experts of leaving workers go
    where the fewest tokens were computed for their layer. costs: by which KV moves or is computed again; those of
    `status` by default.
    Raises PlanRefusedError when it does not fit.
    """
    gone = set(leaving)
    if not gone:
        raise PlanRefusedError("nobody would leave")
    members = tuple(w for w in status.active if w not in gone)
    _check_leaving(gone, members, status)
    placement, expert_moves = _shrink_experts(status, gone, members)
    slots = {w: max(status.workers[w].slots, placement.slots_needed(w)) for w in members}
    request_moves = plan_request_moves(status, gone, homes or {}, slots, costs or status.move_costs)
    plan = ResizePlan(
        members, tuple(sorted(gone)), (), placement, tuple(expert_moves), tuple(request_moves), reason, predicted or {}
    )
    check_plan(plan, status)
    return plan


def plan_moves(
    status: FleetStatus,
    homes: Mapping[str, int],
    reason: str = "",
    predicted: Mapping[str, float] | None = None,
    costs: MoveCosts | None = None,
) -> ResizePlan:
    """Requests move, nobody leaves. homes: request id → worker. Raises PlanRefusedError."""
    slots = {w: status.workers[w].slots for w in status.active}
    moves = plan_request_moves(status, set(), homes, slots, costs or status.move_costs)
    plan = ResizePlan(status.active, (), (), status.placement, (), tuple(moves), reason, predicted or {})
    check_plan(plan, status)
    return plan


def plan_regrow(status: FleetStatus, home: ExpertPlacement, reason: str = "regrow") -> ResizePlan:
    """Every worker joins again and the experts go back to where `home` has them. Raises PlanRefusedError while requests
    are live."""
    if status.live:
        raise PlanRefusedError(f"{status.live} requests are live; workers come back between rollouts")
    joining = tuple(w.worker for w in status.workers if not w.active)
    same = np.array_equal(home.worker, status.placement.worker) and np.array_equal(home.slot, status.placement.slot)
    epoch = status.epoch if same and not joining else status.epoch + 1
    placement = ExpertPlacement(epoch, home.worker, home.slot)
    moves, free = [], {w: _free_slots(status.placement, w) for w in status.active}
    beyond = {w: status.placement.slots_needed(w) for w in status.active}
    for layer, expert in zip(*np.nonzero(status.placement.worker != home.worker), strict=True):
        source, target = int(status.placement.worker[layer, expert]), int(home.worker[layer, expert])
        if target in joining:
            slot = int(home.slot[layer, expert])  # its arena is empty: the expert arrives where it will live
        elif free[target]:
            slot = free[target].pop(0)
        else:
            slot, beyond[target] = beyond[target], beyond[target] + 1
        moves.append(ExpertMove(int(layer), int(expert), source, target, slot))
    members = tuple(w.worker for w in status.workers)
    plan = ResizePlan(members, (), joining, placement, tuple(moves), (), reason)
    check_plan(plan, status)
    return plan


def _shrink_experts(
    status: FleetStatus, leaving: set[int], members: Sequence[int]
) -> tuple[ExpertPlacement, list[ExpertMove]]:
    """Heaviest expert first, to the member whose work for that layer grows least and whose arena has room for it.

    An expert moves once, straight from its owner, and no other expert moves: fewer bytes are not possible.
    """
    old = status.placement
    worker, slot = old.worker.copy(), old.slot.copy()
    load = status.expert_load
    work = np.stack([np.where(old.worker == m, load, 0).sum(axis=1) for m in members])
    count = np.array([(old.worker == m).sum() for m in members])
    free = {m: _free_slots(old, m) for m in members}
    beyond = {m: old.slots_needed(m) for m in members}
    # Slots may not take the pages in use now, nor those of the longest request; of the pages that the leaving workers
    # bring they should leave each member its share, or else these requests are computed again.
    keep = status.pages_for(status.longest_tokens)
    moving = sum(status.workers[w].kv_pages_used for w in leaving) // len(members)
    used = {m: status.workers[m].kv_pages_used for m in members}
    room = np.array([_slots_beside(status, m, max(keep, used[m] + moving)) for m in members])
    least_room = np.array([_slots_beside(status, m, max(keep, used[m])) for m in members])
    moves = []
    layers, experts = np.nonzero(np.isin(old.worker, sorted(leaving)))
    order = np.argsort(-load[layers, experts], kind="stable")
    for layer, expert in zip(layers[order].tolist(), experts[order].tolist(), strict=True):
        fitting = next((f for f in (count < room, count < least_room) if f.any()), count >= 0)
        least = fitting & (work[:, layer] == work[fitting, layer].min())
        index = int(np.where(least, count, _MANY).argmin())  # the first of equals
        target = members[index]
        if free[target]:
            arrival = free[target].pop(0)
        else:
            arrival, beyond[target] = beyond[target], beyond[target] + 1
        moves.append(ExpertMove(layer, expert, int(old.worker[layer, expert]), target, arrival))
        worker[layer, expert], slot[layer, expert] = target, arrival
        work[index, layer] += load[layer, expert]
        count[index] += 1
    return ExpertPlacement(status.epoch + 1, worker, slot), moves


def _slots_beside(status: FleetStatus, worker: int, pages: int) -> int:
    return (status.workers[worker].arena_bytes - pages * status.page_bytes) // status.model.expert_bytes


def _free_slots(placement: ExpertPlacement, worker: int) -> list[int]:
    """Holes below the highest slot in use."""
    used = set(placement.slot[placement.worker == worker].tolist())
    return sorted(set(range(max(used, default=-1) + 1)) - used)


def plan_request_moves(
    status: FleetStatus, leaving: set[int], homes: Mapping[str, int], slots: Mapping[int, int], costs: MoveCosts
) -> list[RequestMove]:
    """slots: expert slots of each member while the moves happen. KV goes along where it fits, is complete and arrives
    sooner than it could be computed; what is computed again, or still waits, counts with the pages it will take."""
    for name in homes:
        if name not in status.requests:
            raise PlanRefusedError(f"request {name} is not live; it cannot move")
    members = [w for w in slots if w not in leaving]
    room = {w: status.pages_beside(w, slots[w]) - status.workers[w].kv_pages_used for w in members}
    owed = {w: sum(_later_pages(r, status) for r in status.requests_on(w)) for w in members}
    running = {w: sum(r.kv_pages > 0 for r in status.requests_on(w)) for w in members}
    present = {w: {r.group for r in status.requests_on(w) if r.shared_pages and r.decoding} for w in members}
    movers: list[tuple[RequestStatus, int]] = [
        (r, w)
        for w, r in status.requests.values()
        if (w in leaving and homes.get(r.request_id) is None) or homes.get(r.request_id, w) != w
    ]
    moves = []
    for request, source in sorted(movers, key=lambda entry: (-entry[0].kv_pages, entry[0].request_id)):
        target = homes.get(request.request_id)
        if target is None:
            # Siblings stay together where their prompt's pages are.
            target = max(members, key=lambda w: (room[w] - owed[w] + _shared(request, present[w]), -w))
        if target not in room:
            raise PlanRefusedError(f"request {request.request_id} would move to worker {target}, which is not active")
        pages = request.kv_pages - _shared(request, present[target])
        with_kv = request.decoding and pages < room[target] and running[target] < status.max_batch
        tokens = request.prompt_tokens + request.response_tokens
        with_kv &= pages * status.page_bytes / costs.bytes_per_s <= tokens / costs.recompute_tokens_per_s
        moves.append(RequestMove(request.request_id, source, target, with_kv))
        if with_kv:
            room[target] -= pages
            running[target] += 1
            if request.shared_pages:
                present[target] = present[target] | {request.group}
        else:
            owed[target] += status.pages_for(tokens)
    return moves


def _later_pages(request: RequestStatus, status: FleetStatus) -> int:
    """Pages that a request needs for the tokens it has and does not hold yet."""
    if request.decoding:
        return 0
    return max(0, status.pages_for(request.prompt_tokens + request.response_tokens) - request.kv_pages)


def _shared(request: RequestStatus, present: Collection[str]) -> int:
    return request.shared_pages if request.group in present else 0


def check_plan(plan: ResizePlan, status: FleetStatus) -> None:
    """Raises PlanRefusedError, naming what is wrong, for a plan that cannot be carried out as it stands."""
    _check_members(plan, status)
    _check_experts(plan, status)
    _check_requests(plan, status)
    _check_memory(plan, status)


def _check_members(plan: ResizePlan, status: FleetStatus) -> None:
    known, active = {w.worker for w in status.workers}, set(status.active)
    if unknown := {*plan.members, *plan.joining} - known:
        raise PlanRefusedError(f"worker {min(unknown)} is unknown")
    _check_leaving(plan.leaving, plan.members, status)
    if present := set(plan.joining) & active:
        raise PlanRefusedError(f"worker {min(present)} would join but is active already")
    if plan.members != tuple(sorted((active - set(plan.leaving)) | set(plan.joining))):
        raise PlanRefusedError(f"members {plan.members} are not the active workers after the change")
    # Every change of group or placement makes a new epoch; requests move inside one.
    same = plan.members == status.active and plan.placement is status.placement
    same = same or (
        plan.members == status.active
        and np.array_equal(plan.placement.worker, status.placement.worker)
        and np.array_equal(plan.placement.slot, status.placement.slot)
    )
    epoch = status.epoch if same else status.epoch + 1
    if plan.placement.epoch != epoch:
        raise PlanRefusedError(f"the plan leads to epoch {plan.placement.epoch}, the next one is {epoch}")


def _check_leaving(leaving: Collection[int], members: Collection[int], status: FleetStatus) -> None:
    if unknown := set(leaving) - {w.worker for w in status.workers}:
        raise PlanRefusedError(f"worker {min(unknown)} is unknown")
    if inactive := set(leaving) - set(status.active):
        raise PlanRefusedError(f"worker {min(inactive)} would leave but is not active")
    if not members:
        raise PlanRefusedError("every worker would leave; one has to stay")


def _check_experts(plan: ResizePlan, status: FleetStatus) -> None:
    old, new = status.placement, plan.placement
    if new.worker.shape != old.worker.shape:
        raise PlanRefusedError(f"the placement is for {new.worker.shape} experts, the model has {old.worker.shape}")
    if not set(np.unique(new.worker).tolist()) <= set(plan.members):
        layer, expert = (int(i[0]) for i in np.nonzero(~np.isin(new.worker, plan.members)))
        raise PlanRefusedError(f"expert {expert} of layer {layer} would be lost: no active worker has it")
    try:
        new.check(plan.members)
    except AssertionError as error:
        raise PlanRefusedError(str(error)) from None
    moving: dict[tuple[int, int], ExpertMove] = {}
    for move in plan.expert_moves:
        if (move.layer, move.expert) in moving:
            raise PlanRefusedError(f"expert {move.expert} of layer {move.layer} would move twice")
        moving[move.layer, move.expert] = move
    changed = set(zip(*(i.tolist() for i in np.nonzero(new.worker != old.worker)), strict=True))
    if changed != set(moving):
        layer, expert = min(changed ^ set(moving))
        raise PlanRefusedError(f"expert {expert} of layer {layer}: its moves and the placement disagree")
    landing: dict[int, set[int]] = defaultdict(set)
    taken = {w: set(old.slot[old.worker == w].tolist()) for w in {m.target for m in plan.expert_moves}}
    for (layer, expert), move in moving.items():
        if move.target != new.worker[layer, expert] or move.source not in (None, old.worker[layer, expert]):
            raise PlanRefusedError(f"expert {expert} of layer {layer}: its moves and the placement disagree")
        if move.slot < 0 or move.slot in landing[move.target] or move.slot in taken[move.target]:
            raise PlanRefusedError(f"slot {move.slot} of worker {move.target} is taken")
        landing[move.target].add(move.slot)
    for worker in plan.members:
        room = max([status.workers[worker].slots, *(slot + 1 for slot in landing[worker])])
        own = new.slot[new.worker == worker]
        if own.size and not 0 <= own.min() <= own.max() < room:
            wrong = own.min() if own.min() < 0 else own.max()
            raise PlanRefusedError(f"slot {wrong} of worker {worker} is not among the {room} it has during the change")


def _check_requests(plan: ResizePlan, status: FleetStatus) -> None:
    moved = set()
    for move in plan.request_moves:
        found = status.requests.get(move.request_id)
        if found is None or found[0] != move.source:
            raise PlanRefusedError(f"request {move.request_id} is not on worker {move.source}")
        if move.request_id in moved:
            raise PlanRefusedError(f"request {move.request_id} would move twice")
        if move.target not in plan.members or move.target == move.source:
            raise PlanRefusedError(f"request {move.request_id} cannot move to worker {move.target}")
        if move.with_kv and not found[1].decoding:
            raise PlanRefusedError(f"request {move.request_id} has no complete KV to move")
        moved.add(move.request_id)
    for worker in plan.leaving:
        if stranded := [r.request_id for r in status.requests_on(worker) if r.request_id not in moved]:
            raise PlanRefusedError(f"request {stranded[0]} would be left on worker {worker}")
    landing: dict[int, list[str]] = defaultdict(list)
    for move in plan.request_moves:
        if move.with_kv:
            landing[move.target].append(move.request_id)
    for worker, arriving in landing.items():
        here = {r.request_id for r in status.requests_on(worker) if r.kv_pages > 0} - moved
        if arriving and len(here) + len(arriving) > status.max_batch:
            raise PlanRefusedError(
                f"request {arriving[-1]} cannot run on worker {worker}: it runs {status.max_batch} at most"
            )


def _check_memory(plan: ResizePlan, status: FleetStatus) -> None:
    landing: dict[int, int] = defaultdict(int)
    for move in plan.expert_moves:
        landing[move.target] = max(landing[move.target], move.slot + 1)
    incoming = incoming_pages(plan, status)
    for worker in plan.members:
        state = status.workers[worker]
        final = plan.placement.slots_needed(worker)
        during = status.pages_beside(worker, max(state.slots, landing[worker]))
        need = (state.kv_pages_used if state.active else 0) + incoming[worker]
        if need > during:
            raise PlanRefusedError(
                f"worker {worker} lacks memory: {max(state.slots, landing[worker])} expert slots leave "
                f"{max(0, during)} KV pages, {need} are needed; {format_bytes(state.arena_bytes)} for both"
            )
        alone = status.pages_for(status.longest_tokens)
        if status.pages_beside(worker, final) < alone:
            raise PlanRefusedError(
                f"worker {worker} lacks memory: {final} expert slots leave no KV for a request of "
                f"{status.longest_tokens} tokens; {format_bytes(state.arena_bytes)} for both"
            )


def incoming_pages(plan: ResizePlan, status: FleetStatus) -> dict[int, int]:
    """Most KV pages that the moves bring to each worker; siblings' shared ones once."""
    present: dict[int, set[str]] = {}
    pages: dict[int, int] = defaultdict(int)
    for move in plan.request_moves:
        if move.with_kv:
            request, worker = status.requests[move.request_id][1], move.target
            if worker not in present:
                present[worker] = {r.group for r in status.requests_on(worker) if r.shared_pages and r.decoding}
            pages[worker] += request.kv_pages - _shared(request, present[worker])
            if request.shared_pages:
                present[worker].add(request.group)
    return pages
