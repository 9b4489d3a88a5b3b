"""An interrupt that comes while native code makes Python objects is still an interrupt.

A timer stands for the user: after a chance time it runs the handler that Ctrl-C has.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
from simulated import DEVICE, SHAPE, make_requests, with_pages

import flexfloor
from flexfloor.cli.signals import Stopped, stoppable
from flexfloor.errors import interrupts_as_raised
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.world.batch import BatchModel

TRIES = 400

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextmanager
def interrupted_within(seconds: float) -> Iterator[None]:
    def interrupt(signum: int, frame: object) -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)

    before = signal.signal(signal.SIGALRM, interrupt)
    # And again, because Python drops what is raised in a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model() -> BatchModel:
    model = BatchModel(pages=[400] * 8, page_tokens=16, max_batch=64, prefill_tokens=512)
    model.assign(0, model.add([100], [2000], [0]))
    model.advance(1, range(8), detail=True)
    return model


def caught(model: BatchModel, within: Callable[[], AbstractContextManager[None]]) -> set[type[BaseException]]:
    """What came out of a loop of advances."""
    chance, found = random.Random(0), set()
    for _ in range(TRIES):
        try:
            with within(), interrupted_within(chance.uniform(1e-5, 3e-4)):
                copy = model.copy()
                while True:
                    copy.advance(1, range(8), detail=True)
        except BaseException as error:
            found.add(type(error))
    return found


def test_native_code_turns_an_interrupt_into_another_error(model: BatchModel):
    assert caught(model, nullcontext) == {KeyboardInterrupt, SystemError}  # else the tests below show nothing


def test_it_comes_out_as_it_was_raised(model: BatchModel):
    assert caught(model, interrupts_as_raised) == {KeyboardInterrupt}
    assert caught(model, stoppable) == {Stopped}


def test_another_system_error_stays():
    with pytest.raises(SystemError, match="own"), interrupts_as_raised():
        raise SystemError("own") from ValueError("no interrupt")


def test_in_a_rollout():
    def run() -> None:
        flexfloor.rollout(fleet, requests, policy="flexfloor", knowledge="oracle", profile=DEVICE, chunk=1)

    requests, chance, found = make_requests([3, 9, 40, 220] * 8), random.Random(0), set()
    fleet = SimulatedFleet(SHAPE, with_pages(200, 2), 2, page_tokens=4)
    run()  # loads what Numba has compiled
    for _ in range(60):
        fleet = SimulatedFleet(SHAPE, with_pages(200, 2), 2, page_tokens=4)
        try:
            with interrupted_within(chance.uniform(1e-3, 2e-2)):
                while True:
                    run()
        except BaseException as error:
            found.add(type(error))
    assert found == {KeyboardInterrupt}


class Destroyed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_in_a_destructor():
    """Python drops what is raised there."""

    def work() -> None:
        Destroyed()
        time.sleep(1)

    with pytest.raises(Stopped), stoppable():
        work()
