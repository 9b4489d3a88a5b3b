"""What holds for every policy, whatever it knows: on small simulated fleets with tight memory that check themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PAGE_TOKENS, SHAPE, WatchedFleet, known_lengths, lengths_of, make_requests, with_pages

import flexfloor
from flexfloor.errors import InputError
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import LedgerWriter
from flexfloor.requests import Request
from flexfloor.world.bounds import Work, least_occupied_s
from flexfloor.world.costs import DeviceProfile, IterationCost
from flexfloor.world.lengths.base import Lengths

MOST = 60  # tokens of a response
POLICIES = ("static-spread", "static-grouped", "planned", "release", "flexfloor", "fixed:1", "fixed:2")
KNOWLEDGE = ("none", "history", "shuffled", "oracle")


@dataclass(frozen=True)
class Case:
    """A fleet, what it is to do, and how it is driven. pages: of a worker at the start, beside its experts."""

    workers: int
    lengths: tuple[int, ...]
    prompt: int
    samples: int
    pages: int
    policy: str
    knowledge: str
    chunk: int
    max_batch: int
    prefill: int
    max_slowdown: float
    least: int

    @property
    def device(self) -> DeviceProfile:
        return with_pages(self.pages, self.workers)

    @property
    def requests(self) -> list[Request]:
        most = None if self.knowledge == "oracle" else MOST
        return make_requests(self.lengths, prompt=self.prompt, samples=self.samples, most=most)

    def fleet(self) -> WatchedFleet:
        return WatchedFleet(
            self.device, self.workers, lengths_of(self.requests, self.lengths), max_batch=self.max_batch,
            prefill_tokens=self.prefill,
        )  # fmt: skip

    def options(self, lengths: Lengths | None = None) -> dict[str, Any]:
        given = known_lengths(self.knowledge, self.requests, self.lengths, MOST) if lengths is None else lengths
        return {
            "policy": self.policy,
            "lengths": given,
            "chunk": self.chunk,
            "max_slowdown": self.max_slowdown,
            "min_workers": self.least,
            "profile": self.device,
        }

    def run(self, fleet: WatchedFleet | None = None, lengths: Lengths | None = None, **changed: Any) -> LedgerWriter:
        ledger = LedgerWriter()
        options = self.options(lengths) | changed
        flexfloor.rollout(fleet or self.fleet(), self.requests, ledger=ledger, **options)
        return ledger


@st.composite
def cases(draw: st.DrawFn, policies: Sequence[str] = POLICIES, knowledge: Sequence[str] = KNOWLEDGE) -> Case:
    workers = draw(st.integers(1, 6))
    policy = draw(st.sampled_from([p for p in policies if not p.startswith("fixed") or int(p[-1]) <= workers]))
    lengths = draw(st.lists(st.integers(1, MOST), min_size=1, max_size=40))
    prompt = draw(st.integers(1, 20))
    alone = -(-(prompt + MOST) // PAGE_TOKENS) + 1
    return Case(
        workers=workers,
        lengths=tuple(lengths),
        prompt=prompt,
        samples=draw(st.integers(1, 4)),
        pages=alone + draw(st.integers(0, 3) | st.integers(0, 200)),
        policy=policy,
        knowledge=draw(st.sampled_from(knowledge)),
        chunk=draw(st.integers(1, 24)),
        max_batch=draw(st.integers(2, 40)),
        prefill=draw(st.sampled_from([4, 16, 100])),
        max_slowdown=draw(st.sampled_from([0.0, 0.02, 0.3, 0.99])),
        least=draw(st.integers(1, min(workers, 2))) if not policy.startswith("fixed") else 1,
    )


def told_lengths(records: Sequence[dict]) -> dict[str, int]:
    """Request id → response tokens of those that ended, which each does once."""
    ended = [f for r in records if r["type"] == "chunk" for f in r["finished"]]
    told = {f["request_id"]: f["response_tokens"] for f in ended}
    assert len(told) == len(ended)
    return told


def check_result(case: Case, fleet: WatchedFleet, records: Sequence[dict]) -> Summary:
    """Every request ended once, with its length, and nothing is left."""
    assert told_lengths(records) == lengths_of(case.requests, case.lengths)
    status = fleet.status()
    assert status.live == 0
    assert status.active == tuple(range(case.workers)), "all are back"
    summary = summarize(records)
    assert summary.complete
    assert summary.response_tokens == sum(case.lengths) == sum(r["tokens"] for r in records if r["type"] == "chunk")
    assert summary.occupied_worker_s <= case.workers * summary.wall_s * (1 + 1e-9)
    assert min(len(r["members"]) for r in [*summary.resizes, {"members": range(case.workers)}]) >= case.least
    return summary


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_and_every_plan_is_sound(case: Case) -> None:
    """Plans, experts, pages and requests are checked by the fleet at every verb."""
    fleet = case.fleet()
    try:
        ledger = case.run(fleet)
    except InputError as error:
        if case.policy.startswith("fixed") and "give more workers or more `worker_memory`" in str(error):
            return
        raise
    summary = check_result(case, fleet, ledger.records)
    if case.policy in ("static-spread", "static-grouped", "planned"):
        assert all(not r["leaving"] for r in summary.resizes)


@given(case=cases(policies=POLICIES[:5]))
@settings(max_examples=40, deadline=None)
def test_no_policy_beats_the_bound(case: Case) -> None:
    summary = summarize(case.run().records)
    work = Work.of(
        np.full(len(case.lengths), case.prompt), np.array(case.lengths), np.arange(len(case.lengths)) // case.samples
    )
    cost = IterationCost(case.device, SHAPE)
    bound = least_occupied_s(cost, work, workers=case.workers, max_batch=case.max_batch, limit_s=summary.wall_s)
    assert bound <= summary.occupied_worker_s * (1 + 1e-6)


@given(case=cases(policies=("planned", "release", "flexfloor")))
@settings(max_examples=40, deadline=None)
def test_equal_inputs_give_equal_decisions(case: Case) -> None:
    first, second = (case.run().records for _ in range(2))
    for records in (first, second):
        del records[0]["started_at"]
    assert first == second


# -- forecasts that cannot be --------------------------------------------------------------------------------------


class Absurd:
    """Every forecast is the same number, or what `value` makes of the rows."""

    def __init__(self, value: float | Callable[[np.ndarray], np.ndarray]) -> None:
        self.value = value

    def add(self, requests: Sequence[Request]) -> None:
        pass

    def finished(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        pass

    def remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        return self.value(rows) if callable(self.value) else np.full(len(rows), float(self.value))


def mixed(rows: np.ndarray) -> np.ndarray:
    return np.array([0.0, math.nan, math.inf, -5.0, 1e18, 3.0])[rows % 6]


ABSURD = [0.0, math.inf, -math.inf, math.nan, 1e18, -1e18, 1.0, 7.0, -7.0, mixed]


@given(case=cases(policies=("planned", "release", "flexfloor"), knowledge=("none",)), value=st.sampled_from(ABSURD))
@settings(max_examples=100, deadline=None)
def test_absurd_forecasts_do_no_harm(case: Case, value: Any) -> None:
    fleet = case.fleet()
    summary = check_result(case, fleet, case.run(fleet, lengths=Absurd(value)).records)
    plain = summarize(case.run(policy="static-spread").records)
    assert summary.wall_s <= 5 * plain.wall_s, "bounded loss"
    assert summary.occupied_worker_s <= 3 * plain.occupied_worker_s


# -- requests that come while others run ---------------------------------------------------------------------------


@given(case=cases(policies=POLICIES[:5]), parts=st.integers(2, 4), patience=st.floats(0.1, 1))
@settings(max_examples=60, deadline=None)
def test_requests_that_arrive_while_others_run(case: Case, parts: int, patience: float) -> None:
    """patience: share of those known so far that have ended when the next ones come. A request that does not fit any
    more beside the experts of those who have left is refused, and the others go on."""
    fleet, requests = case.fleet(), case.requests
    size = -(-len(requests) // parts)
    waves = [requests[i : i + size] for i in range(0, len(requests), size)]
    submitted: list[Request] = []
    ledger = LedgerWriter()

    def more(finished: int) -> None:
        while waves and finished >= patience * len(submitted):
            try:
                run.submit(waves[0])
                submitted.extend(waves[0])
            except InputError as error:
                if "of KV, a worker has room for" not in str(error):
                    raise
            waves.pop(0)
        if not waves:
            run.seal()

    run = flexfloor.Rollout(fleet, ledger=ledger, on_progress=lambda p: more(p.finished), **case.options())
    more(0)
    run.run()
    told = told_lengths(ledger.records)
    wanted = lengths_of(requests, case.lengths)
    assert told == {r.request_id: wanted[r.request_id] for r in submitted}
    assert fleet.status().live == 0


@pytest.mark.parametrize("policy", ["static-spread", "planned", "release", "flexfloor"])
def test_any_chunk_size_gives_the_same_responses(policy: str) -> None:
    lengths = [60, 1, 17, 40, 3, 5, 33, 8, 2, 59, 12, 12, 7, 1, 1, 30, 28, 44, 51, 6]
    for chunk in (1, 2, 3, 7, 16, 59, 60, 61, 1000):
        case = Case(
            workers=4, lengths=tuple(lengths), prompt=9, samples=2, pages=40, policy=policy, knowledge="history",
            chunk=chunk, max_batch=8, prefill=16, max_slowdown=0.3, least=1,
        )  # fmt: skip
        fleet = case.fleet()
        check_result(case, fleet, case.run(fleet).records)
