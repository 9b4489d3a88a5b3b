"""What releasing workers saves: all policies on the same requests, several draws of heavy-tailed lengths, one table.

    make bench-elastic                       # about 15 minutes on two cores
    python benchmarks/bench_elastic.py --workers 8
    python benchmarks/bench_elastic.py --pinned         # two workers, a core each, unpaced
    python benchmarks/bench_elastic.py --epochs 3 --knowledge history

Lengths are lognormal with siblings alike; draws whose share of post-finish iterations under `static` is not about a
third are passed over. A worker's memory holds all experts of the model, a fifth of the KV that all responses would take
at once, and no more: the fleet is not too large for its load. Runs are paced (see --pace), so that more workers than
cores behave as if each had its own; the share of iterations that overran is printed.

Several epochs answer the same prompts again: lengths are drawn anew around each prompt's own middle. With `--knowledge
history` all policies of an epoch see the lengths of the earlier ones, and there is one table an epoch, with ratios to
`static` in the same epoch.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
from flexfloor.world.lengths.knowledge import KNOWLEDGE
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

POLICIES = ("static", "static-grouped", "planned", "release", "fixed:{half}", "fixed:1", "flexfloor")
SIZES = {"prefill_tokens": 32, "max_batch": 128, "page_tokens": 16}
PROMPT, LONGEST, SIBLINGS = 24, 320, 4
BETWEEN_SD, WITHIN_SD = 0.7, 0.7  # of log-lengths, between prompts and between responses to one

Workload = list[list[flexfloor.Request]]
"""The requests of each epoch."""


def draw_lengths(count: int, seed: int, epochs: int, within_sd: float) -> list[list[int]]:
    """Tokens of every response, in each epoch."""
    rng = random.Random(seed)
    middles: list[float] = []

    def around(middle: float, rng: random.Random) -> list[int]:
        drawn = (rng.gauss(middle, within_sd) for _ in range(SIBLINGS))
        return [min(LONGEST, max(4, round(math.exp(log)))) for log in drawn]

    lengths: list[int] = []
    for _ in range(count // SIBLINGS):
        middles.append(rng.gauss(math.log(36), BETWEEN_SD))
        lengths += around(middles[-1], rng)
    later = (random.Random(f"{seed}/{epoch}") for epoch in range(1, epochs))
    return [lengths, *([length for middle in middles for length in around(middle, own)] for own in later)]


def static_share(lengths: list[int], workers: int) -> float:
    """Share of occupied iterations after a worker's last response, were requests dealt out in turn."""
    last = [max(lengths[w::workers]) for w in range(workers)]
    return 1 - statistics.mean(last) / max(last)


