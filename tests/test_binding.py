"""Which worker takes which request, and who gives some away, against sums by hand and by going through iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.policy.binding import bind_least_peak, even_out, peaks_of
from flexfloor.simulate.runs import Cell, Experiment, run_cell
from flexfloor.simulate.scenarios import load_scenario
from flexfloor.world.costs import load_profile
from flexfloor.world.model_config import shape_from_config


def bind(
    held: Sequence[tuple[int, int, int]],
    new: Sequence[tuple[int, int]],
    limit: Sequence[float],
    max_batch: int = 64,
    skips: int = 0,
    force: bool = False,
    ahead: float = 0.0,
) -> list[int]:
    """held: (tokens, left, worker); new: (tokens, left)."""
    tokens, left, worker = (np.array([h[i] for h in held], dtype=float) for i in range(3))
    new_tokens, new_left = (np.array([n[i] for n in new], dtype=float) for i in range(2))
    homes = bind_least_peak(
        tokens, left, worker.astype(np.int64), new_tokens, new_left, np.array(limit, float), max_batch, ahead, skips,
        force,
    )  # fmt: skip
    return homes.tolist()


def test_a_worker_gets_more_than_its_batch_as_far_as_requests_end_before_the_next_look() -> None:
    # Two places. One request ends after 3 iterations, the other one after 20, so that until the next look, in 8, five
    # iterations of one place are free: the first two newcomers start in these, and have more to do than fits.
    held = [(1, 3, 0), (1, 20, 0)]
    assert bind(held, [(1, 4)] * 3, [500], max_batch=2) == [-1] * 3, "looks are not told"
    assert bind(held, [(1, 4)] * 3, [500], max_batch=2, ahead=8) == [0, 0, -1]
    assert bind(held, [(1, 30)] * 3, [500], max_batch=2, ahead=8) == [0, -1, -1]
    assert bind([(1, 20, 0), (1, 20, 0)], [(1, 4)], [500], max_batch=2, ahead=8) == [-1], "no place gets free"
    assert bind([], [(1, 4)] * 6, [500], max_batch=2, ahead=8) == [0, 0, 0, 0, -1, -1]
    assert bind(held, [(1, 4)] * 3, [14], max_batch=2, ahead=8) == [-1] * 3, "memory limits as ever"


def most_held(requests: Sequence[tuple[int, int]]) -> int:
    """By going through all iterations: each request gains a token in every one and is gone after its last."""
    ends = range(1, max((left for _, left in requests), default=0) + 1)
    return max((sum(tokens + at for tokens, left in requests if left >= at) for at in ends), default=0)


REQUEST = st.tuples(st.integers(0, 30), st.integers(1, 30))


@given(held=st.lists(st.tuples(REQUEST, st.integers(0, 2)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_a_workers_peak_is_the_most_tokens_that_its_requests_hold_at_once(held: list) -> None:
    tokens, left = (np.array([r[i] for r, _ in held], dtype=float) for i in range(2))
    found = peaks_of(tokens, left, np.array([w for _, w in held], dtype=np.int64), 3)
    assert found.tolist() == [most_held([r for r, w in held if w == worker]) for worker in range(3)]


def test_requests_go_where_the_forecast_peak_leaves_the_most_room() -> None:
    # Peaks of 45 and 25 of 100 each. 10 + 20: the second one holds (5 + 10) + 2·20 = 55 then, and the next one, of
    # 1 + 5, goes to the first: (40 + 1) + 2·5 = 51 there.
    held = [(40, 5, 0), (5, 20, 1)]
    assert bind(held, [(10, 20), (1, 5)], [100, 100]) == [1, 0]
    assert bind([], [(1, 1)] * 5, [50, 50, 50]) == [0, 1, 2, 0, 1], "the first of those with as much room"
    assert bind([], [(1, 1)] * 4, [50, 500]) == [1] * 4, "room counts, not load"


def test_what_does_not_fit_waits_and_a_few_may_pass_it() -> None:
    held, new = [(10, 10, 0)], [(5, 30), (1, 2), (2, 40), (1, 1)]
    assert bind(held, new, [30]) == [-1] * 4
    assert bind(held, new, [30], skips=1) == [-1, 0, -1, -1]
    assert bind(held, new, [30], skips=2) == [-1, 0, -1, 0]
    assert bind(held, new, [30], force=True) == [0] * 4
    assert bind([], new[2:3], [30]) == [0], "alone it runs whatever it takes"
    assert bind(held, [(1, 1)] * 3, [99], max_batch=2) == [0, -1, -1]


@given(
    held=st.lists(st.tuples(REQUEST, st.integers(0, 2)), max_size=8),
    new=st.lists(REQUEST, max_size=12),
    limit=st.integers(0, 120),
    skips=st.integers(0, 4),
    max_batch=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_binding_never_goes_beyond_memory_or_batch(
    held: list, new: list, limit: int, skips: int, max_batch: int
) -> None:
    homes = bind([(*r, w) for r, w in held], new, [limit] * 3, max_batch, skips)
    passed = 0
    for worker in range(3):
        before = [r for r, w in held if w == worker]
        own = [r for r, home in zip(new, homes, strict=True) if home == worker]
        assert not own or len(before) + len(own) <= max_batch
        assert not own or most_held([*before, *own]) <= limit or len(before) + len(own) == 1
    bound = [i for i, home in enumerate(homes) if home >= 0]
    passed = sum(home < 0 for home in homes[: max(bound, default=0)])
    assert passed <= skips


def test_the_largest_go_from_the_fullest_worker_to_the_emptiest() -> None:
    def homes(tokens: Sequence[float], worker: Sequence[int], movable: Sequence[bool] = (), **options: float) -> list:
        limit, most = np.full(2, float(options.get("limit", 1000))), int(options.get("max_batch", 64))
        can = np.array(movable or [True] * len(tokens))
        left, place = np.ones(len(tokens)), np.array(worker, dtype=np.int64)
        return even_out(np.array(tokens, float), left, place, can, limit, most, 0.1).tolist()

    assert homes([50, 40, 30, 10], [0, 0, 0, 1]) == [1, 0, 0, 1]
    assert homes([50, 40, 30, 10], [0, 0, 0, 1], [False, True, True, True]) == [0, 1, 0, 1]
    assert homes([50, 40, 30, 10], [0, 0, 0, 1], limit=45) == [0, 0, 1, 1], "no more than memory holds"
    assert homes([50, 40, 30, 10], [0, 0, 0, 1], max_batch=1) == [0, 0, 0, 1]
    assert homes([120, 10], [0, 1]) == [0, 1], "a request alone stays"
    assert homes([51, 50], [0, 1]) == [0, 1]


def evened(held: Sequence[tuple[int, int, int]], limit: Sequence[float]) -> list[int]:
    """held: (tokens, left, worker)."""
    tokens, left, worker = (np.array([h[i] for h in held], dtype=float) for i in range(3))
    can = np.ones(len(held), dtype=bool)
    return even_out(tokens, left, worker.astype(np.int64), can, np.array(limit, float), 64, 0.1).tolist()


def test_nobody_gets_requests_that_it_will_not_hold_when_they_have_grown() -> None:
    # Worker 1 holds 10 now, and 90 when its request ends; with the largest of worker 0 it holds (40 + 60) + (10 + 60)
    # before that, with one of the next largest ones (30 + 10) + (10 + 10).
    held = [(40, 60, 0), (30, 10, 0), (30, 10, 0), (10, 80, 1)]
    assert evened(held, [1000, 1000]) == [1, 0, 0, 1]
    assert evened(held, [1000, 95]) == [0, 1, 0, 1]
    assert evened(held, [1000, 1000, 95]) == [1, 2, 0, 0], "the largest does not fit on the emptiest one, 2"
    # Where forecasts already say that it is too much, it gets nowhere worse than it was.
    assert evened([(40, 60, 0), (30, 60, 0), (30, 60, 0), (10, 80, 1)], [100, 100]) == [1, 0, 0, 1]


@given(
    held=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2)), max_size=14),
    limit=st.integers(20, 150),
)
@settings(max_examples=200)
def test_no_forecast_peak_gets_over_its_limit_by_evening_out(held: list, limit: int) -> None:
    homes, before = evened(held, [limit] * 3), [worker for _, _, worker in held]

    def of_workers(measure: Callable[[list], int], where: list[int]) -> list[int]:
        mine = [[(t, rest) for (t, rest, _), w in zip(held, where, strict=True) if w == worker] for worker in range(3)]
        return [measure(requests) for requests in mine]

    def now(requests: list) -> int:
        return sum(tokens for tokens, _ in requests)

    assert max(of_workers(most_held, homes)) <= max(limit, *of_workers(most_held, before))
    assert max(of_workers(now, homes)) <= max(of_workers(now, before))


def test_nobody_is_preempted_where_lengths_are_known() -> None:
    """Memory is short all along in this scenario, and workers give requests to each other."""
    scenario = load_scenario("R1")
    device = scenario.device(load_profile("h800"))
    experiment = Experiment(scenario, shape_from_config("qwen3-30b-a3b"), device, ("planned",), ("oracle",))
    (run,) = run_cell(experiment, Cell(workers=4, load=128, seed=0))
    moves = sum(r["requests"] for r in run.summary.resizes)
    assert moves > 20, "nothing was evened out: this shows nothing"
    assert run.summary.preemptions == 0
