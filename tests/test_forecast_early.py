"""Forecasts while next to nothing has ended."""

from __future__ import annotations

import numpy as np
from test_forecast import mean_total

from flexfloor.simulate.scenarios import load_scenario
from flexfloor.world.lengths.forecast import HistoryLengths


def test_a_few_short_ones_do_not_tell_the_longest_where_nothing_else_is_known():
    """Lengths far from lognormal, a seventh of them at the limit: after 2% have ended the others must not look short,
    or a fleet takes in far more than it will hold."""
    drawn = load_scenario("deepcoder-like").draw(2048, 1)
    truth = drawn.lengths.astype(float)
    lengths = HistoryLengths(None)
    lengths.add_keys([f"p{g}" for g in drawn.group.tolist()], 16000.0)
    running = np.arange(len(truth))
    for t in (80, 160, 320, 640):
        ends = truth[running] <= t
        lengths.finished(running[ends], truth[running[ends]])
        running = running[~ends]
    assert 30 < len(truth) - len(running) < 80
    assert mean_total(lengths, running, np.full(len(running), 640)).mean() > 0.9 * truth[running].mean()
