"""The live view on a real terminal: what it shows while commands run, and what it leaves however they end.

On real workers once, else on a simulated fleet, which is there at once.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminal import Seen, run_on_terminal

from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import read_ledger

SLOW = (Path(__file__).with_name("slow_fleet.py"),)


@pytest.fixture
def files(tmp_path: Path, checkpoint: Callable[[str], Path]) -> list[str]:
    """A few short responses and a long one."""
    rows = [{"prompt_tokens": [5 + i] * 9, "max_tokens": 110 if i == 0 else 8 + 4 * i} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl"), "--force-lengths", "prompts"]
    return [*files, "--workers", "2", "--chunk", "2", "--knowledge", "oracle"]


def rollout(files: list[str], out: Path, *more: str, **options: Any) -> Seen:
    arguments = ["rollout", *files, "--policy", "release", "--out", str(out / "r.jsonl"), *more]
    return run_on_terminal(arguments, **({"program": SLOW} | options))


def running(screen: list[str]) -> bool:
    return any(line.endswith("decode") for line in screen)


def assert_restored(seen: Seen) -> None:
    """The cursor is there and nothing of the view is left."""
    assert not seen.cursor_hidden
    assert seen.output.rfind(b"\x1b[?25h") > seen.output.rfind(b"\x1b[?25l") > 0
    assert not any(line.startswith(("flexfloor  ", "responses ─", "responses ━", "active ")) for line in seen.last)


def test_a_rollout_is_seen_and_leaves_its_tables(files: list[str], tmp_path: Path):
    seen = rollout(files, tmp_path, rows=44)
    assert seen.code == 0
    assert_restored(seen)
    assert b"\x1b[32m" in seen.output  # colours
    both = seen.find("simulated on round", "active 2 of 2 workers", "decode", "tok/s")
    assert both is not None, seen.screens
    assert any(" of 8  live " in line for line in both)
    alone = seen.find("worker 1 left: ran dry", "active 1 of 2 workers: 0", "released")
    assert alone is not None, seen.screens[-5:]
    numbers = [line.split("iteration ")[1].split()[0] for s in seen.screens for line in s if "  iteration " in line]
    assert sorted(set(map(int, numbers))) == list(dict.fromkeys(map(int, numbers)))
    # The steps before it stay, then the tables.
    text = "\n".join(seen.last)
    for told in ("reading model and prompts", "checking numerics", "done", "Rollout", "Workers", "responses"):
        assert told in text
    assert summarize(read_ledger(tmp_path / "ledger.jsonl")).complete


def test_a_narrow_terminal_is_not_torn(files: list[str], tmp_path: Path):
    """Without colours, and with warnings and prints. Of an earlier drawing nothing stays: each part is there once."""
    environment = {"NO_COLOR": "1", "WARN_AT": "40", "PYTHONWARNINGS": "default"}
    seen = rollout(files, tmp_path, columns=60, rows=24, environment=environment, stdout=tmp_path / "out")
    assert seen.code == 0
    assert_restored(seen)
    for code in range(30, 38):
        assert f"\x1b[{code}m".encode() not in seen.output
    views = [s for s in seen.screens if any(line.startswith("flexfloor  release") for line in s)]
    assert len(views) > 3
    for screen in views:
        for begin in ("flexfloor  ", "responses ", "active ", "worker  "):
            assert sum(line.startswith(begin) for line in screen) <= 1, screen
    assert seen.find("something odd at 40", "active ")
    for at in range(40, 110, 2):  # nothing that a process says is lost or lands in the view
        assert seen.output.count(f"a worker at {at}\r\n".encode()) == 1
    # What goes to a file gets there, and only there.
    for told in ("Rollout", "a word from elsewhere at 40"):
        assert told in (tmp_path / "out").read_text()
        assert told.encode() not in seen.output


def test_compare_names_the_policy_and_what_has_ended(files: list[str], tmp_path: Path):
    arguments = ["compare", *files, "--policies", "static,release", "--out-dir", str(tmp_path / "o")]
    seen = run_on_terminal(arguments, program=SLOW, columns=110)
    assert seen.code == 0
    assert_restored(seen)
    first = seen.find("flexfloor  static-spread  ", "iteration")
    second = seen.find("static-spread: ", " tokens per occupied s with regrow", "flexfloor  release  ", "iteration")
    assert first is not None
    assert second is not None
    summary = json.loads((tmp_path / "o" / "static" / "summary.json").read_text())
    assert any(f"post-finish share {summary['post_finish_share']:.1%}" in line for line in second)
    assert "Comparison" in "\n".join(seen.last)


def test_ctrl_c_on_real_workers(files: list[str], tmp_path: Path):
    seen = rollout(files, tmp_path, "--pace", "10", program=("-m", "flexfloor"), when=running, then=b"\x03")
    assert_stopped(seen, 130, "interrupted")
    assert seen.find("emulated: 10 × h200", "active 2 of 2 workers", "decode", "tok/s")


def test_what_a_terminal_echoes_leaves_nothing_of_a_view_that_fills_it(files: list[str], tmp_path: Path):
    """^C beside a line as wide as the terminal would go on below it; keys that are pressed before it, too."""
    full = lambda screen: any(line.startswith("active 2") for line in screen) and any("decode" in s for s in screen)  # noqa: E731
    for columns, rows in ((40, 12), (44, 14)):
        seen = rollout(files, tmp_path, columns=columns, rows=rows, when=full, then=b"abc\x03")
        assert seen.code == 130
        assert_restored(seen)
        assert [line for line in seen.last if line][-1] == "flexfloor: interrupted"


def test_a_signal_in_the_middle(files: list[str], tmp_path: Path):
    assert_stopped(rollout(files, tmp_path, when=running, then=signal.SIGTERM), 143, "terminated")


def assert_stopped(seen: Seen, code: int, word: str) -> None:
    """The terminal is as it was, the last line says what happened."""
    assert seen.code == code
    assert_restored(seen)
    shown = [line for line in seen.last if line]
    assert shown[-1] == f"flexfloor: {word}"
    assert "checking numerics" in shown[-2]


def test_an_error_is_readable_below(files: list[str], tmp_path: Path):
    seen = rollout(files, tmp_path, environment={"FAIL_AT": "40"})
    assert seen.code == 1
    assert seen.find("  iteration ", "decode")
    assert_restored(seen)
    shown = [line for line in seen.last if line]
    assert shown[-1] == "flexfloor: error: worker 1 died (signal 9)"
    assert "checking numerics" in shown[-2]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(files: list[str], tmp_path: Path):
    seen = rollout(files, tmp_path, columns=120, rows=60, environment={"TERM": "dumb"})
    assert seen.code == 0
    assert b"\x1b" not in seen.output
    assert any("worker 1 left: ran dry" in line for line in seen.last)
    assert any("iteration" in line and "finished" in line for line in seen.last)


def test_a_simulation_names_the_run(tmp_path: Path):
    arguments = ["simulate", "--lengths", "R2", "--workers", "2", "--load", "8", "--seeds", "2"]
    seen = run_on_terminal([*arguments, "--policies", "static,flexfloor"], columns=100)
    assert seen.code == 0
    assert not seen.cursor_hidden
    assert seen.find("/6 runs", "2 workers, load 8, seed 0, planned history")
    assert seen.find("/6 runs", "2 workers, load 8, seed 1, flexfloor history")
    assert not any("runs" in line for line in seen.last)
