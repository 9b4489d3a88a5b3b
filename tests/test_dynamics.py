"""Virtual time against brute force."""

from __future__ import annotations

import math
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.world.dynamics import Held, fits, iterations_to_end, pages_of

PAGE = 4
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=8)


def brute_force(held: list[Held]) -> int:
    """Pages in use after every single iteration; a request's last token is there before its pages are given back."""
    last = int(max((left for _, left in held), default=0))
    used = [sum(math.ceil((tokens + t) / PAGE) for tokens, left in held if left >= t) for t in range(1, last + 1)]
    return max(used, default=0)


@given(held=REQUESTS)
def test_pages_of_is_the_highest_count_of_all_iterations(held: list[Held]) -> None:
    assert pages_of(held, PAGE) == brute_force(held)


@given(held=REQUESTS, pages=st.integers(0, 60))
def test_fits_is_that_count_against_the_pages(held: list[Held], pages: int) -> None:
    assert fits(held, pages, PAGE) == (brute_force(held) <= pages)


@given(running=REQUESTS, waiting=REQUESTS, most=st.integers(1, 9))
@settings(max_examples=50)
def test_all_at_once_takes_as_long_as_the_longest(running: list[Held], waiting: list[Held], most: int) -> None:
    longest = max((left for _, left in [*running, *waiting]), default=0)
    everything = len(running) + len(waiting) + 1
    assert iterations_to_end(running, waiting, 10**6, PAGE, everything) == longest
    alone = iterations_to_end([], waiting, 0, PAGE, everything)
    assert alone == sum(left for _, left in waiting), "without pages they run one after the other"
    work = sum(left for _, left in [*running, *waiting])
    assert longest <= iterations_to_end(running, waiting, 30, PAGE, most) <= work


def test_the_longest_goes_first_and_short_ones_fill_in() -> None:
    # Pages for two: 100 beside 60, then 40, which end together; 10 more fits beside neither.
    waiting = [(0, 40), (0, 100), (0, 60), (0, 10)]
    assert iterations_to_end([], waiting, 10**6, PAGE, 2) == 110


def test_planning_a_large_step_is_quick() -> None:
    waiting = [(200.0, 1.0 + (i * 7919) % 4000) for i in range(2000)]
    begin = time.perf_counter()
    assert iterations_to_end([], waiting, 20_000, 16, 4096) >= 3999
    assert time.perf_counter() - begin < 20  # about 2 s with nothing else to do
