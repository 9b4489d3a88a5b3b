"""New weights on their way into the workers: one copy in shared memory, checked as a whole before a worker reads it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexfloor.errors import InputError, UnsupportedError
from flexfloor.fleets.engine.checkpoint import CheckpointInfo, inspect_checkpoint
from flexfloor.fleets.engine.launcher import Launcher
from flexfloor.fleets.engine.machine import Machine, make_folder
from flexfloor.world.memory import format_bytes

Weights = Path | str | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A checkpoint folder, or the parameters of a model under their names (`model.named_parameters()`)."""


class StagedWeights:
    """Weights that workers can read by `info_on` their machine, until `remove`.

    only_here: of a folder, that the driver's machine alone has it.
    Raises InputError, naming the tensor, for a name that is missing, unknown or there twice, or a wrong shape;
    UnsupportedError for adapters that are not merged.
    """

    def __init__(self, weights: Weights, like: CheckpointInfo, only_here: bool = False) -> None:
        self._folder: Path | None = None
        self._copies: dict[Machine, Path] = {}
        self._launcher: Launcher | None = None
        self._travels = only_here or not isinstance(weights, str | Path)
        try:
            if isinstance(weights, str | Path):
                self.info = inspect_checkpoint(weights, str(like.dtype).removeprefix("torch."))
            else:
                self.info = self._stage(weights, like)
            _compare(self.info, like)
        except BaseException:
            self.remove()
            raise

    def spread(self, launcher: Launcher, machines: Iterable[Machine]) -> None:
        """Have them on all of these machines, each of which gets one copy. Raises FlexFloorError."""
        missing = [m for m in machines if m.name != launcher.home.name and m not in self._copies]
        if self._travels and missing:
            self._launcher = launcher
            self._copies |= launcher.copy_folder(Path(self.info.path), missing)

    def info_on(self, machine: Machine) -> CheckpointInfo:
        """What a worker on a machine reads: there after `spread`."""
        return self.info.moved_to(self._copies[machine]) if machine in self._copies else self.info

    def remove(self) -> None:
        if self._launcher is not None:
            self._launcher.remove_folders(self._copies)
            self._copies = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stage(self, weights: Any, like: CheckpointInfo) -> CheckpointInfo:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in pairs:
            if "lora_" in name or ".base_layer." in name:
                raise UnsupportedError(f"weights: {name} belongs to an adapter; merge it into the model first")
            if name in tensors:
                raise InputError(f"weights: {name} is there twice")
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"weights: {name} is a {type(tensor).__name__}, not a tensor")
            if not (name == "lm_head.weight" and getattr(like.config, "tie_word_embeddings", False)):
                tensors[name] = tensor.detach().to("cpu", like.dtype).contiguous()
        if not tensors:
            raise InputError("weights: there are none")
        size = sum(t.nbytes for t in tensors.values())
        self._folder = make_folder(size)
        try:
            save_file(tensors, self._folder / "model.safetensors")
        except OSError as error:
            raise InputError(f"weights: {format_bytes(size)} cannot be shared ({error.strerror})") from None
        except RuntimeError as error:  # tensors that share memory, though their names do not belong together
            raise InputError(f"weights: {' '.join(str(error).split())[:200]}") from None
        like.config.save_pretrained(self._folder)
        try:
            return inspect_checkpoint(self._folder, str(like.dtype).removeprefix("torch."))
        except InputError as error:
            raise InputError(str(error).replace(str(self._folder), "weights")) from None


def _compare(info: CheckpointInfo, like: CheckpointInfo) -> None:
    """Raises InputError when `info` is not the same model as `like` with other values."""
    tied = {"lm_head.weight"} if getattr(like.config, "tie_word_embeddings", False) else set()
    wanted = {n for n in like.dense if not n.endswith("rotary_emb.inv_freq")} - tied
    found = {n for n in info.dense if not n.endswith("rotary_emb.inv_freq")} - tied
    if missing := sorted(wanted - found):
        raise InputError(f"weights: tensor {missing[0]} is missing")
    if unknown := sorted(found - wanted):
        raise InputError(f"weights: tensor {unknown[0]} does not belong to this model")
    for name in sorted(wanted):
        if info.dense[name].shape != like.dense[name].shape:
            raise InputError(
                f"weights: {name} has shape {list(info.dense[name].shape)}, not {list(like.dense[name].shape)}"
            )
    if info.shape.moe_layers != like.shape.moe_layers:
        layer = min(set(info.shape.moe_layers) ^ set(like.shape.moe_layers))
        raise InputError(f"weights: layer {layer} has experts in only one of the new weights and the model")
    if info.shape != like.shape:
        raise InputError("weights: they belong to a model of another shape")
    doubled = [
        (layer, expert)
        for layer, expert, part in info.experts
        if expert >= 0 and (layer, -1, "down" if part == "down" else "gate_up") in info.experts
    ]
    if doubled:
        layer, expert = doubled[0]
        raise InputError(f"weights: expert {expert} of layer {layer} is there twice, fused and by itself")
