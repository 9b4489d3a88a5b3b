"""The account from entries that stand for many iterations is the one from an entry for each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages

import flexfloor
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.fleets.simulation import fleet as simulation
from flexfloor.ledger.accounting import Summary, iteration_ends, summarize
from flexfloor.ledger.events import LedgerWriter, read_ledger

LENGTHS = [60, 1, 17, 40, 3, 5, 33, 8, 2, 59, 12, 12, 7, 1, 1, 30, 28, 44, 51, 6]
ARRAYS = ("seconds", "batch", "prefill_tokens", "kv_tokens", "experts_touched", "overran")


def records_of(
    policy: str, chunk: int, entries: int, monkeypatch: pytest.MonkeyPatch, path: Path | None = None
) -> list[dict]:
    """A simulated rollout whose ledger gets at most so many entries an advance, for all workers together."""
    monkeypatch.setattr(simulation, "_ENTRIES", entries)
    requests = make_requests(LENGTHS, prompt=9, samples=2, most=60)
    profile = with_pages(40, 4)
    fleet = SimulatedFleet(
        SHAPE, profile, 4, lengths=lengths_of(requests, LENGTHS), page_tokens=PAGE_TOKENS, max_batch=4
    )
    ledger = LedgerWriter(path)
    lengths = known_lengths("history", requests, LENGTHS, 60)
    flexfloor.rollout(
        fleet, requests, policy=policy, lengths=lengths, chunk=chunk, ledger=ledger, profile=profile, max_slowdown=0.5
    )
    return ledger.records


def by_iteration(records: Sequence[dict]) -> list[dict]:
    """The same ledger with an entry for each iteration, as a fleet that runs for real writes it."""
    changed = []
    for record in records:
        if record["type"] == "chunk":
            spans = record["spans"]
            workers = [
                {k: v for k, v in w.items() if k != "last_live"} | {n: np.repeat(w[n], spans).tolist() for n in ARRAYS}
                for w in record["workers"]
            ]
            record = {k: v for k, v in record.items() if k != "spans"} | {"workers": workers}
        changed.append(record)
    return changed


def numbers(summary: Summary) -> dict[str, Any]:
    def flat(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {k: v for name, inner in value.items() for k, v in flat(f"{prefix}.{name}", inner).items()}
        if isinstance(value, list | tuple):
            return {k: v for i, inner in enumerate(value) for k, v in flat(f"{prefix}.{i}", inner).items()}
        return {prefix: value}

    return flat("", dataclasses.asdict(summary))


def same(one: Summary, other: Summary, rel: float = 1e-9) -> None:
    ours, theirs = numbers(one), numbers(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        expected = pytest.approx(theirs[name], rel=rel, abs=1e-6) if isinstance(value, float) else theirs[name]
        assert value == expected, name


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("policy", ["static", "release", "flexfloor"])
def test_spans_stand_for_as_many_equal_iterations(policy: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an entry for every step of the batch model nothing is averaged but context tokens inside a step."""
    records = records_of(policy, chunk, 10**9, monkeypatch)
    assert any(max(r["spans"]) > 1 for r in records if r["type"] == "chunk") or chunk == 1
    for record, fine in zip(records, by_iteration(records), strict=True):
        if record["type"] == "chunk":
            assert sum(record["spans"]) == record["iterations"] == len(iteration_ends(record))
            assert iteration_ends(record) == pytest.approx(iteration_ends(fine))
    same(summarize(records), summarize(by_iteration(records)))


@pytest.mark.parametrize("policy", ["static", "release", "flexfloor"])
def test_few_entries_keep_what_is_exact(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted in iterations, and all seconds at the ends of advances; inside of one they are estimates."""
    many, few = (summarize(records_of(policy, 32, entries, monkeypatch)) for entries in (10**9, 1))
    for name in ("iterations", "occupied_iterations", "response_tokens", "preemptions", "requests", "regrow_s"):
        assert getattr(few, name) == getattr(many, name), name
    assert few.post_finish_share_iterations == many.post_finish_share_iterations
    assert few.wall_s == pytest.approx(many.wall_s, rel=1e-6)
    assert few.occupied_worker_s == pytest.approx(many.occupied_worker_s, rel=1e-6)
    assert few.post_finish_share == pytest.approx(many.post_finish_share, abs=0.05)
    assert [w.tokens for w in few.workers_detail] == [w.tokens for w in many.workers_detail]
    assert [w.requests for w in few.workers_detail] == [w.requests for w in many.workers_detail]


def test_entries_are_as_few_as_allowed_and_keep_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = (records_of("static", 64, entries, monkeypatch) for entries in (10**9, 8))
    for one, other in zip(many, few, strict=True):
        if one["type"] != "chunk":
            continue
        assert len(other["spans"]) <= 8 // 4
        for own, theirs in zip(one["workers"], other["workers"], strict=True):
            for name in ("seconds", "batch", "prefill_tokens", "kv_tokens"):
                total = np.array(own[name]) @ one["spans"]
                assert np.array(theirs[name]) @ other["spans"] == pytest.approx(total, abs=1e-4), name
            assert own["last_live"] == theirs["last_live"]


def test_a_simulated_ledger_on_disk_gives_the_same_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of("flexfloor", 16, 1024, monkeypatch, tmp_path / "ledger.jsonl")
    there = summarize(read_ledger(tmp_path / "ledger.jsonl"))
    assert json.loads(json.dumps(there.to_json())) == json.loads(json.dumps(summarize(records).to_json()))
    assert there.simulated
