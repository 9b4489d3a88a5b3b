"""Ctrl-C and friends as an exception, so that every `with` block on the way out ends its processes."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from flexfloor.errors import interrupts_as_raised

_SIGNALS = tuple(s for s in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, s))
_PATIENCE = 10.0  # seconds that the way out may take before a second signal cuts it short


class Stopped(BaseException):
    """The process was asked to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum
        self.word = "interrupted" if signum == signal.SIGINT else "terminated"


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block the signals that ask a process to end raise Stopped, once.

    Further signals are ignored for a while: the second Ctrl-C of an impatient user must not leave workers behind.
    """
    first: float | None = None

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first < _PATIENCE:
            return
        first = time.monotonic()
        raise Stopped(signum)

    def lost(unraisable: Any) -> None:
        nonlocal first
        if isinstance(unraisable.exc_value, Stopped):
            first = None
            # Not before this hook, which would swallow it too, has come back.
            threading.Timer(0.01, signal.raise_signal, unraisable.exc_value.args).start()
        else:
            hook(unraisable)

    before: dict[int, Any] = {}
    hook = sys.unraisablehook
    # A destructor or the callback of a weak reference in which it was raised has swallowed it: once more, then.
    sys.unraisablehook = lost
    try:
        for name in _SIGNALS:
            signum = getattr(signal, name)
            # A shell that starts a job in the background, and nohup, ask for signals to be ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, stop)
        with interrupts_as_raised():
            yield
    finally:
        sys.unraisablehook = hook
        for signum, handler in before.items():
            signal.signal(signum, handler)
