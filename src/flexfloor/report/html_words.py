"""What the report says in words: where times come from, what was decided, the key numbers with their units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flexfloor.ledger.accounting import MOST_OVERRUNS, Summary
from flexfloor.report.words import format_count, name_workers
from flexfloor.world.memory import format_bytes

Record = Mapping[str, Any]

_PREDICTED = {
    "stall_s": ("stall", "s"),
    "remaining_s": ("time left", "s"),
    "remaining_occupied_s": ("worker time left", "worker-s"),
}
"""Of what a decision counted with, that which the summary has the outcome of: name and unit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One key number: shown as `text` and `unit`, exactly `value`, which `summary.json` has under `key`."""

    key: str
    label: str
    text: str
    unit: str
    value: float
    about: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the decision log. outcome: what was predicted beside what came of it. kind: resize, move, failed or
    decision."""

    kind: str
    told: str
    reason: str
    outcome: str = ""


def where_times_come_from(summary: Summary) -> tuple[str, str]:
    """(label, explanation): 'simulated on h200', 'emulated: 16 × h200' or 'real time'."""
    if summary.simulated:
        return (
            f"simulated on {summary.profile}",
            "Nothing here was measured: times come from the cost model of the device profile, no token was generated.",
        )
    if summary.pace is None:
        return "real time", "Times were measured on the machine that ran it."
    return (
        f"emulated: {summary.pace:g} × {summary.profile}",
        f"Tokens were generated; every iteration was made to last {summary.pace:g} times what it takes on a device of "
        f"the profile {summary.profile}. Seconds here are those of the run.",
    )


def warnings_of(summary: Summary) -> Iterator[str]:
    """What a reader must know before using the numbers."""
    if not summary.complete:
        yield (
            "Incomplete: the ledger has no end record, because the run was killed or still goes on. Everything here is "
            "as of its last record, and tokens of responses under way count; what bringing workers back takes is not "
            "known."
        )
    if summary.pace_valid is False:
        yield (
            f"Times are not valid: {summary.paced_overrun_share:.1%} of the iterations took longer than the pace "
            f"allows (limit {MOST_OVERRUNS:.0%}); raise --pace."
        )


def at_time(seconds: float) -> str:
    """3.14159 → '3.14 s', 1234.5 → '1 234.5 s'."""
    return f"{seconds:,.{2 if seconds < 1000 else 1}f} s".replace(",", " ")


def significant(value: float) -> str:
    """Three digits, and all of them where there are more: 0.0312, 5.90, 48.1, 1 234."""
    return format_count(value) if value == 0 or abs(value) >= 999.5 else f"{value:#.3g}".removesuffix(".")


def key_figures(summary: Summary) -> list[Figure]:
    """The numbers at the top; all of them come from the summary as they are. What it does not know is left out, and
    before the first iteration rates and shares are."""
    peaks = [w.peak_kv_bytes for w in summary.workers_detail if w.peak_kv_bytes is not None]
    rated = "per occupied worker-second", "tokens", "response tokens over the time that all workers were occupied"
    rates = [
        ("tokens_per_occupied_s_with_regrow", *rated[:2], f"{rated[2]}, bringing them back included")
        if summary.complete
        else ("tokens_per_occupied_s", *rated),
        ("throughput_tok_s", "throughput", "tokens/s", "response tokens over wall time"),
        ("post_finish_share", "post-finish share", "%",
         "of occupied time: after a worker's last live request ended or left"),
    ]  # fmt: skip
    until = "the last response complete" if summary.complete else "the last record"
    rows = [
        *(rates if summary.iterations else ()),
        ("wall_s", "wall time", "s", f"from the first request handed over to {until}"),
        ("occupied_worker_s", "occupied time", "worker-s", "of all workers: each until its release, or to the end"),
        ("response_tokens", "response tokens", "", "of all responses"),
        ("requests", "requests", "", "prompt samples to generate"),
        ("iterations", "iterations", "", "of the engine; each gives every live request at most one token"),
        ("occupied_iterations", "occupied iterations", "", "summed over workers; independent of the machine"),
        ("stall_s", "stalled by resizes and moves", "s", "nobody generates meanwhile"),
        ("moved_bytes", "moved between workers", "bytes", "experts and KV pages"),
        ("regrow_s", "regrow", "s", "bringing the workers back at the end"),
        ("preemptions", "preemptions", "", "requests that lost their KV pages and were recomputed"),
    ]  # fmt: skip
    figures = [
        Figure(key, label, *with_unit(getattr(summary, key), unit), getattr(summary, key), about)
        for key, label, unit, about in rows
        if getattr(summary, key) is not None
    ]
    if summary.emulated is not None and summary.iterations:
        figures += [
            Figure(f"emulated.{key}", label, *with_unit(summary.emulated[key], unit), summary.emulated[key],
                   f"in seconds of the emulated device: one for every {summary.pace:g} of the run")
            for key, label, unit in (
                ("wall_s", "emulated wall time", "s"),
                ("throughput_tok_s", "emulated throughput", "tokens/s"),
            )
        ]  # fmt: skip
    if peaks and not summary.simulated:
        about = "the most that KV pages took on any worker"
        figures.append(Figure("peak_kv_bytes", "peak KV", *with_unit(max(peaks), "bytes"), max(peaks), about))
    return figures


