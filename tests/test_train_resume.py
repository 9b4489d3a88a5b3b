"""`flexfloor train --resume` with other settings, and starts that failed: refused in one line, or gone on with."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model
from train_place import Place

from flexfloor.cli import main
from flexfloor.integrations.trl.checkpoints import newest_whole
from flexfloor.integrations.trl.checks import clear_start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BREAK", raising=False)
        yield Place(tmp_path_factory.mktemp("train"), checkpoint("tiny"))


@pytest.fixture(scope="module")
def begun(place: Place) -> Path:
    """The output of a run of one step."""
    assert place.train("begun", "--quiet", "--set", "trl.max_steps=1") == 0
    return place.folder / "begun"


@pytest.fixture(scope="module")
def models(place: Place) -> dict[str, Path]:
    """Models that are not the run's, and one that is, elsewhere."""
    found = {name: place.folder / name for name in ("other weights", "other shape", "other tokenizer", "moved")}
    make_tiny_model(found["other weights"], arch="qwen3_moe", seed=5)
    make_tiny_model(found["other shape"], arch="qwen3_moe", layers=3)
    for name in ("other tokenizer", "moved"):
        shutil.copytree(place.model, found[name])
    file = found["other tokenizer"] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    return found


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.startswith("flexfloor: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("flexfloor: error: ").rstrip("\n")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("other weights", "other weights"),
        ("other tokenizer", "another tokenizer"),
        ("other shape", "layers 3 instead of 4, moe_layers (0, 1, 2) instead of (0, 1, 2, 3)"),
    ],
)
@pytest.mark.parametrize("kept", [True, False], ids=["", "without what it began with"])
def test_another_model_is_refused(
    place: Place, begun: Path, models: dict[str, Path], no_process: None, capsys: pytest.CaptureFixture[str],
    model: str, how: str, kept: bool,
):  # fmt: skip
    saved = (begun / "begin.json").read_bytes()
    if not kept:
        (begun / "begin.json").unlink()  # as a run by an earlier version
        how = how if model == "other shape" else "another folder"
    try:
        assert place.train("begun", "--quiet", "--resume", "--set", f"model={models[model]}") == 2
    finally:
        (begun / "begin.json").write_bytes(saved)
    given = models[model]
    assert one_line(capsys) == (
        f"--set model={given}: {given} is not the model that the run in {begun} began with, {place.model} ({how}); "
        "give that one, or name another output to begin a new run"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("trl.seed=4", "trl.seed is 4, but 42 in the run that"),
        ("trl.optim=sgd", "trl.optim is 'sgd', but 'adamw_torch_fused' in the run that"),
        ("trl.per_device_train_batch_size=8", "trl.per_device_train_batch_size is 8, but 4 in the run that"),
        ("engine.dtype=bfloat16", "engine.dtype is 'bfloat16', but 'float32' in the run that"),
        ("trl.model_init_kwargs.dtype=bfloat16", "engine.dtype is 'bfloat16', but 'float32' in the run that"),
        ("task.arguments={n=6}", "task.arguments.n is 6, but not given in the run that"),
    ],
)
def test_what_a_checkpoint_hangs_on_is_refused(
    place: Place, begun: Path, no_process: None, capsys: pytest.CaptureFixture[str], change: str, told: str
):
    assert place.train("begun", "--quiet", "--resume", "--set", change) == 2
    line = one_line(capsys)
    assert line.startswith(f"--set {change}: {told} {begun} holds (")
    assert line.endswith("; give it as it was, or name another output to begin a new run")


