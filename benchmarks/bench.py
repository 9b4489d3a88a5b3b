"""Throughput of the engine, configurations side by side in one run; every figure is a ratio against its neighbour.

    python benchmarks/bench.py            # both models, about five minutes on two cores
    python benchmarks/bench.py --preset tiny --rounds 5

Fleets of all configurations stay up (an idle fleet uses no processor) and take turns, so that a slow spell of the
machine hits all of them; the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import bench_model, forced_requests, token_prompts

import flexfloor

# preset → (concurrent requests, response tokens, worker memory)
LOADS = {"tiny": (64, 96, "512MiB"), "small": (64, 24, "4GiB")}
CONFIGURATIONS = {
    "bitwise 1x1": {"workers": 1, "numerics": "bitwise"},
    "bitwise 2x1": {"workers": 2, "numerics": "bitwise"},
    "fast 1x1": {"workers": 1, "numerics": "fast"},
    "fast 2x1": {"workers": 2, "numerics": "fast"},
    "bitwise 1x1, block kernels": {"workers": 1, "numerics": "bitwise", "path": "blocks"},
}
RATIOS = {
    "2x1 against 1x1, bitwise": ("bitwise 2x1", "bitwise 1x1", 1.5),
    "2x1 against 1x1, fast": ("fast 2x1", "fast 1x1", 1.5),
    "bitwise against fast": ("bitwise 1x1", "fast 1x1", 0.75),
    "bitwise with block kernels against fast": ("bitwise 1x1, block kernels", "fast 1x1", 0.5),
}


def launch(model: Path, memory: str, workers: int, numerics: str, path: str | None = None) -> flexfloor.Fleet:
    """A fleet with one thread a worker; path forces a way of `bitwise`."""
    if path:
        os.environ["FLEXFLOOR_NUMERICS_PATH"] = path
    try:
        return flexfloor.Fleet.launch(model, workers=workers, numerics=numerics, worker_memory=memory)
    finally:
        os.environ.pop("FLEXFLOOR_NUMERICS_PATH", None)


def measure(preset: str, rounds: int) -> dict[str, float]:
    """Tokens per second of each configuration: median over rounds."""
    model = bench_model(preset)
    count, tokens, memory = LOADS[preset]
    speeds: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    with contextlib.ExitStack() as stack:
        fleets = {n: stack.enter_context(launch(model, memory, **options)) for n, options in CONFIGURATIONS.items()}  # type: ignore[arg-type]
        vocab = fleets["bitwise 1x1"].info.shape.vocab_size
        requests = forced_requests(token_prompts(count, 32, vocab), tokens)
        for turn in range(-1, rounds):
            for name, fleet in fleets.items():
                result = flexfloor.rollout(fleet, requests)
                if turn >= 0:  # the first turn warms up
                    speeds[name].append(result.summary.throughput_tok_s)
                print(
                    f"{preset}, round {turn + 1}: {name} {result.summary.throughput_tok_s:.0f} tok/s", file=sys.stderr
                )
    return {name: statistics.median(found) for name, found in speeds.items()}


def measure_start(workers: int = 4) -> dict[str, float]:
    """Seconds of each phase of a launch on the tiny model. The first one imports, the second one is measured."""
    model = bench_model("tiny")
    for _ in range(2):
        begin = time.monotonic()
        with flexfloor.Fleet.launch(model, workers=workers, worker_memory="512MiB") as fleet:
            seconds = {"total": time.monotonic() - begin, **fleet.info.start_s}
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=sorted(LOADS), help="model (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    console = Console()
    figures: dict[str, Any] = {}
    for preset in args.preset or list(LOADS):
        speeds = measure(preset, args.rounds)
        count, tokens, _ = LOADS[preset]
        table = Table(
            "configuration", "tok/s", title=f"{preset} model, {count} requests of {tokens} tokens, 1 thread a worker"
        )
        for name, speed in speeds.items():
            table.add_row(name, f"{speed:.0f}")
        ratios = Table("ratio", "measured", "wanted")
        for name, (a, b, wanted) in RATIOS.items():
            ratios.add_row(name, f"{speeds[a] / speeds[b]:.2f}", f"{wanted}")
        console.print(table, ratios)
        figures[preset] = {"tok_s": speeds, "ratios": {n: speeds[a] / speeds[b] for n, (a, b, _) in RATIOS.items()}}
    start = measure_start()
    console.print(f"start of 4 workers of the tiny model, after imports: {start['total']:.2f} s (wanted: below 10 s)")
    figures["start_s"] = start
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
