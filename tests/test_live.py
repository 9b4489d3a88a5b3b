"""The live view, from records of real and simulated rollouts: what it counts, and that it fits every terminal."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from simulated import DEVICE, SHAPE, make_requests, with_pages

import flexfloor
from flexfloor.cli.display import ProgressLines, make_display
from flexfloor.cli.train import show_step
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.report.live import LiveDisplay, can_draw
from flexfloor.report.live_runs import show_runs
from flexfloor.report.live_state import LiveState
from flexfloor.report.live_view import draw
from flexfloor.report.words import describe_resize, format_seconds, line_gap

Records = list[dict[str, Any]]


def simulate(lengths: list[int], workers: int = 3, policy: str = "release", chunk: int = 4, pages: int = 60) -> Records:
    ledger = LedgerWriter()
    fleet = SimulatedFleet(SHAPE, with_pages(pages, workers), workers, page_tokens=4)
    options: dict[str, Any] = {"policy": policy, "knowledge": "oracle", "profile": DEVICE, "chunk": chunk}
    flexfloor.rollout(fleet, make_requests(lengths), ledger=ledger, **options)
    return ledger.records


@pytest.fixture(scope="module")
def recorded(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Records:
    """A rollout on real workers, one of which leaves, as its file has it."""
    path = tmp_path_factory.mktemp("live") / "ledger.jsonl"
    sampling = flexfloor.SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [
        *flexfloor.make_requests([[5 + i] * 9 for i in range(3)], sampling=sampling),
        *flexfloor.make_requests([[50 + i] * 9 for i in range(3)], sampling=sampling.__class__(max_tokens=8)),
    ]
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2) as fleet:
        flexfloor.rollout(fleet, requests, policy="fixed:1", chunk=4, ledger=path)
    return read_ledger(path)


def states(records: Records) -> Iterator[tuple[dict[str, Any], LiveState]]:
    """Each record after the first, and the state after it; it is always the same object."""
    state = LiveState(records[0])
    for record in records[1:]:
        state.take(record)
        yield record, state


def text(state: LiveState, width: int = 80, height: int = 30, **options: Any) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in draw(state, width, height, **options)]


def check_against_ledger(records: Records) -> None:
    """What the state counts on the way, counted again from all records so far."""
    for index, (record, state) in enumerate(states(records), 2):
        seen = records[:index]
        bound = sum(len(names) for r in seen if r["type"] == "assign" for names in r["workers"].values())
        ended = [f for r in seen if r["type"] == "chunk" for f in r["finished"]]
        assert state.requests == sum(r["requests"] for r in seen if r["type"] == "submit")
        assert (state.finished, state.live, state.waiting) == (len(ended), bound - len(ended), state.requests - bound)
        assert state.response_tokens == sum(r["tokens"] for r in seen if r["type"] == "chunk")
        gone = {w for r in seen if r["type"] == "resize" and r["failed"] is None for w in r["leaving"]}
        assert state.active == [w for w in range(len(state.workers)) if w not in gone]
        if record["type"] == "chunk":
            for entry in record["workers"]:
                worker = state.workers[entry["worker"]]
                assert worker.kv_pages_used == entry["kv_pages"] <= (worker.kv_pages or 0)
                assert worker.state == (
                    "prefill" if entry["prefill_tokens"][-1] else "decode" if entry["batch"][-1] else "idle"
                )
                assert worker.live <= entry["batch"][-1]
        if record["type"] == "resize":
            assert {w.state for w in state.workers} <= {"stall", "released"}
            assert [w.experts for w in state.workers if w.state == "stall"] == [w["slots"] for w in record["workers"]]
    summary = summarize(records)
    assert state.ended
    assert (state.iteration, state.preemptions) == (summary.iterations, summary.preemptions)
    assert (state.finished, state.response_tokens) == (summary.requests, summary.response_tokens)


def test_a_real_rollout_is_counted_right(recorded: Records):
    assert any(r["type"] == "resize" for r in recorded)
    # Also of the worker that was gone before the first iteration.
    assert all((w.peak_memory_bytes or 0) > 2**20 for w in summarize(recorded).workers_detail)
    check_against_ledger(recorded)
    lines = text(list(states(recorded))[-1][1])
    assert lines[0].startswith("flexfloor  fixed:1  /")  # no word of emulation or simulation
    assert "6 of 6  live 0" in lines[1]
    assert "active 1 of 2 workers: 0  iteration 40" in lines[2]
    assert "not needed" in " ".join(lines[-2:])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=12),
    workers=st.integers(1, 4),
    policy=st.sampled_from(["static", "planned", "release", "flexfloor"]),
    chunk=st.integers(1, 16),
    width=st.integers(20, 200),
    height=st.integers(1, 40),
    name=st.text(max_size=40),
)
def test_simulated_rollouts_are_counted_right_and_fit(
    lengths: list[int], workers: int, policy: str, chunk: int, width: int, height: int, name: str
):
    records = simulate(lengths, workers, policy, chunk)
    records[0] |= {"fleet": records[0]["fleet"] | {"model": f"models/{name}"}}
    check_against_ledger(records)
    for _, state in states(records):
        lines = text(state, width, height, above=["earlier " * 12])
        assert len(lines) <= height
        assert all(cell_len(line) <= width and line.isprintable() for line in lines)
        assert all(line.isascii() for line in text(state, width, height, plain=True))


def test_the_lines_tell_where_times_come_from():
    records = simulate([5, 50])
    assert "simulated on round" in text(LiveState(records[0]))[0]
    fleet = records[0]["fleet"] | {"simulated": False, "pace": 16.0, "profile": "h200"}
    assert "emulated: 16 × h200" in text(LiveState(records[0] | {"fleet": fleet}))[0]


def test_a_worker_is_a_line_with_a_bar_of_its_pages():
    records = simulate([40, 40, 40, 3, 3, 3], workers=2, policy="static")
    chunk = records.index([r for r in records if r["type"] == "chunk"][4])
    state = list(states(records[: chunk + 1]))[-1][1]
    lines = text(state, 100)
    head = next(i for i, line in enumerate(lines) if line.startswith("worker"))
    assert lines[head].split() == ["worker", "KV", "pages", "in", "use", "live", "experts", "state"]
    for worker, line in zip(state.workers, lines[head + 1 :], strict=True):
        assert worker.kv_pages_used is not None
        assert worker.kv_pages
        number, bar, *cells = line.split()
        share = worker.kv_pages_used / worker.kv_pages
        assert abs(bar.count("━") - share * len(bar)) < 1
        told = [f"{share:.0%}", "of", str(worker.kv_pages), str(worker.live), str(worker.experts), worker.state]
        assert (int(number), cells) == (worker.worker, told)


def test_more_workers_than_lines_are_ranges():
    """1000 workers on 24 lines: every line sums up neighbours, nothing is lost."""
    start = simulate([5], workers=1)[0]
    memory = [{"worker": w, "slots": 3, "kv_pages": 10} for w in range(1000)]
    state = LiveState(start | {"fleet": start["fleet"] | {"workers": 1000}, "workers": memory})
    state.take({"type": "submit", "t": 0.0, "requests": 2000, "prompt_tokens": 1})
    state.take({"type": "assign", "t": 0.0, "iteration": 0, "workers": {str(w): ["a", "b"] for w in range(1000)}})
    for worker in state.workers[610:]:
        worker.state = "released"
    lines = text(state, 80, 24)
    assert 20 < len(lines) <= 24
    head = next(i for i, line in enumerate(lines) if "worker  " in line)
    assert lines[head].strip().startswith("worker")
    rows = [re.split(r"  +", line.strip()) for line in lines[head + 1 :]]
    ends = [tuple(map(int, row[0].split("–"))) for row in rows]
    assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]
    assert ends[-1][1] == 999
    sizes = [last - first + 1 for first, last in ends]
    assert [int(row[-3].replace(" ", "")) for row in rows] == [2 * size for size in sizes]
    assert [int(row[-2].replace(" ", "")) for row in rows] == [3 * size for size in sizes]
    by_state = Counter[str]()
    for row in rows:
        for part in row[-1].split(", "):
            count, name = part.split()
            by_state[name] += int(count)
    assert by_state == {"begins": 610, "released": 390}


def test_a_ledger_without_memory_shows_the_rest():
    """As older versions have written them."""
    records = simulate([5, 50], workers=2)
    for record in records:
        if record["type"] in ("start", "resize"):
            del record["workers"]
        for entry in record.get("workers", ()) if record["type"] == "chunk" else ():
            del entry["kv_pages"]
    for _, state in states(records):
        assert not any("%" in line or "━" in line for line in text(state) if "responses" not in line)
    assert "ran dry" in " ".join(text(state))


def test_time_left_is_what_the_policy_expects_then_what_endings_tell():
    """It gets shorter between endings too; by hand below."""
    records = simulate([5] * 5, workers=1)
    state = LiveState(records[0])
    state.take({"type": "submit", "t": 0.0, "requests": 5, "prompt_tokens": 5})
    state.take({"type": "assign", "t": 0.0, "iteration": 0, "workers": {"0": list("abcd")}})
    assert state.remaining_s() is None

    def chunk(t: float, ended: int) -> None:
        entry = {"worker": 0, "tokens": 8, "batch": [4], "prefill_tokens": [0], "seconds": [1.0]}
        state.take(
            {"type": "chunk", "first_iteration": 0, "iterations": 1, "t0": t - 1, "t1": t, "tokens": 8}
            | {"workers": [entry], "finished": [{"worker": 0, "iteration": 0}] * ended, "preemptions": []}
        )

    decision = {"type": "decision", "t": 1.0, "iteration": 0, "what": "order", "reason": "r"}
    state.take(decision | {"predicted": {"remaining_s": 6.0}})
    assert state.remaining_s() == 6.0
    chunk(2.0, 1)
    assert state.remaining_s() == 5.0
    chunk(6.0, 2)
    assert state.remaining_s() == 1.0
    chunk(8.0, 0)
    # The plan's time is over. The newer half at t = 6: 2 of 3 ended after t = 2, in 4 s with 3 live.
    # One waits, for which there is room after 4 s / 2; the one that is live ends with the hazard 2 / 12 s.
    left = 1 * 4 / 2 + 1 * 12 / 2
    for t in (8.0, 9.0, 13.0):
        chunk(t, 0)
        assert state.remaining_s() == pytest.approx(left - (t - 6))
    chunk(15.0, 0)  # that is over too: anew, with 9 s more of the one that is live
    assert state.remaining_s() == pytest.approx(1 * 13 / 2 + 1 * 21 / 2)
    chunk(32.0, 0)  # and again: nothing has ended for 26 s
    assert state.remaining_s() == pytest.approx(max(1 * 30 / 2 + 1 * 38 / 2, 26))
    chunk(33.0, 0)
    assert state.remaining_s() == pytest.approx(1 * 30 / 2 + 1 * 38 / 2 - 1)
    predicted = {"iteration": 1, "predicted": {"remaining_s": 1.0}}
    state.take({"type": "resize", "t0": 33.0, "t1": 33.5, "failed": "x"} | predicted)
    assert state.remaining_s() != 1.0


def test_in_real_time_a_policy_knows_the_time_left_once_it_has_seen_iterations():
    start = simulate([5], workers=1)[0]
    state = LiveState(start | {"fleet": start["fleet"] | {"simulated": False}})
    decision = {"type": "decision", "t": 0.0, "what": "order", "reason": "r", "predicted": {"remaining_s": 6.0}}
    state.take(decision | {"iteration": 0})
    assert state.remaining_s() is None
    state.take(decision | {"iteration": 1})
    assert state.remaining_s() == 6.0


def test_the_rate_is_that_of_the_last_while():
    records = simulate([200], workers=1, chunk=4)
    *_, state = (state for record, state in states(records[: len(records) // 2]))
    chunks = [r for r in records[: len(records) // 2] if r["type"] == "chunk"][-9:]
    expected = sum(c["tokens"] for c in chunks[1:]) / (chunks[-1]["t1"] - chunks[0]["t1"])
    assert state.tokens_per_s() == pytest.approx(expected)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_it_is_drawn_four_times_a_second_at_most_and_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    records = simulate([3, 9, 40, 220], workers=3, chunk=2)
    for between in (0.01, 1.0):
        now, terminal = [0.0], Terminal()
        with LiveDisplay(terminal, clock=lambda now=now: now[0]) as show:  # type: ignore[misc]
            show.status("step 3/10 done  reward 0.5000")
            for record in records:
                show.record(record)
                now[0] += between
        screen = pyte.Screen(80, 25)
        drawn = terminal.getvalue().split("responses ")[1:]
        pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
        assert len(drawn) <= len(records) + 3
        assert len(drawn) <= now[0] / 0.25 + 4  # the start, the first, the last, and the one that rich draws at the end
        assert len(drawn) >= min(now[0] / 0.27, len(records))
        assert "4 of 4" in drawn[-1]
        assert terminal.getvalue().count("step 3/10 done  reward 0.5000") == len(drawn)
        assert not screen.cursor.hidden
        assert [line.strip() for line in screen.display if line.strip()] == []


def test_training_shows_the_last_step_above_the_rollout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    screen = pyte.Screen(80, 25)
    with LiveDisplay(terminal) as show:
        log = {"step": 3, "steps": 10, "reward": 0.53, "loss": None, "completions/mean_length": 17.0}
        for record in simulate([3, 9], workers=1)[:4]:
            show.record(record)
        show_step(show, log)
        show_step(show, {"step": 3, "steps": 10, "eval_reward": 0.5})
        pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    assert lines[0].endswith("s  step 3/10  reward 0.5300  loss none  length 17.0")
    assert lines[1].endswith("s  step 3/10  held out: reward 0.5000")
    assert lines[2] == "step 3/10 done  reward 0.5300"
    assert lines[3].startswith("flexfloor  release  simulated on round")


def test_where_it_can_be_drawn(monkeypatch: pytest.MonkeyPatch):
    for term, drawable in (("xterm", True), ("dumb", False), ("", False)):
        monkeypatch.setenv("TERM", term)
        assert can_draw(Terminal()) == drawable
        assert isinstance(make_display(False, Terminal()), LiveDisplay) == drawable
    monkeypatch.setenv("TERM", "xterm")
    assert not can_draw(io.StringIO())
    assert isinstance(make_display(True, Terminal()), ProgressLines)


def test_runs_of_a_simulation_as_lines(capsys: pytest.CaptureFixture[str]):
    now = [0.0]
    with show_runs(300, quiet=False, stream=sys.stderr, clock=lambda: now[0]) as show:
        for number in range(300):
            show.now(f"run {number}")
            now[0] += 0.5
            show.done(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["    1.0s  2 of 300 runs done  now run 2", "    2.0s  4 of 300 runs done  now run 4"]
    assert len(lines) == 59 + 9  # every second of the first minute, then every ten
    with show_runs(3, quiet=True, stream=sys.stderr, clock=lambda: now[0]) as show:
        now[0] += 5
        show.now("run")
    assert capsys.readouterr().err == ""


def resize(**values: Any) -> dict[str, Any]:
    usual = {"leaving": [], "joining": [], "experts": 0, "requests": 0, "expert_bytes": 0, "kv_bytes": 0}
    return {"type": "resize", "t0": 1.0, "t1": 1.25, "reason": "why", "failed": None, "refused": False} | usual | values


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            resize(leaving=[2], experts=16, requests=1400, expert_bytes=2**20, kv_bytes=2**19),
            "worker 2 left: why; 16 experts, 1 400 requests moved, 1.5 MiB in 0.25 s",
        ),
        (resize(leaving=[1, 2]), "workers 1, 2 left: why; nothing moved, 0 B in 0.25 s"),
        (resize(requests=3, kv_bytes=2048), "moves: why; 3 requests moved, 2.0 KiB in 0.25 s"),
        (resize(leaving=list(range(20))), "20 workers left: why; nothing moved, 0 B in 0.25 s"),
        (resize(leaving=[1], failed="no room", refused=True), "worker 1 to leave refused: no room"),
        (resize(joining=[1], failed="lost"), "worker 1 to join failed: lost"),
    ],
)
def test_resizes_in_words(record: dict[str, Any], told: str):
    assert describe_resize(record) == told


def test_seconds_in_words():
    told = [format_seconds(s) for s in (0.034, 9.99, 59.7, 61, 3599, 7260)]
    assert told == ["0.034 s", "10 s", "1 min 00 s", "1 min 01 s", "59 min 59 s", "2 h 01 min"]


def test_lines_tell_every_resize_and_progress_once_a_second_at_first():
    """A second of the clock for every record, then much later ten seconds."""
    records = simulate([3, 9, 40, 220], workers=3, chunk=2)
    resizes = [r for r in records if r["type"] == "resize"]
    assert resizes
    for begun, between, gap in ((0.0, 0.5, 1.0), (100.0, 0.5, 10.0)):
        now = [0.0]
        stream = io.StringIO()
        show = ProgressLines(stream=stream, clock=lambda now=now: now[0])  # type: ignore[misc]
        show.begin_rollout("release")
        show.record(records[0])
        now[0] = begun
        for record in records[1:]:
            now[0] += between
            show.record(record)
        lines = stream.getvalue().splitlines()
        assert lines[0] == "    0.0s  policy release"
        assert [line.split("release  ")[1] for line in lines if " left: " in line] == list(
            map(describe_resize, resizes)
        )
        times = [float(line.split("s ")[0]) for line in lines[1:]]
        progress = [float(line.split("s ")[0]) for line in lines if "iteration" in line]
        assert len(progress) > 3
        before = [max(t for t in times if t < at) for at in progress[1:]]
        assert all(gap <= at - last <= gap + 2 * between for at, last in zip(progress[1:], before, strict=True))
    assert [line_gap(age) for age in (0, 59, 61, 3601)] == [1, 1, 10, 60]


def test_lines_of_training_leave_resizes_out():
    now, stream = [0.0], io.StringIO()
    show = ProgressLines(stream=stream, clock=lambda: now[0])
    show.status("step 1")
    for seconds in (0.0, 0.5):  # a short rollout and one of a minute
        for record in simulate([3, 9, 40, 220], workers=3, chunk=2):
            now[0] += seconds
            show.record(record)
        lines = stream.getvalue().splitlines()
        assert len(lines) == (0 if seconds == 0 else (now[0] - 0.5) // 10.5)
        assert all("iteration" in line for line in lines)
