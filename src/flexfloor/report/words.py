"""Records of decisions in words, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexfloor.ledger.accounting import Summary
from flexfloor.world.memory import format_bytes

_MOST_NAMED = 8  # workers that are named one by one


def format_count(count: float) -> str:
    """1842 → '1 842'."""
    return f"{count:,.0f}".replace(",", " ")


def shorten_name(name: str, most: int = 48) -> str:
    """Names come from ledgers, and may be of any length."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def format_rate(rate: float) -> str:
    """Like format_count, with a decimal where there are few digits."""
    return format_count(rate) if rate >= 100 else f"{rate:.1f}"


def name_workers(workers: Sequence[int]) -> str:
    """[2] → 'worker 2', [2, 5] → 'workers 2, 5'; how many, where that would be too long."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    if len(workers) > _MOST_NAMED:
        return f"{len(workers)} workers"
    return f"workers {', '.join(map(str, workers))}"


def describe_resize(record: Mapping[str, Any]) -> str:
    """A `resize` record: who left or joined, why, what moved (bytes over all workers) and the seconds it took.

    'worker 1 left: ran dry; 16 experts, 2 requests moved, 6.6 MiB in 0.034 s'
    """
    done = record["failed"] is None
    words = {"leaving": "left" if done else "to leave", "joining": "joined" if done else "to join"}
    changes = [f"{name_workers(record[what])} {word}" for what, word in words.items() if record[what]]
    told = " and ".join(changes) or "moves"
    if not done:
        return f"{told} {'refused' if record.get('refused') else 'failed'}: {record['failed']}"
    return f"{told}: {record['reason']}; {_moved(record)} in {record['t1'] - record['t0']:.2g} s"


def _moved(record: Mapping[str, Any]) -> str:
    parts = [f"{format_count(n)} {what}" for what in ("experts", "requests") if (n := record[what])]
    return f"{', '.join(parts) or 'nothing'} moved, {format_bytes(record['expert_bytes'] + record['kv_bytes'])}"


def format_seconds(seconds: float) -> str:
    """0.34 → '0.34 s', 12.3 → '12 s', 130 → '2 min 10 s', 7260 → '2 h 01 min'."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe_summary(summary: Summary) -> str:
    """The figures of a rollout that policies are compared by, in a line."""
    regrow = "" if summary.tokens_per_occupied_s_with_regrow is None else " with regrow"
    return (
        f"{summary.policy}: {format_seconds(summary.wall_s)}, {format_rate(summary.throughput_tok_s)} tok/s, "
        f"{format_rate(summary.occupied_rate)} tokens per occupied s{regrow}, "
        f"post-finish share {summary.post_finish_share:.1%}"
    )


def line_gap(age_s: float) -> float:
    """Seconds between two progress lines of something that has run for `age_s`, so that a log does not fill."""
    return 1.0 if age_s < 60 else 10.0 if age_s < 3600 else 60.0
