"""What a rollout tells its user: progress on stderr while it runs, tables on stdout at the end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from flexfloor.ledger.accounting import MOST_OVERRUNS
from flexfloor.report.live_state import LiveState
from flexfloor.report.live_view import describe_progress
from flexfloor.report.words import (
    describe_resize,
    describe_summary,
    format_count,
    format_rate,
    format_seconds,
    line_gap,
)
from flexfloor.world.memory import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.ledger.accounting import Summary, WorkerSummary


class Display(Protocol):
    """Where a command shows how far it is; a context manager. LiveDisplay on a terminal, else ProgressLines."""

    def phase(self, text: str) -> None:
        """A step of the way, always shown."""

    def status(self, text: str) -> None:
        """What further rollouts belong to, like a training step."""

    def begin_rollout(self, policy: str) -> None:
        """One of several rollouts begins."""

    def end_rollout(self, summary: Summary) -> None:
        """It has ended; its figures are shown."""

    def record(self, record: Mapping[str, Any]) -> None:
        """The next record of the ledger of a rollout."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def make_display(quiet: bool, stream: TextIO | None = None) -> Display:
    """The live view on a terminal, lines elsewhere, nothing if quiet."""
    from flexfloor.report.live import LiveDisplay, can_draw

    stream = stream or sys.stderr
    return LiveDisplay(stream) if not quiet and can_draw(stream) else ProgressLines(quiet, stream=stream)


class ProgressLines:
    """Lines with the seconds since the command began. quiet: none.

    Of a rollout, told by the records of its ledger: every resize, and where it is about once a second in its first
    minute, then every ten seconds, after an hour every minute. Of one of many, which `status` tells of, no resizes and
    nothing in its first ten seconds.
    """

    def __init__(
        self, quiet: bool = False, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._begun = self._last = self._rollout_begun = clock()
        self._state: LiveState | None = None
        self._shown = (0.0, 0)  # time and response tokens of the last progress line
        self._name = ""
        self._one_of_many = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _print(self, text: str) -> None:
        self._last = self._clock()
        if not self._quiet:
            print(f"{self._last - self._begun:7.1f}s  {text}", file=self._stream, flush=True)

    def phase(self, text: str) -> None:
        self._print(text)

    def status(self, text: str) -> None:
        self._one_of_many = True

    def begin_rollout(self, policy: str) -> None:
        self._name = f"{policy}  "
        self._print(f"policy {policy}")

    def end_rollout(self, summary: Summary) -> None:
        self._print(describe_summary(summary))

    def record(self, record: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        if record["type"] == "start":
            self._state, self._shown, self._rollout_begun = LiveState(record), (0.0, 0), self._clock()
        if self._state is None:
            return
        self._state.take(record)
        if record["type"] == "resize" and not self._one_of_many:
            self._print(f"{self._name}{describe_resize(record)}")
        elif record["type"] == "chunk" and self._clock() - max(self._last, self._rollout_begun) >= self._gap():
            self._progress(self._state)

    def _gap(self) -> float:
        gap = line_gap(self._clock() - self._rollout_begun)
        return max(gap, 10.0) if self._one_of_many else gap

    def _progress(self, state: LiveState) -> None:
        """Where the rollout is, with the rate since the last such line."""
        t, tokens = self._shown
        rate = (state.response_tokens - tokens) / max(state.t - t, 1e-3)
        self._shown = (state.t, state.response_tokens)
        left = f"  ~{format_seconds(seconds)} left" if (seconds := state.remaining_s()) is not None else ""
        self._print(f"{self._name}{describe_progress(state)}  {format_rate(rate)} tok/s{left}")


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
    """As wide as the terminal, or 120 columns where there is none; turned where it only fits so."""
    from rich.console import Console

    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 120)

    def fits(table: Table) -> bool:
        return console.measure(table, options=console.options.update(width=1000)).maximum <= console.width

    if not fits(table):
        table.padding = 0
        if not fits(table) and fits(turned := _turned(table)):
            table = turned
    console.print(table)


def _turned(table: Table) -> Table:
    """Its columns as rows; the heads are the first column."""
    from rich.table import Table

    turned = Table(box=table.box, title=table.title, title_justify="left", title_style=table.title_style, padding=0)
    rows = [[_unbroken(str(column.header)), *column.cells] for column in table.columns]
    for index, head in enumerate(rows[0]):
        turned.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in rows[1:]:
        turned.add_row(*row)
    return turned


def _unbroken(head: str) -> str:
    """On one line again; only post-finish and policies have a hyphen of their own where heads are broken."""
    return re.sub(r"(?<!post)(?<!static)-\n", "", head).strip().replace("-\n", "-").replace("\n", " ")


def _totals(summary: Summary) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, title="Rollout", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    path = "" if summary.numerics_path == summary.numerics else f" ({summary.numerics_path})"
    # What a killed run has is the rate without.
    known = summary.tokens_per_occupied_s_with_regrow is not None
    regrow, rate = ("with regrow", "tokens_per_occupied_s_with_regrow") if known else ("", "tokens_per_occupied_s")
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
        "per occupied worker-second": f"{format_rate(summary.occupied_rate)} tokens {regrow}",
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
                f"{summary.emulated[rate]:.4g} tokens per occupied s {regrow}"
            )
        rows["pace"] = f"{summary.pace:g} x {summary.profile} ({summary.paced_overrun_share:.1%} overran{valid})"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _workers(summary: Summary) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Workers", title_justify="left", title_style="bold")
    for name in ("worker", "requests", "tokens", "finished at", "released at", "post-finish", "peak KV", "peak memory"):
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
        format_bytes(worker.peak_memory_bytes) if worker.peak_memory_bytes else "",  # a simulated one has none
    )
