"""Requests that come to a worker, and go, with their pages."""

from __future__ import annotations

import flexfloor
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.scheduler import Scheduler, Sequence

PAGE = 4


def make(pages: int = 40, max_batch: int = 8) -> Scheduler:
    return Scheduler(PageAllocator(pages), PAGE, max_batch, prefill_tokens=16)


def sequences(prompt: int, samples: int, max_tokens: int = 6, token: int = 1) -> list[Sequence]:
    requests = flexfloor.make_requests([[token] * prompt], samples=samples)
    return [Sequence(r, 0, max_tokens, list(r.prompt_tokens)) for r in requests]


def step(scheduler: Scheduler) -> None:
    for chunk in scheduler.schedule():
        scheduler.note_computed(chunk)
        if chunk.draws:
            chunk.sequence.tokens.append(1)
            if chunk.sequence.response_length >= chunk.sequence.max_tokens:
                scheduler.remove(chunk.sequence)
    scheduler.allocator.check()


def decoding(sequence: Sequence, response: int = 2) -> Sequence:
    """As it comes from elsewhere: its prompt and all but the newest token are computed."""
    sequence.tokens += [1] * response
    sequence.computed = len(sequence.tokens) - 1
    return sequence


def arrive(scheduler: Scheduler, sequence: Sequence, pages: int) -> None:
    scheduler.make_room(sequence, pages)
    scheduler.adopt(sequence)


def test_siblings_that_arrive_share_the_pages_of_their_prompt() -> None:
    scheduler = make()
    first, second = (decoding(s) for s in sequences(9, 2))
    arrive(scheduler, first, 3)
    arrive(scheduler, second, 3)
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert scheduler.allocator.used == 2 + 1 + 1
    assert [s.status.kv_pages for s in scheduler.running] == [3, 3]
    assert [s.status.shared_pages for s in scheduler.running] == [2, 2]
    assert all(s.status.decoding for s in scheduler.running)
    scheduler.remove(first)
    assert scheduler.allocator.used == 3
    scheduler.remove(second)
    assert scheduler.allocator.used == 0


def test_a_sibling_that_waits_uses_the_pages_that_arrived() -> None:
    scheduler = make()
    moved, here = sequences(9, 2)
    arrive(scheduler, decoding(moved), 3)
    scheduler.add(here)
    step(scheduler)
    assert here.response_length == 1, "all but its last prompt token were there"
    assert scheduler.allocator.used == 2 + 1 + 1


def test_a_sibling_in_the_middle_of_its_prompt_goes_on_behind_the_pages_that_arrive() -> None:
    scheduler = make()
    here, moved = sequences(41, 2)
    scheduler.add(here)
    step(scheduler)
    assert here.computed == 16
    arrive(scheduler, decoding(moved), 11)
    assert here.pages[:4] == moved.pages[:4]
    step(scheduler)
    assert here.response_length == 1, "its prompt is complete at once"
    assert moved.response_length == 3


def test_what_was_made_room_for_can_be_dropped() -> None:
    scheduler = make()
    here, moved = sequences(9, 2)
    scheduler.add(here)
    step(scheduler)
    before = (scheduler.allocator.used, list(here.pages))
    scheduler.make_room(decoding(moved), 3)
    assert scheduler.allocator.used == before[0] + 1
    assert scheduler.live == 1, "it does not run yet"
    scheduler.drop(moved)
    assert (scheduler.allocator.used, here.pages) == before
    assert (moved.pages, moved.shared, moved.computed) == ([], None, 0)
    while scheduler.live:
        step(scheduler)
    assert scheduler.allocator.used == 0


def test_dropping_the_only_holder_of_a_prompt_forgets_it() -> None:
    scheduler = make()
    moved, later = sequences(9, 2)
    scheduler.make_room(decoding(moved), 3)
    scheduler.drop(moved)
    assert scheduler.allocator.used == 0
    scheduler.add(later)
    step(scheduler)
    assert later.shared is not None
    assert later.shared.filled == 8, "computed here, not taken for arrived"


def test_without_pages_a_request_waits_and_is_computed_again() -> None:
    scheduler = make()
    (moved,) = sequences(9, 1)
    decoding(moved, response=3)
    moved.computed = 0
    scheduler.adopt(moved)
    assert (scheduler.live, scheduler.running) == (1, [])
    while scheduler.live:
        step(scheduler)
    assert moved.response_length == moved.max_tokens, "its budget goes on where it was"


def test_what_arrives_is_the_youngest_and_is_preempted_first() -> None:
    scheduler = make(pages=6)
    (old,), (moved,) = sequences(4, 1, 20), sequences(4, 1, 20, token=2)
    scheduler.add(old)
    step(scheduler)
    arrive(scheduler, decoding(moved), 2)
    preempted: list[str] = []
    while scheduler.live:
        step(scheduler)
        preempted += scheduler.take_preempted()
    assert set(preempted) == {moved.request.request_id}
    assert (old.response_length, moved.response_length) == (20, 20)


def test_renumbered_pages_are_known_to_requests_and_prompts() -> None:
    scheduler = make(pages=14)
    filler = [scheduler.allocator.take() for _ in range(8)]
    first, second, late = sequences(9, 3)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    step(scheduler)
    for page in filler:
        scheduler.allocator.give_back(page)
    shared = list(first.pages[:2])
    moved = scheduler.allocator.resize(8)
    scheduler.renumber(moved)
    assert first.pages[:2] == second.pages[:2] == [moved.get(p, p) for p in shared]
    assert first.pages[:2] != shared
    assert max(first.pages + second.pages) < 8
    scheduler.add(late)
    step(scheduler)
    assert late.pages[:2] == first.pages[:2]
    while scheduler.live:
        step(scheduler)
    assert scheduler.allocator.free == 8


def test_a_request_is_found_wherever_it_is() -> None:
    scheduler = make(max_batch=1)
    first, second = sequences(4, 2)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert scheduler.find(first.request.request_id) is first
    assert scheduler.find(second.request.request_id) is second
    scheduler.cancel([first.request.request_id, second.request.request_id])
    assert scheduler.live == scheduler.allocator.used == 0
