"""Decisions are in the ledger with a reason and what they counted with, and afterwards with what became of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import WatchedFleet, known_lengths, lengths_of, make_requests, with_pages
from test_accounting import HASHES, start, status
from test_accounting_resizes import chunk, gained

import flexfloor
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import (
    LedgerWriter,
    assign_record,
    decision_record,
    end_record,
    read_ledger,
    resize_record,
    submit_record,
)
from flexfloor.policy import make_policy
from flexfloor.progress import Decision, ResizeOutcome
from flexfloor.world.lengths.knowledge import make_lengths

WORKERS, MOST = 6, 200
QUICK = replace(with_pages(120, WORKERS), switch_s=1.0, move_bytes_per_s=1e4, pause_s=0.1)
DECIDED = {"stall_s", "remaining_s", "remaining_occupied_s", "saved_worker_s"}
BECAME = {"stall_s", "remaining_s", "remaining_occupied_s"}


def lengths() -> list[int]:
    rng = random.Random(1)
    return [min(MOST, max(2, int(rng.lognormvariate(3.3, 0.9)))) for _ in range(48)]


def run(policy: str, knowledge: str, path: Path | None = None, samples: int = 4) -> tuple[Summary, list[dict]]:
    requests = make_requests(lengths(), prompt=9, samples=samples, most=None if knowledge == "oracle" else MOST)
    fleet = WatchedFleet(QUICK, WORKERS, lengths_of(requests, lengths()))
    ledger = LedgerWriter(path)
    forecasts = known_lengths(knowledge, requests, lengths(), MOST)
    flexfloor.rollout(
        fleet, requests, policy=policy, lengths=forecasts, chunk=8, max_slowdown=0.3, profile=QUICK, ledger=ledger
    )
    return summarize(ledger.records), ledger.records


@pytest.fixture(scope="module", params=["oracle", "history", "shuffled", "none"])
def decided(request: pytest.FixtureRequest) -> tuple[Summary, list[dict]]:
    return run("flexfloor", request.param)


def test_every_resize_of_flexfloor_says_why_and_what_it_counts_with(decided: tuple[Summary, list[dict]]) -> None:
    summary, _ = decided
    assert any(r["leaving"] for r in summary.resizes), "nobody has left: this shows nothing"
    for resize in summary.resizes:
        assert resize["reason"]
        assert "\n" not in resize["reason"]
        assert "stall_s" in resize["predicted"]
        assert all(isinstance(value, float) and value >= 0 for value in resize["predicted"].values())
        if resize["leaving"]:
            assert set(resize["predicted"]) == DECIDED
            assert resize["predicted"]["saved_worker_s"] > 0


def test_what_became_of_it_stands_beside(decided: tuple[Summary, list[dict]]) -> None:
    """From the times of the ledger, worked out here once more."""
    summary, _ = decided
    for resize in summary.resizes:
        actual = resize["actual"]
        assert set(actual) == BECAME & set(resize["predicted"])
        assert actual["stall_s"] == pytest.approx(resize["t1"] - resize["t0"])
        if resize["leaving"]:
            assert actual["remaining_s"] == pytest.approx(summary.wall_s - resize["t1"])
            after = [max(0.0, w.occupied_s - resize["t1"]) for w in summary.workers_detail]
            assert actual["remaining_occupied_s"] == pytest.approx(sum(after))
            assert actual["remaining_occupied_s"] <= len(resize["members"]) * actual["remaining_s"] * (1 + 1e-9)


def test_the_order_is_a_decision_in_ledger_and_summary(decided: tuple[Summary, list[dict]]) -> None:
    summary, records = decided
    written = [r for r in records if r["type"] == "decision"]
    assert [(r["t"], r["iteration"], r["what"]) for r in written] == [(0.0, 0, "order")]
    (told,) = summary.decisions
    assert told["reason"] == written[0]["reason"] != ""
    assert told["predicted"] == written[0]["predicted"]
    assert set(told["actual"]) == {"remaining_s"} <= set(told["predicted"])
    assert told["actual"]["remaining_s"] == pytest.approx(summary.wall_s)


def test_with_all_lengths_known_predictions_come_near() -> None:
    """Requests without siblings, so that prompts are computed as look-ahead has it."""
    summary, _ = run("flexfloor", "oracle", samples=1)
    shrinks = [r for r in summary.resizes if r["leaving"]]
    assert shrinks
    for resize in shrinks:
        for name in ("remaining_s", "remaining_occupied_s"):
            assert resize["actual"][name] == pytest.approx(resize["predicted"][name], rel=0.25), name


@pytest.mark.parametrize("policy", ["planned", "flexfloor", "fixed:3"])
def test_the_time_of_an_order_is_in_seconds_of_the_fleet(policy: str) -> None:
    requests = make_requests(lengths(), prompt=9, most=MOST)
    fleet = WatchedFleet(QUICK, WORKERS, lengths_of(requests, lengths()))
    fleet.submit(requests)
    told = []
    for scale in (1.0, 16.0):
        made = make_policy(
            policy, lengths=make_lengths("none"), max_slowdown=0.1, min_workers=1, workers=WORKERS, profile=QUICK,
            time_scale=scale,
        )  # fmt: skip
        made.admit(requests, fleet.status())
        decisions = made.take_decisions()  # type: ignore[attr-defined]
        told += [d.predicted["remaining_s"] for d in decisions if isinstance(d, Decision)]
    assert told[1] == pytest.approx(16 * told[0])


@pytest.mark.parametrize(("policy", "kinds"), [("static", []), ("planned", ["order"])])
def test_only_who_looks_ahead_decides(policy: str, kinds: list[str]) -> None:
    summary, _ = run(policy, "oracle")
    assert [d["what"] for d in summary.decisions] == kinds


@pytest.mark.parametrize("policy", ["release", "fixed:2"])
def test_other_resizes_say_why_too(policy: str) -> None:
    summary, _ = run(policy, "oracle")
    assert any(r["leaving"] for r in summary.resizes)
    for resize in summary.resizes:
        assert resize["reason"]
        assert set(resize["actual"]) == BECAME & set(resize["predicted"])


def test_decisions_survive_the_file(tmp_path: Path) -> None:
    summary, _ = run("flexfloor", "history", tmp_path / "ledger.jsonl")
    there = summarize(read_ledger(tmp_path / "ledger.jsonl")).to_json()
    here = json.loads(json.dumps(summary.to_json()))
    for name in ("resizes", "decisions"):
        assert json.loads(json.dumps(there[name])) == here[name]


# -- by hand -------------------------------------------------------------------------------------------------------


def by_hand(**change: object) -> Summary:
    """2 workers; a decision at 1 s, a resize from 4 to 6 s by which worker 1 leaves, the last response at 10 s."""
    predicted = {"stall_s": 1.0, "remaining_s": 5.0, "remaining_occupied_s": 6.0, "saved_worker_s": 3.0}
    outcome = ResizeOutcome(
        1, 2, (0,), (1,), (), 2, 200, 1, 0, 10, 1.5, 0.5, "because", (1,), predicted, **change,  # type: ignore[arg-type]
    )  # fmt: skip
    ended = [gained("a#0/0", 0, 6, 3), gained("b#0/0", 0, 2, 3)]
    return summarize(
        [
            start(2),
            submit_record(0.0, 2, 8),
            assign_record(0.0, 0, {0: ["a#0/0"], 1: ["b#0/0"]}),
            decision_record(1.0, 0, Decision("order", "as they came", {"remaining_s": 8.0, "other_s": 1.0})),
            chunk(0, 4, 0, {0: [1, 1], 1: [1, 1]}),
            resize_record(4, 6, outcome),
            chunk(6, 10, 2, {0: [2, 2]}, ended),
            end_record(10.0, status(2), HASHES, 0.0),
        ]
    )


def test_actual_by_hand() -> None:
    summary = by_hand()
    (resize,), (decision,) = summary.resizes, summary.decisions
    assert resize["actual"] == {"stall_s": 2, "remaining_s": 4, "remaining_occupied_s": 4}
    assert resize["predicted"]["saved_worker_s"] == 3
    assert decision["actual"] == {"remaining_s": 9}, "of what was predicted, as far as it can be known"
    assert "type" not in resize
    assert "type" not in decision


def test_a_resize_that_failed_has_cost_its_stall_and_releases_nobody() -> None:
    (resize,) = by_hand(failed="worker 1: no answer").resizes
    assert resize["failed"]
    assert resize["actual"]["stall_s"] == 2
    assert resize["actual"]["remaining_occupied_s"] == 8
