"""Forecasts of lengths: against data whose making is known, before and while a rollout runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from flexfloor.errors import InputError
from flexfloor.requests import Prompt, SamplingParams, make_requests
from flexfloor.world.lengths.forecast import HistoryLengths
from flexfloor.world.lengths.knowledge import KNOWLEDGE, make_lengths
from flexfloor.world.lengths.metrics import forecast_quantiles, score
from flexfloor.world.lengths.model import fit_model
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

SHAPES = {"much": (0.55, 0.45), "little": (0.15, 0.6), "nearly all": (0.9, 0.27)}
"""Standard deviations of log length between and within prompts: how much the prompt tells."""


@dataclass
class World:
    """Epochs of lognormal lengths. truth: int64 [prompts * samples], of the epoch to forecast."""

    keys: list[str]
    observed: Observations
    truth: np.ndarray
    limit: int

    @property
    def rows(self) -> np.ndarray:
        return np.arange(len(self.truth))

    def begin(self, knowledge: str) -> HistoryLengths:
        lengths = make_lengths(knowledge, self.observed, seed=3)
        assert isinstance(lengths, HistoryLengths)
        lengths.add_keys(self.keys, float(self.limit))
        return lengths


def make_world(
    between: float,
    within: float,
    *,
    limit: int = 16384,
    mean: float = 8.1,
    prompts: int = 256,
    samples: int = 8,
    epochs: int = 2,
    drift: float = 0.0,
    seed: int = 0,
) -> World:
    rng = np.random.default_rng(seed)
    own = np.repeat(rng.normal(mean, between, prompts), samples)
    wanted = [np.exp(own + drift * e + rng.normal(0, within, len(own))).astype(int) + 1 for e in range(epochs + 1)]
    index = np.repeat(np.arange(prompts), samples)
    past = np.concatenate(wanted[:-1])
    observed = Observations.from_lengths(
        [f"p{i}" for i in range(prompts)],
        np.tile(index, epochs),
        np.minimum(past, limit),
        max_tokens=limit,
        censored=past >= limit,
        epoch=np.repeat(np.arange(epochs), len(own)),
    )
    return World([f"p{i}" for i in index], observed, np.minimum(wanted[-1], limit), limit)


def play(world: World, lengths: HistoryLengths, until: int) -> np.ndarray:
    """All responses run side by side until they have `until` tokens. Returns the rows that still run then."""
    running = world.rows
    for t in np.unique(np.geomspace(32, until, 20).astype(int)):
        ends = world.truth[running] <= t
        lengths.finished(running[ends], world.truth[running[ends]])
        running = running[~ends]
        lengths.remaining(running, np.full(len(running), t), 0.5)
    return running


def mean_total(lengths: HistoryLengths, rows: np.ndarray, generated: np.ndarray) -> np.ndarray:
    return np.mean([generated + lengths.remaining(rows, generated, (i + 0.5) / 50) for i in range(50)], axis=0)


@pytest.mark.parametrize("limit", [16384, 4000])
@pytest.mark.parametrize("shape", SHAPES)
def test_history_is_calibrated_and_tells_prompts_apart(shape: str, limit: int):
    world = make_world(*SHAPES[shape], limit=limit)
    told = score(forecast_quantiles(world.begin("history"), world.rows), world.truth)
    assert told.coverage_50 == pytest.approx(0.5, abs=0.06)
    assert told.coverage_90 == pytest.approx(0.9, abs=0.05)
    assert told.below_90 == pytest.approx(0.9, abs=0.05)
    wrong = score(forecast_quantiles(world.begin("shuffled"), world.rows), world.truth)
    between, within = SHAPES[shape]
    share = between**2 / (between**2 + within**2)
    assert told.rank_correlation > 0.9 * np.sqrt(share) - 0.15
    assert abs(wrong.rank_correlation) < 0.2
    assert told.pinball < wrong.pinball * (1.0 - 0.4 * share)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_weight_of_history_is_learned(shape: str):
    between, within = SHAPES[shape]
    world = make_world(between, within, epochs=3, prompts=400)
    model = fit_model(world.observed, float(np.log(world.limit)))
    assert np.sqrt(model.within) == pytest.approx(within, rel=0.1)
    assert np.sqrt(model.between) == pytest.approx(between, rel=0.15)
    assert model.mean == pytest.approx(8.1, abs=0.15)


def test_a_prompt_seen_once_is_believed_less_than_one_seen_often():
    long = make_world(0.6, 0.5, samples=2, epochs=1, prompts=300)
    keys = [*long.observed.keys, "often", "once"]
    index = np.concatenate([long.observed.prompt, np.full(20, 300), [301]])
    tokens = np.concatenate([long.observed.tokens, np.tile([300, 800], 10), [490]])
    both = Observations.from_lengths(keys, index, tokens, max_tokens=16384)
    lengths = HistoryLengths(both)
    lengths.add_keys(["often", "once", "never"], 16384.0)
    often, once, never = lengths.remaining(np.arange(3), np.zeros(3), 0.5)
    assert often == pytest.approx(500, rel=0.2)
    assert often * 1.3 < once < never / 1.3


def test_with_one_response_a_prompt_intervals_are_rather_wide():
    """How much prompts tell cannot be known then; it is assumed to be less than it is here."""
    world = make_world(0.5, 0.5, samples=1, epochs=1, prompts=1000)
    told = score(forecast_quantiles(world.begin("history"), world.rows), world.truth)
    assert 0.46 < told.coverage_50 < 0.65
    assert 0.87 < told.below_90 < 0.96
    assert told.rank_correlation > 0.4


def test_responses_cut_by_the_limit_are_at_least_that_long():
    """Fifteen in a hundred at the limit: under the same limit as many are expected there, under a larger one none."""
    rng = np.random.default_rng(1)
    wanted = np.exp(rng.normal(8.0, 1.0, 4000))
    limit = int(np.quantile(wanted, 0.85))
    tokens = np.minimum(wanted, limit).astype(int)
    observed = Observations.from_lengths(
        [f"p{i}" for i in range(4000)], np.arange(4000), tokens, max_tokens=limit, censored=wanted >= limit
    )
    levels = np.linspace(0.005, 0.995, 100)
    for most, atom in ((limit, 0.15), (4 * limit, 0.0)):
        lengths = HistoryLengths(observed)
        lengths.add_keys(["new"] * 100, float(most))
        totals = lengths.remaining(np.arange(100), np.zeros(100), levels)
        assert (totals >= limit).mean() == pytest.approx(0.15, abs=0.02)
        assert (totals >= most).mean() == pytest.approx(atom, abs=0.02)
        assert np.median(totals) == pytest.approx(np.exp(8.0), rel=0.06)


def test_a_prompt_that_always_hits_the_limit_is_expected_there():
    world = make_world(0.9, 0.27, limit=4000)
    cut = np.bincount(world.observed.prompt, world.observed.censored) == 16
    assert cut.sum() > 20
    rows = world.rows[cut[np.repeat(np.arange(256), 8)]]
    totals = mean_total(world.begin("history"), rows, np.zeros(len(rows)))
    assert (world.truth[rows] >= 4000).mean() > 0.9
    assert totals.mean() == pytest.approx(world.truth[rows].mean(), rel=0.05)


def test_drift_of_the_policy_carries_on():
    world = make_world(0.6, 0.3, epochs=6, drift=0.12)
    totals = mean_total(world.begin("history"), world.rows, np.zeros(len(world.rows)))
    assert totals.mean() == pytest.approx(world.truth.mean(), rel=0.08)


def test_what_is_recent_counts_more():
    """Every prompt turns from long to short and back: no drift in common."""
    rng = np.random.default_rng(2)
    flips = np.repeat(rng.choice([-1.0, 1.0], 200), 4)
    epochs = np.repeat(np.arange(10), 800)
    signs = np.concatenate([flips * (1 if e < 5 else -1) for e in range(10)])
    tokens = np.exp(6.0 + 0.7 * signs + rng.normal(0, 0.2, 8000)).astype(int)
    index = np.tile(np.repeat(np.arange(200), 4), 10)
    lengths = HistoryLengths(
        Observations.from_lengths([f"p{i}" for i in range(200)], index, tokens, max_tokens=8192, epoch=epochs)
    )
    lengths.add_keys([f"p{i}" for i in range(200)], 8192.0)
    medians = lengths.remaining(np.arange(200), np.zeros(200), 0.5)
    short = flips[::4] > 0
    assert np.median(medians[short]) < 0.6 * np.median(medians[~short])


@pytest.mark.parametrize("knowledge", ["history", "shuffled", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rollout_teaches(shape: str, knowledge: str):
    """Midway all know about how much is left, also those that began with a wrong history or none."""
    world = make_world(*SHAPES[shape], drift=0.1)
    lengths = world.begin(knowledge)
    running = play(world, lengths, int(np.median(world.truth) * 1.2))
    generated = np.full(len(running), int(np.median(world.truth) * 1.2))
    totals = mean_total(lengths, running, generated)
    close = 0.25 if knowledge == "none" else 0.1  # without history the tail is taken to be long
    assert totals.mean() / world.truth[running].mean() == pytest.approx(1.0 + close / 2, abs=close)
    quantiles = forecast_quantiles(lengths, running, generated)
    told = score(quantiles, world.truth[running])
    assert told.below_90 > 0.84
    assert told.coverage_90 > 0.82


def test_a_wrong_history_is_soon_no_worse_than_none():
    world = make_world(0.9, 0.27)
    losses = {}
    for knowledge in ("history", "shuffled", "none"):
        lengths = world.begin(knowledge)
        running = play(world, lengths, 1500)
        generated = np.full(len(running), 1500)
        losses[knowledge] = score(forecast_quantiles(lengths, running, generated), world.truth[running]).pinball
    assert losses["history"] < 0.6 * losses["none"]
    assert losses["shuffled"] < 1.03 * losses["none"]


def test_a_history_of_quite_other_lengths_is_overcome():
    world = make_world(0.5, 0.4)
    other = Observations(**(vars(world.observed) | {"tokens": world.observed.tokens // 20 + 1}))
    lengths = HistoryLengths(other)
    lengths.add_keys(world.keys, float(world.limit))
    running = play(world, lengths, 2500)
    totals = mean_total(lengths, running, np.full(len(running), 2500))
    assert totals.mean() == pytest.approx(world.truth[running].mean(), rel=0.15)


def test_the_first_to_end_do_not_make_the_rest_look_short():
    """Survivorship: after a twentieth has ended the others are as long as they are."""
    world = make_world(0.3, 0.5)
    lengths = world.begin("history")
    until = int(np.quantile(world.truth, 0.05))
    running = play(world, lengths, until)
    totals = mean_total(lengths, running, np.full(len(running), until))
    assert totals.mean() == pytest.approx(world.truth[running].mean(), rel=0.08)


def test_siblings_tell_of_each_other_without_any_history():
    world = make_world(0.9, 0.27)
    lengths = world.begin("none")
    running = play(world, lengths, 2500)
    told = np.array([k for k in running if (world.truth[k // 8 * 8 : k // 8 * 8 + 8] <= 2500).any()])
    medians = 2500 + lengths.remaining(running, np.full(len(running), 2500), 0.5)
    of = dict(zip(running.tolist(), medians.tolist(), strict=True))
    assert np.mean([of[k] for k in told]) < 0.8 * np.mean([m for k, m in of.items() if k not in set(told.tolist())])
    assert spearmanr(medians, world.truth[running]).statistic > 0.4


def test_nothing_known_means_nothing_is_short():
    lengths = HistoryLengths(None)
    lengths.add_keys(["a"] * 1000, 2000.0)
    totals = lengths.remaining(np.arange(1000), np.zeros(1000), np.linspace(0, 1, 1000))
    assert np.mean(totals) == pytest.approx(2000 * 2 / 3, rel=0.03)
    assert totals[0] < 400
    assert totals[-1] == 2000


def test_levels_condition_on_what_has_been_generated():
    """remaining(g, u) is the quantile of what lies above g: the same as the total's at level F(g) + u (1 − F(g))."""
    world = make_world(0.5, 0.4)
    lengths = world.begin("history")
    row = np.zeros(1001, np.int64)
    totals = lengths.remaining(row, np.zeros(1001), np.linspace(0, 1, 1001))
    assert (np.diff(totals) >= 0).all()
    generated = float(totals[600])
    left = world.begin("history").remaining(row, np.full(1001, generated), np.linspace(0, 1, 1001))
    # That one response has come so far has also taught a little.
    assert generated + left[[250, 500, 750]] == pytest.approx(totals[[700, 800, 900]], rel=0.05)


