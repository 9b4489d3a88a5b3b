"""Where each setting of a training was given, so that a refusal names the place to mend it: config file or --set."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from flexfloor.errors import FlexFloorError, InputError, spell
from flexfloor.settings import EngineSettings, RunSettings

E = TypeVar("E", bound=InputError)

_KEYS = {name: name for name in ("policy", *RunSettings.model_fields)} | {
    name: f"engine.{name}" for name in EngineSettings.model_fields
}
"""Setting as the layers below name it → its key in a config file."""


@dataclass(frozen=True)
class Origin:
    """A config file, and the changes of single keys that win over it.

    changes: key → the change as it was written: trl.seed → trl.seed=3.
    """

    config: Path
    changes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Path, changes: Sequence[str] = ()) -> Origin:
        """changes: `key=value`, of which the last one of a key counts."""
        return cls(config, {change.partition("=")[0].strip(): change for change in changes})

    def changed(self, *keys: str) -> str:
        """`--set trl.seed=3` for each of these keys, or tables, that was changed; empty where none was."""
        found = [change for name, change in self.changes.items() if any(_overlap(name, key) for key in keys)]
        return " ".join(f"--set {change}" for change in found)

    def at(self, *keys: str) -> str:
        """What a refusal begins with. keys: all that may be at fault, the likeliest first."""
        return self.changed(*keys) or f"{self.config}: {keys[0]}"

    def named_in(self, text: str, table: str, names: Iterable[str]) -> str:
        """What a refusal of a whole table begins with: the changes of fields that its text names, else the table.

        names: all fields of the table. A text without any may mean every change of it.
        """
        keys = [f"{table}.{name}" for name in names if re.search(rf"\b{re.escape(name)}\b", text)]
        if keys:
            return self.changed(*keys) or f"{self.config}: {table}"
        return ", ".join(filter(None, (f"{self.config}: {table}", self.changed(table))))

    def place(self, error: E) -> E:
        """A refusal by the layers below, with the place of the settings at fault, and others spelled as keys."""
        keys = [_KEYS[name] for name in error.settings if name in _KEYS]
        text = self.spelled(error)
        return type(error)(f"{self.at(*keys)}: {text}" if keys else text)

    def spelled(self, error: FlexFloorError) -> str:
        """What the error says, with settings by their keys."""
        return spell(str(error), _KEYS.get)

    def command(self, *, resume: bool) -> str:
        """The command line that goes on with this training, or begins it anew."""
        words = ["flexfloor", "train", str(self.config), *(w for c in self.changes.values() for w in ("--set", c))]
        return shlex.join([*words, "--resume"] if resume else words)


def _overlap(key: str, other: str) -> bool:
    """Whether one is the other or holds it: task and task.size."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
