"""How far a rollout is, told by the records of its ledger one by one as they are written."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["begins", "prefill", "decode", "idle", "stall", "released"]
"""What a worker did in the last iteration of the newest record. idle: no live request, but occupied; stall: waited
for a resize; begins: nothing yet."""

_RATE_S, _RATE_CHUNKS = 2.0, 8  # the rate is that of the last so many seconds, or chunks where these took longer
_ENDED_TO_TELL = 0.1  # share of the responses that must have ended before their rate tells when the last will


@dataclass(slots=True)
class WorkerState:
    """One worker as of the newest record. None: the ledger does not tell.

    live: requests in its last iteration that have not ended. kv_pages_used: of kv_pages. experts: expert slots held,
    one for each expert of a layer.
    """

    worker: int
    state: State = "begins"
    live: int = 0
    kv_pages_used: int | None = None
    kv_pages: int | None = None
    experts: int | None = None


@dataclass(slots=True)
class LiveState:
    """All that the records from `start` on come to. t: seconds since the first request was handed over, of the newest.

    live: responses under way; waiting: requests bound to no worker yet. last_resize: the newest `resize` record.
    """

    start: Mapping[str, Any]
    t: float = 0.0
    iteration: int = 0
    requests: int = 0
    bound: int = 0
    finished: int = 0
    response_tokens: int = 0
    preemptions: int = 0
    last_resize: Mapping[str, Any] | None = None
    ended: bool = False
    _workers: list[WorkerState] = field(init=False)
    _newest: Mapping[str, Any] | None = None  # a chunk that the workers do not show yet
    _rates: deque[tuple[float, int]] = field(default_factory=deque)  # (t, response tokens) of the newest chunks
    _live_s: float = 0.0  # ∫ live dt up to the newest chunk
    # (t, responses that had ended, ∫ live dt) of every chunk in which one ended
    _endings: list[tuple[float, int, float]] = field(default_factory=lambda: [(0.0, 0, 0.0)])
    _end_at: float | None = None  # when the policy expects the end
    _endings_tell: float | None = None  # when the endings have it

    def __post_init__(self) -> None:
        self._workers = [WorkerState(w) for w in range(self.start["fleet"]["workers"])]
        self._divide(self.start)

    @property
    def workers(self) -> list[WorkerState]:
        # Only now, because each chunk has an entry for every worker, and most chunks are never drawn.
        if (record := self._newest) is not None:
            self._newest = None
            self._show(record)
        return self._workers

    @property
    def live(self) -> int:
        return self.bound - self.finished

    @property
    def waiting(self) -> int:
        return self.requests - self.bound

    @property
    def active(self) -> list[int]:
        return [w.worker for w in self.workers if w.state != "released"]

    @property
    def simulated(self) -> bool:
        """Whether times are virtual."""
        return bool(self.start["fleet"].get("simulated"))

    @property
    def made_by(self) -> str:
        """'simulated on h200', 'emulated: 16 × h200', or '' for real time."""
        fleet = self.start["fleet"]
        if self.simulated:
            return f"simulated on {fleet.get('profile')}"
        return "" if fleet.get("pace") is None else f"emulated: {fleet['pace']:g} × {fleet.get('profile')}"

    def take(self, record: Mapping[str, Any]) -> None:
        """The next record, in the order of the ledger."""
        before, self.t = self.t, max(self.t, record.get("t1", record.get("t", 0.0)))
        finished = self.finished
        self._live_s += (self.t - before) * self.live
        match record["type"]:
            case "submit":
                self.requests += record["requests"]
            case "assign":
                self._assign(record)
            case "chunk":
                self._chunk(record)
            case "resize":
                self._resize(record)
            case "end":
                self.ended = True
        left = record.get("predicted", {}).get("remaining_s")
        # In real time a policy does not know how long iterations take before it has seen some.
        if left is not None and record.get("failed") is None and (record["iteration"] > 0 or self.made_by):
            self._end_at = self.t + left
        if self.finished > finished or (self._endings_tell is not None and self.t >= self._endings_tell):
            self._endings_tell = self._expect_end()

    def _divide(self, record: Mapping[str, Any]) -> None:
        """How memory is divided now, where the record tells."""
        for entry in record.get("workers", ()):
            worker = self.workers[entry["worker"]]
            worker.experts, worker.kv_pages = entry.get("slots"), entry.get("kv_pages")

    def _assign(self, record: Mapping[str, Any]) -> None:
        for worker, names in record["workers"].items():
            self.bound += len(names)
            self.workers[int(worker)].live += len(names)

    def _chunk(self, record: Mapping[str, Any]) -> None:
        self.iteration = record["first_iteration"] + record["iterations"]
        self.response_tokens += record["tokens"]
        self.preemptions += len(record["preemptions"])
        self._newest = record
        self._rates.append((self.t, self.response_tokens))
        while len(self._rates) > _RATE_CHUNKS + 1 and self.t - self._rates[1][0] > _RATE_S:
            self._rates.popleft()
        if record["finished"]:
            self.finished += len(record["finished"])
            self._endings.append((self.t, self.finished, self._live_s))

    def _show(self, chunk: Mapping[str, Any]) -> None:
        """What the workers did in the last iteration of a chunk."""
        iteration = chunk["first_iteration"] + chunk["iterations"] - 1
        last = Counter(f["worker"] for f in chunk["finished"] if f["iteration"] == iteration)
        for entry in chunk["workers"]:
            worker = self._workers[entry["worker"]]
            batch = entry["batch"][-1] if entry["batch"] else 0
            worker.live = max(0, round(batch) - last[entry["worker"]])
            worker.kv_pages_used = entry.get("kv_pages")
            if any(entry["prefill_tokens"][-1:]):
                worker.state = "prefill"
            else:
                worker.state = "decode" if batch else "idle"

    def _resize(self, record: Mapping[str, Any]) -> None:
        self.last_resize = record
        if record["failed"] is not None:
            return
        for worker in self.workers:
            if worker.state != "released":
                worker.state = "stall"
        for number in record["leaving"]:
            self.workers[number] = WorkerState(number, "released", kv_pages=0, kv_pages_used=0, experts=0)
        self._divide(record)

    def tokens_per_s(self) -> float:
        """Response tokens per second of the last while; seconds of the fleet, as all times here."""
        if not self._rates:
            return 0.0
        (t, tokens), (now, all_tokens) = self._rates[0], self._rates[-1]
        if len(self._rates) == 1:
            t, tokens = 0.0, 0
        return (all_tokens - tokens) / max(now - t, 1e-9)

    def remaining_s(self) -> float | None:
        """Seconds to the end, about: what the policy expected in its newest decision. Without one, or when that time is
        over, from how responses end; None where too few have.
        """
        if self.ended:
            return 0.0
        if self._end_at is not None and self._end_at > self.t:
            return self._end_at - self.t
        return None if self._endings_tell is None else self._endings_tell - self.t

    def _expect_end(self) -> float | None:
        """When the end comes as responses have ended so far. It stands until the next one ends, or until it has come:
        an exponential has no memory, and a time left that is always made anew would not get shorter in between.

        Of the newer half of those that ended: e in a time T with Λ = ∫ live dt, so that one at a time ends with the
        hazard h = e / Λ. Those that wait need room, which comes at the rate e / T; then n live ones that end
        independently with hazard h take (1 + 1/2 + … + 1/n) / h, the expectation of the largest of n exponentials.
        But what is left takes at least as long as nothing has ended: of heavy-tailed lengths the last ones end late.
        """
        if self.finished < max(2, _ENDED_TO_TELL * self.requests):
            return None
        half = bisect_right(self._endings, self.finished / 2, key=lambda entry: entry[1]) - 1
        t, ended, live_s = self._endings[half]
        count = self.finished - ended
        harmonic = _harmonic(self.live)
        left = self.waiting * (self.t - t) / count + harmonic * (self._live_s - live_s) / count
        return self.t + max(left, self.t - self._endings[-1][0])


def _harmonic(n: int) -> float:
    """1 + 1/2 + … + 1/n; of many, which are not added up for every drawing, by its series (DLMF 5.11.2)."""
    if n < 32:
        return sum(1 / k for k in range(1, n + 1))
    return math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n * n)
