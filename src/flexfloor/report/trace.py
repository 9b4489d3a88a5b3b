"""A ledger as a trace in the Chrome trace-event format, for Perfetto and chrome://tracing.

The driver and every worker are a process of one thread each. Slices of the driver: what it plans, the chunks that it
has run, resizes. Slices of a worker: its iterations, with the part spent in exchanges nested at their end, the stall of
each resize, and the time from its release on. Time stamps are whole microseconds since the first request was handed
over.

Source of the format: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from flexfloor.outputs import atomic_write
from flexfloor.report.trace_iterations import Group, Merging, group_chunks, slices_of
from flexfloor.report.words import describe_resize, name_workers

Record = Mapping[str, Any]
Event = dict[str, Any]

MOST_SLICES = 200_000
"""Events on the workers' tracks. Of more, iterations become one slice a chunk, or one for several chunks."""

DRIVER = 1
"""Process id of the driver; 0 is a process of its own kind to some viewers. Worker w is `DRIVER + 1 + w`."""


def kind_of(start: Record) -> str:
    """`simulated` (virtual time), `emulated` (paced), or `real`."""
    fleet = start["fleet"]
    if fleet.get("simulated"):
        return "simulated"
    return "real" if fleet.get("pace") is None else "emulated"


def write_trace(path: Path, records: Sequence[Record], most_slices: int = MOST_SLICES) -> int:
    """Write the trace of one rollout, gzipped where the name ends in .gz. Returns the number of events.

    records: as `read_ledger` gives them, of a killed run too. Raises FlexFloorError when the disk says no.
    """
    with atomic_write(path) as file:
        if path.suffix != ".gz":
            return _write(file, records, most_slices)
        # No name and no time of day in the head: the same ledger gives the same bytes.
        raw = cast(io.TextIOWrapper, file).buffer
        with (
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8") as text,
        ):
            return _write(text, records, most_slices)


def _write(file: IO[str], records: Sequence[Record], most_slices: int) -> int:
    merging = Merging.of(records, most_slices)
    head = {"displayTimeUnit": "ms", "otherData": other_data(records, merging)}
    file.write(json.dumps(head, separators=(",", ":"))[:-1] + ',"traceEvents":[\n')
    count = 0
    for event in trace_events(records, merging):
        file.write((",\n" if count else "") + json.dumps(event, separators=(",", ":")))
        count += 1
    file.write("\n]}\n")
    return count


def make_trace(records: Sequence[Record], most_slices: int = MOST_SLICES) -> dict[str, Any]:
    """The whole trace as one object, as `write_trace` writes it."""
    merging = Merging.of(records, most_slices)
    events = list(trace_events(records, merging))
    return {"displayTimeUnit": "ms", "otherData": other_data(records, merging), "traceEvents": events}


def other_data(records: Sequence[Record], merging: Merging) -> dict[str, Any]:
    """What belongs to the whole trace."""
    start = records[0]
    fleet, kind = start["fleet"], kind_of(start)
    times = {
        "real": "microseconds of the run",
        "emulated": f"microseconds of a run at pace {fleet.get('pace')}; divided by that, of the emulated device",
        "simulated": "microseconds of virtual time",
    }
    return {
        "made_by": "flexfloor trace",
        "run": kind,
        "complete": records[-1]["type"] == "end",
        "time": times[kind],
        "iterations": merging.text,
        "started_at": start["started_at"],
        "policy": start["policy"],
        "model": fleet["model"],
        "workers": fleet["workers"],
        "pace": fleet.get("pace"),
        "profile": fleet.get("profile"),
    }


def trace_events(records: Sequence[Record], merging: Merging) -> Iterator[Event]:
    """All events: metadata first, then as the records have them; a slice comes before those nested in it."""
    yield from _metadata(records[0])
    yield from _driver(records, merging)
    yield from _workers(records, merging)
    yield from _counters(records, merging)


# -- the format ---------------------------------------------------------------------------------------------------


def microseconds(seconds: float) -> int:
    """Whole ones: begin and end of neighbours stay equal, whatever arithmetic a viewer uses."""
    return round(seconds * 1e6)


