"""What a trace has to be: of the Chrome trace-event format, and true to the times of its ledger."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from flexfloor.report.trace import DRIVER, MOST_SLICES, make_trace

Event = dict[str, Any]
Records = list[dict[str, Any]]

# Which keys an event of each phase has to have: the document "Trace Event Format".
REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "pid", "args"},
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
ITERATIONS = {"prefill", "decode", "idle"}


def check_format(trace: dict[str, Any]) -> None:
    """Raises AssertionError for anything that a viewer would stumble over."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set[int]] = defaultdict(set)
    for event in trace["traceEvents"]:
        assert event["ph"] in REQUIRED, event
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str)
        assert event["name"]
        for key in ("pid", "tid"):
            assert type(event[key]) is int
            assert event[key] > 0, "0 is the idle task to some viewers"
        for key in {"ts", "dur"} & set(event):
            assert math.isfinite(event[key])
            assert event[key] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in event["args"].values()), event
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert type(event["args"][key]) is kind
            named[event["name"]].add(event["pid"] if event["name"].startswith("process") else event["tid"])
    for key, what in (("pid", "process"), ("tid", "thread")):
        used = {e[key] for e in trace["traceEvents"]}
        assert used == named[f"{what}_name"] == named[f"{what}_sort_index"]
    for track in tracks(trace).values():
        check_nesting(track)


def tracks(trace: dict[str, Any]) -> dict[int, list[Event]]:
    """Slices by thread, in the order of the file."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["tid"]].append(event)
    return found


def check_nesting(slices: list[Event]) -> None:
    """Two slices of one track lie beside or inside each other; of two that begin together the outer one comes first."""
    open_: list[Event] = []
    for event in sorted(slices, key=lambda e: e["ts"]):  # stable: as viewers sort
        while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
            open_.pop()
        if open_:
            assert event["ts"] + event["dur"] <= open_[-1]["ts"] + open_[-1]["dur"], (open_[-1], event)
        open_.append(event)


def check_times(trace: dict[str, Any], records: Records) -> None:
    """What the slices sum up to is what the ledger says, up to the rounding of each end to a microsecond."""
    by_thread = tracks(trace)
    chunks = [r for r in records if r["type"] == "chunk"]
    resizes = [r for r in records if r["type"] == "resize"]
    for worker in range(records[0]["fleet"]["workers"]):
        own = [(c, w) for c in chunks for w in c["workers"] if w["worker"] == worker]
        slices = [s for s in by_thread[DRIVER + 1 + worker] if s["name"] in ITERATIONS]
        expected = sum(c["t1"] - c["t0"] for c, _ in own) * 1e6
        assert sum(s["dur"] for s in slices) == pytest.approx(expected, abs=len(own) + 1)
        assert sum(s["args"]["iterations"] for s in slices) == sum(c["iterations"] for c, _ in own)
        spans = [c.get("spans") or [1] * c["iterations"] for c, _ in own]
        for name in ("seconds", "prefill_tokens", "overran"):
            total = sum_up(own, spans, name)
            assert sum(s["args"][name] for s in slices) == pytest.approx(total, rel=1e-6, abs=1e-6)
        for name in ("batch", "kv_tokens", "experts_touched"):
            total = sum_up(own, spans, name)
            found = sum(s["args"][name] * s["args"]["iterations"] for s in slices)
            assert found == pytest.approx(total, rel=1e-6, abs=1e-3)
    driver = by_thread[DRIVER]
    assert sum(s["dur"] for s in driver if s["name"] == "advance") == pytest.approx(
        sum(c["t1"] - c["t0"] for c in chunks) * 1e6, abs=len(chunks) + 1
    )
    stalls = [s for s in driver if s["cat"] == "resize" and "what" in s["args"]]
    assert len(stalls) == len(resizes)
    assert sum(s["dur"] for s in stalls) == pytest.approx(sum(r["t1"] - r["t0"] for r in resizes) * 1e6, abs=99)
    outer = sum(s["dur"] for s in driver if s["name"] not in ("prepare", "commit", "regrow"))
    end = max((r["t1"] for r in records if "t1" in r), default=0.0)
    assert outer == pytest.approx(end * 1e6, abs=len(driver)), "plan, advance and resize fill the driver's time"


def sum_up(own: list[tuple[dict, dict]], spans: list[list[int]], name: str) -> float:
    """Over the iterations of a worker; own: chunks and its part of them."""
    pairs = zip(own, spans, strict=True)
    return sum(value * span for (_, w), counts in pairs for value, span in zip(w[name], counts, strict=True))


def check_responses(trace: dict[str, Any], records: Records) -> None:
    """One instant for each response, on the track of its worker; or counts."""
    ended = [f for r in records if r["type"] == "chunk" for f in r["finished"]]
    instants = [e for e in trace["traceEvents"] if e["name"] in ("response ends", "responses end")]
    assert sum(e["args"].get("requests", 1) for e in instants) == len(ended)
    by_worker: dict[int, int] = defaultdict(int)
    for event in instants:
        by_worker[event["pid"] - DRIVER - 1] += event["args"].get("requests", 1)
    for worker, count in by_worker.items():
        assert count == sum(f["worker"] == worker for f in ended)


def check(records: Records, most: int = MOST_SLICES) -> dict[str, Any]:
    trace = json.loads(json.dumps(make_trace(records, most)))
    check_format(trace)
    check_responses(trace, records)
    if trace["otherData"]["iterations"].startswith("one"):
        check_times(trace, records)
    return trace


def counters(trace: dict[str, Any], name: str, pid: int = DRIVER) -> list[tuple[int, float]]:
    found = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == name and e["pid"] == pid]
    return [(e["ts"], next(iter(e["args"].values()))) for e in found]
