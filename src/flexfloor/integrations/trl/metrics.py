"""What a rollout and its training step tell the trainer, under names that begin with `flexfloor/`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from flexfloor.ledger.metrics import PREFIX


def log_metrics(trainer: Any, mode: str, values: dict[str, float]) -> None:
    """Into the store that TRL's own metrics stand in: averaged over a logging step, and told to every logger."""
    for name, value in values.items():
        trainer._metrics[mode][f"{PREFIX}{name}"].append(float(value))


@dataclass
class StepClock:
    """Seconds of the training step that is under way, which begins with it."""

    begin: float = field(default_factory=time.perf_counter)
    rollout_s: float = 0.0  # of the rollout function, from its call to its return
    generation_s: float = 0.0  # of these, computed tokens and resizes
    reward_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """train_s: forward, backward and optimizer, with what the trainer does besides. overhead_share: of the step,
        what the rollout function adds beside generation: planning, weights, bookkeeping."""
        step_s = time.perf_counter() - self.begin
        return {
            "step_s": step_s,
            "reward_s": self.reward_s,
            "train_s": max(0.0, step_s - self.rollout_s - self.reward_s),
            "overhead_share": (self.rollout_s - self.generation_s) / step_s,
        }


@dataclass
class StepCallback(TrainerCallback):
    """Times the trainer's steps, and tells when a checkpoint is written."""

    log: Callable[[dict[str, float]], None]
    save: Callable[[str], None]
    clock: StepClock = field(default_factory=StepClock)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.clock = StepClock()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.clock.rollout_s:
            self.log(self.clock.metrics())

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.is_world_process_zero:
            self.save(f"{args.output_dir}/checkpoint-{state.global_step}")