def _slice(pid: int, category: str, name: str, begin_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
    begin, end = microseconds(begin_s), microseconds(end_s)
    event = {"ph": "X", "pid": pid, "tid": pid, "cat": category, "name": name, "ts": begin, "dur": max(0, end - begin)}
    return event | {"args": dict(args)}


def _instant(pid: int, category: str, name: str, t: float, args: Mapping[str, Any]) -> Event:
    event = {"ph": "i", "s": "t", "pid": pid, "tid": pid, "cat": category, "name": name, "ts": microseconds(t)}
    return event | {"args": dict(args)}


def _counter(pid: int, name: str, unit: str, t: float, value: float) -> Event:
    """Perfetto shows name and unit as one title."""
    event = {"ph": "C", "pid": pid, "tid": pid, "cat": "counter", "name": name, "ts": microseconds(t)}
    return event | {"args": {unit: value}}


def _metadata(start: Record) -> Iterator[Event]:
    kind, fleet = kind_of(start), start["fleet"]
    label = {"real": "", "simulated": "simulated", "emulated": f"emulated: pace {fleet.get('pace')}"}[kind]
    names = ["driver" + f" ({kind})" * (kind != "real"), *(f"worker {w}" for w in range(fleet["workers"]))]
    for pid, name in enumerate(names, DRIVER):
        facts: dict[str, tuple[str, Any]] = {
            "process_name": ("name", name),
            "process_sort_index": ("sort_index", pid),
            "thread_name": ("name", "iterations" if pid > DRIVER else "decisions"),
            "thread_sort_index": ("sort_index", 0),
        }
        if label and pid == DRIVER:
            facts["process_labels"] = ("labels", label)
        for what, (key, value) in facts.items():
            yield {"ph": "M", "pid": pid, "tid": pid, "ts": 0, "name": what, "args": {key: value}}


# -- tracks -------------------------------------------------------------------------------------------------------


def _driver(records: Sequence[Record], merging: Merging) -> Iterator[Event]:
    """What the driver planned, ran and decided, one after the other."""
    done = 0.0
    for item in group_chunks(records, merging):
        if isinstance(item, Group):
            yield from _plan(done, item.t0)
            yield _slice(DRIVER, "advance", "advance", item.t0, item.t1, item.args)
            done = item.t1
        elif item["type"] == "resize":
            yield from _plan(done, item["t0"])
            yield from _resize(DRIVER, item, _account(item))
            done = item["t1"]
        elif item["type"] == "decision":
            yield _instant(DRIVER, "decision", item["what"], item["t"], _reasons(item))
        elif item["type"] == "submit":
            args = {name: item[name] for name in ("requests", "prompt_tokens")}
            yield _instant(DRIVER, "requests", "submit", item["t"], args)
        elif item["type"] == "assign":
            args = {"requests": sum(map(len, item["workers"].values())), "workers": len(item["workers"])}
            yield _instant(DRIVER, "requests", "assign", item["t"], args)
        elif item["type"] == "end":
            if (regrow_s := item["regrow_s"]) > 0:
                yield _slice(DRIVER, "resize", "regrow", done, done + regrow_s, {"regrow_s": regrow_s})
            yield _instant(DRIVER, "requests", "last response complete", item["t"], {})
    if records[-1]["type"] != "end":
        yield _instant(DRIVER, "incomplete", "the ledger ends here: the run was cut off", done, {})


def _plan(begin_s: float, end_s: float) -> Iterator[Event]:
    if microseconds(end_s) > microseconds(begin_s):
        yield _slice(DRIVER, "plan", "plan", begin_s, end_s, {})


def _reasons(record: Record) -> dict[str, Any]:
    return {"reason": record["reason"]} | {f"predicted {k}": v for k, v in record.get("predicted", {}).items()}


def _account(record: Record) -> dict[str, Any]:
    """All that a `resize` record says of what moved and why."""
    names = ("epoch", "experts", "expert_bytes", "requests", "requests_recomputed", "kv_bytes", "prepare_s", "commit_s")
    return {"what": describe_resize(record)} | {name: record[name] for name in names} | _reasons(record)


def _resize(pid: int, record: Record, args: Mapping[str, Any]) -> Iterator[Event]:
    """A resize and its two phases. One that was refused or failed is named so."""
    what = f"release {name_workers(record['leaving'])}" if record["leaving"] else "moves"
    failed = record["failed"] is not None
    if failed:
        what += " (refused)" if record.get("refused") else " (failed)"
    begin, end = record["t0"], record["t1"]
    yield _slice(pid, "resize", what, begin, end, args)
    middle = min(end, begin + record["prepare_s"])
    phases = (("prepare", begin, middle), ("commit", middle, min(end, middle + record["commit_s"])))
    for name, since, until in phases:
        if microseconds(until) > microseconds(since):
            yield _slice(pid, "resize", name, since, until, {})


def _workers(records: Sequence[Record], merging: Merging) -> Iterator[Event]:
    """The tracks of all workers."""
    active, released = set(range(records[0]["fleet"]["workers"])), dict[int, float]()
    end = 0.0
    for item in group_chunks(records, merging):
        if isinstance(item, Group):
            end = item.t1
            for piece in slices_of(item, merging):
                pid = DRIVER + 1 + piece.worker
                yield _slice(pid, piece.kind, piece.kind, piece.begin, piece.end, piece.args)
                if microseconds(piece.end) > microseconds(piece.exchange_begin):
                    args = {"exchange_s": piece.args["exchange_s"]}
                    yield _slice(pid, "exchange", "exchange", piece.exchange_begin, piece.end, args)
            for worker, t, name, args in item.happened(merging):
                yield _instant(DRIVER + 1 + worker, "requests", name, t, args)
        elif item["type"] == "resize":
            end = item["t1"]
            # Of very many workers the driver's track alone tells of those that others were released.
            for worker in item["leaving"] if merging.chunks else sorted(active):
                yield from _resize(DRIVER + 1 + worker, item, {"what": describe_resize(item)})
            if item["failed"] is None:
                active = set(item["members"])
                released |= dict.fromkeys(item["leaving"], end)
    for worker, t in released.items():
        yield _instant(DRIVER + 1 + worker, "resize", "released", t, {})
        yield _slice(DRIVER + 1 + worker, "released", "released", t, end, {})


def _counters(records: Sequence[Record], merging: Merging) -> Iterator[Event]:
    """Live and waiting requests, active workers and throughput of the fleet; KV pages in use on each worker."""
    waiting = live = 0
    done = -1.0
    yield _counter(DRIVER, "active", "workers", 0.0, records[0]["fleet"]["workers"])
    for worker in records[0].get("workers", ()):
        yield _counter(DRIVER + 1 + worker["worker"], "KV", "pages in use", 0.0, 0)
    for item in group_chunks(records, merging):
        if isinstance(item, Group):
            if done >= 0 and microseconds(item.t0) > microseconds(done):
                yield _counter(DRIVER, "throughput", "tokens/s", done, 0)
            rate = item.tokens / max(item.t1 - item.t0, 1e-6)
            yield _counter(DRIVER, "throughput", "tokens/s", item.t0, round(rate, 3))
            live, done = live - item.finished, item.t1
            yield _counter(DRIVER, "live", "requests", done, live)
            for worker, pages in item.kv_pages:
                yield _counter(DRIVER + 1 + worker, "KV", "pages in use", done, pages)
        elif item["type"] == "submit":
            waiting += item["requests"]
            yield _counter(DRIVER, "waiting", "requests", item["t"], waiting)
        elif item["type"] == "assign":
            bound = sum(map(len, item["workers"].values()))
            waiting, live = waiting - bound, live + bound
            yield _counter(DRIVER, "waiting", "requests", item["t"], waiting)
            yield _counter(DRIVER, "live", "requests", item["t"], live)
        elif item["type"] == "resize" and item["failed"] is None and (item["leaving"] or item["joining"]):
            yield _counter(DRIVER, "active", "workers", item["t1"], len(item["members"]))
            if "workers" in item:  # a ledger that tells of pages
                for worker in item["leaving"]:
                    yield _counter(DRIVER + 1 + worker, "KV", "pages in use", item["t1"], 0)
    if done >= 0:
        yield _counter(DRIVER, "throughput", "tokens/s", done, 0)
