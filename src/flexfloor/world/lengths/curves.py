"""Distributions from samples of which some are only known to be at least so large: Kaplan–Meier, as quantile curves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

LEVELS = np.unique(
    np.concatenate(
        [
            [0.0, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075],
            np.arange(0.1, 0.91, 0.025),
            [0.92, 0.935, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 0.9999],
        ]
    )
)
"""Where a curve keeps its quantiles: dense in the upper tail, which decides how long a rollout lasts."""

_NEAR = 0.1  # a cap this close to the end of a curve is the limit that the curve's samples were cut by

_COARSE = np.concatenate([[0.0, 0.003, 0.01, 0.025], np.linspace(0.05, 0.95, 19), [0.975, 0.99]])


@dataclass(frozen=True)
class Samples:
    """Points with weights: values float64 [n]; weights float64 [n] ≥ 0; censored bool [n], at least the value."""

    values: np.ndarray
    weights: np.ndarray
    censored: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | float = 1.0, censored: np.ndarray | bool = False) -> Samples:
        return cls(values, np.broadcast_to(weights, values.shape), np.broadcast_to(censored, values.shape))

    def __add__(self, other: Samples) -> Samples:
        return Samples(
            np.concatenate([self.values, other.values]),
            np.concatenate([self.weights, other.weights]),
            np.concatenate([self.censored, other.censored]),
        )

    def scaled(self, total: float) -> Samples:
        """The same with weights that add up to `total`."""
        return Samples(self.values, self.weights * (total / max(float(self.weights.sum()), 1e-12)), self.censored)


@dataclass(frozen=True)
class Curve:
    """A distribution of z by its quantiles, up to a cap that every caller brings.

    levels: float64 [k] rising from 0 to below 1; z: float64 [k] strictly rising. Above the last level the quantile runs
    on a straight line to the cap at level 1; whatever lies above the cap is at the cap. Where the last level ends close
    to the cap, what is beyond it was cut by a limit and is at the cap too.
    """

    levels: np.ndarray
    z: np.ndarray

    def quantile(self, level: np.ndarray, cap: np.ndarray) -> np.ndarray:
        """level, cap: float64 [n] → float64 [n]."""
        inside = np.interp(level, self.levels, self.z)
        gap = np.maximum(cap - self.z[-1], 0.0)
        beyond = np.maximum(level - self.levels[-1], 0.0) / (1.0 - self.levels[-1])
        beyond = np.where((gap < _NEAR) & (beyond > 0), 1.0, beyond)
        above = np.where(beyond < 1, np.minimum(self.z[-1], cap) + beyond * gap, cap)
        return np.where(beyond > 0, above, np.minimum(inside, cap))

    def below(self, z: np.ndarray, cap: np.ndarray) -> np.ndarray:
        """P(value ≤ z) for z below the cap; z, cap: float64 [n] → float64 [n]."""
        inside = np.interp(z, self.z, self.levels, left=0.0)
        gap = cap - self.z[-1]
        beyond = np.where(gap < _NEAR, 0.0, np.clip((z - self.z[-1]) / np.maximum(gap, _NEAR), 0.0, 1.0))
        return np.where(z > self.z[-1], self.levels[-1] + beyond * (1.0 - self.levels[-1]), inside)

    def density(self, z: np.ndarray, cap: np.ndarray) -> np.ndarray:
        """Of a coarse version of the curve, never 0: for comparing how well forecasts explain what came."""
        levels, points, slope = self._coarse
        at = np.searchsorted(points, z)
        inside = slope[np.clip(at, 0, len(slope) - 1)]
        beyond = (1.0 - levels[-1]) / np.maximum(cap - points[-1], 0.5)
        return np.maximum(np.where(at >= len(points), beyond, inside), 1e-4)

    @cached_property
    def _coarse(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(levels, points, density left of each point)."""
        levels = np.unique(np.concatenate([_COARSE * self.levels[-1], self.levels[-1:]]))
        points = np.interp(levels, self.levels, self.z)
        slope = np.diff(levels) / np.maximum(np.diff(points), 0.02)
        return levels, points, np.concatenate([[1e-4], slope])

    def samples(self, total: float) -> Samples:
        """The curve as samples that weigh `total`, for mixing with others; what is above its end is "at least that"."""
        middle = (self.levels[1:] + self.levels[:-1]) / 2
        values = np.append(np.interp(middle, self.levels, self.z), self.z[-1])
        weights = np.append(np.diff(self.levels), 1.0 - self.levels[-1]) * total
        return Samples(values, weights, np.arange(len(values)) == len(middle))


def fit_curve(samples: Samples) -> Curve:
    """Product-limit estimate (Kaplan and Meier 1958) of the samples' distribution, each sample's mass in its middle.

    Mass that censored samples leave over lies above the curve's last level.
    """
    keep = samples.weights > 0
    values, weights, censored = samples.values[keep], samples.weights[keep], samples.censored[keep]
    assert len(values), "a curve needs samples"
    order = np.lexsort((censored, values))  # at equal values those that ended come before those that go on
    values, weights, ended = values[order], weights[order], ~censored[order]
    at_risk = np.cumsum(weights[::-1])[::-1]
    hazard = np.where(ended, np.minimum(weights / at_risk, 1.0), 0.0)
    with np.errstate(divide="ignore"):
        below = -np.expm1(np.cumsum(np.log1p(-hazard)))
    middle = (below + np.concatenate([[0.0], below[:-1]])) / 2
    if not ended.any():  # all above the largest value seen
        return Curve(np.zeros(1), values[-1:])
    values, middle = values[ended], middle[ended]
    top = min(float(middle[-1]), LEVELS[-1])
    levels = np.append(LEVELS[: np.searchsorted(LEVELS, top)], top)
    z = np.interp(levels, middle, values)
    return Curve(levels, z + 1e-9 * np.arange(len(z)))
