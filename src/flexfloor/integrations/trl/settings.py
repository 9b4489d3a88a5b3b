"""The config file of `flexfloor train`: what may stand in it, and what is wrong with one that cannot be used."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from flexfloor.errors import InputError
from flexfloor.integrations.trl.origin import Origin
from flexfloor.settings import EngineSettings, Settings, explain, read_toml, unknown_key


def _listed(value: Any) -> Any:
    """'a' → ('a',). Other types pass through for pydantic to judge."""
    return (value,) if isinstance(value, str) else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_listed)]

OF_FILES = ("train", "eval", "arguments", "eval_arguments")
OF_REASONING_GYM = ("size", "seed", "eval_size", "config", "prompt_template", "chat")
"""Fields of [task] that one source of prompts takes and the other does not."""


class TaskSettings(Settings):
    """What is trained on: prompts and what their responses are worth."""

    train: str | None = Field(
        None,
        min_length=1,
        description="prompts: JSONL or Parquet with `prompt` (text or chat messages) and columns for the reward, or "
        "`module:function`, which returns such rows (list of objects, or datasets.Dataset)",
    )
    eval: str | None = Field(None, min_length=1, description="held-out prompts, given like `train`; if not given, none")
    arguments: dict[str, Any] = Field({}, description="table: keyword arguments of `train`, where that is a function")
    eval_arguments: dict[str, Any] = Field({}, description="table: keyword arguments of `eval`, likewise")
    reward: Paths = Field(
        (),
        description="reward functions as TRL calls them, `module:function` or a list of these; with `reasoning_gym`, "
        "beside the task's own score",
    )
    reasoning_gym: str | None = Field(
        None, min_length=1, description="name of a reasoning-gym task, like chain_sum, instead of `train` and `eval`"
    )
    size: int = Field(500, ge=1, description="prompts that the reasoning-gym task makes to train on")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the reasoning-gym task")
    eval_size: int = Field(0, ge=0, description="held-out prompts that it makes, none of them a training prompt")
    config: dict[str, Any] = Field({}, description="table: settings of the reasoning-gym task itself, like max_terms")
    prompt_template: str = Field(
        "{question}", description="prompt made of a reasoning-gym question; {question} stands for it"
    )
    chat: bool = Field(False, description="a reasoning-gym prompt is a user's message in the tokenizer's chat template")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.train is None) == (self.reasoning_gym is None):
            raise ValueError("give either train or reasoning_gym")
        given = self.model_fields_set
        other = OF_FILES if self.train is None else OF_REASONING_GYM
        if misplaced := [name for name in other if name in given]:
            kind = "reasoning_gym" if self.train is None else "train"
            raise ValueError(f"{misplaced[0]} does not go with {kind}; leave it out")
        if self.train is not None and not self.reward:
            raise ValueError("reward is missing; give a function like 'rewards:exact'")
        if "{question}" not in self.prompt_template:
            raise ValueError("prompt_template does not hold {question}; put it where the question belongs")
        return self


class TrainSettings(Settings):
    """Everything a config file of `flexfloor train` takes. Paths are relative to the folder the command runs in."""

    model: Path = Field(description="folder of a Hugging Face mixture-of-experts checkpoint with a tokenizer")
    output: Path = Field(description="folder for all that the run leaves; new, or with --resume that of an earlier run")
    workers: int = Field(2, ge=1, description="expert-parallel worker processes")
    policy: str = Field(
        "flexfloor",
        description="static, static-grouped, planned, release, fixed:N or flexfloor: who runs where and leaves",
    )
    knowledge: Literal["auto", "none", "history", "shuffled"] = Field(
        "auto", description="what the policy knows of lengths; shuffled: other prompts' history; auto: the history"
    )
    history: Path | Literal[False] | None = Field(
        None, description="length history; length_history.sqlite in the output folder if not given; false: none"
    )
    max_slowdown: float = Field(0.02, ge=0, lt=1, description="share of throughput that releasing workers may cost")
    min_workers: int = Field(1, ge=1, description="workers that are never released")
    chunk: int = Field(16, ge=1, description="iterations between two looks of the driver")
    check_responses: int = Field(
        1, ge=0, description="responses of a rollout whose log-probabilities are held against the trainer's own forward"
    )
    trainer_threads: int | None = Field(
        None, ge=1, le=256, description="CPU threads of the trainer; if not given, as many as torch takes"
    )
    deterministic: bool | None = Field(
        None,
        description="torch's deterministic algorithms in the trainer, so that two runs with one seed are equal; "
        "if not given, on a trainer on the CPU",
    )
    evaluate: bool = Field(True, description="with held-out prompts: evaluate before the first step and at the end")
    quiet: bool = Field(False, description="no progress lines")
    engine: EngineSettings = Field(EngineSettings(), description="table: the worker processes, see below")
    task: TaskSettings = Field(description="table: prompts and rewards, see below")
    trl: dict[str, Any] = Field({}, description="table: fields of TRL's GRPOConfig by their names, see below")

    @property
    def rollout_history(self) -> Path | Literal["auto"] | None:
        """The history as FlexFloorRollout takes it."""
        return None if self.history is False else self.history or "auto"


TABLES: dict[str, type[Settings]] = {"engine": EngineSettings, "task": TaskSettings}


def read_settings(config: Path, changes: Sequence[str] = ()) -> TrainSettings:
    """The settings of a config file. changes: `key=value` or `table.key=value` that win over it, values as in TOML.

    Raises InputError naming file and key, or the change.
    """
    origin, values = Origin.of(config, changes), read_toml(config)
    for change in changes:
        _change(values, change)
    tables: dict[str, type[Settings]] = {"": TrainSettings, **TABLES}
    for table, model in tables.items():
        given = values if not table else values.get(table, {})
        if isinstance(given, Mapping):
            for key in given:
                if key not in model.model_fields:
                    where = origin.changed(f"{table}.{key}" if table else key) or config
                    raise InputError(f"{where}: {unknown_key(key, model.model_fields, table)}")
    try:
        return TrainSettings(**values)
    except ValidationError as error:
        field, message = explain(error)
        name = ".".join(field[: 2 if field[0] in TABLES else 1])  # deeper are the alternatives of a type
        where = origin.at(name)
        if error.errors()[0]["type"] == "value_error" and field == ("task",):
            # A check of the whole table shows all of it; what it names is enough.
            message = message.partition(", got ")[0]
            where = origin.named_in(message, "task", TaskSettings.model_fields)
        raise InputError(f"{where}: {message}".replace(": is missing", " is missing; add it")) from None


def _change(values: dict[str, Any], change: str) -> None:
    """`trl.seed=3` in place. A value that is no TOML is a text, so that a shell's quotes need no quotes in them."""
    name, equals, text = change.partition("=")
    *tables, key = name.strip().split(".")
    if not equals or not key or not all(tables):
        raise InputError(f"--set {change}: write it like trl.seed=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {change}: {table} is no table; write it like trl.seed=3")
    values[key] = value
