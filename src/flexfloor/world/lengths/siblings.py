"""What responses to one prompt say of each other while some have ended and others still run.

Log lengths are normal around their prompt's effect, which is normal itself. Ended siblings make the belief about an
effect narrower and leave it normal; those that go on, longer than so many tokens, bend it, which is summed up on a few
points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, logsumexp

_POINTS = np.linspace(-3.5, 3.5, 15)  # standard deviations at which an effect is looked at
_LOG_MASS = -0.5 * _POINTS**2 - logsumexp(-0.5 * _POINTS**2)
_SHARES = np.array([0.02, 0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.96])
_SHARE_PRIOR = np.log([0.2, 0.2, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03])
_MOST_ROWS = 4000  # responses that the share is judged by


@dataclass(frozen=True)
class Siblings:
    """Started responses by prompt. group: int64 [n], from 0 to groups − 1; rest: log length less its forecast, float64
    [n]; going: bool [n], at least so long."""

    group: np.ndarray
    rest: np.ndarray
    going: np.ndarray
    groups: int

    def belief(
        self, before: np.ndarray, within: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """before: variance of each group's effect beforehand, float64 [groups]; within: variance around it.

        Returns (points [groups, k], log mass at each [groups, k], log probability of every going response at its
        group's points [going, k], variance given the ended ones [groups], number of ended ones [groups]).
        """
        ended = ~self.going
        count = np.bincount(self.group[ended], minlength=self.groups).astype(float)
        total = np.bincount(self.group[ended], self.rest[ended], self.groups)
        own = before / (count * before + within)
        middle, variance = own * total, own * within
        points = middle[:, None] + np.sqrt(variance)[:, None] * _POINTS
        g = self.group[self.going]
        longer = log_ndtr((points[g] - self.rest[self.going][:, None]) / np.sqrt(within))
        mass = np.stack([np.bincount(g, longer[:, k], self.groups) for k in range(len(_POINTS))], axis=1) + _LOG_MASS
        return points, mass, longer, variance, count


def hear_siblings(
    siblings: Siblings, rows: np.ndarray, group: np.ndarray, variance: np.ndarray, within: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(effect, its variance, ended siblings) of each row, given its siblings but not itself; all float64 [rows].

    A row's own progress counts when its forecast is asked for; here it would count twice. rows: int64 [n], the rows
    that `siblings` holds; group: int64 [rows], of all rows; variance: of their effects beforehand, the same for
    siblings.
    """
    if siblings.groups == len(group):  # nobody has any
        return np.zeros(len(group)), variance, np.zeros(len(group))
    before = np.zeros(siblings.groups)
    before[group] = variance
    points, mass, longer, _, count = siblings.belief(before, within)
    effect, after = (moment[group] for moment in _moments(points, mass))
    going, ended = rows[siblings.going], rows[~siblings.going]
    g = siblings.group[siblings.going]
    effect[going], after[going] = _moments(points[g], mass[g] - longer)
    # Without an ended one itself: what is left when its normal share is taken out again.
    precision = np.maximum(1.0 / after[ended] - 1.0 / within, 1.0 / variance[ended])
    effect[ended] = (effect[ended] / after[ended] - siblings.rest[~siblings.going] / within) / precision
    after[ended] = 1.0 / precision
    others = count[group]
    others[ended] -= 1.0
    return effect, after, others


def share_of_prompts(siblings: Siblings, variance: float) -> float:
    """Share of the variance of log length that prompts explain, from siblings: the posterior mean on a few shares."""
    thin = -(-len(siblings.rest) // _MOST_ROWS)
    kept = siblings.group % thin == 0
    some = Siblings(siblings.group[kept], siblings.rest[kept], siblings.going[kept], siblings.groups)
    score = _SHARE_PRIOR + [_log_likelihood(some, share * variance, (1.0 - share) * variance) for share in _SHARES]
    belief = np.exp(score - score.max())
    return float((belief * _SHARES).sum() / belief.sum())


def _log_likelihood(siblings: Siblings, between: float, within: float) -> float:
    """Of ended responses (normal with equal correlation within a group), and of going ones given these."""
    _, mass, _, variance, count = siblings.belief(np.full(siblings.groups, between), within)
    ended = ~siblings.going
    values = siblings.rest[ended]
    total = np.bincount(siblings.group[ended], values, siblings.groups)
    normal = (
        float(count.sum() * np.log(within) + np.log(between / variance).sum())
        + (float((values**2).sum()) - float((variance * total**2).sum()) / within) / within
    )
    return float(logsumexp(mass, axis=1).sum()) - 0.5 * normal


def _moments(points: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, variance) of distributions given by log masses at points; both float64 [n, points]."""
    mass = np.exp(score - score.max(axis=1, keepdims=True))
    mass /= mass.sum(axis=1, keepdims=True)
    mean = (mass * points).sum(axis=1)
    return mean, np.maximum((mass * (points - mean[:, None]) ** 2).sum(axis=1), 1e-9)
