"""What releasing workers saves: all policies on the same requests, several draws of heavy-tailed lengths, one table.

    make bench-elastic                       # about 15 minutes on two cores
    python benchmarks/bench_elastic.py --workers 8
    python benchmarks/bench_elastic.py --pinned         # two workers, a core each, unpaced

Lengths are lognormal with siblings alike; draws whose share of post-finish iterations under `static` is not about a
third are passed over. A worker's memory holds all experts of the model, a fifth of the KV that all responses would take
at once, and no more: the fleet is not too large for its load. Runs are paced (see --pace), so that more workers than
cores behave as if each had its own; the share of iterations that overran is printed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from workload import bench_model

import flexfloor
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.plan import plan_memory
from flexfloor.ledger.accounting import Summary
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous

POLICIES = ("static", "static-grouped", "planned", "release", "fixed:{half}", "fixed:1", "flexfloor")
SIZES = {"prefill_tokens": 32, "max_batch": 128, "page_tokens": 16}
PROMPT, LONGEST, SIBLINGS = 24, 320, 4


def draw_lengths(count: int, seed: int) -> list[int]:
    """Log-lengths vary as much between prompts as between siblings of one. Tokens."""
    rng = random.Random(seed)
    lengths: list[int] = []
    for _ in range(count // SIBLINGS):
        middle = rng.gauss(math.log(36), 0.7)
        lengths += [min(LONGEST, max(4, round(math.exp(rng.gauss(middle, 0.7))))) for _ in range(SIBLINGS)]
    return lengths


def static_share(lengths: list[int], workers: int) -> float:
    """Share of occupied iterations after a worker's last response, were requests dealt out in turn."""
    last = [max(lengths[w::workers]) for w in range(workers)]
    return 1 - statistics.mean(last) / max(last)


