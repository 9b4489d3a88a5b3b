"""`flexfloor train` with a fleet: what a run leaves, that it goes on bit for bit, and every way to break off."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from train_place import Place

from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.integrations.trl.checkpoints import newest_whole, what_it_lacks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BREAK", "OUT"):
            patch.delenv(name, raising=False)
        yield Place(tmp_path_factory.mktemp("train"), checkpoint("tiny"))


@pytest.fixture(scope="module")
def whole(place: Place) -> Path:
    """The output of a run of five steps that nothing disturbed: two steps an epoch."""
    changes = ["task.eval=break_task:rows", "task.eval_arguments={n=2}"]
    assert place.train("whole", *(part for change in changes for part in ("--set", change))) == 0
    return place.folder / "whole"


@pytest.fixture(autouse=True)
def no_process_is_left(whole: Path) -> Iterator[None]:
    """Workers end with the run; the process that they are forked from stays with its driver."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_equal(run: Path, other: Path) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_a_run_leaves(place: Place, whole: Path):
    assert {p.name for p in whole.iterdir() if not p.name.startswith("checkpoint")} >= {
        "config.toml", "metrics.jsonl", "ledgers", "length_history.sqlite", "model", "runs"
    }  # fmt: skip
    assert sorted(p.name for p in whole.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert inspect_checkpoint(whole / "model").shape == inspect_checkpoint(place.model).shape
    before, after = load_file(place.model / "model.safetensors"), weights(whole)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "reward" in r] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in records if "eval_reward" in r] == [0, 5]
    assert all(r["flexfloor/tokens_per_occupied_s_with_regrow"] > 0 for r in records if "reward" in r)
    config = tomllib.loads((whole / "config.toml").read_text())
    assert (config["policy"], config["deterministic"], config["trl"]["bf16"]) == ("flexfloor", True, False)
    assert config["trainer_threads"] == torch.get_num_threads()
    assert len(list((whole / "ledgers").glob("train-*.jsonl"))) == 5


def test_the_table_at_the_end(place: Place, whole: Path, capsys: pytest.CaptureFixture[str]):
    """A run that has ended ends again at once, and shows all of it."""
    assert place.train("whole", "--resume", "--quiet") == 0
    out, err = capsys.readouterr()
    for told in ("held-out reward before", "held-out reward after", "tokens per occupied s", str(whole / "model")):
        assert told in out
    assert err == ""


def test_a_reward_that_raises_keeps_the_last_step_and_the_run_goes_on_bit_for_bit(
    place: Place, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = place.folder / "raises"
    monkeypatch.setenv("BREAK", "raise:4")
    assert place.train("raises") == 2
    line = last_line(capsys)
    assert line.startswith("flexfloor: error: reward function reward in step 4 raised ValueError: out of ideas (first")
    assert line.endswith(f"; see {run / 'error.txt'}")
    assert "break_task.py" in (run / "error.txt").read_text()
    assert what_it_lacks(3, run / "checkpoint-3") is None  # in the middle of the second epoch
    (run / "checkpoint-4").mkdir()
    shutil.copy(run / "checkpoint-3" / "model.safetensors", run / "checkpoint-4")
    monkeypatch.delenv("BREAK")
    # What the optimizer has saved goes on whatever the config says now, and the run says so.
    changes = ("--set", "trl.learning_rate=0.5", "--set", "trl.weight_decay=0.3", "--set", "trl.adam_beta1=0.1")
    assert place.train("raises", "--resume", *changes) == 0
    err = capsys.readouterr().err
    for name in ("learning_rate", "weight_decay", "adam_beta1"):
        (told,) = (line for line in err.splitlines() if f"changed since the run began: trl.{name} " in line)
        assert told.endswith("(without effect: the checkpoint's optimizer goes on)")
    assert "checkpoint-4 is not whole (it lacks trainer_state.json); skipped" in err
    assert "going on from" in err
    assert_equal(run, whole)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "reward" in r] == [1, 2, 3, 4, 5]


def test_policy_and_workers_change_nothing_in_the_training(place: Place, whole: Path):
    assert (
        place.train("alone", "--quiet", "--set", "policy=static", "--set", "workers=1", "--set", "history=false") == 0
    )
    assert_equal(place.folder / "alone", whole)
    assert not (place.folder / "alone" / "length_history.sqlite").exists()


def test_a_reward_that_is_no_number(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("BREAK", "nan:1")
    assert place.train("nan", "--quiet") == 2
    assert "reward function reward in step 1 returned nan for row 0 (prompt 'tell me" in last_line(capsys)
    assert not list((place.folder / "nan").glob("checkpoint-*"))
    monkeypatch.delenv("BREAK")
    assert place.train("nan", "--resume", "--set", "trl.max_steps=1", "--set", "trl.weight_decay=0.1") == 0
    err = capsys.readouterr().err
    assert "no whole checkpoint to go on from: starting from the beginning" in err
    assert "changed since the run began: trl.max_steps 5 → 1" in err
    assert "without effect" not in err, "there was no checkpoint to take anything from"


def test_ctrl_c_keeps_the_last_step(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("BREAK", "interrupt:2")
    assert place.train("interrupted") == 130
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "flexfloor: interrupted"
    assert "checkpoint-1; go on with --resume" in err
    assert what_it_lacks(1, place.folder / "interrupted" / "checkpoint-1") is None


def test_a_worker_that_dies_keeps_the_last_step(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("BREAK", "kill:1")
    assert place.train("killed") == 1
    assert last_line(capsys).startswith("flexfloor: error: worker ")
    assert what_it_lacks(1, place.folder / "killed" / "checkpoint-1") is None


def test_a_full_disk_takes_one_checkpoint_only(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = place.folder / "full"
    monkeypatch.setenv("BREAK", "full:4")
    monkeypatch.setenv("OUT", str(run))
    assert place.train("full") == 1
    line = last_line(capsys)
    assert line.startswith(f"flexfloor: error: {run / 'checkpoint-4'} cannot be written (")
    assert line.endswith("earlier checkpoints are kept: make room and go on with --resume")
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-2"]
    assert newest_whole(run, pytest.fail) == (2, run / "checkpoint-2")


def test_epochs_have_trl_s_order_of_prompts():
    from trl.trainer.utils import RepeatSampler

    from flexfloor.integrations.trl.trainer import EpochSampler

    arguments = {"data_source": range(7), "mini_repeat_count": 2, "batch_size": 3, "seed": 5}
    plain, own = RepeatSampler(**arguments), EpochSampler(**arguments)
    orders = [list(plain) for _ in range(3)]
    assert orders[0] != orders[1]
    for epoch in (2, 0, 1):
        own.set_epoch(epoch)
        assert list(own) == orders[epoch]
