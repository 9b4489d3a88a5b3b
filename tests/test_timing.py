"""Where the seconds of a rollout went: by hand, and that the parts make the whole of what a simulated rollout took."""

from __future__ import annotations

import pytest
from simulated import DEVICE, WatchedFleet, lengths_of, make_requests, with_pages

import flexfloor
from flexfloor.ledger.events import LedgerWriter
from flexfloor.ledger.timing import split_time


def chunk(t0: float, t1: float, seconds: list[list[float]], prefill: list[list[int]], **rest: object) -> dict:
    """One entry a worker, of one entry an iteration."""
    workers = [
        {"worker": w, "seconds": own, "prefill_tokens": tokens}
        for w, (own, tokens) in enumerate(zip(seconds, prefill, strict=True))
    ]
    return {"type": "chunk", "t0": t0, "t1": t1, "iterations": len(seconds[0]), "workers": workers, **rest}


def test_by_hand() -> None:
    records: list[dict] = [
        {"type": "start"},
        {"type": "submit", "t": 0.0},
        # Planned for one second; then three iterations of 1, 2 and 1 s, stretched to the chunk's 8: 2, 4 and 2.
        chunk(1.0, 9.0, [[1.0, 1.0, 1.0], [0.5, 2.0, 0.5]], [[0, 0, 0], [7, 0, 0]]),
        {"type": "decision", "t": 9.5},
        {"type": "resize", "t0": 10.0, "t1": 13.0, "failed": "by hand"},
        chunk(14.0, 15.0, [[1.0]], [[3]]),
        {"type": "end", "t": 14.9},  # the last response was complete before the driver had seen it
    ]
    split = split_time(records)
    assert (split.prefill_s, split.decode_s, split.resize_s) == pytest.approx((3.0, 6.0, 3.0))
    assert split.plan_s == pytest.approx(15.0 - 12.0)


def test_entries_that_stand_for_several_iterations() -> None:
    record = chunk(0.0, 10.0, [[1.0, 3.0]], [[1, 0]], spans=[4, 2]) | {"iterations": 6}
    split = split_time([record])
    assert (split.prefill_s, split.decode_s) == pytest.approx((4.0, 6.0))


def test_the_parts_make_the_whole() -> None:
    lengths = [3, 40, 5, 200, 8, 13, 4, 90]
    requests = make_requests(lengths, prompt=30)
    ledger = LedgerWriter()
    with WatchedFleet(with_pages(200, 4), 4, lengths_of(requests, lengths)) as fleet:
        result = flexfloor.rollout(fleet, requests, policy="release", knowledge="oracle", profile=DEVICE, ledger=ledger)
    split = split_time(ledger.records)
    assert split.prefill_s > 0
    assert split.decode_s > 0
    assert 0 < split.resize_s == pytest.approx(result.summary.stall_s)
    total = split.plan_s + split.prefill_s + split.decode_s + split.resize_s
    assert total == pytest.approx(result.summary.wall_s, rel=1e-6)
    assert split_time([]).plan_s == 0
