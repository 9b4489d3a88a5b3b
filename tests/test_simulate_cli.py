"""`flexfloor simulate` and what it is made of: rows worked out by hand, small experiments, what is refused, Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from flexfloor.cli import main
from flexfloor.cli.options import parse_settings
from flexfloor.errors import InputError
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.settings import SimulateSettings
from flexfloor.simulate import runs as module
from flexfloor.simulate.results import Spread, make_rows
from flexfloor.simulate.runs import Cell, Experiment, Run, fixed_counts, run_cell
from flexfloor.simulate.scenarios import load_scenario
from flexfloor.world.costs import PROFILES
from flexfloor.world.model_config import shape_from_config

SCENARIO = """
kind = "lognormal"
workers = 3
load = 6
samples = 3
prompt_tokens = 40
log_mean = 5
between_sd = 0.6
within_sd = 0.4
max_tokens = 600
memory_bytes = 10e9
reserve_bytes = 1e9
"""
MODEL = "olmoe-1b-7b"
FLEET = {"workers": 4, "numerics": "none", "numerics_path": "none", "model": "m", "versions": {}, "simulated": True}
START = {"type": "start", "schema": 1, "policy": "static", "settings": {}, "fleet": FLEET}


def summary(per_occupied: float, throughput: float, **values: Any) -> Summary:
    usual: dict[str, Any] = {"wall_s": 10.0, "occupied_worker_s": 20.0, "response_tokens": 1000}
    own = {"tokens_per_occupied_s_with_regrow": per_occupied, "throughput_tok_s": throughput}
    return replace(summarize([START]), **(usual | own | values))


def run(policy: str, seed: int, per_occupied: float, throughput: float, **values: Any) -> Run:
    """knowledge, max_slowdown, ran: of the run; all else of its summary."""
    place = {name: values.pop(name, None) for name in ("knowledge", "max_slowdown")}
    ran = values.pop("ran", policy)
    own = summary(per_occupied, throughput, **values)
    return Run(Cell(4, 8, seed), policy, ran, **place, summary=own, bound_s=5.0, reference_s=10.0)


def test_rows_are_medians_and_minima_of_ratios_seed_by_seed():
    known: dict[str, Any] = {"knowledge": "none", "max_slowdown": 0.02}
    moved = {"leaving": [1], "joining": [], "failed": None}
    runs = [
        *(run("static-spread", seed, 10.0, 100.0 * (1 + seed)) for seed in range(3)),
        *(run("planned", seed, 20.0, 200.0, knowledge="none") for seed in range(3)),
        *(run("planned", seed, 1.0, 1.0, knowledge="oracle") for seed in range(3)),
        *(run("fixed:best", seed, 30.0, 150.0, ran="fixed:2", **known) for seed in range(3)),
        run("flexfloor", 0, 20.0, 100.0, stall_s=1.0, regrow_s=5.0, **known),
        run("flexfloor", 1, 40.0, 400.0, stall_s=2.0, resizes=(moved, moved | {"failed": "no"}), **known),
        run("flexfloor", 2, 60.0, 150.0, stall_s=9.0, resizes=(moved, moved), **known),
    ]
    rows = {(row.policy, row.knowledge): row for row in make_rows(runs)}
    assert len(rows) == 5
    own = rows["flexfloor", "none"]
    assert own.ratios["static-spread"] == (Spread(4.0, 2.0), Spread(1.0, 0.5))
    assert own.ratios["planned"] == (Spread(2.0, 1.0), Spread(0.75, 0.5))
    assert own.ratios["fixed:best"][1] == Spread(1.0, 100 / 150)
    assert "static-grouped" not in own.ratios
    assert own.stall_share == Spread(0.2, 0.1)
    assert own.resizes == 1
    assert own.of_bound == Spread(0.25, 5 / 40)
    assert own.of_reference == Spread(0.5, 0.25)
    assert rows["fixed:best", "none"].ran == ("fixed:2",) * 3
    assert rows["static-spread", None].ratios == {"static-spread": (Spread(1.0, 1.0), Spread(1.0, 1.0))}


def test_the_front_is_what_no_comparable_row_beats():
    rows = make_rows(
        [
            run("static-spread", 0, 10.0, 100.0),
            run("planned", 0, 11.0, 99.0, knowledge="none"),
            run("flexfloor", 0, 30.0, 98.0, knowledge="none", max_slowdown=0.02),
            run("flexfloor", 0, 25.0, 98.0, knowledge="none", max_slowdown=0.1),
            run("planned", 0, 20.0, 100.0, knowledge="oracle"),
        ]
    )
    assert [row.pareto for row in rows] == [False, True, True, False, True]


def test_smaller_fleets_that_are_tried():
    assert fixed_counts(16) == [12, 8, 6, 4, 3, 2, 1]
    assert fixed_counts(32)[:4] == [24, 16, 12, 8]
    assert fixed_counts(3) == [2, 1]
    assert fixed_counts(1) == []


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "short.toml"
    path.write_text(SCENARIO)
    return path


def experiment(scenario: Path, *policies: str, **values: Any) -> Experiment:
    loaded = load_scenario(str(scenario))
    device = loaded.device(PROFILES["h200"])
    return Experiment(loaded, shape_from_config(MODEL), device, policies, **values)


def test_the_best_fixed_fleet_keeps_the_throughput(scenario: Path, monkeypatch: pytest.MonkeyPatch):
    """planned: 10 at 100 tok/s; of the smaller ones 12 and 8 are quick enough at 10%, 8 is better; 6 is too slow."""
    found = {"planned": (10, 100), "fixed:12": (13, 99), "fixed:8": (20, 91), "fixed:6": (26, 80), "fixed:4": (40, 70)}
    asked: list[str] = []

    def simulate(self: Any, policy: str, knowledge: str, slowdown: float | None) -> Summary:
        asked.append(policy)
        return summary(*found[policy])

    monkeypatch.setattr(module._CellRunner, "_simulate", simulate)
    setup = experiment(scenario, "fixed:best", max_slowdown=(0.02, 0.0, 0.1))
    chosen = {r.max_slowdown: r.ran for r in run_cell(setup, Cell(16, 2, 0)) if r.policy == "fixed:best"}
    assert chosen == {0.02: "fixed:12", 0.0: "planned", 0.1: "fixed:8"}
    # 0.9 · 0.9 · 100 = 81: after 6 and 4 nothing smaller is tried.
    assert asked == ["planned", "fixed:12", "fixed:8", "fixed:6", "fixed:4"]


def test_policies_run_once_for_what_they_depend_on(scenario: Path, monkeypatch: pytest.MonkeyPatch):
    asked: Counter[tuple] = Counter()

    def simulate(self: Any, policy: str, knowledge: str, slowdown: float | None) -> Summary:
        asked[policy, knowledge, slowdown] += 1
        return summary(1.0, 1.0)

    monkeypatch.setattr(module._CellRunner, "_simulate", simulate)
    setup = experiment(scenario, "static-spread", "flexfloor", knowledge=("none", "oracle"), max_slowdown=(0.02, 0.1))
    runs = list(run_cell(setup, Cell(3, 4, 0)))
    assert len(runs) == module.count_runs(setup) == 7
    assert set(asked.values()) == {1}
    assert set(asked) == {
        ("static-spread", "none", None),
        *(("planned", knowledge, None) for knowledge in ("none", "oracle")),
        *(("flexfloor", knowledge, slowdown) for knowledge in ("none", "oracle") for slowdown in (0.02, 0.1)),
    }


def test_no_run_beats_the_bound(scenario: Path):
    policies = ("static-spread", "static-grouped", "release", "flexfloor", "fixed:2")
    setup = experiment(scenario, *policies, knowledge=("none", "history", "shuffled", "oracle"), max_slowdown=(0.5,))
    for done in run_cell(setup, Cell(3, 8, 11)):
        assert 0 < done.bound_s <= done.summary.occupied_worker_s, done.policy
        assert done.reference_s is not None
        assert done.bound_s <= done.reference_s
        assert done.summary.simulated
        assert done.summary.requests == 24


def command(scenario: Path, *more: str) -> list[str]:
    return ["simulate", "--lengths", str(scenario), "--model-config", MODEL, *more]


def test_one_table_and_one_file(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    options = ("--seeds", "2", "--first-seed", "7", "--knowledge", "none,oracle", "--workers", "2,3")
    assert main([*command(scenario, *options), "--policies", "static,flexfloor,fixed:best", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Simulated: short on h200, 2 seeds")
    assert "nothing here was measured" in text
    written = json.loads(out.read_text())
    assert written["simulated"] is True
    assert written["scenario"]["log_mean"] == 5
    assert written["device"]["memory_bytes"] == 10e9
    assert {"flexfloor", "numpy"} <= set(written["versions"])
    assert "clairvoyant" in written["definitions"]["of_reference"]
    # static once, planned for each knowledge though nobody asked, flexfloor and fixed:best for each.
    assert len(written["runs"]) == 2 * 2 * (1 + 3 * 2)
    assert {run["seed"] for run in written["runs"]} == {7, 8}
    assert all(run["summary"]["simulated"] for run in written["runs"])
    by_place = {
        (r["workers"], r["seed"], r["policy"], r["knowledge"]): r["summary"]["throughput_tok_s"]
        for r in written["runs"]
    }
    row = next(r for r in written["rows"] if (r["policy"], r["knowledge"], r["workers"]) == ("flexfloor", "oracle", 3))
    ratios = [by_place[3, s, "flexfloor", "oracle"] / by_place[3, s, "static-spread", None] for s in (7, 8)]
    assert row["ratios"]["static-spread"][1]["median"] == pytest.approx(sum(ratios) / 2)
    assert row["ratios"]["static-spread"][1]["least"] == pytest.approx(min(ratios))


def test_several_processes_give_the_same(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    told = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        options = ("--seeds", "2", "--policies", "static", "--quiet", "--jobs", jobs, "--out", str(out))
        assert main(command(scenario, *options)) == 0
        told.append(json.loads(out.read_text())["runs"])
        assert capsys.readouterr().err == ""
    for runs in told:
        for each in runs:
            each["summary"].pop("decisions")  # how long a plan took is told with it
    assert told[0] == told[1]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lengths", "R9"), "scenario 'R9' is not known; there is R1, R2"),
        (("--lengths", "dapo"), "give --trace FILE.csv"),
        (("--policies", "static,best"), "policy 'best' is not known"),
        (("--policies", "static,static-spread"), "--policies: a value is given twice"),
        (("--policies", "static,"), "--policies: give values with one comma between them"),
        (("--knowledge", "all"), "--knowledge: 'all' is not known; there is none, history, shuffled, oracle"),
        (("--max-slowdown", "1.5"), "--max-slowdown: give shares of at least 0 and below 1"),
        (("--max-slowdown", "x"), "--max-slowdown"),
        (("--workers", "0"), "--workers: give whole numbers from 1"),
        (("--workers", "2,x"), "--workers"),
        (("--workers", "4,4097"), "--workers: at most 4096 are simulated, got '4,4097'"),
        (("--load", "1000000000000"), "--load: at most 1000000 are simulated"),
        (("--load", "-3"), "--load: give whole numbers from 1"),
        (("--seeds", "0"), "--seeds"),
        (("--profile", "b300"), "profile 'b300' is not known"),
        (("--model-config", "gone.json"), "gone.json"),
        (("--policies", "fixed:9"), "policy 'fixed:9': the fleet has 3 workers"),
        (("--workers", "1"), "do not hold the weights and the KV of a request of 656 tokens; give at least 2"),
        (("--trace", "x.csv"), "--trace x.csv: the lengths of"),
        (("--out", "."), "--out"),
        (("--hurry",), "--hurry"),
    ],
)
def test_refusals_are_one_line(scenario: Path, capsys: pytest.CaptureFixture[str], arguments: tuple, told: str):
    given = command(scenario)
    if arguments[0] in given:
        at = given.index(arguments[0])
        given[at : at + 2] = arguments
    else:
        given += arguments
    assert main([*given, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert (out, err.count("\n")) == ("", 1)


def test_the_file_of_lengths_is_not_written_over(scenario: Path, capsys: pytest.CaptureFixture[str]):
    assert main(command(scenario, "--out", str(scenario))) == 2
    assert "--out and --lengths are the same file" in capsys.readouterr().err
    assert scenario.read_text() == SCENARIO


def test_settings_from_a_file(tmp_path: Path):
    config = tmp_path / "c.toml"
    config.write_text('lengths = "R1"\nmodel_config = "mixtral-8x7b"\nworkers = [4, 8]\nmax_slowdown = [0.1]\n')
    settings = parse_settings(SimulateSettings, config, {"workers": "6"})
    assert (settings.architecture, settings.workers, settings.max_slowdown) == ("mixtral-8x7b", (6,), (0.1,))
    config.write_text("temperature = 1\n")
    with pytest.raises(InputError, match="unknown key 'temperature'"):
        parse_settings(SimulateSettings, config, {})


@pytest.mark.parametrize(("jobs", "busy_s"), [("1", 1.5), ("2", 1.5), ("2", 0.0), ("2", 0.3)])
def test_ctrl_c_leaves_nothing(tmp_path: Path, jobs: str, busy_s: float):
    """busy_s: what each process has worked until then, so that some of them still import."""
    out = tmp_path / "r.json"
    arguments = ["simulate", "--lengths", "R2", "--jobs", jobs, "--seeds", "500", "--out", str(out), "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flexfloor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    began = psutil.Process(process.pid)
    if jobs == "1":
        while began.cpu_times().user < busy_s and process.poll() is None:
            time.sleep(0.05)
    else:  # two that simulate, and the one that multiprocessing keeps for itself
        while sum(child.cpu_times().user >= busy_s for child in began.children()) < 3 - (busy_s > 0):
            assert process.poll() is None
            time.sleep(0.01)
    children = began.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    text, err = process.communicate(timeout=20)
    assert (process.returncode, text) == (130, "")
    assert err == "flexfloor: interrupted\n"
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not out.exists()


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gates", Path(__file__).parents[1] / "benchmarks" / "gates.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["gates"] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_gates_ask_for_what_they_judge(gates: ModuleType):
    case = next(case for case in gates.CASES if case.name == "lognormal 16 × 32 h200")
    policies, knowledge = gates.needed(case, ["B", "G"], False)
    assert set(policies) == {"static-spread", "fixed:best", "planned", "flexfloor"}
    assert knowledge == ("history", "none", "shuffled")
    assert gates.needed(case, ["C"], False) == ((), ())
    assert len(gates.GRID) == 54
    assert set(gates.needed(gates.GRID[0], ["F", "G", "H"], False)[0]) == {"planned", "static-spread", "flexfloor"}
    known: dict[str, Any] = {"max_slowdown": 0.02}
    runs = [
        run("static-spread", 0, 10.0, 100.0),
        run("planned", 0, 12.0, 101.0, knowledge="history"),
        run("fixed:best", 0, 20.0, 100.0, knowledge="history", ran="fixed:8", **known),
        run("flexfloor", 0, 27.0, 97.9, knowledge="history", **known),
        run("flexfloor", 0, 26.0, 99.0, knowledge="none", **known),
        run("flexfloor", 0, 25.3, 99.0, knowledge="shuffled", **known),
    ]
    verdicts = list(gates.judge(case, runs, ["B", "F", "G", "H"], False))
    found = [(v.row, v.wanted, round(v.reached.median, 3), v.passed) for v in verdicts if v.demanded]
    assert found == [
        ("B", 2.6, 2.7, True),
        ("B", 0.98, 0.979, False),
        ("B", 1.4, 1.35, False),
        ("F", 0.97, 0.969, False),
        ("F", 0.98, 0.979, False),
        ("G", 0.98, 1.038, True),
        ("G", 0.97, 0.973, True),
        ("H", 1.0, 1.35, True),
    ]
    assert [v.what for v in verdicts if not v.demanded] == ["of the clairvoyant reference"]


def test_a_gate_holds_on_every_seed(gates: ModuleType):
    assert gates.Verdict("B", "c", "w", 2.0, Spread(2.1, 1.9)).passed
    assert not gates.Verdict("B", "c", "w", 2.0, Spread(2.1, 1.89)).passed
    assert not gates.Verdict("B", "c", "w", 2.0, Spread(1.99, 1.95)).passed
