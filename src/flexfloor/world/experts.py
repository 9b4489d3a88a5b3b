"""Expert placement: for every layer, logical expert → (worker, slot). One table that every code path goes through."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from flexfloor.errors import InputError


@dataclass(frozen=True)
class ExpertPlacement:
    """Where each expert lives in one membership epoch.

    worker, slot: int32 [moe_layers, experts]; the first axis counts layers that have experts.
    """

    epoch: int
    worker: np.ndarray
    slot: np.ndarray

    def __post_init__(self) -> None:
        assert self.worker.shape == self.slot.shape, (self.worker.shape, self.slot.shape)

    def check(self, active: Collection[int]) -> None:
        """Every (layer, expert) has a slot on an active worker and no two share one. Raises AssertionError."""
        assert set(np.unique(self.worker)) <= set(active), "an expert lives on a worker that is not active"
        for worker in active:
            slots = self.slot[self.worker == worker]
            assert len(np.unique(slots)) == len(slots), f"two experts share a slot of worker {worker}"

    def slots_on(self, worker: int) -> int:
        """Number of expert slots that `worker` needs."""
        return int((self.worker == worker).sum())

    def slots_needed(self, worker: int) -> int:
        """Slots that `worker` must have for its highest one; holes below it count."""
        own = self.slot[self.worker == worker]
        return int(own.max()) + 1 if own.size else 0

    def experts_on(self, worker: int) -> list[tuple[int, int, int]]:
        """(layer, expert, slot) of every expert on `worker`, by slot."""
        layers, experts = np.nonzero(self.worker == worker)
        found = [(int(la), int(ex), int(self.slot[la, ex])) for la, ex in zip(layers, experts, strict=True)]
        return sorted(found, key=lambda entry: entry[2])


def place_contiguous(moe_layers: int, experts: int, workers: int, epoch: int = 0) -> ExpertPlacement:
    """Contiguous shards, as the training side lays experts out; sizes differ by at most one.

    The worker that gets one expert more rotates from layer to layer, so that totals stay even.
    Raises InputError when there are more workers than experts.
    """
    if workers > experts:
        told = f"workers is {workers} but the model has {experts} experts a layer; give at most {experts}"
        raise InputError(told, settings=("workers",))
    return spread_experts(moe_layers, experts, workers, epoch)


def spread_experts(moe_layers: int, experts: int, workers: int, epoch: int = 0) -> ExpertPlacement:
    """As `place_contiguous`, for any number of workers: with more of them than experts, some have none of a layer."""
    worker = np.empty((moe_layers, experts), dtype=np.int32)
    slot = np.empty_like(worker)
    used = np.zeros(workers, dtype=np.int32)
    base, extra = divmod(experts, workers)
    for layer in range(moe_layers):
        sizes = [base + ((w - layer * extra) % workers < extra) for w in range(workers)]
        worker[layer] = np.repeat(np.arange(workers), sizes)
        for expert in range(experts):
            slot[layer, expert] = used[worker[layer, expert]]
            used[worker[layer, expert]] += 1
    return ExpertPlacement(epoch, worker, slot)
