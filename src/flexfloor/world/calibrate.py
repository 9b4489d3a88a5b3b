"""A device profile from the iterations that real runs recorded, and how far it is off on iterations it did not see.

The time of an iteration is linear in the parameters that are fitted (seconds, and the inverse of each speed) wherever
the larger side of its maxima is known. So each round takes the slopes of `IterationCost` at the parameters so far and
solves for better ones by least squares on relative errors, none of them negative, leaving out what lies more than three
deviations off: on a machine that does other things too some iterations say nothing about the rest. Groups of different
sizes have deviations of their own: where more workers than cores wait for each other, times scatter more by nature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from flexfloor.errors import InputError
from flexfloor.ledger.events import read_ledger
from flexfloor.progress import ModelShape
from flexfloor.world.costs import IterationCost
from flexfloor.world.profiles import DeviceProfile

HELD_OUT = 5
"""Every fifth chunk of all runs together is kept out of the fit, for the stated error."""

LEAST_ITERATIONS = 100
_ROUNDS = 12
_OUTLIER = 3.0  # standard deviations, estimated from the median deviation
_NEVER_OUTLIER = 0.15  # relative error; what fits worse than the best half is not yet an accident
_LEAST_RESIZES = 3
_ANEW = "record the run anew"
_SAME = (
    "dtype",
    "device",
    "numerics_path",
    "threads_per_worker",
)  # or the runs are not of one device; models may differ


@dataclass(frozen=True)
class Run:
    """What one ledger says about time. Arrays have one entry an iteration, except where stated.

    seconds: of an iteration, the mean over the workers: each one's iterations follow each other without a gap, but
    their bounds differ a little, so that the slowest of each would add up to more than has passed.
    counts: what `IterationCost.seconds` takes, in its order, float64 [7, iterations].
    chunk: number of the chunk. looks_s: per chunk, its time that no iteration accounts for. between_s: from one chunk
    to the next where nothing else happened.
    resizes: float64 [resizes, 3], (whether the group changed, bytes moved, seconds); the bytes are for the worker with
    most to send, if those who leave send equally.
    """

    path: Path
    fleet: Mapping[str, Any]
    seconds: np.ndarray
    counts: np.ndarray
    chunk: np.ndarray
    looks_s: np.ndarray
    between_s: np.ndarray
    resizes: np.ndarray

    shape: ModelShape

    def predict(self, profile: DeviceProfile) -> np.ndarray:
        """Seconds of every iteration on a device."""
        return IterationCost(profile, self.shape).seconds(*self.counts)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Errors over iterations that the fit did not see: |predicted/measured − 1| of single ones, and of their sum."""

    iterations: int
    median: float
    p90: float
    total: float  # Σ predicted / Σ measured − 1

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray) -> HeldOut:
        errors = np.abs(predicted / measured - 1)
        total = float(predicted.sum() / measured.sum() - 1)
        return cls(len(measured), float(np.median(errors)), float(np.percentile(errors, 90)), total)


@dataclass(frozen=True)
class Calibration:
    """fitted: iterations; outliers: those left out of the fit beside the ones held out. by_workers: errors by the size
    of the group. kept: fields that are the base's, since the runs do not tell. note: what sizes of groups that did not
    run leave open, empty if nothing; vague: the fields that it is about, fitted, but only together.
    """

    profile: DeviceProfile
    fitted: int
    outliers: int
    held_out: HeldOut
    by_workers: dict[int, HeldOut]
    kept: tuple[str, ...]
    note: str
    vague: tuple[str, ...]


def read_run(path: Path) -> Run:
    """The iterations of a ledger. Raises InputError for one whose times are not those of a machine."""
    records = read_ledger(path)
    try:
        return _to_run(path, records)
    except KeyError as error:
        raise InputError(f"{path}: a record lacks {error}, which ledgers of this version have; {_ANEW}") from None
    except (TypeError, ValueError, IndexError, AttributeError):
        raise InputError(f"{path}: a record is not what ledgers of this version have; {_ANEW}") from None


