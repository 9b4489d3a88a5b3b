"""A short training with TRL on a tiny model, for tests: what it came to, number by number."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from flexfloor.integrations.trl import FlexFloorRollout

MEMORY = "64MiB"
PROMPTS = [f"tell me {number} things" for number in range(6)]


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """As good as random: equal rewards inside a group would teach nothing, and a rule would make all lengths equal."""
    return [(hash_of(c) % 100) / 100 for c in completions]


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


@dataclass
class Record:
    """losses, rewards: one entry a step. hashes: of the responses of each rollout. weights: hash of the final ones."""

    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    weights: str = ""
    logs: list[dict[str, Any]] = field(default_factory=list)

    def numbers(self) -> tuple:
        return self.losses, self.rewards, self.hashes, self.weights


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def config(out: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 40, "max_steps": 4,
        "learning_rate": 1e-4, "logging_steps": 1, "save_strategy": "no", "seed": 3, "temperature": 1.0,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    return GRPOConfig(**(values | changes))


def make_trainer(model: Path, out: Path, rollout: Any, prompts: list[Any] | None = None, **changes: Any) -> GRPOTrainer:
    weights = AutoModelForCausalLM.from_pretrained(changes.pop("weights", model), dtype=torch.float32)
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts or PROMPTS])
    rewards = changes.pop("reward_funcs", reward)
    evaluation = changes.pop("eval_dataset", None)
    trainer = GRPOTrainer(
        model=weights,
        reward_funcs=rewards,
        args=config(out, **changes),
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Recording:
    """A rollout function around another one that keeps the hash of every rollout."""

    def __init__(self, rollout: FlexFloorRollout, tamper_with: int | None = None) -> None:
        self.rollout, self.hashes, self.outputs, self._tamper_with = rollout, list[str](), list[dict](), tamper_with

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        output = self.rollout(prompts, trainer)
        if self._tamper_with == len(self.hashes):
            output["completion_ids"][0][0] ^= 1  # one token of one response
        self.hashes.append(str(self.rollout.responses_sha256))
        self.outputs.append(output)
        return output


def train(
    model: Path, out: Path, *, tamper_with: int | None = None, options: dict[str, Any] | None = None, **changes: Any
) -> Record:
    """tamper_with: rollout in which one token is altered. options: of FlexFloorRollout."""
    fleet: dict[str, Any] = {"workers": 2, "worker_memory": MEMORY} | (options or {})
    with deterministic(), FlexFloorRollout(model, **fleet) as own:
        recording = Recording(own, tamper_with)
        trainer = make_trainer(model, out, recording, **changes)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return Record(
        [entry["loss"] for entry in logs],
        [entry["reward"] for entry in logs],
        recording.hashes,
        digest.hexdigest(),
        trainer.state.log_history,
    )
