"""What a fleet reports, as plain data: its make, its state between two advances, and what an advance brought.

Shared by everything that produces or reads it (fleets, policy, ledger), hence below all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flexfloor.requests import FinishReason


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a mixture-of-experts model that planning needs; bytes are for the dtype the fleet computes in."""

    model_type: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    vocab_size: int
    max_context: int  # tokens
    dense_bytes: int  # everything but the experts
    expert_bytes: int  # one expert of one layer
    kv_token_bytes: int  # keys and values of one token, all layers
    hidden: int  # elements of one hidden vector
    itemsize: int  # bytes of one element
    lookup_bytes: int = 0  # of dense_bytes, those that are looked up and not read whole: an untied input embedding

    @property
    def all_expert_bytes(self) -> int:
        return self.expert_bytes * self.experts * len(self.moe_layers)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker between two advances. Bytes and counts are of this moment; peaks are since `start`."""

    worker: int
    active: bool
    live_requests: int  # running or waiting on this worker
    kv_pages_free: int
    kv_pages: int
    peak_kv_bytes: int
    peak_memory_bytes: int  # anonymous + shared memory of the process


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The whole fleet between two advances."""

    model: ModelShape
    epoch: int  # membership epoch
    iteration: int  # iterations since `start`
    page_tokens: int
    workers: tuple[WorkerStatus, ...]

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(w.worker for w in self.workers if w.active)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Tokens that one request gained in an advance. logprobs: float32 [len(tokens)]."""

    request_id: str
    worker: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: FinishReason | None = None
    finish_iteration: int | None = None  # counted from 0 at `start`; the iteration that made the last token


@dataclass(frozen=True, slots=True)
class WorkerIterations:
    """What one worker did in each iteration of an advance; every array has one entry an iteration."""

    worker: int
    seconds: np.ndarray
    batch: np.ndarray  # live requests that took part
    prefill_tokens: np.ndarray
    kv_tokens: np.ndarray  # context tokens read by attention, summed over decode requests
    experts_touched: np.ndarray  # (layer, expert) pairs computed here
    overran: np.ndarray  # 1 where the work took longer than the pace allows; 0 without pace


@dataclass(frozen=True, slots=True)
class Preemption:
    request_id: str
    worker: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of one advance: the same number of iterations on every active worker."""

    epoch: int
    first_iteration: int
    iterations: int
    requests: tuple[RequestProgress, ...] = ()
    workers: tuple[WorkerIterations, ...] = ()
    preemptions: tuple[Preemption, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """What stays the same over a fleet's life and belongs into every report."""

    kind: str
    model: str
    shape: ModelShape
    workers: int
    numerics: str
    numerics_path: str  # how the self-check found `numerics` to hold
    dtype: str
    device: str
    threads_per_worker: int
    versions: dict[str, str]
    expert_bytes_loaded: tuple[int, ...] = ()  # per worker
    start_s: dict[str, float] = field(default_factory=dict)  # seconds of each phase of the launch
    pace: float | None = None  # seconds of this fleet for one second of the profile's device
    profile: str | None = None  # name of the device profile; None without pace
