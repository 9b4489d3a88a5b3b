"""The static baselines: requests are placed on arrival, on the worker with the fewest in flight; nobody leaves."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.requests import Request
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus


class StaticPolicy:
    """grouped False: siblings of a prompt may go anywhere. grouped True: they go to one worker, together."""

    def __init__(self, grouped: bool) -> None:
        self.name = "static-grouped" if grouped else "static-spread"
        self._grouped = grouped

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        in_flight = {w.worker: w.live_requests for w in status.workers if w.active}
        assignment: dict[int, list[str]] = {worker: [] for worker in in_flight}
        home = {r.group: w.worker for w in status.active_workers() for r in status.requests_on(w.worker)}
        for request in queue:
            group = request.request_id.rpartition("/")[0]
            worker = home.get(group) if self._grouped else None
            if worker is None:
                worker = min(in_flight, key=in_flight.__getitem__)
                home[group] = worker
            in_flight[worker] += 1
            assignment[worker].append(request.request_id)
        return {worker: names for worker, names in assignment.items() if names}

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        return None