def with_unit(value: float, unit: str) -> tuple[str, str]:
    """(number, unit) as they are shown."""
    if unit == "%":
        return f"{100 * value:.1f}", "%"
    if unit == "bytes":
        number, _, scaled = format_bytes(value).partition(" ")
        return number, scaled
    return format_count(value) if isinstance(value, int) else significant(value), unit


def decision_log(summary: Summary) -> list[Entry]:
    """All decisions in the order of their times."""
    entries = [(r["t1"], _resize_entry(r)) for r in summary.resizes]
    entries += [(d["t"], _decision_entry(d)) for d in summary.decisions]
    return [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]


def _resize_entry(resize: Record) -> Entry:
    if resize["failed"] is not None:
        what = "was refused" if resize.get("refused") else "failed, and changed nothing"
        who = f"Release of {name_workers(resize['leaving'])}" if resize["leaving"] else "A move of requests"
        return Entry("failed", f"{who} at {at_time(resize['t1'])} {what}: {resize['failed']}", resize["reason"])
    kind = "resize" if resize["leaving"] or resize["joining"] else "move"
    return Entry(kind, tell_resize(resize), resize["reason"], _outcome(resize))


def tell_resize(resize: Record) -> str:
    """A resize that was carried out.

    'Worker 2 left at 3.10 s: 14 requests (2.0 MiB of KV) and 32 experts (96.0 MiB) moved, everyone stalled for 30 ms;
    predicted gain 4.20 worker-s'
    """
    words = {"leaving": "left", "joining": "joined"}
    who = " and ".join(f"{name_workers(resize[key])} {word}" for key, word in words.items() if resize[key])
    moved = []
    if count := resize["requests"]:
        kv = f" ({format_bytes(resize['kv_bytes'])} of KV)" if resize["kv_bytes"] else ""
        moved.append(f"{plural(count, 'request')}{kv}")
    if count := resize["experts"]:
        moved.append(f"{plural(count, 'expert')} ({format_bytes(resize['expert_bytes'])})")
    told = f"{' and '.join(moved) or 'nothing'} moved"
    told = f"{who} at {at_time(resize['t1'])}: {told}" if who else f"{told} between workers at {at_time(resize['t1'])}"
    told += f", everyone stalled for {1e3 * (resize['t1'] - resize['t0']):.3g} ms"
    gains = {"saved_worker_s": "worker-s", "saved_s": "s"}
    gain = [f"{significant(v)} {unit}" for key, unit in gains.items() if (v := resize["predicted"].get(key))]
    told += f"; predicted gain {' and '.join(gain)}" if gain else ""
    return told[0].upper() + told[1:]


def _decision_entry(decision: Record) -> Entry:
    what = "Order of the waiting requests chosen" if decision["what"] == "order" else decision["what"]
    return Entry("decision", f"{what} at {at_time(decision['t'])}", decision["reason"], _outcome(decision))


def _outcome(record: Record) -> str:
    """'stall 0.616 → 0.617 s, time left 167 → 173 s'."""
    predicted, actual = record["predicted"], record["actual"]
    return ", ".join(
        f"{name} {significant(predicted[key])} → {significant(actual[key])} {unit}"
        for key, (name, unit) in _PREDICTED.items()
        if key in actual
    )


def plural(count: int, word: str) -> str:
    return f"{format_count(count)} {word}{'' if count == 1 else 's'}"
