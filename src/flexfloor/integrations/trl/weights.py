"""The trainer's weights on their way into a fleet, and the check that they are the ones it generates with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint, open_tensors
from flexfloor.requests import Request, Response

MOST_GAP = 1e-3
"""Largest difference of two log-probabilities that float32 explains; stale weights are usually far above it."""


def policy_of(trainer: Any) -> torch.nn.Module:
    """The model that the trainer trains, without what accelerate wraps it in.

    Raises UnsupportedError for one whose weights are not all here, or not those it computes with.
    """
    if trainer.accelerator.num_processes > 1:
        raise UnsupportedError(
            f"the trainer runs in {trainer.accelerator.num_processes} processes, each with its own prompts; "
            "FlexFloor's rollout function serves one: start it without accelerate launch or torchrun"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            "the trainer trains a PEFT adapter; FlexFloor generates with full weights: train without peft_config, "
            "or merge the adapter first (merge_and_unload)"
        )
    return model


def fingerprint(model: torch.nn.Module, step: int) -> tuple[Any, ...]:
    """Changes with the trainer's step, and when a parameter is written to or replaced between two of them.

    The step is in it because fused optimizers write without counting up a tensor's version.
    """
    return step, *((p.data_ptr(), p._version) for p in model.parameters())


@torch.no_grad()
def logprob_gap(model: torch.nn.Module, requests: Sequence[Request], responses: Sequence[Response]) -> float:
    """Largest |log-probability that the fleet reported − the model's own| over the tokens of these responses.

    Both are log-softmax(logits / temperature), at temperature 0 unscaled; one forward a response, without padding.
    """
    device = next(model.parameters()).device
    worst = 0.0
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_tokens, *response.tokens]], device=device)
        first = len(request.prompt_tokens) - 1
        logits = model(input_ids=ids, use_cache=False).logits[0, first:-1].float()
        logits = logits / (request.sampling.temperature or 1.0)
        own = torch.log_softmax(logits, dim=-1).gather(1, ids[0, first + 1 :, None])[:, 0]
        gaps = (own - torch.from_numpy(response.logprobs).to(device)).abs()
        worst = max(worst, float(gaps.nan_to_num(nan=float("inf")).max()))
    return worst


def check_gap(gap: float, model: torch.nn.Module, version: int) -> None:
    """Raises FlexFloorError for a gap that rounding does not explain. Low precision has none to hold it against."""
    if next(model.parameters()).dtype is torch.float32 and gap > MOST_GAP:
        raise FlexFloorError(
            f"weights of step {version}: log-probabilities of the fleet and of the trainer differ by {gap:.2g} "
            f"(at most {MOST_GAP:g}); the fleet does not generate with the weights that are trained"
        )


def check_resumed(model: torch.nn.Module, checkpoint: Path) -> None:
    """Raises FlexFloorError where the trainer has resumed without the checkpoint's experts.

    The library's model holds the experts of a layer in one tensor, its checkpoints one by one; its trainer's resume
    matches names and leaves experts as they were (seen in transformers 5.24), with a warning that is easy to miss.
    """
    info = inspect_checkpoint(checkpoint)
    own = dict(model.named_parameters())
    for (layer, expert, part), entry in info.experts.items():
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        if part == "down" and expert in (-1, 0) and name in own:
            with open_tensors(entry.file) as tensors:
                saved = tensors.get_tensor(entry.name)
            mine = own[name] if expert == -1 else own[name][0]
            if not torch.equal(mine.detach().cpu(), saved.to(mine.dtype)):
                raise FlexFloorError(
                    f"{checkpoint}: the trainer has resumed without its experts; load the model from that folder: "
                    f"AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}), then resume"
                )


def check_numerics(model: torch.nn.Module, dtype: str) -> None:
    """Raises InputError where trainer and fleet compute in different precisions."""
    own = str(next(model.parameters()).dtype).removeprefix("torch.")
    if own != dtype:
        raise InputError(f"the trainer's model is {own} and the fleet's {dtype}; launch the fleet with dtype={own!r}")