def test_what_comes_to_the_same_goes_on(
    place: Place, begun: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    """The same model elsewhere, its own precision by name, the same prompts by other arguments; and what is free."""
    changes = (
        f"model={models['moved']}", "engine.dtype=float32", "task.arguments={n=4}", "trl.max_steps=2", "workers=1",
        "policy=static", "trl.beta=0.1",
    )  # fmt: skip
    run = place.folder / "goes on"
    shutil.copytree(begun, run)
    shutil.rmtree(run / "model")
    assert place.train("goes on", "--resume", *(part for change in changes for part in ("--set", change))) == 0
    err = capsys.readouterr().err
    assert "changed since the run began: workers 2 → 1" in err
    assert "changed since the run began: task.arguments.n None → 4" in err
    assert newest_whole(run, pytest.fail) == (2, run / "checkpoint-2")


def test_rewards_of_none_end_the_first_step_and_block_no_other_start(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = place.folder / "silent"
    monkeypatch.setenv("BREAK", "none:1")
    assert place.train("silent", "--quiet") == 2
    line = one_line(capsys)
    assert line.startswith("reward function reward in step 1 returned None for every response (first row: prompt 'tell")
    assert line.endswith("; return a number where one counts")
    assert (run / "length_history.sqlite").exists()
    stale = run / "ledgers" / "train-000009.jsonl"
    stale.write_text("x")
    monkeypatch.delenv("BREAK")
    assert place.train("silent", "--set", "trl.max_steps=1", "--set", "task.arguments={begin='say'}") == 0
    assert "changed since" not in capsys.readouterr().err, "it is another run"
    assert not stale.exists()
    assert newest_whole(run, pytest.fail) == (1, run / "checkpoint-1")
    assert place.train("silent", "--quiet") == 2
    assert "holds files already" in one_line(capsys)


@pytest.mark.parametrize(
    "files",
    [
        {"config.toml": "", "runs": "x"},  # somebody's own
        {"config.toml": "", "begin.json": "{}", "thesis.txt": "x"},
        {"config.toml": "", "begin.json": "{}", "metrics.jsonl": '{"step": 3, "reward": 0.5}\n'},  # checkpoint lost
    ],
)
def test_what_is_not_a_start_that_failed_is_kept(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str]
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert place.train("kept", "--quiet", "--set", f"output={tmp_path}") == 2
    assert "holds files already" in one_line(capsys)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == files


def test_only_a_folder_with_a_begin_is_cleared(tmp_path: Path):
    for name in ("config.toml", "metrics.jsonl", "thesis.txt", "length_history.sqlite"):
        (tmp_path / name).write_text("x")
    (tmp_path / "ledgers").mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    clear_start(tmp_path, keep=[])
    assert {p.name for p in tmp_path.iterdir()} == before
    (tmp_path / "begin.json").write_text("{}")
    clear_start(tmp_path, keep=[tmp_path / "length_history.sqlite"])
    assert {p.name for p in tmp_path.iterdir()} == {"thesis.txt", "length_history.sqlite"}


def test_a_killed_worker_is_one_line_with_the_command_that_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = place.folder / "killed"
    monkeypatch.setenv("BREAK", "kill:1")
    assert place.train("killed", "--quiet") == 1
    line = one_line(capsys)
    told, _, command = line.partition("go on with: ")
    assert told in [f"worker {w} was killed by SIGKILL (step 2); {run / 'checkpoint-1'} is kept, " for w in (0, 1)]
    words = shlex.split(command)
    assert words == ["flexfloor", *place.arguments("killed"), "--resume"]
    monkeypatch.delenv("BREAK")
    assert main([*words[1:], "--quiet", "--set", "trl.max_steps=2"]) == 0
    assert newest_whole(run, pytest.fail) == (2, run / "checkpoint-2")


@pytest.mark.parametrize("there", [False, True])
def test_workers_that_do_not_start_leave_the_folder_as_it_was(
    place: Place, capsys: pytest.CaptureFixture[str], there: bool
):
    folder = place.folder / "unborn"
    if there:
        folder.mkdir()
    assert place.train("unborn", "--quiet", "--set", "engine.worker_timeout=0.001") == 1
    line = one_line(capsys)
    assert line.startswith("worker ")
    assert "gave no sign of life for 0.001 s (engine.worker_timeout); no step is kept, begin again with: " in line
    assert not line.endswith("--resume")
    assert folder.exists() == there
    assert not there or not list(folder.iterdir())
