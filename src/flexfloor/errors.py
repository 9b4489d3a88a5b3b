"""Errors that end a run, each with the exit code of its command line."""

from __future__ import annotations


class FlexFloorError(Exception):
    """A failure worth one line: what went wrong, where, and (where there is one) the remedy."""

    exit_code = 1


class InputError(FlexFloorError):
    """Something the user gave (file, option, model, budget) cannot be used as it is."""

    exit_code = 2


class UnsupportedError(InputError):
    """A model or option that this version does not carry out."""


class PlanRefusedError(FlexFloorError):
    """A resize or move does not fit as planned; nothing was touched and the fleet goes on."""


class WorkerFailedError(FlexFloorError):
    """A worker died, hung or raised; the fleet has ended.

    worker: rank of the worker at fault.
    """

    def __init__(self, worker: int, reason: str) -> None:
        super().__init__(f"worker {worker} {reason}")
        self.worker = worker
