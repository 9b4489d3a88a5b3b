"""What the driver works out before it starts a worker: memory of each worker, ids that end a response,
and whether a request can run at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flexfloor.errors import InputError
from flexfloor.fleets.engine.arena import KVLayout
from flexfloor.fleets.engine.checkpoint import CheckpointInfo
from flexfloor.requests import Request
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.memory import MemoryPlan, activation_reserve


def plan_memory(
    info: CheckpointInfo, placement: ExpertPlacement, workers: int, settings: EngineSettings
) -> list[MemoryPlan]:
    """The memory plan of each worker."""
    shape, itemsize = info.shape, info.dtype.itemsize
    layout = KVLayout(shape.layers, info.kv_heads, settings.page_tokens, info.head_dim)
    reserve = activation_reserve(
        rows=settings.prefill_tokens + settings.max_batch,
        logit_rows=settings.max_batch,
        hidden=info.hidden,
        widest=max(info.intermediate, getattr(info.config, "intermediate_size", 0) or 0),
        vocab=shape.vocab_size,
        top_k=shape.top_k,
        workers=workers,
        itemsize=itemsize,
    )
    return [
        MemoryPlan(
            worker_memory=settings.worker_memory,
            dense=shape.dense_bytes,
            reserve=reserve,
            slot=shape.expert_bytes,
            slots=placement.slots_on(worker),
            page=layout.page_bytes(itemsize),
            page_tokens=settings.page_tokens,
        )
        for worker in range(workers)
    ]


def read_eos_token_ids(info: CheckpointInfo) -> frozenset[int]:
    """Token ids that end a response: those of generation_config.json, else of config.json."""
    ids = None
    file = info.path / "generation_config.json"
    if file.exists():
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if ids is None:
        ids = getattr(info.config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def check_request(request: Request, info: CheckpointInfo, memory: Sequence[MemoryPlan]) -> None:
    """Raises InputError for a request that no worker could run, even alone."""
    shape, length = info.shape, len(request.prompt_tokens)
    if length >= shape.max_context:
        raise InputError(
            f"request {request.request_id}: prompt of {length} tokens leaves no room in the model's context of "
            f"{shape.max_context} tokens; shorten it"
        )
    if not all(0 <= token < shape.vocab_size for token in request.prompt_tokens):
        raise InputError(
            f"request {request.request_id}: a prompt token is outside the vocabulary of {shape.vocab_size}"
        )
    if request.sampling.stop and not has_tokenizer(info.path):
        raise InputError(f"{info.path}: has no tokenizer, which stop strings need; use stop token ids")
    longest = total_tokens(request, info)
    for plan in memory:
        plan.check(longest)


def total_tokens(request: Request, info: CheckpointInfo) -> int:
    """Most tokens that a request can have, prompt and response."""
    return min(len(request.prompt_tokens) + request.sampling.max_tokens, info.shape.max_context)


def has_tokenizer(path: Path) -> bool:
    return any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def check_device(settings: EngineSettings, workers: int, local: bool = True) -> None:
    """Raises InputError for a device that is not there, or a transport that does not go with it.

    local: all workers are on this machine and see its devices; else who starts them knows what there is."""
    if (settings.resolved_transport == "nccl") != (settings.device == "cuda"):
        choices = "nccl" if settings.device == "cuda" else "socket or gloo"
        told = f"transport {settings.transport!r} does not go with device {settings.device}; use {choices}"
        raise InputError(told, settings=("transport", "device"))
    if settings.device != "cuda" or not local:
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError("device is cuda, but torch sees no GPU; use `device` cpu", settings=("device",))
    if torch.cuda.device_count() < workers:
        raise InputError(
            f"{workers} workers need {workers} GPUs, there are {torch.cuda.device_count()}; give fewer workers",
            settings=("workers",),
        )
