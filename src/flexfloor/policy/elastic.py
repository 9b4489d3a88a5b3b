"""Policies by which workers leave while the others generate."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from flexfloor.errors import InputError, PlanRefusedError
from flexfloor.policy.base import Lengths
from flexfloor.policy.planned import PlannedPolicy
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile, MoveCosts, iteration_seconds
from flexfloor.world.dynamics import fits, iterations_to_end
from flexfloor.world.resize import ResizePlan, plan_moves, plan_shrink
from flexfloor.world.status import FleetStatus

_COSTS = MoveCosts()
_ROUNDING = 1e-6  # what sums of parts may be above a whole number
_FREE_SHARE = 0.1  # of its pages that a worker keeps free when it takes a request off a full one


class ReleasePolicy(PlannedPolicy):
    """A worker leaves when it has run dry by itself."""

    def __init__(self, lengths: Lengths, min_workers: int = 1) -> None:
        super().__init__(lengths, "release", together=True)
        self._min_workers = min_workers

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        if queue or status.live == 0:
            return None
        dry = [w.worker for w in status.active_workers() if w.live_requests == 0]
        dry = dry[: max(0, len(status.active) - self._min_workers)]
        while dry:
            try:
                return plan_shrink(status, dry, reason="ran dry")
            except PlanRefusedError:
                dry.pop()  # with one less to leave there is more memory to take over the experts
        return None


class FixedPolicy(PlannedPolicy):
    """Everything runs on the first `count` workers; the others leave before the first token."""

    def __init__(self, lengths: Lengths, count: int) -> None:
        super().__init__(lengths, f"fixed:{count}")
        self._count = count

    def workers(self, status: FleetStatus) -> tuple[int, ...]:
        return status.active[: self._count]

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        leaving = status.active[self._count :]
        try:
            return plan_shrink(status, leaving, reason="not needed") if leaving else None
        except PlanRefusedError as error:
            raise InputError(f"policy {self.name}: {error}; give more workers or more --worker-memory") from None


class FlexFloorPolicy(PlannedPolicy):
    """Consolidates: live requests move together on the smallest set of workers that can hold them and is fast enough.

    A set is fast enough when what is left takes at most 1 + max_slowdown times as long on it as on all workers of the
    fleet with the same requests spread evenly, by the cost model of `profile`. What memory cannot hold at once waits,
    longest first, so that a fleet may be made smaller before the first token. Nobody leaves unless the worker-seconds
    saved, by forecast, are `least_gain` times those that the resize stalls.
    """

    def __init__(
        self,
        lengths: Lengths,
        profile: DeviceProfile,
        max_slowdown: float,
        min_workers: int = 1,
        least_gain: float = 2.0,
    ) -> None:
        super().__init__(lengths, "flexfloor")
        self._least_gain = least_gain
        self._profile, self._max_slowdown, self._min_workers = profile, max_slowdown, min_workers

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        if not queue and status.live == 0:
            return None
        if self._min_workers < len(status.active):
            limit = self._slowest(queue, status)
            for count in range(self._min_workers, len(status.active)):
                if plan := self._plan(count, limit, queue, status):
                    return plan
        return self._rebalance(status)

    def _slowest(self, queue: Sequence[Request], status: FleetStatus) -> float:
        """Seconds that what is left may take: on the whole fleet, spread evenly, and the slowdown that is allowed."""
        everyone = range(len(status.workers))
        room = self._room(everyone, status)
        seconds = self._seconds_on(everyone, None, room, queue, status)
        return seconds * self._iterations(queue, room, status) * (1 + self._max_slowdown)

    def _plan(self, count: int, limit: float, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        """The plan that leaves `count` workers, None where it does not fit, is slower than `limit`, or does not pay."""
        by_kv = sorted(status.active, key=lambda w: (-status.workers[w].kv_pages_used, w))
        stay = sorted(by_kv[:count])
        leaving = [w for w in status.active if w not in stay]
        room = self._room(stay, status)
        homes = self._pack(stay, leaving, room, status)
        if homes is None:
            return None
        slow = self._seconds_on(stay, homes, room, queue, status)
        if slow * self._longest(queue, status) > limit:  # known without rolling forward, which takes its time
            return None
        remaining = self._iterations(queue, room, status)
        if slow * remaining > limit:
            return None
        saved = (len(status.active) - count) * remaining * (status.iteration_s or slow)
        experts = sum(int((status.placement.worker == w).sum()) for w in leaving)
        stall = _COSTS.switch_s + experts * status.model.expert_bytes / _COSTS.bytes_per_s
        if status.iteration > 0 and saved < self._least_gain * len(status.active) * stall:
            return None
        try:
            gain = (len(status.active) - count) * remaining
            reason = f"{count} hold what is live; saves about {gain:.0f} worker-iterations"
            return plan_shrink(status, leaving, homes, reason)
        except PlanRefusedError:
            return None

    def _room(self, workers: Collection[int], status: FleetStatus) -> dict[int, int]:
        """KV pages of each worker beside the experts it would have, were these workers alone. Workers that stay keep
        what they have."""
        slots = -(-status.placement.worker.size // len(workers))
        shrinks = len(workers) < len(status.active)
        return {w: status.pages_beside(w, max(slots, status.workers[w].slots * shrinks)) for w in workers}

    def _longest(self, queue: Sequence[Request], status: FleetStatus) -> float:
        left = [self.live(name, status)[1] for name in status.requests]
        return max([*left, *(self.entry(r, 0)[1] for r in queue)])

    def _iterations(self, queue: Sequence[Request], room: dict[int, int], status: FleetStatus) -> float:
        """Until everything has ended, by the forecast's high lengths: what memory is set aside for."""
        running = [self.live(name, status) for name in status.requests]
        waiting = [self.entry(r, 0) for r in queue]
        return iterations_to_end(running, waiting, sum(room.values()), status.page_tokens, len(room) * status.max_batch)

    def _pack(
        self, stay: Sequence[int], leaving: Collection[int], room: dict[int, int], status: FleetStatus
    ) -> dict[str, int] | None:
        """Homes of the requests of leaving workers, longest first, where there is most room for what they will take;
        None when they do not fit."""
        held = {w: self.held(w, status) for w in stay}
        load = {w: sum(tokens + more for tokens, more in held[w]) / status.page_tokens for w in stay}
        movers = {r.request_id: self.live(r.request_id, status) for w in leaving for r in status.workers[w].requests}
        homes = {}
        for name, entry in sorted(movers.items(), key=lambda item: (-sum(item[1]), item[0])):
            open_ = [w for w in stay if len(held[w]) < status.max_batch]
            if not open_:
                return None
            target = max(open_, key=lambda w: (room[w] - load[w], -w))
            load[target] += sum(entry) / status.page_tokens
            held[target].append(entry)
            homes[name] = target
        return homes if all(fits(held[w], room[w], status.page_tokens) for w in stay) else None

    def _seconds_on(
        self,
        workers: Sequence[int],
        homes: dict[str, int] | None,
        room: dict[int, int],
        queue: Sequence[Request],
        status: FleetStatus,
    ) -> float:
        """An iteration on `workers` with the live requests at their homes, or spread evenly, and an even share of those
        that wait: as many as have room, half way through."""
        batch, kv = dict.fromkeys(workers, 0.0), dict.fromkeys(workers, 0.0)
        for name, (worker, request) in status.requests.items():
            places = workers if homes is None else (homes.get(name, worker),)
            for place in places:
                batch[place] += 1 / len(places)
                kv[place] += (request.prompt_tokens + request.response_tokens) / len(places)
        free = sum(room.values()) * status.page_tokens - sum(kv.values())
        tokens = sum(len(r.prompt_tokens) + self.lengths.total(r, 0) / 2 for r in queue)
        share = min(1.0, max(0.0, free) / tokens) / len(workers) if queue else 0.0
        return iteration_seconds(
            self._profile,
            status.model,
            batch=[math.ceil(b + share * len(queue) - _ROUNDING) for b in batch.values()],
            kv_tokens=[math.ceil(k + share * tokens - _ROUNDING) for k in kv.values()],
            prefill_tokens=[0] * len(batch),
        )

    def _rebalance(self, status: FleetStatus) -> ResizePlan | None:
        """Take a request off a worker whose next pages are not there, to one with room for it and for its own."""
        running = {w.worker: sum(r.kv_pages > 0 for r in w.requests) for w in status.active_workers()}
        spare = {w.worker: w.kv_pages_free - running[w.worker] for w in status.active_workers()}
        homes: dict[str, int] = {}
        for worker in status.active_workers():
            if spare[worker.worker] >= 0 or running[worker.worker] < 2:
                continue
            roomy = max(spare, key=lambda w: (spare[w], -w))
            room = spare[roomy] - int(_FREE_SHARE * status.workers[roomy].kv_pages)
            movers = [r for r in worker.requests if r.decoding and r.kv_pages <= room]
            if movers and running[roomy] < status.max_batch:
                mover = max(movers, key=lambda r: (r.kv_pages - r.shared_pages, r.request_id))
                homes[mover.request_id] = roomy
                spare[roomy] -= mover.kv_pages + 1
                running[roomy] += 1
        try:
            return plan_moves(status, homes, "its worker is full") if homes else None
        except PlanRefusedError:
            return None
