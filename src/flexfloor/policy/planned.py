"""Scheduling by forecast lengths: one queue, bound late, longest first, where the forecast peak of KV is least."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.policy.base import ForcedLengths, Lengths, check_oracle
from flexfloor.requests import Request
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus


class PlannedPolicy:
    """All workers stay. together: long responses share workers, so that the others run dry early; else they are spread.

    Requests wait in the driver's queue until the pages that their forecast asks for are free.
    """

    def __init__(self, lengths: Lengths, name: str = "planned", together: bool = False) -> None:
        self.name = name
        self.lengths = lengths
        self._together = together
        self._requests: dict[str, Request] = {}  # bound by this policy

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        if isinstance(self.lengths, ForcedLengths):
            check_oracle(queue)
        workers = self.workers(status)
        peak = {w: self.peak_pages(w, status) for w in workers}
        room = {w: status.workers[w].kv_pages for w in workers}
        count = {w: status.workers[w].live_requests for w in workers}
        fair = -(-(len(queue) + sum(count.values())) // len(workers))
        assignment: dict[int, list[str]] = {w: [] for w in workers}
        for request in sorted(queue, key=lambda r: -self.lengths.total(r, 0)):
            need = self._pages(request, 0, status)
            fitting = [w for w in workers if peak[w] + need <= room[w] or count[w] == 0]
            if not fitting:
                continue
            if self._together:
                # Filled one after another, to an even number of requests each.
                target = next((w for w in fitting if count[w] < fair), fitting[-1])
            else:
                target = min(fitting, key=lambda w: (peak[w], count[w], w))
            peak[target] += need
            count[target] += 1
            assignment[target].append(request.request_id)
            self._requests[request.request_id] = request
        return {worker: names for worker, names in assignment.items() if names}

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        return None

    def workers(self, status: FleetStatus) -> tuple[int, ...]:
        """Those that requests are bound to."""
        return status.active

    def peak_pages(self, worker: int, status: FleetStatus) -> int:
        """Pages that the live requests of `worker` take at most, by the forecast."""
        return sum(self.request_pages(r.request_id, status) for r in status.workers[worker].requests)

    def request_pages(self, request_id: str, status: FleetStatus) -> int:
        """Pages that a live request takes at most, by the forecast."""
        live = status.requests[request_id][1]
        return max(live.kv_pages, self._pages(self._requests[request_id], live.response_tokens, status))

    def remaining(self, request_id: str, status: FleetStatus) -> float:
        """Tokens that a live request still generates, by the forecast; at least 1."""
        live = status.requests[request_id][1]
        return max(1.0, self.lengths.total(self._requests[request_id], live.response_tokens) - live.response_tokens)

    def queue_pages(self, queue: Sequence[Request], status: FleetStatus) -> int:
        return sum(self._pages(r, 0, status) for r in queue)

    def _pages(self, request: Request, generated: int, status: FleetStatus) -> int:
        tokens = len(request.prompt_tokens) + self.lengths.high(request, generated)
        return -(-int(min(tokens, status.model.max_context)) // status.page_tokens) + 1
