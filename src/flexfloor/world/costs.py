"""What one iteration costs on a device: the time that planning, simulation and `--pace` count with.

The formula stands once, in `seconds_core`, compiled: for the planner's inner loops as it is, for arrays by a loop over
it, for one iteration of a fleet by `iteration_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from flexfloor.progress import ModelShape
from flexfloor.world.jit import numba
from flexfloor.world.profiles import PROFILES, DeviceProfile, MoveCosts, format_profile, load_profile

__all__ = [
    "PROFILES",
    "DeviceProfile",
    "IterationCost",
    "MoveCosts",
    "coefficients",
    "format_profile",
    "iteration_seconds",
    "latency_seconds",
    "latency_table",
    "load_profile",
    "seconds_core",
]

_MOST_READ_IMBALANCE = 1.1  # a worker with more than its share of tokens reads few more experts: most are read anyway

# Places in the vector of `coefficients`.
_FIXED, _KV, _REQUEST, _DENSE, _READ, _MISSED, _EXPERT, _IMBALANCE = range(8)
_EXCHANGES, _NODE, _CROSS, _GATHER, _PER_NODE, _COPIES, _CORES = range(8, 15)


def coefficients(profile: DeviceProfile, shape: ModelShape) -> np.ndarray:
    """What `seconds_core` needs of a device and a model, beside the latency table: float64 [15]."""
    dense, itemsize = shape.dense_bytes - shape.lookup_bytes, shape.itemsize
    experts, chosen = shape.all_expert_bytes, shape.top_k / shape.experts
    row = shape.hidden * itemsize
    c = np.empty(15)
    c[_FIXED] = profile.fixed_s + dense / profile.bandwidth
    c[_KV] = shape.kv_token_bytes / profile.bandwidth
    c[_REQUEST] = profile.request_s
    c[_DENSE] = 2 * dense / itemsize / profile.flops
    c[_READ] = experts / profile.bandwidth
    c[_MISSED] = 1 - chosen
    c[_EXPERT] = 2 * experts * chosen / itemsize / profile.flops
    c[_IMBALANCE] = profile.imbalance
    c[_EXCHANGES] = 2 * len(shape.moe_layers)
    c[_NODE], c[_CROSS] = row / profile.node_link, row / profile.cross_link
    c[_GATHER] = row / profile.gather_link
    c[_PER_NODE], c[_COPIES], c[_CORES] = profile.ranks_per_node, shape.top_k, profile.cores
    return c


def latency_table(profile: DeviceProfile) -> np.ndarray:
    """The profile's `latency_s`: float64 [sizes, 2], (up to this many workers, seconds)."""
    return np.array(profile.latency_s, dtype=np.float64)


# Compiled for these types when the module is loaded (or taken from the cache): the first iteration of a paced worker
# must not wait for a compiler.
@numba.njit("float64(float64[:, ::1], float64)", cache=True, error_model="numpy")
def latency_seconds(latency, workers):
    """Seconds of one dispatch or one combine in a group; groups beyond the table's last size take its last entry."""
    if workers <= 1:
        return 0.0
    for i in range(len(latency)):
        if workers <= latency[i, 0]:
            return latency[i, 1]
    return latency[-1, 1]


@numba.njit("float64(float64[::1], float64[:, ::1], float64, float64, float64)", cache=True, error_model="numpy")
def exchange_core(c, latency, workers, tokens, rows_max):
    """Of `seconds_core`, its last line: the seconds of all dispatches and combines. tokens: B + P there."""
    if workers <= 1:
        return 0.0
    nodes = math.ceil(workers / c[_PER_NODE])
    to_node = workers * (1 - (1 - 1 / workers) ** c[_COPIES])
    across = (nodes - 1) * (1 - (1 - 1 / nodes) ** c[_COPIES])
    sent = rows_max * (c[_NODE] * to_node + c[_CROSS] * across) + tokens * c[_GATHER]
    return c[_EXCHANGES] * (latency_seconds(latency, workers) + sent)