def test_forced_lengths_stay_hidden():
    requests = [
        r
        for n in (5, 40, 100)
        for r in make_requests(
            [Prompt((n,), f"p{n}")], sampling=SamplingParams(max_tokens=n, ignore_eos=True), samples=2
        )
    ]
    lengths = HistoryLengths(None)
    lengths.add(requests)
    totals = lengths.remaining(np.arange(6), np.zeros(6), 0.5)
    assert len(np.unique(totals)) == 1
    assert totals[0] > 40


def test_requests_that_come_later_find_their_history():
    world = make_world(0.9, 0.27, prompts=40)
    at_once, piecewise = world.begin("history"), HistoryLengths(world.observed)
    for first in range(0, len(world.keys), 64):
        piecewise.add_keys(world.keys[first : first + 64], float(world.limit))
    zeros = np.zeros(len(world.keys))
    assert (at_once.remaining(world.rows, zeros, 0.5) == piecewise.remaining(world.rows, zeros, 0.5)).all()


def test_split_and_sampling_choose_the_observations():
    with LengthHistory(":memory:") as history:
        for split, sampling, tokens in (("train", "hot", 1000), ("train", "cold", 100), ("eval", "hot", 10)):
            history.observe_lengths(
                Observations.from_lengths(
                    ["a"],
                    np.zeros(200, int),
                    [tokens] * 200,
                    max_tokens=4096,
                    sampling=sampling,
                    split=split,  # type: ignore[arg-type]
                )
            )
        expected = {("train", "hot"): 1000, ("train", "cold"): 100, ("eval", "hot"): 10, ("eval", "warm"): 10}
        for (split, sampling), tokens in expected.items():
            lengths = HistoryLengths(history, split=split)  # type: ignore[arg-type]
            lengths.add_keys(["a"], 4096.0, samplings={sampling})
            assert lengths.remaining(np.zeros(1, int), np.zeros(1), 0.5)[0] == pytest.approx(tokens, rel=0.1)


