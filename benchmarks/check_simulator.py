"""Is the simulator right? Real runs on this machine against simulated ones, after calibrating on other real runs.

    make bench-simulator
    python benchmarks/check_simulator.py --emulate 8        # workers paced as H200s that run Qwen3-30B-A3B

Runs on the tiny model with 1 to 4 workers give a profile (`flexfloor calibrate`); other runs, with other lengths and
every policy, are simulated on it: wall time and occupied worker-time should be within 15%, and the iterations of
policies whose decisions do not depend on time the same. A machine has slow minutes, in which everything takes a third
longer and more. So the whole is done in three rounds, in which runs to calibrate from and others take turns, and of
the three times that a run is made, the fastest counts, here and there (column `repeats`: the slowest over the
fastest). Lengths are forced and known, so that decisions can be alike; policies decide by a profile of the first round.
With --emulate, tokens per occupied (emulated) second of a paced fleet should be within 10% of what is simulated for it,
with resizes that take what they take here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from workload import bench_model, token_prompts

import flexfloor
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import Summary
from flexfloor.progress import ModelShape
from flexfloor.world.calibrate import calibrate, read_run
from flexfloor.world.model_config import shape_from_config
from flexfloor.world.profiles import PROFILES, DeviceProfile, format_profile

POLICIES = ("static", "static-grouped", "planned", "release", "flexfloor", "fixed:1")
SAME_ITERATIONS = ("static", "static-grouped")  # nothing is decided by time
WITHIN = 0.15
ROUNDS = 3  # in each of which every real run is made; the fastest counts
EMULATED, EMULATED_WITHIN = "qwen3-30b-a3b", 0.1
OPTIONS: dict[str, Any] = {"worker_memory": "96MiB", "prefill_tokens": 128, "max_batch": 64}


@dataclass(frozen=True)
class Pair:
    workers: int
    policy: str
    repeats: tuple[Summary, ...]
    simulated: Summary

    @property
    def real(self) -> Summary:
        return min(self.repeats, key=lambda s: s.wall_s)

    @property
    def spread(self) -> float:
        times = [s.wall_s for s in self.repeats]
        return max(times) / min(times)

    @property
    def wall(self) -> float:
        return self.simulated.wall_s / self.real.wall_s

    @property
    def occupied(self) -> float:
        return self.simulated.occupied_worker_s / self.real.occupied_worker_s

    @property
    def is_right(self) -> bool:
        near = all(abs(ratio - 1) <= WITHIN for ratio in (self.wall, self.occupied))
        return near and (self.policy not in SAME_ITERATIONS or self.real.iterations == self.simulated.iterations)


def make_requests(count: int, seed: int) -> list[flexfloor.Request]:
    """Four samples a prompt; lengths are lognormal, those of a prompt alike."""
    rng = np.random.default_rng(seed)
    prompts = [
        flexfloor.Prompt(tuple(tokens), key=f"{seed}-{i}")
        for i, tokens in enumerate(token_prompts(count // 4, int(rng.integers(8, 40)), 500, seed))
    ]
    centers = np.repeat(rng.normal(4.0, 0.7, count // 4), 4)
    lengths = np.clip(np.exp(centers + rng.normal(0, 0.3, count)), 4, 400).astype(int)
    requests = flexfloor.make_requests(prompts, samples=4)
    return [
        replace(r, sampling=replace(r.sampling, max_tokens=int(n), ignore_eos=True))
        for r, n in zip(requests, lengths, strict=True)
    ]


def run_real(
    fleet: flexfloor.Fleet, requests: Sequence[flexfloor.Request], policy: str, profile: DeviceProfile, ledger: Path
) -> Summary:
    return flexfloor.rollout(fleet, requests, policy=policy, knowledge="oracle", profile=profile, ledger=ledger).summary


def run_simulated(
    fleet: flexfloor.Fleet,
    requests: Sequence[flexfloor.Request],
    policy: str,
    profile: DeviceProfile,
    decides_by: DeviceProfile | None = None,
    timed_as: ModelShape | None = None,
) -> Summary:
    """The same on a fleet in virtual time, with as much memory. decides_by: the policy's profile, if it is another."""
    status = fleet.status()
    memory = status.workers[0].arena_bytes + status.model.dense_bytes + profile.reserve_bytes
    simulated = SimulatedFleet(
        status.model,
        profile,
        len(status.workers),
        memory_bytes=memory,
        max_batch=status.max_batch,
        prefill_tokens=status.prefill_tokens,
        page_tokens=status.page_tokens,
        timed_as=timed_as,
    )
    decides_by = decides_by or profile
    return flexfloor.rollout(simulated, requests, policy=policy, knowledge="oracle", profile=decides_by).summary


class Others:
    """What other programs take of the machine meanwhile."""

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def share(self) -> float:
        """Of all CPU time since this was made; above a few percent, times mean little."""
        machine, idle, own = (now - then for now, then in zip(self._now(), self._before, strict=True))
        return max(0.0, (machine - idle - own) / machine) if machine > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """CPU seconds of the machine, of these idle, and of this program with its workers."""
        times, me = psutil.cpu_times(), psutil.Process()
        own = [p.cpu_times() for p in (me, *me.children(recursive=True))]
        return sum(times), times.idle + times.iowait, sum(t.user + t.system for t in own)


