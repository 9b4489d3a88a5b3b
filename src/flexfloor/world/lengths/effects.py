"""What a length is made of: log length = mean + epoch + prompt + rest, with prompts, epochs and rest drawn at random.

A mixed model with variance components from the data: how much the prompt explains (the intra-class correlation,
between / (between + within)) decides how far a prompt's own history is believed. Estimated by alternating the effects'
best linear unbiased predictions with moments of the variances (Searle, Casella and McCulloch 1992, "Variance
Components"); censored values are replaced by their expectation, given that they are larger (Tobit, by EM).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_ndtr

_WIDEST_DRIFT = 1.0  # standard deviation of epochs' effects beforehand
_NONE_FREE = 1e-6  # degrees of freedom that are none, but for rounding
_MOST_FITTED = 4000  # values that the start is fitted to

_MOST_EXCESS = 2.0
"""Most that a censored log length is raised by: a limit tells little about what lies far beyond it."""


@dataclass(frozen=True)
class Guess:
    """Before any data: mean and variance of log length, share that prompts explain; worth `weight` responses."""

    mean: float
    variance: float
    correlation: float = 0.3
    weight: float = 4.0


@dataclass(frozen=True)
class Effects:
    """mean; within, between: variances of the rest and of prompts; epoch_variance. epoch: float64 [epochs].

    between_seen: variance of prompts by the data alone, without the guess; None where they do not tell.
    count, sum: of each prompt's values without the epoch's effect, weighted, float64 [prompts]; values: float64 [n],
    the same one by one, censored ones as expected.
    """

    mean: float
    within: float
    between: float
    between_seen: float | None
    epoch_variance: float
    epoch: np.ndarray
    count: np.ndarray
    sum: np.ndarray
    values: np.ndarray

    def forecast(self, count: np.ndarray, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, variance) of prompts that have values of this weighted count and sum, the rest not included."""
        return shrink(count, total, self.mean, self.between, self.within)


def shrink(
    count: np.ndarray, total: np.ndarray, mean: np.ndarray | float, between: np.ndarray | float, within: float
) -> tuple[np.ndarray, np.ndarray]:
    """(mean, variance) of a normal mean that was `mean` ± `between` before values of variance `within` came."""
    own = count * between / (count * between + within)
    return mean + own * (total / np.maximum(count, 1e-12) - mean), between * (1.0 - own)


