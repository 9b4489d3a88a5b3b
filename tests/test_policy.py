"""Policies: who goes where, and who leaves when, on fleets made by hand and on paper ones that really generate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_fleet import PaperFleet
from statuses import live, make_status, with_requests

import flexfloor
from flexfloor.errors import InputError
from flexfloor.policy import POLICIES, Policy, make_policy
from flexfloor.policy.book import Book
from flexfloor.policy.planned import PlannedPolicy
from flexfloor.progress import Progress, RequestProgress
from flexfloor.requests import Prompt, Request, SamplingParams
from flexfloor.world.costs import PROFILES
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.status import FleetStatus


def policy(name: str, knowledge: str = "none", workers: int = 4, min_workers: int = 1) -> Policy:
    return make_policy(
        name,
        lengths=make_lengths(knowledge),
        max_slowdown=0.02,
        min_workers=min_workers,
        workers=workers,
        profile=PROFILES["h200"],
    )


def requests_of(lengths: Sequence[int], prompt: int = 1, samples: int = 1, forced: bool = True) -> list[Request]:
    """One prompt for each length, with the key p<index>."""
    made = []
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, ignore_eos=forced)
        made += flexfloor.make_requests([Prompt((index + 1,) * prompt, f"p{index}")], samples=samples, sampling=params)
    return made


def names(requests: Sequence[Request]) -> list[str]:
    return [r.request_id for r in requests]


# -- static --------------------------------------------------------------------------------------------------------


class VerlRouter:
    """The rule of verl 0.9.1's request router (`workers/rollout/router.py`): a new request goes to the server with the
    fewest in flight, the first one among equals, and counts there until it has ended."""

    def __init__(self, servers: int) -> None:
        self.in_flight = [0] * servers
        self.home: dict[str, int] = {}

    def acquire(self, name: str) -> int:
        least = self.in_flight.index(min(self.in_flight))
        self.in_flight[least] += 1
        self.home[name] = least
        return least

    def release(self, name: str) -> None:
        self.in_flight[self.home.pop(name)] -= 1


# A recorded order: + a request arrives, - it has ended, | a look of the driver.
RECORDED = "+a +b +c +d +e | +f -b -c | +g +h +i -a -g | | +j +k +l +m -d -e -f -h | +n +o +p -n | +q +r"


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_static_spread_places_as_verls_router_on_a_recorded_order(servers: int) -> None:
    agree(RECORDED.split(), servers)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), servers=st.integers(1, 6))
def test_static_spread_places_as_verls_router_on_any_order(data: st.DataObject, servers: int) -> None:
    events, here, count = [], [], 0
    for kind in data.draw(st.lists(st.sampled_from("++-|"), max_size=60)):
        if kind == "+":
            count += 1
            here.append(f"r{count}")
            events.append(f"+{here[-1]}")
        elif kind == "-" and here:
            events.append(f"-{here.pop(data.draw(st.integers(0, len(here) - 1)))}")
        else:
            events.append("|")
    agree(events, servers)


def agree(events: Sequence[str], servers: int) -> None:
    """The driver sees what has ended when it looks, before it places what has arrived since: the orders agree where the
    router hears of them in that order too. Between two looks it would hear of an end earlier than we do."""
    ours, router = policy("static-spread", workers=servers), VerlRouter(servers)
    placed: dict[str, int] = {}
    arrived: list[str] = []
    ended: list[str] = []
    for event in [*events, "|"]:
        if event.startswith("+"):
            arrived.append(event[1:])
        elif event.startswith("-"):
            ended.append(event[1:])
        else:
            gone = [name for name in ended if name in placed]  # who came and went since the last look has not run yet
            for name in gone:
                router.release(name)
                del placed[name]
            ended = [name for name in ended if name not in gone]
            there = {w: [live(f"{n}#0/0", 1) for n, home in placed.items() if home == w] for w in range(servers)}
            queue = [Request(f"{n}#0/0", n, 0, (1,)) for n in arrived]
            bound = ours.admit(queue, make_status(there, workers=servers, pages=99))
            got = {name.partition("#")[0]: w for w, own in bound.items() for name in own}
            assert got == {name: router.acquire(name) for name in arrived}
            placed |= got
            arrived = []


def test_static_grouped_keeps_siblings_together_also_when_they_come_later() -> None:
    grouped, requests = policy("static-grouped"), requests_of([9, 9, 9], samples=4)
    bound = grouped.admit(requests[:10], make_status())
    assert bound == {0: names(requests[:4]), 1: names(requests[4:8]), 2: names(requests[8:10])}
    later = make_status({w: [live(n, 1) for n in own] for w, own in bound.items()})
    assert grouped.admit(requests[10:], later) == {2: names(requests[10:])}
    assert policy("static-spread").admit(requests[10:], later) == {3: names(requests[10:])}


@pytest.mark.parametrize("name", ["static", "static-spread", "static-grouped", "planned"])
def test_nobody_leaves(name: str) -> None:
    ours, requests = policy(name), requests_of([30] * 8)
    ours.admit(requests, make_status(pages=200))
    uneven = make_status({0: [live(n, 3) for n in names(requests)]}, pages=200, iteration=5, iteration_s=1.0)
    plan = ours.decide([], uneven)
    assert plan is None or plan.leaving == ()


# -- planned -------------------------------------------------------------------------------------------------------


def test_requests_wait_for_their_memory_and_are_bound_when_it_is_free() -> None:
    ours, requests = policy("planned", "oracle", workers=1), requests_of([39, 39, 15])
    empty = make_status(workers=1, pages=19, longest=40)  # they end with 10, 10 and 4 pages
    assert ours.admit(requests, empty) == {0: ["p0#0/0", "p2#0/0"]}
    busy = with_requests(empty, {0: [live("p0#0/0", 1), live("p2#0/0", 1)]})
    assert ours.admit(requests[1:2], busy) == {}
    assert ours.admit(requests[1:2], with_requests(empty, {0: [live("p2#0/0", 1)]})) == {0: ["p1#0/0"]}


class Constant:
    """A forecast that all responses have 39 tokens, which nothing changes."""

    def add(self, requests: Sequence[Request]) -> None:
        pass

    def finished(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        pass

    def remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        return np.maximum(39.0 - generated, 1.0)


def test_memory_is_kept_free_until_forecasts_have_been_tried() -> None:
    early, late = requests_of([39] * 200, forced=False), requests_of([39] * 400, forced=False)
    roomy, tight = (make_status(workers=1, pages=pages, max_batch=10**4, longest=40) for pages in (10**5, 1000))

    def bound(ended: int) -> int:
        """How many of 200 more requests get into 1000 pages, after so many of the first 200 have ended."""
        ours = PlannedPolicy(Constant(), PROFILES["h200"])
        ours.admit(early, roomy)
        ours.observe(progress_of({r.request_id: [1] * 39 for r in early[:ended]}))
        return len(ours.admit(late[200:], tight)[0])

    # 1 + 39 tokens and a page of 4 each, of 97% of 4000 tokens; half of all 400 have ended in the first case.
    assert [bound(ended) for ended in (200, 100, 0)] == [88, 83, 79]


def test_a_worker_with_nothing_live_takes_a_request_whatever_it_asks_for() -> None:
    ours, requests = policy("planned", workers=2), requests_of([8, 10**6], forced=False)
    assert ours.admit(requests[:1], make_status(workers=2)) == {0: ["p0#0/0"]}
    status = make_status({0: [live("p0#0/0", 1)]}, workers=2)
    assert ours.admit(requests[1:], status) == {1: ["p1#0/0"]}


def test_no_more_requests_are_bound_than_a_batch_holds_until_the_next_look() -> None:
    for name in ("planned", "release", "flexfloor"):
        bound = policy(name, "oracle").admit(requests_of([99] * 9), make_status(pages=500, max_batch=2))
        assert [len(own) for own in bound.values()] == [2, 2, 2, 2], name


def run(ours: Policy, fleet: PaperFleet, requests: Sequence[Request], chunk: int = 4) -> list[int]:
    """A rollout on a paper fleet. Returns the active workers at each look."""
    fleet.submit(requests)
    queue, by_id, sizes = list(requests), {r.request_id: r for r in requests}, []
    for _ in range(3000):
        if not queue and not fleet.status().live:
            break
        if plan := ours.decide(queue, fleet.status()):
            assert fleet.apply(plan).failed is None
        bound = ours.admit(queue, fleet.status()) if queue else {}
        fleet.assign(bound, by_id)
        taken = {n for own in bound.values() for n in own}
        queue = [r for r in queue if r.request_id not in taken]
        known = set(fleet.finished)
        fleet.advance(chunk)
        if observe := getattr(ours, "observe", None):
            observe(progress_of({n: t for n, t in fleet.finished.items() if n not in known}))
        sizes.append(len(fleet.members))
    assert not queue
    assert {n: len(t) for n, t in fleet.finished.items()} == {n: r.sampling.max_tokens for n, r in by_id.items()}
    return sizes


def progress_of(ended: dict[str, list[int]]) -> Progress:
    none = np.zeros(0, np.float32)
    return Progress(0, 0, 1, tuple(RequestProgress(n, 0, (), none, "length", 0, len(t)) for n, t in ended.items()))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=12),
    samples=st.integers(1, 3),
    pages=st.integers(13, 40),
    name=st.sampled_from(["static-spread", "static-grouped", "planned", "release", "flexfloor", "fixed:2"]),
    knowledge=st.sampled_from(["oracle", "none"]),
)
def test_every_request_is_bound_and_ends_under_every_policy(
    lengths: list[int], samples: int, pages: int, name: str, knowledge: str
) -> None:
    fleet = PaperFleet(3, pages=pages + 10 * name.startswith("fixed"))
    run(policy(name, knowledge, workers=3), fleet, requests_of(lengths, samples=samples))


def test_a_long_request_is_not_starved_by_short_ones() -> None:
    fleet = PaperFleet(2, pages=14)
    requests = requests_of([5] * 40 + [45])
    run(policy("planned", "none", workers=2), fleet, requests)
    assert "p40#0/0" in fleet.finished
    known = PaperFleet(2, pages=14)
    run(policy("planned", "oracle", workers=2), known, requests)
    assert known.preemptions == 0, "known lengths were bound beyond the memory"


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "clever"}, "policy 'clever' is not known; there is static, static-spread"),
        ({"name": "fixed"}, "policy 'fixed' is not known"),
        ({"name": "fixed:"}, "policy 'fixed:' is not known"),
        ({"name": "fixed:-1"}, "policy 'fixed:-1' is not known"),
        ({"name": "fixed:0"}, "policy 'fixed:0': the fleet has 4 workers"),
        ({"name": "fixed:5"}, "policy 'fixed:5': the fleet has 4 workers"),
        ({"name": "fixed:1", "min_workers": 2}, "policy 'fixed:1': min_workers is 2"),
        ({"min_workers": 0}, "min_workers is 0; the fleet has 4 workers"),
        ({"min_workers": 5}, "min_workers is 5; the fleet has 4 workers"),
        ({"max_slowdown": -0.1}, "max_slowdown is -0.1"),
        ({"max_slowdown": float("nan")}, "max_slowdown is nan"),
        ({"max_slowdown": float("inf")}, "max_slowdown is inf"),
        ({"max_slowdown": 1.0}, "max_slowdown is 1.0; give a share of throughput from 0 to below 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(change: dict, told: str) -> None:
    options = {"name": "flexfloor", "max_slowdown": 0.02, "min_workers": 1} | change
    lengths = make_lengths("none")
    with pytest.raises(InputError, match=told) as caught:
        make_policy(options.pop("name"), lengths=lengths, workers=4, profile=PROFILES["h200"], **options)
    assert "\n" not in str(caught.value)


def test_every_policy_can_be_made_and_tells_its_name() -> None:
    made = [policy(name.replace("N", "3")).name for name in POLICIES]
    assert made == ["static-spread", "static-spread", "static-grouped", "planned", "release", "fixed:3", "flexfloor"]


# -- release and fixed ---------------------------------------------------------------------------------------------


def busy(*workers: int, of: int = 4, pages: int = 200) -> FleetStatus:
    return make_status({w: [live(f"p{w}#0/0", 2)] for w in workers}, workers=of, pages=pages)


def test_release_lets_dry_workers_go_and_never_below_the_least() -> None:
    plan = policy("release").decide([], busy(1))
    assert plan is not None
    assert (plan.members, plan.leaving, plan.request_moves) == ((1,), (0, 2, 3), ())
    plan = policy("release", min_workers=3).decide([], busy(1))
    assert plan is not None
    assert len(plan.members) == 3
    assert 1 in plan.members
    assert policy("release", min_workers=4).decide([], busy(1)) is None
    assert policy("release").decide([], busy(0, 1, 2, 3)) is None
    assert policy("release").decide([], busy()) is None
    assert policy("release").decide(requests_of([4]), busy(1)) is None, "who waits may still need a worker"


def test_release_goes_on_with_fewer_when_memory_refuses() -> None:
    # An expert takes 10 pages: all 12 of three workers do not fit on one that has 45, 4 on each of two do.
    plan = policy("release").decide([], busy(1, pages=45))
    assert plan is not None
    assert (plan.members, plan.leaving) == ((1, 3), (0, 2))
    assert policy("release").decide([], busy(1, pages=8)) is None


def test_release_puts_long_responses_together() -> None:
    requests = requests_of([3, 50, 4, 40, 5, 60])
    bound = policy("release", "oracle", workers=3).admit(requests, make_status(workers=3, pages=200))
    assert bound == {0: ["p5#0/0", "p1#0/0"], 1: ["p3#0/0", "p4#0/0"], 2: ["p2#0/0", "p0#0/0"]}


def test_fixed_binds_nothing_beyond_its_workers_and_lets_the_others_go_at_once() -> None:
    ours = policy("fixed:2", "oracle")
    bound = ours.admit(requests_of([9] * 8), make_status(pages=200))
    assert sorted(bound) == [0, 1]
    plan = ours.decide([], make_status(pages=200))
    assert plan is not None
    assert (plan.leaving, plan.members) == ((2, 3), (0, 1))
    assert policy("fixed:4").decide([], make_status(pages=200)) is None
    with pytest.raises(InputError, match=r"policy fixed:1: worker 0 lacks memory: .*; give more workers"):
        policy("fixed:1").decide([], make_status(pages=20))


def test_workers_leave_one_after_another_as_they_run_dry() -> None:
    requests = requests_of([4, 4, 16, 16, 32, 45])
    sizes = run(policy("release", "oracle", workers=3), PaperFleet(3, pages=90), requests)
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {3, 2, 1}


def test_plans_are_compared_on_futures_in_which_the_longest_begins_early_midway_and_late() -> None:
    book = Book(make_lengths("none"))
    book.take(requests_of([100] * 7, forced=False))
    book.bind(range(7))
    book.take(requests_of([100] * 97, forced=False)[7:])  # those that arrived last are the ones that stand in a queue
    rows = np.arange(97)
    longest = [int(book.left(rows, np.zeros(97, dtype=np.int64), draw).argmax()) for draw in book.draws()]
    assert longest == [7 + 15, 7 + 45, 7 + 75]
