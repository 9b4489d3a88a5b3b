"""Checkpoints of a run: which are whole, which to go on from, and one of the last whole step when a run breaks off."""

from __future__ import annotations

import json
import re
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback

from flexfloor.errors import FlexFloorError
from flexfloor.world.memory import format_bytes


class SaveError(FlexFloorError):
    """A checkpoint could not be written; nothing of it is left."""


_FOLDER = re.compile(r"checkpoint-(\d+)")
_SIGNALS = tuple(getattr(signal, s) for s in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, s))


def checkpoints_in(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, whole or not, the newest first."""
    found = [(m, p) for p in output.glob("checkpoint-*") if p.is_dir() and (m := _FOLDER.fullmatch(p.name))]
    return sorted(((int(m[1]), p) for m, p in found), reverse=True)


def what_it_lacks(step: int, folder: Path) -> str | None:
    """What makes a checkpoint useless to go on from, None for a whole one.

    The trainer writes the state last, so that it is whole where that is; the ends of the large files are looked at
    too, for a machine that went down.
    """
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json"
    if not isinstance(state, dict) or state.get("global_step") != step:
        return "trainer_state.json of its step"
    weights = sorted(folder.glob("*.safetensors"))
    try:
        for file in weights:
            with safe_open(str(file), framework="pt"):
                pass
    except (OSError, SafetensorError):
        return f"the end of {file.name}"
    if not weights:
        return "weights"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        if not zipfile.is_zipfile(folder / name):
            return name
    return None


def newest_whole(output: Path, tell: Callable[[str], None]) -> tuple[int, Path] | None:
    """The checkpoint to go on from. tell: gets a line for each newer one that is not whole."""
    for step, folder in checkpoints_in(output):
        lacking = what_it_lacks(step, folder)
        if lacking is None:
            return step, folder
        tell(f"{folder} is not whole (it lacks {lacking}); skipped")
    return None


def has_ended(folder: Path, args: Any) -> bool:
    """Whether a whole checkpoint is that of the last step. The trainer would make one step more of it."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    if args.max_steps > 0:
        return bool(state["global_step"] >= args.max_steps)
    return bool(state["global_step"] >= state["max_steps"] and state["num_train_epochs"] >= args.num_train_epochs)


class WholeSteps(TrainerCallback):
    """Knows when the trainer's weights, optimizer and counters belong to one step; signals wait while they do not.

    Keeps what goes on changing inside of a step as it was at its begin, for a checkpoint that is written later.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._random: dict[str, Any] | None = None
        self._tokens_seen = 0
        self.whole = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.whole = False
        self._hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.whole = True
        self._random, self._tokens_seen = random_state(), state.num_input_tokens_seen
        self.release()

    def _hold(self) -> None:
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if signum not in self._handlers and callable(handler):
                try:
                    signal.signal(signum, lambda number, frame: self._pending.append(number))
                except ValueError:  # only the main thread handles signals, and a thread gets none
                    return
                self._handlers[signum] = handler

    def release(self) -> None:
        """Signals act again; one that came meanwhile acts now. Safe to call twice."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers.clear()
        pending, self._pending = self._pending, []
        if pending:
            signal.raise_signal(pending[0])

    def restore(self, state: Any) -> None:
        """Random numbers and the trainer's count of tokens as after the last whole step of this run."""
        if self._random is not None:
            set_random_state(self._random)
            state.num_input_tokens_seen = self._tokens_seen


def random_state() -> dict[str, Any]:
    """Of every generator that a training may draw from."""
    import random

    import numpy as np
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Random numbers go on as they did when `random_state` was asked."""
    import random

    import numpy as np
    import torch

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def save_last_step(trainer: Any, steps: WholeSteps, tell: Callable[[str], None]) -> None:
    """A checkpoint of the trainer's last whole step, unless there is one. tell: gets a line of it.

    Raises nothing: what broke the run off matters more than why this fails too, which is told.
    """
    step = trainer.state.global_step
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    if step < 1 or not steps.whole:
        return
    if what_it_lacks(step, folder) is None:
        tell(f"{folder} is there; go on with --resume")
        return
    try:
        steps.restore(trainer.state)
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        tell(f"kept {folder}; go on with --resume")
    except Exception as error:
        tell(f"no checkpoint of step {step}: {error}")


def save_whole(save: Callable[[], None], folder: Path) -> None:
    """Run `save`, which writes a checkpoint into the folder; when it fails the folder goes, what was there is kept.

    Raises SaveError naming the folder when the disk says no.
    """
    try:
        save()
    except BaseException as error:
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        # torch writes through an archive of its own, says RuntimeError, and does not name the disk.
        if isinstance(error, OSError | SafetensorError | RuntimeError):
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise SaveError(
                f"{folder} cannot be written ({reason:.120}; {format_bytes(shutil.disk_usage(folder.parent).free)} are "
                "free there); earlier checkpoints are kept: make room and go on with --resume"
            ) from error
        raise
