"""Resizes, moves, failures and regrow at random, in one process: every token, page and expert stays what it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from paper_fleet import PaperFleet, next_token

import flexfloor
from flexfloor.errors import PlanRefusedError
from flexfloor.requests import Prompt, Request
from flexfloor.world.resize import plan_moves, plan_shrink

torch.set_num_threads(1)
FAILING = ["mover.prepare", "mover.pack", "mover.make_room", "mover.transfer", "mover.connect_next"]


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt_tokens)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(request.request_id, tokens))
    return tokens[len(request.prompt_tokens) :]


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    made = []
    for index in range(draw(st.integers(1, 6))):
        tokens = tuple(7 * index + i % 5 for i in range(draw(st.integers(1, 22))))
        params = flexfloor.SamplingParams(max_tokens=draw(st.integers(1, 24)), ignore_eos=True)
        samples = draw(st.integers(1, 4))
        made += flexfloor.make_requests([Prompt(tokens, key=f"p{index}")], samples=samples, sampling=params)
    return made


def change(data: st.DataObject, fleet: PaperFleet, names: Sequence[str]) -> None:
    """A shrink, or moves, of a random set; now and then with a failure on the way, which must change nothing."""
    status = fleet.status()
    live = sorted(set(names) & set(status.requests))
    leave = len(status.active) > 1 and data.draw(st.booleans())
    leaving = data.draw(_some(status.active, most=len(status.active) - 1)) if leave else []
    stay = [w for w in status.active if w not in leaving]
    homes = data.draw(st.dictionaries(st.sampled_from(live), st.sampled_from(stay), max_size=4)) if live else {}
    try:
        plan = plan_shrink(status, leaving, homes) if leaving else plan_moves(status, homes)
    except PlanRefusedError:
        event("refused")
        return
    if data.draw(st.booleans()):
        fleet.crew.fault = (data.draw(st.sampled_from(FAILING)), data.draw(st.sampled_from(status.active)))
    outcome = fleet.apply(plan)
    fleet.crew.fault = None
    event("failed" if outcome.failed else "shrunk" if leaving else "moved")
    if outcome.failed:
        after = fleet.status()
        assert after.placement is status.placement
        assert [(w.slots, w.kv_pages, w.requests) for w in after.workers] == [
            (w.slots, w.kv_pages, w.requests) for w in status.workers
        ]


def _some(of: Sequence[int], most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(of), min_size=1, max_size=most, unique=True)


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    requests=workloads(),
    workers=st.integers(2, 4),
    experts=st.integers(4, 7),
    pages=st.integers(14, 80),
    batch=st.integers(2, 12),
)
def test_random_resizes_change_no_token(
    data: st.DataObject, requests: list[Request], workers: int, experts: int, pages: int, batch: int
) -> None:
    fleet = PaperFleet(workers, experts=experts, pages=pages, batch=batch, prefill=data.draw(st.integers(3, 30)))
    fleet.submit(requests)
    by_id = {r.request_id: r for r in requests}
    late = list(by_id)[data.draw(st.integers(0, len(by_id))) :]
    first = [name for name in by_id if name not in late]
    fleet.assign({w: first[w::workers] for w in range(workers)}, by_id)
    for _ in range(data.draw(st.integers(1, 6))):
        fleet.advance(data.draw(st.integers(0, 9)))
        change(data, fleet, list(by_id))
    if late:  # arrive where there still is somebody
        fleet.assign({w: late[i :: len(fleet.members)] for i, w in enumerate(fleet.members)}, by_id)
    change(data, fleet, list(by_id))
    fleet.advance(3000)
    assert fleet.finished == {name: expected(request) for name, request in by_id.items()}
    assert all(one.allocator.used == 0 for one in fleet.workers.values()), "pages were lost"
    fleet.regrow()
    assert fleet.members == tuple(range(workers))
    assert np.array_equal(fleet.placement.worker, fleet.home.worker)
    assert np.array_equal(fleet.placement.slot, fleet.home.slot)
    slots = [fleet.home.slots_on(w) for w in range(workers)]
    assert [one.arena.slot_count for one in fleet.workers.values()] == slots
    assert all(one.allocator.count == one.arena.page_count for one in fleet.workers.values())


def test_many_shrinks_and_regrows_leave_nothing_behind() -> None:
    fleet = PaperFleet(4, pages=70)
    short = flexfloor.SamplingParams(max_tokens=40, ignore_eos=True)
    made = flexfloor.make_requests([[1, 2, 3, 4, 5, 6]], samples=4, sampling=short)
    requests = {r.request_id: r for r in made}
    fleet.submit(made)
    counts = [one.allocator.count for one in fleet.workers.values()]
    for cycle in range(50):
        fleet.finished = {}
        fleet.assign({w: [name] for w, name in enumerate(requests)}, requests)
        fleet.advance(3)
        for leaving in ([cycle % 4], [(cycle + 1) % 4, (cycle + 2) % 4]):
            assert fleet.apply(plan_shrink(fleet.status(), leaving)).failed is None
            fleet.advance(2)
        fleet.advance(500)
        assert len(fleet.finished) == 4
        fleet.regrow()
        assert [one.allocator.count for one in fleet.workers.values()] == counts
        assert [one.allocator.used for one in fleet.workers.values()] == [0] * 4
    assert fleet.placement.epoch == 150
