"""What a rollout teaches about its own lengths while it runs.

Responses that have ended count with their length; those that run, as at least as long as they are; those that wait,
not at all. From these, in this order: the drift of the whole policy and the trust in the prompts' histories (by
likelihood on a grid), what siblings say of each other, and the shape of what remains.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from flexfloor.world.lengths.curves import Curve, Samples, fit_curve
from flexfloor.world.lengths.effects import Guess, fit_censored_normal, shrink
from flexfloor.world.lengths.model import KNOWN, UNKNOWN, LengthModel, long_guess, long_samples
from flexfloor.world.lengths.siblings import Siblings, hear_siblings, share_of_prompts

_LITTLE = 64  # responses of a history that only serve as a guess of mean and variance
_HISTORY_WEIGHT = 1000.0  # most responses that a history's curve counts for beside this rollout's
_MOST_SCORED = 1000  # responses that drift and trust are judged by
_RARE = 0.02  # how likely a shift is that has nothing to do with the usual drift
_TRUSTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
_TRUST_PRIOR = np.log([0.01, 0.01, 0.02, 0.06, 0.9])
_GUESS_WEIGHT = 8.0  # responses that the shape of a rollout without history starts from
# Ended responses, and share of those that have begun, at which each lets half of that shape be normal, not long.
_HALF_KNOWN, _HALF_SEEN = 16.0, 0.03


@dataclass
class Evidence:
    """Of each row: tokens known to exist, float64 [n]; whether the response has ended; whether its limit cut it."""

    tokens: np.ndarray
    done: np.ndarray
    cut: np.ndarray

    @classmethod
    def none(cls, rows: int) -> Evidence:
        return cls(np.zeros(rows), np.zeros(rows, bool), np.zeros(rows, bool))

    def grown(self, rows: int) -> Evidence:
        more = Evidence.none(rows)
        return Evidence(
            *(np.concatenate([own, new]) for own, new in zip(vars(self).values(), vars(more).values(), strict=True))
        )

    def run(self, rows: np.ndarray, generated: np.ndarray) -> None:
        going = ~self.done[rows]
        self.tokens[rows[going]] = np.maximum(self.tokens[rows[going]], generated[going])

    def end(self, rows: np.ndarray, tokens: np.ndarray, limit: np.ndarray) -> None:
        self.tokens[rows] = np.nan_to_num(np.maximum(tokens, 1.0), nan=1.0)
        self.done[rows] = True
        self.cut[rows] = self.tokens[rows] >= limit[rows]

    @property
    def ended(self) -> int:
        return int(self.done.sum())

    @property
    def longest(self) -> float:
        return float(self.tokens.max(initial=0.0))

    @property
    def started(self) -> np.ndarray:
        """Rows that say something."""
        return np.flatnonzero(self.tokens > 0)


@dataclass(frozen=True)
class Outlook:
    """log length of row i = center[i] + spread[i] · z, z from curves[curve[i]]; float64, float64 and int64 [rows]."""

    center: np.ndarray
    spread: np.ndarray
    curve: np.ndarray
    curves: tuple[Curve, Curve]


def adapt(
    model: LengthModel, group: np.ndarray, limit: np.ndarray, count: np.ndarray, total: np.ndarray, evidence: Evidence
) -> Outlook:
    """group: int64 [rows], the same for siblings; limit: tokens, float64 [rows]; count, total: weighted number of the
    prompt's observed responses and the sum of their log lengths, float64 [rows]."""
    rows = evidence.started
    log_limit = float(np.log(np.median(limit)))
    center, variance = shrink(count, total, model.mean, model.between, model.within)
    within, drift, base = model.within, model.drift, model.curves
    x = np.log(np.maximum(evidence.tokens[rows], 1.0))
    open_end = ~evidence.done[rows] | evidence.cut[rows]
    curve = np.where(count > 0, KNOWN, UNKNOWN)
    if len(rows) and model.responses < _LITTLE:
        guess = _guess(model, log_limit)
        rest = x - (center - model.mean)[rows]
        mean, whole = fit_censored_normal(rest, open_end, np.ones(len(rows)), guess)
        share = share_of_prompts(Siblings(group[rows], rest - mean, open_end, _groups(group)), whole)
        center = center - model.mean + mean
        variance = variance * (share * whole / model.between)
        within, drift = (1.0 - share) * whole, 0.0
    elif len(rows):
        trust, shift, drift = _judge(model, center, variance, curve, group, limit, rows, x, open_end)
        center = model.mean + shift + trust * (center - model.mean)
        variance = model.between - trust**2 * (model.between - variance)
        curve = np.where(trust >= 0.25, curve, UNKNOWN)
    if len(rows):
        siblings = Siblings(group[rows], x - center[rows], open_end, _groups(group))
        effect, variance, others = hear_siblings(siblings, rows, group, variance, within)
        center = center + effect
        curve = np.where(others > 0, KNOWN, curve)
    spread = np.sqrt(within + variance + drift)
    if len(rows) and model.responses < _LITTLE:
        # All responses alike, so that none is left out for what its siblings did.
        own = Samples.of((rest - mean) / np.sqrt(whole), 1.0, open_end)
        shape = _open_shape(evidence.ended, len(rows), log_limit - mean, float(np.sqrt(whole)))
        base = (fit_curve(own + shape),) * 2
    elif len(rows):
        z = (x - center[rows]) / spread[rows]
        weight = min(float(model.responses), _HISTORY_WEIGHT)
        of_class = [Samples.of(z[at], 1.0, open_end[at]) for at in (curve[rows] == UNKNOWN, curve[rows] == KNOWN)]
        base = (
            fit_curve(of_class[UNKNOWN] + base[UNKNOWN].samples(weight)),
            fit_curve(of_class[KNOWN] + base[KNOWN].samples(weight)),
        )
    return Outlook(center, spread, curve, base)


