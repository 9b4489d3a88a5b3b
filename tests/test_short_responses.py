"""Responses that are hardly longer than the driver's looks are apart: no place of a batch stays empty between two."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import DEVICE, PAGE_TOKENS, SHAPE, known_lengths, lengths_of, make_requests, with_pages

import flexfloor
from flexfloor.fleets.simulation import SimulatedFleet


@pytest.mark.parametrize("knowledge", ["history", "oracle"])
@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("policy", ["planned", "flexfloor"])
def test_late_binding_costs_nothing_where_the_batch_is_full(policy: str, chunk: int, knowledge: str) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(2.5, 0.6, 400)), 1, 100).astype(int).tolist()
    requests = make_requests(lengths, most=None if knowledge == "oracle" else 100)

    def wall_s(name: str) -> float:
        fleet = SimulatedFleet(
            SHAPE, with_pages(800, 4), 4, lengths=lengths_of(requests, lengths), page_tokens=PAGE_TOKENS, max_batch=8
        )
        known = known_lengths(knowledge, requests, lengths, 100)
        result = flexfloor.rollout(fleet, requests, policy=name, lengths=known, chunk=chunk, profile=DEVICE)
        assert result.summary.preemptions == 0
        return result.summary.wall_s

    assert wall_s(policy) <= 1.02 * wall_s("static")