@numba.njit(
    "float64(float64[::1], float64[:, ::1], float64, float64, float64, float64, float64, float64, float64)",
    cache=True,
    error_model="numpy",
)
def seconds_core(c, latency, workers, batch_max, batch_total, kv_max, prefill_max, prefill_total, rows_max):
    """Seconds of one iteration of `workers` workers, from sums and maxima over them; for other compiled code.

    c: `coefficients`. latency: `latency_table`. batch, kv, prefill: `batch`, `kv_tokens`, `prefill_tokens` of
    `WorkerIterations`; rows = batch + prefill of a worker.

    With m workers, B = Σ batch, P = Σ prefill, n experts of which each token takes k in each of L layers with experts,
    D bytes of dense weights that are read, E bytes of all experts, row = the bytes of one hidden vector:

        fixed + D/bandwidth + max(kv)·kv_token_bytes/bandwidth
        + max(batch)·(2·params(D)/flops + request_s)
        + max[E/m·(1 − (1 − k/n)^(B+P))·min(imb, 1.1)/bandwidth, imb·B/m·2·params(E)·k/n/flops]
        + max(prefill)·2·params(D)/flops + imb·P/m·2·params(E)·k/n/flops
        + 2·L·{latency(m) + row·max(rows)·(d_node/node_link + d_cross/cross_link) + row·(B+P)/gather_link}  (0 if m = 1)

        d_node = m·(1 − (1 − 1/m)^k), d_cross = (nodes − 1)·(1 − (1 − 1/nodes)^k), nodes = ⌈m/ranks_per_node⌉

    imb is 1 for a single worker. gather_link is for dispatch that sends every row to all workers, which the engine
    here does: the work on a row that came is done whether one of its experts is here or not.

    Where all workers share `cores` devices (a machine with fewer cores than workers), a term of the first four lines
    is the larger one of its value for the slowest worker and of its sum over all workers divided by `cores`. Of
    `fixed + D/bandwidth` the sum is over workers with a row, taken as min(m, B+P) (the others wait more than they
    work); Σ kv is taken as max(kv)·B/max(batch), at most m·max(kv).

    Source: the cost model of the project's policy study, there for Qwen3-30B-A3B and for decoding and prefill apart;
    here prefill shares the iteration's reading of experts and its exchanges. The attention of prefill tokens over their
    own context, and differences between layers, are left out. request_s, gather_link and cores come from runs of this
    engine on CPUs.
    """
    m, cores = workers, c[_CORES]
    imbalance = c[_IMBALANCE] if m > 1 else 1.0
    kv_total = kv_max * min(m, batch_total / batch_max) if batch_max > 0 else kv_max * m
    tokens = batch_total + prefill_total

    touched = 1 - c[_MISSED] ** tokens
    read = c[_READ] * touched * max(min(imbalance, _MOST_READ_IMBALANCE) / m, 1 / cores)
    share = max(imbalance / m, 1 / cores)  # of the experts' products, for whoever takes longest
    seconds = c[_FIXED] * max(1.0, min(m, tokens) / cores) + c[_KV] * max(kv_max, kv_total / cores)
    seconds += c[_DENSE] * (max(batch_max, batch_total / cores) + max(prefill_max, prefill_total / cores))
    seconds += c[_REQUEST] * max(batch_max, batch_total / cores)
    seconds += max(read, batch_total * share * c[_EXPERT]) + prefill_total * share * c[_EXPERT]
    return seconds + exchange_core(c, latency, m, tokens, rows_max)


@numba.njit(
    "void(float64[::1], float64[:, ::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    " float64[::1], float64[::1], float64[::1])",
    cache=True,
    error_model="numpy",
)
def _fill(c, latency, m, batch_max, batch_total, kv_max, prefill_max, prefill_total, rows_max, out):
    for i in range(len(out)):
        out[i] = seconds_core(
            c, latency, m[i], batch_max[i], batch_total[i], kv_max[i], prefill_max[i], prefill_total[i], rows_max[i]
        )


class IterationCost:
    """The time of iterations of one model on one kind of device.

    coefficients, latency: what `seconds_core` takes, float64 [15] and [sizes, 2].
    """

    def __init__(self, profile: DeviceProfile, shape: ModelShape) -> None:
        self.profile, self.shape = profile, shape
        self.coefficients = coefficients(profile, shape)
        self.latency = latency_table(profile)

    def seconds(
        self,
        workers: Any,
        batch_max: Any,
        batch_total: Any,
        kv_max: Any,
        prefill_max: Any = 0.0,
        prefill_total: Any = 0.0,
        rows_max: Any = None,
    ) -> Any:
        """Seconds; numbers give a number, arrays a float64 array of their common shape. Formula: `seconds_core`.

        rows_max: by default batch_max + prefill_max, which is exact where one worker has both and never too small.
        """
        if rows_max is None:
            rows_max = batch_max + prefill_max
        given = (workers, batch_max, batch_total, kv_max, prefill_max, prefill_total, rows_max)
        if all(np.ndim(a) == 0 for a in given):
            return seconds_core(self.coefficients, self.latency, *given)
        arrays = np.broadcast_arrays(*[np.asarray(a, dtype=np.float64) for a in given])
        out = np.empty(arrays[0].size)
        _fill(self.coefficients, self.latency, *[np.ascontiguousarray(a).ravel() for a in arrays], out)
        return out.reshape(arrays[0].shape)

    def exchange_seconds(self, workers: float, tokens: np.ndarray, rows_max: np.ndarray) -> np.ndarray:
        """Of `seconds`, those of dispatch and combine: float64 [n] like tokens (batch_total + prefill_total)."""
        columns = zip(tokens.tolist(), rows_max.tolist(), strict=True)
        return np.array([exchange_core(self.coefficients, self.latency, workers, t, r) for t, r in columns])


_cost_of = lru_cache(maxsize=64)(IterationCost)


def iteration_seconds(
    profile: DeviceProfile,
    shape: ModelShape,
    *,
    batch: Sequence[int],
    kv_tokens: Sequence[int],
    prefill_tokens: Sequence[int],
) -> float:
    """Seconds of one iteration; one entry for each active worker, with the meaning they have in `WorkerIterations`.

    Formula: `seconds_core`.
    """
    workers = len(batch)
    assert workers == len(kv_tokens) == len(prefill_tokens) > 0
    cost = _cost_of(profile, shape)
    rows = max(b + p for b, p in zip(batch, prefill_tokens, strict=True))
    return seconds_core(
        cost.coefficients,
        cost.latency,
        workers,
        max(batch),
        sum(batch),
        max(kv_tokens),
        max(prefill_tokens),
        sum(prefill_tokens),
        rows,
    )
