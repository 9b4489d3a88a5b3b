"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexfloor.progress import Decision, LengthForecast, Progress
from flexfloor.requests import Request
from flexfloor.world.resize import ResizePlan
from flexfloor.world.status import FleetStatus


class Policy(Protocol):
    """Decides between two advances. name: as reported in ledger and summary.

    queue, in both verbs: the requests that are not bound yet, in the order of their arrival; new ones stand at its end.
    A policy may have two more methods, see `Observer`.
    """

    name: str

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        """Which waiting requests to bind now, in this order: worker → request ids."""

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        """A resize or moves to carry out now.

        After a plan that failed, or that the fleet refused, nothing has changed; the rollout goes on, and does not ask
        for the next few looks. `admit` is still called, so that requests that arrive then may be seen there first.
        """


class Observer(Protocol):
    """What a policy may have besides."""

    def observe(self, progress: Progress) -> None:
        """Told what an advance brought."""

    def take_decisions(self) -> Sequence[Decision | LengthForecast]:
        """Decisions beside resizes, and forecasts, since the last call, for the ledger."""
