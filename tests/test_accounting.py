"""The summary against ledgers small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexfloor.errors import InputError
from flexfloor.ledger.accounting import iteration_ends, summarize
from flexfloor.ledger.comparison import compare_summaries
from flexfloor.ledger.events import (
    LedgerWriter,
    assign_record,
    chunk_record,
    end_record,
    read_ledger,
    start_record,
    submit_record,
)
from flexfloor.ledger.metrics import rollout_metrics
from flexfloor.ledger.timing import split_time
from flexfloor.progress import (
    FleetInfo,
    ModelShape,
    Preemption,
    Progress,
    RequestProgress,
    WorkerIterations,
    WorkerStatus,
)
from flexfloor.requests import FinishReason

SHAPE = ModelShape(
    "mixtral", 2, (0, 1), 8, 2, 100, 64, dense_bytes=10, expert_bytes=3, kv_token_bytes=1, hidden=4, itemsize=2
)
HASHES = ("a" * 64, "b" * 64)


def start(workers: int) -> dict[str, Any]:
    info = FleetInfo(
        kind="engine",
        model="tiny",
        shape=SHAPE,
        workers=workers,
        numerics="bitwise",
        numerics_path="cbwr",
        dtype="float32",
        device="cpu",
        threads_per_worker=1,
        versions={"torch": "2.11.0"},
    )
    return start_record(info, "static", {"seed": 7, "step": 3}, "2026-01-01T00:00:00+00:00")


def worked(worker: int, seconds: list[float], batch: list[int]) -> WorkerIterations:
    """Every live request that takes part in an iteration gets a token."""
    zeros = np.zeros(len(batch), dtype=np.int64)
    return WorkerIterations(worker, np.array(seconds), np.array(batch), zeros, zeros, zeros, zeros, tokens=sum(batch))


def gained(request_id: str, worker: int, tokens: int, finish_iteration: int | None = None) -> RequestProgress:
    reason: FinishReason | None = None if finish_iteration is None else "stop"
    return RequestProgress(
        request_id,
        worker,
        tuple(range(tokens)),
        np.zeros(tokens, np.float32),
        reason,
        finish_iteration,
    )


def status(workers: int) -> list[WorkerStatus]:
    return [WorkerStatus(w, True, 0, 9, 10, peak_kv_bytes=100 + w, peak_memory_bytes=1000 + w) for w in range(workers)]


def hand_written() -> list[dict[str, Any]]:
    """3 workers, 6 iterations in two chunks; worker 0 works throughout, 1 until iteration 1, 2 never."""
    first = Progress(
        epoch=0,
        first_iteration=0,
        iterations=4,
        requests=(gained("a#0/0", 0, 4), gained("b#0/0", 1, 2, finish_iteration=1)),
        # The slowest worker of each iteration takes 1, 2, 1, 1 s, the chunk 10 s: ends at 2, 6, 8, 10.
        workers=(
            worked(0, [1, 1, 1, 1], [1, 1, 1, 1]),
            worked(1, [0.5, 2, 0.1, 0.1], [1, 1, 0, 0]),
            worked(2, [0.1] * 4, [0] * 4),
        ),
        preemptions=(Preemption("a#0/0", 0, 2),),
    )
    second = Progress(
        epoch=0,
        first_iteration=4,
        iterations=2,
        requests=(gained("a#0/0", 0, 2, finish_iteration=5),),
        workers=(worked(0, [1, 1], [1, 1]), worked(1, [1, 1], [0, 0]), worked(2, [1, 1], [0, 0])),
    )
    totals = {"a#0/0": (5, 6), "b#0/0": (3, 2)}
    return [
        start(3),
        submit_record(0.0, 2, 8),
        assign_record(0.0, 0, {0: ["a#0/0"], 1: ["b#0/0"]}),
        chunk_record(first, 0.0, 10.0, totals),
        chunk_record(second, 10.0, 16.0, totals),
        end_record(16.5, status(3), HASHES, regrow_s=2.0),
    ]


def test_iterations_fill_the_chunk_in_proportion_to_the_slowest_worker():
    chunk = {"iterations": 2, "t0": 1.0, "t1": 9.0, "workers": [{"seconds": [1, 1]}, {"seconds": [3, 0.5]}]}
    assert iteration_ends(chunk) == [7.0, 9.0]
    assert iteration_ends({"iterations": 2, "t0": 0.0, "t1": 4.0, "workers": [{"seconds": [0, 0]}]}) == [2.0, 4.0]
    assert iteration_ends({"iterations": 0, "t0": 0.0, "t1": 4.0, "workers": []}) == []


def test_summary_of_three_workers_one_of_them_idle():
    summary = summarize(hand_written())
    assert summary.complete
    assert (summary.requests, summary.prompt_tokens, summary.response_tokens) == (2, 8, 8)
    assert summary.wall_s == pytest.approx(16)
    assert summary.throughput_tok_s == pytest.approx(8 / 16)
    assert summary.occupied_worker_s == pytest.approx(48)
    assert summary.occupied_iterations == 18
    assert summary.tokens_per_occupied_s == pytest.approx(8 / 48)
    assert summary.tokens_per_occupied_s_with_regrow == pytest.approx(8 / (48 + 3 * 2))
    assert summary.post_finish_share == pytest.approx((0 + 10 + 16) / 48)
    assert summary.post_finish_share_iterations == (0 + 4 + 6) / 18
    assert (summary.iterations, summary.preemptions, summary.resizes, summary.regrow_s) == (6, 1, (), 2.0)
    assert [w.finished_at_s for w in summary.workers_detail] == pytest.approx([16, 6, 0])
    assert [w.requests for w in summary.workers_detail] == [1, 1, 0]
    assert [w.tokens for w in summary.workers_detail] == [6, 2, 0]
    assert [w.peak_kv_bytes for w in summary.workers_detail] == [100, 101, 102]
    assert [w.peak_memory_bytes for w in summary.workers_detail] == [1000, 1001, 1002]
    assert [w.post_finish_share for w in summary.workers_detail] == pytest.approx([0, 10 / 16, 1])
    assert (summary.responses_sha256, summary.logprobs_sha256) == HASHES
    assert (summary.seed, summary.step, summary.policy, summary.model) == (7, 3, "static", "tiny")


def test_summary_has_the_promised_fields():
    written = json.loads(json.dumps(summarize(hand_written()).to_json()))
    promised = """schema policy workers requests prompt_tokens response_tokens wall_s throughput_tok_s
        occupied_worker_s occupied_iterations tokens_per_occupied_s post_finish_share post_finish_share_iterations
        regrow_s iterations preemptions resizes workers_detail responses_sha256 logprobs_sha256 numerics seed step
        model versions"""
    assert set(promised.split()) <= set(written)
    detail = "requests tokens occupied_s finished_at_s released_at_s peak_kv_bytes peak_memory_bytes"
    assert set(detail.split()) <= set(written["workers_detail"][0])


def test_work_that_comes_back_to_a_worker_ends_its_local_work_later():
    records = hand_written()
    records[4]["workers"][2]["batch"] = [1, 0]
    summary = summarize(records)
    assert summary.workers_detail[2].finished_at_s == pytest.approx(13)
    assert summary.post_finish_share_iterations == (0 + 4 + 1) / 18


def test_iterations_after_the_last_response_do_not_count_as_wall_time():
    """A cancelled request runs on after the last response that is kept."""
    records = hand_written()
    records[4]["finished"][0]["iteration"] = 4
    assert summarize(records).wall_s == pytest.approx(13)


def test_a_killed_run_is_summed_up_as_far_as_it_goes():
    summary = summarize(hand_written()[:4])
    assert not summary.complete
    assert (summary.requests, summary.iterations, summary.wall_s) == (2, 4, 10.0)
    assert (summary.regrow_s, summary.tokens_per_occupied_s_with_regrow) == (None, None)
    assert summary.occupied_rate == summary.tokens_per_occupied_s
    logged = rollout_metrics(summary, split_time(hand_written()[:4]))
    assert "throughput_tok_s" in logged
    assert not {"regrow_s", "tokens_per_occupied_s_with_regrow"} & set(logged)
    assert summary.response_tokens == 6  # 2 of the response that ended, 4 of the one under way
    assert summary.post_finish_share_iterations == (0 + 2 + 4) / 12
    assert summary.responses_sha256 is None
    assert summary.workers_detail[0].peak_kv_bytes is None


def test_a_run_killed_before_its_first_iteration_divides_nothing_by_zero():
    summary = summarize([start(2)])
    assert (summary.wall_s, summary.throughput_tok_s, summary.post_finish_share) == (0, 0, 0)
    assert summary.post_finish_share_iterations == 0


def test_a_killed_run_is_told_of_up_to_its_last_record():
    """Not only up to its last chunk: a resize and a decision after it took time in which workers were occupied."""
    gone: dict[str, Any] = {
        "type": "resize", "t0": 10.5, "t1": 11.0, "iteration": 4, "members": [0, 1], "leaving": [2], "joining": [],
        "left_live": [], "experts": 0, "expert_bytes": 0, "requests": 0, "kv_bytes": 0, "failed": None, "predicted": {},
    }  # fmt: skip
    records = [*hand_written()[:4], gone, assign_record(12.0, 4, {0: ["c#0/0"]})]
    summary = summarize(records)
    assert (summary.wall_s, summary.stall_s) == (12.0, 0.5)
    assert [w.occupied_s for w in summary.workers_detail] == [12.0, 12.0, 11.0]
    begun = summarize([start(3), gone | {"t0": 0.25, "t1": 0.5, "iteration": 0}])
    assert (begun.wall_s, begun.stall_s, begun.occupied_worker_s) == (0.5, 0.25, 1.5)


def test_ratios_of_a_killed_run_are_withheld():
    whole, cut = summarize(hand_written()), summarize(hand_written()[:4])
    for summaries in ({"a": whole, "b": cut}, {"a": cut, "b": whole}):
        other = compare_summaries(summaries, "a")[1]
        assert (other.throughput_ratio, other.tokens_per_occupied_iteration_ratio) == (None, None)
        assert other.tokens_per_occupied_s_with_regrow_ratio is None
    assert compare_summaries({"a": whole, "b": whole}, "a")[1].throughput_ratio == 1


def test_one_iteration_chunks_give_the_same_iteration_counts():
    """The iteration metrics do not depend on how the driver cut the run into chunks."""
    records = hand_written()
    cut = records[:3]
    for chunk in records[3:5]:
        for i in range(chunk["iterations"]):
            at = chunk["first_iteration"] + i
            arrays = ("seconds", "batch", "prefill_tokens", "kv_tokens", "experts_touched", "overran")
            cut.append(
                chunk
                | {
                    "first_iteration": at,
                    "iterations": 1,
                    "t0": float(at),
                    "t1": at + 1.0,
                    "workers": [w | {name: w[name][i : i + 1] for name in arrays} for w in chunk["workers"]],
                    "finished": [f for f in chunk["finished"] if f["iteration"] == at],
                }
            )
    whole, fine = summarize(records), summarize([*cut, records[5]])
    assert whole.occupied_iterations == fine.occupied_iterations
    assert whole.post_finish_share_iterations == fine.post_finish_share_iterations


def test_the_file_gives_the_same_summary_as_the_records_in_memory(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    writer = LedgerWriter(path)
    for number, record in enumerate(hand_written(), 1):
        writer.write(record)
        assert len(read_ledger(path)) == number  # valid after every line
    writer.close()
    assert summarize(read_ledger(path)).to_json() == summarize(writer.records).to_json()


def test_two_runs_do_not_write_one_ledger(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    first, second, records = LedgerWriter(path), LedgerWriter(path), hand_written()
    first.write(records[0])
    with pytest.raises(InputError, match=r"ledger\.jsonl: another run is writing this ledger; name another file"):
        second.write(records[0])
    first.write(records[1])
    first.close()
    assert len(read_ledger(path)) == 2
    LedgerWriter(path).write(records[0])  # the file of an earlier run is written anew
    assert len(read_ledger(path)) == 1


def test_every_truncation_of_a_ledger_can_be_read(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    writer = LedgerWriter(path)
    for record in hand_written():
        writer.write(record)
    writer.close()
    whole = path.read_bytes()
    first_line = whole.index(b"\n")
    for cut in range(first_line, len(whole), 37):
        path.write_bytes(whole[:cut])
        assert summarize(read_ledger(path)).workers == 3
    path.write_bytes(whole[:-20])
    assert not summarize(read_ledger(path)).complete


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "does not begin with a start record"),
        ('{"type": "chunk"}\n', "does not begin with a start record"),
        ('{"type": "start", "schema": 99}\n', "ledger schema 99"),
        ('{"type": "start", "schema": 1}\nnonsense\n{"type": "end"}\n', "line 2 is not JSON"),
        ('[1]\n{"type": "end"}\n', "line 1 is not a ledger record"),
        (2 * '{"type": "start", "schema": 1}\n', "line 2 is a second start record"),
        ('{"type": "start", "schema": 1}\n{"type": "submit", "t": NaN}\n', "line 2: t is not a finite number"),
        ('{"type": "start", "schema": 1}\n{"type": "chunk", "t0": 0, "t1": 1e999}\n', "line 2: t1 is not a finite"),
        (
            '{"type": "start", "schema": 1}\n{"type": "chunk", "workers": [{"seconds": [-Infinity]}]}\n',
            "seconds is not",
        ),
    ],
)
def test_what_is_not_a_ledger_is_refused(tmp_path: Path, text: str, told: str):
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_ledger(path)


def test_a_ledger_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read as a ledger"):
        read_ledger(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_ledger(tmp_path / "binary")
