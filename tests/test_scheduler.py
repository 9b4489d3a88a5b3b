"""Continuous batching as pure logic: nothing is lost, nothing leaks, the oldest always gets on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import flexfloor
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.scheduler import Scheduler, Sequence

PAGE = 4


def make(pages: int, max_batch: int = 8, prefill_tokens: int = 16) -> Scheduler:
    return Scheduler(PageAllocator(pages), PAGE, max_batch, prefill_tokens)


def add(scheduler: Scheduler, prompt: list[int], max_tokens: int, samples: int = 1) -> list[Sequence]:
    requests = flexfloor.make_requests([prompt], samples=samples)
    made = [Sequence(r, 0, max_tokens, list(r.prompt_tokens)) for r in requests]
    for sequence in made:
        scheduler.add(sequence)
    return made


def step(scheduler: Scheduler, finished: list[Sequence]) -> int:
    """One iteration with a pretended model that writes token 1. Returns the tokens computed."""
    chunks = scheduler.schedule()
    seen: set[int] = set()
    for chunk in chunks:
        s = chunk.sequence
        assert id(s) not in seen, "two chunks of one request"
        seen.add(id(s))
        assert s.computed == chunk.begin < chunk.end <= len(s.tokens)
        assert len(s.pages) * PAGE >= chunk.end
        if s.shared and chunk.begin >= s.shared.capacity:
            assert s.shared.filled == s.shared.capacity, "reads a prompt that nobody has computed"
    for chunk in chunks:
        scheduler.note_computed(chunk)
        if chunk.draws:
            s = chunk.sequence
            s.tokens.append(1)
            if s.response_length >= s.max_tokens:
                scheduler.remove(s)
                finished.append(s)
    scheduler.allocator.check()
    return sum(c.end - c.begin for c in chunks)


def run(scheduler: Scheduler, limit: int = 3000) -> tuple[list[Sequence], int]:
    finished: list[Sequence] = []
    computed = 0
    for _ in range(limit):
        if not scheduler.live:
            return finished, computed
        computed += step(scheduler, finished)
    raise AssertionError("no end in sight")


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=8),
    pages=st.integers(12, 60),
    max_batch=st.integers(1, 8),
    prefill_tokens=st.integers(1, 40),
)
def test_every_request_ends_once_and_no_page_leaks(
    groups: list[tuple[int, int, int]], pages: int, max_batch: int, prefill_tokens: int
) -> None:
    scheduler = make(pages, max_batch, prefill_tokens)
    wanted = []
    for index, (length, max_tokens, samples) in enumerate(groups):
        wanted += add(scheduler, [index] * length, max_tokens, samples)
    finished, _ = run(scheduler)
    assert sorted(map(id, finished)) == sorted(map(id, wanted))
    assert all(s.response_length == s.max_tokens for s in finished)
    assert scheduler.allocator.free == pages


def test_siblings_compute_their_prompt_once() -> None:
    alone, together = make(200, prefill_tokens=8), make(200, prefill_tokens=8)
    add(alone, [7] * 41, 3)
    add(together, [7] * 41, 3, samples=5)
    _, single = run(alone)
    _, group = run(together)
    # 40 of 41 tokens lie in full pages; each sibling adds its last prompt token and two of its response.
    assert single == 41 + 2
    assert group == 40 + 5 * (1 + 2)
    assert together.allocator.peak == 10 + 5


def test_the_youngest_is_preempted_and_comes_back() -> None:
    scheduler = make(11)
    old, young = add(scheduler, [1] * 8, 24)[0], add(scheduler, [2] * 8, 24)[0]
    finished: list[Sequence] = []
    preempted = []
    while scheduler.live:
        step(scheduler, finished)
        preempted += scheduler.take_preempted()
    assert set(preempted) == {young.request.request_id}
    assert len(preempted) == 1, "two long requests at the limit must not push each other out again and again"
    assert finished == [old, young]


def test_preempting_the_sibling_that_fills_the_prompt_hands_the_work_over() -> None:
    scheduler = make(40, prefill_tokens=5)
    first, second = add(scheduler, [3] * 21, 4, samples=2)
    finished: list[Sequence] = []
    step(scheduler, finished)
    assert first.shared is not None
    assert first.shared.filled == 5
    scheduler.cancel([first.request.request_id])
    run_finished, _ = run(scheduler)
    assert run_finished == [second]
    assert scheduler.allocator.free == 40


def test_cancel_gives_pages_back_in_every_state() -> None:
    scheduler = make(40, max_batch=2)
    made = add(scheduler, [3] * 21, 9, samples=4)
    for _ in range(4):
        step(scheduler, [])
    scheduler.cancel([s.request.request_id for s in made])
    assert not scheduler.live
    assert scheduler.allocator.free == 40
