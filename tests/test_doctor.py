"""`flexfloor doctor` on this machine as it is, and with things broken for real."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from test_accounting import hand_written

from flexfloor.doctor import findings, machine, run_doctor, running, software
from flexfloor.doctor.findings import Finding
from flexfloor.fleets.engine import comm
from flexfloor.ledger.accounting import summarize

REPOSITORY = Path(__file__).parents[1]


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    limits: dict[int, int] | None = None,
    path: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """A doctor process. limits: of the kind RLIMIT_*; path: searched for packages before all others."""

    def limit() -> None:
        for kind, value in (limits or {}).items():
            resource.setrlimit(kind, (value, value))

    search = os.pathsep.join(str(p) for p in (path, REPOSITORY / "src") if p)
    return subprocess.run(
        [sys.executable, "-m", "flexfloor", "doctor", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )


def doctor(*arguments: str | Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON object and stderr; options: of `run`."""
    done = run("--json", *arguments, **options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def found(told: dict[str, Any], name: str) -> list[tuple[str, str, str]]:
    """(level, text, remedy) of the findings of a name."""
    return [(f["level"], f["text"], f["remedy"]) for f in told["findings"] if f["name"] == name]


def fake_package(folder: Path, name: str, release: str) -> Path:
    """A folder in which package metadata says that `name` is of that release."""
    info = folder / f"{name}-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n", encoding="utf-8")
    return folder


# -- the machine as it is -----------------------------------------------------------------------------------------


def test_this_machine_is_fit_and_fits_a_screen() -> None:
    """With the rollout on a tiny model, at the fewest open files that are let through."""
    limit = machine.files_needed(2)
    done = run("--workers", "2", limits={resource.RLIMIT_NOFILE: limit})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("a rollout on the CPU can run")
    for name in ("python", "packages", "torch", "cpu", "memory", "open files", "folders", "exchange", "gloo"):
        assert [line for line in lines if line.startswith(f"  ok    {name:<12}")], name
    told = " ".join(done.stdout.split())
    assert "the same tokens bit for bit (cbwr; " in told or "the same tokens bit for bit (blocks; " in told
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24, "one screen"


def test_warnings_leave_the_exit_code_at_0(tmp_path: Path) -> None:
    code, told, _ = doctor(
        "--quick", cwd=tmp_path, path=fake_package(tmp_path / "fake", "pyarrow", "2"), TMPDIR="/proc",
        OMP_NUM_THREADS="many",
    )  # fmt: skip
    assert (code, told["ok"]) == (0, True)
    assert all(set(f) == {"level", "name", "text", "remedy"} for f in told["findings"])
    warned = {f["name"] for f in told["findings"] if f["level"] == "warn"}
    assert warned >= {"pyarrow", "folders", "threads"}
    assert all(f["remedy"] for f in told["findings"] if f["level"] == "warn")
    assert found(told, "rollout") == [("note", "not tried: --quick", "")]
    assert [p.name for p in tmp_path.iterdir()] == ["fake"], "nothing is left behind"


def test_failures_make_it_1_and_nothing_is_tried(tmp_path: Path) -> None:
    code, told, _ = doctor(limits={resource.RLIMIT_NOFILE: 24}, path=fake_package(tmp_path, "scipy", "1.0"))
    assert (code, told["ok"]) == (1, False)
    failed = [f for f in told["findings"] if f["level"] == "FAIL"]
    assert [f["name"] for f in failed] == ["scipy", "open files"]
    assert all(f["remedy"] for f in failed)
    for name in ("exchange", "rollout"):
        assert found(told, name) == [("note", "not tried: a check above failed", "")]


def test_no_temporary_folder_at_all() -> None:
    """Under a limit to the size of files that lets none be written."""
    code, told, _ = doctor("--quick", limits={resource.RLIMIT_FSIZE: 0})
    assert code == 1
    assert any(level == "FAIL" and "set TMPDIR" in remedy for level, _, remedy in found(told, "folders"))
    assert any(level == "warn" for level, _, _ in found(told, "/dev/shm"))
    assert found(told, "torch") == [("note", "not tried: a check above failed", "")]


