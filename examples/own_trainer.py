#!/usr/bin/env python3
"""A trainer of one's own, without TRL: GRPO in one loop, generation by an elastic fleet.

The reward here wants short responses: something that a random model learns in a minute, so that the loop can be seen
at work. Everything of FlexFloor is in `train`: launch a fleet, give it the weights, ask it for responses.

    make setup
    .venv/bin/python examples/make_tiny_model.py --out runs/models/short --mean-tokens 40
    .venv/bin/python examples/own_trainer.py runs/models/short
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flexfloor


def train(
    folder: Path, texts: Sequence[str], reward: Callable[[str], float], *, steps: int = 8, samples: int = 8,
    max_tokens: int = 64, learning_rate: float = 3e-4, history: Path | None = None, **fleet_options: Any,
) -> Iterator[tuple[float, flexfloor.RolloutResult]]:  # fmt: skip
    """Yields after every step its mean reward and its rollout."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    prompts = [flexfloor.Prompt(tuple(tokenizer(text)["input_ids"])) for text in texts]
    with flexfloor.Fleet.launch(folder, **fleet_options) as fleet:
        for step in range(steps):
            fleet.load_weights(model.named_parameters(), version=step)
            sampling = flexfloor.SamplingParams(max_tokens=max_tokens, step=step)
            requests = flexfloor.make_requests(prompts, samples=samples, sampling=sampling)
            result = flexfloor.rollout(fleet, requests, policy="flexfloor", history=history)

            rewards = torch.tensor([float(reward(tokenizer.decode(r.tokens))) for r in result.responses])
            groups = rewards.view(len(prompts), samples)
            advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
            for request, response, advantage in zip(requests, result.responses, advantages, strict=True):
                tokens = torch.tensor(response.tokens)
                ids = torch.cat([torch.tensor(request.prompt_tokens), tokens])[None]
                logits = model(ids).logits[0, len(request.prompt_tokens) - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])
                (-advantage * logprobs.sum() / result.summary.response_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(rewards.mean()), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint with a tokenizer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--history", type=Path, help="length history, an SQLite file")
    options = parser.parse_args()
    texts = [f"Tell me about the number {number}." for number in range(4)]
    steps = train(
        options.model, texts, lambda text: 1 / (1 + len(text)), steps=options.steps, history=options.history,
        workers=options.workers, worker_memory="256MiB",
    )  # fmt: skip
    for step, (reward, result) in enumerate(steps):
        summary = result.summary
        print(
            f"step {step}: reward {reward:.4f}, {summary.response_tokens} tokens, "
            f"{summary.tokens_per_occupied_s:.0f} tokens per occupied s",
            flush=True,
        )


if __name__ == "__main__":
    main()
