"""Errors that end a run, each with the exit code of its command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FlexFloorError(Exception):
    """A failure worth one line: what went wrong, where, and (where there is one) the remedy."""

    exit_code = 1


class InputError(FlexFloorError):
    """Something the user gave (file, option, model, budget) cannot be used as it is.

    settings: names of those at fault, where it is settings: who read them knows where they were given. A remedy names
    a setting as `name`, which `spell` turns into what the user writes: an option, or a key of a config file.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, settings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.settings = settings


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


def spell(text: str, name: Callable[[str], str | None]) -> str:
    """A message with each `setting` in it as the user writes it. name: gives that, None for what is no setting."""
    return re.sub(r"`(\w+)`", lambda found: name(found[1]) or found[0], text)


@contextmanager
def concerning(*settings: str) -> Iterator[None]:
    """What is refused inside the block, and names no settings itself, is the fault of these."""
    try:
        yield
    except InputError as error:
        error.settings = error.settings or settings
        raise


@contextmanager
def interrupts_as_raised() -> Iterator[None]:
    """What a signal handler raised (KeyboardInterrupt, say) leaves the block as itself, whatever code it came up in.

    A handler may run inside native code, such as Numba's while it makes Python objects of a result. That code goes on
    as if nothing had been raised, and Python then raises a SystemError, an Exception, with the other as its cause.
    """
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if cause is None or isinstance(cause, Exception):
            raise
        raise cause from None
