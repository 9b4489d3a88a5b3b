"""Pace: honest wall time with more workers than cores, and not a token changed by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_requests

import flexfloor
from flexfloor.fleets.engine.pacing import IterationCounts, Pace, Pacer
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import read_ledger
from flexfloor.progress import ModelShape
from flexfloor.settings import EngineSettings
from flexfloor.world.costs import PROFILES, iteration_seconds

SHAPE = ModelShape("mixtral", 2, (0, 1), 4, 2, 100, 64, 1400, 100, 10, 5, 2)


def targets(ledger: Path, pace: float, shape: ModelShape) -> np.ndarray:
    """Seconds that each iteration of a ledger has to last, worked out from its counts."""
    found = []
    for chunk in (r for r in read_ledger(ledger) if r["type"] == "chunk"):
        for i in range(chunk["iterations"]):
            names = ("batch", "kv_tokens", "prefill_tokens")
            counts = {name: [w[name][i] for w in chunk["workers"]] for name in names}
            found.append(pace * iteration_seconds(PROFILES["h200"], shape, **counts))
    return np.array(found)


def iteration_times(ledger: Path) -> list[list[float]]:
    """Seconds of every iteration, on every worker."""
    chunks = [r for r in read_ledger(ledger) if r["type"] == "chunk"]
    return [[w["seconds"][i] for w in c["workers"]] for c in chunks for i in range(c["iterations"])]


def test_every_iteration_lasts_its_target_and_tokens_stay_the_same(checkpoint: Callable, tmp_path: Path) -> None:
    """Three times as many workers as cores, and still each has its own device."""
    model, workers = checkpoint("tiny"), 3 * len(os.sched_getaffinity(0))
    workers, pace = min(workers, 6), 40.0
    requests = make_requests(max_tokens=20)
    with flexfloor.Fleet.launch(model, workers=workers, prefill_tokens=32) as fleet:
        free = flexfloor.rollout(fleet, requests).summary
    assert (free.pace, free.profile, free.paced_overrun_share, free.pace_valid) == (None, None, None, None)
    # Small portions of prefill: what a GPU does in no time takes a core longer than a token's iteration.
    with flexfloor.Fleet.launch(model, workers=workers, pace=pace, prefill_tokens=32) as fleet:
        paced = flexfloor.rollout(fleet, requests, ledger=tmp_path / "l.jsonl").summary
        shape = fleet.info.shape
    assert (paced.responses_sha256, paced.logprobs_sha256) == (free.responses_sha256, free.logprobs_sha256)
    assert (paced.pace, paced.profile, paced.iterations) == (pace, "h200", free.iterations)
    wanted = targets(tmp_path / "l.jsonl", pace, shape)
    assert paced.wall_s >= wanted.sum()
    assert min(map(min, iteration_times(tmp_path / "l.jsonl"))) >= wanted.min() * 0.999
    assert all(
        min(took) >= want - 2e-6 for took, want in zip(iteration_times(tmp_path / "l.jsonl"), wanted, strict=True)
    )
    assert paced.paced_overrun_share is not None
    # A machine with other things to do overruns now and then; without that the time is the targets' and little more.
    if paced.paced_overrun_share == 0:
        assert paced.wall_s <= 1.2 * wanted.sum() + 1


def test_a_pace_that_the_machine_cannot_keep_is_told(checkpoint: Callable) -> None:
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, pace=1e-3, profile="slow") as fleet:
        summary = flexfloor.rollout(fleet, make_requests(prompts=2, max_tokens=8)).summary
    assert (summary.paced_overrun_share, summary.pace_valid, summary.profile) == (1.0, False, "slow")


def test_an_unknown_profile_is_refused_before_a_process_starts(checkpoint: Callable) -> None:
    with pytest.raises(flexfloor.InputError, match="profile 'b300' is not known; there is h200"):
        flexfloor.Fleet.launch(checkpoint("tiny"), profile="b300")


def test_waking_late_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: sleeps take 1 s longer than asked, work 2 s; targets are 10 s."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 1))
    pacer = Pacer(Pace(1.0, PROFILES["h200"]), SHAPE)
    pacer.begin_chunk()
    for _ in range(5):
        now[0] += 2
        assert pacer.end_iteration(10.0) == (10.0, False)
    assert now[0] == 100 + 5 * 10 + 1
    now[0] += 11  # 1 s after its beginning already
    assert pacer.end_iteration(10.0) == (12.0, True)
    now[0] += 2
    assert pacer.end_iteration(10.0) == (10.0, False)


def test_without_a_pace_nothing_sleeps_and_nothing_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("slept"))
    pacer = Pacer(Pace.of(EngineSettings()), SHAPE)
    assert pacer.target([IterationCounts(1, 1, 1, 5, 0)]) == 0
    assert pacer.end_iteration(0.0)[1] is False


def chunk(first: int, overran: list[list[int]]) -> dict[str, Any]:
    count = len(overran[0])
    entry = {"tokens": 0, "seconds": [1.0] * count, "batch": [1] * count}
    workers = [entry | {"worker": w, "overran": flags} for w, flags in enumerate(overran)]
    base = {"type": "chunk", "epoch": 0, "first_iteration": first, "iterations": count, "t0": 0.0, "t1": 1.0}
    return base | {"tokens": 0, "workers": workers, "finished": [], "preemptions": []}


def test_an_iteration_overran_when_any_worker_did() -> None:
    fleet = {"workers": 2, "numerics": "bitwise", "numerics_path": "cbwr", "model": "m", "versions": {}}
    start = {"type": "start", "schema": 1, "policy": "static", "settings": {}, "fleet": fleet | {"pace": 2.0}}
    summary = summarize([start, chunk(0, [[0, 1, 0], [0, 1, 1]]), chunk(3, [[0] * 197, [0] * 197])])
    assert summary.paced_overrun_share == 2 / 200
    assert summary.pace_valid
    assert not summarize([start, chunk(0, [[1] + [0] * 98, [0] * 99])]).pace_valid