# -- what is broken -----------------------------------------------------------------------------------------------


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_open_files(few_files: None) -> None:
    assert [f.level for f in machine.check_files(4)] == ["ok"]
    [finding] = machine.check_files(64)
    assert finding.level == "FAIL"
    assert finding.text.startswith("100 a process")
    assert finding.remedy == "ulimit -n 1024"


def test_a_temporary_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("/proc", str(tmp_path / "missing")):
        monkeypatch.setenv("TMPDIR", given)
        monkeypatch.setattr(tempfile, "tempdir", None)
        told = list(machine.check_folders())
        assert [f.level for f in told] == ["warn", "ok"], "Python takes another one"
        assert f"TMPDIR={given}" in told[0].text
        assert "unset TMPDIR" in told[0].remedy


def test_results_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    told = list(machine.check_folders())
    assert [f.level for f in told] == ["warn"]
    assert "/proc" in told[0].text


@pytest.mark.parametrize("value", ["many", "0", "-2", "", "2", "4,2"])
def test_nonsense_for_threads(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine._THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    warned = [f for f in machine.check_threads(1) if f.level == "warn"]
    if value in ("2", "4,2"):
        assert not warned
        return
    assert len(warned) == 1
    assert f"OMP_NUM_THREADS={value!r}" in warned[0].text
    assert "unset OMP_NUM_THREADS" in warned[0].remedy


def test_more_workers_than_cores() -> None:
    told = list(machine.check_threads(10_000))
    assert [(f.level, f.name) for f in told] == [("note", "threads")]
    assert "--pace" in told[0].text
    assert [f.level for f in machine.check_threads(1)] == ["ok"]


@pytest.mark.parametrize(
    ("name", "release", "level", "remedy"),
    [
        ("scipy", "1.0", "FAIL", "pip install 'scipy>=1.13'"),
        ("torch", "2.1.0+cpu", "FAIL", "pip install 'torch>=2.8'"),
        ("pyarrow", "3.0", "warn", "pip install 'flexfloor[parquet]'"),
        ("gguf", "0.1", "warn", "pip install 'flexfloor[smollm2]'"),
        ("trl", "0.9", "warn", "pip install 'flexfloor[trl]'"),
    ],
)
def test_a_package_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, release: str, level: str, remedy: str
) -> None:
    monkeypatch.syspath_prepend(str(fake_package(tmp_path, name, release)))
    [finding] = [f for f in (*software.check_packages(), *software.check_extras()) if f.name == name]
    assert (finding.level, finding.remedy) == (level, remedy)
    assert finding.text.startswith(f"{release} (needs ")


def test_packages_to_run_beside_are_found_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(fake_package(tmp_path, "vllm", "0.99")))
    extras = list(software.check_extras())
    assert any(f.level == "ok" and "vllm 0.99" in f.text for f in extras)
    assert not any(f.level == "note" and "vllm" in f.text for f in extras)
    assert not any("pytest" in f.text for f in extras), "development is no extra"


def test_what_an_extra_needs_is_looked_at_where_the_extra_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, str] = {"trl": "99", "accelerate": "99", "datasets": "1.0"}  # and no filelock
    monkeypatch.setattr(software, "installed", there.get)
    warned = {f.name: f for f in software.check_extras() if f.level == "warn"}
    assert set(warned) == {"datasets", "filelock"}
    assert warned["filelock"].text.startswith("missing (needs ")
    assert {f.remedy for f in warned.values()} == {"pip install 'flexfloor[trl]'"}
    del there["trl"]  # the others have come with something else
    told = list(software.check_extras())
    assert not [f for f in told if f.level == "warn"]
    assert any(f.level == "note" and "trl" in f.text and "filelock" not in f.text for f in told)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda name: None if name == "numba" else version(name))
    bad = [f for f in software.check_packages() if f.level == "FAIL"]
    assert [(f.name, f.remedy) for f in bad] == [("numba", "pip install 'numba>=0.61'")]


