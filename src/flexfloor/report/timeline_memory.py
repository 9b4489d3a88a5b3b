"""What lies in every worker's memory when: experts and KV cache, from the records of a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = Mapping[str, Any]


@dataclass(frozen=True)
class MemoryLine:
    """Samples at the start, after every advance and after every resize; what stands between two holds until the next.

    t: float64 [n], seconds. experts, kv, arena: float64 [workers, n], bytes: of expert slots, of KV pages in use, and
    of the arena that both share; 0 once a worker is released. budget: bytes of one worker in all, of which weights and
    the reserve for intermediates take what the arena leaves; None where the ledger does not tell.
    """

    t: np.ndarray
    experts: np.ndarray
    kv: np.ndarray
    arena: np.ndarray
    budget: float | None

    def bins(self, edges: np.ndarray) -> MemoryLine:
        """With one sample a bin, as at its beginning, but for `kv`: the most in the bin. edges: float64 [bins + 1]."""
        first = np.clip(np.searchsorted(self.t, edges[:-1], side="right") - 1, 0, None)
        behind = np.maximum(np.searchsorted(self.t, edges[1:], side="left"), first + 1)
        # Every other range is between two bins; one column more, because the last range may end behind all samples.
        padded = np.concatenate([self.kv, np.zeros((len(self.kv), 1))], axis=1)
        kv = np.maximum.reduceat(padded, np.stack([first, behind], axis=1).ravel(), axis=1)[:, ::2]
        return MemoryLine(edges[:-1], self.experts[:, first], kv, self.arena[:, first], self.budget)


def make_memory_line(records: Sequence[Record], end_s: float) -> MemoryLine | None:
    """None for a ledger without the fields that tell: of an older version, or of a fleet that does not say."""
    start = records[0]
    if not start.get("workers") or not start.get("page_bytes"):
        return None
    fleet, page_bytes, expert_bytes = start["fleet"], start["page_bytes"], start["fleet"]["shape"]["expert_bytes"]
    experts, kv, arena = (np.zeros(fleet["workers"]) for _ in range(3))
    times: list[float] = []
    samples: list[np.ndarray] = []

    def divide(entries: Sequence[Record]) -> None:
        there = [entry["worker"] for entry in entries]
        gone = np.setdiff1d(np.arange(fleet["workers"]), there)
        experts[there] = [entry["slots"] * expert_bytes for entry in entries]
        arena[there] = [entry["arena_bytes"] for entry in entries]
        for values in (experts, kv, arena):
            values[gone] = 0.0

    def sample(t: float) -> None:
        times.append(t)
        samples.append(np.stack([experts, kv, arena]))

    divide(start["workers"])
    sample(0.0)
    for record in records:
        if record["type"] == "resize" and record["failed"] is None and record.get("workers"):
            divide(record["workers"])
            sample(record["t1"])
        elif record["type"] == "chunk" and all("kv_pages" in entry for entry in record["workers"]):
            kv[[entry["worker"] for entry in record["workers"]]] = [
                entry["kv_pages"] * page_bytes for entry in record["workers"]
            ]
            sample(record["t1"])
    stacked = np.stack(samples, axis=-1)  # [3, workers, n]
    budget = start["settings"].get("worker_memory")
    return MemoryLine(np.minimum(times, end_s), stacked[0], stacked[1], stacked[2], budget)
