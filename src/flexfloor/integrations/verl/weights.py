"""The training side of weight updates: runs in every worker of verl's actor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import ray
import torch
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout

from flexfloor.errors import UnsupportedError
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.weights import StagedWeights
from flexfloor.integrations.verl.server import SERVER
from flexfloor.integrations.verl.settings import engine_dtype


class FlexFloorAdapter(BaseRollout):
    """What verl calls `rollout` in a worker of the training.

    The tensors of a model come one by one out of a generator that is a collective of all ranks. Rank 0 writes them to
    shared memory, where the server checks them as a whole before a worker of the fleet reads them.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ["RANK"])

    async def resume(self, tags: list[str]) -> None:
        if self._rank == 0:
            await self._server().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self._rank == 0:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """weights: name and full tensor of each parameter, per expert.

        Raises InputError for names or shapes that are not the model's; the fleet then has its old weights.
        """
        refused: UnsupportedError | None = None
        if peft_config is not None:
            refused = UnsupportedError(
                "actor_rollout_ref.model.lora_rank: an adapter cannot be sent by itself: set model.lora.merge=True"
            )
        if wire_format != "named_tensors":
            refused = UnsupportedError(f"weights come as {wire_format!r}; leave checkpoint_engine.backend at naive")
        source = iter(weights)
        try:
            if refused is not None:
                raise refused
            if self._rank == 0:
                await self._send(source, global_steps)
        finally:
            # Whatever happened here: the other ranks wait in the collective behind every tensor that is left.
            for _ in source:
                pass

    async def _send(self, weights: Iterator[tuple[str, torch.Tensor]], version: int | None) -> None:
        path = copy_to_local(self.model_config.path)
        staged = StagedWeights(weights, inspect_checkpoint(path, engine_dtype(self.config.dtype)))
        try:
            await self._server().load_weights.remote(str(staged.info.path), version)
        finally:
            staged.remove()

    def _server(self) -> Any:
        return ray.get_actor(SERVER)
