"""Policies by which workers leave at fixed points: when they run dry, or before the first token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexfloor.errors import InputError, PlanRefusedError
from flexfloor.policy.planned import PlannedPolicy
from flexfloor.requests import Request
from flexfloor.world.costs import DeviceProfile
from flexfloor.world.lengths.base import Lengths
from flexfloor.world.resize import ResizePlan, plan_shrink
from flexfloor.world.status import FleetStatus


class ReleasePolicy(PlannedPolicy):
    """A worker leaves when it has run dry by itself.

    Long responses are placed together, so that workers run dry one after another: the longest first, workers filled in
    turn to an even share of the requests as far as their forecast peak fits.
    """

    def __init__(self, lengths: Lengths, profile: DeviceProfile, min_workers: int = 1) -> None:
        super().__init__(lengths, profile, "release")
        self._min_workers = min_workers

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        if self.book.take(queue):
            self.note_forecast()
        if not self.book.waiting:
            return {}
        workers, live = status.active, self.book.live(status)
        rows = np.array(self.book.waiting)
        expected = self.book.expected(rows)
        rows, expected = (a[np.argsort(-expected, kind="stable")] for a in (rows, expected))
        room = dict(zip(workers, self.limits(workers, status).tolist(), strict=True))
        count = dict.fromkeys(workers, 0)
        left = self.book.left(live.rows, live.generated)
        for worker, tokens in zip(live.worker.tolist(), (live.tokens + left).tolist(), strict=True):
            room[worker] -= tokens
            count[worker] += 1
        fair = min(-(-(len(rows) + len(live.rows)) // len(workers)), status.max_batch)
        assignment: dict[int, list[str]] = {}
        taken: list[int] = []
        for row, total in zip(rows.tolist(), (self.book.prompt[rows] + expected).tolist(), strict=True):
            target = next((w for w in workers if count[w] < fair and (total <= room[w] or count[w] == 0)), None)
            if target is None:
                continue
            room[target] -= total
            count[target] += 1
            taken.append(row)
            assignment.setdefault(target, []).append(self.book.requests[row].request_id)
        self.book.bind(taken)
        return assignment

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

    def __init__(self, lengths: Lengths, profile: DeviceProfile, count: int, time_scale: float = 1.0) -> None:
        super().__init__(lengths, profile, f"fixed:{count}", time_scale)
        self._count = count

    def workers(self, status: FleetStatus) -> tuple[int, ...]:
        return status.active[: self._count]

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        leaving = status.active[self._count :]
        if not leaving:
            return super().decide(queue, status)
        try:
            return plan_shrink(status, leaving, reason="not needed")
        except PlanRefusedError as error:
            told = f"policy {self.name}: {error}; give more workers or more `worker_memory`"
            raise InputError(told, settings=("policy", "workers", "worker_memory")) from None
