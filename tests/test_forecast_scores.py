"""Scores of forecasts by hand and by their properties; curves of censored samples; the parts of a length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import CensoredData as Censored
from scipy.stats import ecdf, norm

from flexfloor.errors import InputError
from flexfloor.world.lengths.curves import Curve, Samples, fit_curve
from flexfloor.world.lengths.effects import Guess, expected_excess, fit_censored_normal, fit_effects
from flexfloor.world.lengths.metrics import SCORE_LEVELS, score, score_last_epoch
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.siblings import Siblings, hear_siblings, share_of_prompts

HALF = np.array([0.1, 0.5, 0.9])


def test_pinball_loss_by_hand():
    scores = score(np.array([[10.0, 20.0, 30.0], [5.0, 5.0, 5.0]]), np.array([25, 5]), levels=HALF)
    # First: .1 · 15 + .5 · 5 + .1 · 5 over three levels; second: none.
    assert scores.pinball == pytest.approx((1.5 + 2.5 + 0.5) / 6)
    assert scores.sharpness == pytest.approx((20 + 0) / 2 / 15)
    assert scores.rank_correlation == pytest.approx(1.0)
    assert scores.responses == 2


def test_a_censored_truth_agrees_with_all_that_lies_beyond():
    forecast = np.array([[10.0, 20.0, 30.0]])
    assert score(forecast, np.array([10]), np.array([True]), levels=HALF).pinball == 0
    # .9 · (25 − 30) is no loss any more, .1 · 15 and .5 · 5 still are.
    assert score(forecast, np.array([25]), np.array([True]), levels=HALF).pinball == pytest.approx((1.5 + 2.5) / 3)


def test_a_perfect_forecast_is_calibrated():
    rng = np.random.default_rng(0)
    truth = rng.lognormal(6, 0.7, 20_000)
    quantiles = np.exp(6 + 0.7 * norm.ppf(SCORE_LEVELS))[None].repeat(len(truth), axis=0)
    scores = score(quantiles, truth)
    assert scores.coverage_50 == pytest.approx(0.5, abs=0.015)
    assert scores.coverage_90 == pytest.approx(0.9, abs=0.01)
    assert scores.below_90 == pytest.approx(0.9, abs=0.01)
    assert scores.rank_correlation == 0
    for worse in (quantiles * 1.3, quantiles**0.5 * np.exp(3.0)):
        assert score(worse, truth).pinball > scores.pinball


def test_an_atom_at_the_limit_is_no_overcoverage():
    """A quarter of all lengths is the limit, and forecast to be: a nominal .9 is .9 and not 1."""
    rng = np.random.default_rng(1)
    truth = np.where(rng.random(8000) < 0.25, 100.0, rng.random(8000) * 99)
    quantiles = np.where(SCORE_LEVELS > 0.75, 100.0, SCORE_LEVELS / 0.75 * 99)[None].repeat(8000, axis=0)
    scores = score(quantiles, truth)
    assert scores.below_90 == pytest.approx(0.9, abs=0.02)
    assert scores.coverage_50 == pytest.approx(0.5, abs=0.02)
    assert scores.coverage_90 == pytest.approx(0.9, abs=0.02)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=30))
def test_curves_are_the_product_limit_estimate(points: list[tuple[int, bool]]):
    values = np.array([v for v, _ in points], float)
    cut = np.array([c for _, c in points])
    curve = fit_curve(Samples.of(values, 1.0, cut))
    assert (np.diff(curve.z) > 0).all()
    if cut.all():
        assert curve.z.tolist() == [values.max()]
        return
    known = ecdf(Censored(uncensored=values[~cut], right=values[cut])).cdf
    # At the length of one that ended the curve lies on the step of the estimate; it is kept at its levels only.
    for value in np.unique(values[~cut]):
        below = curve.below(np.array([value]), np.array([1e3]))[0]
        assert known.evaluate(value - 0.5) - 0.03 <= below <= known.evaluate(value) + 0.03
    assert curve.levels[-1] <= known.evaluate(values.max()) + 1e-9


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=40), st.floats(3, 9))
def test_quantile_and_probability_are_inverse(values: list[float], cap: float):
    curve = fit_curve(Samples.of(np.array(values)))
    levels = np.linspace(0.001, 0.999, 50)
    caps = np.full(50, cap)
    z = curve.quantile(levels, caps)
    assert (np.diff(z) >= 0).all()
    assert (z <= cap).all()
    assert curve.quantile(np.ones(1), caps[:1])[0] == pytest.approx(cap)
    if np.ptp(values) > 1e-3:
        inside = (z < cap - 1e-9) & (levels > curve.levels[0]) & (np.gradient(z) > 1e-4)
        assert curve.below(z, caps)[inside] == pytest.approx(levels[inside], abs=0.02)


def test_a_curve_survives_being_made_into_samples():
    curve = fit_curve(Samples.of(np.random.default_rng(0).gumbel(size=5000)))
    again = fit_curve(curve.samples(1000.0))
    levels = np.array([0.02, 0.1, 0.5, 0.9, 0.99])
    caps = np.full(5, 12.0)
    assert again.quantile(levels, caps) == pytest.approx(curve.quantile(levels, caps), abs=0.1)


def test_a_density_is_one():
    curve = fit_curve(Samples.of(np.random.default_rng(0).normal(size=5000)))
    grid = np.linspace(-5, 8, 4001)
    assert np.trapezoid(curve.density(grid, np.full(4001, 8.0)), grid) == pytest.approx(1.0, abs=0.03)
    middle = curve.density(np.linspace(-0.5, 0.5, 101), np.full(101, 8.0)).mean()
    assert middle == pytest.approx(norm.cdf(0.5) - norm.cdf(-0.5), rel=0.05)


@pytest.mark.parametrize("bound", [-4.0, 0.5, 2.0])
def test_the_expectation_of_what_is_cut(bound: float):
    draws = np.random.default_rng(0).normal(0.3, 0.8, 400_000)
    mean, variance = expected_excess(np.array([0.3]), 0.8, np.array([bound]))
    assert mean[0] == pytest.approx(draws[draws > bound].mean(), abs=0.02)
    assert variance[0] == pytest.approx(draws[draws > bound].var(), abs=0.02)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_a_normal_sample_is_known_by_the_part_below_a_bound(share: float):
    values = np.random.default_rng(2).normal(8.0, 0.7, 20_000)
    bound = np.quantile(values, share)
    guess = Guess(9.0, 0.25, weight=1.0)
    mean, variance = fit_censored_normal(np.minimum(values, bound), values > bound, np.ones(20_000), guess)
    assert mean == pytest.approx(8.0, abs=0.1)
    assert np.sqrt(variance) == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize("values", [[3.0] * 50, [1e3], [], [0.0, 40.0] * 5], ids=["equal", "one", "none", "apart"])
@pytest.mark.parametrize("cut", [False, True])
def test_parts_of_odd_samples_are_numbers(values: list[float], cut: bool):
    x = np.array(values)
    effects = fit_effects(np.zeros(len(x), int), x, np.full(len(x), cut), np.ones(len(x)), Guess(5.0, 0.25), prompts=2)
    assert np.isfinite([effects.mean, effects.within, effects.between]).all()
    assert effects.within > 0
    assert effects.between > 0


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
@pytest.mark.parametrize(("prompts", "samples"), [(2000, 4), (1000, 2)])
def test_a_guess_far_off_does_not_make_prompts_differ(share: float, prompts: int, samples: int):
    rng = np.random.default_rng(5)
    index = np.repeat(np.arange(prompts), samples)
    x = 5 + rng.normal(0, np.sqrt(share), prompts)[index] * 0.4 + rng.normal(0, np.sqrt(1 - share), len(index)) * 0.4
    guess = Guess(mean=9.0, variance=0.25, weight=1.0)
    effects = fit_effects(index, x, np.zeros(len(x), bool), np.ones(len(x)), guess, prompts=prompts)
    assert effects.between / (effects.between + effects.within) == pytest.approx(share, abs=0.06)
    assert effects.between_seen == pytest.approx(effects.between, abs=2e-3)
    assert effects.mean == pytest.approx(5.0, abs=0.05)


@pytest.mark.parametrize("index", [[0] * 9, [*range(9)], []], ids=["one prompt", "each its own", "none"])
def test_prompts_of_which_the_data_say_nothing(index: list[int]):
    x = np.linspace(4, 6, len(index))
    effects = fit_effects(np.array(index, int), x, np.zeros(len(x), bool), np.ones(len(x)), Guess(5.0, 0.25), prompts=9)
    assert effects.between_seen is None
    assert effects.between > 0.01


def test_epochs_and_prompts_are_told_apart():
    """Prompts of later epochs are longer ones too; those seen in two epochs tell how much of it is drift."""
    rng = np.random.default_rng(3)
    own = np.sort(rng.normal(6, 0.6, 300))
    prompt, epoch = [], []
    for e, (first, last) in enumerate([(0, 160), (70, 230), (140, 300)]):
        prompt.append(np.repeat(np.arange(first, last), 4))
        epoch.append(np.full(640, e))
    index, when = np.concatenate(prompt), np.concatenate(epoch)
    x = own[index] + np.array([0.0, 0.3, 0.1])[when] + rng.normal(0, 0.3, len(index))
    effects = fit_effects(index, x, np.zeros(len(x), bool), np.ones(len(x)), Guess(6.0, 1.0), prompts=300, epoch=when)
    assert effects.epoch - effects.epoch[0] == pytest.approx([0.0, 0.3, 0.1], abs=0.08)
    assert np.sqrt(effects.within) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ended", [0.15, 0.7])
def test_how_much_prompts_tell_is_learned_while_most_still_run(share: float, ended: float):
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(400), 8)
    values = np.repeat(rng.normal(0, np.sqrt(share), 400), 8) + rng.normal(0, np.sqrt(1 - share), 3200)
    bound = np.quantile(values, ended)
    siblings = Siblings(group, np.minimum(values, bound), values > bound, 400)
    assert share_of_prompts(siblings, 1.0) == pytest.approx(share, abs=0.15)


def test_siblings_move_a_forecast_as_bayes_says():
    """Two groups of three: one with two ended at 1, one with all going on; row 2 and row 5 are forecast."""
    rest = np.array([1.0, 1.0, 0.0, 0.5, 0.5, 0.0])
    group = np.repeat([0, 1], 3)
    going = np.array([False, False, True, True, True, True])
    effect, variance, others = hear_siblings(
        Siblings(group, rest, going, 2), np.arange(6), group, np.full(6, 1.0), within=0.5
    )
    assert others.tolist() == [1, 1, 2, 0, 0, 0]
    assert effect[2] == pytest.approx(2 / (2 + 0.5), abs=1e-6)
    assert variance[2] == pytest.approx(0.5 / 2.5, rel=0.02)
    grid = np.linspace(-6, 6, 4001)
    mass = norm.pdf(grid) * norm.sf((0.5 - grid) / np.sqrt(0.5)) ** 2
    assert effect[5] == pytest.approx((grid * mass).sum() / mass.sum(), abs=0.02)


def test_the_last_epoch_is_held_against_knowing_less():
    rng = np.random.default_rng(5)
    own = np.repeat(rng.normal(6, 0.8, 200), 4)
    epochs = [np.exp(own + rng.normal(0, 0.3, 800)).astype(int) for _ in range(3)]
    index = np.tile(np.repeat(np.arange(200), 4), 3)
    keys = [f"{i}" for i in range(200)]
    observed = Observations.from_lengths(
        keys, index, np.concatenate(epochs), max_tokens=8192, epoch=np.repeat([0, 1, 2], 800)
    )
    scores = score_last_epoch(observed)
    assert list(scores) == ["history", "pooled", "none"]
    assert scores["history"].pinball < 0.7 * scores["pooled"].pinball < scores["none"].pinball
    assert scores["history"].rank_correlation > 0.85
    assert abs(scores["pooled"].rank_correlation) < 0.1
    assert scores["history"].sharpness < scores["pooled"].sharpness
    with pytest.raises(InputError, match="fewer than two epochs"):
        score_last_epoch(observed.where(observed.epoch == 0))


def test_a_straight_line_leads_from_the_last_sample_to_the_cap():
    curve = Curve(np.array([0.0, 0.8]), np.array([0.0, 1.0]))
    assert curve.quantile(np.array([0.4, 0.9, 1.0]), np.full(3, 3.0)).tolist() == pytest.approx([0.5, 2.0, 3.0])
    assert curve.below(np.array([0.5, 2.0]), np.full(2, 3.0)).tolist() == pytest.approx([0.4, 0.9])
    assert curve.quantile(np.array([0.4, 0.7]), np.full(2, 0.6)).tolist() == pytest.approx([0.5, 0.6])


def test_what_was_cut_by_a_limit_is_at_the_limit():
    curve = Curve(np.array([0.0, 0.8]), np.array([0.0, 1.0]))
    assert curve.quantile(np.array([0.4, 0.81, 1.0]), np.full(3, 1.05)).tolist() == [0.5, 1.05, 1.05]
    assert curve.below(np.array([1.02]), np.full(1, 1.05)).tolist() == [0.8]
