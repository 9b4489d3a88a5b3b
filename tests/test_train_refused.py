"""What `flexfloor train` refuses with a checkpoint and TRL at hand: on one line, no process started, nothing left."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from train_place import CONFIG, Place

from flexfloor.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Place:
    return Place(tmp_path_factory.mktemp("train"), checkpoint("tiny"))


REFUSED = {
    "unknown field": ("trl.learning_rat=1", "unknown key 'learning_rat' in [trl]; did you mean 'learning_rate'?"),
    "field of a wrong type": ("trl.learning_rate=fast", "--set trl.learning_rate=fast: input should be a valid number"),
    "TRL's own refusal": (
        "trl.num_generations=3",
        "--set trl.num_generations=3: ValueError: generation_batch_size (4) must be divisible by",
    ),
    "weights for no reward": (
        "trl.reward_weights=[1.0, 2.0]",
        "train.toml: trl, --set trl.reward_weights=[1.0, 2.0]: ValueError: Number of reward weights (2)",
    ),
    "too few prompts": (
        "task.arguments={n=1}",
        "1 training prompts are fewer than the 2 of one generation (generation_batch_size 4 / num_generations 2); add",
    ),
    "evaluation of nothing": ("trl.eval_strategy=steps", "eval_strategy needs held-out prompts; give task.eval"),
    "no such model": ("model=nowhere", "nowhere: no such folder"),
    "budget below the floor": ("engine.worker_memory=8MiB", "worker_memory 8.0 MiB is too small"),
    "unknown policy": ("policy=best", "policy 'best' is not known"),
    "more workers than experts": ("workers=17", "workers is 17 but the model has 16 experts"),
    "no temperature": (
        "trl.temperature=-1",
        "--set trl.temperature=-1: temperature is -1.0; give 0 (greedy) or a positive number",
    ),
    "no probability": ("trl.top_p=2", "--set trl.top_p=2: top_p is 2.0; give a number in (0, 1]"),
    "no room for a token": (
        "trl.max_completion_length=0",
        "--set trl.max_completion_length=0: max_completion_length is 0; give at least 1",
    ),
    "empty batches": ("trl.per_device_train_batch_size=0", "per_device_train_batch_size is 0; give 1 or more"),
    "no steps": ("trl.max_steps=0", "--set trl.max_steps=0: max_steps is 0; there would be nothing to train"),
    "limits that do not go together": ("min_workers=3", "min_workers is 3; the fleet has 2 workers, give 1 to 2"),
    "slowdown without end": ("max_slowdown=inf", "max_slowdown=inf: input should be less than 1"),
    "unknown profile": ("engine.profile=h9", "profile 'h9' is not known; there is h200"),
    "pace of nothing": ("engine.pace_model=x", "pace_model 'x' without a pace; give a scale as engine.pace too"),
    "unknown launcher": ("engine.launcher=slurm", "launcher 'slurm' is not known; there is local"),
    "no GPU": ("engine.device=cuda", "device is cuda, but torch sees no GPU; use engine.device cpu"),
    "no folder for the history": ("history=/none/h", "/none/h: the folder of the history does not exist; make it"),
    "no room for a response": (
        "engine.worker_memory=71MiB --set trl.max_completion_length=2000",
        "--set engine.worker_memory=71MiB: worker_memory 71.0 MiB is too small",
    ),
    "unknown field, like no other": ("trl.lr=1", "unknown key 'lr' in [trl]; it takes the fields of TRL's GRPOConfig"),
    "unknown precision": ("trl.model_init_kwargs.dtype=float8", "dtype is 'float8'; give one of auto, float32"),
    "options that are no table": (
        "trl.model_init_kwargs=dtype",
        "--set trl.model_init_kwargs=dtype: model_init_kwargs is 'dtype'; give a table",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_a_process_starts(
    case: str, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    change, told = REFUSED[case]

    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("flexfloor.fleets.engine.launcher.LocalLauncher.launch", start, raising=False)
    assert place.train("refused", "--quiet", "--set", *re.split(" (--set) ", change)) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("flexfloor: error: ")
    assert f"--set {change.partition(' --set')[0]}" in err
    assert set(re.findall(r"--[a-z-]+", err)) == {"--set"}, "options of other commands"
    assert err.count("\n") == 1
    assert not (place.folder / "refused").exists()


IN_FILE = {
    "policy": ("workers = 2", 'policy = "best"', "policy: policy 'best' is not known; there is static"),
    "workers": ("workers = 2", "workers = 17", "workers: workers is 17 but the model has 16 experts a layer; give at"),
    "min_workers": ("workers = 2", "min_workers = 3", "min_workers: min_workers is 3; the fleet has 2 workers"),
    "max_slowdown": ("workers = 2", "max_slowdown = inf", "max_slowdown: input should be less than 1, got inf"),
    "knowledge": (
        "workers = 2",
        'knowledge = "shuffled"\nhistory = false',
        "knowledge: knowledge 'shuffled' needs a length history; leave history as it is",
    ),
    "worker_memory": ("96MiB", "8MiB", "engine.worker_memory: worker_memory 8.0 MiB is too small"),
    "device": ("[engine]", '[engine]\ndevice = "cuda"', "engine.device: device is cuda, but torch sees no GPU"),
    "reward": ("break_task:reward", "nonesuch:f", "task.reward: there is no module 'nonesuch'"),
    "prompts": ("break_task:rows", "none.jsonl", "task.train: none.jsonl: prompts cannot be read"),
    "sampling": ("[trl]", "[trl]\ntop_p = 2.0", "trl.top_p: top_p is 2.0; give a number in (0, 1]"),
    "TRL's own": ("num_generations = 2", "num_generations = 3", "trl: ValueError: generation_batch_size (4) must be"),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_refusals_name_the_file_and_the_key(case: str, place: Place, capsys: pytest.CaptureFixture[str]):
    old, new, told = IN_FILE[case]
    file, output = place.folder / "own.toml", place.folder / "own"
    file.write_text(CONFIG.replace(old, new, 1))
    assert main(["train", str(file), "--quiet", "--set", f"model={place.model}", "--set", f"output={output}"]) == 2
    assert f"flexfloor: error: {file}: {told}" in capsys.readouterr().err
    assert not output.exists()


def test_an_output_folder_that_cannot_be_made(place: Place, capsys: pytest.CaptureFixture[str]):
    assert place.train("unmade", "--quiet", "--set", "output=/proc/unmade") == 2
    err = capsys.readouterr().err
    assert "output /proc/unmade cannot be made" in err
    assert err.count("\n") == 1


def test_an_output_folder_that_another_run_writes(place: Place, capsys: pytest.CaptureFixture[str]):
    folder = place.folder / "shared"
    folder.mkdir()
    with FileLock(folder / ".lock"):
        assert place.train("shared", "--quiet") == 2
    err = capsys.readouterr().err
    assert f"output {folder} is in use by another run; name another folder" in err
    assert err.count("\n") == 1
