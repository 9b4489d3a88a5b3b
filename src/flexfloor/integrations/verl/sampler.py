"""verl's sampler, the barrier at the end of a rollout: it adds FlexFloor's metrics to what verl logs."""

from __future__ import annotations

from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from flexfloor.errors import FlexFloorError, InputError
from flexfloor.integrations.verl.driving import Outcome
from flexfloor.integrations.verl.server import SERVER, metrics_of


class FlexFloorSampler(ReplayBuffer):
    """`trainer.v1.sampler.custom_sampler`. Its `sampler_kwargs.poll_interval` (seconds) is how often verl looks whether
    all responses are there; verl's own is 2."""

    poll_interval: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = dict(self.sampler_kwargs or {})
        interval = given.pop("poll_interval", self.poll_interval)
        if given:
            raise InputError(f"trainer.v1.sampler.sampler_kwargs has {', '.join(given)}; there is poll_interval alone")
        if not isinstance(interval, int | float) or interval <= 0:
            raise InputError(f"trainer.v1.sampler.sampler_kwargs.poll_interval is {interval!r}; give seconds above 0")
        self.poll_interval = float(interval)
        self._kept: dict[str, Any] = {}  # metrics of validations, whose own are not logged

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Raises what a rollout has failed with, in verl's trainer."""
        try:
            batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        except RuntimeError as error:  # no sample of the batch has come to an end
            refused = [outcome.refused for outcome in self._collect() if outcome.refused]
            if refused:
                raise FlexFloorError(refused[0]) from error
            raise
        outcomes = self._collect()
        batch = in_order(batch, [uid for outcome in outcomes for uid in outcome.uids])
        own = metrics_of(outcomes)
        if partition_id == "val":
            self._kept |= own
            return batch, metrics
        own, self._kept = self._kept | own, {}
        return batch, metrics | own

    def _collect(self) -> list[Outcome]:
        return ray.get(ray.get_actor(SERVER).collect.remote())


def in_order(batch: KVBatchMeta, uids: list[str]) -> KVBatchMeta:
    """The samples in the order of their prompts, siblings by number, instead of the order in which they ended.

    What is trained then does not depend on when a response was done: neither on the policy nor on chance.
    """
    place = {uid: index for index, uid in enumerate(uids)}

    def by(entry: tuple[str, Any]) -> tuple[int, int, int]:
        uid, session, output = entry[0].rsplit("_", 2)
        return place[uid], int(session), int(output)

    pairs = sorted(zip(batch.keys, batch.tags, strict=True), key=by)
    return KVBatchMeta(keys=[key for key, _ in pairs], tags=[tag for _, tag in pairs], partition_id=batch.partition_id)
