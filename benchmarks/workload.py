"""Workloads of the benchmarks: models made on the spot, requests with forced lengths."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import flexfloor

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from make_tiny_model import PRESETS, make_tiny_model  # noqa: E402

MODELS = Path("runs/bench/models")


def bench_model(preset: str) -> Path:
    """The random model of a preset of examples/make_tiny_model.py, made once."""
    folder = MODELS / preset
    if not (folder / "config.json").exists():
        print(f"making the {preset} model in {folder}", file=sys.stderr, flush=True)
        make_tiny_model(folder, **PRESETS[preset])
    return folder


def token_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` different prompts of `length` random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(4, vocab) for _ in range(length)] for _ in range(count)]


def forced_requests(prompts: list[list[int]], tokens: int, temperature: float = 1.0) -> list[flexfloor.Request]:
    """Every response gets exactly `tokens` tokens."""
    sampling = flexfloor.SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    return flexfloor.make_requests(prompts, sampling=sampling)
