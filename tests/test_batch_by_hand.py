"""The batch model in virtual time against hand calculation."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest

from flexfloor.errors import PlanRefusedError
from flexfloor.world.batch import BatchModel, PagesLackingError

PAGE = 4


def made(requests: Many[tuple[int, int, int]], **limits: int) -> BatchModel:
    """One worker that has all of them in its line."""
    options = {"pages": 40, "max_batch": 16, "prefill_tokens": 16} | limits
    pages = options.pop("pages")
    model = BatchModel(pages=[pages], page_tokens=PAGE, **options)
    model.assign(0, model.add(*zip(*requests, strict=True)))
    return model


def test_a_request_alone_by_hand() -> None:
    # 10 prompt tokens in budgets of 4: 3 iterations, the last of which draws; then one token each.
    model = made([(10, 5, 0)], prefill_tokens=4)
    steps = model.advance(100, [0], detail=True)
    assert steps.iterations == 3 + 4
    assert steps.spans.tolist() == [1, 1, 1, 4]
    assert steps.prefill_total.tolist() == [4, 4, 2, 0]
    assert steps.batch_total.tolist() == [1, 1, 1, 1]
    assert steps.kv_total.tolist() == [0, 0, 0, (11 + 12 + 13 + 14) / 4]
    assert steps.rows_max.tolist() == [5, 5, 3, 1]
    assert steps.finished_at.tolist() == [6]
    assert (steps.tokens.tolist(), steps.last_live.tolist()) == ([5], [7])
    assert model.finished.tolist() == [True]
    assert model.advance(5, [0]).iterations == 0


def test_siblings_compute_their_prompt_once_by_hand() -> None:
    # The first computes all 9 tokens; the second waits for the 8 in full pages, then computes its last one.
    model = made([(9, 3, 7), (9, 3, 7)])
    steps = model.advance(1, [0])
    assert model.computed.tolist() == [9, 0]
    assert model.response.tolist() == [1, 0]
    assert (model.kv_pages.tolist(), model.shared_pages.tolist()) == ([3, 2], [2, 2])
    assert model.free_pages.tolist() == [40 - 3]
    steps = model.advance(9, [0])
    assert steps.iterations == 3
    assert steps.prefill_total.tolist() == [1, 0, 0]
    assert steps.finished_at.tolist() == [1, 2]
    assert model.free_pages.tolist() == [40]


def test_the_youngest_is_preempted_by_hand() -> None:
    # Two of 4 prompt tokens; each holds a page after prefill, two after the next iteration, 3 from the sixth on.
    model = made([(4, 20, 0), (4, 20, 1)], pages=6)
    assert model.copy().advance(10, [0]).spans.tolist() == [1, 8, 1]
    steps = model.advance(9, [0])
    assert (steps.preempted.tolist(), model.kv_pages.tolist()) == ([], [3, 3])
    steps = model.advance(1, [0])
    assert (steps.preempted.tolist(), steps.preempted_at.tolist()) == ([1], [0])
    assert (model.running.tolist(), model.response.tolist(), model.computed.tolist()) == (
        [True, False],
        [10, 9],
        [13, 0],
    )
    assert model.free_pages.tolist() == [2]
    # 13 tokens and one more need 4 pages and one for the other's growth: it comes back when the first has ended.
    rest = model.advance(100, [0])
    assert rest.finished.tolist() == [0, 1]
    assert rest.finished_at.tolist() == [9, 10 + 10]
    assert rest.preempted.tolist() == []


def test_quiet_iterations_are_one_step() -> None:
    model = made([(4, 5000, 0), (4, 9000, 1)], pages=10_000)
    steps = model.advance(10**6, [0])
    assert steps.spans.tolist() == [1, 4999, 4000]
    assert steps.kv_max.tolist() == [0, 2 * (5 + 5003) / 2, (5004 + 9003) / 2]


def test_a_worker_without_requests_idles_and_all_stop_together() -> None:
    model = BatchModel(pages=[40, 40, 40], page_tokens=PAGE, max_batch=4, prefill_tokens=16)
    rows = model.add([4, 4], [3, 8], [0, 1])
    for row in rows:
        model.assign(int(row), [row])
    steps = model.advance(100, [0, 1, 2], detail=True)
    assert steps.iterations == 8
    assert steps.last_live.tolist() == [3, 8, 0]
    assert steps.spans.tolist() == [1, 2, 5]
    assert steps.batch is not None
    assert steps.batch.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert steps.kv_mean.tolist() == [(5 + 6) / 8, sum(range(5, 12)) / 8, 0]


def test_pages_that_arrive_are_shared_with_siblings_there() -> None:
    model = BatchModel(pages=[20, 20], page_tokens=PAGE, max_batch=4, prefill_tokens=64)
    first, second = model.add([9, 9], [9, 9], [3, 3])
    model.assign(0, [first])
    model.assign(1, [second])
    model.advance(2, [0, 1])
    assert model.free_pages.tolist() == [17, 17]
    model.move(first, 1, with_kv=True)
    assert model.free_pages.tolist() == [20, 16]
    assert model.live_rows().tolist() == [second, first]
    model.move(second, 0, with_kv=False)
    assert (model.running[second], model.computed[second], model.response[second]) == (False, 0, 2)
    assert model.free_pages.tolist() == [20, 17]
    steps = model.advance(99, [0, 1])
    assert steps.finished_at.tolist() == [6, 6]
    assert steps.prefill_total[0] == 11


def test_adopted_requests_are_as_if_they_had_run_here() -> None:
    ran, adopted = (
        made([(9, 30, 0), (9, 20, 0), (5, 30, 1)]),
        BatchModel(pages=[40], page_tokens=PAGE, max_batch=16, prefill_tokens=16),
    )
    ran.advance(7, [0])
    adopted.adopt(0, adopted.add(ran.prompt, ran.length, ran.group, ran.response))
    for name in ("computed", "kv_pages", "shared_pages", "free_pages", "decoding"):
        assert getattr(adopted, name).tolist() == getattr(ran, name).tolist(), name
    assert adopted.advance(99, [0]).finished_at.tolist() == ran.advance(99, [0]).finished_at.tolist()


def test_a_copy_goes_its_own_way() -> None:
    model = made([(9, 30, 0), (9, 20, 0), (5, 30, 1)], pages=15)
    model.advance(3, [0])
    before = [a.copy() for a in model._state]
    other = model.copy()
    other.set_lengths([0, 2], [12, 40])
    other.assign(0, other.add([4], [4], [9]))
    other.advance(100, [0])
    other.set_pages(0, 3)
    assert other.finished.all()
    assert all(np.array_equal(a, b) for a, b in zip(before, model._state, strict=True))
    # Group 9 is known to the copy alone: here its prompt may be of another length.
    model.assign(0, model.add([5], [4], [9]))
    model.advance(100, [0])
    assert model.response.tolist() == [30, 20, 30, 4]
    assert other.response.tolist() == [12, 20, 40, 4]


def test_what_cannot_be_is_refused() -> None:
    model = BatchModel(pages=[10, 10], page_tokens=PAGE, max_batch=4, prefill_tokens=16)
    rows = model.add([4, 4, 30], [10, 10, 20], [0, 0, 1])
    model.assign(0, rows[:2])
    model.advance(1, [0])
    used = int(model.pages[0] - model.free_pages[0])
    for message, call in [
        ("on a worker already", lambda: model.assign(1, [0])),
        ("given twice", lambda: model.assign(1, [2, 2])),
        ("no complete KV", lambda: model.adopt(1, [2])),
        ("is not live", lambda: model.move(2, 1, False)),
        ("already", lambda: model.move(0, 0, True)),
        ("worker 2 is unknown", lambda: model.move(0, 2, True)),
        ("numbered from 0", lambda: model.cancel([-1])),
        ("numbered from 0", lambda: model.assign(0, [3])),
        ("different lengths", lambda: model.add([5], [4], [0])),
        ("different lengths", lambda: model.add([5, 6], [4, 4], [5, 5])),
        ("empty prompt", lambda: model.add([0], [4], [6])),
        ("before it begins", lambda: model.add([4], [4], [6], [4])),
        ("would end with", lambda: model.set_lengths([0], [1])),
        ("not active", lambda: model.advance(1, [1])),
        ("are in use, ", lambda: model.set_pages(0, used - 1)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    model.set_pages(0, used)
    model.set_pages(1, 0)
    with pytest.raises(PagesLackingError, match="0 KV pages free"):
        model.move(0, 1, True)
    model.set_pages(1, 7)
    model.assign(1, [2])
    with pytest.raises(ValueError, match="no complete KV"):
        model.move(2, 0, True)
    model.cancel([0, 1])
    with pytest.raises(PlanRefusedError, match=r"worker 1 has 7 KV pages; request row 2 needs 8 to run"):
        model.advance(100, [0, 1])