NUMBERS = st.one_of(st.integers(0, 50), st.integers(0, 2**53 - 1))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(NUMBERS, max_size=12),
    cut=st.booleans(),
    epochs=st.integers(1, 4),
    limits=st.lists(st.integers(1, 10**6), min_size=1, max_size=6),
    played=st.lists(st.tuples(st.floats(allow_nan=True), st.floats(0, 1e9)), max_size=20),
    level=st.floats(allow_nan=True),
)
def test_absurd_data_does_no_harm(
    tokens: list[int], cut: bool, epochs: int, limits: list[int], played: list[tuple[float, float]], level: float
):
    index = np.arange(len(tokens)) % 3
    observed = Observations.from_lengths(
        ["a", "b", "c"], index, tokens, max_tokens=1, censored=cut, epoch=np.arange(len(tokens)) % epochs * 10**15
    )
    lengths = HistoryLengths(observed)
    for most in limits:
        lengths.add_keys(["a", "b", "x"], float(most))
    bounds = np.repeat(np.array(limits, float), 3)
    rows = np.arange(len(bounds))
    for number, (generated, ended) in enumerate([(0.0, 1.0), *played]):
        with np.errstate(all="raise", under="ignore"):
            left = lengths.remaining(rows, np.full(len(rows), np.nan_to_num(generated, posinf=1e12)), level)
        assert np.isfinite(left).all()
        assert (left >= 1).all()
        assert (left <= np.maximum(bounds - max(np.nan_to_num(generated, posinf=1e12), 0.0), 1)).all()
        lengths.finished(rows[number % len(rows) :][:1], np.array([ended]))


