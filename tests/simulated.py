"""Small simulated fleets with round numbers, and one that checks itself at every verb."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import flexfloor
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.progress import ModelShape, Progress, ResizeOutcome
from flexfloor.requests import Prompt, Request, SamplingParams
from flexfloor.world.costs import DeviceProfile
from flexfloor.world.lengths.base import Lengths
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.resize import ResizePlan, check_plan

# 2-byte elements; dense weights of 1000 bytes read; 4 experts in 2 layers of 100 bytes each: 800 bytes.
SHAPE = ModelShape(
    "mixtral", 2, (0, 1), 4, 2, 100, 4096,
    dense_bytes=1400, expert_bytes=100, kv_token_bytes=10, hidden=5, itemsize=2, lookup_bytes=400,
)  # fmt: skip
PAGE_TOKENS = 4
PAGE = PAGE_TOKENS * SHAPE.kv_token_bytes
DEVICE = DeviceProfile(
    "round", bandwidth=1000.0, flops=1e4, fixed_s=1.0, latency_s=((2, 0.5), (8, 0.75)),
    node_link=100.0, cross_link=10.0, ranks_per_node=4, imbalance=1.2,
    reserve_bytes=100.0, switch_s=8.0, pause_s=2.0, move_bytes_per_s=100.0,
)  # fmt: skip


def with_pages(pages: int, workers: int, device: DeviceProfile = DEVICE) -> DeviceProfile:
    """A device with so many KV pages beside the experts that the fullest of so many workers has at the start."""
    slots = max(sum((w - layer * (4 % workers)) % workers < 4 % workers for layer in range(2)) for w in range(workers))
    slots += 2 * (4 // workers)
    memory = SHAPE.dense_bytes + device.reserve_bytes + slots * SHAPE.expert_bytes + pages * PAGE
    return replace(device, memory_bytes=memory)


def make_requests(
    lengths: Sequence[int], *, prompt: int = 1, samples: int = 1, most: int | None = None, first: int = 0
) -> list[Request]:
    """`samples` siblings of each prompt p<index>, in the order of `lengths`, one for each request; forced to these, or
    of unknown length up to `most` tokens."""
    made = []
    for start in range(0, len(lengths), samples):
        key = f"p{first + start // samples}"
        prompts = [Prompt((first + start + 1,) * prompt, key)]
        siblings = flexfloor.make_requests(prompts, samples=samples)[: len(lengths) - start]
        for request, length in zip(siblings, lengths[start : start + samples], strict=True):
            forced = SamplingParams(max_tokens=length, ignore_eos=True)
            made.append(replace(request, sampling=forced if most is None else SamplingParams(max_tokens=most)))
    return made


def lengths_of(requests: Sequence[Request], lengths: Sequence[int]) -> dict[str, int]:
    return {r.request_id: length for r, length in zip(requests, lengths, strict=True)}


def known_lengths(knowledge: str, requests: Sequence[Request], lengths: Sequence[int], most: int) -> Lengths:
    """With two earlier epochs of the same prompts, a little shorter and longer."""
    if knowledge in ("none", "oracle"):
        return make_lengths(knowledge)
    keys = sorted({r.prompt_key for r in requests})
    index = np.array([keys.index(r.prompt_key) for r in requests])
    seen = np.clip(np.concatenate([np.array(lengths) - 1, np.array(lengths) + 2]), 1, most)
    epoch = np.repeat([0, 1], len(requests))
    history = Observations.from_lengths(
        keys, np.tile(index, 2), seen, max_tokens=most, censored=seen >= most, epoch=epoch, prompt_tokens=1
    )
    return make_lengths(knowledge, history)


class WatchedFleet(SimulatedFleet):
    """Asserts at every verb what has to hold at any time."""

    def __init__(self, profile: DeviceProfile, workers: int, lengths: Mapping[str, int], **options: Any) -> None:
        self.ended: list[str] = []
        self.outcomes: list[ResizeOutcome] = []
        self.lost_requests = 0
        super().__init__(SHAPE, profile, workers, lengths=lengths, page_tokens=PAGE_TOKENS, **options)

    def start(self) -> None:
        super().start()
        self.ended, self.outcomes = [], []

    def assign(self, assignment: Mapping[int, Sequence[str]]) -> None:
        names = [n for own in assignment.values() for n in own]
        assert len(set(names)) == len(names), "bound twice"
        assert not set(names) & {*self.status().requests, *self.ended}, "bound again"
        super().assign(assignment)
        self.watch()

    def cancel(self, request_ids: Iterable[str]) -> None:
        raise AssertionError("nobody cancels")

    def advance(self, iterations: int) -> Progress:
        before = self.status()
        progress = super().advance(iterations)
        ended = [r.request_id for r in progress.requests]
        assert not set(ended) & set(self.ended), "ended twice"
        self.ended += ended
        after = self.status()
        assert set(before.requests) == set(after.requests) | set(ended), "lost or invented"
        self.watch()
        return progress

    def apply(self, plan: ResizePlan) -> ResizeOutcome:
        before = self.status()
        check_plan(plan, before)
        assert plan.reason
        outcome = super().apply(plan)
        after = self.status()
        assert set(after.requests) == set(before.requests)
        for name, (_, request) in after.requests.items():
            assert request.response_tokens == before.requests[name][1].response_tokens
        self.outcomes.append(outcome)
        self.watch()
        return outcome

    def watch(self) -> None:
        """Every (layer, expert) is on an active worker, in memory; pages suffice; who left has nothing."""
        status = self.status()
        status.placement.check(status.active)
        for worker in status.workers:
            here = status.requests_on(worker.worker)
            assert len(here) == worker.live_requests
            if not worker.active:
                assert (worker.kv_pages, worker.slots, worker.live_requests) == (0, 0, 0)
                continue
            shared = {r.group: r.shared_pages for r in here if r.shared_pages and r.kv_pages}
            used = sum(r.kv_pages - (r.shared_pages if r.kv_pages else 0) for r in here) + sum(shared.values())
            assert used == worker.kv_pages_used <= worker.kv_pages
            assert worker.slots >= status.placement.slots_needed(worker.worker)
            need = worker.slots * SHAPE.expert_bytes + worker.kv_pages * status.page_bytes
            assert need <= worker.arena_bytes
            assert sum(r.kv_pages > 0 for r in here) <= status.max_batch
