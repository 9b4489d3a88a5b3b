"""What a fleet reports, as plain data: its make, its state between two advances, and what an advance brought.

Shared by everything that produces or reads it (fleets, policy, ledger), hence below all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
class RequestStatus:
    """A live request on its worker, between two advances."""

    request_id: str
    prompt_tokens: int
    response_tokens: int
    kv_pages: int  # that it reads, shared ones included; 0 while it waits
    shared_pages: int  # of these, pages of the prompt that siblings on the same worker read too
    decoding: bool  # its prompt is computed and all but its newest token too

    @property
    def group(self) -> str:
        """Siblings have the same one: the request id without the sample."""
        return self.request_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """All live requests of a fleet as columns: by worker, there in the order in which it holds them.

    Every array is int64 [n] with the meaning of RequestStatus' field, `decoding` is bool [n].
    """

    ids: Sequence[str]
    worker: np.ndarray
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    kv_pages: np.ndarray
    shared_pages: np.ndarray
    decoding: np.ndarray

    @classmethod
    def of(cls, workers: Iterable[WorkerStatus]) -> LiveRequests:
        found = [(w.worker, r) for w in workers for r in w.requests]
        names = ("prompt_tokens", "response_tokens", "kv_pages", "shared_pages")
        columns = {name: np.array([getattr(r, name) for _, r in found], dtype=np.int64) for name in names}
        return cls(
            [r.request_id for _, r in found],
            worker=np.array([w for w, _ in found], dtype=np.int64),
            decoding=np.array([r.decoding for _, r in found], dtype=np.bool_),
            **columns,
        )

    def rows(self) -> Iterator[tuple[int, RequestStatus]]:
        """(worker, status) of each."""
        columns = (self.prompt_tokens, self.response_tokens, self.kv_pages, self.shared_pages, self.decoding)
        for name, worker, *fields in zip(self.ids, self.worker.tolist(), *(c.tolist() for c in columns), strict=True):
            yield worker, RequestStatus(name, *fields)


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
    memory_bytes: int = 0  # the same, now
    arena_bytes: int = 0  # for KV pages and expert slots together
    slots: int = 0  # expert slots at the far end of the arena
    requests: tuple[RequestStatus, ...] = ()

    @property
    def kv_pages_used(self) -> int:
        return self.kv_pages - self.kv_pages_free


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """What a resize (or moves without one) did, or why it failed. Seconds of the driver, bytes over all workers.

    left_live: leaving workers that had live requests, which moved.
    predicted: what the decision counted with, see `ResizePlan`.
    failed: what went wrong while it was prepared, or why the plan was refused; then nothing has changed and the counts
    are of the plan. refused: it was not begun, so that bytes and seconds are 0.
    """

    epoch: int
    iteration: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    joining: tuple[int, ...]
    experts: int
    expert_bytes: int
    requests: int
    requests_recomputed: int
    kv_bytes: int
    prepare_s: float
    commit_s: float
    reason: str
    left_live: tuple[int, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Tokens that one request gained in an advance. logprobs: float32 [len(tokens)].

    A fleet in virtual time makes no tokens and tells only of requests that ended.
    """

    request_id: str
    worker: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: FinishReason | None = None
    finish_iteration: int | None = None  # counted from 0 at `start`; the iteration that made the last token
    response_tokens: int = 0  # of the response so far, these included


@dataclass(frozen=True, slots=True)
class WorkerIterations:
    """What one worker did in an advance; every array has one entry a step, see `Progress.spans`.

    tokens: response tokens generated in the advance. last_live: its iterations up to and including the last one with a
    live request, None where `batch` tells. kv_pages: in use at the end. exchange_s: float64, of `seconds` those in
    exchanges with other workers (row counts, dispatch, combine), waiting for them included; None where the host's clock
    does not tell.
    """

    worker: int
    seconds: np.ndarray
    batch: np.ndarray  # live requests that took part
    prefill_tokens: np.ndarray
    kv_tokens: np.ndarray  # context tokens read by attention, summed over decode requests
    experts_touched: np.ndarray  # (layer, expert) pairs computed here
    overran: np.ndarray  # 1 where the work took longer than the pace allows; 0 without pace
    tokens: int = 0
    last_live: int | None = None
    kv_pages: int | None = None
    exchange_s: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy decided beside resizes. predicted: what it counted with, by name; units are in the names."""

    what: str
    reason: str
    predicted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """What a policy expected of responses that had not begun. tokens: float64 [levels, n], quantiles of the length of
    each response at each of `levels`."""

    requests: Sequence[str]
    levels: tuple[float, ...]
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Preemption:
    request_id: str
    worker: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of one advance: the same number of iterations on every active worker.

    spans: int64 [steps], the iterations that each entry of the workers' arrays stands for, as their mean; None where
    every iteration has an entry of its own.
    """

    epoch: int
    first_iteration: int
    iterations: int
    requests: tuple[RequestProgress, ...] = ()
    workers: tuple[WorkerIterations, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    spans: np.ndarray | None = None


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
    weights_version: int = 0  # as load_weights was told, else how often the weights were replaced since the launch
    start_s: dict[str, float] = field(default_factory=dict)  # seconds of each phase of the launch
    pace: float | None = None  # seconds of this fleet for one second of the profile's device
    profile: str | None = None  # name of the device profile; None where time is not made by one
    simulated: bool = False  # in virtual time: no model, no tokens
