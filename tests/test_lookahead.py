"""Look-ahead against iterations added up one by one, and the clairvoyant reference against every schedule there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import DEVICE, SHAPE

from flexfloor.progress import ModelShape
from flexfloor.world.costs import DeviceProfile, IterationCost, MoveCosts
from flexfloor.world.lookahead import Batch, LookAhead, clairvoyant, group_sizes

MOVES = MoveCosts.of(DEVICE, SHAPE)
NEAR = 5e-3  # look-ahead takes an iteration's tokens at its middle, an engine at its end


def ahead(
    most: int = 1,
    *,
    capacity: Callable[[int], float] = lambda workers: 1e6,
    device: DeviceProfile = DEVICE,
    moves: MoveCosts | None = None,
    max_batch: int = 64,
    longest: float = 10.0,
    moved: ModelShape | None = None,
) -> LookAhead:
    cost = IterationCost(device, SHAPE)
    return LookAhead(
        cost, capacity, most, max_batch=max_batch, prefill_tokens=100, longest=longest, moves=moves, moved=moved
    )


def batch(live: Sequence[tuple[float, float]] = (), waiting: Sequence[tuple[float, float, float]] = ()) -> Batch:
    """live: (tokens, left). waiting: (tokens, left, tokens to compute)."""
    kv, left = (np.array([r[i] for r in live], dtype=float) for i in range(2))
    tokens, ahead_of, computed = (np.array([r[i] for r in waiting], dtype=float) for i in range(3))
    return Batch(kv, left, tokens, ahead_of, computed)


def one_by_one(live: Sequence[tuple[float, float]], workers: int, first: int = 0, last: int | None = None) -> float:
    """Seconds of iterations `first` to `last` of requests that are spread evenly: (tokens at 0, left at 0)."""
    cost, seconds = IterationCost(DEVICE, SHAPE), 0.0
    for at in range(first, int(max(left for _, left in live)) if last is None else last):
        tokens = [have + at + 0.5 for have, left in live if left > at]
        seconds += cost.seconds(workers, -(-len(tokens) // workers), len(tokens), sum(tokens) / workers)
    return seconds


def test_three_requests_on_one_worker_by_hand() -> None:
    # 1 fixed + 1 dense weights + 3·0.1 dense products + max(0.7, 0.12) experts; KV: (31.5 + 34.5) · 0.01
    found = ahead().roll(batch([(10, 2)] * 3), 1)
    assert found.seconds == pytest.approx(2 * (1 + 1 + 0.3 + 0.7) + 0.66, rel=NEAR)
    assert (found.iterations, found.last_workers) == (2, 1)
    assert found.occupied_s == found.seconds


@given(
    live=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), min_size=1, max_size=12),
    workers=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=100, deadline=None)
def test_a_batch_takes_the_sum_of_its_iterations(live: list[tuple[float, float]], workers: int) -> None:
    """Evenly spread, with free moves: nobody has more KV than others where there are as many requests as workers."""
    found = ahead(4).roll(batch(live), workers)
    assert found.iterations == max(left for _, left in live)
    assert found.occupied_s == pytest.approx(workers * found.seconds)
    least = sum(
        IterationCost(DEVICE, SHAPE).seconds(workers, -(-n // workers), n, 0.0)
        for n in (sum(left > at for _, left in live) for at in range(int(found.iterations)))
    )
    assert found.seconds >= least * (1 - 1e-9)
    if workers == 1:
        assert found.seconds == pytest.approx(one_by_one(live, 1), rel=NEAR)


def test_long_responses_are_taken_in_strides() -> None:
    live = [(100.0, 10_000.0), (50.0, 7_000.0), (0.0, 500.0)]
    assert ahead().roll(batch(live), 1).seconds == pytest.approx(one_by_one(live, 1), rel=0.02)


def test_prefill_is_added_where_a_request_comes_in() -> None:
    cost = IterationCost(DEVICE, SHAPE)
    plain, computed = (ahead().roll(batch(waiting=[(10, 4, tokens)]), 1).seconds for tokens in (0, 10))
    assert computed - plain == pytest.approx(cost.seconds(1, 1, 1, 10.5, 10, 10) - cost.seconds(1, 1, 1, 10.5))
    twice = ahead().roll(batch(waiting=[(10, 4, 150)]), 1).seconds
    assert twice - plain > computed - plain, "150 tokens take two iterations of at most 100"


def test_one_worker_leaves_when_it_may_and_the_change_is_paid() -> None:
    """The stall: 8 s fixed, half of 800 bytes of experts at 100 bytes/s, half of 15.5 tokens of 10 bytes."""
    live = [(5.0, 100.0)]
    two = ahead(2, moves=MOVES)
    stays = two.roll(batch(live), 2)
    assert (stays.last_workers, stays.occupied_s) == (2, pytest.approx(2 * stays.seconds))
    found = two.roll(batch(live), 2, price=0.0, hold=10)
    before, after, stall = one_by_one([(5 + 5, 100)], 2, 0, 10), one_by_one(live, 1, 10), 8 + 4 + 0.775
    # One request is on one worker, whose KV sets the pace: all of its tokens count.
    before = sum(IterationCost(DEVICE, SHAPE).seconds(2, 1, 1, 5.5 + at) for at in range(10))
    assert found.last_workers == 1
    assert found.seconds == pytest.approx(before + stall + after, rel=NEAR)
    assert found.occupied_s == pytest.approx(2 * (before + stall) + after, rel=NEAR)


def test_nobody_leaves_for_a_change_that_costs_more_than_it_saves() -> None:
    short = batch([(5.0, 3.0)])
    assert ahead(2, moves=MOVES).roll(short, 2, price=0.0).last_workers == 2
    assert ahead(2).roll(short, 2, price=0.0).last_workers == 1, "free"


def test_a_worker_stays_until_memory_lets_it_go() -> None:
    """One worker holds 126 tokens; all nine requests come to 180, the long one alone to 110."""
    live = [(10.0, 10.0)] * 8 + [(10.0, 100.0)]
    found = ahead(2, capacity=lambda workers: 130.0).roll(batch(live), 2, price=0.0)
    roomy = ahead(2).roll(batch(live), 2, price=0.0)
    assert found.last_workers == roomy.last_workers == 1
    cost = IterationCost(DEVICE, SHAPE)
    both = sum(cost.seconds(2, 5, 9, (90 + 9 * (at + 0.5)) / 2) for at in range(10))
    assert found.occupied_s == pytest.approx(2 * both + one_by_one(live, 1, 10), rel=NEAR)
    assert roomy.occupied_s == pytest.approx(one_by_one(live, 1), rel=NEAR)


def test_a_request_that_does_not_fit_waits_for_others_to_end() -> None:
    waiting = [(10.0, 50.0, 0.0)] * 3
    assert ahead(longest=60).roll(batch(waiting=waiting), 1).iterations == 50
    assert ahead(capacity=lambda m: 125.0).roll(batch(waiting=waiting), 1).iterations == 100, "two at a time"
    assert ahead(capacity=lambda m: 70.0).roll(batch(waiting=waiting), 1).iterations == 150
    assert ahead(capacity=lambda m: 20.0).roll(batch(waiting=waiting), 1).iterations == 150, "alone it runs anyway"
    assert ahead(max_batch=1).roll(batch(waiting=waiting), 1).iterations == 150


def test_nobody_leaves_while_requests_wait() -> None:
    """Two workers hold 64 tokens and one holds 61: one request at a time, and one worker would do."""
    two = ahead(2, capacity=lambda workers: {1: 63.0, 2: 33.0}[workers])
    waiting = [(10.0, 50.0, 0.0)] * 3
    found = two.roll(batch(waiting=waiting), 2, price=0.0)
    assert (found.iterations, found.last_workers) == (150, 1)
    cost = IterationCost(DEVICE, SHAPE)
    both = sum(cost.seconds(2, 1, 1, 10.5 + at) for at in range(50))
    assert found.occupied_s == pytest.approx(2 * 2 * both + one_by_one([(10, 50)], 1), rel=NEAR)


def test_one_worker_that_leaves_sends_all_it_has() -> None:
    # 8 s fixed; the leaving one of four sends a quarter of 800 + 40·10 bytes, more than a third of it that others take
    four = ahead(4, moves=MoveCosts(bytes_per_s=100, switch_s=8))
    assert four.stall_s(4, 3, 40) == pytest.approx(8 + 3.0)
    assert four.stall_s(4, 1, 40) == pytest.approx(8 + 9.0), "one takes in three quarters"


def test_moves_have_a_clock_and_a_model_of_their_own() -> None:
    """On a fleet that emulates another model, slowed down, experts are its own and seconds are real."""
    moves = MoveCosts(bytes_per_s=100, switch_s=8)
    small = replace(SHAPE, expert_bytes=10)
    paced = ahead(2, moves=moves, moved=small)
    assert paced.stall_s(2, 1, 0) == pytest.approx(8 + 40 / 100), "the experts of the model that runs: 80 bytes"
    work = batch([(5, 5), (5, 100)])
    usual = paced.roll(work, 2, price=0.0)
    paced.time_scale = 10.0
    slowed = paced.roll(work, 2, price=0.0)
    assert usual.last_workers == slowed.last_workers == 1
    assert usual.seconds - slowed.seconds > 0.8 * 8, "for one second of the cost model ten pass, the stall stays 8"


def test_sizes_that_hold_no_request_are_left_out() -> None:
    found = ahead(8, capacity=lambda workers: 10.0 * workers, longest=45)
    assert found.sizes.tolist() == [5, 6, 7, 8]
    assert ahead(8, capacity=lambda workers: 1.0).sizes.tolist() == [8], "the whole fleet is there anyway"
    assert found.roll(batch([(1, 3)]), 4, price=np.inf).last_workers == 5
    assert found.roll(batch([(1, 3)]), 7).last_workers == 7


def test_group_sizes_of_large_fleets_are_few() -> None:
    assert group_sizes(5) == [1, 2, 3, 4, 5]
    assert group_sizes(64) == [*range(1, 17), 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64]
    assert all(group_sizes(most)[-1] == most for most in range(1, 300))


def test_nothing_to_do_takes_no_time() -> None:
    found = ahead(3).roll(batch(), 3)
    assert (found.seconds, found.occupied_s, found.iterations, found.last_workers) == (0, 0, 0, 3)


# -- the clairvoyant reference -------------------------------------------------------------------------------------

# Reading the experts is half of the time of one worker, so that more of them are faster and occupy more.
WIDE = replace(DEVICE, bandwidth=100.0, latency_s=((8, 0.01),), node_link=1e6, cross_link=1e6, fixed_s=0.1)
LENGTHS = [3, 5, 9, 14]


def schedules(prompt: int) -> list[tuple[float, float]]:
    """(seconds, worker-seconds) of every sequence of group sizes that only ever shrinks, one iteration at a time."""
    cost, found = IterationCost(WIDE, SHAPE), []
    iterations = []
    for at in range(max(LENGTHS)):
        alive = [length for length in LENGTHS if length > at]
        tokens = sum(prompt + at + 0.5 for _ in alive)
        per = {m: max(-(-len(alive) // m), 1) for m in (1, 2, 3)}
        kv = {m: tokens / m if len(alive) > m else tokens / len(alive) for m in (1, 2, 3)}
        iterations.append({m: float(cost.seconds(m, per[m], len(alive), kv[m])) for m in (1, 2, 3)})
    for sizes in combinations_with_replacement((3, 2, 1), len(iterations)):
        spent = [each[m] for each, m in zip(iterations, sizes, strict=True)]
        found.append((sum(spent), sum(m * s for m, s in zip(sizes, spent, strict=True))))
    return found


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_the_clairvoyant_reference_is_near_the_best_schedule_there_is(share: float) -> None:
    """share: of the way from the fastest schedule to the one on a single worker, that time may go."""
    every = schedules(prompt=2)
    fastest, slowest = min(s for s, _ in every), max(s for s, _ in every)
    limit = (fastest + share * (slowest - fastest)) * (1 + 1e-3)
    best = min(occupied for seconds, occupied in every if seconds <= limit)
    lengths = np.array(LENGTHS, float)
    found = clairvoyant(ahead(3, device=WIDE), np.full(4, 2.0), lengths, np.zeros(4), limit)
    assert found is not None
    assert found.seconds <= limit
    assert best * (1 - NEAR) <= found.occupied_s <= best * 1.1


def test_no_schedule_is_faster_than_the_fastest() -> None:
    fastest = min(s for s, _ in schedules(prompt=2))
    lengths = np.array(LENGTHS, float)
    assert clairvoyant(ahead(3, device=WIDE), np.full(4, 2.0), lengths, np.zeros(4), fastest * 0.97) is None


def test_golden_values_of_the_clairvoyant_reference() -> None:
    """64 responses under three limits on up to eight workers; the first one is all on one worker, added up by hand."""
    lengths = np.full(64, 30.0)
    wide = ahead(8, device=WIDE, longest=40)
    alone = sum(float(IterationCost(WIDE, SHAPE).seconds(1, 64, 64, 64 * (5.5 + at))) for at in range(30))
    found = clairvoyant(wide, np.full(64, 5.0), lengths, np.zeros(64), 1e9)
    assert found is not None
    assert (found.last_workers, found.iterations) == (1, 30)
    assert found.occupied_s == pytest.approx(alone, rel=NEAR)
    limits = [found.seconds * share for share in (1.0, 0.7, 0.5)]
    outlooks = [clairvoyant(wide, np.full(64, 5.0), lengths, np.zeros(64), limit) for limit in limits]
    occupied = [o.occupied_s for o in outlooks if o is not None]
    assert len(occupied) == 3
    assert occupied == sorted(occupied)


@given(
    live=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), max_size=6),
    waiting=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=8),
    room=st.integers(10, 400),
    max_batch=st.integers(1, 12),
    workers=st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_order_does_not_matter_where_all_fit_at_once(
    live: list, waiting: list, room: int, max_batch: int, workers: int
) -> None:
    looking = ahead(3, capacity=lambda w: float(room), max_batch=max_batch)
    orders = [waiting, waiting[::-1], sorted(waiting, key=lambda r: -r[1])]
    batches = [batch(live, [(tokens, left, 5.0) for tokens, left in order]) for order in orders]
    if looking.takes_all(batches[0], workers):
        seconds = [looking.roll(one, workers).seconds for one in batches]
        assert seconds == pytest.approx([seconds[0]] * 3, rel=1e-9)


def test_what_does_not_fit_at_once_is_told() -> None:
    looking = ahead(2, capacity=lambda workers: 100.0, max_batch=3)
    assert looking.takes_all(batch([(10, 5)], [(10, 5, 5)] * 2), 1)
    assert not looking.takes_all(batch([(10, 5)], [(10, 5, 5)] * 3), 1), "four in a batch of three"
    assert looking.takes_all(batch([(10, 5)], [(10, 5, 5)] * 3), 2)
    assert not looking.takes_all(batch([(60, 5)], [(30, 5, 5)]), 1), "100 tokens when both are nearly done"
