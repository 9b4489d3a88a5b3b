"""What one iteration costs on a device: the time that planning, simulation and `--pace` count with.

The formula and the constants of PROFILES come from a study by simulation. The constants are assumed, not measured: 0.8
of the peak memory bandwidth, 0.4 of the peak arithmetic rate, round figures for launches and latencies; only the links'
rates are reported ones (DeepEP's, on H800).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.progress import ModelShape

_MOST_READ_IMBALANCE = 1.1  # a worker with more than its share of tokens reads few more experts: most are read anyway


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The speeds of one kind of device and of the links between them; all are what is reached, not peaks."""

    name: str
    bandwidth: float  # bytes/s of device memory
    flops: float  # operations/s of matrix products in the model's dtype
    fixed_s: float  # seconds of every iteration: launches, scheduling
    latency_s: tuple[tuple[int, float], ...]  # (up to this many workers, seconds of one dispatch or one combine)
    node_link: float  # bytes/s between workers of one node
    cross_link: float  # bytes/s between nodes
    ranks_per_node: int
    imbalance: float  # expert work of the busiest worker over the mean, in groups of two or more

    def latency(self, workers: int) -> float:
        """Seconds of one dispatch or one combine; groups beyond the table's last size take its last entry."""
        if workers == 1:
            return 0.0
        return next((seconds for size, seconds in self.latency_s if workers <= size), self.latency_s[-1][1])

    def transfer(self, workers: int, copies: int) -> float:
        """Seconds/byte of sending a row to the owners of `copies` experts drawn at random over the group."""
        in_node = workers * (1 - (1 - 1 / workers) ** copies)
        nodes = math.ceil(workers / self.ranks_per_node)
        across = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
        return in_node / self.node_link + across / self.cross_link


