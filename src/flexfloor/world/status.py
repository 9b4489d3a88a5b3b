"""The fleet between two advances, as policy and the driver see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flexfloor.progress import LiveRequests, ModelShape, RequestStatus, WorkerStatus
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.profiles import MoveCosts


@dataclass(frozen=True)
class FleetStatus:
    """All that a decision may depend on.

    epoch: membership epoch; iteration: since `start`; page_tokens, page_bytes: of one KV page;
    longest_tokens: of the longest request that is known and not finished, prompt and response;
    max_batch: most running requests of a worker; prefill_tokens: most prompt tokens that it computes in an iteration;
    placement: of this epoch; expert_load: int64 [moe_layers, experts], tokens sent to each expert since `start`;
    iteration_s: mean seconds of the last advance's iterations, 0 before the first; clock_s: the fleet's time now;
    move_costs: what resizes take here, as far as it is known; table: the live requests, None where `workers` has them;
    paced_as: the model whose iterations are emulated, None where the one that runs is; worker_memory: bytes that each
    worker may use.
    """

    model: ModelShape
    epoch: int
    iteration: int
    page_tokens: int
    page_bytes: int
    max_batch: int
    longest_tokens: int
    workers: tuple[WorkerStatus, ...]
    placement: ExpertPlacement
    expert_load: np.ndarray
    iteration_s: float = 0.0
    prefill_tokens: int = 512
    clock_s: float = 0.0
    move_costs: MoveCosts = field(default_factory=MoveCosts)
    table: LiveRequests | None = None
    paced_as: ModelShape | None = None
    worker_memory: int | None = None

    @property
    def timed_model(self) -> ModelShape:
        """The model that iterations take their time from."""
        return self.paced_as or self.model

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(w.worker for w in self.workers if w.active)

    @cached_property
    def requests(self) -> dict[str, tuple[int, RequestStatus]]:
        """Live requests: id → (worker, status)."""
        return {r.request_id: (worker, r) for worker, r in self.live_requests.rows()}

    @cached_property
    def live_requests(self) -> LiveRequests:
        return self.table if self.table is not None else LiveRequests.of(self.workers)

    def requests_on(self, worker: int) -> tuple[RequestStatus, ...]:
        return self._by_worker.get(worker, ())

    @cached_property
    def _by_worker(self) -> dict[int, tuple[RequestStatus, ...]]:
        found: dict[int, list[RequestStatus]] = {}
        for worker, request in self.requests.values():
            found.setdefault(worker, []).append(request)
        return {worker: tuple(own) for worker, own in found.items()}

    @property
    def live(self) -> int:
        return sum(w.live_requests for w in self.workers)

    def active_workers(self) -> Iterator[WorkerStatus]:
        return (w for w in self.workers if w.active)

    def pages_beside(self, worker: int, slots: int) -> int:
        """KV pages that the arena of `worker` holds beside `slots` expert slots; negative when those do not fit."""
        return (self.workers[worker].arena_bytes - slots * self.model.expert_bytes) // self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages of a request of `tokens` that runs alone, with one to spare, as the engine wants it."""
        return -(-tokens // self.page_tokens) + 1
