"""Forecasts in the ledger: of every request, before it begins, and none where lengths are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import DEVICE, PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages

from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import LedgerWriter
from flexfloor.requests import Request
from flexfloor.rollout import Rollout

LENGTHS = [5, 9, 30, 7, 12, 40, 3, 22]
MOST = 60


def records_of(policy: str, knowledge: str, later: list[Request] | None = None) -> list[dict[str, Any]]:
    """later: requests that are submitted once the first response is there."""
    most = None if knowledge == "oracle" else MOST
    requests = make_requests(LENGTHS, most=most)
    lengths = lengths_of(requests, LENGTHS) | {r.request_id: 4 for r in later or ()}
    fleet = SimulatedFleet(SHAPE, with_pages(200, 2), 2, lengths=lengths, page_tokens=PAGE_TOKENS)
    ledger = LedgerWriter()
    run = Rollout(
        fleet, policy=policy, profile=DEVICE, ledger=ledger, lengths=known_lengths(knowledge, requests, LENGTHS, MOST)
    )
    run.submit(requests)
    for index, _ in enumerate(run):
        if index == 0:
            run.submit(later or [])
            run.seal()
    return ledger.records


@pytest.mark.parametrize("policy", ["planned", "release", "flexfloor", "fixed:1"])
def test_every_request_is_forecast_once_before_it_is_bound(policy: str):
    later = make_requests([4, 4], most=MOST, first=100)
    records = records_of(policy, "history", later)
    made = [(i, r) for i, r in enumerate(records) if r["type"] == "forecast"]
    assert [r["requests"] for _, r in made] == [
        [r.request_id for r in make_requests(LENGTHS, most=MOST)],
        [r.request_id for r in later],
    ]
    bound = {n: i for i, r in enumerate(records) if r["type"] == "assign" for own in r["workers"].values() for n in own}
    for at, record in made:
        assert all(at < bound[name] for name in record["requests"])
        quantiles = np.array(record["tokens"])
        assert quantiles.shape == (len(record["levels"]), len(record["requests"]))
        assert (np.diff(quantiles, axis=0) >= 0).all()
        assert (quantiles >= 1).all()
        assert (quantiles <= MOST).all()
    # Two epochs of the same prompts were one shorter and two longer: the forecast must be about right.
    median = np.array(made[0][1]["tokens"])[made[0][1]["levels"].index(0.5)]
    assert np.corrcoef(median, LENGTHS)[0, 1] > 0.8


@pytest.mark.parametrize(("policy", "knowledge"), [("flexfloor", "oracle"), ("static", "none")])
def test_no_forecast_where_lengths_are_known_or_not_asked_for(policy: str, knowledge: str):
    assert not [r for r in records_of(policy, knowledge) if r["type"] == "forecast"]


def test_forecasts_are_no_decisions():
    records = records_of("flexfloor", "history")
    decisions = [r for r in records if r["type"] == "decision"]
    assert [d["what"] for d in summarize(records).decisions] == [d["what"] for d in decisions]
