"""TRL's GRPOTrainer with checkpoints that are whole or not there, and a resume that goes on where the run was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOTrainer

from flexfloor.integrations.trl.checkpoints import save_whole


class Trainer(GRPOTrainer):
    """Trains nothing by itself; see GRPOTrainer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for printing in (PrinterCallback, ProgressCallback):
            self.remove_callback(printing)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        save: Callable[..., None] = super()._save_checkpoint
        save_whole(lambda: save(model, trial), folder)
