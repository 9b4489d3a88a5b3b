"""Exchanges measured on this machine: the table and the profile they go into, refusals, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexfloor.cli import main
from flexfloor.cli.profile_comm import numbers
from flexfloor.errors import InputError, WorkerFailedError
from flexfloor.fleets.engine import commbench
from flexfloor.fleets.engine.commbench import Traffic, measure_exchanges
from flexfloor.fleets.engine.crew import Crew
from flexfloor.settings import EngineSettings
from flexfloor.world.costs import PROFILES, format_profile, load_profile
from flexfloor.world.profiles import CALIBRATE, NOT_FITTED, has_fitted_latencies, read_comments

FEW = ["--tokens", "1,8", "--repeats", "10", "--model-config", "olmoe-1b-7b", "--quiet"]


def children() -> set[int]:
    """Worker processes; the nursery that forks them stays with its driver."""
    mine = psutil.Process().children(recursive=True)
    return {p.pid for p in mine if p.ppid() != os.getpid() and p.status() != "zombie"}


def test_a_table_and_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = children()
    out = tmp_path / "comm.toml"
    assert main(["profile-comm", "--workers", "1,2,3", *FEW, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [(r[0], r[1]) for r in rows] == [("2", "1"), ("2", "8"), ("3", "1"), ("3", "8")]
    table = tomllib.loads(out.read_text())
    assert list(table) == ["latency_s"]
    assert [size for size, _ in table["latency_s"]] == [2, 3]
    assert all(0 < seconds < 1 for _, seconds in table["latency_s"])
    assert main(["simulate", "--lengths", "R1", "--profile", str(out), "--quiet"]) == 2
    assert f"profile {out}: holds a latency table alone; give profile-comm a --base" in capsys.readouterr().err

    assert (
        main(["profile-comm", "--workers", "2", *FEW, "--transport", "gloo", "--base", "h200", "--out", str(out)]) == 0
    )
    profile = load_profile(out)
    assert [size for size, _ in profile.latency_s] == [2, 8, 16, 32]
    assert profile.latency_s[1:] == PROFILES["h200"].latency_s
    assert (profile.name, profile.bandwidth) == ("comm", PROFILES["h200"].bandwidth)
    assert children() == before


def test_a_base_that_was_fitted_is_warned_of_and_its_words_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fitted, out, again = tmp_path / "fitted.toml", tmp_path / "comm.toml", tmp_path / "again.toml"
    words = {
        "": f"{CALIBRATE}: fitted to 9 iterations.\nError 7%.",
        "node_link": NOT_FITTED,
        "memory_bytes": NOT_FITTED,
    }
    fitted.write_text(format_profile(PROFILES["cpu"], words))
    assert read_comments(fitted) == words
    measure = ["profile-comm", "--workers", "2", *FEW]
    assert main([*measure, "--base", str(fitted), "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert told.startswith(
        f"flexfloor: warning: the latencies of --base {fitted} were fitted to runs, with the time that"
    )
    assert told.count("\n") == 1
    text = out.read_text()
    assert (
        f"# All else is that of the profile {fitted}, whose file says:\n# {CALIBRATE}: fitted to 9 iterations.\n"
        in text
    )
    assert "node_link = 1000000000000.0  # not fitted\n" in text
    assert "]]  # measured up to 2 workers\n" in text
    assert main([*measure, "--base", str(out), "--out", str(again)]) == 0
    assert capsys.readouterr().err == "", "its latencies are measured ones"


@pytest.mark.parametrize(("name", "fitted"), [("cpu", True), ("h200", False), ("h800", False), ("slow", False)])
def test_which_profiles_have_fitted_latencies(name: str, fitted: bool):
    comments = read_comments(name)
    assert has_fitted_latencies(comments) is fitted
    assert comments[""]
    assert not has_fitted_latencies(comments | {"latency_s": NOT_FITTED}), "runs on one worker"


def test_more_rows_take_longer():
    traffics = [Traffic(tokens, 1024, 4, "float32") for tokens in (1, 2000)]
    few, many = measure_exchanges([2], traffics, EngineSettings(), repeats=10)
    assert many.dispatch_s > few.dispatch_s
    assert many.combine_s > few.combine_s
    assert few.seconds == pytest.approx((few.dispatch_s + few.combine_s) / 2)


def test_a_worker_that_dies_ends_the_measurement(monkeypatch: pytest.MonkeyPatch):
    before = children()

    def kill_one(crew: Crew, verb: str, *arguments: Any) -> object:
        if verb == "measure":
            os.kill(crew.handles[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return call(crew, verb, *arguments)

    call = Crew.call
    monkeypatch.setattr(commbench.Crew, "call", kill_one)
    with pytest.raises(WorkerFailedError, match="worker 1 was killed by SIGKILL"):
        measure_exchanges([2], [Traffic(1, 16, 1, "float32")], EngineSettings(), repeats=10**6)
    assert children() == before


def test_ctrl_c_leaves_no_process(tmp_path: Path):
    out = tmp_path / "comm.toml"
    arguments = ["profile-comm", "--workers", "2", "--tokens", "1", "--repeats", "100000000", "--out", str(out)]
    source = Path(__file__).parents[1] / "src"
    with subprocess.Popen(
        [sys.executable, "-m", "flexfloor", *arguments],
        env=os.environ | {"PYTHONPATH": str(source)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            while "measuring groups of 2" not in process.stderr.readline():
                assert process.poll() is None
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) == 3  # the nursery and two workers
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read().endswith("flexfloor: interrupted\n")
        finally:
            process.kill()  # else a test that fails would wait for it
    deadline = time.monotonic() + 10
    while (left := [p for p in started if p.is_running() and p.status() != "zombie"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not out.exists()


REFUSED = {
    "one worker": (["--workers", "1"], "--workers 1: a worker alone exchanges nothing; name a size from 2"),
    "no number": (["--workers", "two"], "--workers 'two' is not a list of whole numbers from 1; write it like 1,2,4"),
    "a size twice": (["--workers", "2,2"], "--workers 2,2: a value is given twice; give each once"),
    "no rows": (["--tokens", "0"], "--tokens '0' is not a list of whole numbers from 1"),
    "no such model": (["--model-config", "gpt-9"], "gpt-9 cannot be read"),
    "no such profile": (["--base", "b300"], "profile 'b300' is not known"),
    "transport": (["--transport", "nccl"], "transport 'nccl' does not go with device cpu; use socket or gloo"),
    "unknown transport": (["--transport", "mpi"], "--transport: input should be 'auto', 'socket', 'gloo' or 'nccl'"),
    "launcher": (["--launcher", "slurm"], "slurm"),
    "ending": (["--out", "comm.json"], "--out comm.json does not end in .toml"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    options, told = REFUSED[case]
    out = tmp_path / "comm.toml"
    arguments = ["profile-comm", *FEW, "--out", str(out), *options]
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert told in error
    assert not out.exists()


def test_the_base_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.toml"
    path.write_text("kept")
    assert main(["profile-comm", "--base", str(path), "--out", str(path)]) == 2
    assert "are the same file" in capsys.readouterr().err
    assert path.read_text() == "kept"


def test_lists_of_numbers():
    assert numbers("--workers", "4,2") == [2, 4]
    with pytest.raises(InputError, match="--workers 4,2,2: a value is given twice; give each once"):
        numbers("--workers", "4,2,2")
    for text in ("", "2,", "-1,2", "2.5"):
        with pytest.raises(InputError):
            numbers("--workers", text)
