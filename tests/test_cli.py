"""The command line without a fleet: options, config files, refusals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexfloor.cli import main
from flexfloor.cli.display import ProgressLines, format_count, print_summary, warn_of_overruns
from flexfloor.cli.options import TABLES, flag, load_settings, names_of
from flexfloor.cli.rollout import output_files
from flexfloor.cli.signals import Stopped, stoppable
from flexfloor.errors import InputError
from flexfloor.ledger.accounting import WorkerSummary, summarize
from flexfloor.settings import CompareSettings, RolloutSettings, RunSettings

REPOSITORY = Path(__file__).parents[1]
FLEET = {"workers": 1, "numerics": "bitwise", "numerics_path": "cbwr", "model": "tiny", "versions": {}}
NEEDED = {"model": Path("m"), "prompts": Path("p.jsonl"), "out": Path("runs/a/responses.jsonl")}


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flexfloor", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line with which `arguments` are refused, exit code 2."""
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("flexfloor: error: ")
    assert err.count("\n") == 1
    return err


def test_help_is_quick_and_lists_the_commands():
    begun = time.monotonic()
    done = run("--help")
    took = time.monotonic() - begun
    assert done.returncode == 0
    assert "rollout" in done.stdout
    assert "doctor" in done.stdout
    assert took < 2  # 0.2 s on a machine with nothing else to do


def test_help_loads_nothing_heavy():
    code = "import sys, flexfloor.cli as c; c.main(['rollout', '--help']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.splitlines()[-1]
    assert "'flexfloor.settings'" in modules
    for heavy in ("torch", "transformers", "numba", "llvmlite", "scipy", "pyarrow"):
        assert f"'{heavy}'" not in modules


def test_every_setting_is_an_option_and_help_shows_its_default(capsys: pytest.CaptureFixture[str]):
    models: dict[str, type[RunSettings]] = {"rollout": RolloutSettings, "compare": CompareSettings}
    for command, model in models.items():
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert [name for name in names_of(model) if f"{flag(name)} " not in text] == []
        assert "2048MiB" in text
        assert set(TABLES) == {n for n, f in model.model_fields.items() if f.annotation in TABLES.values()}


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "Usage: flexfloor" in capsys.readouterr().out


REFUSED_OPTIONS = {
    "unknown command": (["rol"], "No such command 'rol'"),
    "unknown option": (["rollout", "--workrs", "3"], "No such option: --workrs"),
    "not a number": (["rollout", "--workers", "x"], "'--workers'"),
    "value missing": (["rollout", "--workers"], "--workers"),
    "extra argument": (["rollout", "model"], "model"),
    "nothing given": (["rollout"], "--model is missing; give it as an option or in a --config file"),
}
REFUSED_VALUES = {
    "workers": ("0", "--workers: input should be greater than or equal to 1, got 0"),
    "temperature": ("-1", "--temperature: "),
    "top-p": ("0", "--top-p: "),
    "top-k": ("-1", "--top-k: "),
    "samples": ("0", "--samples: "),
    "max-tokens": ("0", "--max-tokens: "),
    "stop": ("", "--stop: a stop string must not be empty"),
    "seed": ("-1", "--seed: "),
    "order": ("random", "--order: order must be 'arrival' or 'shuffle:SEED', got 'random'"),
    "worker-memory": ("much", "--worker-memory: 'much' is not a size; write it like 2GiB or 500MB"),
    "threads-per-worker": ("0", "--threads-per-worker: "),
    "device": ("tpu", "--device: input should be 'cpu' or 'cuda', got 'tpu'"),
    "dtype": ("int8", "--dtype: "),
    "numerics": ("exact", "--numerics: "),
    "worker-timeout": ("0", "--worker-timeout: "),
    "page-tokens": ("0", "--page-tokens: "),
    "max-batch": ("0", "--max-batch: "),
    "prefill-tokens": ("0", "--prefill-tokens: "),
    "pace": ("0", "--pace: input should be greater than 0, got 0"),
    "chunk": ("0", "--chunk: "),
    "knowledge": ("all", "--knowledge: input should be 'auto', 'none', 'history', 'shuffled' or 'oracle', got 'all'"),
    "split": ("test", "--split: input should be 'train' or 'eval', got 'test'"),
    "max-slowdown": ("-0.1", "--max-slowdown: "),
    "min-workers": ("0", "--min-workers: "),
    "profile": ("", "--profile: "),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED_OPTIONS.values(), ids=REFUSED_OPTIONS)
def test_option_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str):
    assert told in refusal(capsys, *arguments)


