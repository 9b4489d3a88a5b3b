"""How good forecasts of lengths were."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.stats import ConstantInputWarning, spearmanr

from flexfloor.errors import InputError
from flexfloor.world.lengths.base import Lengths
from flexfloor.world.lengths.forecast import HistoryLengths
from flexfloor.world.lengths.observations import Observations

SCORE_LEVELS = np.unique(np.concatenate([np.arange(1, 100, 2), [10, 50, 90]])) / 100
"""Levels of the quantiles that a forecast is judged by."""

_MOST_SCORED = 20_000  # responses of the last epoch


@dataclass(frozen=True, slots=True)
class Scores:
    """pinball: mean loss over responses and levels, tokens; less is better (half the CRPS, Gneiting and Raftery 2007).

    coverage_50, coverage_90: share of responses inside the central intervals; below_90: at most the .9 quantile. Good
    is .50, .90 and .90. rank_correlation: Spearman's, of the medians with the lengths; 0 where all are equal.
    sharpness: mean width of the central 80% over the mean length; at equal coverage less is better.
    """

    responses: int
    pinball: float
    coverage_50: float
    coverage_90: float
    below_90: float
    rank_correlation: float
    sharpness: float


def score(
    quantiles: np.ndarray,
    tokens: np.ndarray,
    censored: np.ndarray | None = None,
    levels: np.ndarray = SCORE_LEVELS,
) -> Scores:
    """quantiles: float64 [n, levels], of the length of each response; tokens: what it came to, [n].

    censored: bool [n], of which only so much is known that they are at least so long; forecasts beyond are taken to
    agree (Powell 1986, J. Econometrics 32). A response that its limit cut, forecast under the same limit, is not
    censored: it has that length. A length that a forecast gives a probability of its own (the limit often) counts in
    part as below a level.
    """
    assert len(tokens) > 0, "nothing to score"
    truth = np.asarray(tokens, float)[:, None]
    quantiles = np.maximum.accumulate(quantiles, axis=1)
    if censored is not None:
        quantiles = np.where(np.asarray(censored)[:, None], np.minimum(quantiles, truth), quantiles)
    loss = np.maximum(levels * (truth - quantiles), (levels - 1.0) * (truth - quantiles))
    low, high = _level_range(quantiles, truth, levels)

    def reached(level: float) -> float:
        """Share of responses whose length is at most the quantile of this level."""
        return float(np.clip((level - low) / np.maximum(high - low, 1e-9), 0.0, 1.0).mean())

    at = {level: int(np.argmin(abs(levels - level))) for level in (0.1, 0.5, 0.9)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        rank = float(spearmanr(quantiles[:, at[0.5]], truth[:, 0]).statistic) if len(truth) > 1 else 0.0
    return Scores(
        responses=len(truth),
        pinball=float(loss.mean()),
        coverage_50=reached(0.75) - reached(0.25),
        coverage_90=reached(0.95) - reached(0.05),
        below_90=reached(0.9),
        rank_correlation=rank if np.isfinite(rank) else 0.0,
        sharpness=float((quantiles[:, at[0.9]] - quantiles[:, at[0.1]]).mean() / max(float(truth.mean()), 1e-12)),
    )


def _level_range(quantiles: np.ndarray, truth: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P(length < truth), P(length ≤ truth)) by each forecast, float64 [n]; equal where it has no atom there."""
    padded = np.concatenate([[0.0], levels, [1.0]])
    under, upto = (quantiles < truth).sum(axis=1), (quantiles <= truth).sum(axis=1)
    low, high = (padded[under] + padded[under + 1]) / 2, (padded[upto] + padded[upto + 1]) / 2
    rows = np.arange(len(quantiles))
    last = quantiles.shape[1] - 1
    left = np.where(under > 0, quantiles[rows, np.maximum(under - 1, 0)], 0.0)
    right = np.where(under <= last, quantiles[rows, np.minimum(under, last)], np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.nan_to_num((truth[:, 0] - left) / (right - left), nan=0.5)
    between = padded[under] + share * (padded[under + 1] - padded[under])
    return np.where(under == upto, between, low), np.where(under == upto, between, high)


def forecast_quantiles(
    lengths: Lengths, rows: np.ndarray, generated: np.ndarray | None = None, levels: np.ndarray = SCORE_LEVELS
) -> np.ndarray:
    """Quantiles of the total length of each row, float64 [rows, levels]; generated: tokens so far, none by default."""
    generated = np.zeros(len(rows), np.int64) if generated is None else generated
    return np.stack([generated + lengths.remaining(rows, generated, level) for level in levels], axis=1)


def score_last_epoch(observed: Observations) -> dict[str, Scores]:
    """`score_epoch` of the newest epoch. Raises InputError where there are fewer than two epochs."""
    if len(np.unique(observed.epoch)) < 2:
        raise InputError("the history has fewer than two epochs, so that no forecast can be held against the last one")
    return score_epoch(observed, int(observed.epoch.max()))


def score_epoch(observed: Observations, epoch: int) -> dict[str, Scores]:
    """An epoch forecast before it began: from the earlier epochs (history), from these without knowing which prompt is
    which (pooled), and from nothing (none). Later epochs are left out.

    Of a large epoch every so many responses are taken.
    """
    chosen = np.flatnonzero(observed.epoch == epoch)
    earlier = observed.where(observed.epoch < epoch)
    truth = observed.where(chosen[:: -(-len(chosen) // _MOST_SCORED)])
    split = "eval" if truth.evaluation.all() else "train"
    samplings = {truth.samplings[i] for i in np.unique(truth.sampling)}
    keys = [truth.keys[i] for i in truth.prompt.tolist()]
    strangers = [f"{index}" for index in range(len(keys))]
    # Keys that no history can hold: it was written with other ones.
    anonymous = Observations(**(vars(earlier) | {"keys": [f"\0{key}" for key in earlier.keys]}))
    limits = np.maximum(truth.max_tokens, truth.tokens).astype(float)
    scores = {}
    for name, names, history in (
        ("history", keys, earlier),
        ("pooled", strangers, anonymous),
        ("none", strangers, None),
    ):
        lengths = HistoryLengths(history, split=split)  # type: ignore[arg-type]
        lengths.add_keys(names, limits, samplings=samplings)
        # Responses that their limit cut are forecast under the same limit, so they are whole.
        scores[name] = score(forecast_quantiles(lengths, np.arange(len(keys))), truth.tokens)
    return scores