@pytest.mark.parametrize("tokens", [1, 77, 16384])
def test_lengths_that_are_all_equal_are_forecast_so(tokens: int):
    observed = Observations.from_lengths(["a", "b"], np.repeat([0, 1], 500), [tokens] * 1000, max_tokens=16384)
    lengths = HistoryLengths(observed)
    lengths.add_keys(["a", "b", "new"], 16384.0)
    assert lengths.remaining(np.arange(3), np.zeros(3), 0.5) == pytest.approx([tokens] * 3, rel=0.05)


def test_equal_inputs_give_equal_forecasts():
    world = make_world(0.5, 0.4, prompts=64)

    def run() -> np.ndarray:
        lengths = world.begin("shuffled")
        running = play(world, lengths, 3000)
        return lengths.remaining(running, np.full(len(running), 3000), np.linspace(0, 1, len(running)))

    assert (run() == run()).all()


def test_many_requests_with_history_are_quick():
    """CPU seconds with a wide margin: 0.6 s and 4 ms on a machine of 2026."""
    rng = np.random.default_rng(0)
    tokens = np.exp(rng.normal(8, 0.7, 700_000)).astype(int) + 1
    keys = [f"p{i}" for i in range(100_000)]
    begun = time.process_time()
    lengths = HistoryLengths(
        Observations.from_lengths(keys, np.repeat(np.arange(100_000), 7), tokens, max_tokens=16384)
    )
    lengths.add_keys(keys, 16384.0)
    fitted = time.process_time()
    for _ in range(10):
        lengths.remaining(np.arange(32_768), np.zeros(32_768), 0.9)
    asked = time.process_time()
    assert fitted - begun < 10
    assert asked - fitted < 1


def test_knowledge_by_name():
    assert KNOWLEDGE == ("none", "history", "shuffled", "oracle")
    with pytest.raises(InputError, match="knowledge 'all' is not known; there is none, history, shuffled, oracle"):
        make_lengths("all", None)
    for knowledge in ("history", "shuffled"):
        with pytest.raises(InputError, match="needs a length history; give `history`"):
            make_lengths(knowledge, None)
    make_lengths("none", None)
    make_lengths("oracle", None)
