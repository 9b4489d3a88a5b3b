"""TRL's GRPOTrainer on a FlexFloor fleet: one training whatever the fleet does, with the weights that are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from conftest import SIZES
from datasets import Dataset
from make_tiny_model import make_tiny_model
from trl_training import MEMORY, PROMPTS, Recording, deterministic, make_trainer, train

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError
from flexfloor.integrations.trl import FlexFloorRollout
from flexfloor.integrations.trl.rollout import HISTORY_FILE
from flexfloor.integrations.trl.weights import policy_of
from flexfloor.ledger.events import read_ledger
from flexfloor.world.lengths.store import LengthHistory

STEPS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ends its responses early enough that workers run dry one after another."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "short", **SIZES["qwen3_moe"] | {"mean_tokens": 30})


@pytest.fixture(scope="module")
def static(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(model, tmp_path_factory.mktemp("static"), options={"policy": "static"}, max_steps=STEPS)


def test_two_static_trainings_are_equal_bit_for_bit(model: Path, static: Any, tmp_path: Path) -> None:
    again = train(model, tmp_path, options={"policy": "static"}, max_steps=STEPS)
    assert again.numbers() == static.numbers()
    # Otherwise nothing is learned, and the comparison would hold for anything.
    assert len(set(static.losses)) == len(set(static.hashes)) == STEPS


@pytest.mark.parametrize(
    ("options", "released"),
    # When flexfloor lets somebody go depends on how fast this machine is at the moment.
    [
        ({"policy": "flexfloor", "workers": 3}, 0),
        ({"policy": "release", "chunk": 2}, STEPS // 4),
        ({"policy": "fixed:1"}, STEPS),
    ],
)
def test_elastic_training_equals_static_bit_for_bit(
    model: Path, static: Any, tmp_path: Path, options: dict, released: int
) -> None:
    elastic = train(model, tmp_path, options=options, max_steps=STEPS)
    assert sum(log.get("flexfloor/released_workers", 0) for log in elastic.logs) >= released
    assert elastic.numbers() == static.numbers()


def test_one_altered_token_makes_another_training(model: Path, static: Any, tmp_path: Path) -> None:
    altered = train(model, tmp_path, options={"policy": "static"}, tamper_with=2, max_steps=5)
    assert altered.losses[:2] == static.losses[:2]
    assert altered.losses[3:] != static.losses[3:5]
    assert altered.hashes[:3] == static.hashes[:3]
    assert altered.hashes[3:] != static.hashes[3:5], "the next rollout has other weights"


@pytest.fixture(scope="module")
def rollout(model: Path) -> Any:
    with FlexFloorRollout(model, workers=2, worker_memory=MEMORY, policy="release", chunk=4) as rollout:
        yield rollout


def gap_now(rollout: FlexFloorRollout, trainer: Any) -> float:
    """One rollout with the trainer's weights as they are; all its responses are checked."""
    rollout._check_responses = 99
    before = len(trainer._metrics["train"]["flexfloor/logprob_gap"])
    rollout([PROMPTS[0]] * 4 + [PROMPTS[1]] * 4, trainer)
    gaps = trainer._metrics["train"]["flexfloor/logprob_gap"]
    assert len(gaps) == before + 1
    return gaps[-1]


def test_the_fleet_generates_with_the_weights_that_are_trained(
    rollout: FlexFloorRollout, model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, rollout)
    trainer.model.train()
    assert gap_now(rollout, trainer) < 1e-4
    for _ in range(2):  # twice in a row, each after rollouts that released workers
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        trainer.state.global_step += 1
        assert gap_now(rollout, trainer) < 1e-4
    assert rollout.fleet.info.weights_version == trainer.state.global_step
    tokens = [rollout([PROMPTS[2]] * 4, trainer)["completion_ids"] for _ in range(2)]
    assert tokens[0] != tokens[1], "every rollout of a step draws its own random numbers"


def test_stale_weights_are_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FlexFloorRollout(model, workers=1, worker_memory=MEMORY) as stale:
        monkeypatch.setattr(stale, "_sync", lambda model, step: 0.0)
        with pytest.raises(FlexFloorError, match=r"weights of step 1: log-probabilities .* differ by"):
            make_trainer(model, tmp_path, stale).train()
        with pytest.raises(FlexFloorError, match="closed"):
            stale([PROMPTS[0]], None)


