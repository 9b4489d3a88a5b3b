"""What a rollout tells its user: plain progress lines on stderr while it runs, tables on stdout at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from flexfloor.ledger.accounting import MOST_OVERRUNS
from flexfloor.world.memory import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.ledger.accounting import Summary, WorkerSummary
    from flexfloor.rollout import RolloutProgress


def format_count(count: float) -> str:
    """1842 → '1 842'."""
    return f"{count:,.0f}".replace(",", " ")


def format_rate(rate: float) -> str:
    """Like format_count, with a decimal where there are few digits."""
    return format_count(rate) if rate >= 100 else f"{rate:.1f}"


class ProgressLines:
    """Lines with the seconds since the command began; progress at most about once a second. quiet: none."""

    def __init__(
        self, quiet: bool = False, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._begun = clock()
        self._last = self._begun
        self._shown = (0.0, 0)  # time and response tokens of the last progress line
        self._name = ""

    def begin_rollout(self, name: str | None) -> None:
        """Further progress is of the rollout that begins now; its lines name it. None: no more of those."""
        self._shown = (0.0, 0)
        self._name = f"{name}  " if name else ""
        if name:
            self._print(f"policy {name}")

    def _print(self, text: str) -> None:
        self._last = self._clock()
        if not self._quiet:
            print(f"{self._last - self._begun:7.1f}s  {text}", file=self._stream, flush=True)

    def phase(self, text: str) -> None:
        """A step of the way, always shown."""
        self._print(text)

    def released(self, worker: int) -> None:
        """A worker that has left, always shown."""
        self._print(f"{self._name}worker {worker} left")

    def progress(self, state: RolloutProgress) -> None:
        """Where the rollout is, with the rate since the last such line; none when a line is less than a second old."""
        if self._clock() - self._last < 1:
            return
        t, tokens = self._shown
        rate = (state.response_tokens - tokens) / max(state.t - t, 1e-3)
        self._shown = (state.t, state.response_tokens)
        waiting = f"  waiting {format_count(state.waiting)}" if state.waiting else ""
        self._print(
            f"{self._name}iteration {format_count(state.iteration)}  finished {state.finished}/{state.requests}  "
            f"live {format_count(state.live)}{waiting}  {format_rate(rate)} tok/s"
        )


def warn_of_overruns(summary: Summary, stream: TextIO | None = None) -> None:
    """One line when the machine could not keep the pace, also in a quiet run: its times must not be used."""
    if summary.pace_valid is False:
        print(
            f"flexfloor: warning: {summary.policy}: {summary.paced_overrun_share:.1%} of the iterations took longer "
            f"than --pace {summary.pace:g} allows (limit {MOST_OVERRUNS:.0%}); times are not valid, raise --pace",
            file=stream or sys.stderr,
        )


def print_summary(summary: Summary, files: Mapping[str, Path], stream: TextIO | None = None) -> None:
    """The tables of a summary, and where the files are."""
    stream = stream or sys.stdout
    print_table(_totals(summary), stream)
    print_table(_workers(summary), stream)
    width = max(map(len, files))
    for what, path in files.items():
        print(f"  {what:<{width}}  {path}", file=stream)


def print_table(table: Table, stream: TextIO | None = None) -> None:
    """As wide as the terminal, or 120 columns where there is none."""
    from rich.console import Console

    stream = stream or sys.stdout
    Console(file=stream, highlight=False, width=None if stream.isatty() else 120).print(table)


def _totals(summary: Summary) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, title="Rollout", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    path = "" if summary.numerics_path == summary.numerics else f" ({summary.numerics_path})"
    rows = {
        "policy": summary.policy,
        "numerics": summary.numerics + path,
        "requests": format_count(summary.requests),
        "prompt tokens": format_count(summary.prompt_tokens),
        "response tokens": format_count(summary.response_tokens),
        "iterations": format_count(summary.iterations),
        "preemptions": format_count(summary.preemptions),
        "wall time": f"{summary.wall_s:.2f} s",
        "throughput": f"{format_rate(summary.throughput_tok_s)} tok/s",
        "per occupied worker-second": f"{format_rate(summary.tokens_per_occupied_s_with_regrow)} tokens",
        "post-finish share": f"{summary.post_finish_share:.1%}",
    }
    if summary.resizes:
        refused = sum(r.get("refused", False) for r in summary.resizes)
        failed = sum(r["failed"] is not None for r in summary.resizes) - refused
        note = "".join(f", {n} {what}" for n, what in ((failed, "failed"), (refused, "refused")) if n)
        rows["resizes"] = (
            f"{len(summary.resizes)}{note} ({summary.stall_s:.2f} s, {format_bytes(summary.moved_bytes)} moved)"
        )
        rows["regrow"] = f"{summary.regrow_s:.2f} s"
    if summary.pace is not None:
        valid = "" if summary.pace_valid else ", not valid"
        if summary.emulated is not None:
            rows["emulated"] = (
                f"{summary.emulated['wall_s']:.3g} s, {summary.emulated['throughput_tok_s']:.4g} tok/s, "
                f"{summary.emulated['tokens_per_occupied_s']:.4g} tokens per occupied s"
            )
        rows["pace"] = f"{summary.pace:g} x {summary.profile} ({summary.paced_overrun_share:.1%} overran{valid})"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _workers(summary: Summary) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Workers", title_justify="left", title_style="bold")
    for name in ("worker", "requests", "tokens", "finished at", "left at", "idle after", "peak KV", "peak memory"):
        table.add_column(name, justify="right")
    for worker in summary.workers_detail:
        table.add_row(*_worker_row(worker))
    return table


def _worker_row(worker: WorkerSummary) -> tuple[str, ...]:
    return (
        str(worker.worker),
        format_count(worker.requests),
        format_count(worker.tokens),
        f"{worker.finished_at_s:.2f} s",
        "" if worker.released_at_s is None else f"{worker.released_at_s:.2f} s",
        f"{worker.post_finish_share:.1%}",
        "" if worker.peak_kv_bytes is None else format_bytes(worker.peak_kv_bytes),
        "" if worker.peak_memory_bytes is None else format_bytes(worker.peak_memory_bytes),
    )
