"""What the driver works out before it starts a worker: memory of each worker, ids that end a response."""

from __future__ import annotations

import json

from flexfloor.fleets.engine.arena import KVLayout
from flexfloor.fleets.engine.checkpoint import CheckpointInfo
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
