"""The fleet protocol: what a rollout needs from a set of expert-parallel workers, real or simulated.

A fleet carries out decisions and takes none: which request runs where, when to look again and who leaves are
decided by the driver. Time inside one `advance` belongs to the fleet; everything else happens between advances.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, Self, runtime_checkable

from flexfloor.errors import InputError, PlanRefusedError
from flexfloor.progress import (
    Decision,
    FleetInfo,
    ModelShape,
    Preemption,
    Progress,
    RequestProgress,
    RequestStatus,
    ResizeOutcome,
    WorkerIterations,
    WorkerStatus,
)
from flexfloor.requests import Request
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus

__all__ = [
    "Decision",
    "Fleet",
    "FleetInfo",
    "FleetStatus",
    "ModelShape",
    "Preemption",
    "Progress",
    "RequestProgress",
    "RequestStatus",
    "ResizeOutcome",
    "ResizePlan",
    "WorkerIterations",
    "WorkerStatus",
    "load_plugin",
    "refused",
]


@runtime_checkable
class Fleet(Protocol):
    """The verbs. Any of them may raise WorkerFailedError, after which the fleet is closed."""

    @property
    def info(self) -> FleetInfo: ...

    def start(self) -> None:
        """Begin a rollout: iteration 0, peaks reset, no request left over."""

    def check(self, requests: Sequence[Request]) -> None:
        """Raises InputError for a request that can never run here. May be called at any time, from any thread."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Make requests known; they wait in the driver until assigned. Raises InputError for one that can never fit."""

    def assign(self, assignment: Mapping[int, Sequence[str]]) -> None:
        """Bind submitted requests to workers: worker → request ids."""

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests, waiting or live; they produce nothing more."""

    def advance(self, iterations: int) -> Progress:
        """Run up to `iterations` on every active worker; fewer when no live request is left anywhere."""

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        """Carry out moves or a resize as one transaction. Raises PlanRefusedError, having touched nothing, for a plan
        that does not fit; a plan that fails while it is prepared changes nothing either and says so in its outcome."""

    def regrow(self) -> float:
        """Bring all workers back and the experts into their training layout. Returns seconds."""

    def load_weights(self, weights: Any, version: int | None = None) -> None:
        """Replace all weights. Only while regrown. weights: a checkpoint folder, or names and tensors of a model.

        version: becomes `info.weights_version`, the training step for one; by default one more than before.

        Raises InputError, with the old weights in force, for a name or shape that does not belong or is missing.
        """

    def status(self) -> FleetStatus: ...

    def clock(self) -> float:
        """Seconds of this fleet's time, which only ever goes on: real time, or virtual time in a simulation."""
        return time.monotonic()

    def close(self) -> None:
        """End every process. Safe to call twice."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    @staticmethod
    def launch(model: Any, workers: int = 2, *, kind: str = "engine", **options: Any) -> Fleet:
        """Start a fleet by the name it registered under the entry point group `flexfloor.fleets`.

        model: checkpoint folder. options: fields of EngineSettings. Raises InputError.
        """
        return load_plugin("flexfloor.fleets", kind)(model, workers=workers, **options)


def refused(error: PlanRefusedError, plan: ResizePlan | None, status: FleetStatus) -> ResizeOutcome:
    """What became of a plan that was refused: nothing. plan: None where it was refused while it was made.

    Raises `error` where `plan` is something else, which is a mistake in somebody's code.
    """
    if plan is None:
        plan = ResizePlan(status.active, (), (), status.placement)
    if not isinstance(plan, ResizePlan):
        raise error
    busy = {w.worker for w in status.workers if w.live_requests}
    return ResizeOutcome(
        epoch=plan.placement.epoch,
        iteration=status.iteration,
        members=plan.members,
        leaving=plan.leaving,
        joining=plan.joining,
        experts=len(plan.expert_moves),
        expert_bytes=0,
        requests=len(plan.request_moves),
        requests_recomputed=sum(not move.with_kv for move in plan.request_moves),
        kv_bytes=0,
        prepare_s=0.0,
        commit_s=0.0,
        reason=plan.reason,
        left_live=tuple(w for w in plan.leaving if w in busy),
        predicted=plan.predicted,
        failed=str(error),
        refused=True,
    )


def load_plugin(group: str, name: str) -> Any:
    """The object registered as `name` under an entry point group. Raises InputError naming the choices."""
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        what = group.removeprefix("flexfloor.").rstrip("s")
        told = f"{what} {name!r} is not known; there is {', '.join(sorted(found)) or 'none installed'}"
        raise InputError(told, settings=(what,))
    return found[name].load()
