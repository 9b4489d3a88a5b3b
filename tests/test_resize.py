"""Workers leave while the others generate, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ARCHITECTURES, make_requests, smallest_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexfloor
from flexfloor.errors import PlanRefusedError
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.fleet import EngineFleet
from flexfloor.ledger.accounting import Summary
from flexfloor.policy.flexfloor import FlexFloorPolicy
from flexfloor.policy.static import StaticPolicy
from flexfloor.requests import Request
from flexfloor.world.costs import MoveCosts, load_profile
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.resize import ResizePlan, plan_moves, plan_shrink
from flexfloor.world.status import FleetStatus

Decision = Callable[[FleetStatus], ResizePlan | None]


class Scripted(StaticPolicy):
    """Placed on arrival; at given iterations a decision is carried out."""

    def __init__(self, script: Sequence[tuple[int, Decision]]) -> None:
        super().__init__(grouped=False)
        self.name = "scripted"
        self.script = list(script)
        self.refused: list[str] = []

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        while self.script and status.iteration >= self.script[0][0]:
            try:
                if plan := self.script.pop(0)[1](status):
                    return plan
            except PlanRefusedError as error:
                self.refused.append(str(error))
        return None


def leave(*workers: int) -> Decision:
    def decide(status: FleetStatus) -> ResizePlan | None:
        going = set(workers) & set(status.active)
        return plan_shrink(status, going) if going and going < set(status.active) else None

    return decide


def hashes(summary: Summary) -> tuple[str | None, str | None]:
    return summary.responses_sha256, summary.logprobs_sha256


def forced_requests(count: int = 12, samples: int = 2, seed: int = 3) -> list[Request]:
    """Heavy-tailed forced lengths, prompts of very different lengths, greedy and sampled."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = tuple(rng.randrange(4, 60) for _ in range(rng.choice((3, 20, 45))))
        length = min(80, max(2, int(rng.lognormvariate(2.6, 0.9))))
        sampling = flexfloor.SamplingParams(max_tokens=length, temperature=i % 2, ignore_eos=True)
        requests += flexfloor.make_requests([flexfloor.Prompt(prompt, key=f"p{i}")], samples=samples, sampling=sampling)
    return requests


@pytest.fixture(scope="module")
def expected(checkpoint: Callable) -> Callable[[str], tuple]:
    """Hashes of forced_requests() on one worker that nothing happens to, by architecture."""
    known: dict[str, tuple] = {}

    def find(architecture: str) -> tuple:
        if architecture not in known:
            with flexfloor.Fleet.launch(checkpoint(architecture), workers=1) as fleet:
                known[architecture] = hashes(flexfloor.rollout(fleet, forced_requests()).summary)
        return known[architecture]

    return find


@pytest.fixture(scope="module")
def fleet(checkpoint: Callable) -> Iterator[EngineFleet]:
    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=4, page_tokens=4) as launched:
        assert isinstance(launched, EngineFleet)
        yield launched


def run(fleet: flexfloor.Fleet, policy: Any, requests: list[Request] | None = None, **options: Any) -> Summary:
    return flexfloor.rollout(fleet, requests or forced_requests(), policy=policy, chunk=4, **options).summary


class Consolidating(FlexFloorPolicy):
    """The policy flexfloor where time is no object and a change costs nothing, so that it pays on any machine; nobody
    leaves before the first responses are under way, so that live requests move."""

    def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
        free = MoveCosts(bytes_per_s=1e18, recompute_tokens_per_s=1.0, switch_s=0.0, pause_s=0.0)
        plan = super().decide(queue, replace(status, move_costs=free))
        return plan if status.iteration >= 8 else None


