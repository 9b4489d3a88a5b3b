"""Fleets as policies and plans see them, made by hand: no process, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flexfloor.progress import ModelShape, RequestStatus, WorkerStatus
from flexfloor.world.experts import ExpertPlacement, place_contiguous
from flexfloor.world.status import FleetStatus

PAGE_TOKENS = 4
PAGE_BYTES = 100


def shape(experts: int = 8, layers: int = 2, expert_bytes: int = 1000, max_context: int = 4096) -> ModelShape:
    return ModelShape(
        "made",
        layers,
        tuple(range(layers)),
        experts,
        min(2, experts),
        100,
        max_context,
        dense_bytes=10_000,
        expert_bytes=expert_bytes,
        kv_token_bytes=PAGE_BYTES // PAGE_TOKENS,
        hidden=16,
        itemsize=2,
    )


def live(
    name: str, pages: int = 0, *, prompt: int = 1, response: int | None = None, shared: int = 0, decoding: bool = True
) -> RequestStatus:
    """A live request by the pages it reads; it waits without any. response: by default, what just needs the pages."""
    if response is None:
        response = max(0, pages * PAGE_TOKENS - prompt)
    return RequestStatus(name, prompt, response, pages, shared, decoding and pages > 0)


def pages_used(requests: Sequence[RequestStatus]) -> int:
    """Distinct pages: those of a prompt count once for all siblings that read them."""
    shared = {r.group: r.shared_pages for r in requests if r.shared_pages}
    return sum(r.kv_pages - r.shared_pages for r in requests) + sum(shared.values())


def make_status(
    requests: Mapping[int, Sequence[RequestStatus]] | None = None,
    *,
    workers: int = 4,
    model: ModelShape | None = None,
    pages: int | Sequence[int] = 20,
    placement: ExpertPlacement | None = None,
    load: np.ndarray | None = None,
    active: Sequence[int] | None = None,
    longest: int = 8,
    max_batch: int = 64,
    iteration: int = 0,
    iteration_s: float = 0.0,
    arenas: Sequence[int] | None = None,
) -> FleetStatus:
    """pages: KV pages of each worker at the start, beside the experts of the home placement. arenas: bytes, instead."""
    model, requests = model or shape(), requests or {}
    home = place_contiguous(len(model.moe_layers), model.experts, workers)
    placement = placement or home
    active = list(range(workers)) if active is None else active
    made = []
    for worker in range(workers):
        room = pages if isinstance(pages, int) else pages[worker]
        arena = arenas[worker] if arenas else home.slots_on(worker) * model.expert_bytes + room * PAGE_BYTES
        own, here = tuple(requests.get(worker, ())), worker in active
        slots = int(placement.slot[placement.worker == worker].max(initial=-1)) + 1
        kv_pages = (arena - slots * model.expert_bytes) // PAGE_BYTES if here else 0
        made.append(
            WorkerStatus(
                worker,
                here,
                len(own),
                kv_pages - pages_used(own),
                kv_pages,
                peak_kv_bytes=0,
                peak_memory_bytes=0,
                arena_bytes=arena,
                slots=slots,
                requests=own,
            )
        )
    return FleetStatus(
        model=model,
        epoch=placement.epoch,
        iteration=iteration,
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        max_batch=max_batch,
        longest_tokens=longest,
        workers=tuple(made),
        placement=placement,
        expert_load=np.zeros(placement.worker.shape, dtype=np.int64) if load is None else load,
        iteration_s=iteration_s,
    )


def with_requests(status: FleetStatus, requests: Mapping[int, Sequence[RequestStatus]]) -> FleetStatus:
    """The same fleet with other live requests."""
    changed = []
    for state in status.workers:
        own = tuple(requests.get(state.worker, ()))
        free = state.kv_pages - pages_used(own)
        changed.append(replace(state, requests=own, live_requests=len(own), kv_pages_free=free))
    return replace(status, workers=tuple(changed))
