"""Scalars that `--tensorboard` writes, read back by TensorBoard's own reader, against summary.json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated import DEVICE, SHAPE, make_requests, with_pages

import flexfloor
from flexfloor.cli import main
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.ledger.metrics import rollout_metrics
from flexfloor.ledger.timing import split_time
from flexfloor.report import tensorboard as module
from flexfloor.report.tensorboard import write_scalars

SINGLE = 1e-6  # relative error of the single-precision numbers that TensorBoard keeps


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalar → (step, value) of the run in this folder alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def files(tmp_path: Path, checkpoint: Callable[[str], Path]) -> list[str]:
    rows = [{"prompt_tokens": [5 + i] * (3 + 9 * i), "max_tokens": 10 + 15 * i} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl"), "--quiet"]
    return [*own, "--force-lengths", "prompts", "--tensorboard", str(tmp_path / "board")]


def assert_equal_to_summary(scalars: dict[str, list[tuple[int, float]]], summary: dict[str, Any], index: int) -> None:
    shared = {
        "throughput_tok_s": summary["throughput_tok_s"],
        "tokens_per_occupied_s": summary["tokens_per_occupied_s"],
        "tokens_per_occupied_s_with_regrow": summary["tokens_per_occupied_s_with_regrow"],
        "post_finish_share": summary["post_finish_share"],
        "response_tokens": summary["response_tokens"],
        "iterations": summary["iterations"],
        "occupied_iterations": summary["occupied_iterations"],
        "preemptions": summary["preemptions"],
        "regrow_s": summary["regrow_s"],
        "resize_s": summary["stall_s"],
        "moved_mib": summary["moved_bytes"] / 2**20,
    }
    for name, value in shared.items():
        step, told = scalars[f"flexfloor/{name}"][index]
        assert (step, told) == (summary["step"], pytest.approx(value, rel=SINGLE)), name


def test_rollouts_of_several_steps_are_one_run(files: list[str], tmp_path: Path):
    out = tmp_path / "out" / "r.jsonl"
    assert main(["rollout", *files, "--out", str(out), "--step", "3", "--policy", "fixed:1"]) == 0
    summary = json.loads((out.parent / "summary.json").read_text())
    start, *others = read_ledger(out.parent / "ledger.jsonl")
    write_scalars(tmp_path / "board", [start | {"settings": start["settings"] | {"step": 4}}, *others])
    scalars = read(tmp_path / "board" / "fixed-1")
    assert all(len(points) == 2 for points in scalars.values())
    assert_equal_to_summary(scalars, summary, 0)
    assert_equal_to_summary(scalars, summary | {"step": 4}, 1)
    series = read(tmp_path / "board" / "fixed-1" / "step-000003")
    assert series["flexfloor/active_workers"][-1] == (summary["iterations"], 1)
    assert series["flexfloor/live_requests"][-1][1] == 0


def test_compare_makes_a_run_for_each_policy(files: list[str], tmp_path: Path):
    policies = ("static", "release")
    out = tmp_path / "compared"
    assert main(["compare", *files, "--out-dir", str(out), "--policies", ",".join(policies), "--step", "7"]) == 0
    for name in policies:
        summary = json.loads((out / name / "summary.json").read_text())
        scalars = read(tmp_path / "board" / summary["policy"])
        assert_equal_to_summary(scalars, summary, 0)


def test_a_simulated_rollout_with_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names and values are those that a trainer logs; a series is thinned, but ends where the rollout does."""
    monkeypatch.setattr(module, "MOST_POINTS", 8)
    requests = make_requests([5, 9, 30, 90])
    ledger = LedgerWriter()
    fleet = SimulatedFleet(SHAPE, with_pages(60, 2, DEVICE), 2, page_tokens=4)
    flexfloor.rollout(fleet, requests, policy="release", knowledge="oracle", profile=DEVICE, chunk=4, ledger=ledger)
    run = write_scalars(tmp_path, ledger.records)
    expected = rollout_metrics(summarize(ledger.records), split_time(ledger.records))
    assert {k: v[0][1] for k, v in read(run).items()} == {
        f"flexfloor/{name}": pytest.approx(value, rel=SINGLE) for name, value in expected.items()
    }
    chunks = [r for r in ledger.records if r["type"] == "chunk"]
    live = read(run / "step-000000")["flexfloor/live_requests"]
    assert len(chunks) > 2 * 8 >= 2 * (len(live) - 1) > 8
    ends = {c["first_iteration"] + c["iterations"]: c for c in chunks}
    for iteration, value in live:
        ended = sum(len(c["finished"]) for at, c in ends.items() if at <= iteration)
        assert value == len(requests) - ended
    assert live[-1][0] == max(ends)


@pytest.mark.parametrize("command", ["rollout", "compare"])
def test_without_the_package_nothing_starts(
    command: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    own = {"rollout": ["--out", str(tmp_path / "o" / "r.jsonl")], "compare": ["--out-dir", str(tmp_path / "o")]}
    arguments = [command, *files, *own[command], *(["--policies", "static"] if command == "compare" else [])]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    told = "flexfloor: error: --tensorboard needs the package tensorboard; pip install 'flexfloor[tensorboard]'\n"
    assert err == told
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "models") == ["p.jsonl"]


def test_an_impossible_folder_is_refused_before_the_rollout(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """/proc takes no files, though it says that it may be written by root."""
    assert main(["rollout", *files[:-1], "/proc/foo", "--out", str(tmp_path / "o" / "r.jsonl")]) == 2
    assert re.fullmatch(r"flexfloor: error: --tensorboard /proc/.*\n", capsys.readouterr().err)
    assert not (tmp_path / "o").exists()


def test_a_file_in_place_of_the_folder_is_refused(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "board").write_text("mine")
    assert main(["rollout", *files, "--out", str(tmp_path / "o" / "r.jsonl")]) == 2
    assert "board is a file; name a folder" in capsys.readouterr().err
    assert (tmp_path / "board").read_text() == "mine"
    assert not (tmp_path / "o").exists()
