"""TRL's GRPOTrainer with checkpoints that are whole or not there, and a resume that goes on where the run was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from flexfloor.integrations.trl.checkpoints import random_state, save_whole, set_random_state


class EpochSampler(RepeatSampler):
    """TRL's order of prompts, also in a run that was resumed.

    RepeatSampler draws one permutation an epoch, and so gives the first epoch's to the one that a run resumes in.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Told by the trainer at the begin of each epoch, from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


class Trainer(GRPOTrainer):
    """Trains nothing by itself; see GRPOTrainer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for printing in (PrinterCallback, ProgressCallback):
            self.remove_callback(printing)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        assert type(sampler) is RepeatSampler
        sampler.__class__ = EpochSampler
        return sampler

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Draws no random numbers from those of the training, which shuffles its batches with them."""
        state = random_state()
        try:
            return super().evaluate(*arguments, **named)
        finally:
            set_random_state(state)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        save = super()._save_checkpoint
        save_whole(lambda: save(model, trial), folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the model was loaded from that folder, which this would do without the experts."""