def consolidate(knowledge: str = "none") -> FlexFloorPolicy:
    return Consolidating(make_lengths(knowledge), load_profile("h200"), max_slowdown=1e6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_policy_gives_the_same_bits(checkpoint: Callable, expected: Callable, architecture: str) -> None:
    policies = [
        ("static", "none"), ("planned", "oracle"), ("release", "none"), ("release", "oracle"), ("fixed:2", "oracle"),
        ("flexfloor", "none"), ("flexfloor", "oracle"),
    ]  # fmt: skip
    for workers in (2, 3, 4):
        with flexfloor.Fleet.launch(checkpoint(architecture), workers=workers) as fleet:
            for policy, knowledge in policies if workers == 4 else policies[-2:]:
                named = consolidate(knowledge) if policy == "flexfloor" else policy
                summary = run(fleet, named, knowledge=knowledge)
                assert hashes(summary) == expected(architecture), (workers, policy, knowledge)
                leaves = policy not in ("static", "planned")
                assert bool(summary.resizes) == leaves, (workers, policy)
                assert summary.occupied_iterations < workers * summary.iterations or not leaves


def test_eight_workers_shrink_to_the_floor(checkpoint: Callable) -> None:
    requests = make_requests(prompts=5, samples=2, max_tokens=24)
    with flexfloor.Fleet.launch(checkpoint("olmoe"), workers=8) as fleet:
        found = [hashes(run(fleet, policy, requests)) for policy in ("static", consolidate(), "release")]
    assert len(set(found)) == 1


def test_with_preemption_forced_and_shared_prefixes(checkpoint: Callable) -> None:
    """What is live fits when it moves, and then outgrows the memory of the one that stays."""
    sizes: dict[str, Any] = {"prefill_tokens": 32, "max_batch": 24, "page_tokens": 4}
    sampling = flexfloor.SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [flexfloor.Prompt((9 + i,) * 9, key=str(i)) for i in range(8)]
    requests = flexfloor.make_requests(prompts, samples=2, sampling=sampling)
    model = checkpoint("mixtral")
    shape = inspect_checkpoint(model).shape
    memory = smallest_memory(model, 4, 69, **sizes) + shape.all_expert_bytes + 60 * 4 * shape.kv_token_bytes
    with flexfloor.Fleet.launch(model, workers=1) as fleet:
        expected = hashes(run(fleet, "static", requests))
    with flexfloor.Fleet.launch(model, workers=4, worker_memory=memory, **sizes) as fleet:
        summary = run(fleet, Scripted([(4, leave(1)), (8, leave(0, 3))]), requests)
    assert [r["leaving"] for r in summary.resizes] == [[1], [0, 3]]
    assert summary.preemptions > 0
    assert hashes(summary) == expected


@pytest.mark.parametrize(
    "script",
    [
        [(4, leave(0))],
        [(4, leave(1, 2)), (8, leave(3))],
        [(1, leave(0, 1, 2))],
        [(0, leave(3)), (4, leave(2)), (8, leave(1))],
    ],
)
def test_any_worker_may_leave(fleet: EngineFleet, expected: Callable, script: list) -> None:
    home = fleet.status().placement
    summary = run(fleet, Scripted(script))
    assert hashes(summary) == expected("qwen3_moe")
    assert len(summary.resizes) == len(script)
    left = {w for r in summary.resizes for w in r["leaving"]}
    assert {d.worker for d in summary.workers_detail if d.released_at_s is not None} == left
    after = fleet.status()
    assert after.active == (0, 1, 2, 3)
    assert (after.placement.worker == home.worker).all()
    assert (after.placement.slot == home.slot).all()


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_schedules_of_resizes_and_moves(fleet: EngineFleet, expected: Callable, data: st.DataObject) -> None:
    """Random leaving sets, random moves of live requests, at random iterations."""

    def random_moves(status: FleetStatus) -> ResizePlan | None:
        names = (
            data.draw(st.lists(st.sampled_from(sorted(status.requests)), max_size=6, unique=True))
            if status.live
            else []
        )
        homes = {name: data.draw(st.sampled_from(status.active)) for name in names}
        return plan_moves(status, homes) if homes else None

    def random_leave(status: FleetStatus) -> ResizePlan | None:
        going = data.draw(st.lists(st.sampled_from(status.active), max_size=len(status.active) - 1, unique=True))
        homes = {}
        for name, (worker, _) in status.requests.items():
            if data.draw(st.booleans()):
                homes[name] = data.draw(st.sampled_from([w for w in status.active if w not in going] or [worker]))
        return plan_shrink(status, going, homes) if going else None

    at = sorted(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5)))
    script = Scripted([(i, data.draw(st.sampled_from((random_moves, random_leave)))) for i in at])
    assert hashes(run(fleet, script)) == expected("qwen3_moe")