def draw_workloads(count: int, workers: int, seeds: int) -> list[list[flexfloor.Request]]:
    workloads: list[list[flexfloor.Request]] = []
    seed = 0
    while len(workloads) < seeds:
        lengths = draw_lengths(count, seed)
        seed += 1
        if not 0.28 <= static_share(lengths, workers) <= 0.40:
            continue
        rng = random.Random(seed)
        requests = []
        for prompt in range(count // SIBLINGS):
            tokens = tuple(rng.randrange(4, 500) for _ in range(PROMPT))
            for sample in range(SIBLINGS):
                length = lengths[prompt * SIBLINGS + sample]
                sampling = flexfloor.SamplingParams(max_tokens=length, ignore_eos=True)
                requests.append(flexfloor.Request(f"p{prompt}#0/{sample}", f"p{prompt}", sample, tokens, sampling))
        workloads.append(requests)
    return workloads


def worker_memory(model: Path, workers: int, requests: list[flexfloor.Request], kv_share: float) -> int:
    """Bytes: dense weights and reserve, all experts, and this share of the KV of all requests at their full length."""
    info = inspect_checkpoint(model)
    placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, workers)
    plan = plan_memory(info, placement, workers, EngineSettings.parse(**SIZES))[0]
    pages = sum(-(-(PROMPT + r.sampling.max_tokens) // plan.page_tokens) + 1 for r in requests)
    slots = info.shape.experts * len(info.shape.moe_layers) + 1
    return plan.dense + plan.reserve + slots * plan.slot + int(kv_share * pages) * plan.page


def pin(fleet: flexfloor.Fleet) -> None:
    """A core for each worker."""
    cores = sorted(psutil.Process().cpu_affinity() or range(psutil.cpu_count() or 1))
    for index, handle in enumerate(fleet._crew.handles.values()):  # type: ignore[attr-defined]
        psutil.Process(handle.pid).cpu_affinity([cores[index % len(cores)]])


def run(
    fleet: flexfloor.Fleet, policies: list[str], requests: list[flexfloor.Request], chunk: int, max_slowdown: float
) -> dict[str, Summary]:
    found = {}
    for policy in policies:
        summary = flexfloor.rollout(
            fleet, requests, policy=policy, knowledge="oracle", chunk=chunk, max_slowdown=max_slowdown
        ).summary
        found[policy] = summary
        stalls = [f"{r['prepare_s'] * 1e3:.0f}+{r['commit_s'] * 1e3:.0f}" for r in summary.resizes]
        print(
            f"{policy}: {summary.iterations} iterations, {summary.wall_s:.1f} s, post-finish "
            f"{summary.post_finish_share_iterations:.2f}, overran {summary.paced_overrun_share or 0:.1%}, left "
            f"{[(r['iteration'], r['leaving']) for r in summary.resizes]}, prepare+commit ms {stalls}",
            file=sys.stderr,
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, help="default: 12 a worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--pace", type=float, help="times the iteration of the h200 profile, 3.2 ms; default: 24, or 6 a worker"
    )
    parser.add_argument("--kv-share", type=float, default=0.2)
    parser.add_argument("--chunk", type=int, default=4)
    parser.add_argument("--max-slowdown", type=float, default=0.02)
    parser.add_argument("--policies", help="comma-separated (default: all)")
    parser.add_argument("--unpaced", action="store_true", help="as fast as this machine goes: seconds say little")
    parser.add_argument("--pinned", action="store_true", help="two workers, a core each, unpaced")
    args = parser.parse_args()
    workers = 2 if args.pinned else args.workers
    model = bench_model("tiny")
    named = (args.policies or ",".join(POLICIES)).format(half=max(1, workers // 2))
    names = list(dict.fromkeys(named.split(",")))
    workloads = draw_workloads(args.requests or 12 * workers, workers, args.seeds)
    memory = max(worker_memory(model, workers, w, args.kv_share) for w in workloads)
    pace = args.pace or max(24.0, 6.0 * workers)
    options: dict[str, Any] = SIZES | {"worker_memory": memory, "pace": None if args.pinned or args.unpaced else pace}
    results: list[dict[str, Summary]] = []
    with flexfloor.Fleet.launch(model, workers=workers, **options) as fleet:
        if args.pinned:
            pin(fleet)
        run(fleet, ["static"], workloads[0][: 4 * workers], args.chunk, args.max_slowdown)  # warms up
        results += [run(fleet, names, w, args.chunk, args.max_slowdown) for w in workloads]
    Console().print(tabulate(results, names, workers))
    if args.pinned:
        best = best_static(model, workers, memory, workloads, args.max_slowdown)
        here = statistics.median(r["static"].throughput_tok_s / b for r, b in zip(results, best, strict=True))
        print(f"static here against static with the engine's own settings, fast numerics: {here:.2f} of its tokens/s")
    hashes = all(len({(s.responses_sha256, s.logprobs_sha256) for s in found.values()}) == 1 for found in results)
    print(f"hashes equal: {hashes}")
    return 0 if hashes else 1


def best_static(
    model: Path, workers: int, memory: int, workloads: list[list[flexfloor.Request]], max_slowdown: float
) -> list[float]:
    """Tokens per second of `static` as `make bench` finds it fastest: a slow baseline proves nothing."""
    with flexfloor.Fleet.launch(model, workers=workers, worker_memory=memory + 2**28, numerics="fast") as fleet:
        pin(fleet)
        run(fleet, ["static"], workloads[0], 16, max_slowdown)  # warms up
        return [run(fleet, ["static"], w, 16, max_slowdown)["static"].throughput_tok_s for w in workloads]


def tabulate(results: list[dict[str, Summary]], names: list[str], workers: int) -> Table:
    """Ratios to `static`, median over the draws."""
    table = Table(title=f"{workers} workers, ratios to static, median of {len(results)} draws")
    for head in ("policy", "post-finish", "tok/occ. iteration", "tok/occ. s", "tok/s", "preempted", "overran"):
        table.add_column(head, justify="right")
    for name in names:
        own, base = [r[name] for r in results], [r["static"] for r in results]

        def ratio(figure, own=own, base=base) -> str:
            return f"{statistics.median(figure(a) / figure(b) for a, b in zip(own, base, strict=True)):.2f}"

        table.add_row(
            name,
            f"{statistics.median(s.post_finish_share_iterations for s in own):.2f}",
            ratio(lambda s: s.response_tokens / s.occupied_iterations),
            ratio(lambda s: s.tokens_per_occupied_s_with_regrow),
            ratio(lambda s: s.throughput_tok_s),
            str(max(s.preemptions for s in own)),
            f"{max(s.paced_overrun_share or 0 for s in own):.1%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
