"""The fleet between two advances, as policy and the driver see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexfloor.progress import ModelShape, RequestStatus, WorkerStatus
from flexfloor.world.experts import ExpertPlacement


@dataclass(frozen=True)
class FleetStatus:
    """All that a decision may depend on.

    epoch: membership epoch; iteration: since `start`; page_tokens, page_bytes: of one KV page;
    longest_tokens: of the longest request that is known and not finished, prompt and response;
    max_batch: most running requests of a worker; placement: of this epoch;
    expert_load: int64 [moe_layers, experts], tokens sent to each expert since `start`;
    iteration_s: mean seconds of the last advance's iterations, 0 before the first.
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

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(w.worker for w in self.workers if w.active)

    @cached_property
    def requests(self) -> dict[str, tuple[int, RequestStatus]]:
        """Live requests: id → (worker, status)."""
        return {r.request_id: (w.worker, r) for w in self.workers for r in w.requests}

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
