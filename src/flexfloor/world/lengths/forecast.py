"""Forecasts of response lengths: from earlier epochs, corrected by what the rollout itself shows.

Every row has a location and a spread of its log length and one of two curves (`model.py`). While the rollout runs three
things are learned from the responses that have ended and from those that are known to go on (`adapt.py`): how far the
whole policy has drifted, whether the prompts' histories are worth anything, and what siblings tell. Learning counts
running responses as "at least so long": the first to end are the short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexfloor.requests import Request
from flexfloor.world.lengths.adapt import Evidence, Outlook, adapt
from flexfloor.world.lengths.model import LengthModel, fit_model
from flexfloor.world.lengths.observations import Observations, Split, sampling_key
from flexfloor.world.lengths.store import LengthHistory

# Learn after so many ends, and whenever their number or the longest response has grown by this factor.
_FIRST, _GROWTH = 8, 1.5
_FIRST_TOKENS = 16


class HistoryLengths:
    """`Lengths` from a history; from this rollout alone where there is none.

    history: of earlier epochs, or None; read when the first requests come. split: whose lengths count. shuffle_seed:
    give every prompt another one's history, to see what a wrong one does.

    Equal inputs give equal forecasts: `remaining` is also how the progress of running responses becomes known, so pass
    what has been generated in truth. A request of forced length keeps its length to itself: its limit is the longest
    forced one of the requests.
    """

    def __init__(
        self,
        history: LengthHistory | Observations | None = None,
        *,
        split: Split = "train",
        shuffle_seed: int | None = None,
    ) -> None:
        self._history = history
        self._split = split
        self._shuffle_seed = shuffle_seed
        self._model: LengthModel | None = None
        self._groups: dict[str, int] = {}
        self._group = np.zeros(0, np.int64)
        self._limit = np.zeros(0)
        self._forced = np.zeros(0, bool)
        self._count = np.zeros(0)
        self._sum = np.zeros(0)
        self._evidence = Evidence.none(0)
        self._outlook: Outlook | None = None
        self._learned = (0, 0.0)  # ended responses and tokens of the longest at the last time of learning

    def add(self, requests: Sequence[Request]) -> None:
        self.add_keys(
            [r.prompt_key for r in requests],
            np.array([r.sampling.max_tokens for r in requests], float),
            forced=np.array([r.sampling.forced_length is not None for r in requests], bool),
            # Most requests share one object.
            samplings={sampling_key(s) for s in {id(r.sampling): r.sampling for r in requests}.values()},
        )

    def add_keys(
        self,
        keys: Sequence[str],
        max_tokens: np.ndarray | float,
        *,
        forced: np.ndarray | bool = False,
        samplings: set[str] | None = None,
    ) -> None:
        """`add` without requests: prompt keys, most tokens of each response, and how they are sampled."""
        if not len(keys):
            return
        self._limit = np.concatenate([self._limit, np.broadcast_to(np.asarray(max_tokens, float), len(keys))])
        self._forced = np.concatenate([self._forced, np.broadcast_to(forced, len(keys))])
        self._limit[self._forced] = self._limit[self._forced].max(initial=1.0)
        if self._model is None:
            self._model = fit_model(self._observations(samplings), float(np.log(np.median(self._limit))))
        groups = self._groups
        new = np.array([groups.setdefault(key, len(groups)) for key in keys], np.int64)
        known = np.array([self._model.index.get(key, -1) for key in keys], np.int64)
        for name, values in (("_count", self._model.count), ("_sum", self._model.sum)):
            own = np.where(known >= 0, values[known], 0.0) if len(values) else np.zeros(len(keys))
            setattr(self, name, np.concatenate([getattr(self, name), own]))
        self._group = np.concatenate([self._group, new])
        self._evidence = self._evidence.grown(len(keys))
        self._outlook = None

    def _observations(self, samplings: set[str] | None) -> Observations:
        history = self._history
        if isinstance(history, LengthHistory):
            history = history.load()
        if history is None:
            history = Observations.from_lengths([], [], [], max_tokens=1)
        history = history.alike(self._split, samplings or set(history.samplings))
        return history if self._shuffle_seed is None else history.shuffled(self._shuffle_seed)

    def finished(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self._evidence.end(np.asarray(rows, np.int64), np.asarray(tokens, float), self._limit)

    def remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        generated = np.maximum(np.asarray(generated, float), 0.0)
        self._evidence.run(rows, generated)
        outlook = self._current()
        center, spread, known = outlook.center[rows], outlook.spread[rows], outlook.curve[rows]
        limit = self._limit[rows]
        cap = (np.log(limit) - center) / spread
        z = (np.log(np.maximum(generated, 0.5)) - center) / spread
        levels = np.clip(np.nan_to_num(np.broadcast_to(np.asarray(level, float), len(rows)), nan=0.5), 0.0, 1.0)
        total = np.empty(len(rows))
        for which, curve in enumerate(outlook.curves):
            at = np.flatnonzero(known == which)
            below = np.where(generated[at] > 0, curve.below(z[at], cap[at]), 0.0)
            total[at] = curve.quantile(below + levels[at] * (1.0 - below), cap[at])
        # The limit itself, and not what is left of it after logarithms and back.
        tokens = np.where(total >= cap, limit, np.exp(np.minimum(center + spread * total, np.log(limit))))
        return np.clip(tokens - generated, 1.0, np.maximum(limit - generated, 1.0))

    def _current(self) -> Outlook:
        """The outlook, learned anew when there is clearly more to learn from."""
        ended, longest = self._evidence.ended, self._evidence.longest
        more = ended >= max(_FIRST, _GROWTH * self._learned[0])
        longer = longest >= max(_FIRST_TOKENS, _GROWTH * self._learned[1])
        if self._outlook is None or more or longer:
            assert self._model is not None, "no requests are known"
            self._learned = (ended, longest)
            self._outlook = adapt(self._model, self._group, self._limit, self._count, self._sum, self._evidence)
        return self._outlook
