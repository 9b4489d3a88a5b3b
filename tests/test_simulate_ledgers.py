"""`flexfloor simulate --ledgers`: a ledger of every run, that a report can be made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated import DEVICE, SHAPE, make_requests, with_pages
from test_cli import refusal
from test_simulate_cli import MODEL, SCENARIO

import flexfloor
from flexfloor.cli import main
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.simulate.runs import Cell, ledger_name


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    scenario = tmp_path / "short.toml"
    scenario.write_text(SCENARIO)
    return ["simulate", "--lengths", str(scenario), "--model-config", MODEL, "--quiet", "--seeds", "2"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_every_run_has_its_ledger(command: list[str], tmp_path: Path, jobs: str, capsys: pytest.CaptureFixture[str]):
    folder, out = tmp_path / "ledgers", tmp_path / "result.json"
    policies = ["--policies", "static,flexfloor", "--max-slowdown", ".02,.1", "--knowledge", "none,history"]
    assert main([*command, *policies, "--ledgers", str(folder), "--out", str(out), "--jobs", jobs]) == 0
    assert f"ledgers  {folder}" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2 * (1 + 2 + 4)  # static knows nothing, planned is always there, flexfloor has all
    named = set()
    for run in runs:
        cell = Cell(run["workers"], run["load"], run["seed"])
        path = folder / ledger_name(cell, run["ran"], run["knowledge"], run["max_slowdown"])
        named.add(path)
        assert json.loads(json.dumps(summarize(read_ledger(path)).to_json())) == run["summary"]
    assert named == set(folder.iterdir())
    report = tmp_path / "report.html"
    assert main(["report", *map(str, sorted(named)[:2]), "--out", str(report)]) == 0
    assert "simulated on" in report.read_text()


def test_names_are_plain():
    assert ledger_name(Cell(8, 32, 5), "fixed:4", "oracle", None) == "fixed-4-oracle-8x32-seed5.jsonl"
    assert ledger_name(Cell(8, 32, 5), "flexfloor", None, 0.02) == "flexfloor-none-8x32-seed5-slowdown0.02.jsonl"


def test_a_folder_that_cannot_be(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert "--ledgers" in refusal(capsys, *command, "--ledgers", tmp_path / "file")


def test_a_simulated_worker_has_no_process_and_so_no_memory_of_one():
    ledger = LedgerWriter()
    fleet = SimulatedFleet(SHAPE, with_pages(60, 2), 2, page_tokens=4)
    options: dict[str, Any] = {"policy": "static", "knowledge": "oracle", "profile": DEVICE}
    summary = flexfloor.rollout(fleet, make_requests([3, 9]), ledger=ledger, **options).summary
    assert [w.peak_memory_bytes for w in summary.workers_detail] == [None, None]
