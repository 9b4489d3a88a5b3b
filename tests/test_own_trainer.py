"""The example of a trainer without TRL: it learns, and the log-probabilities it gets are its own model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import own_trainer
import pytest
import torch
from conftest import SIZES
from make_tiny_model import make_tiny_model

from flexfloor.world.lengths.store import LengthHistory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "short", **SIZES["qwen3_moe"] | {"mean_tokens": 30})


def test_it_learns_and_its_lengths_are_remembered(model: Path, tmp_path: Path) -> None:
    texts, history = ["one", "two", "three"], tmp_path / "lengths.sqlite"
    options: dict[str, Any] = {
        "samples": 4,
        "max_tokens": 48,
        "workers": 2,
        "worker_memory": "64MiB",
        "learning_rate": 1e-3,
    }
    steps = list(own_trainer.train(model, texts, lambda text: 1 / (1 + len(text)), steps=6, history=history, **options))
    rewards = [reward for reward, _ in steps]
    assert np.mean(rewards[-2:]) > 1.5 * np.mean(rewards[:2])
    assert [result.summary.step for _, result in steps] == list(range(6))
    with LengthHistory(history, create=False) as lengths:
        observed = lengths.load()
    assert observed.policy_version.tolist() == [step for step in range(6) for _ in range(12)]


def test_the_loss_takes_the_tokens_that_were_sampled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step the model's own log-probabilities, recomputed by the loop, are those of the fleet."""
    own: list[torch.Tensor] = []
    gather = torch.Tensor.gather

    def watched(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        own.append(gather(self, *args, **kwargs).detach())  # type: ignore[arg-type]
        return gather(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "gather", watched)
    (_, result), *_ = own_trainer.train(model, ["one"], len, steps=1, samples=3, max_tokens=16, worker_memory="64MiB")
    assert len(own) >= 3
    by_size = [o[:, 0].numpy() for o in own if o.dim() == 2 and o.shape[1] == 1][-3:]
    for response, mine in zip(result.responses, by_size, strict=True):
        np.testing.assert_allclose(response.logprobs, mine, atol=1e-4)