@pytest.mark.parametrize("value", ["1", "2", "inf", "nan", "-1"])
@pytest.mark.parametrize("command", ["rollout", "compare"])
def test_a_slowdown_is_a_share(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, value: str):
    needed = f"--model {tmp_path} --prompts {tmp_path}/p.jsonl".split()
    needed += ["--out", f"{tmp_path}/r.jsonl"] if command == "rollout" else ["--policies", "static"]
    assert "--max-slowdown: input should be " in refusal(capsys, command, *needed, f"--max-slowdown={value}")


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_values_out_of_range_name_the_option(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str):
    value, told = REFUSED_VALUES[name]
    needed = f"--model {tmp_path} --prompts {tmp_path}/p.jsonl --out {tmp_path}/r.jsonl".split()
    assert told in refusal(capsys, "rollout", *needed, f"--{name}={value}")
    assert list(tmp_path.iterdir()) == []


def test_config_file_gives_what_the_command_line_does_not(tmp_path: Path):
    config = tmp_path / "rollout.toml"
    config.write_text(
        'model = "m"\nprompts = "p"\nout = "o"\nworkers = 3\nseed = 5\nhistory = "h.db"\nknowledge = "shuffled"\n'
        'split = "eval"\nprofile = "h800"\n'
        '[engine]\nworker_memory = "1GiB"\n[sampling]\nstop = ["a", "b"]\ntemperature = 0\n'
    )
    settings = load_settings(config, {"workers": 4, "out": Path("here")})
    assert (settings.workers, settings.out, settings.model) == (4, Path("here"), Path("m"))
    assert settings.engine.worker_memory == 2**30
    assert (settings.sampling.stop, settings.sampling.temperature, settings.sampling.seed) == (("a", "b"), 0, 5)
    assert settings.chunk == RolloutSettings.model_fields["chunk"].default
    assert (settings.history, settings.knowledge, settings.split) == (Path("h.db"), "shuffled", "eval")
    assert settings.engine.resolved_profile == "h800"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("wokers = 3", r"rollout\.toml: unknown key 'wokers'; did you mean 'workers'\?"),
        ("[engine]\nseed = 3", r"rollout\.toml: unknown key 'seed'; there is worker_memory, "),
        ("[fleet]\nworkers = 3", r"rollout\.toml: unknown key 'fleet'"),
        ("engine = 3", r"rollout\.toml: unknown key 'engine'"),
        ("seed = 1\n[sampling]\nseed = 2", r"rollout\.toml: 'seed' is given twice"),
        ("workers = 0", r"rollout\.toml: workers: input should be greater than or equal to 1, got 0"),
        ('[sampling]\ntop_p = "x"', r"rollout\.toml: top_p: "),
        ("workers =", r"--config .*rollout\.toml is not TOML"),
    ],
)
def test_config_errors_name_file_and_key(tmp_path: Path, content: str, told: str):
    config = tmp_path / "rollout.toml"
    config.write_text(content)
    with pytest.raises(InputError, match=told):
        load_settings(config, NEEDED)


def test_a_config_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "--config" in refusal(capsys, "rollout", "--config", tmp_path / "missing.toml")


def test_summary_and_ledger_lie_next_to_the_responses():
    assert output_files(load_settings(None, NEEDED)) == {
        "out": Path("runs/a/responses.jsonl"),
        "summary": Path("runs/a/summary.json"),
        "ledger": Path("runs/a/ledger.jsonl"),
    }
    assert output_files(load_settings(None, NEEDED | {"ledger": Path("l")}))["ledger"] == Path("l")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What a rollout needs, each of them there; the model is a folder without a checkpoint in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt_tokens": [1]}\n')
    return {
        "--model": tmp_path / "model",
        "--prompts": tmp_path / "prompts.jsonl",
        "--out": tmp_path / "out" / "responses.jsonl",
    }


def dense_model(files: dict[str, Path]) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}
    (files["--model"] / "config.json").write_text(json.dumps(config))


def mixture_without_weights(files: dict[str, Path]) -> None:
    config = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (files["--model"] / "config.json").write_text(json.dumps(config))


def quantised_model(files: dict[str, Path]) -> None:
    config = {"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}}
    (files["--model"] / "config.json").write_text(json.dumps(config))


def broken_config(files: dict[str, Path]) -> None:
    (files["--model"] / "config.json").write_text("{oops")


BAD_INPUT = {
    "no model": (lambda f: f.update({"--model": Path("missing")}), "missing: no such folder"),
    "model without config": (lambda f: None, "config.json is missing"),
    "broken config": (broken_config, "config.json: cannot be read as JSON"),
    "dense model": (dense_model, "model_type 'llama' is not supported"),
    "quantised model": (quantised_model, "quantised checkpoints are not supported"),
    "no weights": (mixture_without_weights, "no *.safetensors files"),
    "out is a folder": (lambda f: f.update({"--out": f["--model"]}), "is a folder; name a file in it"),
    "out is the prompts": (lambda f: f.update({"--out": f["--prompts"]}), "--out and --prompts are the same file"),
    "out below a file": (lambda f: f.update({"--out": f["--prompts"] / "x"}), "--out"),
    "ledger is out": (lambda f: f.update({"--ledger": f["--out"]}), "--ledger and --out are the same file"),
}
"""What is wrong → (how to make it so, what the line says). Cases that need a checkpoint: tests/test_bad_input.py."""


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], files: dict[str, Path], tmp_path: Path, case: str
):
    spoil, told = BAD_INPUT[case]
    spoil(files)
    before = sorted(tmp_path.rglob("*"))
    assert told in refusal(capsys, "rollout", "--quiet", *(part for pair in files.items() for part in pair))
    assert sorted(tmp_path.rglob("*")) == before


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]):
    quiet = ProgressLines(quiet=True, stream=sys.stderr)
    quiet.phase("loading")
    quiet.record({"type": "start", "policy": "static", "settings": {}, "fleet": FLEET})
    assert capsys.readouterr().err == ""
    assert format_count(1234567.8) == "1 234 568"


