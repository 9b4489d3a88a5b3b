"""Other work on what released workers free: a Ray actor in the bundle of each of them, until they return.

verl reserves a bundle of its placement group for every worker of the training, and the worker takes a share of the
bundle's device (a third, by verl's default). The rest belongs to nobody, but the device's memory is full while the
fleet generates. Once a worker has left, its part of that memory is free, and an actor fits into the same bundle.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flexfloor.errors import InputError
from flexfloor.fleets.engine.fleet import EngineFleet
from flexfloor.integrations.verl.settings import CUSTOM
from flexfloor.progress import ResizeOutcome
from flexfloor.world.resize import ResizePlan

_log = logging.getLogger(__name__)


class Consumer(Protocol):
    """What `rollout.custom.consumer` names. It runs as a Ray actor on the device of a released worker."""

    def __init__(self, worker: int) -> None:
        """worker: whose device it is."""

    def run(self) -> float:
        """Work until it is done or `stop` was called. Returns how much was done, in units of its own."""

    def stop(self) -> None:
        """Asked to end soon, on another thread. Who is not done after the grace is killed, and counts nothing."""


@dataclass(frozen=True)
class Bundle:
    """Where a worker's device is reserved: a bundle of a placement group."""

    group: Any
    index: int


@dataclass
class _Running:
    actor: Any
    ready: Any
    work: Any
    begin: float


class Consumers:
    """Starts an actor when a worker is released, and has all of them gone before the workers come back.

    name: module:class. gpus: share of the bundle's device that an actor reserves. grace: seconds between the call of
    `stop` and the kill. Raises InputError for a name that cannot be imported.
    """

    def __init__(self, name: str, bundles: list[Bundle], gpus: float, grace: float) -> None:
        self._kind, self._bundles, self._gpus, self._grace = load_consumer(name), bundles, gpus, grace
        self._running: list[_Running] = []
        self._seconds = self._units = 0.0
        self._started = self._killed = self._failed = self._freed = 0

    def note_freed(self, count: int) -> None:
        """Bytes that released workers have given back."""
        self._freed += count

    def start(self, worker: int) -> None:
        """Called once the worker's memory is free. Returns at once: the actor starts while the rollout goes on."""
        bundle = self._bundles[worker]
        actor: Any = ray.remote(self._kind).options(
            num_cpus=0,
            num_gpus=self._gpus,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
        )
        handle = actor.remote(worker)
        self._running.append(_Running(handle, handle.__ray_ready__.remote(), handle.run.remote(), time.monotonic()))
        self._started += 1

    def recall(self) -> float:
        """End all actors. Returns the seconds that it took."""
        begin = time.monotonic()
        for running in self._running:
            if ray.wait([running.ready], timeout=0)[0]:
                running.actor.stop.remote()
        deadline = begin + self._grace
        for running in self._running:
            ready = bool(ray.wait([running.ready], timeout=0)[0])
            left = max(0.0, deadline - time.monotonic())
            if not (ready and ray.wait([running.work], timeout=left)[0]):
                self._killed += 1
            else:
                self._take(running)
            ray.kill(running.actor)
        self._running.clear()
        return time.monotonic() - begin

    def _take(self, running: _Running) -> None:
        """What a consumer came to. The training does not depend on it: one that raised is a warning."""
        try:
            self._units += float(ray.get(running.work))
            self._seconds += time.monotonic() - running.begin
        except (RayError, TypeError, ValueError) as error:
            self._failed += 1
            told = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            _log.warning("%s.consumer: it failed, and counts nothing: %s", CUSTOM, told[:300])

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: actors started, killed before they were done, failed; of the others worker-seconds from
        start to end, and what they did; and memory that workers' processes gave back by their release."""
        taken = {
            "consumers": float(self._started),
            "consumers_killed": float(self._killed),
            "consumers_failed": float(self._failed),
            "freed_bytes": float(self._freed),
            "consumer_s": self._seconds,
            "consumer_units": self._units,
        }
        self._seconds = self._units = 0.0
        self._started = self._killed = self._failed = self._freed = 0
        return taken


class RecallingFleet:
    """A fleet whose workers come back only when nobody else uses their devices."""

    def __init__(self, fleet: EngineFleet, consumers: Consumers) -> None:
        self._fleet, self._consumers = fleet, consumers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def start(self) -> None:
        self._consumers.recall()  # after a rollout that was given up
        self._fleet.start()

    def regrow(self) -> float:
        """Seconds, with those that consumers took to go."""
        return self._consumers.recall() + self._fleet.regrow()

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        before = self._fleet.status().workers
        outcome = self._fleet.apply(plan)
        if outcome.failed is None:
            after = self._fleet.status().workers
            self._consumers.note_freed(sum(before[w].memory_bytes - after[w].memory_bytes for w in plan.leaving))
        return outcome


def load_consumer(name: str) -> type[Any]:
    """The class that `module:class` stands for. Raises InputError."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{CUSTOM}.consumer: {name!r} cannot be imported ({error}); write module:class") from None
    if missing := [verb for verb in ("run", "stop") if not callable(getattr(found, verb, None))]:
        raise InputError(f"{CUSTOM}.consumer: {name!r} has no {missing[0]}(); see docs/verl.md")
    return found
