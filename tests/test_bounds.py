"""The linear program against single iterations, against schedules at random, and against cases worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.progress import ModelShape
from flexfloor.world.bounds import Work, iteration_slopes, kv_capacity, least_occupied_s
from flexfloor.world.costs import PROFILES, IterationCost, iteration_seconds

SHAPE = ModelShape(
    model_type="test",
    layers=4,
    moe_layers=(0, 1, 2, 3),
    experts=8,
    top_k=2,
    vocab_size=1000,
    max_context=100_000,
    dense_bytes=2_000_000_000,
    expert_bytes=500_000_000,
    kv_token_bytes=100_000,
    hidden=1024,
    itemsize=2,
    lookup_bytes=100_000_000,
)
ROOMY = replace(PROFILES["h200"], memory_bytes=60e9, reserve_bytes=1e9)
SHARED = replace(ROOMY, name="shared", cores=2, request_s=1e-4, gather_link=1e9, imbalance=1.5)
DEVICES = [ROOMY, replace(PROFILES["slow"], memory_bytes=60e9, reserve_bytes=1e9), SHARED]


@given(
    device=st.sampled_from(DEVICES),
    loads=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2000), st.integers(0, 500)), min_size=1, max_size=20),
    spare=st.integers(0, 5000),
    below=st.integers(0, 50),
)
@settings(max_examples=300, deadline=None)
def test_no_iteration_is_quicker_than_its_bound(device, loads, spare: int, below: int):
    """loads: (batch, tokens of context for each of it, prefill) of every worker."""
    batch = [b for b, _, _ in loads]
    prefill = [p for _, _, p in loads]
    kv = [b * each for b, each, _ in loads]
    total, prefilled = sum(batch), sum(prefill)
    if total + prefilled == 0:
        return
    cost = IterationCost(device, SHAPE)
    s = iteration_slopes(cost, np.array([len(loads)]))
    at, slope = s.chord(max(1, total - below), max(1, total) + spare)
    bound = s.base + s.kv * sum(kv) + s.token * total + s.prefill * prefilled
    bound += np.maximum(at + slope * total, s.expert_token * total)
    took = iteration_seconds(device, SHAPE, batch=batch, kv_tokens=kv, prefill_tokens=prefill)
    assert bound[0] <= took * (1 + 1e-9)


@pytest.mark.parametrize("workers", [1, 2, 8, 9])
def test_the_bound_of_a_balanced_iteration_is_close(workers: int):
    """Where the chord ends, nothing is lost."""
    cost = IterationCost(ROOMY, SHAPE)
    total = 16 * workers
    s = iteration_slopes(cost, np.array([workers]))
    at, slope = s.chord(1, total)
    bound = s.base + s.kv * 500 * total + s.token * total
    bound += np.maximum(at + slope * total, s.expert_token * total)
    took = iteration_seconds(
        ROOMY, SHAPE, batch=[16] * workers, kv_tokens=[8000] * workers, prefill_tokens=[0] * workers
    )
    assert bound[0] == pytest.approx(took, rel=1e-9)


def test_one_request_on_one_worker_by_hand():
    """9 iterations that decode: every one reads the dense weights and a quarter of the experts."""
    cost = IterationCost(ROOMY, SHAPE)
    work = Work.of(np.array([100]), np.array([10]), np.array([0]))
    assert (work.iterations, work.decoded, work.own_kv, work.prompt_kv, work.prefill) == (9, 9, 36, 900, 99)
    assert work.tangents == ((0, 9),)
    bytes_read = 9 * (1.9e9 + 16e9 / 4) + (36 + 900) * 100_000
    seconds = 9 * 3e-3 + bytes_read / 3.84e12
    seconds += (9 + 99) * 1.9e9 / 400e12 + 99 * (16e9 / 4) / 400e12  # an operation a byte: two for each of two bytes
    found = least_occupied_s(cost, work, workers=1, max_batch=256)
    assert found == pytest.approx(seconds, rel=1e-5)
    assert found <= seconds


def test_a_limit_makes_a_bound_that_needs_more_workers():
    cost = IterationCost(ROOMY, SHAPE)
    lengths = np.full(512, 2000)
    work = Work.of(np.full(512, 300), lengths, np.arange(512) // 8)
    free = least_occupied_s(cost, work, workers=8, max_batch=256)
    found = [least_occupied_s(cost, work, workers=8, max_batch=256, limit_s=share * free) for share in (1, 0.4, 0.35)]
    assert found[0] == pytest.approx(free, rel=1e-4)
    assert found[0] < found[1] < found[2] < math.inf
    assert least_occupied_s(cost, work, workers=8, max_batch=256, limit_s=0.01 * free) == math.inf
    assert least_occupied_s(cost, work, workers=8, max_batch=256, least=8) > free


def test_memory_that_holds_no_experts_holds_no_schedule():
    small = IterationCost(replace(ROOMY, memory_bytes=6e9), SHAPE)
    assert kv_capacity(small, np.array([5, 6])).tolist() == [-10_000, 20_000]
    work = Work.of(np.array([100]), np.array([10]), np.array([0]))
    assert least_occupied_s(small, work, workers=5, max_batch=8) == math.inf
    assert least_occupied_s(small, work, workers=6, max_batch=8) < math.inf


def test_less_memory_never_lowers_the_bound():
    work = Work.of(np.full(256, 300), np.full(256, 3000), np.arange(256))
    found = [
        least_occupied_s(IterationCost(replace(ROOMY, memory_bytes=m), SHAPE), work, workers=4, max_batch=256)
        for m in (200e9, 20e9, 9e9, 8e9)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def run_at_random(lengths: list[int], prompts: list[int], workers: int, device, rng: random.Random):
    """(seconds, worker-seconds) of a schedule that nobody would choose: a request's first token comes out of its
    prefill, which comes whenever it likes; requests and workers come and go at no cost."""
    left = [length - 1 for length in lengths]
    context = list(prompts)
    unborn = set(range(len(lengths)))
    wall = occupied = 0.0
    while unborn or any(left):
        m = rng.randint(1, workers)
        batch, kv, prefill = [0] * m, [0] * m, [0] * m
        running = [i for i in range(len(lengths)) if i not in unborn and left[i] > 0 and rng.random() < 0.9]
        for i in running:
            w = rng.randrange(m)
            batch[w] += 1
            kv[w] += context[i]
            context[i] += 1
            left[i] -= 1
        for i in [i for i in unborn if rng.random() < 0.3]:
            unborn.discard(i)
            prefill[rng.randrange(m)] += prompts[i]
        if sum(batch) + sum(prefill) == 0:
            continue
        seconds = iteration_seconds(device, SHAPE, batch=batch, kv_tokens=kv, prefill_tokens=prefill)
        wall += seconds
        occupied += m * seconds
    return wall, occupied


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    prompt=st.integers(1, 300),
    workers=st.integers(1, 10),
    device=st.sampled_from(DEVICES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_no_schedule_beats_the_bound(lengths: list[int], prompt: int, workers: int, device, seed: int):
    prompts = [prompt] * len(lengths)
    wall, occupied = run_at_random(lengths, prompts, workers, device, random.Random(seed))
    work = Work.of(np.array(prompts), np.array(lengths), np.arange(len(lengths)))
    cost = IterationCost(device, SHAPE)
    bound = least_occupied_s(cost, work, workers=workers, max_batch=len(lengths), limit_s=wall)
    assert bound <= occupied
    assert bound >= least_occupied_s(cost, work, workers=workers, max_batch=len(lengths)) * (1 - 1e-4)


def test_siblings_are_prefilled_once():
    one = Work.of(np.array([50, 50, 70]), np.array([5, 6, 7]), np.array([3, 3, 1]))
    assert (one.prefill, one.requests, one.iterations) == (49 + 69, 3, 6)


def test_iterations_give_a_request_one_token_each():
    """3 requests of 1, 4 and 9 decoded tokens: in n iterations min(n, 1) + min(n, 4) + min(n, 9)."""
    work = Work.of(np.full(3, 10), np.array([2, 5, 10]), np.arange(3))
    for n, most in {1: 3, 2: 5, 4: 9, 5: 10, 9: 14, 20: 14}.items():
        assert min(a * n + b for a, b in work.tangents) == most


def test_the_tail_costs_what_few_requests_cost():
    """One response of 2,001 tokens among 63 of 101: 100 iterations of all, then 1,900 of one."""
    cost = IterationCost(ROOMY, SHAPE)
    lengths = np.array([2001] + [101] * 63)
    work = Work.of(np.full(64, 1), lengths, np.arange(64))
    per_iteration = [
        iteration_seconds(ROOMY, SHAPE, batch=[batch], kv_tokens=[0], prefill_tokens=[0]) for batch in (64, 1)
    ]
    exact = 100 * per_iteration[0] + 1900 * per_iteration[1]
    exact += (work.own_kv + work.prompt_kv) * 100_000 / 3.84e12
    found = least_occupied_s(cost, work, workers=1, max_batch=64)
    assert 0.97 * exact <= found <= exact * (1 + 1e-9)
