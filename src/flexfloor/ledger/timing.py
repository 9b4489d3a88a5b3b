"""Where the seconds of a rollout went, computed from its ledger records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexfloor.ledger.accounting import iteration_ends


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds from the first request handed over to the end of the last record, in four parts.

    prefill_s: iterations in which any worker computed prompt tokens (a decode of others may run beside); decode_s: all
    other iterations; resize_s: stalls, of resizes that failed too; plan_s: the rest, in which the driver decides.
    """

    plan_s: float
    prefill_s: float
    decode_s: float
    resize_s: float


def split_time(records: Sequence[Mapping[str, Any]]) -> TimeSplit:
    """records: as `read_ledger` or `LedgerWriter.records` give them, of a rollout that may still run."""
    prefill_s = decode_s = resize_s = end = 0.0
    for record in records:
        end = max(end, record.get("t1", record.get("t", 0.0)))
        if record["type"] == "resize":
            resize_s += record["t1"] - record["t0"]
        elif record["type"] == "chunk":
            done = record["t0"]
            spans = record.get("spans")
            prefills = [any(entry) for entry in zip(*(w["prefill_tokens"] for w in record["workers"]), strict=True)]
            if spans is not None:
                prefills = [prefill for prefill, span in zip(prefills, spans, strict=True) for _ in range(span)]
            for prefill, until in zip(prefills, iteration_ends(record), strict=True):
                if prefill:
                    prefill_s += until - done
                else:
                    decode_s += until - done
                done = until
    return TimeSplit(max(0.0, end - prefill_s - decode_s - resize_s), prefill_s, decode_s, resize_s)
