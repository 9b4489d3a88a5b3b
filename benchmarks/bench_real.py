"""Real text: the SmolLM2 mixture of experts against stock transformers, rightness first, then speed.

    make demo-real      # builds the model
    python benchmarks/bench_real.py --model runs/models/smollm2-moe

1. Ten prompts, greedy, 1 and 2 workers: log-probs, greedy choices and `generate` must agree, and both runs' bits.
2. Batch 32 on two cores: 2 workers with one thread each against `generate` with two threads, taking turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Self

import flexfloor
from flexfloor.prompts import load_tokenizer, read_prompts

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from check_against_transformers import compare  # noqa: E402

GENERATE = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model, batch, tokens, pad = json.loads(sys.stdin.readline())
torch.set_num_threads(2)
stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
width = max(map(len, batch))
ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
print("ready", flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    with torch.inference_mode():
        stock.generate(ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=True, top_k=0)
    print(len(batch) * tokens / (time.perf_counter() - begin), flush=True)
"""


def check(model: Path, prompts: list[flexfloor.Prompt], tokens: int, memory: str) -> bool:
    sampling = flexfloor.SamplingParams(max_tokens=tokens, temperature=0)
    requests = flexfloor.make_requests(prompts[:10], sampling=sampling)
    hashes = set()
    for workers in (1, 2):
        with flexfloor.Fleet.launch(model, workers=workers, worker_memory=memory) as fleet:
            result = flexfloor.rollout(fleet, requests)
        hashes.add((result.summary.responses_sha256, result.summary.logprobs_sha256))
    agreement = compare(model, requests, result.responses)
    print(f"1 and 2 workers give the same bits: {len(hashes) == 1}; against stock transformers: {agreement}")
    return agreement.holds and len(hashes) == 1


def race(model: Path, prompts: list[flexfloor.Prompt], tokens: int, memory: str, rounds: int) -> float:
    """Tokens per second over those of `generate`: median of rounds."""
    batch = [list(p.tokens) for p in prompts[:32]]
    assert len(batch) == 32, "the speed is measured at batch 32"
    sampling = flexfloor.SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = flexfloor.make_requests(batch, sampling=sampling)
    ours, theirs = [], []
    with (
        _Generate(model, batch, tokens) as stock,
        flexfloor.Fleet.launch(model, workers=2, worker_memory=memory) as fleet,
    ):
        for turn in range(rounds):
            ours.append(flexfloor.rollout(fleet, requests).summary.throughput_tok_s)
            theirs.append(stock.run())
            print(f"round {turn + 1}: FlexFloor {ours[-1]:.1f} tok/s, generate {theirs[-1]:.1f} tok/s", flush=True)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


class _Generate:
    """Stock `generate` with two threads in a process of its own, run on demand."""

    def __init__(self, model: Path, batch: list[list[int]], tokens: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", GENERATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._ask(json.dumps([str(model), batch, tokens, 0]))

    def run(self) -> float:
        """Tokens per second of one batch."""
        return float(self._ask("run"))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/models/smollm2-moe"))
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "chat_prompts.jsonl")
    parser.add_argument("--check-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker-memory", default="5GiB")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, load_tokenizer(args.model))
    right = check(args.model, prompts, args.check_tokens, args.worker_memory)
    ratio = race(args.model, prompts, args.tokens, args.worker_memory, args.rounds)
    print(f"batch 32, two cores: {ratio:.2f} x the tokens per second of generate (wanted: 1.5)")
    return 0 if right and ratio >= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