def digests(fleet: EngineFleet) -> dict[int, dict]:
    return fleet._call("mover.digest", dict.fromkeys(fleet.status().active, ()))


def merged(digests: dict[int, dict], what: str) -> dict:
    """What all workers hold together; a second holder would show as a lost entry."""
    found = [entry for d in digests.values() for entry in d[what].items()]
    assert len(dict(found)) == len(found), f"{what}: held twice"
    return dict(found)


def begin(fleet: EngineFleet, requests: list[Request], iterations: int = 6) -> None:
    fleet.start()
    fleet.submit(requests)
    fleet.assign(StaticPolicy(grouped=False).admit(requests, fleet.status()))
    fleet.advance(iterations)


def test_experts_and_kv_are_the_same_bytes_after_every_resize(fleet: EngineFleet) -> None:
    """Every (layer, expert) has exactly one replica, with its bytes; so has every live request's KV."""
    begin(fleet, forced_requests())
    whole = merged(digests(fleet), "experts")
    shape = fleet.info.shape
    assert set(whole) == {(la, ex) for la in range(len(shape.moe_layers)) for ex in range(shape.experts)}
    for going in ((2,), (0, 3)):
        kv = merged(digests(fleet), "kv")
        outcome = fleet.apply(plan_shrink(fleet.status(), going))
        assert outcome.expert_bytes > 0
        assert outcome.kv_bytes > 0
        assert outcome.requests_recomputed == 0
        assert merged(digests(fleet), "experts") == whole
        assert merged(digests(fleet), "kv") == kv
        fleet.advance(2)
    fleet.start()
    assert merged(digests(fleet), "experts") == whole
    assert fleet.status().active == (0, 1, 2, 3)


def test_shared_prompt_pages_stay_shared_where_they_arrive(fleet: EngineFleet) -> None:
    sampling = flexfloor.SamplingParams(max_tokens=30, ignore_eos=True)
    requests = flexfloor.make_requests([flexfloor.Prompt((7,) * 33, key="g")], samples=4, sampling=sampling)
    fleet.start()
    fleet.submit(requests)
    fleet.assign({1: [r.request_id for r in requests]})
    fleet.advance(5)
    used = fleet.status().workers[1].kv_pages_used
    outcome = fleet.apply(plan_shrink(fleet.status(), [1], {r.request_id: 0 for r in requests}))
    assert fleet.status().workers[0].kv_pages_used == used
    assert outcome.kv_bytes == used * fleet.status().page_bytes
    fleet.start()


def test_a_refused_plan_touches_nothing(fleet: EngineFleet) -> None:
    begin(fleet, forced_requests())
    status, before = fleet.status(), digests(fleet)
    plan = plan_shrink(status, [1])
    fleet.advance(0)
    for broken in (
        ResizePlan((0, 2, 3), (1,), (), status.placement),
        ResizePlan((0, 2), (1,), (), plan.placement, plan.expert_moves, plan.request_moves),
        ResizePlan(plan.members, (1,), (), plan.placement, plan.expert_moves[1:], plan.request_moves),
        ResizePlan(plan.members, (1,), (), plan.placement, plan.expert_moves, ()),
        ResizePlan((0, 2, 9), (1,), (9,), plan.placement, plan.expert_moves, plan.request_moves),
    ):
        with pytest.raises(PlanRefusedError):
            fleet.apply(broken)
    assert digests(fleet) == before
    assert fleet.status().epoch == status.epoch
    fleet.start()


