"""The summary of a rollout, computed from its ledger records and from nothing else.

With W workers, occupied(w) from the start of the rollout to the release of w (to the end if it never left) and
post_finish(w) the part of it after the last live request of w ended or left:

    O                                  = Σ_w occupied(w)
    throughput_tok_s                   = response_tokens / wall_s
    tokens_per_occupied_s              = response_tokens / O
    tokens_per_occupied_s_with_regrow  = response_tokens / (O + W · regrow_s)
    post_finish_share                  = Σ_w post_finish(w) / O
    emulated                           = the same by seconds of the device that the pace emulates: seconds / pace
    paced_overrun_share                = iterations in which any worker overran / iterations
    stall_s                            = Σ (t1 − t0) over all resizes, failed ones too
    moved_bytes                        = bytes of experts and KV over all resizes that were carried out

A resize that failed or was refused releases nobody. Of a worker that is released, the time up to the end of that resize
is occupied. The same in iterations instead of seconds is exact and independent of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

Record = Mapping[str, Any]
MOST_OVERRUNS = 0.01
"""Share of iterations that may take longer than the pace allows; above it the times of a paced run mean nothing."""


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One worker over the rollout. Times are seconds since the first request was handed over.

    requests: responses that ended here; tokens: response tokens generated here.
    finished_at_s: end of the last iteration with a live request, or the release by which the last ones left; 0 for a
    worker that never had one.
    released_at_s: None for a worker that stayed. Peaks are None when the ledger has no end record.
    """

    worker: int
    requests: int
    tokens: int
    occupied_s: float
    finished_at_s: float
    released_at_s: float | None
    peak_kv_bytes: int | None
    peak_memory_bytes: int | None

    @property
    def post_finish_share(self) -> float:
        return _ratio(max(0.0, self.occupied_s - self.finished_at_s), self.occupied_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """`summary.json`. Suffix `_s` is seconds; formulas are in the module's docstring.

    complete: the ledger has its end record. Without one (a killed run) `wall_s` runs to the last record, tokens of
    responses under way count, and what only the end record knows (regrow, hashes, peaks) is None.
    """

    schema: int
    complete: bool
    simulated: bool
    policy: str
    workers: int
    requests: int
    prompt_tokens: int
    response_tokens: int
    wall_s: float
    throughput_tok_s: float
    occupied_worker_s: float
    occupied_iterations: int
    tokens_per_occupied_s: float
    tokens_per_occupied_s_with_regrow: float | None
    post_finish_share: float
    post_finish_share_iterations: float
    regrow_s: float | None
    iterations: int
    preemptions: int
    resizes: tuple[dict[str, Any], ...]
    decisions: tuple[dict[str, Any], ...]
    stall_s: float
    moved_bytes: int
    workers_detail: tuple[WorkerSummary, ...]
    responses_sha256: str | None
    logprobs_sha256: str | None
    numerics: str
    numerics_path: str
    seed: int | None
    step: int | None
    model: str
    versions: dict[str, str]
    pace: float | None
    profile: str | None
    paced_overrun_share: float | None  # None without pace, like the two above and the one below
    pace_valid: bool | None
    emulated: Mapping[str, Any] | None  # seconds of the profile's device, and rates by them; None without pace

    @property
    def occupied_rate(self) -> float:
        """`tokens_per_occupied_s_with_regrow`; of a killed run, where nobody knows it, without."""
        known = self.tokens_per_occupied_s_with_regrow
        return self.tokens_per_occupied_s if known is None else known

    def to_json(self) -> dict[str, Any]:
        """The summary as the object of `summary.json`."""
        return asdict(self)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def iteration_ends(chunk: Record) -> list[float]:
    """Seconds at which each iteration of a chunk ended, one entry an iteration.

    An iteration takes as long as its slowest worker; the iterations are stretched to fill the chunk from `t0` to `t1`,
    so that the driver's time between two chunks' iterations counts as theirs.
    """
    count, spans = chunk["iterations"], chunk.get("spans")
    if len(chunk["workers"]) == 1:
        slowest = chunk["workers"][0]["seconds"]
    else:
        slowest = [max(entry) for entry in zip(*(w["seconds"] for w in chunk["workers"]), strict=True)]
    if spans is not None:
        slowest = [seconds for seconds, span in zip(slowest, spans, strict=True) for _ in range(span)]
    if sum(slowest) <= 0:
        slowest = [1.0] * count
    total, span = sum(slowest), chunk["t1"] - chunk["t0"]
    return [chunk["t0"] + span * done / total for done in accumulate(slowest)]


@dataclass(slots=True)
class _LastLive:
    """The last iteration in which a worker had a live request: when it ended, and how many iterations that makes."""

    t: float = 0.0
    iterations: int = 0


def _last_live(chunks: Sequence[Record], ends_of: Sequence[list[float]], workers: int) -> list[_LastLive]:
    """For every worker, the end of its local work."""
    last = [_LastLive() for _ in range(workers)]
    for chunk, ends in zip(chunks, ends_of, strict=True):
        for entry in chunk["workers"]:
            busy = entry["last_live"] if "last_live" in entry else _last_busy(entry["batch"])
            if busy:
                last[entry["worker"]] = _LastLive(ends[busy - 1], chunk["first_iteration"] + busy)
    return last


def _last_busy(batch: Sequence[int]) -> int:
    """Iterations up to and including the last one with a live request."""
    return next((i for i in range(len(batch), 0, -1) if batch[i - 1] > 0), 0)


def _overrun_share(chunks: Sequence[Record], iterations: int) -> float:
    by_chunk = [[w["overran"] for w in c["workers"]] for c in chunks]
    return _ratio(sum(any(entry) for arrays in by_chunk for entry in zip(*arrays, strict=True)), iterations)


def _last_response(chunks: Sequence[Record], ends_of: Sequence[list[float]]) -> float:
    """Seconds at which the last response was complete."""
    times = [
        ends[f["iteration"] - chunk["first_iteration"]]
        for chunk, ends in zip(chunks, ends_of, strict=True)
        for f in chunk["finished"]
    ]
    return max(times, default=0.0)


def _with_actual(record: Record, wall_s: float | None, occupied_s: Sequence[float]) -> dict[str, Any]:
    """A resize or another decision as the summary tells of it: what was predicted for it has what became of it beside.

    remaining_s: from then to the end of the rollout; remaining_occupied_s: Σ over workers of what each was occupied
    after it; stall_s: of a resize. wall_s: None while nobody knows when the rollout ends; what is left then has no
    outcome yet.
    """
    at = record.get("t1", record.get("t", 0.0))
    became = {
        "stall_s": record["t1"] - record["t0"] if "t1" in record else None,
        "remaining_s": None if wall_s is None else max(0.0, wall_s - at),
        "remaining_occupied_s": None if wall_s is None else sum(max(0.0, o - at) for o in occupied_s),
    }
    predicted = record.get("predicted", {})
    actual = {name: became[name] for name in predicted if became.get(name) is not None}
    return {k: v for k, v in record.items() if k != "type"} | {"actual": actual}


def summarize(records: Sequence[Record]) -> Summary:
    """The summary of the rollout that `records` tell of, as `read_ledger` or `LedgerWriter.records` give them.

    Records of a killed run (no end record) are summed up as far as they go.
    """
    start = records[0]
    chunks = [r for r in records if r["type"] == "chunk"]
    submits = [r for r in records if r["type"] == "submit"]
    end = next((r for r in records if r["type"] == "end"), None)
    fleet, settings = start["fleet"], start["settings"]

    workers = fleet["workers"]
    ends_of = [iteration_ends(chunk) for chunk in chunks]
    wall_s = _last_response(chunks, ends_of) if end else max(r.get("t1", r.get("t", 0.0)) for r in records)
    iterations = max((c["first_iteration"] + c["iterations"] for c in chunks), default=0)
    last = _last_live(chunks, ends_of, workers)
    occupied_s, occupied_iterations = [wall_s] * workers, [iterations] * workers
    resizes = [r for r in records if r["type"] == "resize" and r["failed"] is None]
    released = {w: r for r in resizes for w in r["leaving"]}
    for worker, resize in released.items():
        occupied_s[worker] = min(wall_s, resize["t1"])
        occupied_iterations[worker] = resize["iteration"]
        if worker in resize["left_live"]:
            last[worker] = _LastLive(occupied_s[worker], resize["iteration"])
    ended_s = wall_s if end else None
    total_s, total_iterations = sum(occupied_s), sum(occupied_iterations)
    idle_s = sum(max(0.0, o - done.t) for o, done in zip(occupied_s, last, strict=True))
    idle_iterations = sum(max(0, o - done.iterations) for o, done in zip(occupied_iterations, last, strict=True))

    finished = [f for c in chunks for f in c["finished"]]
    generated = Counter[int]()
    for chunk in chunks:
        for entry in chunk["workers"]:
            generated[entry["worker"]] += entry["tokens"]
    response_tokens = sum(f["response_tokens"] for f in finished) if end else sum(c["tokens"] for c in chunks)
    ended = Counter(f["worker"] for f in finished)
    closing = {w["worker"]: w for w in end["workers"]} if end else {}
    regrow_s = end["regrow_s"] if end else None
    occupied_with_regrow_s = None if regrow_s is None else total_s + workers * regrow_s
    pace = fleet.get("pace")
    overrun_share = None if pace is None else _overrun_share(chunks, iterations)

    return Summary(
        schema=start["schema"],
        complete=end is not None,
        simulated=fleet.get("simulated", False),
        policy=start["policy"],
        workers=workers,
        requests=sum(s["requests"] for s in submits),
        prompt_tokens=sum(s["prompt_tokens"] for s in submits),
        response_tokens=response_tokens,
        wall_s=wall_s,
        throughput_tok_s=_ratio(response_tokens, wall_s),
        occupied_worker_s=total_s,
        occupied_iterations=total_iterations,
        tokens_per_occupied_s=_ratio(response_tokens, total_s),
        tokens_per_occupied_s_with_regrow=None
        if occupied_with_regrow_s is None
        else _ratio(response_tokens, occupied_with_regrow_s),
        post_finish_share=_ratio(idle_s, total_s),
        post_finish_share_iterations=_ratio(idle_iterations, total_iterations),
        regrow_s=regrow_s,
        iterations=iterations,
        preemptions=sum(len(c["preemptions"]) for c in chunks),
        resizes=tuple(_with_actual(r, ended_s, occupied_s) for r in records if r["type"] == "resize"),
        decisions=tuple(_with_actual(r, ended_s, occupied_s) for r in records if r["type"] == "decision"),
        stall_s=sum(r["t1"] - r["t0"] for r in records if r["type"] == "resize"),
        moved_bytes=sum(r["expert_bytes"] + r["kv_bytes"] for r in resizes),
        workers_detail=tuple(
            WorkerSummary(
                worker=w,
                requests=ended[w],
                tokens=generated[w],
                occupied_s=occupied_s[w],
                finished_at_s=last[w].t,
                released_at_s=released[w]["t1"] if w in released else None,
                peak_kv_bytes=closing[w]["peak_kv_bytes"] if w in closing else None,
                peak_memory_bytes=(closing[w]["peak_memory_bytes"] or None) if w in closing else None,
            )
            for w in range(workers)
        ),
        responses_sha256=end["responses_sha256"] if end else None,
        logprobs_sha256=end["logprobs_sha256"] if end else None,
        numerics=fleet["numerics"],
        numerics_path=fleet["numerics_path"],
        seed=settings.get("seed"),
        step=settings.get("step"),
        model=fleet["model"],
        versions=dict(fleet["versions"]),
        pace=pace,
        profile=fleet.get("profile"),
        paced_overrun_share=overrun_share,
        pace_valid=None if overrun_share is None else overrun_share <= MOST_OVERRUNS,
        emulated=None
        if pace is None
        else {
            "wall_s": wall_s / pace,
            "occupied_worker_s": total_s / pace,
            "throughput_tok_s": _ratio(response_tokens, wall_s / pace),
            "tokens_per_occupied_s": _ratio(response_tokens, total_s / pace),
            "tokens_per_occupied_s_with_regrow": None
            if occupied_with_regrow_s is None
            else _ratio(response_tokens, occupied_with_regrow_s / pace),
        },
    )