_H200 = DeviceProfile(
    name="h200",
    bandwidth=3.84e12,
    flops=400e12,
    fixed_s=3e-3,
    latency_s=((8, 20e-6), (16, 45e-6), (32, 60e-6)),
    node_link=155e9,
    cross_link=45e9,
    ranks_per_node=8,
    imbalance=1.2,
)
PROFILES = {
    "h200": _H200,
    "h800": replace(_H200, name="h800", bandwidth=2.68e12),
    # Exchanges by NCCL, and kernels launched one by one.
    "slow": replace(_H200, name="slow", fixed_s=8e-3, latency_s=((8, 60e-6), (16, 150e-6), (32, 200e-6))),
}


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What moving takes, as plans count it; the defaults are of the order of a CPU machine.

    bytes_per_s: between workers. recompute_tokens_per_s: of prefill, by which a request is computed again instead.
    switch_s: seconds of every resize beside what it moves.
    """

    bytes_per_s: float = 1e9
    recompute_tokens_per_s: float = 5e3
    switch_s: float = 0.05


def iteration_seconds(
    profile: DeviceProfile,
    shape: ModelShape,
    *,
    batch: Sequence[int],
    kv_tokens: Sequence[int],
    prefill_tokens: Sequence[int],
) -> float:
    """Seconds of one iteration; one entry for each active worker, with the meaning they have in `WorkerIterations`.

    With m workers, B = Σ batch, P = Σ prefill_tokens, n experts of which each token takes k in each of L layers with
    experts, D bytes of dense weights that are read, E bytes of all experts, row = the bytes of one hidden vector:

        fixed + D/bandwidth + max(kv_tokens)·kv_token_bytes/bandwidth
        + max(batch)·2·params(D)/flops
        + max[E/m·(1 − (1 − k/n)^(B+P))·min(imb, 1.1)/bandwidth, imb·B/m·2·params(E)·k/n/flops]
        + max(prefill_tokens)·2·params(D)/flops + imb·P/m·2·params(E)·k/n/flops
        + 2·L·{latency(m) + row·max(batch + prefill_tokens)·(d_node/node_link + d_cross/cross_link)}      (0 if m = 1)

        d_node = m·(1 − (1 − 1/m)^k), d_cross = (nodes − 1)·(1 − (1 − 1/nodes)^k), nodes = ⌈m/ranks_per_node⌉

    imb is 1 for a single worker. Source: the cost model of the project's policy study, there for Qwen3-30B-A3B and for
    decoding and prefill apart; here prefill shares the iteration's reading of experts and its exchanges. The attention
    of prefill tokens over their own context, and differences between layers, are left out.
    """
    workers, tokens, prefill = len(batch), sum(batch), sum(prefill_tokens)
    assert workers == len(kv_tokens) == len(prefill_tokens) > 0
    imbalance = profile.imbalance if workers > 1 else 1.0
    dense = shape.dense_bytes - shape.lookup_bytes
    experts, chosen = shape.all_expert_bytes, shape.top_k / shape.experts
    dense_token_s = 2 * dense / shape.itemsize / profile.flops
    expert_token_s = 2 * experts * chosen / shape.itemsize / profile.flops * imbalance / workers

    touched = 1 - (1 - chosen) ** (tokens + prefill)
    read_s = experts / workers * touched * min(imbalance, _MOST_READ_IMBALANCE) / profile.bandwidth
    seconds = profile.fixed_s + (dense + max(kv_tokens) * shape.kv_token_bytes) / profile.bandwidth
    seconds += (max(batch) + max(prefill_tokens)) * dense_token_s
    seconds += max(read_s, tokens * expert_token_s) + prefill * expert_token_s
    if workers > 1:
        rows = max(b + p for b, p in zip(batch, prefill_tokens, strict=True))
        sent = rows * shape.hidden * shape.itemsize * profile.transfer(workers, shape.top_k)
        seconds += 2 * len(shape.moe_layers) * (profile.latency(workers) + sent)
    return seconds


def load_profile(source: str | Path) -> DeviceProfile:
    """A profile by its name in PROFILES, or from a TOML file with the fields of DeviceProfile (`name` may be missing).

    Raises InputError, on one line, with the choices or with the key at fault.
    """
    if str(source) in PROFILES:
        return PROFILES[str(source)]
    path = Path(source)
    if path.suffix != ".toml":
        raise InputError(f"profile {str(source)!r} is not known; there is {', '.join(PROFILES)}, or name a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"profile {path} cannot be read ({error.strerror}); name a .toml file or one of {', '.join(PROFILES)}"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"profile {path} is not TOML ({error})") from None
    return _to_profile(path, {"name": path.stem} | content)


def _to_profile(path: Path, values: dict[str, Any]) -> DeviceProfile:
    names = [field.name for field in fields(DeviceProfile)]
    for name in names:
        if name not in values:
            raise InputError(f"profile {path}: {name} is missing; it has {', '.join(names)}")
    for name, value in values.items():
        if name not in names:
            raise InputError(f"profile {path}: unknown key {name!r}; there is {', '.join(names)}")
        if told := _fault(name, value):
            raise InputError(f"profile {path}: {name} is {value!r}; {told}")
    return DeviceProfile(**values | {"latency_s": tuple((size, float(s)) for size, s in values["latency_s"])})


def _fault(name: str, value: Any) -> str | None:
    """What is wrong with a value of a profile, None if nothing."""
    if name == "name":
        return None if isinstance(value, str) else "give a string"
    if name == "ranks_per_node":
        return None if type(value) is int and value >= 1 else "give a whole number from 1"
    if name == "latency_s":
        return None if _is_latency_table(value) else "give pairs like [[8, 20e-6], [16, 45e-6]], sizes rising"
    if not _is_number(value) or value < 0 or (value == 0 and name != "fixed_s"):
        return "give a positive number"
    return "give at least 1" if name == "imbalance" and value < 1 else None


def _is_latency_table(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is int and _is_number(p[1]) for p in value):
        return False
    sizes = [size for size, _ in value]
    return sizes == sorted(set(sizes)) and sizes[0] >= 1 and all(seconds >= 0 for _, seconds in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
