"""`flexfloor compare`: rows worked out by hand, one fleet for all policies, and what happens when responses differ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import flexfloor
from flexfloor.cli import compare as module
from flexfloor.cli import main
from flexfloor.cli.options import parse_settings
from flexfloor.errors import InputError
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.comparison import choose_baseline, compare_summaries
from flexfloor.ledger.events import LedgerWriter, read_ledger
from flexfloor.settings import CompareSettings

FLEET = {"workers": 4, "numerics": "bitwise", "numerics_path": "cbwr", "model": "tiny", "versions": {}}
START = {"type": "start", "schema": 1, "policy": "static", "settings": {}, "fleet": FLEET}
MOVED: dict[str, Any] = {"leaving": [], "joining": [], "failed": None}


def summary(**values: Any) -> Summary:
    usual: dict[str, Any] = {
        "complete": True,
        "response_tokens": 1000,
        "tokens_per_occupied_s_with_regrow": 0.0,
        "responses_sha256": "a",
        "logprobs_sha256": "b",
    }
    return replace(summarize([START]), **(usual | values))


def test_rows_are_ratios_to_the_baseline():
    static = summary(
        iterations=100,
        occupied_iterations=400,
        wall_s=10.0,
        throughput_tok_s=100.0,
        tokens_per_occupied_s_with_regrow=25.0,
        post_finish_share=0.3,
        preemptions=2,
    )
    other = summary(
        iterations=110,
        occupied_iterations=250,
        wall_s=12.5,
        throughput_tok_s=80.0,
        tokens_per_occupied_s_with_regrow=40.0,
        post_finish_share_iterations=0.1,
        resizes=(
            MOVED,
            MOVED | {"leaving": [1]},
            MOVED | {"leaving": [2], "failed": "no room"},
            MOVED | {"joining": [1]},
        ),
        logprobs_sha256="c",
        pace_valid=False,
    )
    first, second = compare_summaries({"flexfloor": other, "static": static})
    assert (first.policy, first.iterations, first.occupied_iterations, first.wall_s) == ("flexfloor", 110, 250, 12.5)
    assert first.tokens_per_occupied_iteration_ratio == pytest.approx(4.0 / 2.5)
    assert first.throughput_ratio == pytest.approx(0.8)
    assert first.tokens_per_occupied_s_with_regrow_ratio == pytest.approx(1.6)
    assert (first.post_finish_share_iterations, first.resizes, first.equal, first.pace_valid) == (0.1, 2, False, False)
    assert (second.policy, second.throughput_ratio, second.equal, second.resizes) == ("static", 1, True, 0)
    assert (second.post_finish_share, second.preemptions, second.pace_valid) == (0.3, 2, None)


@pytest.mark.parametrize("overran", ["static", "release"])
def test_times_that_are_not_valid_are_marked_in_the_table(overran: str):
    """Of a row whose pace was overrun, and every ratio to such a baseline; iterations are what they are."""
    summaries = {name: summary(policy=name, pace_valid=name != overran) for name in ("static", "release")}
    table = module._table(compare_summaries(summaries), "static")
    marked = {
        (str(column.header).replace("through-\n", "through").replace("-\n", "-").replace("\n", " ").strip(), row)
        for column in table.columns
        for row, cell in enumerate(column.cells)
        if str(cell).endswith(" !")
    }
    own = {
        (name, ("static", "release").index(overran))
        for name in ("wall", "throughput", "tokens / occ. s", "post-finish")
    }
    other = {("throughput", 1), ("tokens / occ. s", 1)} if overran == "static" else set()
    assert marked == own | other


def test_the_baseline_is_static_or_the_first():
    assert choose_baseline(["flexfloor", "static", "release"]) == "static"
    assert choose_baseline(["flexfloor", "static-spread"]) == "static-spread"
    assert choose_baseline(["release", "static-grouped"]) == "release"


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ("", "name policies with one comma"),
        ("static,", "name policies with one comma"),
        ("static, static", "a policy is named twice"),
        ("static,static-spread", "a policy is named twice"),
    ],
)
def test_bad_lists_of_policies(policies: str, told: str):
    with pytest.raises(InputError, match=f"--policies: {told}"):
        parse_settings(CompareSettings, None, {"model": "m", "prompts": "p", "policies": policies})


def test_a_config_file_may_give_a_list(tmp_path: Path):
    config = tmp_path / "c.toml"
    config.write_text('model = "m"\nprompts = "p"\npolicies = ["static", "static-grouped"]\n[sampling]\nsamples = 3\n')
    settings = parse_settings(CompareSettings, config, {})
    assert (settings.policies, settings.sampling.samples) == (("static", "static-grouped"), 3)
    assert settings.out_dir == Path("runs/compare")
    config.write_text('out = "x"')
    with pytest.raises(InputError, match="unknown key 'out'; did you mean 'out_dir'"):
        parse_settings(CompareSettings, config, {})


@pytest.fixture
def command(tmp_path: Path, checkpoint: Callable) -> list[str]:
    rows = [{"prompt_tokens": [5 + i] * (3 + 9 * i), "max_tokens": 20 + 25 * i} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl")]
    return ["compare", *files, "--out-dir", str(tmp_path / "out"), "--samples", "3", "--force-lengths", "prompts"]


def test_policies_run_on_one_fleet_and_generate_the_same_bits(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    policies = ["static-grouped", "static", "flexfloor", "fixed:2"]
    launched: list[Any] = []
    real = module.launch

    def launch(*arguments: Any) -> Any:
        launched.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, "launch", launch)
    assert main([*command, "--policies", ",".join(policies), "--knowledge", "oracle", "--workers", "3"]) == 0
    out, err = capsys.readouterr()
    assert len(launched) == 1
    assert "static *" in out
    assert "ratios to static;" in out
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (written["baseline"], written["equal"], written["requests"]) == ("static", True, 12)
    assert "4 rollouts compared" in (tmp_path / "out" / "report.html").read_text()
    assert [row["policy"] for row in written["policies"]] == policies
    assert all(row["equal"] for row in written["policies"])
    assert [row["resizes"] > 0 for row in written["policies"]] == [False, False, True, True]
    assert written["policies"][1]["throughput_ratio"] == 1
    for name in policies:
        folder = tmp_path / "out" / name.replace(":", "-")
        told = json.loads((folder / "summary.json").read_text())
        assert told == json.loads(json.dumps(summarize(read_ledger(folder / "ledger.jsonl")).to_json()))
        assert any(line.endswith(f"s  policy {name}") for line in err.splitlines())


@pytest.mark.parametrize(("numerics", "code"), [("bitwise", 1), ("fast", 0)])
def test_responses_that_differ(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, numerics: str, code: int
):
    class Result:
        def __init__(self, policy: str) -> None:
            self.summary = summary(responses_sha256=policy, numerics=numerics)
            self.responses: list[flexfloor.Response] = []

    class Launched:
        def __enter__(self) -> Launched:
            return self

        def __exit__(self, *exc: object) -> None: ...

    def rollout(fleet: object, requests: object, *, policy: str, ledger: LedgerWriter, **_: object) -> Result:
        ledger.write(START)
        ledger.close()
        return Result(policy)

    monkeypatch.setattr(module, "launch", lambda *_: Launched())
    monkeypatch.setattr(flexfloor, "rollout", rollout)
    assert main([*command, "--quiet", "--policies", "static,static-grouped"]) == code
    out, err = capsys.readouterr()
    assert out.split().count("no") == 1
    told = "flexfloor: error: numerics is bitwise, but responses differ from static: static-grouped\n"
    assert err == (told if code else "")


def test_refusals_are_one_line_and_start_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    for arguments, told in {
        ("--policies", "static,best"): "policy 'best' is not known",
        ("--workers", "2"): "--policies is missing",
        ("--policies", "static", "--out-dir", str(tmp_path / "file")): "--out-dir",
        ("--policies", "static", "--profile", "b300"): "profile 'b300' is not known",
        ("--policies", "static", "--out", "x"): "--out",
    }.items():
        assert main([*command, "--quiet", *arguments]) == 2
        out, err = capsys.readouterr()
        assert told in err
        assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_leaves_no_process(command: list[str], tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "flexfloor", *command, "--policies", "static,static-grouped", "--pace", "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    line = next(line for line in process.stderr if "iteration" in line)
    assert "s  static  iteration " in line
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "flexfloor: interrupted"
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not (tmp_path / "out" / "comparison.json").exists()
