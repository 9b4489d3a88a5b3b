#!/usr/bin/env python3
"""Several epochs over a file of prompts, with a length history: what each made of the earlier ones.

python examples/epochs.py --model runs/models/tiny --prompts examples/prompts.jsonl --history runs/lengths.db
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import flexfloor
from flexfloor.ledger.accounting import Summary
from flexfloor.prompts import load_tokenizer, read_prompts
from flexfloor.world.lengths.metrics import score_last_epoch
from flexfloor.world.lengths.store import LengthHistory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL")
    parser.add_argument("--history", type=Path, required=True, help="made if there is none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args(arguments)
    prompts = read_prompts(args.prompts, load_tokenizer(args.model))
    with flexfloor.Fleet.launch(args.model, workers=args.workers) as fleet:
        for epoch in range(args.epochs):
            sampling = flexfloor.SamplingParams(max_tokens=args.max_tokens, step=epoch)
            requests = flexfloor.make_requests(prompts, samples=args.samples, sampling=sampling)
            result = flexfloor.rollout(fleet, requests, policy="flexfloor", history=args.history)
            # Here a trainer learns from result.responses, and fleet.load_weights takes its new weights.
            print(f"epoch {epoch}: {describe(result.summary)}; {describe_forecasts(args.history)}", flush=True)
    return 0


def describe(summary: Summary) -> str:
    workers = summary.occupied_iterations / summary.iterations
    return f"{summary.response_tokens} tokens in {summary.iterations} iterations, on {workers:.2f} workers in the mean"


def describe_forecasts(file: Path) -> str:
    """How far the forecasts at the start of the last epoch were off, with and without the earlier ones."""
    with LengthHistory(file) as history:
        observed = history.load()
    if len(set(observed.epoch.tolist())) < 2:
        return "nothing was known"
    scores = score_last_epoch(observed)
    known, nothing = scores["history"], scores["none"]
    return f"pinball loss of the forecasts {known.pinball:.1f} tokens, {nothing.pinball:.1f} without history"


if __name__ == "__main__":
    sys.exit(main())