def test_prompts_are_rendered_as_trl_renders_them(rollout: FlexFloorRollout, model: Path, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    for prompts in (PROMPTS, chats):
        trainer = make_trainer(model, tmp_path, rollout, prompts=prompts)
        trainer.model.train()
        asked = [p for p in prompts[:3] for _ in range(4)]
        output = rollout(asked, trainer)
        assert output["prompt_ids"] == trainer._tokenize_prompts(asked)[0]
        assert len({name.split("#")[0] for name in output["request_id"]}) == 3
        assert [name.rpartition("/")[2] for name in output["request_id"]] == ["0", "1", "2", "3"] * 3
        assert all(len(t) == len(p) for t, p in zip(output["completion_ids"], output["logprobs"], strict=True))
        for tokens, reason in zip(output["completion_ids"], output["finish_reason"], strict=True):
            assert (tokens[-1] in trainer.eos_token_ids) == (reason == "stop")


def documented_metrics() -> set[str]:
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[a-z_`, ]+) \|", text.partition("<!-- metrics -->")[2].partition("## From")[0], re.MULTILINE
    )
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_metrics_history_and_ledgers_of_a_training_with_evaluation(model: Path, tmp_path: Path) -> None:
    held_out = Dataset.from_list([{"prompt": f"held out {number}"} for number in range(2)])
    seen: dict[str, list] = {}

    def keeping(prompts: list, completions: list, **columns: Any) -> list[float]:
        for name in ("request_id", "finish_reason"):
            seen.setdefault(name, []).extend(columns[name])
        return [float(len(c)) for c in completions]

    told: list[dict] = []
    options: dict[str, Any] = {"ledgers": tmp_path / "ledgers", "on_record": told.append}
    with FlexFloorRollout(model, workers=2, worker_memory=MEMORY, **options) as rollout:
        trainer = make_trainer(
            model, tmp_path, rollout, reward_funcs=keeping, eval_dataset=held_out, max_steps=3, eval_strategy="steps",
            eval_steps=3, num_generations_eval=2, per_device_eval_batch_size=4,
        )  # fmt: skip
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluation = next(entry for entry in trainer.state.log_history if "eval_reward" in entry)
    assert len(steps) == 3
    parts = ("plan", "prefill", "decode", "resize", "regrow", "sync", "bookkeeping")
    for name in (*parts, "rollout", "reward", "train", "step"):
        assert all(entry[f"flexfloor/{name}_s"] >= 0 for entry in steps), name
    for entry in steps:
        rollout_s = sum(entry[f"flexfloor/{name}_s"] for name in parts)
        assert rollout_s == pytest.approx(entry["flexfloor/rollout_s"], rel=0.01)
        assert entry["flexfloor/rollout_s"] + entry["flexfloor/train_s"] <= entry["flexfloor/step_s"] * 1.01
        assert 0 < entry["flexfloor/overhead_share"] < 1
        assert entry["flexfloor/logprob_gap"] < 1e-4
    assert evaluation["eval_flexfloor/tokens_per_occupied_s"] > 0
    logged = {name.removeprefix("flexfloor/") for name in steps[0] if name.startswith("flexfloor/")}
    assert logged == documented_metrics() - {"paced_overrun_share"}
    with LengthHistory(tmp_path / HISTORY_FILE, create=False) as history:
        observed = history.load()
    assert observed.evaluation.sum() == 4
    assert (~observed.evaluation).sum() == 24
    assert sorted(set(observed.policy_version[~observed.evaluation].tolist())) == [0, 1, 2]
    assert len(seen["request_id"]) == 28
    assert set(seen["finish_reason"]) <= {"stop", "length"}
    names = sorted(file.name for file in (tmp_path / "ledgers").iterdir())
    assert names == ["eval-000003.jsonl", "train-000000.jsonl", "train-000001.jsonl", "train-000002.jsonl"]
    ledger = read_ledger(tmp_path / "ledgers" / "train-000001.jsonl")
    assert ledger[0]["fleet"]["weights_version"] == 1
    assert json.dumps(ledger[-1]["responses_sha256"])
    assert [record["type"] for record in told].count("start") == len(names)
    assert sum(len(record["finished"]) for record in told if record["type"] == "chunk") == 28


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint-2"  # in the middle of the first epoch, which has three steps

    def run(resume: bool, weights: Path) -> tuple[Any, list[str]]:
        with deterministic(), FlexFloorRollout(model, workers=2, worker_memory=MEMORY) as own:
            recording = Recording(own)
            steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
            trainer = make_trainer(model, tmp_path, recording, weights=weights, **steps)
            trainer.train(resume_from_checkpoint=str(saved) if resume else None)
        return trainer, recording.hashes

    def lengths(folder: Path) -> list[int]:
        with LengthHistory(folder / HISTORY_FILE, create=False) as history:
            return history.load().tokens.tolist()

    whole, hashes = run(False, model)
    expected = lengths(tmp_path)
    assert len(expected) == 48
    assert lengths(saved) == expected[:16]
    with pytest.raises(FlexFloorError, match=r"checkpoint-2: the trainer has resumed without its experts; load the"):
        run(True, model)
    resumed, later = run(True, saved)
    assert later == hashes[2:]
    assert lengths(tmp_path) == expected, "what was seen after the checkpoint counts once"
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "flexflor"}, "policy 'flexflor' is not known"),
        ({"knowledge": "oracle"}, "nobody knows lengths in training"),
        ({"knowledge": "history", "history": None}, "needs a length history"),
        ({"min_workers": 3}, "min_workers is 3; the fleet has 2 workers"),
        ({"max_slowdown": -1.0}, "max_slowdown is -1"),
        ({"check_responses": -1}, "check_responses is -1"),
        ({"worker_memry": "1GiB"}, "worker_memry"),
        ({"history": "/proc/no/such/history.sqlite"}, "history"),
    ],
)
def test_options_are_refused_before_a_worker_starts(model: Path, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FlexFloorRollout(model, **({"workers": 2} | options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_p": 0.1}, "min_p is 0.1; FlexFloor does not sample with it"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"generation_kwargs": {"length_penalty": 2.0}}, "generation_kwargs is"),
    ],
)
def test_what_the_trainer_asks_and_we_do_not_do_is_said(
    model: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with FlexFloorRollout(model, workers=1, worker_memory=MEMORY) as rollout:
        with pytest.raises(UnsupportedError, match=message):
            make_trainer(model, tmp_path, rollout, **changes).train()
        assert not rollout._closing.alive, "the fleet has ended with the error"


def test_another_precision_is_refused(model: Path, tmp_path: Path) -> None:
    with (
        FlexFloorRollout(model, workers=1, worker_memory=MEMORY, dtype="bfloat16", numerics="fast") as rollout,
        pytest.raises(InputError, match="trainer's model is float32 and the fleet's bfloat16"),
    ):
        make_trainer(model, tmp_path, rollout).train()


def test_weights_that_are_not_whole_are_refused(model: Path, tmp_path: Path, rollout: FlexFloorRollout) -> None:
    trainer = make_trainer(model, tmp_path, rollout)
    assert policy_of(trainer) is trainer.model
    several = SimpleNamespace(accelerator=SimpleNamespace(num_processes=4), model=trainer.model)
    with pytest.raises(UnsupportedError, match=r"runs in 4 processes.*start it without accelerate launch"):
        policy_of(several)
    trainer.model.peft_config = {"default": None}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"PEFT adapter.*merge_and_unload"):
        policy_of(trainer)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("word " * 5000, r"leaves no room|context"), ("", r"prompt 1 of the batch: prompt is empty")],
)
def test_prompts_that_cannot_run_are_named(model: Path, tmp_path: Path, prompt: str, message: str) -> None:
    with FlexFloorRollout(model, workers=1, worker_memory=MEMORY) as own:
        trainer = make_trainer(model, tmp_path, own)
        trainer.model.train()
        with pytest.raises(InputError, match=message):
            own([prompt] * 4, trainer)
