"""A tiny checkpoint, and a rollout server on it without Ray: the class that the actor is made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from make_tiny_model import make_tiny_model

from flexfloor.integrations.verl.server import RolloutServer
from flexfloor.integrations.verl.sessions import AnnouncedPrompt, Announcement
from flexfloor.integrations.verl.settings import RolloutOptions, VerlSettings
from flexfloor.settings import EngineSettings

torch.set_num_threads(1)
SIZES: dict[str, Any] = {
    "hidden": 128, "layers": 2, "experts": 8, "top_k": 2, "intermediate": 128, "heads": 4, "kv_heads": 2,
    "max_position": 256, "mean_tokens": 30,
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """models(seed) → a checkpoint; all have the same shapes."""
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            made[seed] = make_tiny_model(tmp_path_factory.mktemp("models") / str(seed), **SIZES, seed=seed)
        return made[seed]

    return make


@pytest.fixture
def serve(models: Callable[[int], Path], tmp_path: Path) -> Callable[..., Any]:
    """serve(policy, workers=2, …) → an open server, as an asynchronous context manager."""

    @asynccontextmanager
    async def open_server(policy: str = "flexfloor", workers: int = 2, **options: Any) -> AsyncIterator[RolloutServer]:
        given = {"history": None, "chunk": 4, "ledgers": tmp_path / "ledgers"} | options
        settings = VerlSettings(
            model=str(models(0)),
            workers=workers,
            seed=1,
            ignore_eos=False,
            prompt_length=64,
            response_length=64,
            sleeps=True,
            options=RolloutOptions(policy=policy, **given),
            engine=EngineSettings(worker_memory="48MiB"),
        )
        server = RolloutServer(settings)
        await server.launch()
        try:
            yield server
        finally:
            await asyncio.to_thread(server.fleet.close)

    return open_server


def announced(prompts: int, samples: int, step: int = 1, number: int = 0, split: Any = "train") -> Announcement:
    return Announcement(
        step,
        number,
        split,
        tuple(AnnouncedPrompt(f"uid-{number}-{p}", f"data:{p}", number, samples) for p in range(prompts)),
    )


def prompt_of(uid: str) -> list[int]:
    """A prompt for a uid of `announced`: of different lengths."""
    index = int(uid.rpartition("-")[2])
    return [5 + (7 * index + 3 * i) % 200 for i in range(3 + 11 * (index % 4))]