def test_the_summary_is_shown_with_every_worker(capsys: pytest.CaptureFixture[str]):
    worker = WorkerSummary(0, 1, 8, 16.0, 6.0, None, peak_kv_bytes=2048, peak_memory_bytes=None)
    start = {"type": "start", "schema": 1, "policy": "static", "settings": {}, "fleet": FLEET}
    summary = replace(summarize([start]), workers_detail=(worker,), throughput_tok_s=0.5, post_finish_share=0.542)
    print_summary(summary, {"responses": Path("a/" + "long" * 40), "summary": Path("b")})
    out = capsys.readouterr().out
    for told in ("bitwise (cbwr)", "0.5 tok/s", "54.2%", "62.5%", "a/" + "long" * 40):
        assert told in out, out


def test_the_tables_tell_who_left(capsys: pytest.CaptureFixture[str]):
    start = {"type": "start", "schema": 1, "policy": "release", "settings": {}, "fleet": FLEET}
    left = WorkerSummary(0, 3, 30, 1.25, 1.0, 1.25, None, peak_memory_bytes=0)
    resizes = ({"failed": None}, {"failed": "worker 1: no"})
    summary = replace(summarize([start]), resizes=resizes, stall_s=0.5, moved_bytes=2048, regrow_s=0.125)
    summary = replace(summary, tokens_per_occupied_s_with_regrow=2.0)
    print_summary(replace(summary, workers_detail=(left,)), {"ledger": Path("a")})
    out = capsys.readouterr().out
    for told in (
        "2, 1 failed (0.50 s, 2.0 KiB moved)",
        "0.12 s",
        "1.25 s",
        "released at",
        "post-finish",
        "with regrow",
    ):
        assert told in out, out
    assert "0 B" not in out


def test_the_table_says_which_rate_it_shows(capsys: pytest.CaptureFixture[str]):
    """Both in real and in emulated seconds the one with regrow, by which policies are compared."""
    start = {"type": "start", "schema": 1, "policy": "release", "settings": {}, "fleet": FLEET}
    rates: dict[str, Any] = {"tokens_per_occupied_s": 321.0, "tokens_per_occupied_s_with_regrow": 123.0}
    emulated = {"wall_s": 0.5, "throughput_tok_s": 777.0} | rates
    summary = replace(summarize([start]), pace=2.0, profile="h200", paced_overrun_share=0.0, pace_valid=True)
    print_summary(replace(summary, emulated=emulated, **rates), {"ledger": Path("a")})
    out = capsys.readouterr().out
    assert "123 tokens with regrow" in out
    assert "123 tokens per occupied s with regrow" in out
    assert "321" not in out


def test_a_pace_that_was_not_kept_is_one_line(capsys: pytest.CaptureFixture[str]):
    start = {"type": "start", "schema": 1, "policy": "static", "settings": {}, "fleet": FLEET}
    summary = replace(summarize([start]), pace=2.0, profile="h200", paced_overrun_share=0.01, pace_valid=True)
    warn_of_overruns(summarize([start]))
    warn_of_overruns(summary)
    assert capsys.readouterr().err == ""
    warn_of_overruns(replace(summary, paced_overrun_share=0.5, pace_valid=False))
    err = capsys.readouterr().err
    assert err.startswith("flexfloor: warning: static: 50.0% of the iterations took longer than --pace 2 allows")
    assert err.count("\n") == 1


def test_signals_become_one_exception_and_the_second_does_not_disturb_the_way_out():
    before = signal.getsignal(signal.SIGTERM)
    reached = []

    def work() -> None:
        with stoppable():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                reached.append("end of clean-up")

    with pytest.raises(Stopped) as caught:
        work()
    assert reached == ["end of clean-up"]
    assert (caught.value.exit_code, caught.value.word) == (143, "terminated")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("signum", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_stopped_command_says_so_on_one_line(tmp_path: Path, signum: signal.Signals, code: int, word: str):
    """The command waits for its prompts, a pipe that nobody writes to."""
    pipe = tmp_path / "prompts.jsonl"
    os.mkfifo(pipe)
    script = (
        "import sys, flexfloor.cli.app as app\n"
        f"app.load_settings = lambda config, given: print('ready', flush=True) or open({str(pipe)!r})\n"
        "sys.exit(app.main(['rollout']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, f"flexfloor: {word}\n")


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m flexfloor rollout --help | true"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
