"""Options made from the settings: names, help texts, defaults and checks stand once, in the pydantic fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from flexfloor.errors import InputError, spell
from flexfloor.settings import (
    MISSING,
    CompareSettings,
    EngineSettings,
    RolloutSettings,
    SamplingSettings,
    Settings,
    SimulateSettings,
    explain,
    read_toml,
    unknown_key,
)

TABLES: dict[str, type[BaseModel]] = {"sampling": SamplingSettings, "engine": EngineSettings}
"""The fields of settings that hold settings of their own; their fields are options like all others."""

TABLE_OF = {name: table for table, model in TABLES.items() for name in model.model_fields}

_OPTIONS = {*TABLE_OF, "base"}.union(*(m.model_fields for m in (RolloutSettings, CompareSettings, SimulateSettings)))

_SPELLED = {"architecture": "model_config"}
"""Settings that pydantic does not let have their name."""

_METAVARS = {
    "model": "DIR",
    "out_dir": "DIR",
    "ledgers": "DIR",
    "tensorboard": "DIR",
    "order": "arrival|shuffle:SEED",
    "force_lengths": "FILE|prompts",
    "policies": "P,P,…",
    "lengths": "SCENARIO|FILE",
    "architecture": "PRESET|FILE",
    "worker_memory": "SIZE",
    "worker_timeout": "SECONDS",
    "launcher": "local|ray",
    "pace": "SCALE",
    "pace_model": "NAME|FILE",
    "profile": "NAME|FILE",
}
_METAVARS_BY_TYPE: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
_CONFIG_HELP = "TOML file with any of these options as keys (max_tokens = 64); the command line wins"

S = TypeVar("S", bound=Settings)


def flag(name: str) -> str:
    """worker_memory → --worker-memory."""
    return "--" + _SPELLED.get(name, name).replace("_", "-")


def spell_options(text: str) -> str:
    """A message or help text that names settings as `worker_memory`, with the options that they are."""
    return spell(text, lambda name: flag(name) if name in _OPTIONS else None)


def names_of(model: type[Settings]) -> list[str]:
    """The options of a command's settings, those without a default first."""
    own = [name for name in model.model_fields if name not in TABLES]
    nested = [name for name, table in TABLE_OF.items() if table in model.model_fields]
    return sorted(own, key=lambda name: not model.model_fields[name].is_required()) + nested


def takes(model: type[Settings]) -> Callable[[Callable[[Path | None, dict[str, Any]], Any]], Callable[..., Any]]:
    """Decorator that gives a command the options of `model` and `--config`.

    The command is called with the config file and name → value of the options that were given.
    """

    def decorate(command: Callable[[Path | None, dict[str, Any]], Any]) -> Callable[..., Any]:
        def run(config: Path | None = None, **values: Any) -> Any:
            return command(config, {name: value for name, value in values.items() if value not in (None, [])})

        types = {name: Annotated[_type(_field(model, name)) | None, _option(model, name)] for name in names_of(model)}
        types["config"] = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
        parameters = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=t) for n, t in types.items()
        ]
        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, types
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _field(model: type[Settings], name: str) -> FieldInfo:
    return (model if name in model.model_fields else TABLES[TABLE_OF[name]]).model_fields[name]


def _type(field: FieldInfo) -> Any:
    """What the parser of options makes of it; a setting that has a parser of its own comes as text."""
    alternatives = [a for a in get_args(field.annotation) if a is not NoneType] if _is_optional(field) else []
    annotation = alternatives[0] if alternatives else field.annotation
    if any(isinstance(m, BeforeValidator) for m in field.metadata) or get_origin(annotation) is Literal:
        return str
    return list[str] if get_origin(annotation) is tuple else annotation


def _is_optional(field: FieldInfo) -> bool:
    return NoneType in get_args(field.annotation)


def _option(model: type[Settings], name: str) -> Any:
    """The typer option of a setting. Its default is None, 'not given', so that a config file can give it."""
    field = _field(model, name)
    text = spell_options(field.description or "")
    if field.is_required():
        text += " [required]"
    elif isinstance(field.default, int | float | str | Path | tuple) and field.default not in (False, ()):
        text += f" [default: {_show(name, field.default)}]"
    choices = [str(value) for value in get_args(field.annotation) if isinstance(value, str)]
    kind = _type(field)
    several = kind is str and get_origin(field.annotation) is tuple
    each = _METAVARS_BY_TYPE.get(get_args(field.annotation)[0] if several else kind, "NAME" if several else "TEXT")
    named = _METAVARS.get(name) or "|".join(choices) or (f"{each},{each},…" if several else each)
    metavar = None if kind is bool else named
    return typer.Option(flag(name), metavar=metavar, help=text, show_default=False)


def _show(name: str, default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default // 2**20}MiB" if name.endswith("_memory") else str(default)


def load_settings(config: Path | None, given: Mapping[str, Any]) -> RolloutSettings:
    """The settings of `flexfloor rollout`, see `parse_settings`."""
    return parse_settings(RolloutSettings, config, given)


def parse_settings(model: type[S], config: Path | None, given: Mapping[str, Any]) -> S:
    """Settings from the command line and, where that says nothing, from a TOML file.

    The file's keys are the option names with underscores, alone or in the tables [sampling] and [engine].
    given: name → value of the options that were given. Raises InputError naming the option, or file and key.
    """
    values = _read_config(model, config) if config else {}
    from_file = set(values) - set(given)
    values |= given
    nested: dict[str, Any] = {table: {} for table in TABLES if table in model.model_fields}
    for name, value in values.items():
        (nested if name in model.model_fields else nested[TABLE_OF[name]])[name] = value
    try:
        return model(**nested)
    except ValidationError as error:
        field, message = explain(error)
        name = field[1] if field[0] in TABLES and len(field) > 1 else field[0]
        where = f"{config}: {name}" if name in from_file else flag(name)
        if message == MISSING:
            raise InputError(f"{where} is missing; give it as an option or in a --config file") from None
        raise InputError(f"{where}: {message}") from None


def _read_config(model: type[Settings], path: Path) -> dict[str, Any]:
    """name → value, tables flattened."""
    content = read_toml(path, "--config")
    values: dict[str, Any] = {}
    names = {spelled: name for name, spelled in _SPELLED.items()}
    for key, value in content.items():
        key = names.get(key, key)
        table = value if key in TABLES and isinstance(value, dict) else {key: value}
        known = [name for name in names_of(model) if table is not value or TABLE_OF.get(name) == key]
        for name, entry in table.items():
            if name not in known:
                raise InputError(f"{path}: {unknown_key(name, known)}")
            if name in values:
                raise InputError(
                    f"{path}: {name!r} is given twice, alone and in the table {TABLE_OF[name]!r}; keep one"
                )
            values[name] = entry
    return values