def _to_run(path: Path, records: Sequence[Mapping[str, Any]]) -> Run:
    fleet = records[0]["fleet"]
    if fleet["kind"] != "engine":
        raise InputError(f"{path}: the run was made by a {fleet['kind']} fleet; calibrate from runs on real workers")
    if fleet["pace"] is not None:
        raise InputError(f"{path}: the run was paced to profile {fleet['profile']!r}; record one without `pace`")
    chunks = [r for r in records if r["type"] == "chunk" and r["iterations"] > 0]
    if not chunks:
        raise InputError(f"{path}: no iteration was recorded; give the ledger of a run that generated something")
    seconds, counts = [], []
    for record in chunks:
        named = ("seconds", "batch", "prefill_tokens", "kv_tokens")
        for name, worker in ((n, w) for w in record["workers"] for n in named):
            if len(worker[name]) != record["iterations"]:
                raise InputError(
                    f"{path}: {name} of worker {worker['worker']} has {len(worker[name])} entries for "
                    f"{record['iterations']} iterations from {record['first_iteration']} on; {_ANEW}"
                )
        took, batch, prefill, kv = (np.array([w[n] for w in record["workers"]], dtype=np.float64) for n in named)
        counts.append(_counts(batch, prefill, kv))
        seconds.append(took.mean(axis=0))
    durations = np.array([c["t1"] - c["t0"] for c in chunks])
    worked = np.array([s.sum() for s in seconds])
    run = Run(
        path,
        fleet,
        seconds=np.concatenate(seconds),
        counts=np.concatenate(counts, axis=1),
        chunk=np.repeat(np.arange(len(chunks)), [len(s) for s in seconds]),
        looks_s=durations - worked,
        between_s=np.array(list(_gaps(records))),
        resizes=_resizes(records),
        shape=ModelShape(**fleet["shape"] | {"moe_layers": tuple(fleet["shape"]["moe_layers"])}),
    )
    if not (np.isfinite(run.seconds).all() and (run.seconds > 0).all() and np.isfinite(run.counts).all()):
        raise InputError(f"{path}: iterations of no time are recorded; give a ledger of real workers")
    return run


