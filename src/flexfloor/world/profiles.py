"""Device profiles: the speeds and sizes that planning, simulation and `--pace` count with, and their files."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.progress import FleetInfo, ModelShape


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One kind of device with the links between its workers; speeds are what is reached, not peaks.

    Fields with a default may be missing in a file. The time of an iteration made from them: `costs.IterationCost`.
    """

    name: str
    bandwidth: float  # bytes/s of device memory
    flops: float  # operations/s of matrix products in the model's dtype
    fixed_s: float  # seconds of every iteration on every worker: launches, scheduling
    latency_s: tuple[tuple[int, float], ...]  # (up to this many workers, seconds of one dispatch or one combine)
    node_link: float  # bytes/s between workers of one node
    cross_link: float  # bytes/s between nodes
    ranks_per_node: int
    imbalance: float  # expert work of the busiest worker over the mean, in groups of two or more
    memory_bytes: float = 120e9  # of one worker, for weights, KV and reserve
    reserve_bytes: float = 6e9  # of these, for activations and buffers
    switch_s: float = 0.5  # seconds of every resize beside what it moves
    pause_s: float = 0.02  # seconds of moves that leave the group as it is, beside what they move
    move_bytes_per_s: float = 40e9  # experts and KV between workers, a worker
    request_s: float = 0.0  # seconds of every request in a worker's batch, of any model: bookkeeping, sampling
    gather_link: float = math.inf  # bytes/s at which a worker takes in the rows of all; inf: owners alone get a row
    cores: float = math.inf  # devices that all workers share; inf: each worker has its own
    look_s: float = 0.0  # seconds between two advances: the driver's look at the fleet


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What moving takes, as plans count it; the defaults are of the order of a CPU machine.

    bytes_per_s: between workers. recompute_tokens_per_s: of prefill, by which a request is computed again instead.
    switch_s: seconds of every resize beside what it moves; pause_s: the same of moves that leave the group as it is.
    """

    bytes_per_s: float = 1e9
    recompute_tokens_per_s: float = 5e3
    switch_s: float = 0.05
    pause_s: float = 0.02

    @classmethod
    def of(cls, profile: DeviceProfile, shape: ModelShape) -> MoveCosts:
        """As the profile has it. A token is computed again at the speed of its matrix products: prefill is no more."""
        dense = (shape.dense_bytes - shape.lookup_bytes) / shape.itemsize
        experts = shape.all_expert_bytes / shape.itemsize * shape.top_k / shape.experts
        speed = profile.flops / (2 * (dense + experts))
        return cls(profile.move_bytes_per_s, speed, profile.switch_s, profile.pause_s)


def load_profile(source: str | Path | DeviceProfile) -> DeviceProfile:
    """A profile by its name in PROFILES, or from a TOML file with the fields of DeviceProfile (`name` may be missing);
    one that is loaded stays as it is.

    Raises InputError, on one line, with the choices or with the key at fault.
    """
    if isinstance(source, DeviceProfile):
        return source
    if str(source) in PROFILES:
        return PROFILES[str(source)]
    path = Path(source)
    if path.suffix != ".toml":
        raise InputError(f"profile {str(source)!r} is not known; there is {', '.join(PROFILES)}, or name a .toml file")
    return _read_profile(path)


def _read_profile(path: Path) -> DeviceProfile:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"profile {path} cannot be read ({error.strerror}); name a .toml file or one of {', '.join(PROFILES)}"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"profile {path} is not TOML ({error})") from None
    return _to_profile(path, {"name": path.stem} | content)


def format_profile(profile: DeviceProfile, comments: Mapping[str, str] | None = None) -> str:
    """The text of a TOML file that `load_profile` reads as an equal profile.

    comments: field → words to put behind its value; the key "" holds lines for the top.
    """
    comments = comments or {}
    lines = [f"# {line}" for line in comments.get("", "").splitlines()]
    for field in fields(DeviceProfile):
        value = getattr(profile, field.name)
        if field.name == "latency_s":
            text = "[" + ", ".join(f"[{size}, {seconds!r}]" for size, seconds in value) + "]"
        else:
            text = f'"{value}"' if field.name == "name" else repr(value)
        lines.append(f"{field.name} = {text}" + (f"  # {comments[field.name]}" if field.name in comments else ""))
    return "\n".join(lines) + "\n"


CALIBRATE = "Made by `flexfloor calibrate`"
NOT_FITTED = "not fitted"
MEASURED = "measured"
"""What files of profiles say of themselves: at the top, beside what runs did not tell, beside measured latencies."""


def has_fitted_latencies(comments: Mapping[str, str]) -> bool:
    """Whether the latencies are from runs, in which waiting for other workers counts. comments: of the profile."""
    return CALIBRATE in comments[""] and not comments.get("latency_s", "").startswith((NOT_FITTED, MEASURED))


def read_comments(source: str | Path) -> dict[str, str]:
    """The words beside the values of a profile that `load_profile` has read, as `format_profile` takes them."""
    path = _FOLDER / f"{source}.toml" if str(source) in PROFILES else Path(source)
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {
        "": "\n".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    }
    for line in lines:
        if told := re.fullmatch(r'(\w+)\s*=\s*(?:"[^"]*"|[^"#]*)#\s*(.*)', line):
            found[told[1]] = told[2]
    return found


def _to_profile(path: Path, values: dict[str, Any]) -> DeviceProfile:
    known = fields(DeviceProfile)
    names = [field.name for field in known]
    for field in known:
        if field.default is MISSING and field.name not in values:
            if set(values) == {"name", "latency_s"}:
                raise InputError(
                    f"profile {path}: holds a latency table alone; give profile-comm a `base`, whose other values it "
                    "takes for a whole profile"
                )
            raise InputError(f"profile {path}: {field.name} is missing; it has {', '.join(names)}")
    for name, value in values.items():
        if name not in names:
            raise InputError(f"profile {path}: unknown key {name!r}; there is {', '.join(names)}")
        if told := _fault(name, value):
            raise InputError(f"profile {path}: {name} is {value!r}; {told}")
    return DeviceProfile(**values | {"latency_s": tuple((size, float(s)) for size, s in values["latency_s"])})


_MAY_BE_ZERO = ("fixed_s", "reserve_bytes", "switch_s", "request_s", "look_s")


def _fault(name: str, value: Any) -> str | None:
    """What is wrong with a value of a profile, None if nothing."""
    if name == "name":
        return None if isinstance(value, str) and _is_plain(value) else "give a string without quotes or line breaks"
    if name == "ranks_per_node":
        return None if type(value) is int and value >= 1 else "give a whole number from 1"
    if name == "latency_s":
        return None if _is_latency_table(value) else "give pairs like [[8, 20e-6], [16, 45e-6]], sizes rising"
    if name in ("cores", "gather_link") and value == math.inf:
        return None
    if not _is_number(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        return "give a positive number"
    return "give at least 1" if name in ("imbalance", "cores") and value < 1 else None


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set(text) & set('"\\')


def _is_latency_table(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is int and _is_number(p[1]) for p in value):
        return False
    sizes = [size for size, _ in value]
    return sizes == sorted(set(sizes)) and sizes[0] >= 1 and all(seconds >= 0 for _, seconds in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_FOLDER = Path(__file__).parent / "devices"
PROFILES: dict[str, DeviceProfile] = {
    name: _read_profile(_FOLDER / f"{name}.toml") for name in ("h200", "h800", "slow", "cpu")
}
"""The profiles that come with FlexFloor, by name; each file says where its numbers come from."""


def profile_of(info: FleetInfo) -> str:
    """Name of what a fleet runs on, where nobody says it."""
    return info.profile if info.profile in PROFILES else "cpu" if info.device == "cpu" else "h200"
