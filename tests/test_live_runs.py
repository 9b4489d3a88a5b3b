"""What is shown of many simulated runs: the view of the one that runs below a bar, on a terminal; lines elsewhere."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from simulated import DEVICE, SHAPE, make_requests, with_pages
from terminal import run_on_terminal

import flexfloor
from flexfloor.cli.simulate import make_experiment
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.events import LedgerWriter
from flexfloor.report.live_runs import show_runs
from flexfloor.settings import SimulateSettings
from flexfloor.simulate.runs import Cell, run_all


def records() -> list[dict[str, Any]]:
    ledger = LedgerWriter()
    fleet = SimulatedFleet(SHAPE, with_pages(60, 2), 2, page_tokens=4)
    options: dict[str, Any] = {"policy": "static", "knowledge": "oracle", "profile": DEVICE, "chunk": 2}
    flexfloor.rollout(fleet, make_requests([3, 9, 40, 220]), ledger=ledger, **options)
    return ledger.records


def test_lines_within_a_long_run():
    """A run of many seconds is told of about once a second, with where it is, and not only when it has ended."""
    now, stream = [0.0], io.StringIO()
    with show_runs(2, quiet=False, stream=stream, clock=lambda: now[0]) as show:
        show.now("static-spread")
        for record in records():
            now[0] += 0.25
            show.record(record)
        show.done(1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == int(now[0])
    assert all("0 of 2 runs done  now static-spread  iteration " in line for line in lines)
    assert "finished 3/4  live 1" in lines[-1]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "seen"), [(0.5, False), (5.0, True)])
def test_a_run_is_shown_once_it_has_lasted(seconds: float, seen: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal, begun = Terminal(), time.monotonic()
    slowed = records()
    now = [0.0]
    with show_runs(2, quiet=False, stream=terminal, clock=lambda: now[0]) as show:
        show.now("static-spread")
        for record in slowed[:-1]:
            now[0] += seconds / len(slowed)
            show.record(record)
        time.sleep(1.2)  # for the thread that draws
    shown = terminal.getvalue()
    assert ("simulated on round" in shown) == seen
    assert shown.count("responses ") <= (time.monotonic() - begun) * 2 + 2


def test_the_view_of_a_simulated_run_on_a_terminal():
    """Below the bar, labelled; Ctrl-C leaves nothing of it, whatever the terminal echoes."""
    arguments = ["simulate", "--lengths", "R2", "--workers", "64", "--load", "64", "--policies", "static"]

    def shown(screen: list[str]) -> bool:
        return any(line.startswith("active 64 of 64 workers") for line in screen) and "iteration 0" not in str(screen)

    for columns, rows in ((100, 30), (40, 12)):
        seen = run_on_terminal(arguments, columns=columns, rows=rows, when=shown, then=b"\x03")
        assert seen.code == 130
        both = seen.find("/16 runs", "flexfloor  planned", "simulated on ", "responses ", "of simulated time")
        assert both is not None, "\n".join(seen.screens[-2])
        assert [line for line in seen.last if line] == ["flexfloor: interrupted"]
        assert not seen.cursor_hidden


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_runs_is_told_while_it_runs(jobs: int):
    """With one process every record of every run comes by; with more, what runs is told again and again."""
    settings = SimulateSettings(lengths="R2", workers=(2,), load=(8,), policies=("static-spread",), jobs=jobs)
    told: list[str] = []
    kinds: list[str] = []
    runs = run_all(
        make_experiment(settings),
        [Cell(2, 8, seed) for seed in range(2)],
        jobs=jobs,
        on_begin=told.append,
        on_record=lambda record: kinds.append(record["type"]),
    )
    if jobs == 1:
        assert kinds.count("start") == kinds.count("end") == len(runs)
        assert "2 workers, load 8, seed 1, static-spread" in told
        assert "2 workers, load 8, seed 1, bound of static-spread" in told
    else:
        assert kinds == []
        assert set(told) == {"2 workers, load 8, seed 0", "2 workers, load 8, seed 1"} or len(set(told)) == 1
        assert len(told) > 2  # the processes take seconds to begin
