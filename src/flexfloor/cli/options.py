"""Options made from the settings: names, help texts, defaults and checks stand once, in the pydantic fields."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel, ValidationError

from flexfloor.errors import InputError
from flexfloor.settings import MISSING, EngineSettings, RolloutSettings, SamplingSettings, explain

TABLES: dict[str, type[BaseModel]] = {"sampling": SamplingSettings, "engine": EngineSettings}
"""The fields of RolloutSettings that hold settings of their own; their fields are options like all others."""

TABLE_OF = {name: table for table, model in TABLES.items() for name in model.model_fields}
NAMES = [name for name in RolloutSettings.model_fields if name not in TABLES] + list(TABLE_OF)

_METAVARS: dict[Any, str] = {int: "N", float: "X"}


def flag(name: str) -> str:
    """worker_memory → --worker-memory."""
    return "--" + name.replace("_", "-")


def option(name: str, metavar: str | None = None) -> Any:
    """The typer option of the setting `name`. Its default is None, 'not given', so that a config file can give it."""
    model = TABLES[TABLE_OF[name]] if name in TABLE_OF else RolloutSettings
    field = model.model_fields[name]
    choices = [str(value) for value in get_args(field.annotation) if isinstance(value, str)]
    text = field.description or ""
    if field.is_required():
        text += " [required]"
    elif type(field.default) in (int, float, str):
        text += f" [default: {_show(name, field.default)}]"
    if metavar is None and field.annotation is not bool:
        metavar = "|".join(choices) or _METAVARS.get(field.annotation, "TEXT")
    return typer.Option(flag(name), metavar=metavar, help=text, show_default=False)


def _show(name: str, default: Any) -> str:
    return f"{default // 2**20}MiB" if name.endswith("_memory") else str(default)


def load_settings(config: Path | None, given: Mapping[str, Any]) -> RolloutSettings:
    """Settings from the command line and, where that says nothing, from a TOML file.

    The file's keys are the option names with underscores, alone or in the tables [sampling] and [engine].
    given: name → value of the options that were given. Raises InputError naming the option, or file and key.
    """
    values = _read_config(config) if config else {}
    from_file = set(values) - set(given)
    values |= given
    nested: dict[str, Any] = {table: {} for table in TABLES}
    for name, value in values.items():
        (nested[TABLE_OF[name]] if name in TABLE_OF else nested)[name] = value
    try:
        return RolloutSettings(**nested)
    except ValidationError as error:
        field, message = explain(error)
        name = field[1] if field[0] in TABLES and len(field) > 1 else field[0]
        where = f"{config}: {name}" if name in from_file else flag(name)
        if message == MISSING:
            raise InputError(f"{where} is missing; give it as an option or in a --config file") from None
        raise InputError(f"{where}: {message}") from None


def _read_config(path: Path) -> dict[str, Any]:
    """name → value, tables flattened."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config {path} is not TOML ({error})") from None
    values: dict[str, Any] = {}
    for key, value in content.items():
        table = value if key in TABLES and isinstance(value, dict) else {key: value}
        known = [name for name in NAMES if table is not value or TABLE_OF.get(name) == key]
        for name, entry in table.items():
            if name not in known:
                guess = get_close_matches(name, known, 1)
                remedy = f"did you mean {guess[0]!r}?" if guess else f"there is {', '.join(known)}"
                raise InputError(f"{path}: unknown key {name!r}; {remedy}")
            if name in values:
                raise InputError(
                    f"{path}: {name!r} is given twice, alone and in the table {TABLE_OF[name]!r}; keep one"
                )
            values[name] = entry
    return values
