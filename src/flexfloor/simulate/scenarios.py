"""Scenarios by name or file: where response lengths come from, and on what they usually run."""

from __future__ import annotations

import tomllib
import zlib
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from flexfloor.errors import InputError
from flexfloor.settings import MISSING, MOST_LOAD, MOST_WORKERS, Settings, explain, unknown_key
from flexfloor.simulate.distributions import Capped, LengthDistribution, Lognormal
from flexfloor.simulate.traces import Trace, read_trace
from flexfloor.simulate.workload import Workload, draw_workload, replay_trace
from flexfloor.world.costs import DeviceProfile

_FILE = Path(__file__).with_name("scenarios.toml")
_MOST_TOKENS = 10**9


class _Definition(Settings):
    """What every scenario says."""

    about: str = ""
    workers: int = Field(16, ge=1, le=MOST_WORKERS)
    load: int = Field(32, ge=1, le=MOST_LOAD)
    profile: str = "h200"
    memory_bytes: float | None = Field(None, gt=0, allow_inf_nan=False)
    reserve_bytes: float | None = Field(None, ge=0, allow_inf_nan=False)


class _Drawn(_Definition):
    samples: int = Field(8, ge=1, le=MOST_LOAD)
    prompt_tokens: int = Field(256, ge=1, le=_MOST_TOKENS)
    shortest: int = Field(1, ge=1)
    max_tokens: int = Field(ge=2, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.shortest >= self.max_tokens:
            raise ValueError(f"shortest {self.shortest} is not below max_tokens {self.max_tokens}; give a smaller one")
        return self


class LognormalDefinition(_Drawn):
    kind: Literal["lognormal"]
    log_mean: float = Field(gt=0, lt=20, allow_inf_nan=False)
    between_sd: float = Field(ge=0, lt=10, allow_inf_nan=False)
    within_sd: float = Field(ge=0, lt=10, allow_inf_nan=False)

    @cached_property
    def source(self) -> LengthDistribution:
        return Lognormal(self.log_mean, self.between_sd, self.within_sd, self.shortest, self.max_tokens)


class CappedDefinition(_Drawn):
    kind: Literal["capped"]
    mean: float = Field(gt=0, allow_inf_nan=False)
    median: float = Field(gt=0, allow_inf_nan=False)
    capped_share: float = Field(ge=0, lt=0.5, allow_inf_nan=False)
    sibling_correlation: float = Field(ge=0, le=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _median_between(self) -> Self:
        if not self.shortest < self.median < self.max_tokens:
            raise ValueError(
                f"median {self.median:g} is not between shortest {self.shortest} and max_tokens {self.max_tokens}; "
                "give one that is"
            )
        return self

    @cached_property
    def source(self) -> LengthDistribution:
        return Capped(
            self.mean, self.median, self.shortest, self.max_tokens, self.capped_share, self.sibling_correlation
        )


class TraceDefinition(_Definition):
    kind: Literal["trace"]
    file: Path | None = None
    workload: str | None = None


Definition = LognormalDefinition | CappedDefinition | TraceDefinition
KINDS: dict[str, type[Definition]] = {
    "lognormal": LognormalDefinition,
    "capped": CappedDefinition,
    "trace": TraceDefinition,
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A source of workloads. definition: with all its values, as reports show it. trace: of a TraceDefinition."""

    name: str
    definition: Definition
    trace: Trace | None = None

    def draw(self, requests: int, seed: int) -> Workload:
        """The workload of a seed; equal for equal arguments, independent for other seeds."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        if isinstance(self.definition, TraceDefinition):
            assert self.trace is not None
            return replay_trace(self.trace, requests, rng)
        defined = self.definition
        return draw_workload(defined.source, requests, defined.samples, defined.prompt_tokens, rng)

    @property
    def longest(self) -> int:
        """Most tokens, of prompt and response, that a request can come to."""
        if self.trace is not None:
            return int(self.trace.prompt_tokens.max()) + self.trace.max_tokens
        assert not isinstance(self.definition, TraceDefinition)
        return self.definition.prompt_tokens + self.definition.max_tokens

    def device(self, profile: DeviceProfile) -> DeviceProfile:
        """The profile, with the memory that the scenario gives a worker."""
        own = {"memory_bytes": self.definition.memory_bytes, "reserve_bytes": self.definition.reserve_bytes}
        changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return replace(profile, **changes)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name} | self.definition.model_dump(mode="json", exclude_none=True)


@cache
def named_scenarios() -> dict[str, dict[str, Any]]:
    """Name → keys of its definition."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def load_scenario(source: str, *, trace: Path | None = None, workload: str | None = None) -> Scenario:
    """A scenario by its name, from a .toml file with the keys of a definition, or from the .csv file of a trace.

    trace: the CSV file of a scenario that needs one. workload: of a trace, in place of the definition's.
    Raises InputError on one line, with the choices or with what is wrong.
    """
    known = {name.lower(): name for name in named_scenarios()}
    path = Path(source)
    if source.lower() in known:
        name = known[source.lower()]
        where, values = f"scenario {name}", dict(named_scenarios()[name])
    elif path.suffix == ".csv":
        if trace is not None:
            raise InputError(f"--trace {trace}: --lengths {source} is a trace already; give one of them")
        name, where, values = path.stem, str(path), {"kind": "trace", "file": path}
    elif path.suffix == ".toml":
        name, where, values = path.stem, str(path), _read_definition(path)
    else:
        raise InputError(
            f"--lengths: scenario {source!r} is not known; there is {', '.join(named_scenarios())}, "
            "or name a .csv file of lengths or a .toml file of a scenario"
        )
    definition = _to_definition(where, values)
    if not isinstance(definition, TraceDefinition):
        for option, value in {"--trace": trace, "--workload": workload}.items():
            if value is not None:
                raise InputError(f"{option} {value}: the lengths of {where} are drawn, not read; leave it out")
        return Scenario(name, definition)
    file = trace or definition.file
    if file is None:
        raise InputError(f"{where} needs the CSV file of a trace; give --trace FILE.csv")
    loaded = read_trace(file, workload or definition.workload)
    chosen = {"file": file, "workload": loaded.workload}
    return Scenario(name, definition.model_copy(update=chosen), loaded)


def _to_definition(where: str, values: dict[str, Any]) -> Definition:
    """where: names the scenario in errors. Raises InputError."""
    kind = values.get("kind")
    if kind not in list(KINDS):
        told = "is missing" if kind is None else f"is {str(kind)[:40]!r}"
        raise InputError(f"{where}: kind {told}; give {', '.join(KINDS)}")
    try:
        definition = KINDS[kind].model_validate(values)
        if not isinstance(definition, TraceDefinition):
            _ = definition.source.correlation  # worked out when asked for, and not possible with all values
    except ValidationError as error:
        path, message = explain(error)
        field = ".".join(path)
        if error.errors()[0]["type"] == "extra_forbidden":
            raise InputError(f"{where}: {unknown_key(field, KINDS[kind].model_fields)}") from None
        if message == MISSING:
            raise InputError(f"{where}: {field} is missing; a scenario of kind {kind} needs it") from None
        raise InputError(f"{where}: {field}: {message}" if field else f"{where}: {message}") from None
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    return definition


def _read_definition(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: scenario cannot be read ({error.strerror}); name a .toml file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is not TOML ({error})") from None