def test_tokens_that_differ_fail() -> None:
    same = summarize(hand_written())
    assert running.judge(same, same, "cbwr", 1.0).level == "ok"
    for other in (replace(same, responses_sha256="c" * 64), replace(same, logprobs_sha256="c" * 64)):
        finding = running.judge(same, other, "cbwr", 1.0)
        assert finding.level == "FAIL"
        assert "--numerics fast" in finding.remedy


def test_a_transport_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    join = comm.join_group
    for name, levels in (("socket", ["FAIL"]), ("gloo", ["ok", "note"])):
        with monkeypatch.context() as patch:

            def refuse(transport: comm.Transport, *rest: Any, name: str = name) -> Any:
                if transport == name:
                    raise PermissionError("not in this sandbox")
                return join(transport, *rest)

            patch.setattr(comm, "join_group", refuse)
            told = list(running.check_exchange())
            assert [f.level for f in told] == levels
            assert "not in this sandbox" in told[-1].text


CAN_UNSHARE = subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_UNSHARE, reason="no network namespace can be made here")
def test_no_loopback_interface() -> None:
    """In a network namespace of its own it is down."""
    code = "import flexfloor.doctor.running as r; print([(f.level, f.name) for f in r.check_exchange(2.0)])"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[('FAIL', 'exchange')]", done.stderr


def groups(folder: Path, own: str, **files: str) -> None:
    """Control groups as the kernel shows them; files: of the group itself, with dots as underscores."""
    (folder / own).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / own / name.replace("_", ".")).write_text(text + "\n", encoding="ascii")


def test_limits_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    groups(tmp_path, own, memory_max=str(900 * 2**20), memory_current=str(100 * 2**20), cpu_max="150000 100000")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    assert machine.cores() == 1.5 if os.cpu_count() != 1 else 1
    [memory] = machine.check_memory(2)
    assert memory.level == "FAIL"
    assert memory.text.startswith("800.0 MiB free of 900.0 MiB of this control group")


def test_memory_for_less_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    [memory] = machine.check_memory(10_000)
    assert memory.level == "warn"
    size = memory.remedy.split()[2].rstrip(",")
    assert size.startswith(("64", "1", "2", "3", "4", "5", "6", "7", "8", "9"))
    assert size.endswith("MiB")


def test_shared_memory_that_is_missing_or_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED", tmp_path / "missing")
    assert [f.level for f in machine.check_shared()] == ["warn"]
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    monkeypatch.setattr(machine, "_LEAST_SHARED", 2**60)
    [small] = machine.check_shared()
    assert small.level == "warn"
    assert "--shm-size" in small.remedy


# -- how it is told -----------------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_finding() -> None:
    def check_something() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise RuntimeError("the library is\nbroken")

    told = list(findings.guarded(check_something))
    assert [(f.level, f.name) for f in told] == [("ok", "first"), ("FAIL", "something")]
    assert "the library is" in told[1].text
    assert told[1].remedy


def test_long_findings_are_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    findings.show(Finding("warn", "name", "word " * 40, "do " * 40))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("  warn  name        word word")
    assert sum("mend: do" in line for line in lines) == 1
    assert all(line.startswith(" " * 20) for line in lines[1:])


def test_the_verdict_counts() -> None:
    ok, warn, bad = (Finding(level, "n", "t") for level in ("ok", "warn", "FAIL"))
    assert findings.verdict([ok]) == "a rollout on the CPU can run"
    assert findings.verdict([ok, warn, warn]) == "a rollout on the CPU can run; 2 warnings"
    assert findings.verdict([warn, bad]) == "a rollout on the CPU cannot run: 1 check failed"


def test_a_model_is_looked_at_too(checkpoint: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    assert run_doctor(checkpoint("tiny"), workers=2, quick=True) == 0
    out = capsys.readouterr().out
    assert "qwen3_moe, checkpoint complete" in " ".join(out.split())
    assert re.search(r"--worker-memory of 1 … 2 workers at least \d+MiB, \d+MiB; for a", " ".join(out.split()))
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert run_doctor(dense, quick=True) == 1
    assert "model_type 'llama' is not supported" in " ".join(capsys.readouterr().out.split())
