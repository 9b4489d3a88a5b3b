"""The options of the rollout: `actor_rollout_ref.rollout.custom`, and what verl's own options mean for a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from flexfloor.errors import InputError, UnsupportedError
from flexfloor.fleet import load_plugin
from flexfloor.policy import make_policy
from flexfloor.settings import EngineSettings, Settings, explain, unknown_key
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.lengths.store import load_history
from flexfloor.world.profiles import load_profile

CUSTOM = "actor_rollout_ref.rollout.custom"
"""Where the options stand in verl's config."""

SAMPLER = ("pkg://flexfloor.integrations.verl.sampler", "FlexFloorSampler")
"""Path and name of the sampler, as verl's config wants them."""

_BY_VERL = {
    "workers": "data_parallel_size",
    "seed": "seed",
    "dtype": "dtype",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "samples": "n",
    "max_tokens": "response_length",
}
"""Settings of FlexFloor that have a name in verl already: ours → the key of `actor_rollout_ref.rollout`."""


class RolloutOptions(Settings):
    """Everything that may stand under `rollout.custom`, beside the fields of EngineSettings."""

    policy: str = Field("flexfloor", description="static, static-grouped, planned, release, fixed:N or flexfloor")
    knowledge: Literal["auto", "none", "history", "shuffled"] = Field(
        "auto", description="what the policy knows of lengths; auto: the history where there is one"
    )
    history: str | None = Field(
        "auto",
        description="file of the length history; auto: length_history.sqlite in trainer.default_local_dir; null: none",
    )
    max_slowdown: float = Field(0.02, ge=0, lt=1, description="share of throughput that releasing workers may cost")
    min_workers: int = Field(1, ge=1, description="workers that are never released")
    chunk: int = Field(16, ge=1, description="iterations between two looks of the driver")
    ledgers: Path | None = Field(None, description="folder for a ledger of every rollout")
    consumer: str | None = Field(
        None, description="module:class of a Ray actor that runs on what a released worker frees"
    )
    consumer_gpus: float = Field(0.5, ge=0, le=1, description="share of the worker's device that a consumer reserves")
    consumer_grace_s: float = Field(2.0, ge=0, description="seconds from asking a consumer to stop to its end")


class VerlSettings(Settings):
    """A rollout config of verl, read: what the server needs. Plain data, which travels between processes."""

    model: str
    workers: int
    seed: int
    ignore_eos: bool
    prompt_length: int
    response_length: int
    sleeps: bool
    options: RolloutOptions
    engine: EngineSettings


def read_config(rollout: Any, model: str, device: str) -> VerlSettings:
    """rollout: verl's RolloutConfig. model: checkpoint folder. device: name of verl's device.

    Raises InputError for an option that is not known or not good, UnsupportedError for one that would be ignored.
    """
    check_supported(rollout)
    options, engine = split_options(rollout.custom or {})
    engine.setdefault("max_batch", rollout.max_num_seqs)
    engine.setdefault("device", "cuda" if device == "cuda" else "cpu")
    return VerlSettings(
        model=model,
        workers=rollout.data_parallel_size,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
        sleeps=rollout.free_cache_engine,
        options=_parse(RolloutOptions, options),
        engine=_parse(EngineSettings, engine | {"dtype": engine_dtype(rollout.dtype)}),
    )


def split_options(custom: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the rollout, options of the engine). Raises InputError for a key that is neither."""
    options: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in custom.items():
        if name in _BY_VERL:
            raise InputError(f"{CUSTOM}.{name}: verl has it; set actor_rollout_ref.rollout.{_BY_VERL[name]}")
        if name in RolloutOptions.model_fields:
            options[name] = value
        elif name in EngineSettings.model_fields:
            engine[name] = value
        else:
            known = [*RolloutOptions.model_fields, *EngineSettings.model_fields]
            raise InputError(f"{CUSTOM}: {unknown_key(name, [k for k in known if k not in _BY_VERL])}")
    return options, engine


def check_supported(rollout: Any) -> None:
    """Raises UnsupportedError for an option of verl's that would not do what it says, naming the remedy."""
    where = "actor_rollout_ref.rollout"
    workers = rollout.data_parallel_size
    refused = {
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size not in (None, 1),
        "pipeline_model_parallel_size": rollout.pipeline_model_parallel_size not in (None, 1),
        "expert_parallel_size": rollout.expert_parallel_size not in (None, 1, workers),
        "enable_rollout_routing_replay": bool(rollout.enable_rollout_routing_replay),
        "quantization": rollout.quantization is not None,
        "layered_summon": bool(rollout.layered_summon),
    }
    remedies = {
        "tensor_model_parallel_size": "set it to 1; data_parallel_size is the number of workers",
        "pipeline_model_parallel_size": "set it to 1",
        "expert_parallel_size": f"set it to data_parallel_size ({workers}) or 1; workers always share the experts",
        "enable_rollout_routing_replay": "set it to False; routed experts are not put out",
        "quantization": "leave it out; the fleet computes in rollout.dtype",
        "layered_summon": "set it to False; adapters are merged before they get here",
    }
    for name, wrong in refused.items():
        if wrong:
            raise UnsupportedError(f"{where}.{name} is {getattr(rollout, name)!r}; {remedies[name]}")