def _counts(batch: np.ndarray, prefill: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """float64 [7, iterations] from arrays [workers, iterations]."""
    workers, iterations = batch.shape
    rows = (batch + prefill).max(axis=0)
    tops = (batch.max(axis=0), batch.sum(axis=0), kv.max(axis=0), prefill.max(axis=0), prefill.sum(axis=0), rows)
    return np.stack([np.full(iterations, float(workers)), *tops])


def _gaps(records: Sequence[Mapping[str, Any]]) -> Iterable[float]:
    """Seconds between two chunks with nothing but the driver's look, and requests that it bound, between them."""
    before: Mapping[str, Any] | None = None
    for record in records:
        if record["type"] == "chunk":
            if before is not None:
                yield record["t0"] - before["t1"]
            before = record
        elif record["type"] in ("resize", "submit"):
            before = None


def _resizes(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    rows = [
        (
            float(bool(r["leaving"] or r["joining"])),
            (r["expert_bytes"] + r["kv_bytes"]) / max(1, len(r["leaving"])),
            r["t1"] - r["t0"],
        )
        for r in records
        if r["type"] == "resize" and r["failed"] is None
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def calibrate(runs: Sequence[Run], base: DeviceProfile, cores: float = math.inf) -> Calibration:
    """The profile that explains the runs best. base: what they do not tell. cores: devices that the workers share.

    The runs may be of several models. Raises InputError for different engines, a run that is given twice, and too few
    iterations.
    """
    _check(runs)
    measured = np.concatenate([r.seconds for r in runs])
    held = held_out(runs)
    _check_enough(runs, held)
    model = _Model(runs, base, cores)
    parameters, outliers = model.fit(measured, ~held)
    resizing, kept = _fit_resizes(np.concatenate([r.resizes for r in runs]))
    looks = max(0.0, _median([r.looks_s for r in runs])) + max(0.0, _median([r.between_s for r in runs]))
    profile = _rounded(replace(model.profile(parameters), look_s=looks, **resizing))
    predicted = np.concatenate([r.predict(profile) for r in runs])
    workers = np.concatenate([r.counts[0] for r in runs]).astype(int)
    by_workers = {
        int(m): HeldOut.of(predicted[held & (workers == m)], measured[held & (workers == m)])
        for m in np.unique(workers[held])
    }
    kept = ("memory_bytes", "reserve_bytes", "imbalance", *model.kept, *kept)
    note, vague = _left_open(np.unique(workers).tolist())
    errors = HeldOut.of(predicted[held], measured[held])
    return Calibration(profile, int((~held).sum()) - outliers, outliers, errors, by_workers, kept, note, vague)


def held_out(runs: Sequence[Run]) -> np.ndarray:
    """Which iterations of all runs, one run after the other, the fit must not see: bool [iterations].

    Chunks count on from one run to the next, so that short runs have their share.
    """
    before = np.cumsum([0] + [int(r.chunk[-1]) + 1 for r in runs])
    chunk = np.concatenate([r.chunk + first for r, first in zip(runs, before.tolist(), strict=False)])
    return chunk % HELD_OUT == HELD_OUT - 1


def _check_enough(runs: Sequence[Run], held: np.ndarray) -> None:
    named = f"{runs[0].path}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''}"
    remedy = "give ledgers of longer runs, or more of them"
    if not held.any():
        chunks = sum(int(r.chunk[-1]) + 1 for r in runs)
        raise InputError(
            f"{named}: {chunks} chunk(s) in all are too few to keep every fifth out of the fit for its check; {remedy}"
        )
    if (~held).sum() < LEAST_ITERATIONS:
        raise InputError(
            f"{named}: {(~held).sum()} iterations, beside {held.sum()} that are kept out of the fit for its check, are "
            f"too few; it takes {LEAST_ITERATIONS}: {remedy}"
        )


def _left_open(sizes: list[int]) -> tuple[str, tuple[str, ...]]:
    """`note` and `vague` of a Calibration. sizes: of the groups that ran.

    A group's latency has no other trace than what an iteration takes whatever is in it, like the fixed part; on one
    worker there is the fixed part alone.
    """
    if sizes == [1]:
        return "every run had one worker: latency_s and gather_link, of several, are the base's", ()
    if 1 in sizes:
        return "", ()
    ran = f"every run had {sizes[0]} workers" if len(sizes) == 1 else "no run had one worker"
    return f"{ran}: of fixed_s and latency_s only the sum is fitted; add a run on one worker", ("fixed_s", "latency_s")


def _check(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        for name in _SAME:
            if other.fleet[name] != first.fleet[name]:
                raise InputError(
                    f"{other.path}: {name} is {other.fleet[name]!r}, in {first.path} {first.fleet[name]!r};"
                    " calibrate from runs of one engine on one machine"
                )
    for i, other in enumerate(runs):
        for earlier in runs[:i]:
            if np.array_equal(other.seconds, earlier.seconds):  # no two runs take the same to the last digit
                raise InputError(f"{other.path}: is the run of {earlier.path}, which would count twice; give it once")


def _median(parts: Sequence[np.ndarray]) -> float:
    values = np.concatenate(parts)
    return float(np.median(values)) if len(values) else 0.0


def _rounded(profile: DeviceProfile) -> DeviceProfile:
    """With five digits a number, more than any fit tells."""
    numbers = {f.name: getattr(profile, f.name) for f in fields(profile)}
    short: dict[str, Any] = {n: float(f"{value:.5g}") for n, value in numbers.items() if isinstance(value, float)}
    short["latency_s"] = tuple((size, float(f"{seconds:.5g}")) for size, seconds in profile.latency_s)
    return replace(profile, **short)


class _Model:
    """The iteration time as a function of the fitted parameters, over the iterations of runs.

    parameters: fixed_s, 1/bandwidth, 1/flops, request_s, and with groups of two or more 1/gather_link and the latency
    of each size of group.
    """

    def __init__(self, runs: Sequence[Run], base: DeviceProfile, cores: float) -> None:
        self._runs, self._base, self._cores = runs, base, cores
        self._workers = np.concatenate([run.counts[0] for run in runs])
        self._sizes = sorted({int(m) for m in self._workers if m > 1})
        self.kept: tuple[str, ...] = ("node_link", "cross_link", "ranks_per_node")
        self.kept += () if self._sizes else ("latency_s", "gather_link")

    def fit(self, measured: np.ndarray, use: np.ndarray) -> tuple[np.ndarray, int]:
        """The parameters, and how many of the iterations `use` (bool) were left out as outliers.

        A speed of the device whose time does not show is the base's: a model that needs more of it may follow.
        """
        free = np.ones(len(self._start()), dtype=bool)
        parameters, outliers = self._fit(measured, use, free)
        hidden = {i: name for i, name in ((1, "bandwidth"), (2, "flops")) if parameters[i] <= 0}
        if hidden:
            free[list(hidden)] = False
            self.kept += tuple(hidden.values())
            parameters, outliers = self._fit(measured, use, free)
        return parameters, outliers

    def _fit(self, measured: np.ndarray, use: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, int]:
        scale = self._start()
        parameters, kept, weight = scale.copy(), use, 1 / measured
        for _ in range(_ROUNDS):
            slopes, rest = self._linearise(parameters, scale)
            rest += slopes[:, ~free] @ parameters[~free]
            scaled = (slopes * scale)[:, free][kept] * weight[kept, None]
            parameters[free] = scale[free] * nnls(scaled, (measured - rest)[kept] * weight[kept])[0]
            predicted = self._predict(parameters)
            off = np.abs(measured / predicted - 1)
            deviation = np.zeros(len(off))
            for size in np.unique(self._workers[use]):
                alike = self._workers == size
                deviation[alike] = 1.4826 * np.median(off[use & alike])
            kept = use & (off <= np.maximum(_OUTLIER * deviation, _NEVER_OUTLIER))
            weight = 1 / predicted
        return parameters, int(use.sum() - kept.sum())

    def profile(self, parameters: np.ndarray) -> DeviceProfile:
        fixed_s, per_byte, per_operation, request_s, *grouped = parameters.tolist()
        values: dict[str, Any] = {
            "name": "calibrated",
            "cores": self._cores,
            "fixed_s": fixed_s,
            "request_s": request_s,
        }
        values |= {"bandwidth": _speed(per_byte), "flops": _speed(per_operation)}  # 0 only on the way
        if grouped:
            gather, *latencies = grouped
            values["gather_link"] = _speed(gather)
            values["latency_s"] = tuple(zip(self._sizes, latencies, strict=True))
        return replace(self._base, **values)

    def _start(self) -> np.ndarray:
        """The order of magnitude of every parameter, of the right one for a device like the base."""
        base = self._base
        own = [max(base.fixed_s, 1e-6), 1 / base.bandwidth, 1 / base.flops, max(base.request_s, 1e-9)]
        link = base.gather_link if math.isfinite(base.gather_link) else base.node_link
        return np.array(own + [1 / link] * bool(self._sizes) + [1e-4] * len(self._sizes))

    def _predict(self, parameters: np.ndarray) -> np.ndarray:
        profile = self.profile(parameters)
        return np.concatenate([run.predict(profile) for run in self._runs])

    def _linearise(self, parameters: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slopes [iterations, parameters] around `parameters`, and what no parameter accounts for [iterations]."""
        here = self._predict(parameters)
        slopes = np.empty((len(here), len(parameters)))
        for i, step in enumerate(1e-6 * np.maximum(scale, parameters)):
            moved = parameters.copy()
            moved[i] += step
            slopes[:, i] = (self._predict(moved) - here) / step
        return slopes, here - slopes @ parameters


def _speed(inverse: float) -> float:
    return 1 / inverse if inverse > 0 else math.inf


def _fit_resizes(resizes: np.ndarray) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of the profile from `Run.resizes`, and the ones that stay the base's.

    seconds = switch_s, or pause_s where the group stays as it is, + bytes/move_bytes_per_s
    """
    switches, moved, seconds = resizes.T
    fitted = [
        n for n, count in (("switch_s", switches.sum()), ("pause_s", (1 - switches).sum())) if count >= _LEAST_RESIZES
    ]
    known = np.where(switches > 0, "switch_s" in fitted, "pause_s" in fitted).astype(bool)
    kept = [n for n in ("switch_s", "pause_s") if n not in fitted]
    if not fitted:
        return {}, (*kept, "move_bytes_per_s")
    switches, moved, seconds = switches[known], moved[known], seconds[known]
    unit = max(float(moved.max()), 1.0)
    columns = [switches if name == "switch_s" else 1 - switches for name in fitted]
    found, _ = nnls(np.stack([*columns, moved / unit], axis=1), seconds)
    values: dict[str, Any] = dict(zip(fitted, found[:-1].tolist(), strict=True))
    if found[-1] <= 0:  # what is moved does not show beside the rest
        return values, (*kept, "move_bytes_per_s")
    return values | {"move_bytes_per_s": unit / float(found[-1])}, tuple(kept)
