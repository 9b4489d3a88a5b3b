"""A checkpoint: whether it is complete and of a kind that runs here, and the memory that workers need for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flexfloor.doctor.findings import Finding
from flexfloor.world.memory import format_bytes, format_up


def check_model(model: Path, workers: int) -> Iterator[Finding]:
    """Whether a checkpoint is complete and of a kind we run, its sizes, and the memory that workers need."""
    from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
    from flexfloor.fleets.engine.plan import plan_memory
    from flexfloor.prompts import load_tokenizer
    from flexfloor.settings import EngineSettings
    from flexfloor.world.experts import place_contiguous

    info = inspect_checkpoint(model)
    shape = info.shape
    yield Finding("ok", "model", f"{shape.model_type}, checkpoint complete, {str(info.dtype).removeprefix('torch.')}")
    yield Finding(
        "ok",
        "sizes",
        f"{shape.layers} layers ({len(shape.moe_layers)} with experts), {shape.experts} experts top-{shape.top_k}, "
        f"vocabulary {shape.vocab_size}, context {shape.max_context}",
    )
    yield Finding(
        "ok",
        "bytes",
        f"dense {format_bytes(shape.dense_bytes)} on every worker, experts {format_bytes(shape.all_expert_bytes)} "
        f"shared out, KV {format_bytes(shape.kv_token_bytes)} a token",
    )
    least, whole = [], []
    for count in range(1, min(workers, shape.experts) + 1):
        placement = place_contiguous(len(shape.moe_layers), shape.experts, count)
        plans = plan_memory(info, placement, count, EngineSettings())
        least.append(format_up(max(plan.least() for plan in plans)))
        whole.append(format_up(max(plan.least(shape.max_context) for plan in plans)))
    of = "1 worker" if len(least) == 1 else f"1 … {len(least)} workers"
    text = f"at least {', '.join(least)}; for a request of the whole context {', '.join(whole)}"
    yield Finding("ok", "memory each", f"--worker-memory of {of} {text}")
    tokenizer = load_tokenizer(model)
    chat = "with" if getattr(tokenizer, "chat_template", None) else "without"
    if tokenizer is None:
        yield Finding("note", "tokenizer", "none; prompts must be prompt_tokens")
    else:
        yield Finding("ok", "tokenizer", f"{len(tokenizer)} tokens, {chat} chat template")
