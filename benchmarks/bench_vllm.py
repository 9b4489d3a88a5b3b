"""Throughput against vLLM on the CPU: the same random model, the same requests, one thread a worker on both sides.

    make bench-vllm       # about 15 minutes on two cores; vLLM lives in an environment of its own

One worker against one vLLM engine, two expert-parallel workers against vLLM's DP=2 with expert parallelism. FlexFloor
runs before and after vLLM, so that a slow spell of the machine shows; medians are compared. Both return log-probs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from workload import bench_model, forced_requests, token_prompts

import flexfloor

VLLM_PYTHON = Path(".venv-vllm/bin/python")
RUN_VLLM = Path(__file__).parent / "against_vllm" / "run_vllm.py"
# preset → (concurrent requests, response tokens, worker memory)
LOADS = {"tiny": (64, 128, "512MiB"), "small": (32, 24, "4GiB")}
WANTED = {1: 1.0, 2: 2.0}


def run_flexfloor(model: Path, workers: int, prompts: list[list[int]], tokens: int, memory: str) -> list[float]:
    """Tokens per second of three rollouts after one that warms up."""
    requests = forced_requests(prompts, tokens)
    with flexfloor.Fleet.launch(model, workers=workers, numerics="fast", worker_memory=memory) as fleet:
        return [flexfloor.rollout(fleet, requests).summary.throughput_tok_s for _ in range(4)][1:]


def run_vllm(model: Path, workers: int, prompts: list[list[int]], tokens: int, folder: Path) -> dict:
    """The result of run_vllm.py. Raises SystemExit when it fails."""
    requests, out = folder / "requests.json", folder / f"vllm-{workers}.json"
    load = {"prompts": prompts, "max_tokens": [tokens] * len(prompts), "concurrency": len(prompts)}
    requests.write_text(json.dumps(load))
    command = [str(VLLM_PYTHON), str(RUN_VLLM), "--model", str(model), "--requests", str(requests)]
    done = subprocess.run([*command, "--workers", str(workers), "--out", str(out)], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=sorted(LOADS), help="model (default: all)")
    parser.add_argument("--workers", action="append", type=int, choices=sorted(WANTED), help="default: 1 and 2")
    args = parser.parse_args()
    if not VLLM_PYTHON.exists():
        print(f"{VLLM_PYTHON} is missing; run this through `make bench-vllm`", file=sys.stderr)
        return 2
    table = Table(
        "model", "workers", "FlexFloor tok/s", "vLLM tok/s", "ratio", "wanted", title="one thread a worker, float32"
    )
    for preset in args.preset or list(LOADS):
        model = bench_model(preset)
        count, tokens, memory = LOADS[preset]
        prompts = token_prompts(count, 32, json.loads((model / "config.json").read_text())["vocab_size"])
        for workers in args.workers or list(WANTED):
            speeds = run_flexfloor(model, workers, prompts, tokens, memory)
            theirs = run_vllm(model, workers, prompts, tokens, model.parent.parent)["tokens_per_s"]
            speeds += run_flexfloor(model, workers, prompts, tokens, memory)
            ours = statistics.median(speeds)
            row = (preset, workers, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}", WANTED[workers])
            table.add_row(*map(str, row))
            print(*row, f"(FlexFloor's runs: {', '.join(f'{s:.0f}' for s in speeds)})", file=sys.stderr)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
