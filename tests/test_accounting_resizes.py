"""The account of rollouts in which workers leave, against ledgers small enough to work out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_accounting import HASHES, gained, start, status, worked

from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import (
    LedgerWriter,
    assign_record,
    chunk_record,
    end_record,
    read_ledger,
    resize_record,
    submit_record,
)
from flexfloor.progress import Progress, RequestProgress, ResizeOutcome

TOTALS = {"a#0/0": (5, 6), "b#0/0": (3, 2), "c#0/0": (1, 4)}


def resize(
    t0: float,
    t1: float,
    iteration: int,
    members: Sequence[int],
    leaving: Sequence[int] = (),
    *,
    left_live: Sequence[int] = (),
    failed: str | None = None,
    experts: int = 2,
    kv_bytes: int = 10,
) -> dict[str, Any]:
    outcome = ResizeOutcome(
        epoch=1,
        iteration=iteration,
        members=tuple(members),
        leaving=tuple(leaving),
        joining=(),
        experts=experts,
        expert_bytes=100 * experts,
        requests=1,
        requests_recomputed=0,
        kv_bytes=kv_bytes,
        prepare_s=t1 - t0,
        commit_s=0.0,
        reason="why not",
        left_live=tuple(left_live),
        failed=failed,
    )
    return resize_record(t0, t1, outcome)


def chunk(
    t0: float,
    t1: float,
    first: int,
    batches: dict[int, list[int]],
    requests: Sequence[RequestProgress] = (),
) -> dict[str, Any]:
    """batches: active worker → its batch in each iteration. All iterations take equally long."""
    count = len(next(iter(batches.values())))
    workers = tuple(worked(w, [1.0] * count, batch) for w, batch in batches.items())
    return chunk_record(Progress(0, first, count, tuple(requests), workers), t0, t1, TOTALS)


def ledger(*middle: dict[str, Any], workers: int = 3, regrow_s: float = 0.0) -> list[dict[str, Any]]:
    begin = [
        start(workers),
        submit_record(0.0, 3, 9),
        assign_record(0.0, 0, {0: ["a#0/0"], 1: ["b#0/0"], 2: ["c#0/0"]}),
    ]
    return [*begin, *middle, end_record(99.0, status(workers), HASHES, regrow_s)]


def one_leaves(**change: Any) -> list[dict[str, Any]]:
    """3 workers, 2 s an iteration. b ends on worker 1 in iteration 1; worker 1 leaves from 8 to 9 s; a ends at 21 s."""
    return ledger(
        chunk(0, 8, 0, {0: [1] * 4, 1: [1, 1, 0, 0], 2: [1] * 4}, [gained("b#0/0", 1, 2, 1), gained("a#0/0", 0, 4)]),
        resize(8, 9, 4, [0, 2], [1], **change),
        chunk(9, 13, 4, {0: [1, 1], 2: [1, 0]}, [gained("c#0/0", 2, 4, 4)]),
        chunk(13, 21, 6, {0: [1] * 4, 2: [0] * 4}, [gained("a#0/0", 0, 2, 9)]),
        regrow_s=0.5,
    )


def test_a_released_worker_is_occupied_until_its_resize_is_done() -> None:
    summary = summarize(one_leaves())
    assert (summary.wall_s, summary.iterations, summary.response_tokens) == (21, 10, 12)
    assert [w.occupied_s for w in summary.workers_detail] == [21, 9, 21]
    assert [w.released_at_s for w in summary.workers_detail] == [None, 9, None]
    assert [w.finished_at_s for w in summary.workers_detail] == [21, 4, 11]
    assert summary.occupied_worker_s == 51
    assert summary.occupied_iterations == 10 + 4 + 10
    assert summary.tokens_per_occupied_s == pytest.approx(12 / 51)
    assert summary.tokens_per_occupied_s_with_regrow == pytest.approx(12 / (51 + 3 * 0.5))
    assert summary.post_finish_share == pytest.approx((0 + 5 + 10) / 51)
    assert summary.post_finish_share_iterations == (0 + 2 + 5) / 24
    assert summary.workers_detail[1].post_finish_share == pytest.approx(5 / 9)
    assert (summary.stall_s, summary.moved_bytes, summary.regrow_s) == (1, 210, 0.5)
    assert [(r["leaving"], r["reason"], r["failed"]) for r in summary.resizes] == [([1], "why not", None)]


def test_requests_that_leave_with_the_resize_end_local_work_then() -> None:
    ends = [gained(name, worker, 6, 5) for name, worker in (("a#0/0", 0), ("b#0/0", 0), ("c#0/0", 2))]
    records = ledger(
        chunk(0, 8, 0, {0: [1] * 4, 1: [1] * 4, 2: [1] * 4}),
        resize(8, 10, 4, [0, 2], [1], left_live=[1]),
        chunk(10, 14, 4, {0: [2, 2], 2: [1, 1]}, ends),
    )
    summary = summarize(records)
    assert summary.workers_detail[1].finished_at_s == 10
    assert summary.workers_detail[1].post_finish_share == 0
    assert summary.post_finish_share == 0
    assert (summary.post_finish_share_iterations, summary.occupied_iterations) == (0, 6 + 4 + 6)
    assert [w.requests for w in summary.workers_detail] == [2, 0, 1], "a response counts where it ends"


def test_a_worker_released_before_the_first_token_is_occupied_until_its_experts_are_elsewhere() -> None:
    records = ledger(
        resize(0.5, 3, 0, [0], [1, 2], kv_bytes=0),
        chunk(3, 11, 0, {0: [3] * 4}, [gained("a#0/0", 0, 4, 3)]),
    )
    summary = summarize(records)
    assert [w.occupied_s for w in summary.workers_detail] == [11, 3, 3]
    assert summary.occupied_iterations == 4
    assert summary.post_finish_share == pytest.approx(6 / 17)
    assert summary.post_finish_share_iterations == 0
    assert summary.moved_bytes == 200


def test_a_failed_resize_releases_nobody_but_has_cost_its_time() -> None:
    summary = summarize(one_leaves(failed="worker 2: slot 4 did not arrive as it was sent"))
    assert [w.occupied_s for w in summary.workers_detail] == [21, 21, 21]
    assert all(w.released_at_s is None for w in summary.workers_detail)
    assert summary.occupied_iterations == 30
    assert (summary.stall_s, summary.moved_bytes) == (1, 0)
    assert summary.resizes[0]["failed"].startswith("worker 2")


def test_several_resizes_and_one_that_worked_at_the_second_try() -> None:
    records = ledger(
        chunk(0, 2, 0, {w: [1] for w in range(4)}, [gained("c#0/0", 2, 4, 0)]),
        resize(2, 3, 1, [0, 1], [2, 3], failed="worker 3: fault injected"),
        chunk(3, 5, 1, {w: [int(w < 2)] for w in range(4)}),
        resize(5, 7, 2, [0, 1], [2, 3], left_live=[3]),
        chunk(7, 9, 2, {0: [1], 1: [1]}, [gained("b#0/0", 1, 2, 2)]),
        resize(9, 9.5, 3, [0], [1], experts=4, kv_bytes=0),
        chunk(9.5, 13.5, 3, {0: [1, 1]}, [gained("a#0/0", 0, 6, 4)]),
        workers=4,
        regrow_s=2.0,
    )
    summary = summarize(records)
    assert [w.occupied_s for w in summary.workers_detail] == [13.5, 9.5, 7, 7]
    assert [w.released_at_s for w in summary.workers_detail] == [None, 9.5, 7, 7]
    assert summary.occupied_iterations == 5 + 3 + 2 + 2
    assert [w.finished_at_s for w in summary.workers_detail] == [13.5, 9, 2, 7]
    assert summary.post_finish_share == pytest.approx((0 + 0.5 + 5 + 0) / 37)
    assert summary.post_finish_share_iterations == (0 + 0 + 1 + 0) / 12
    assert (summary.stall_s, summary.moved_bytes, len(summary.resizes)) == (3.5, 210 + 400, 3)
    assert summary.tokens_per_occupied_s_with_regrow == pytest.approx(12 / (37 + 4 * 2))


def test_moves_without_a_resize_release_nobody() -> None:
    records = ledger(
        chunk(0, 4, 0, {0: [1, 1], 1: [1, 1], 2: [1, 1]}),
        resize(4, 5, 2, [0, 1, 2], experts=0, kv_bytes=70),
        chunk(5, 9, 2, {0: [2, 2], 1: [0, 0], 2: [1, 1]}, [gained("a#0/0", 0, 6, 3)]),
    )
    summary = summarize(records)
    assert [w.occupied_s for w in summary.workers_detail] == [9, 9, 9]
    assert [w.finished_at_s for w in summary.workers_detail] == [9, 4, 9]
    assert summary.post_finish_share_iterations == 2 / 12
    assert (summary.stall_s, summary.moved_bytes) == (1, 70)


def test_a_run_killed_after_a_release_is_summed_up_as_far_as_it_goes() -> None:
    records = one_leaves()
    summary = summarize(records[:5])  # start, submit, assign, chunk, resize
    assert not summary.complete
    assert summary.wall_s == 9
    assert [w.occupied_s for w in summary.workers_detail] == [9, 9, 9], "up to the end of the resize"
    assert summary.occupied_iterations == 12
    assert summarize(records[:6]).occupied_worker_s == 13 + 9 + 13


def test_the_last_response_ends_the_account_also_for_one_released_later() -> None:
    records = ledger(
        chunk(0, 8, 0, {0: [1] * 4, 1: [1, 1, 0, 0]}, [gained("a#0/0", 0, 4, 3), gained("b#0/0", 1, 2, 1)]),
        resize(8, 9, 4, [0], [1]),
        workers=2,
    )
    summary = summarize(records)
    assert [w.occupied_s for w in summary.workers_detail] == [8, 8]
    assert summary.tokens_per_occupied_s == pytest.approx(8 / 16)


def test_iteration_metrics_do_not_depend_on_time() -> None:
    slow = one_leaves()
    for record in slow:
        for key in ("t0", "t1"):
            if key in record:
                record[key] *= 7.5
    for name in ("occupied_iterations", "post_finish_share_iterations", "iterations", "moved_bytes"):
        assert getattr(summarize(slow), name) == getattr(summarize(one_leaves()), name)


def test_the_file_gives_the_same_summary_as_the_records_in_memory(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl")
    for record in one_leaves(left_live=[1]):
        writer.write(record)
    writer.close()
    there, here = summarize(read_ledger(tmp_path / "ledger.jsonl")), summarize(writer.records)
    assert there.to_json() == here.to_json()
    assert json.loads(json.dumps(here.to_json()))["resizes"][0]["left_live"] == [1]
    assert "requests" not in writer.records[-1]["workers"][0], "the closing status is about workers"
