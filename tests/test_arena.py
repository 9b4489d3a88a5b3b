"""Arena and page tables: what is moved keeps its bytes, what is released is given back, and nothing else changes."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.errors import PlanRefusedError
from flexfloor.fleets.engine.arena import Arena, KVLayout
from flexfloor.fleets.engine.pages import PageAllocator, SharedPrompts
from flexfloor.fleets.engine.worker import process_memory
from flexfloor.world.memory import MIB, MemoryPlan

LAYOUT = KVLayout(layers=2, kv_heads=1, page_tokens=4, head_dim=2)
PAGE = LAYOUT.page_bytes(4)


def make(slots: int = 6, pages: int = 9, slot: int = 3 * PAGE) -> Arena:
    memory = MemoryPlan((slots + pages) * slot, 0, 0, slot, slots, PAGE, LAYOUT.page_tokens)
    return Arena(memory, LAYOUT, torch.float32, torch.device("cpu"))


def fill_slots(arena: Arena) -> None:
    for slot in range(arena.slot_count):
        arena.slots[arena.slot_row(slot)] = 1000 + slot


def read_slots(arena: Arena) -> list[int]:
    found = [arena.slots[arena.slot_row(slot)] for slot in range(arena.slot_count)]
    assert all(bool((row == row[0]).all()) for row in found), "a slot is torn"
    return [int(row[0]) - 1000 for row in found]


# -- slots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moved", "wanted"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({3: 3}, [0, 1, 2, 3, 4, 5]),
        ({5: 0}, [5, 1, 2, 3, 4, 5]),
        ({1: 0, 2: 1, 3: 2}, [1, 2, 3, 3, 4, 5]),  # a chain, whatever its order
        ({3: 4, 2: 3, 1: 2}, [0, 1, 1, 2, 3, 5]),
        ({0: 1, 1: 0}, [1, 0, 2, 3, 4, 5]),  # a ring
        ({0: 1, 1: 2, 2: 0, 3: 4, 4: 3}, [2, 0, 1, 4, 3, 5]),  # two of them
        ({0: 1, 1: 0, 4: 5}, [1, 0, 2, 3, 4, 4]),
    ],
)
def test_slots_move_all_at_once(moved: dict[int, int], wanted: list[int]) -> None:
    arena = make()
    fill_slots(arena)
    arena.move_slots(moved)
    assert read_slots(arena) == wanted


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_any_moves_of_slots_arrive(data: st.DataObject, count: int) -> None:
    arena = make(slots=count)
    fill_slots(arena)
    order = data.draw(st.permutations(range(count)))
    sources = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    moved = dict(zip(sources, order, strict=False))
    arena.move_slots(moved)
    wanted = list(range(count))
    for old, new in moved.items():
        wanted[new] = old
    assert read_slots(arena) == wanted


def test_slots_keep_their_numbers_when_the_cut_moves() -> None:
    arena = make(slots=4, pages=6)
    fill_slots(arena)
    assert (arena.page_count, arena.pages_beside(4), arena.pages_beside(10), arena.pages_beside(11)) == (18, 18, 0, 0)
    arena.slot_count = 6
    arena.slots[arena.slot_row(4)], arena.slots[arena.slot_row(5)] = 1004, 1005
    assert read_slots(arena) == list(range(6))
    assert arena.page_count == 12
    with pytest.raises(AssertionError):
        arena.slot_row(6)


def test_pages_and_slots_are_the_same_bytes_from_two_ends() -> None:
    arena = make(slots=1, pages=1)
    arena.pages[:] = 7
    assert bool((arena.slots == 7).all())
    assert len(arena.slot_bytes_of(0)) == 3 * PAGE
    assert len(arena.page_bytes_of(0)) == arena.page_bytes == PAGE
    arena.slot_bytes_of(0)[:] = 0
    assert arena.pages[3:].count_nonzero() == 0
    assert arena.pages[:3].count_nonzero() == arena.pages[:3].numel()


# -- pages ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(1, 27))
def test_pages_in_use_keep_what_they_hold_through_any_resize(data: st.DataObject, count: int) -> None:
    arena, allocator = make(slots=6, pages=9), PageAllocator(count)
    held: dict[int, tuple[int, int]] = {}  # page → (its mark, references)
    for mark in range(data.draw(st.integers(0, count))):
        page = allocator.take()
        arena.pages[page] = mark
        held[page] = (mark, 1)
        if data.draw(st.booleans()):
            allocator.share(page)
            held[page] = (mark, 2)
    for page in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []:
        for _ in range(held.pop(page)[1]):
            allocator.give_back(page)
    for size in data.draw(st.lists(st.integers(0, 27), min_size=1, max_size=4)):
        before = (allocator.count, allocator.free)
        if size < len(held):
            with pytest.raises(PlanRefusedError, match=f"{len(held)} KV pages are in use, {size} would be left"):
                allocator.resize(size)
            assert (allocator.count, allocator.free) == before
            continue
        moved = allocator.resize(size)
        assert not set(moved) & set(moved.values())
        assert set(moved) == {page for page in held if page >= size}, "only what is in the way moves"
        assert not set(moved.values()) & set(held)
        arena.move_pages(moved)
        held = {moved.get(page, page): entry for page, entry in held.items()}
        allocator.check()
        assert (allocator.count, allocator.used) == (size, len(held))
        assert all(bool((arena.pages[page] == mark).all()) for page, (mark, _) in held.items())
    for page, (_, references) in held.items():
        for _ in range(references):
            allocator.give_back(page)
    assert allocator.free == allocator.count
    free = allocator.count
    assert [allocator.take() for _ in range(free)] == list(range(free)), "the lowest page is handed out first"


def test_the_peak_outlives_a_resize() -> None:
    allocator = PageAllocator(5)
    taken = [allocator.take() for _ in range(4)]
    for page in taken:
        allocator.give_back(page)
    allocator.resize(2)
    assert allocator.peak == 4


def test_shared_prompts_follow_their_pages() -> None:
    allocator = PageAllocator(10)
    prompts = SharedPrompts(allocator, 4)
    filler = [allocator.take() for _ in range(7)]
    entry = prompts.hold((1,) * 9, "a")
    assert entry is not None
    assert entry.pages == [7, 8]
    for page in filler[:4]:
        allocator.give_back(page)
    moved = allocator.resize(6)
    prompts.renumber(moved)
    assert (moved, entry.pages) == ({6: 0, 7: 1, 8: 2}, [1, 2])
    again = prompts.hold((1,) * 9, "b")
    assert again is entry
    for name in ("a", "b"):
        prompts.leave(entry, name)
    assert prompts.find((1,) * 9) is None
    assert allocator.used == 3


# -- giving memory back --------------------------------------------------------------------------------------------


def test_released_memory_is_given_back_and_can_be_used_again() -> None:
    gc.collect()
    size = MIB
    arena = make(slots=16, pages=48, slot=size)
    empty = process_memory()
    arena.pages[:] = 1
    arena.slots[:] = 2
    pages, slots = arena.pages, arena.slots
    used = process_memory()
    assert used - empty > 60 * MIB, "an arena costs what is used of it"
    arena.release()
    assert process_memory() - empty < 4 * MIB
    assert arena.slot_count == 0
    assert arena.nbytes == 64 * MIB, "it can grow back to this"
    arena.restore()
    arena.slot_count = 16
    assert arena.pages[len(arena.pages) // 2].count_nonzero() == 0
    fill_slots(arena)
    assert read_slots(arena) == list(range(16))
    assert pages.data_ptr() == arena.pages.data_ptr()
    assert int(slots[arena.slot_row(5)][0]) == 1005, "a view from before sees the same memory"
    arena.pages[3] = 9
    assert bool((pages[3] == 9).all())


def test_an_arena_below_a_page_of_the_system_can_be_released() -> None:
    arena = make(slots=1, pages=1)
    arena.release()
    arena.restore()
    arena.slot_count = 1
    fill_slots(arena)
    assert read_slots(arena) == [0]
