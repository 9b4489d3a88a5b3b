"""The table [trl]: fields of TRL's GRPOConfig, checked, with the defaults that suit a run under FlexFloor."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flexfloor.errors import InputError
from flexfloor.integrations.trl.named import told
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.settings import TrainSettings
from flexfloor.settings import EngineSettings, explain, unknown_key

_GENERATES = "FlexFloor generates the responses; leave it out"
_ONE_PROCESS = "FlexFloor reads the weights of one trainer process; leave it out"
_NO_SAMPLING = "FlexFloor does not sample with it; leave it out"
OWNED: dict[str, str] = {
    "output_dir": "set output, beside model",
    "resume_from_checkpoint": "use the option --resume",
    "full_determinism": "set deterministic, beside model",
    "disable_tqdm": "set quiet, beside model",
    "eval_on_start": "set evaluate, beside model",
    "enable_jit_checkpoint": "a run that is stopped keeps a checkpoint anyway; leave it out",
    "use_vllm": _GENERATES,
    "use_transformers_continuous_batching": _GENERATES,
    "transformers_continuous_batching_config": _GENERATES,
    "use_transformers_paged": _GENERATES,
    "cache_implementation": _GENERATES,
    "max_tool_calling_iterations": "FlexFloor's rollouts have one turn, without tools; leave it out",
    "min_p": _NO_SAMPLING,
    "generation_kwargs": _NO_SAMPLING,
    "repetition_penalty": _NO_SAMPLING,
    "use_liger_kernel": "it replaces layers of the model, which the fleet would not follow; leave it out",
    "liger_kernel_config": "it replaces layers of the model, which the fleet would not follow; leave it out",
    "auto_find_batch_size": "GRPO needs whole groups in a batch; lower per_device_train_batch_size instead",
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "fsdp_config": _ONE_PROCESS,
    "parallelism_config": _ONE_PROCESS,
    "ds3_gather_for_generation": _ONE_PROCESS,
    "local_rank": _ONE_PROCESS,
}
"""Fields that FlexFloor sets or cannot carry out, with what to do instead; and all that begin with vllm_."""

_PRECISIONS: tuple[str, ...] = typing.get_args(EngineSettings.model_fields["dtype"].annotation)

_NEUTRAL: dict[str, tuple[Any, ...]] = {"min_p": (None,), "generation_kwargs": (None, {}), "repetition_penalty": (1.0,)}
"""Owned fields that may be given after all, as long as they say nothing."""


def check_owned(settings: TrainSettings, origin: Origin) -> None:
    """Raises InputError for a field of [trl] that FlexFloor owns or cannot carry out. Does not need TRL."""
    for name, value in settings.trl.items():
        remedy = OWNED.get(name) or (_GENERATES if name.startswith("vllm_") else None)
        if remedy is not None and value not in _NEUTRAL.get(name, ()):
            raise InputError(f"{origin.at(f'trl.{name}')} cannot be given: {remedy}")


def require_trl(config: Path) -> None:
    """Raises InputError where TRL is not installed. Does not load it."""
    for package in ("trl", "accelerate", "datasets"):
        if find_spec(package) is None:
            raise InputError(f"{config}: training needs {package}; pip install 'flexfloor[trl]'")


def grpo_fields(settings: TrainSettings, origin: Origin, *, eval_prompts: int) -> dict[str, Any]:
    """name → value of every field of GRPOConfig that is not owned: as given, else our default, else TRL's.

    Raises InputError naming the field for an unknown name or a value of a wrong type. Loads TRL.
    """
    import torch
    from trl import GRPOConfig

    known = {f.name: f for f in fields(GRPOConfig) if not _is_owned(f.name)}
    types = typing.get_type_hints(GRPOConfig)
    given: dict[str, Any] = {}
    for name, value in settings.trl.items():
        if _is_owned(name):
            continue  # neutral, see check_owned
        if name not in known:
            where = origin.changed(f"trl.{name}") or origin.config
            remedy = (
                unknown_key(name, known, "trl")
                if get_close_matches(name, known, 1)
                else (f"unknown key {name!r} in [trl]; it takes the fields of TRL's GRPOConfig")
            )
            raise InputError(f"{where}: {remedy}")
        given[name] = _check_type(origin, name, types[name], value)
    values: dict[str, Any] = {}
    for name, field in known.items():
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        values[name] = default.value if hasattr(default, "value") else default  # enumerations by their text
    values |= {"logging_steps": 1, "report_to": "tensorboard" if find_spec("tensorboard") else "none"}
    if not (given.get("use_cpu") is False or torch.cuda.is_available()):
        values |= {"use_cpu": True}
    if given.get("use_cpu", values["use_cpu"]):
        values |= {"bf16": False, "dataloader_pin_memory": False}
    values |= given
    if not isinstance(options := values["model_init_kwargs"], dict | None):  # TRL takes JSON in a text too
        raise InputError(f"{origin.at('trl.model_init_kwargs')}: model_init_kwargs is {options!r}; give a table")
    if (dtype := str((options or {}).get("dtype", "auto")).removeprefix("torch.")) not in _PRECISIONS:
        where = origin.at("trl.model_init_kwargs.dtype")
        raise InputError(f"{where}: dtype is {dtype!r}; give one of {', '.join(_PRECISIONS)}")
    if "per_device_eval_batch_size" not in given:
        values["per_device_eval_batch_size"] = _eval_batch(values, eval_prompts)
    return values


def _is_owned(name: str) -> bool:
    return name in OWNED or name.startswith("vllm_")


def _check_type(origin: Origin, name: str, hint: Any, value: Any) -> Any:
    # TRL takes true and false here beside the texts that its annotation names.
    wanted = hint | bool if name == "scale_rewards" else hint
    try:
        checked = TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise InputError(f"{origin.at(f'trl.{name}')}: {explain(error)[1]}") from None
    return checked.value if hasattr(checked, "value") else checked


def _eval_batch(values: Mapping[str, Any], eval_prompts: int) -> int:
    """As many responses in one rollout as in training, in whole groups, and not more than there are.

    A rollout is what gets cheaper with size; TRL's own default would cut an evaluation into rollouts of 8.
    """
    group = values["num_generations_eval"] or values["num_generations"]
    batch = values["generation_batch_size"] or values["per_device_train_batch_size"] * (
        values["steps_per_generation"] or values["gradient_accumulation_steps"]
    )
    return group * max(1, min(batch // max(1, group), eval_prompts))


def make_grpo_config(
    values: Mapping[str, Any], settings: TrainSettings, origin: Origin, *, evaluate_first: bool
) -> Any:
    """The GRPOConfig. Raises InputError for what TRL refuses."""
    from trl import GRPOConfig

    own: dict[str, Any] = {
        "output_dir": str(settings.output),
        "disable_tqdm": True,
        "eval_on_start": evaluate_first,
        "use_vllm": False,
    }
    try:
        return GRPOConfig(**values, **own)
    except Exception as error:  # ValueError mostly; the libraries below raise what they like
        raise refused_by_trl(error, origin) from error


def refused_by_trl(error: Exception, origin: Origin) -> InputError:
    """What TRL refuses, which names its fields by chance only."""
    from trl import GRPOConfig

    text = told(error)
    return InputError(f"{origin.named_in(text, 'trl', (f.name for f in fields(GRPOConfig)))}: {text}")


def check_sampling(args: Any, origin: Origin) -> None:
    """Raises InputError for what no response can be drawn with, before a worker is started."""
    from flexfloor.requests import SamplingParams

    if not args.max_completion_length or args.max_completion_length < 1:
        where = origin.at("trl.max_completion_length")
        raise InputError(f"{where}: max_completion_length is {args.max_completion_length}; give at least 1")
    try:
        SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or 0)
    except InputError as error:
        raise InputError(f"{origin.at(*(f'trl.{name}' for name in error.settings))}: {error}") from None


_BATCH = tuple(f"trl.{name}" for name in (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations",
))  # fmt: skip


def check_sizes(args: Any, settings: TrainSettings, origin: Origin, *, train: int, held_out: int) -> None:
    """See that there are prompts enough for one generation, where TRL would end at once without a step.

    train, held_out: prompts. Raises InputError.
    """
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        name = "max_steps" if args.max_steps == 0 else "num_train_epochs"
        raise InputError(f"{origin.at(f'trl.{name}')}: {name} is 0; there would be nothing to train, give more")
    batch, group = args.generation_batch_size, args.num_generations
    if args.per_device_train_batch_size < 1 or batch < 1:
        where = origin.at("trl.per_device_train_batch_size")
        raise InputError(f"{where}: per_device_train_batch_size is {args.per_device_train_batch_size}; give 1 or more")
    if train < batch // group:
        source = ("task.size",) if settings.task.train is None else ("task.train", "task.arguments")
        raise InputError(
            f"{origin.at(*source, *_BATCH)}: {train} training prompts are fewer than the {batch // group} of one "
            f"generation (generation_batch_size {batch} / num_generations {group}); add prompts, or lower "
            "per_device_train_batch_size, gradient_accumulation_steps or generation_batch_size in [trl]"
        )
    if not held_out:
        if args.eval_strategy != "no":
            where = origin.at("trl.eval_strategy")
            raise InputError(f"{where}: eval_strategy needs held-out prompts; give task.eval or task.eval_size")
        return
    group, size = args.num_generations_eval or group, args.per_device_eval_batch_size
    if size % group:
        where = origin.at("trl.per_device_eval_batch_size", "trl.num_generations_eval")
        raise InputError(
            f"{where}: per_device_eval_batch_size {size} is no multiple of the {group} responses to a held-out prompt "
            "(num_generations_eval or num_generations); leave it out"
        )
    if args.dataloader_drop_last and held_out * group < size:
        where = origin.at("trl.dataloader_drop_last", "trl.per_device_eval_batch_size")
        raise InputError(
            f"{where}: {held_out} held-out prompts do not fill one batch of per_device_eval_batch_size {size}, which "
            "dataloader_drop_last leaves out; add prompts or leave that out"
        )