def draw_workloads(count: int, workers: int, seeds: int, epochs: int, within_sd: float) -> list[Workload]:
    """The first epoch decides whether a draw is passed over."""
    workloads: list[Workload] = []
    seed = 0
    while len(workloads) < seeds:
        lengths = draw_lengths(count, seed, epochs, within_sd)
        seed += 1
        if not 0.28 <= static_share(lengths[0], workers) <= 0.40:
            continue
        rng = random.Random(seed)
        prompts = [tuple(rng.randrange(4, 500) for _ in range(PROMPT)) for _ in range(count // SIBLINGS)]
        workloads.append([requests_of(prompts, own, epoch) for epoch, own in enumerate(lengths)])
    return workloads


def requests_of(prompts: list[tuple[int, ...]], lengths: list[int], epoch: int) -> list[flexfloor.Request]:
    requests = []
    for prompt, tokens in enumerate(prompts):
        for sample in range(SIBLINGS):
            length = lengths[prompt * SIBLINGS + sample]
            sampling = flexfloor.SamplingParams(max_tokens=length, ignore_eos=True, step=epoch)
            requests.append(flexfloor.Request(f"p{prompt}#0/{sample}", f"p{prompt}", sample, tokens, sampling))
    return requests


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
    for index, process in enumerate(fleet.processes.values()):  # type: ignore[attr-defined]
        psutil.Process(process).cpu_affinity([cores[index % len(cores)]])


def run(
    fleet: flexfloor.Fleet, policies: Sequence[str], requests: list[flexfloor.Request], **options: Any
) -> dict[str, flexfloor.RolloutResult]:
    """Every policy on the same requests. options: of `flexfloor.rollout`."""
    found = {}
    for policy in policies:
        found[policy] = flexfloor.rollout(fleet, requests, policy=policy, **options)
        summary = found[policy].summary
        stalls = [f"{r['prepare_s'] * 1e3:.0f}+{r['commit_s'] * 1e3:.0f}" for r in summary.resizes]
        print(
            f"{policy}: {summary.iterations} iterations, {summary.wall_s:.1f} s, post-finish "
            f"{summary.post_finish_share_iterations:.2f}, overran {summary.paced_overrun_share or 0:.1%}, left "
            f"{[(r['iteration'], r['leaving']) for r in summary.resizes]}, prepare+commit ms {stalls}",
            file=sys.stderr,
            flush=True,
        )
    return found


def run_epochs(
    fleet: flexfloor.Fleet, policies: Sequence[str], workload: Workload, history: Path, options: dict[str, Any]
) -> list[dict[str, Summary]]:
    """Epoch → policy → summary. All policies of an epoch know the same; it is added to the history at its end."""
    epochs = []
    with LengthHistory(history) as file:
        for requests in workload:
            observed: Observations | None = file.load() if options["knowledge"] in ("history", "shuffled") else None
            found = run(fleet, policies, requests, history=observed, **options)
            file.observe(requests, next(iter(found.values())).responses)
            epochs.append({policy: result.summary for policy, result in found.items()})
    return epochs


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
    parser.add_argument("--policies", help="comma-separated, and static (default: all)")
    parser.add_argument("--epochs", type=int, default=1, help="over the same prompts")
    parser.add_argument("--knowledge", choices=KNOWLEDGE, default="oracle")
    parser.add_argument("--within-sd", type=float, default=WITHIN_SD, help="of log-lengths of a prompt's responses")
    parser.add_argument("--unpaced", action="store_true", help="as fast as this machine goes: seconds say little")
    parser.add_argument("--pinned", action="store_true", help="two workers, a core each, unpaced")
    args = parser.parse_args()
    workers = 2 if args.pinned else args.workers
    model = bench_model("tiny")
    named = (args.policies or ",".join(POLICIES)).format(half=max(1, workers // 2))
    names = list(dict.fromkeys(["static", *named.split(",")]))
    workloads = draw_workloads(args.requests or 12 * workers, workers, args.seeds, args.epochs, args.within_sd)
    memory = max(worker_memory(model, workers, requests, args.kv_share) for w in workloads for requests in w)
    pace = args.pace or max(24.0, 6.0 * workers)
    engine: dict[str, Any] = SIZES | {"worker_memory": memory, "pace": None if args.pinned or args.unpaced else pace}
    options = {"chunk": args.chunk, "max_slowdown": args.max_slowdown, "knowledge": args.knowledge}
    draws: list[list[dict[str, Summary]]] = []
    with flexfloor.Fleet.launch(model, workers=workers, **engine) as fleet, TemporaryDirectory() as folder:
        if args.pinned:
            pin(fleet)
        run(fleet, ["static"], workloads[0][0][: 4 * workers], chunk=args.chunk)  # warms up
        for number, workload in enumerate(workloads):
            draws.append(run_epochs(fleet, names, workload, Path(folder) / f"{number}.db", options))
    for epoch, results in enumerate(zip(*draws, strict=True)):
        title = f"{workers} workers, knowledge {args.knowledge}, epoch {epoch + 1} of {args.epochs}"
        Console().print(tabulate(results, names, title))
    if args.pinned:
        firsts = [workload[0] for workload in workloads]
        best = best_static(model, workers, memory, firsts)
        ours = [draw[0]["static"].throughput_tok_s for draw in draws]
        here = statistics.median(own / b for own, b in zip(ours, best, strict=True))
        print(f"static here against static with the engine's own settings, fast numerics: {here:.2f} of its tokens/s")
    found = [epoch for draw in draws for epoch in draw]
    hashes = all(len({(s.responses_sha256, s.logprobs_sha256) for s in own.values()}) == 1 for own in found)
    print(f"hashes equal: {hashes}")
    return 0 if hashes else 1


def best_static(model: Path, workers: int, memory: int, workloads: list[list[flexfloor.Request]]) -> list[float]:
    """Tokens per second of `static` as `make bench` finds it fastest: a slow baseline proves nothing."""
    with flexfloor.Fleet.launch(model, workers=workers, worker_memory=memory + 2**28, numerics="fast") as fleet:
        pin(fleet)
        run(fleet, ["static"], workloads[0])  # warms up
        return [run(fleet, ["static"], w)["static"].summary.throughput_tok_s for w in workloads]


def tabulate(results: Sequence[dict[str, Summary]], names: list[str], title: str) -> Table:
    """Ratios to `static`, median over the draws."""
    table = Table(title=f"{title}, ratios to static, median of {len(results)} draws")
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
