"""Plans that the fleet refuses: nothing changes, the account says so, and the rollout goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import DEVICE, SHAPE, make_requests, with_pages
from test_resize import Decision, Scripted, hashes, leave, run

import flexfloor
from flexfloor.errors import PlanRefusedError
from flexfloor.fleets.engine.fleet import EngineFleet
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import Summary
from flexfloor.ledger.events import read_ledger
from flexfloor.policy.flexfloor import FlexFloorPolicy
from flexfloor.progress import ResizeOutcome
from flexfloor.requests import Request
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.resize import ResizePlan, plan_moves, plan_shrink
from flexfloor.world.status import FleetStatus


class Insistent(Scripted):
    """Decides the same again and again; notes when it was asked."""

    def __init__(self, decision: Decision) -> None:
        super().__init__([])
        self.decision = decision
        self.asked: list[int] = []

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        self.asked.append(status.iteration)
        return self.decision(status)


def late(status: FleetStatus) -> ResizePlan:
    """Made for a fleet that is an epoch further on."""
    plan = plan_shrink(status, [1])
    return replace(plan, placement=replace(plan.placement, epoch=plan.placement.epoch + 1))


def without_its_experts(status: FleetStatus) -> ResizePlan:
    return replace(plan_shrink(status, [1]), expert_moves=())


def to_a_stranger(status: FleetStatus) -> ResizePlan | None:
    return plan_moves(status, {next(iter(status.requests)): 9}) if status.live else None


REFUSED: dict[str, tuple[Decision, str]] = {
    "late": (late, "the plan leads to epoch 2, the next one is 1"),
    "without its experts": (without_its_experts, "its moves and the placement disagree"),
    "refused while it is made": (to_a_stranger, "would move to worker 9, which is not active"),
}


@pytest.fixture(scope="module")
def fleet(checkpoint: Callable) -> Iterator[EngineFleet]:
    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, page_tokens=4) as launched:
        assert isinstance(launched, EngineFleet)
        yield launched


@pytest.fixture(scope="module")
def expected(fleet: EngineFleet) -> tuple:
    return hashes(run(fleet, "static"))


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_plan_changes_nothing_and_the_rollout_goes_on(
    fleet: EngineFleet, expected: tuple, tmp_path: Path, case: str
) -> None:
    decision, told = REFUSED[case]
    policy, path = Insistent(decision), tmp_path / "ledger.jsonl"
    with pytest.warns(RuntimeWarning, match=f"a plan of policy scripted was refused: .*{told}") as warned:
        summary = run(fleet, policy, ledger=path)
    assert len(warned) == 1, "one warning a rollout"
    assert "\n" not in str(warned[0].message)
    assert hashes(summary) == expected
    assert len(summary.resizes) > 1
    for resize in summary.resizes:
        assert resize["refused"]
        assert told in resize["failed"]
        assert (resize["expert_bytes"], resize["kv_bytes"], resize["prepare_s"], resize["commit_s"]) == (0, 0, 0, 0)
    assert summary.moved_bytes == 0
    assert all(d.released_at_s is None for d in summary.workers_detail)
    assert fleet.status().active == (0, 1, 2)
    # Eight looks pass between two plans, of four iterations each.
    tried = [resize["iteration"] for resize in summary.resizes]
    assert (np.diff(tried) >= 8 * 4 - 4).all()
    assert [r["refused"] for r in read_ledger(path) if r["type"] == "resize"] == [True] * len(tried)


def test_a_good_plan_after_a_refused_one_is_carried_out(fleet: EngineFleet, expected: tuple) -> None:
    with pytest.warns(RuntimeWarning, match="was refused"):
        summary = run(fleet, Scripted([(4, late), (8, leave(1))]))
    assert hashes(summary) == expected
    assert [r["refused"] for r in summary.resizes] == [True, False]
    assert [r["failed"] is None for r in summary.resizes] == [False, True]
    assert summary.resizes[1]["iteration"] >= summary.resizes[0]["iteration"] + 8 * 4 - 4
    assert [d.released_at_s is not None for d in summary.workers_detail] == [False, True, False]


def test_refused_and_failed_are_told_apart(
    checkpoint: Callable, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXFLOOR_FAULT", "prepare:2")
    launched = flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, page_tokens=4)
    with launched as faulty, pytest.warns(RuntimeWarning, match="was refused"):
        summary = run(faulty, Scripted([(4, late), (8, leave(1))]))
    assert hashes(summary) == expected
    assert [(r["failed"] is not None, r["refused"]) for r in summary.resizes] == [(True, True), (True, False)]


@pytest.mark.parametrize("error", [TypeError("a mistake"), flexfloor.InputError("a word to the user")])
def test_other_errors_of_a_policy_end_the_rollout(fleet: EngineFleet, expected: tuple, error: Exception) -> None:
    def decide(status: FleetStatus) -> ResizePlan | None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        run(fleet, Insistent(decide))
    assert hashes(run(fleet, "static")) == expected


def simulated(policy: Any, lengths: Sequence[int], pages: int = 40, workers: int = 4) -> Summary:
    with SimulatedFleet(SHAPE, with_pages(pages, workers), workers, page_tokens=4) as fleet:
        return flexfloor.rollout(fleet, make_requests(lengths), policy=policy, chunk=4).summary


def test_a_simulated_fleet_refuses_too() -> None:
    lengths = [40] * 16
    with pytest.warns(RuntimeWarning, match="was refused"):
        summary = simulated(Insistent(late), lengths)
    assert summary.response_tokens == sum(lengths)
    assert all(r["refused"] for r in summary.resizes)
    assert summary.wall_s == simulated(Scripted([]), lengths).wall_s, "no time passes"


class RefusingOnce(SimulatedFleet):
    """Refuses the first plan."""

    refused = False

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        if not self.refused:
            self.refused = True
            raise PlanRefusedError("not this one")
        return super().apply(plan)


class Watched(FlexFloorPolicy):
    """Notes the work that slowdown is reckoned by, at every admission."""

    def __init__(self) -> None:
        super().__init__(make_lengths("oracle"), DEVICE, max_slowdown=0.3)
        self.reckoned: list[tuple[int, int]] = []  # requests not ended, and those reckoned with

    def admit(self, queue: Sequence[Request], status: FleetStatus) -> dict[int, list[str]]:
        found = super().admit(queue, status)
        assert self._origin is not None
        self.reckoned.append((int((self.book.total < 0).sum()), len(self._origin[2])))
        return found


def test_requests_that_arrive_while_no_plan_is_tried_count_as_work() -> None:
    """Or there would seem to be less time than there is, and nobody would leave any more."""
    policy, first, more = Watched(), make_requests([20, 30, 40, 80] * 4), make_requests([50] * 8, first=100)

    def submit_more(progress: flexfloor.RolloutProgress) -> None:
        if progress.requests == len(first) and progress.iteration >= 8:
            run_.submit(more)
            run_.seal()

    with RefusingOnce(SHAPE, with_pages(100, 4), 4, page_tokens=4) as fleet:
        run_ = flexfloor.Rollout(fleet, policy=policy, knowledge="oracle", chunk=4, on_progress=submit_more)
        run_.submit(first)
        with pytest.warns(RuntimeWarning, match="not this one"):
            summary = run_.run().summary
    assert summary.requests == len(first) + len(more)
    assert [r["iteration"] for r in summary.resizes if r["refused"]] == [0]
    assert any(r["leaving"] for r in summary.resizes if not r["refused"])
    assert policy.reckoned[-1][0] == len(first) + len(more), "they arrived while nobody had ended"
    assert all(reckoned >= known for known, reckoned in policy.reckoned), policy.reckoned
