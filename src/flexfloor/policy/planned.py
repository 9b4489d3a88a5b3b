"""Scheduling by forecast lengths: one queue, bound late, longest first, where the forecast peak of KV is least."""

from __future__ import annotations

from collections.abc import Sequence

from flexfloor.policy.base import ForcedLengths, Lengths, check_oracle
from flexfloor.requests import Request
from flexfloor.world.dynamics import Held, fits
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus


class PlannedPolicy:
    """All workers stay. together: long responses share workers, so that the others run dry early; else they are spread.

    Requests wait in the driver's queue until the pages that their forecast asks for are free and a worker's batch has
    room; a worker with nothing live takes any. Shorter ones go ahead of one that does not fit yet.
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
        held = {w: self.held(w, status) for w in workers}
        load = {w: sum(tokens + left for tokens, left in held[w]) for w in workers}
        fair = -(-(len(queue) + sum(map(len, held.values()))) // len(workers))
        assignment: dict[int, list[str]] = {w: [] for w in workers}
        for request in sorted(queue, key=lambda r: -self.lengths.total(r, 0)):
            entry = self.entry(request, 0)
            if self._together:  # filled one after another, to an even number of requests each
                order = [w for w in workers if len(held[w]) < fair]
                order += [w for w in reversed(workers) if w not in order]
            else:
                order = sorted(workers, key=lambda w: (load[w], len(held[w]), w))
            target = next((w for w in order if self._fits([*held[w], entry], w, status)), None)
            if target is None:
                continue
            held[target].append(entry)
            load[target] += sum(entry)
            assignment[target].append(request.request_id)
            self._requests[request.request_id] = request
        return {worker: names for worker, names in assignment.items() if names}

    def _fits(self, held: Sequence[Held], worker: int, status: FleetStatus) -> bool:
        pages = status.workers[worker].kv_pages
        return len(held) == 1 or (len(held) <= status.max_batch and fits(held, pages, status.page_tokens))

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        return None

    def workers(self, status: FleetStatus) -> tuple[int, ...]:
        """Those that requests are bound to."""
        return status.active

    def held(self, worker: int, status: FleetStatus) -> list[Held]:
        """What the live requests of `worker` will take, by the forecast."""
        return [self.live(r.request_id, status) for r in status.workers[worker].requests]

    def live(self, request_id: str, status: FleetStatus) -> Held:
        return self.entry(self._requests[request_id], status.requests[request_id][1].response_tokens)

    def remaining(self, request_id: str, status: FleetStatus) -> float:
        """Tokens that a live request still generates, by the forecast; at least 1."""
        live = status.requests[request_id][1]
        return max(1.0, self.lengths.total(self._requests[request_id], live.response_tokens) - live.response_tokens)

    def entry(self, request: Request, generated: int) -> Held:
        return len(request.prompt_tokens) + generated, max(1.0, self.lengths.high(request, generated) - generated)