def expected_excess(center: np.ndarray, spread: np.ndarray | float, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, variance) of a normal variable (center, standard deviation spread), given that it lies above bound."""
    a = (bound - center) / spread
    ratio = np.exp(-0.5 * a * a - log_ndtr(-a)) / np.sqrt(2 * np.pi)  # inverse Mills ratio
    mean = np.minimum(center + spread * ratio, np.maximum(bound + _MOST_EXCESS, center))
    return np.maximum(mean, bound), spread**2 * np.clip(1.0 + a * ratio - ratio**2, 0.0, 1.0)


def fit_censored_normal(x: np.ndarray, censored: np.ndarray, weight: np.ndarray, guess: Guess) -> tuple[float, float]:
    """(mean, variance) of a normal sample, some of it censored; the guess counts as values around its mean.

    Newton's method on Olsen's parameters 1/σ and μ/σ, in which the likelihood is concave (Olsen 1978, Econometrica 46).
    """
    thin = slice(None, None, -(-len(x) // _MOST_FITTED))
    share = len(x[thin]) / len(x)
    offset, half = guess.mean, np.sqrt(guess.variance)
    ended = ~censored[thin]
    points = np.concatenate([x[thin][ended] - offset, [-half, half]])
    masses = np.concatenate([weight[thin][ended], [guess.weight * share / 2] * 2])
    bounds, bound_masses = x[thin][~ended] - offset, weight[thin][~ended]
    steepness, ratio = 1.0 / half, 0.0
    for _ in range(20):
        u, a = steepness * points - ratio, ratio - steepness * bounds
        mills = np.exp(-0.5 * a * a - log_ndtr(a)) / np.sqrt(2 * np.pi)
        bend = bound_masses * mills * (mills + a)
        total = float(masses.sum())
        slope = np.array(
            [
                total / steepness - (masses * u * points).sum() - (bound_masses * bounds * mills).sum(),
                (masses * u).sum() + (bound_masses * mills).sum(),
            ]
        )
        cross = (masses * points).sum() + (bounds * bend).sum()
        curvature = np.array(
            [
                [total / steepness**2 + (masses * points**2).sum() + (bounds**2 * bend).sum(), -cross],
                [-cross, total + bend.sum()],
            ]
        )
        step = np.linalg.solve(curvature, slope)
        # Steepness stays positive.
        step *= min(1.0, 0.5 * steepness / max(abs(float(step[0])), 1e-12))
        steepness, ratio = steepness + float(step[0]), ratio + float(step[1])
        if abs(step).max() < 1e-6 * max(steepness, 1.0):
            break
    return offset + ratio / steepness, max(1.0 / steepness**2, 1e-4)


def fit_effects(
    prompt: np.ndarray,
    x: np.ndarray,
    censored: np.ndarray,
    weight: np.ndarray,
    guess: Guess,
    *,
    prompts: int,
    epoch: np.ndarray | None = None,
    rounds: int = 8,
) -> Effects:
    """prompt, epoch: int64 [n], from 0 on; x: log lengths, float64 [n]; censored: bool [n]; weight: float64 [n]."""
    epochs = int(epoch.max(initial=0)) + 1 if epoch is not None else 1
    epoch = np.zeros(len(x), np.int64) if epoch is None else epoch
    seen = sparse.csr_array((weight, (prompt, epoch)), shape=(prompts, epochs)) if epochs > 1 else None
    shift, epoch_variance = np.zeros(epochs), 0.0
    mean, variance = guess.mean, guess.variance
    between, within = guess.correlation * variance, (1 - guess.correlation) * variance
    count = np.bincount(prompt, weight, prompts)
    squares = np.bincount(prompt, weight * weight, prompts)
    occupied = np.maximum(count, 1e-12)
    free = float((count - squares / occupied).sum())  # degrees of freedom within prompts
    all_count = float(count.sum())
    others = 1.0 - weight / occupied[prompt]  # a value on its own says nothing of the spread within its prompt
    extra = np.zeros(len(x))
    seen_between = (0.0, 0.0)
    y = np.array(x, float)
    cut = np.flatnonzero(censored)
    if len(x):
        # A start so near that few rounds do; from afar they are slow where most values are censored.
        mean, variance = fit_censored_normal(x, censored, weight, guess)
        between, within = guess.correlation * variance, (1 - guess.correlation) * variance
        y[cut], _ = expected_excess(np.full(len(cut), mean), np.sqrt(variance), x[cut])
    sums = np.bincount(prompt, weight * y, prompts)
    for turn in range(rounds if len(x) else 0):
        own, _ = shrink(count, sums, mean, between, within)
        if seen is not None and turn % 3 == 0:
            shift, epoch_variance = _epoch_effects(seen, prompt, epoch, y + shift[epoch], weight, within)
        bare = x - shift[epoch]
        y = bare.copy()
        if len(cut):
            y[cut], extra[cut] = expected_excess(own[prompt[cut]], np.sqrt(within), bare[cut])
        sums = np.bincount(prompt, weight * y, prompts)
        # Inverse variances: however little prompts explain, the guess counts for no more than its responses.
        known, guessed = count / (count * between + within), guess.weight / variance
        mean = (guessed * guess.mean + float((known * sums / occupied).sum())) / (guessed + float(known.sum()))
        inside = float((weight * ((y - (sums / occupied)[prompt]) ** 2 + extra * others)).sum())
        around = float((weight * ((y - mean) ** 2 + extra)).sum())
        variance = (around + guess.weight * guess.variance) / (all_count + guess.weight)
        within = (inside + guess.weight * (1 - guess.correlation) * variance) / (free + guess.weight)
        seen_between = _between_seen(count, sums / occupied, within, free)
        between = _between(*seen_between, variance, guess)
        within, between = max(within, 1e-4), max(between, 1e-6)
    moments, sure = seen_between
    told = moments if sure > _NONE_FREE else None
    return Effects(mean, within, between, told, epoch_variance, shift, count, sums, y)


def _between_seen(count: np.ndarray, means: np.ndarray, within: float, free: float) -> tuple[float, float]:
    """(variance of prompts by moments, how many degrees of freedom it rests on: several prompts, several values).

    Around the mean of the values, not the one that a guess has a part in: that would make prompts differ more.
    """
    groups, total = int((count > 0).sum()), float(count.sum())
    sure = min(groups - 1.0, free)
    if sure <= 0:
        return 0.0, 0.0
    size = (total - float((count**2).sum()) / total) / (groups - 1)
    mean = float((count * means).sum()) / total
    moments = (float((count * (means - mean) ** 2).sum()) / (groups - 1) - within) / max(size, 1e-12)
    return max(moments, 0.0), sure


def _between(moments: float, sure: float, variance: float, guess: Guess) -> float:
    """Variance of prompts: by moments as far as these are sure, else by the guess."""
    return (sure * moments + guess.weight * guess.correlation * variance) / (sure + guess.weight)


def _epoch_effects(
    seen: sparse.csr_array, prompt: np.ndarray, epoch: np.ndarray, y: np.ndarray, weight: np.ndarray, within: float
) -> tuple[np.ndarray, float]:
    """(effect of each epoch, around their weighted mean 0; variance of the steps from one to the next).

    By least squares with a free effect for every prompt, so that epochs of longer prompts are not taken for drift: only
    prompts of several epochs say something. seen: weights of each prompt in each epoch, [prompts, epochs].
    """
    prompts, epochs = seen.shape
    count = np.maximum(np.bincount(prompt, weight, prompts), 1e-12)
    in_epoch = np.bincount(epoch, weight, epochs)
    ridge = within / _WIDEST_DRIFT**2
    rest = np.bincount(epoch, weight * y, epochs) - seen.T @ (np.bincount(prompt, weight * y, prompts) / count)
    normal = LinearOperator(
        (epochs, epochs), matvec=lambda e: (in_epoch + ridge) * e - seen.T @ ((seen @ e) / count), dtype=float
    )
    scale = LinearOperator((epochs, epochs), matvec=lambda e: e / (in_epoch + ridge), dtype=float)
    effect, _ = cg(normal, rest, rtol=1e-4, maxiter=200, M=scale)
    effect -= float((in_epoch * effect).sum()) / max(float(in_epoch.sum()), 1e-12)
    noise = within / np.maximum(in_epoch, 1e-12)
    return effect, max(float((np.diff(effect) ** 2 - noise[1:] - noise[:-1]).mean()), 1e-4)