def run_pairs(sizes: Sequence[int], count: int, model: Path, folder: Path) -> Iterator[Pair]:
    fleets = {}
    try:
        for workers in sizes:
            fleets[workers] = flexfloor.Fleet.launch(model, workers=workers, **OPTIONS)
        for fleet in fleets.values():  # memory that is touched for the first time
            run_real(fleet, make_requests(count, 0), "static", PROFILES["cpu"], folder / "first.jsonl")
        cores = len(os.sched_getaffinity(0))
        to_fit: dict[tuple[int, str, int], list[tuple[float, Path]]] = {}
        runs: dict[tuple[int, str], list[Summary]] = {pair: [] for pair in product(sizes, POLICIES)}
        decides_by, requests = PROFILES["cpu"], make_requests(count, 3)
        for turn in range(ROUNDS):
            for seed, policy, workers in product((1, 2), ("static", "release"), sizes):
                path = folder / f"fit-{workers}-{policy}-{seed}-{turn}.jsonl"
                with told(f"round {turn + 1} of {ROUNDS}, to calibrate: {workers} workers, {policy}"):
                    made = run_real(fleets[workers], make_requests(count, seed), policy, PROFILES["cpu"], path)
                to_fit.setdefault((workers, policy, seed), []).append((made.wall_s, path))
            if turn == 0:
                decides_by = fit(to_fit.values(), cores)
            for policy, workers in product(POLICIES, sizes):
                path = folder / f"{workers}-{policy.replace(':', '-')}-{turn}.jsonl"
                with told(f"round {turn + 1} of {ROUNDS}: {workers} workers, {policy}"):
                    runs[workers, policy].append(run_real(fleets[workers], requests, policy, decides_by, path))
        profile = fit(to_fit.values(), cores)
        print(format_profile(profile), file=sys.stderr, flush=True)
        for (workers, policy), repeats in runs.items():
            simulated = run_simulated(fleets[workers], requests, policy, profile, decides_by)
            yield Pair(workers, policy, tuple(repeats), simulated)
    finally:
        for fleet in fleets.values():
            fleet.close()


def fit(repeats: Iterable[Sequence[tuple[float, Path]]], cores: int) -> DeviceProfile:
    """From the fastest one of each run's repeats: (seconds, ledger)."""
    return calibrate([read_run(min(made)[1]) for made in repeats], PROFILES["cpu"], cores).profile


@contextmanager
def told(what: str) -> Iterator[None]:
    """A line on stderr when it is done, with what other programs took of the machine meanwhile."""
    others = Others()
    yield
    print(f"{what}; other programs took {others.share:.0%} of the machine", file=sys.stderr, flush=True)


def emulate(workers: int, count: int, pace: float) -> int:
    """A paced fleet against its simulation; 1 where they differ by more than a tenth."""
    target, h200 = shape_from_config(EMULATED), PROFILES["h200"]
    model, requests = bench_model("tiny"), make_requests(count, 4)
    table = Table("policy", "iterations", "simulated", "tokens/occupied s, emulated", "simulated/emulated", "overran")
    code = 0
    with flexfloor.Fleet.launch(model, workers=workers, pace=pace, pace_model=EMULATED, **OPTIONS) as fleet:
        here = fleet.status().move_costs
        profile = replace(
            h200, switch_s=here.switch_s / pace, pause_s=here.pause_s / pace, move_bytes_per_s=here.bytes_per_s * pace
        )
        for policy in POLICIES:
            real = flexfloor.rollout(fleet, requests, policy=policy, knowledge="oracle", profile=h200).summary
            simulated = run_simulated(fleet, requests, policy, profile, timed_as=target)
            assert real.emulated is not None
            ratio = simulated.tokens_per_occupied_s / real.emulated["tokens_per_occupied_s"]
            code |= abs(ratio - 1) > EMULATED_WITHIN or not real.pace_valid
            table.add_row(
                policy, str(real.iterations), str(simulated.iterations),
                f"{real.emulated['tokens_per_occupied_s']:.1f}", f"{ratio:.3f}", f"{real.paced_overrun_share:.1%}",
            )  # fmt: skip
            print(f"compared: {policy}", file=sys.stderr, flush=True)
    Console(width=120).print(table)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--ledgers", type=Path, metavar="DIR", help="keep the real runs' ledgers there")
    parser.add_argument("--emulate", type=int, metavar="N", help="so many paced workers, instead")
    parser.add_argument("--pace", type=float, default=12.0, help="of --emulate: seconds here for one of the device")
    arguments = parser.parse_args()
    if arguments.emulate:
        return emulate(arguments.emulate, arguments.requests, arguments.pace)
    sizes = [int(part) for part in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.ledgers or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        pairs = list(run_pairs(sizes, arguments.requests, bench_model("tiny"), folder))
    table = Table(
        "workers", "policy", "iterations", "simulated", "wall", "repeats", "simulated/real", "occupied",
        "simulated/real", "",
    )  # fmt: skip
    for pair in pairs:
        real = pair.real
        table.add_row(
            str(pair.workers), pair.policy, str(real.iterations), str(pair.simulated.iterations),
            f"{real.wall_s:.2f} s", f"{pair.spread:.2f}", f"{pair.wall:.3f}",
            f"{real.occupied_worker_s:.2f} s", f"{pair.occupied:.3f}",
            "" if pair.is_right else "off",
        )  # fmt: skip
    Console(width=120).print(table)
    return 0 if all(pair.is_right for pair in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
