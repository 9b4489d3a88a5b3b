"""Iteration times against values worked out by hand, and the order they must keep."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.errors import InputError
from flexfloor.progress import ModelShape
from flexfloor.world.costs import (
    PROFILES,
    DeviceProfile,
    IterationCost,
    MoveCosts,
    format_profile,
    iteration_seconds,
    latency_seconds,
    latency_table,
    load_profile,
    seconds_core,
)

# Round numbers: 2-byte elements; dense weights of 1000 bytes read; 4 experts in 2 layers of 100 bytes each: 800 bytes.
SHAPE = ModelShape(
    "mixtral", 2, (0, 1), 4, 2, 100, 64,
    dense_bytes=1400, expert_bytes=100, kv_token_bytes=10, hidden=5, itemsize=2, lookup_bytes=400,
)  # fmt: skip
DEVICE = DeviceProfile(
    "round", bandwidth=1000.0, flops=1e4, fixed_s=1.0, latency_s=((2, 0.5), (4, 0.75)),
    node_link=100.0, cross_link=10.0, ranks_per_node=2, imbalance=1.2,
)  # fmt: skip
QWEN3_30B = ModelShape(
    "qwen3_moe", 48, tuple(range(48)), 128, 8, 151936, 40960,
    dense_bytes=3_050_000_000, expert_bytes=3 * 2048 * 768 * 2, kv_token_bytes=98304,
    hidden=2048, itemsize=2, lookup_bytes=151936 * 2048 * 2,
)  # fmt: skip


def test_one_worker_decoding():
    # 1 fixed + 1000/1000 dense + 30·10/1000 KV + 3·2·500/1e4 dense products
    # + max(800·(1 − ½³)/1000 = 0.7, 3·2·400·½/1e4 = 0.12) experts; no exchange
    found = iteration_seconds(DEVICE, SHAPE, batch=[3], kv_tokens=[30], prefill_tokens=[0])
    assert found == pytest.approx(1 + 1 + 0.3 + 0.3 + 0.7)


def test_two_workers_decoding():
    # experts: max(800/2·(1 − ½⁴)/1000·1.1 = 0.4125, 1.2·4/2·0.04 = 0.096)
    # exchange: 2 layers twice, 0.5 s + 3 rows of 10 bytes · 2·(1 − ½²)/100
    found = iteration_seconds(DEVICE, SHAPE, batch=[3, 1], kv_tokens=[10, 50], prefill_tokens=[0, 0])
    assert found == pytest.approx(1 + 1 + 0.5 + 0.3 + 0.4125 + 4 * (0.5 + 30 * 1.5 / 100))


def test_prefill_on_three_workers_over_two_nodes():
    # B = 1, P = 100: all experts touched; read 800/3·1.1/1000, prefill products 100·2·500/1e4 and 1.2·100/3·0.04
    # exchange: latency 0.75; 100 rows of 10 bytes · [3·(1 − (2/3)²)/100 + 1·(1 − ½²)/10]
    found = iteration_seconds(DEVICE, SHAPE, batch=[1, 0, 0], kv_tokens=[0, 0, 0], prefill_tokens=[0, 100, 0])
    exchange = 4 * (0.75 + 1000 * (3 * (5 / 9) / 100 + 0.75 / 10))
    touched = 1 - 0.5**101
    assert found == pytest.approx(1 + 1 + 0.1 + 0.88 / 3 * touched + 10 + 1.6 + exchange)


def test_products_bound_the_experts_of_a_large_batch():
    # 1.2·400/2·0.04 = 9.6 s of products against 0.44 s of reading
    found = iteration_seconds(DEVICE, SHAPE, batch=[200, 200], kv_tokens=[0, 0], prefill_tokens=[0, 0])
    assert found == pytest.approx(2 + 200 * 0.1 + 9.6 + 4 * (0.5 + 2000 * 1.5 / 100))


def test_the_model_of_the_study():
    """Qwen3-30B-A3B on 8 workers, 32 requests of 4000 tokens each: the terms of the study, in milliseconds."""
    found = iteration_seconds(
        PROFILES["h200"], QWEN3_30B, batch=[32] * 8, kv_tokens=[128_000] * 8, prefill_tokens=[0] * 8
    )
    kv, dense, products = 128_000 * 98304 / 3.84e9, 2.43 / 3.84, 32 * 2 * 1.215e9 / 400e9
    experts = 57.98e9 / 8 * (1 - (15 / 16) ** 256) * 1.1 / 3.84e9
    exchange = 96 * (0.02 + 4096 * 32 * 8 * (1 - (7 / 8) ** 8) / 155e6)
    assert found * 1e3 == pytest.approx(3 + dense + kv + products + experts + exchange, rel=2e-3)


def test_an_idle_group_still_costs_its_fixed_part():
    assert iteration_seconds(DEVICE, SHAPE, batch=[0, 0], kv_tokens=[0, 0], prefill_tokens=[0, 0]) == 1 + 1 + 4 * 0.5


WORK = st.lists(st.tuples(*[st.integers(0, 10_000)] * 3), min_size=1, max_size=40)


@given(WORK, st.data(), st.sampled_from(sorted(PROFILES)))
def test_more_work_is_never_cheaper(work: list[tuple[int, int, int]], data: st.DataObject, name: str):
    arrays = dict(zip(("batch", "kv_tokens", "prefill_tokens"), map(list, zip(*work, strict=True)), strict=True))
    before = iteration_seconds(PROFILES[name], QWEN3_30B, **arrays)
    which = data.draw(st.sampled_from(sorted(arrays)))
    arrays[which][data.draw(st.integers(0, len(work) - 1))] += data.draw(st.integers(1, 1000))
    assert iteration_seconds(PROFILES[name], QWEN3_30B, **arrays) >= before * (1 - 1e-12)
    assert before > PROFILES[name].fixed_s


@given(WORK, st.randoms())
def test_the_order_of_the_workers_does_not_matter(work: list[tuple[int, int, int]], random: Random):
    def cost() -> float:
        batch, kv, prefill = map(list, zip(*work, strict=True))
        return iteration_seconds(PROFILES["h800"], QWEN3_30B, batch=batch, kv_tokens=kv, prefill_tokens=prefill)

    before = cost()
    random.shuffle(work)
    assert cost() == pytest.approx(before, rel=1e-12)


def test_slower_devices_take_longer():
    work = {"batch": [32] * 12, "kv_tokens": [50_000] * 12, "prefill_tokens": [0] * 12}
    h200, h800, slow = (iteration_seconds(PROFILES[n], QWEN3_30B, **work) for n in ("h200", "h800", "slow"))
    assert h200 < h800
    assert h200 < slow


def test_latency_by_group_size():
    table = latency_table(PROFILES["h200"])
    found = [latency_seconds(table, m) for m in (1, 2, 8, 9, 16, 17, 99)]
    assert found == [0, 20e-6, 20e-6, 45e-6, 45e-6, 60e-6, 60e-6]


def test_workers_that_share_cores():
    # Three workers on two cores: fixed 2·3/2; KV max(30, (30·6/3)/2)·10/1000; dense products max(3, 6/2)/10;
    # experts 800·(1 − ½⁶)/2/1000, half of all on each core and more than 1.1/3 of it; requests max(3, 6/2)·0.01
    device = replace(DEVICE, cores=2, request_s=0.01, ranks_per_node=4)
    found = iteration_seconds(device, SHAPE, batch=[3, 2, 1], kv_tokens=[30, 20, 10], prefill_tokens=[0] * 3)
    exchange = 4 * (0.75 + 30 * 3 * (5 / 9) / 100)
    assert found == pytest.approx(3 + 0.3 + 0.3 + 0.4 * (1 - 0.5**6) + 0.03 + exchange)
    # Each takes in all six rows of 10 bytes, in four exchanges.
    gathering = replace(device, gather_link=50)
    taken = iteration_seconds(gathering, SHAPE, batch=[3, 2, 1], kv_tokens=[30, 20, 10], prefill_tokens=[0] * 3)
    assert taken - found == pytest.approx(4 * 60 / 50)
    # All the work on one of them: its core is the bottleneck.
    alone = iteration_seconds(device, SHAPE, batch=[6, 0, 0], kv_tokens=[60, 0, 0], prefill_tokens=[0] * 3)
    exchange = 4 * (0.75 + 60 * 3 * (5 / 9) / 100)
    assert alone == pytest.approx(3 + 0.6 + 0.6 + 0.4 * (1 - 0.5**6) + 0.06 + exchange)


def test_workers_without_a_row_leave_the_cores_to_others():
    device = replace(DEVICE, cores=2)
    one, three = (
        iteration_seconds(device, SHAPE, batch=batch, kv_tokens=[0] * 4, prefill_tokens=[0] * 4)
        for batch in ([1, 0, 0, 0], [1, 1, 1, 0])
    )
    more_experts = 0.4 * (0.5 - 0.5**3)
    assert three - one == pytest.approx((1.5 - 1) * 2 + 0.05 + more_experts)


@given(st.lists(st.tuples(*[st.integers(0, 500)] * 3), min_size=1, max_size=12), st.sampled_from([1, 2, 3.5, 64]))
def test_fewer_cores_are_never_faster(work: list[tuple[int, int, int]], cores: float):
    batch, kv, prefill = map(list, zip(*work, strict=True))
    arrays = {"batch": batch, "kv_tokens": kv, "prefill_tokens": prefill}
    own = iteration_seconds(PROFILES["h800"], QWEN3_30B, **arrays)
    shared = iteration_seconds(replace(PROFILES["h800"], cores=cores), QWEN3_30B, **arrays)
    assert shared == own if cores >= len(work) else shared >= own


@given(st.lists(st.tuples(st.integers(1, 40), *[st.integers(0, 10_000)] * 6), min_size=1, max_size=20))
def test_arrays_cost_what_their_entries_cost(rows: list[tuple[int, ...]]):
    cost = IterationCost(replace(PROFILES["slow"], cores=5), QWEN3_30B)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    one_by_one = [seconds_core(cost.coefficients, cost.latency, *row) for row in rows]
    assert cost.seconds(*columns).tolist() == one_by_one
    assert cost.seconds(*rows[0]) == one_by_one[0]
    assert isinstance(cost.seconds(*rows[0]), float)


def test_arrays_are_broadcast():
    cost = IterationCost(PROFILES["h200"], QWEN3_30B)
    workers, batch = np.array([[1], [4], [16]]), np.array([1, 8])
    found = cost.seconds(workers, batch, batch * workers, batch * 1000.0)
    assert found.shape == (3, 2)
    assert found[1, 1] == cost.seconds(4, 8, 32, 8000.0, 0, 0, 8)


def test_the_profiles_of_the_study():
    h200, h800, slow = (PROFILES[n] for n in ("h200", "h800", "slow"))
    assert (h200.memory_bytes, h200.reserve_bytes, h200.switch_s, h200.move_bytes_per_s) == (120e9, 6e9, 0.5, 40e9)
    assert replace(h200, name="h800", bandwidth=2.68e12, memory_bytes=48e9, reserve_bytes=4e9) == h800
    table = ((8, 60e-6), (16, 150e-6), (32, 200e-6))
    assert replace(h200, name="slow", fixed_s=8e-3, latency_s=table) == slow


def test_moving_as_a_profile_has_it():
    # 500 dense and 200 active expert parameters: 1400 operations a token at 1e4/s
    found = MoveCosts.of(replace(DEVICE, move_bytes_per_s=7.0, switch_s=3.0), SHAPE)
    assert (found.bytes_per_s, found.switch_s) == (7.0, 3.0)
    assert found.recompute_tokens_per_s == pytest.approx(1 / 0.14)


def test_the_engine_gets_its_wide_vectors_although_costs_come_first():
    """Numba reads the features to compile for once a process, from the environment."""
    code = "import flexfloor.world.costs, numba.core.config as c; print(c.CPU_FEATURES or '')"
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CPU_FEATURES"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if llvmlite.binding.get_host_cpu_features().get("avx512f"):
        assert "-prefer-256-bit" in done.stdout
    else:
        assert done.stdout.strip() == ""


FILE = """bandwidth = 1e12
flops = 2e14
fixed_s = 0
latency_s = [[4, 1e-5], [8, 2e-5]]
node_link = 1e11
cross_link = 2e10
ranks_per_node = 4
imbalance = 1
"""


def test_a_profile_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    profile = load_profile(str(path))
    assert (profile.name, profile.latency_s, profile.ranks_per_node) == ("mine", ((4, 1e-5), (8, 2e-5)), 4)
    assert (profile.memory_bytes, profile.cores, profile.look_s) == (120e9, math.inf, 0.0)
    assert load_profile("h800") is PROFILES["h800"]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_profile_written_is_read_as_it_was(tmp_path: Path, name: str):
    path = tmp_path / "copy.toml"
    path.write_text(format_profile(PROFILES[name], {"": "two\nlines", "flops": "guessed"}))
    assert load_profile(path) == PROFILES[name]
    assert path.read_text().startswith("# two\n# lines\n")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("flops = 2e14\n", "", "flops is missing; it has name, bandwidth, "),
        ("flops", "flop", "flops is missing"),
        ("flops", "speed = 1\nflops", "unknown key 'speed'; there is name, bandwidth, "),
        ("1e12", "0", "bandwidth is 0; give a positive number"),
        ("1e12", "nan", "bandwidth is nan; give a positive number"),
        ("1e12", "true", "bandwidth is True; give a positive number"),
        ("1e12", '"fast"', "bandwidth is 'fast'; give a positive number"),
        ("[[4, 1e-5], [8, 2e-5]]", "[]", "latency_s is []; give pairs like"),
        ("[[4, 1e-5], [8, 2e-5]]", "[[8, 1e-5], [4, 2e-5]]", "sizes rising"),
        ("ranks_per_node = 4", "ranks_per_node = 0", "ranks_per_node is 0; give a whole number from 1"),
        ("imbalance = 1", "imbalance = 0.5", "imbalance is 0.5; give at least 1"),
        ("imbalance = 1", "imbalance =", "is not TOML"),
        ("imbalance = 1", "imbalance = 1\ncores = 0.5", "cores is 0.5; give at least 1"),
        ("imbalance = 1", "imbalance = 1\nmemory_bytes = 0", "memory_bytes is 0; give a positive number"),
        ("imbalance = 1", "imbalance = 1\nname = 'a\"b'", "give a string without quotes"),
    ],
)
def test_a_profile_file_that_is_not_one(tmp_path: Path, old: str, new: str, told: str):
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_profile(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_that_is_not_there(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"profile 'b300' is not known; there is h200, h800, slow, cpu, or name a \.toml"
    ):
        load_profile("b300")
    with pytest.raises(InputError, match=r"cannot be read \(No such file"):
        load_profile(tmp_path / "missing.toml")
