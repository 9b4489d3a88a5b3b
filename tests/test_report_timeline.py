"""What the report makes of records: states of workers, live requests and memory over time, by hand and as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import DEVICE, PAGE, PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages

from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter
from flexfloor.report.timeline import (
    DECODE,
    IDLE,
    PLANNING,
    PREFILL,
    RELEASED,
    STALL,
    fullest_of,
    group_workers,
    main_states,
    make_timeline,
)
from flexfloor.report.timeline_memory import make_memory_line
from flexfloor.rollout import rollout


def chunk(t0: float, t1: float, first: int, tokens: int, **workers: tuple[list[float], list[int], list[int]]) -> dict:
    """w0=(seconds, batch, prefill tokens), …"""
    entries = [
        {"worker": int(name[1:]), "tokens": 0, "seconds": s, "batch": b, "prefill_tokens": p, "kv_pages": sum(b)}
        for name, (s, b, p) in workers.items()
    ]
    count = max(len(seconds) for seconds, _, _ in workers.values())
    usual = {"type": "chunk", "finished": [], "preemptions": [], "first_iteration": first, "iterations": count}
    return usual | {"t0": t0, "t1": t1, "tokens": tokens, "workers": entries}


def resize(t0: float, t1: float, leaving: list[int], failed: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "resize", "t0": t0, "t1": t1, "leaving": leaving, "joining": [], "failed": failed} | more


def start(workers: int) -> dict[str, Any]:
    fleet = {"workers": workers, "shape": {"expert_bytes": 100}}
    return {"type": "start", "fleet": fleet, "settings": {"worker_memory": 5000}}


RECORDS = [
    start(2),
    {"type": "submit", "t": 0.0, "requests": 3, "prompt_tokens": 9},
    chunk(1.0, 3.0, 0, 4, w0=([1, 1], [2, 2], [5, 0]), w1=([1, 1], [1, 0], [0, 0])),
    resize(3.5, 4.0, [1]),
    chunk(4.5, 6.5, 2, 6, w0=([0.5, 1.5], [2, 1], [0, 0])),
]
RECORDS[4]["finished"] = [{"iteration": 2, "worker": 0, "request_id": "a"}]


def test_intervals_by_hand():
    line = make_timeline(RECORDS, 6.5)
    assert line.edges.tolist() == [0, 1, 2, 3, 3.5, 4, 4.5, 5, 6.5]
    assert line.state.tolist() == [
        [PLANNING, PREFILL, DECODE, PLANNING, STALL, PLANNING, DECODE, DECODE],
        [PLANNING, DECODE, IDLE, PLANNING, STALL, RELEASED, RELEASED, RELEASED],
    ]
    # While nothing is computed, what is live is what the next advance has.
    assert line.live.tolist() == [[2, 2, 2, 2, 2, 2, 2, 1], [1, 1, 0, 0, 0, 0, 0, 0]]
    # 4 tokens over planning and iterations from 0 to 3, none until 4, 6 tokens from 4 to 6.5.
    assert line.tokens_per_s == pytest.approx([4 / 3, 4 / 3, 4 / 3, 0, 0, 2.4, 2.4, 2.4])
    assert line.waiting.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert line.active().tolist() == [2, 2, 2, 2, 2, 1, 1, 1]
    assert [part.tolist() for part in line.active_set()] == [[0, 4, 6.5], [2, 1]]
    assert line.seconds_by_state() == pytest.approx(
        {"prefill": 1, "decode": 4, "idle": 1, "stall": 1, "planning": 3.5, "released": 2.5}
    )


def test_a_timeline_ends_with_the_rollout():
    line = make_timeline(RECORDS, 4.75)
    assert line.edges.tolist() == [0, 1, 2, 3, 3.5, 4, 4.5, 4.75]
    assert line.state[:, -1].tolist() == [DECODE, RELEASED]


def test_a_failed_resize_stalls_and_releases_nobody():
    line = make_timeline([*RECORDS[:3], resize(3.0, 4.0, [1], failed="no room")], 4.0)
    assert line.state[:, -1].tolist() == [STALL, STALL]
    assert line.live[:, -1].tolist() == [0, 0], "nothing comes after it"


def test_bins_hold_means_and_the_main_state():
    line = make_timeline(RECORDS, 6.5)
    edges = np.array([0.0, 1.5, 3.25, 6.5])
    assert line.mean(line.live, edges)[0] == pytest.approx([2, 2, (1.75 * 2 + 1.5) / 3.25])
    state, live = main_states(line, [[0], [1]], edges)
    assert state.tolist() == [[PLANNING, DECODE, DECODE], [PLANNING, IDLE, RELEASED]]
    both, all_live = main_states(line, [[1, 0]], edges)
    assert both.tolist() == [[PLANNING, DECODE, RELEASED]]
    assert all_live == pytest.approx(live.sum(axis=0, keepdims=True))


def test_nothing_has_happened_yet():
    line = make_timeline([start(3)], 0.0)
    assert line.state.tolist() == [[PLANNING]] * 3
    assert line.end_s > 0
    assert main_states(line, [[0], [1], [2]], line.bins(10))[0].shape == (3, 10)


def test_groups_are_of_workers_that_left_together():
    assert group_workers([None, 1.0, 2.0], [3.0, 1.0, 2.0], 3) == [[0], [1], [2]]
    assert group_workers([1.0, None, 3.0, None, 2.0], [1.0, 9.0, 3.0, 9.0, 2.0], 3) == [[1, 3], [2, 4], [0]]
    values = np.array([[1.0], [5.0], [np.nan], [3.0], [np.nan]])
    assert fullest_of(values, [[1, 3], [0, 2]]).tolist() == [[5.0], [1.0]]


def test_memory_by_hand():
    divided = [{"worker": w, "memory_bytes": 1, "arena_bytes": 4000, "slots": 3 + w, "kv_pages": 50} for w in range(2)]
    after = [{"worker": 0, "memory_bytes": 1, "arena_bytes": 4000, "slots": 7, "kv_pages": 30}]
    records = [
        start(2) | {"workers": divided, "page_bytes": 10},
        *RECORDS[1:3],
        resize(3.5, 4.0, [1], workers=after),
        RECORDS[4],
    ]
    line = make_memory_line(records, 6.5)
    assert line is not None
    assert line.budget == 5000
    assert line.t.tolist() == [0, 3, 4, 6.5]
    assert line.experts.tolist() == [[300, 300, 700, 700], [400, 400, 0, 0]]
    assert line.kv.tolist() == [[0, 40, 40, 30], [0, 10, 0, 0]]
    assert line.arena.tolist() == [[4000] * 4, [4000, 4000, 0, 0]]
    binned = line.bins(np.array([0.0, 3.25, 6.5]))
    assert binned.kv.tolist() == [[40, 40], [10, 10]], "the most within each bin"
    assert binned.experts.tolist() == [[300, 300], [400, 400]]


def test_an_old_ledger_does_not_tell_of_memory():
    assert make_memory_line(RECORDS, 6.5) is None


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=24),
    workers=st.integers(1, 4),
    policy=st.sampled_from(["static", "release", "flexfloor", "planned", "fixed:1"]),
)
def test_the_states_of_workers_add_up_to_the_account(lengths: list[int], workers: int, policy: str):
    requests = make_requests(lengths)
    device = with_pages(60, workers)
    fleet = SimulatedFleet(
        SHAPE, device, workers, lengths=lengths_of(requests, lengths), page_tokens=PAGE_TOKENS, max_batch=4
    )
    ledger = LedgerWriter()
    summary = rollout(
        fleet, requests, policy=policy, profile=DEVICE, chunk=4, ledger=ledger,
        knowledge="oracle", lengths=known_lengths("oracle", requests, lengths, 60),
    ).summary  # fmt: skip
    line = make_timeline(ledger.records, summary.wall_s)
    seconds = line.seconds_by_state()
    assert sum(seconds.values()) - seconds["released"] == pytest.approx(summary.occupied_worker_s)
    assert seconds["released"] == pytest.approx(workers * summary.wall_s - summary.occupied_worker_s, abs=1e-6)
    assert seconds["stall"] <= workers * summary.stall_s + 1e-9
    assert line.integrate(line.tokens_per_s, np.array([0.0, line.end_s])) == pytest.approx(summary.response_tokens)
    assert summarize(ledger.records) == summary
    memory = make_memory_line(ledger.records, summary.wall_s)
    assert memory is not None
    assert (memory.experts + memory.kv <= memory.arena).all()
    peaks = [w.peak_kv_bytes or 0 for w in summary.workers_detail]
    assert (memory.kv.max(axis=1) <= peaks).all()
    assert (memory.kv % PAGE == 0).all()
