"""What earlier epochs say about the lengths of the next one: a location and a spread for every prompt, and two shapes.

The log of a length is location + spread · z, where z follows one curve for prompts with a history of their own and
another for those without. Both curves come from the data: for the first every response is forecast from its prompt's
other epochs (from the prompt's other responses where there is one epoch), and what is left is the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexfloor.world.lengths.curves import Curve, Samples, fit_curve
from flexfloor.world.lengths.effects import Effects, Guess, fit_effects
from flexfloor.world.lengths.observations import Observations

UNKNOWN, KNOWN = 0, 1
"""Which curve: of prompts without, and with other responses to go by."""

_HALF_VISITS = 3.0  # a prompt's responses weigh half as much after this many further epochs with that prompt
_HALF_EPOCHS = 8.0  # those of the shapes, after this many epochs or _HALF_RESPONSES, whichever is more
_HALF_RESPONSES = 5000
_MOST_SAMPLES = 200_000  # responses that a curve is made from: more add nothing
_BORROWED, _MOST_BORROWED = 64.0, 1000.0  # responses that the shape of all counts for in that of prompts with others
_LONG_WEIGHT = 8.0  # responses that the long guess counts for

LEAST_DRIFT = 0.05
"""Standard deviation of log length from one epoch to the next that is always thought possible."""


@dataclass(frozen=True)
class LengthModel:
    """mean, within, between, between_seen, drift: of log length (variances), see `Effects`; drift is that of the coming
    epoch, LEAST_DRIFT² at least.

    index: prompt key → row of count and sum (weighted responses and their log lengths as the coming epoch would have
    them); curves: of UNKNOWN and KNOWN; responses: what it was made from.
    """

    mean: float
    within: float
    between: float
    between_seen: float | None
    drift: float
    index: dict[str, int]
    count: np.ndarray
    sum: np.ndarray
    curves: tuple[Curve, Curve]
    responses: int

    @property
    def spread(self) -> float:
        """Standard deviation of log length over all prompts."""
        return float(np.sqrt(self.within + self.between))


def long_guess(log_limit: float) -> Guess:
    """Before anything is known nothing may be thought short: P(length ≤ t) = (t / limit)², two thirds on average."""
    return Guess(mean=log_limit - 0.5, variance=0.25, weight=1.0)


def long_samples(log_limit: float, center: float, spread: float, total: float = _LONG_WEIGHT) -> Samples:
    """The same guess as samples of z that weigh `total`."""
    level = (np.arange(32) + 0.5) / 32
    return Samples.of((log_limit + 0.5 * np.log(level) - center) / spread, total / 32)


def fit_model(observed: Observations, log_limit: float) -> LengthModel:
    """log_limit: log of the tokens that responses of the coming epoch may have."""
    guess = long_guess(log_limit)
    x = np.log(np.maximum(observed.tokens, 1).astype(float))
    epochs, epoch = np.unique(observed.epoch, return_inverse=True)
    visit, visits = _visits(observed.prompt, epoch)
    weight = 0.5 ** (_age(observed.prompt, epoch, visit, visits) / _HALF_VISITS)
    effects = fit_effects(observed.prompt, x, observed.censored, weight, guess, prompts=len(observed.keys), epoch=epoch)
    shift = _next_epoch(effects.epoch) if len(epochs) > 1 else 0.0
    mean = effects.mean + shift
    spread = float(np.sqrt(effects.within + effects.between))
    recent = 0.5 ** (_epochs_ago(epoch, len(epochs)) / _half_life(epoch, len(epochs)))
    bare = x - effects.epoch[epoch] if len(epochs) > 1 else x
    thin = slice(None, None, -(-len(x) // _MOST_SAMPLES) if len(x) else 1)
    unknown = Samples((bare - effects.mean) / spread, recent, observed.censored)
    residual, judged = _left_out(observed.prompt, visit, visits, bare, weight, effects)
    known = Samples(residual, np.where(judged, recent, 0.0), observed.censored)
    within = float(np.sqrt(effects.within))
    # Where few prompts have several responses, their shape is that of all.
    borrowed = min(_MOST_BORROWED, float(len(x))) * _BORROWED / (_BORROWED + float(known.weights.sum()))
    known, unknown = _thinned(known, thin), _thinned(unknown, thin)
    curves = (
        fit_curve(unknown + long_samples(log_limit, mean, spread)),
        fit_curve(known + unknown.scaled(borrowed) + long_samples(log_limit, mean, within)),
    )
    drift = max(effects.epoch_variance, LEAST_DRIFT**2) if len(x) else 0.0
    return LengthModel(
        mean=mean,
        within=effects.within,
        between=effects.between,
        between_seen=effects.between_seen,
        drift=drift,
        index={key: i for i, key in enumerate(observed.keys)},
        count=effects.count,
        sum=effects.sum + shift * effects.count,
        curves=curves,
        responses=len(x),
    )


def _thinned(samples: Samples, thin: slice) -> Samples:
    return Samples(samples.values[thin], samples.weights[thin], samples.censored[thin])


def _visits(prompt: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, int]:
    """(which visit each response belongs to, number of visits): a visit is a prompt in an epoch, in ascending order."""
    width = int(epoch.max(initial=0)) + 1
    distinct, visit = np.unique(prompt * width + epoch, return_inverse=True)
    return visit, len(distinct)


def _age(prompt: np.ndarray, epoch: np.ndarray, visit: np.ndarray, visits: int) -> np.ndarray:
    """Later visits of the same prompt, of each response."""
    last = np.zeros(int(prompt.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, prompt, visit)
    return (last[prompt] - visit).astype(float)


def _epochs_ago(epoch: np.ndarray, epochs: int) -> np.ndarray:
    return (epochs - 1 - epoch).astype(float)


def _half_life(epoch: np.ndarray, epochs: int) -> float:
    """Epochs after which a response weighs half in the shapes: small epochs count for longer."""
    newest_first = np.cumsum(np.bincount(epoch, minlength=epochs)[::-1]) if epochs else np.zeros(1)
    return max(_HALF_EPOCHS, float(np.searchsorted(newest_first, _HALF_RESPONSES)))


def _next_epoch(effect: np.ndarray) -> float:
    """The coming epoch's effect: the last one's, and the mean step as far as the steps agree (James–Stein)."""
    steps = np.diff(effect)[-8:]
    if len(steps) < 3:
        return float(effect[-1])
    mean, error = float(steps.mean()), float(steps.var(ddof=1)) / len(steps)
    step = mean * max(0.0, 1.0 - error / max(mean * mean, 1e-12))
    return float(effect[-1]) + float(np.clip(step, -0.25, 0.25))


def _left_out(
    prompt: np.ndarray, visit: np.ndarray, visits: int, x: np.ndarray, weight: np.ndarray, effects: Effects
) -> tuple[np.ndarray, np.ndarray]:
    """(z of each response as forecast without its visit, or without itself; whether there was anything else)."""
    y = effects.values
    of_visit = np.bincount(visit, weight, visits)[visit], np.bincount(visit, weight * y, visits)[visit]
    alone = effects.count[prompt] - of_visit[0] < 1e-3
    count = effects.count[prompt] - np.where(alone, weight, of_visit[0])
    total = effects.sum[prompt] - np.where(alone, weight * y, of_visit[1])
    judged = count > 1e-3
    center, variance = effects.forecast(np.maximum(count, 0.0), np.where(judged, total, 0.0))
    return (x - center) / np.sqrt(effects.within + variance), judged
