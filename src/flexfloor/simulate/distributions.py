"""Distributions of response lengths in which siblings, the responses to one prompt, are alike.

Every distribution turns a standard normal number into a length. The numbers of siblings share a part: with ρ the
correlation, z = √ρ · (of the prompt) + √(1 − ρ) · (of the response).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr


class LengthDistribution(Protocol):
    """max_tokens: the limit of every response; lengths never exceed it."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def correlation(self) -> float:
        """Of the normal numbers of two siblings, in [0, 1]."""

    def lengths(self, z: np.ndarray) -> np.ndarray:
        """Response tokens for standard normal numbers; int64, of the same shape."""


def draw(source: LengthDistribution, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Lengths in tokens; int64 [epochs, prompts, samples] = shape. The prompts are the same in all epochs."""
    epochs, prompts, samples = shape
    own = rng.standard_normal((epochs, prompts, samples))
    return source.lengths(
        math.sqrt(source.correlation) * rng.standard_normal((1, prompts, 1)) + math.sqrt(1 - source.correlation) * own
    )


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-lengths are normal between prompts and within each: ln length ~ log_mean + between_sd·N + within_sd·N.

    Rounded to whole tokens, and clipped to [shortest, max_tokens].
    """

    log_mean: float
    between_sd: float
    within_sd: float
    shortest: int
    max_tokens: int

    @property
    def correlation(self) -> float:
        total = self.between_sd**2 + self.within_sd**2
        return self.between_sd**2 / total if total > 0 else 0.0

    def lengths(self, z: np.ndarray) -> np.ndarray:
        exact = np.exp(self.log_mean + math.hypot(self.between_sd, self.within_sd) * z)
        return np.clip(np.rint(exact), self.shortest, self.max_tokens).astype(np.int64)


@dataclass(frozen=True)
class Capped:
    """Lengths with a given mean, median, share exactly at the limit and correlation of the siblings' log-lengths.

    These hold for the distribution itself, not only in the long run of some fit. Its quantiles, for u in (0, 1):

        u ≤ 1/2                      shortest + (median − shortest) · (2u)^p
        1/2 < u < 1 − capped_share   straight from the median to the limit
        u ≥ 1 − capped_share         the limit

    with p from the mean: the upper parts have theirs, and the mean of the lower one is
    shortest + (median − shortest)/(p + 1). u is the normal distribution function of z (a Gaussian copula); the
    correlation of z is found by `correlation` so that log-lengths have theirs.
    """

    mean: float
    median: float
    shortest: int
    max_tokens: int
    capped_share: float
    sibling_correlation: float

    @cached_property
    def power(self) -> float:
        """p. Raises ValueError where no distribution of this form has the mean."""
        middle = (0.5 - self.capped_share) * (self.median + self.max_tokens) / 2
        lower = (self.mean - self.capped_share * self.max_tokens - middle) / 0.5
        if not self.shortest < lower < self.median:
            raise ValueError(
                f"no distribution has mean {self.mean:g} with median {self.median:g}, shortest {self.shortest} and "
                f"{self.capped_share:g} of the responses at the limit {self.max_tokens}; give a mean nearer to it"
            )
        return (self.median - self.shortest) / (lower - self.shortest) - 1

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """Length that a share u of the responses stays below, not rounded; float64."""
        below = 1 - self.capped_share
        low = self.shortest + (self.median - self.shortest) * np.power(2 * np.minimum(u, 0.5), self.power)
        rise = (u - 0.5) / (below - 0.5) * (self.max_tokens - self.median)
        return np.where(u <= 0.5, low, np.minimum(self.median + rise, self.max_tokens))

    def lengths(self, z: np.ndarray) -> np.ndarray:
        u = ndtr(z)
        # Rounding must not bring more of them to the limit.
        rounded = np.minimum(np.rint(self.quantile(u)), self.max_tokens - 1)
        return np.where(u >= 1 - self.capped_share, self.max_tokens, rounded).astype(np.int64)

    @cached_property
    def correlation(self) -> float:
        parts = _hermite_parts(self)
        powers = np.arange(1, len(parts) + 1)
        total = parts.sum()
        return float(brentq(lambda rho: (parts * rho**powers).sum() / total - self.sibling_correlation, 0.0, 1.0))


_DEGREE = 200


def _hermite_parts(source: Capped) -> np.ndarray:
    """How the variance of log-lengths divides over the normalised Hermite polynomials of degree 1 and up; float64.

    With f(z) = ln length and c_k = E[f(z)·h_k(z)], Mehler's formula has cov(f(z), f(z')) = Σ c_k²·ρ^k for normal
    numbers with correlation ρ.
    """
    z = np.linspace(-9.0, 9.0, 12_001)
    root = np.exp(-(z**2) / 4) / (2 * math.pi) ** 0.25  # of the density: halves keep the recursion in range
    weighted = np.log(source.quantile(ndtr(z))) * root * (z[1] - z[0])
    before, current = np.zeros_like(z), root
    parts = np.empty(_DEGREE)
    for k in range(_DEGREE):
        before, current = current, (z * current - math.sqrt(k) * before) / math.sqrt(k + 1)
        parts[k] = (weighted @ current) ** 2
    return parts
