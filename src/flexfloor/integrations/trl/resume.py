"""What may be other at a resume than when the run began, and the refusal of what may not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flexfloor.errors import InputError
from flexfloor.fleets.engine.checkpoint import CheckpointInfo, inspect_checkpoint
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.records import differences
from flexfloor.integrations.trl.tasks import Task

May = Literal["no", "without effect", "yes"]


@dataclass(frozen=True)
class Rule:
    """Whether these settings may be other at a resume. A table stands for all its keys."""

    settings: tuple[str, ...]
    may: May
    why: str

    def holds_for(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self.settings)


RULES: tuple[Rule, ...] = (
    Rule(("model",), "no", "checkpoints, lengths and rewards are that model's; its folder may have moved"),
    Rule(
        ("engine.dtype", "trl.model_init_kwargs.dtype"), "no", "weights and optimizer stay in the precision they have"
    ),
    Rule(("trl.optim", "trl.optim_args", "trl.optim_target_modules"), "no", "the optimizer's state is of its kind"),
    Rule(
        (
            "task.train", "task.arguments", "task.reasoning_gym", "task.size", "task.seed", "task.config",
            "task.prompt_template", "task.chat",
        ),
        "no",
        "a checkpoint knows its place among the prompts by number; settings that give the same prompts may differ",
    ),
    Rule(
        (
            "trl.per_device_train_batch_size", "trl.gradient_accumulation_steps", "trl.generation_batch_size",
            "trl.steps_per_generation", "trl.num_generations", "trl.num_iterations",
        ),
        "no",
        "a checkpoint knows its place among the prompts by batches of this size",
    ),
    Rule(("trl.seed", "trl.data_seed", "trl.shuffle_dataset"), "no", "the order of the prompts hangs on it"),
    Rule(
        ("trl.learning_rate", "trl.weight_decay", "trl.adam_beta1", "trl.adam_beta2", "trl.adam_epsilon"),
        "without effect",
        "the checkpoint's optimizer goes on",
    ),
)  # fmt: skip
"""What no rule names may be other, and counts after the resume."""


def rule_for(key: str) -> Rule | None:
    """The rule for `table.key`, None for what may be other."""
    return next((rule for rule in RULES if rule.holds_for(key)), None)


def identity(info: CheckpointInfo, task: Task) -> dict[str, str]:
    """What a run begins with, as digests that do not hang on where it lies."""
    folder = info.path
    weights = {entry.file for entry in (*info.dense.values(), *info.experts.values())}
    tokenizer = [p for p in sorted(folder.iterdir()) if p.name in _TOKENIZER]
    prompts = hashlib.sha256(json.dumps([row["prompt"] for row in task.train]).encode())
    return {
        "model": str(folder.resolve()),
        "weights": _digest(sorted(weights), _samples),
        "tokenizer": _digest(tokenizer, Path.read_bytes),
        "prompts": prompts.hexdigest(),
    }


_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_SAMPLES, _SAMPLE = 16, 2**16


def _samples(file: Path) -> bytes:
    """Size and some of the content: weights are too large to be read for this, and other weights are other all over."""
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as opened:
        for index in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE) * index // (_SAMPLES - 1))
            parts.append(opened.read(_SAMPLE))
    return b"".join(parts)


def _digest(files: list[Path], content: Any) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content(file)).digest())
    return digest.hexdigest()


def read_identity(file: Path) -> dict[str, str] | None:
    """None where there is none, as of a run by an earlier version."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def check_resumed_settings(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    info: CheckpointInfo,
    checkpoint: Path,
    *,
    began: Mapping[str, str] | None,
    now: Mapping[str, str],
    origin: Origin,
) -> None:
    """See that what the checkpoint goes on with is what the run began with.

    old, new: resolved configs. info: of the model that is given now. began, now: see `identity`; began is None where
    the run has not kept it. Raises InputError naming the setting, both values and the remedy.
    """
    remedy = "or name another output to begin a new run"
    if other := _other_model(old, info, checkpoint, began, now):
        was = old.get("model") if began is None else began.get("model")
        raise InputError(
            f"{origin.at('model')}: {info.path} is not the model that the run in {checkpoint.parent} began with, "
            f"{was} ({other}); give that one, {remedy}"
        )
    same_prompts = began is not None and began.get("prompts") == now["prompts"]
    for key, before, after in _differences(old, new, info):
        rule = rule_for(key)
        if rule is None or rule.may != "no" or key == "model" or (key.startswith("task.") and same_prompts):
            continue
        keys = rule.settings if key == "engine.dtype" else (key,)
        raise InputError(
            f"{origin.at(*keys)}: {key} is {_shown(after)}, but {_shown(before)} in the run that {checkpoint.parent} "
            f"holds ({rule.why}); give it as it was, {remedy}"
        )


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], info: CheckpointInfo
) -> Iterator[tuple[str, Any, Any]]:
    """As of the configs, with one precision for the settings that come to it."""
    before, after = (precision(config, info) for config in (old, new))
    if before != after:
        yield "engine.dtype", before, after
    for key, *values in differences(old, new):
        if key != "engine.dtype" and not key.startswith("trl.model_init_kwargs"):
            yield key, *values


def precision(config: Mapping[str, Any], info: CheckpointInfo) -> str:
    """Name of the type that the model of a config computes in. info: of its checkpoint, by its own type."""
    options = config.get("trl", {}).get("model_init_kwargs") or {}
    wanted = str(options.get("dtype") or config.get("engine", {}).get("dtype") or "auto").removeprefix("torch.")
    return str(info.dtype).removeprefix("torch.") if wanted == "auto" else wanted


_SHAPE = ("model_type", "layers", "moe_layers", "experts", "top_k", "hidden", "vocab_size", "max_context")
_OF_INFO = ("intermediate", "kv_heads", "head_dim")


def _other_model(
    old: Mapping[str, Any],
    info: CheckpointInfo,
    checkpoint: Path,
    began: Mapping[str, str] | None,
    now: Mapping[str, str],
) -> str:
    """How the model differs from the run's, empty where it does not."""
    saved = inspect_checkpoint(checkpoint)
    pairs = [(name, getattr(saved.shape, name), getattr(info.shape, name)) for name in _SHAPE]
    pairs += [(name, getattr(saved, name), getattr(info, name)) for name in _OF_INFO]
    if shapes := [f"{name} {now_!r} instead of {then!r}" for name, then, now_ in pairs if then != now_]:
        return ", ".join(shapes[:3])
    if began is not None:
        words = {"weights": "other weights", "tokenizer": "another tokenizer"}
        return " and ".join(word for name, word in words.items() if began.get(name) != now[name])
    return "" if Path(str(old.get("model"))).resolve() == info.path.resolve() else "another folder"
