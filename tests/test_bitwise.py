"""Tokens and log-probabilities are the same bits for any number of workers, order, chunking and preemption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import ARCHITECTURES, make_requests, smallest_memory

import flexfloor
from flexfloor.ledger.accounting import Summary


def hashes(summary: Summary) -> tuple[str, str]:
    assert summary.responses_sha256
    assert summary.logprobs_sha256
    return summary.responses_sha256, summary.logprobs_sha256


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hashes_do_not_depend_on_workers_order_chunks_or_preemption(checkpoint: Callable, architecture: str) -> None:
    model = checkpoint(architecture)
    requests = make_requests(max_tokens=60)
    seen: dict[str, tuple[str, str]] = {}
    with flexfloor.Fleet.launch(model, workers=1) as fleet:
        assert fleet.info.numerics == "bitwise"
        seen["1 worker"] = hashes(flexfloor.rollout(fleet, requests).summary)
        seen["1 worker, shuffled"] = hashes(flexfloor.rollout(fleet, requests, order="shuffle:3", chunk=1).summary)
        seen["again"] = hashes(flexfloor.rollout(fleet, requests, chunk=50).summary)
    with flexfloor.Fleet.launch(model, workers=2, prefill_tokens=7, max_batch=5, page_tokens=4) as fleet:
        seen["2 workers, small chunks"] = hashes(flexfloor.rollout(fleet, requests).summary)
        grouped = flexfloor.rollout(fleet, requests, policy="static-grouped", order="shuffle:1").summary
        seen["2 workers, grouped"] = hashes(grouped)
    sizes: dict[str, Any] = {"prefill_tokens": 64, "max_batch": 16, "page_tokens": 4}
    longest = max(len(r.prompt_tokens) + r.sampling.max_tokens for r in requests)
    memory = smallest_memory(model, 3, longest, **sizes)
    with flexfloor.Fleet.launch(model, workers=3, worker_memory=memory, **sizes) as fleet:
        tight = flexfloor.rollout(fleet, requests).summary
        assert tight.preemptions > 0
        seen["3 workers, preempted"] = hashes(tight)
    with flexfloor.Fleet.launch(model, workers=4, transport="gloo") as fleet:
        seen["4 workers over Gloo"] = hashes(flexfloor.rollout(fleet, requests).summary)
    with flexfloor.Fleet.launch(model, workers=4) as fleet:
        seen["4 workers"] = hashes(flexfloor.rollout(fleet, requests).summary)
    assert len(set(seen.values())) == 1, seen


def test_eight_workers(checkpoint: Callable) -> None:
    requests = make_requests(prompts=3, samples=2, max_tokens=10)  # fewer requests than workers
    found = []
    for workers in (8, 1):
        with flexfloor.Fleet.launch(checkpoint("olmoe"), workers=workers) as fleet:
            found.append(hashes(flexfloor.rollout(fleet, requests).summary))
    assert found[0] == found[1]


def test_block_path_keeps_the_promise_too(checkpoint: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What machines without a reproducible mode of their BLAS run."""
    monkeypatch.setenv("FLEXFLOOR_NUMERICS_PATH", "blocks")
    requests = make_requests(prompts=4)
    found = []
    for workers, chunk in ((1, 16), (2, 3)):
        with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=workers, prefill_tokens=50 * workers) as fleet:
            assert fleet.info.numerics_path == "blocks"
            found.append(hashes(flexfloor.rollout(fleet, requests, chunk=chunk).summary))
    assert found[0] == found[1]


def test_seed_and_step_change_the_tokens(checkpoint: Callable) -> None:
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=1) as fleet:
        found = {
            flexfloor.rollout(fleet, make_requests(4, 1, temperature=1.0, **options)).summary.responses_sha256
            for options in ({}, {"step": 1})
        }
    assert len(found) == 2