def _groups(group: np.ndarray) -> int:
    return int(group.max(initial=-1)) + 1


def _guess(model: LengthModel, log_limit: float) -> Guess:
    """What little there is of a history, as a guess."""
    if not model.responses:
        return long_guess(log_limit)
    spread = model.within + model.between
    return Guess(model.mean, spread, model.between / spread, float(model.responses))


def _open_shape(ended: int, started: int, limit: float, spread: float) -> Samples:
    """Of z, where this rollout is all there is: normal as far as that can be known by now, and long.

    The first few that end are the shortest ones of all, however many they are: they say little of the longest.
    limit: above the mean log length; spread: standard deviation of log length.
    """
    seen = ended / max(started, 1)
    normal = ended / (ended + _HALF_KNOWN) * seen / (seen + _HALF_SEEN)
    middle = (np.arange(32) + 0.5) / 32
    long = long_samples(limit, 0.0, spread, _GUESS_WEIGHT * (1.0 - normal))
    return Samples.of(ndtri(middle), _GUESS_WEIGHT * normal / 32) + long


def _judge(
    model: LengthModel,
    center: np.ndarray,
    variance: np.ndarray,
    curve: np.ndarray,
    group: np.ndarray,
    limit: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    open_end: np.ndarray,
) -> tuple[float, float, float]:
    """(trust in the prompts' histories, 0 to 1; shift of log length against the history; the shift's variance).

    With trust t a prompt deviates from the mean by t times what its history says; t = 0 is no history. Both are
    posterior means on a grid, from the censored likelihood of the rollout's responses under the history's curves.
    """
    per_group = len(rows) / len(np.unique(group[rows]))
    chosen, mass = _some_of_each(open_end)
    # Sorted by how they ended and by curve, so that each kind is a slice.
    order = np.lexsort((curve[rows[chosen]], open_end[chosen]))
    chosen, mass = chosen[order], mass[order]
    rows, x, open_end = rows[chosen], x[chosen], open_end[chosen]
    apart, which, log_limit = (center - model.mean)[rows], curve[rows], np.log(limit[rows])
    ended = int((~open_end).sum())
    starts = [0, *(np.flatnonzero(np.diff(which) | np.diff(open_end)) + 1).tolist(), len(rows)]
    kinds = [(slice(a, b), int(which[a]), bool(open_end[a])) for a, b in itertools.pairwise(starts)]
    untrusted = [(slice(0, ended), UNKNOWN, False), (slice(ended, len(rows)), UNKNOWN, True)]
    # Siblings are no independent witnesses.
    share = model.between / (model.between + model.within)
    temper = 1.0 / (1.0 + (per_group - 1.0) * share)

    def fits(trusts: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """Log posterior, float64 [trusts, shifts]."""
        found = np.zeros((len(trusts), len(shifts)))
        for i, trust in enumerate(trusts):
            middle = model.mean + trust * apart
            spread = np.sqrt(model.within + model.between - trust**2 * (model.between - variance[rows]))
            z = (x - middle - shifts[:, None]) / spread
            cap = np.maximum((log_limit - middle - shifts[:, None]) / spread, z)
            for at, index, censored in kinds if trust > 0 else untrusted:
                own = model.curves[index]
                if censored:
                    gain = np.log(np.maximum(1.0 - own.below(z[:, at], cap[:, at]), 1e-4))
                else:
                    gain = np.log(own.density(z[:, at], cap[:, at]) / spread[at])
                found[i] += temper * (gain @ mass[at])
        # Most epochs drift as epochs do; a few are another matter.
        usual = np.exp(-0.5 * shifts**2 / model.drift) / np.sqrt(model.drift)
        found += np.log(usual + _RARE / (1.0 + (2.0 * shifts) ** 2))
        return found + np.interp(trusts, _TRUSTS, _TRUST_PRIOR)[:, None]

    coarse = np.linspace(-3.0, 3.0, 31)
    best = coarse[np.argmax(fits(_TRUSTS[[0, 2, 4]], coarse).max(axis=0))]
    fine = best + np.linspace(-0.25, 0.25, 21)
    score = fits(_TRUSTS, fine)
    belief = np.exp(score - score.max())
    belief /= belief.sum()
    trust = float((belief.sum(axis=1) * _TRUSTS).sum())
    by_shift = belief.sum(axis=0)
    shift = float((by_shift * fine).sum())
    return trust, shift, float((by_shift * (fine - shift) ** 2).sum())


def _some_of_each(open_end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices, how many each stands for): few enough, of those that have ended and of those that have not."""
    chosen, masses = [], []
    for which in (np.flatnonzero(open_end), np.flatnonzero(~open_end)):
        step = -(-len(which) // _MOST_SCORED) if len(which) else 1
        chosen.append(which[::step])
        masses.append(np.full(len(chosen[-1]), len(which) / max(len(chosen[-1]), 1)))
    return np.concatenate(chosen), np.concatenate(masses)
