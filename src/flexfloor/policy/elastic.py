"""Policies by which workers leave while the others generate."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flexfloor.errors import InputError, PlanRefusedError
from flexfloor.policy.base import Lengths
from flexfloor.policy.planned import PlannedPolicy
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile, iteration_seconds
from flexfloor.world.resize import ResizePlan, plan_moves, plan_shrink
from flexfloor.world.status import FleetStatus

_SWITCH_S = 0.05  # seconds that a resize is taken to cost beside what it moves
_MOVE_BYTES_S = 1e9  # bytes a second that a move is taken to reach
_FREE_SHARE = 0.25  # of its pages that a worker must have free to take requests off a full one


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

    A set is fast enough when an iteration on it takes at most 1 + max_slowdown times one on all workers of the fleet
    with the same requests spread evenly, by the cost model of `profile`. Nobody leaves unless the worker-seconds
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
        if status.live == 0:
            return None
        for count in range(self._min_workers, len(status.active)):
            if plan := self._plan(count, queue, status):
                return plan
        return self._rebalance(status)

    def _plan(self, count: int, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        """The plan that leaves `count` workers, None where it does not fit, is too slow, or does not pay."""
        by_kv = sorted(status.active, key=lambda w: (-status.workers[w].kv_pages_used, w))
        stay = sorted(by_kv[:count])
        leaving = [w for w in status.active if w not in stay]
        slots = -(-status.placement.worker.size // count)
        room = {w: status.pages_beside(w, max(slots, status.workers[w].slots)) for w in stay}
        homes = self._pack(stay, leaving, room, status)
        if homes is None or self._peak(homes, stay, status) + self.queue_pages(queue, status) > sum(room.values()):
            return None
        fast, slow = self._seconds(status, len(status.workers)), self._seconds_on(stay, homes, status)
        if slow > fast * (1 + self._max_slowdown):
            return None
        remaining = max(self.remaining(name, status) for name in status.requests)
        saved = (len(status.active) - count) * remaining * (status.iteration_s or slow)
        experts = sum(int((status.placement.worker == w).sum()) for w in leaving)
        stall = _SWITCH_S + experts * status.model.expert_bytes / _MOVE_BYTES_S
        if saved < self._least_gain * len(status.active) * stall:
            return None
        try:
            reason = f"{count} hold what is live; saves about {saved:.1f} worker-seconds"
            return plan_shrink(status, leaving, homes, reason)
        except PlanRefusedError:
            return None

    def _pack(
        self, stay: Sequence[int], leaving: Collection[int], room: dict[int, int], status: FleetStatus
    ) -> dict[str, int] | None:
        """Homes of the requests of leaving workers by forecast peaks, largest first; None when they do not fit."""
        load = {w: self.peak_pages(w, status) for w in stay}
        movers = [r.request_id for w in leaving for r in status.workers[w].requests]
        homes = {}
        for name in sorted(movers, key=lambda n: (-self.request_pages(n, status), n)):
            target = max(stay, key=lambda w: (room[w] - load[w], -w))
            load[target] += self.request_pages(name, status)
            homes[name] = target
        return homes if all(load[w] <= room[w] for w in stay) else None

    def _peak(self, homes: dict[str, int], stay: Sequence[int], status: FleetStatus) -> int:
        return sum(self.peak_pages(w, status) for w in stay) + sum(self.request_pages(n, status) for n in homes)

    def _seconds(self, status: FleetStatus, workers: int) -> float:
        """An iteration with what is live now, spread evenly."""
        tokens = sum(r.prompt_tokens + r.response_tokens for _, r in status.requests.values())
        batch = [-(-status.live // workers)] * workers
        kv = [-(-tokens // workers)] * workers
        return iteration_seconds(self._profile, status.model, batch=batch, kv_tokens=kv, prefill_tokens=[0] * workers)

    def _seconds_on(self, stay: Sequence[int], homes: dict[str, int], status: FleetStatus) -> float:
        """An iteration on the workers that stay, with the requests that come to them."""
        batch, kv = dict.fromkeys(stay, 0), dict.fromkeys(stay, 0)
        for name, (worker, request) in status.requests.items():
            home = homes.get(name, worker)
            batch[home] += 1
            kv[home] += request.prompt_tokens + request.response_tokens
        return iteration_seconds(
            self._profile,
            status.model,
            batch=list(batch.values()),
            kv_tokens=list(kv.values()),
            prefill_tokens=[0] * len(stay),
        )

    def _rebalance(self, status: FleetStatus) -> ResizePlan | None:
        """Take a request off a worker whose next pages are not there, to one with room."""
        full = [w for w in status.active_workers() if w.kv_pages_free < sum(r.kv_pages > 0 for r in w.requests)]
        homes: dict[str, int] = {}
        for worker in full:
            roomy = max(status.active_workers(), key=lambda w: w.kv_pages_free)
            movers = [r for r in worker.requests if r.decoding]
            if roomy.worker == worker.worker or roomy.kv_pages_free < _FREE_SHARE * roomy.kv_pages or not movers:
                continue
            mover = max(movers, key=lambda r: (r.kv_pages - r.shared_pages, r.request_id))
            homes[mover.request_id] = roomy.worker
        try:
            return plan_moves(status, homes, "its worker is full") if homes else None
        except PlanRefusedError:
            return None
