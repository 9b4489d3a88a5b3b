"""Python objects named in a config file: `module:name`, or `module.name`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError

_NAMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_named(text: str) -> bool:
    """Whether it is written like `module:name`, and so no file."""
    return _NAMED.fullmatch(text) is not None


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Inside the block modules in these folders can be imported, and win over installed ones."""
    added = [str(folder.resolve()) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def load_named(where: str, text: str) -> Any:
    """The object. where: file and field that name it. Raises InputError."""
    module, colon, name = text.partition(":")
    if not colon:
        module, _, name = text.rpartition(".")
    if not module or not name:
        raise InputError(f"{where}: {text!r} names no function; write it like 'rewards:exact' (module:function)")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise InputError(
                f"{where}: there is no module {error.name!r}; put {error.name.partition('.')[0]}.py beside the config "
                "file, or install it"
            ) from None
        raise InputError(f"{where}: module {module!r} needs {error.name!r}, which is not installed") from None
    except Exception as error:  # whatever the user's module raises
        raise InputError(f"{where}: module {module!r} cannot be imported ({told(error)})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{where}: module {module!r} has no {name!r}; name a function that it defines")
        found = getattr(found, part)
    return found


def told(error: BaseException) -> str:
    """`ValueError: what it says`, its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