def test_a_plan_for_a_state_that_has_passed_is_refused(fleet: EngineFleet) -> None:
    begin(fleet, forced_requests())
    stale = plan_shrink(fleet.status(), [2])
    fleet.apply(plan_shrink(fleet.status(), [1]))
    with pytest.raises(PlanRefusedError):
        fleet.apply(stale)
    fleet.start()


def test_experts_can_come_from_the_weight_source(fleet: EngineFleet, expected: Callable) -> None:
    def from_source(status: FleetStatus) -> ResizePlan:
        plan = plan_shrink(status, [0])
        moves = tuple(type(m)(m.layer, m.expert, None, m.target, m.slot) for m in plan.expert_moves)
        return ResizePlan(plan.members, plan.leaving, (), plan.placement, moves, plan.request_moves)

    assert hashes(run(fleet, Scripted([(4, from_source)]))) == expected("qwen3_moe")


def test_one_request_on_one_of_four_workers(fleet: EngineFleet) -> None:
    request = forced_requests(1, 1)
    alone = hashes(run(fleet, "static", request))
    summary = run(fleet, "release", request)
    assert hashes(summary) == alone
    assert summary.occupied_iterations == summary.iterations, "three workers left before the first token"
    assert summary.post_finish_share_iterations == 0


def test_a_request_that_ends_exactly_at_a_boundary(fleet: EngineFleet) -> None:
    """The driver looks every four iterations; a prompt of 3 tokens takes one, its response ends with the fourth."""
    sampling = flexfloor.SamplingParams(max_tokens=4, ignore_eos=True)
    short = flexfloor.make_requests([flexfloor.Prompt((5, 6, 7), key="short")], sampling=sampling)
    long = forced_requests(3, 1)
    expected = hashes(run(fleet, "static", short + long))
    for policy in ("release", Scripted([(4, leave(0)), (8, leave(1))])):
        assert hashes(run(fleet, policy, short + long)) == expected


def test_nothing_live_runs_no_iteration_and_requests_may_arrive_after_a_release(fleet: EngineFleet) -> None:
    requests = forced_requests(2, 1)
    run_ = flexfloor.Rollout(fleet, policy="release", chunk=4)
    run_.submit(requests[:1])
    seen = []
    for response in run_:
        seen.append(response.request_id)
        if len(seen) == 1:
            assert len(fleet.status().active) == 1
            assert fleet.advance(5).iterations == 0
            run_.submit(requests[1:])
            run_.seal()
    assert seen == [r.request_id for r in requests]
    assert run_.summary.responses_sha256 == run(fleet, "static", requests).responses_sha256


def test_the_caller_is_told_of_each_release_when_its_memory_is_free(fleet: EngineFleet, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def on_release(worker: int) -> None:
        status = fleet.status().workers[worker]
        assert not status.active
        assert (status.slots, status.kv_pages) == (0, 0)
        told.append((worker, status.memory_bytes))

    summary = run(fleet, consolidate("oracle"), on_release=on_release, ledger=tmp_path / "l.jsonl")
    assert [w for w, _ in told] == [w for r in summary.resizes for w in r["leaving"]]
    assert summary.regrow_s
    assert summary.stall_s > 0


def test_ended_processes_come_back(checkpoint: Callable, expected: Callable) -> None:
    import psutil

    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, release="end") as fleet:
        assert isinstance(fleet, EngineFleet)
        for _ in range(2):
            before = set(fleet.processes.values())
            gone: list[int] = []
            summary = run(fleet, consolidate(), on_release=gone.append)
            assert hashes(summary) == expected("qwen3_moe")
            assert gone
            after = set(fleet.processes.values())
            assert len(after) == 3
            assert not any(psutil.pid_exists(pid) for pid in before - after)
            assert len(before - after) == len(gone)
