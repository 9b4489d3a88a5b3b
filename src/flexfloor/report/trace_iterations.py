"""The chunks of a ledger as slices of its workers' time: one an iteration, or fewer where there would be too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flexfloor.ledger.accounting import iteration_ends

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Merging:
    """chunks: consecutive ones that become one slice a worker; 0: every entry of the ledger is a slice of its own."""

    chunks: int
    spans: bool = False  # an entry of the ledger stands for several iterations

    @classmethod
    def of(cls, records: Sequence[Record], most: int) -> Merging:
        """With about `most` events of workers at most: iterations, their exchanges, resizes, ends of responses."""
        chunks = [r for r in records if r["type"] == "chunk"]
        spans = any("spans" in c for c in chunks)
        slices = sum(len(w["seconds"]) * (1 + ("exchange_s" in w)) for c in chunks for w in c["workers"])
        stalls = sum(3 * (len(r["members"]) + len(r["leaving"])) for r in records if r["type"] == "resize")
        if slices + stalls + sum(len(c["finished"]) for c in chunks) <= most:
            return cls(0, spans)
        by_chunk = sum(1 + ("exchange_s" in w) for c in chunks for w in c["workers"])
        return cls(max(1, -(-by_chunk // most)), spans)

    @property
    def text(self) -> str:
        if self.chunks == 0:
            return "one slice an entry of the ledger, a few iterations each" if self.spans else "one slice each"
        several = f"{self.chunks} chunks" if self.chunks > 1 else "a chunk"
        return f"merged: one slice for the iterations of {several}, numbers are means or sums"


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice of a worker. Seconds since the first request was handed over.

    kind: `prefill` (any prompt token was computed), `decode`, or `idle` (no live request); exchange_begin: where the
    part spent in exchanges is drawn to begin, `end` where there is none.
    """

    worker: int
    kind: str
    begin: float
    end: float
    exchange_begin: float
    args: dict[str, Any]


class Group:
    """Consecutive chunks with nothing between them but the driver's planning; all of the same workers."""

    def __init__(self, chunks: Sequence[Record]) -> None:
        self.chunks = chunks
        self.t0, self.t1 = chunks[0]["t0"], chunks[-1]["t1"]
        self.tokens = sum(c["tokens"] for c in chunks)
        self.finished = sum(len(c["finished"]) for c in chunks)

    @property
    def args(self) -> dict[str, Any]:
        first = self.chunks[0]
        iterations = sum(c["iterations"] for c in self.chunks)
        numbers = {"iteration": first["first_iteration"], "iterations": iterations, "epoch": first["epoch"]}
        return numbers | {"tokens": self.tokens, "responses_ended": self.finished}

    @property
    def kv_pages(self) -> list[tuple[int, int]]:
        """(worker, pages in use at the end), of the workers of which the ledger tells."""
        return [(w["worker"], w["kv_pages"]) for w in self.chunks[-1]["workers"] if "kv_pages" in w]

    def happened(self, merging: Merging) -> Iterator[tuple[int, float, str, dict[str, Any]]]:
        """Responses that ended and requests that were preempted: worker, seconds, what, and more of it."""
        if merging.chunks:
            yield from self._counted()
            return
        for chunk in self.chunks:
            ends, first = iteration_ends(chunk), chunk["first_iteration"]
            for ended in chunk["finished"]:
                args = {n: ended[n] for n in ("request_id", "finish_reason", "prompt_tokens", "response_tokens")}
                yield ended["worker"], ends[ended["iteration"] - first], "response ends", args
            for lost in chunk["preemptions"]:
                # Before the iteration that it names.
                begin = ends[lost["iteration"] - first - 1] if lost["iteration"] > first else chunk["t0"]
                yield lost["worker"], begin, "preempted", {"request_id": lost["request_id"]}

    def _counted(self) -> Iterator[tuple[int, float, str, dict[str, Any]]]:
        for name, what in (("finished", "responses end"), ("preemptions", "preempted")):
            counts: dict[int, int] = {}
            for chunk in self.chunks:
                for entry in chunk[name]:
                    counts[entry["worker"]] = counts.get(entry["worker"], 0) + 1
            for worker, count in counts.items():
                yield worker, self.t1, what, {"requests": count}


def group_chunks(records: Sequence[Record], merging: Merging) -> Iterator[Group | Record]:
    """The records in their order, chunks in groups; a resize ends a group. What else falls into a group comes
    before it."""
    pending: list[Record] = []
    for record in records:
        if record["type"] == "chunk":
            if record["iterations"] == 0:
                continue
            pending.append(record)
            if len(pending) < merging.chunks:
                continue
        elif record["type"] not in ("resize", "end"):
            yield record
            continue
        if pending:
            yield Group(pending)
            pending = []
        if record["type"] != "chunk":
            yield record
    if pending:
        yield Group(pending)


def slices_of(group: Group, merging: Merging) -> Iterator[Piece]:
    """The pieces of all workers of a group, each worker's in the order of time."""
    if merging.chunks:
        for index in range(len(group.chunks[0]["workers"])):
            parts = [(chunk, chunk["workers"][index]) for chunk in group.chunks]
            whole = [(chunk, own, range(len(own["seconds"]))) for chunk, own in parts]
            yield _piece(group.t0, group.t1, group.chunks[0]["first_iteration"], whole)
        return
    for chunk in group.chunks:
        ends = iteration_ends(chunk)
        spans = chunk.get("spans") or [1] * chunk["iterations"]
        upto = list(accumulate(spans))
        for own in chunk["workers"]:
            begin = chunk["t0"]
            for entry, (span, done) in enumerate(zip(spans, upto, strict=True)):
                first = chunk["first_iteration"] + done - span
                yield _piece(begin, ends[done - 1], first, [(chunk, own, range(entry, entry + 1))])
                begin = ends[done - 1]


def _piece(begin: float, end: float, first: int, parts: Sequence[tuple[Record, Record, range]]) -> Piece:
    """parts: chunk, the worker's own object in it, and which of its entries."""
    worker = parts[0][1]["worker"]
    iterations = 0
    sums = dict.fromkeys(("seconds", "batch", "prefill_tokens", "kv_tokens", "experts_touched", "overran"), 0.0)
    exchange_s: float | None = 0.0
    for chunk, own, entries in parts:
        spans = chunk.get("spans")
        for entry in entries:
            span = 1 if spans is None else spans[entry]
            iterations += span
            for name in sums:
                sums[name] += own[name][entry] * span
            if exchange_s is not None:
                exchange_s = exchange_s + own["exchange_s"][entry] * span if "exchange_s" in own else None
    args: dict[str, Any] = {"iteration": first, "iterations": iterations, "seconds": _plain(sums["seconds"])}
    args |= {name: _plain(sums[name] / iterations) for name in ("batch", "kv_tokens", "experts_touched")}
    args |= {name: _plain(sums[name]) for name in ("prefill_tokens", "overran")}
    share = 0.0
    if exchange_s is not None:
        args["exchange_s"] = _plain(exchange_s)
        share = min(1.0, exchange_s / sums["seconds"]) if sums["seconds"] > 0 else 0.0
    kind = "prefill" if sums["prefill_tokens"] > 0 else "decode" if sums["batch"] > 0 else "idle"
    return Piece(worker, kind, begin, end, end - share * (end - begin), args)


def _plain(value: float) -> float:
    """Without the digits that sums of decimals bring; whole where it is."""
    rounded = round(value, 7)
    return int(rounded) if rounded == int(rounded) else rounded
