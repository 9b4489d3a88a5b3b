"""Shared fixtures: tiny random checkpoints made once a session, and prompts whose lengths differ much."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from make_tiny_model import make_tiny_model

import flexfloor
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.plan import plan_memory
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous

# How long an example takes says more about what else the machine does.
settings.register_profile("flexfloor", deadline=None)
settings.load_profile("flexfloor")

# Widths that are no multiple of 32, expert counts that no worker count divides; one ordinary model.
ODD = {
    "hidden": 72,
    "intermediate": 56,
    "experts": 7,
    "top_k": 2,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 12,
    "layers": 3,
    "mean_tokens": 300,
}
SIZES: dict[str, dict] = {
    "tiny": {"arch": "qwen3_moe"},
    "qwen3_moe": {"arch": "qwen3_moe", **ODD, "dense_layers": (1,), "tie_word_embeddings": True},
    "olmoe": {"arch": "olmoe", **ODD, "hidden": 56, "heads": 4, "head_dim": 14, "experts": 10, "clip_qkv": 2.0},
    "mixtral": {"arch": "mixtral", **ODD, "intermediate": 72},
}
# Two threads of this process next to the workers would wait for each other most of the time.
torch.set_num_threads(1)
# A shell that runs a job in the background has Ctrl-C ignored, and what is ignored is passed on to every process.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
ARCHITECTURES = ["qwen3_moe", "olmoe", "mixtral"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(name) → folder of the model that SIZES names."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(tmp_path_factory.mktemp("models") / name, **SIZES[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[flexfloor.Request]]:
    return make_requests


def make_requests(
    prompts: int = 8, samples: int = 3, max_tokens: int = 24, seed: int = 0, **sampling: object
) -> list[flexfloor.Request]:
    """Prompts of very different lengths, each with siblings; every second prompt is greedy, the rest are sampled."""
    rng = random.Random(seed)
    lengths = [1, 150, 17, 16, 33, 5, 70, 64]
    made = []
    for index in range(prompts):
        # Token 3 is the tokenizer's padding, which `generate` would mask out.
        tokens = tuple(rng.randrange(4, 250) for _ in range(lengths[index % len(lengths)]))
        options: dict = {"temperature": 0.8 if index % 2 else 0.0, "top_p": 0.9 if index % 4 == 1 else 1.0}
        params = flexfloor.SamplingParams(max_tokens=max_tokens + 7 * (index % 3), **{**options, **sampling})
        made += flexfloor.make_requests([tokens], samples=samples, sampling=params)
    return made


def smallest_memory(model: Path, workers: int, longest: int, **engine: int) -> int:
    """The smallest budget in which one request of `longest` tokens fits: several at once must push each other out."""
    info = inspect_checkpoint(model)
    placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, workers)
    plans = plan_memory(info, placement, workers, EngineSettings.parse(worker_memory="1GiB", **engine))
    plan = max(plans, key=lambda p: p.slots)
    need = -(-longest // plan.page_tokens) + 1
    memory = plan.dense + plan.reserve + plan.slots * plan.slot
    while replace(plan, worker_memory=memory).pages < need:
        memory += plan.page
    return memory