def check_run(config: Any) -> None:
    """config: verl's whole config. Raises UnsupportedError for a trainer that generates otherwise than in steps."""
    mode = config.trainer.v1.trainer_mode
    if not config.trainer.use_v1 or mode != "sync":
        raise UnsupportedError(
            f"trainer.use_v1={config.trainer.use_v1}, trainer.v1.trainer_mode={mode!r}; FlexFloor serves "
            "synchronous rollouts: set trainer.use_v1=True and trainer.v1.trainer_mode=sync"
        )
    groups = config.algorithm.get("filter_groups", None)
    if groups is not None and groups.get("enable", False):
        raise UnsupportedError(
            "algorithm.filter_groups.enable=True refills a step with further rollouts, which FlexFloor's sampler does "
            "not do: set it to False"
        )
    sampler = (config.trainer.v1.get("sampler") or {}).get("custom_sampler") or {}
    if not sampler.get("name"):
        raise UnsupportedError(
            "trainer.v1.sampler.custom_sampler is not set; with verl's own no metrics are logged, and samples come in "
            f"the order in which they end: set path={SAMPLER[0]} and name={SAMPLER[1]}"
        )
    rollout = config.actor_rollout_ref.rollout
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if rollout.data_parallel_size != world:
        raise UnsupportedError(
            f"actor_rollout_ref.rollout.data_parallel_size is {rollout.data_parallel_size} and there are {world} "
            f"trainer workers; one fleet serves them all: set it to {world}"
        )


def check_options(settings: VerlSettings) -> None:
    """What can be refused before a fleet starts. Raises InputError."""
    options, engine = settings.options, settings.engine
    if engine.release == "end":
        raise UnsupportedError(f"{CUSTOM}.release is 'end'; under verl a released worker is parked: leave it out")
    if options.knowledge in ("history", "shuffled") and options.history is None:
        raise InputError(f"{CUSTOM}.knowledge is {options.knowledge!r} and needs {CUSTOM}.history: give a file or auto")
    if options.min_workers > settings.workers:
        raise InputError(f"{CUSTOM}.min_workers is {options.min_workers}, more than the {settings.workers} workers")
    with _told_as("profile"):
        profile = load_profile(engine.resolved_profile)
    with _told_as("policy"):
        make_policy(
            options.policy,
            lengths=make_lengths("none"),
            max_slowdown=options.max_slowdown,
            min_workers=options.min_workers,
            workers=settings.workers,
            profile=profile,
        )
    if options.history not in (None, "auto"):
        with _told_as("history"):
            load_history(Path(options.history))
    load_plugin("flexfloor.launchers", engine.launcher)
    if engine.launcher != "local":
        raise UnsupportedError(
            f"{CUSTOM}.launcher is {engine.launcher!r}; under verl the fleet runs where the training does: leave it out"
        )


@contextmanager
def _told_as(key: str) -> Iterator[None]:
    """What is refused inside the block is told as the fault of this option."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{CUSTOM}.{key}: {error}") from None


def _parse(kind: type[Any], values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValidationError as error:
        field, message = explain(error)
        where = "actor_rollout_ref.rollout.dtype" if field == ("dtype",) else f"{CUSTOM}.{'.'.join(field)}"
        raise InputError(f"{where}: {message}") from None


def engine_dtype(name: str) -> str:
    """verl's word for a precision as ours."""
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}.get(
        name, name
    )
