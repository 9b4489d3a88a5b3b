"""What policies keep of a rollout's requests: one row each, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexfloor.progress import LengthForecast, Progress
from flexfloor.requests import Request
from flexfloor.world.lengths.base import ForcedLengths, Lengths
from flexfloor.world.status import FleetStatus

_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TOLD_LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # of forecasts in the ledger
_GOLDEN = 0.6180339887498949
_PLACES = (1 / 6, 1 / 2, 5 / 6)  # of the requests that arrived last


@dataclass(frozen=True, slots=True)
class Live:
    """The live requests of a fleet, in the order of `FleetStatus.live_requests`.

    rows, worker, generated, own_pages: int64 [n]; own_pages are KV pages that no sibling shares. tokens: float64
    [n], prompt and response, with half a page for the last one, which is not full.
    """

    rows: np.ndarray
    worker: np.ndarray
    generated: np.ndarray
    tokens: np.ndarray
    own_pages: np.ndarray
    decoding: np.ndarray


@dataclass(frozen=True, slots=True)
class Draw:
    """Which of the possible futures. shift: makes another one. cut: levels of the forecast end there, so that the
    longest are missing."""

    shift: float = 0.0
    cut: float = 1.0


def tokens_of(status: FleetStatus) -> np.ndarray:
    """`tokens` of `Live`, which takes the book to know whose they are: this does not."""
    table = status.live_requests
    return table.prompt_tokens + table.response_tokens + status.page_tokens / 2


class Book:
    """Rows number requests in the order of their arrival.

    prompt, most, total: int64 [rows]; most is the limit of a response (where lengths are forced, which no limit shall
    tell, the longest forced one), total the length of one that has ended, -1 before. waiting: rows that are not bound,
    in order of arrival.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.requests: list[Request] = []
        self.waiting: list[int] = []
        self.prompt = np.zeros(0, dtype=np.int64)
        self.most = np.zeros(0, dtype=np.int64)
        self._forced = np.zeros(0, dtype=np.bool_)
        self.total = np.zeros(0, dtype=np.int64)
        self.siblings = 1.0  # requests of a prompt, on average
        self._rows: dict[str, int] = {}
        self._taken = 0  # first row of the requests that arrived last
        self._generated = np.zeros(0, dtype=np.int64)  # of each row, that the draws at hand are for
        self._drawn: dict[tuple[Draw, float], np.ndarray] = {}  # draw and reserve → what is left of each row, or NaN

    def take(self, queue: Sequence[Request]) -> bool:
        """Note what has arrived since: the end of the queue. Returns whether something has."""
        fresh = queue[len(self.waiting) :]
        if not fresh:
            return False
        self.lengths.add(fresh)
        first = self._taken = len(self.requests)
        self.requests += fresh
        self.waiting += range(first, len(self.requests))
        self._rows |= {r.request_id: first + i for i, r in enumerate(fresh)}
        tokens = np.array([len(r.prompt_tokens) for r in fresh], dtype=np.int64)
        self.prompt = np.concatenate([self.prompt, tokens])
        self.most = np.concatenate([self.most, np.array([r.sampling.max_tokens for r in fresh], dtype=np.int64)])
        forced = np.array([r.sampling.forced_length is not None for r in fresh], dtype=np.bool_)
        self._forced = np.concatenate([self._forced, forced])
        self.most[self._forced] = self.most[self._forced].max(initial=1)
        self.total = np.concatenate([self.total, np.full(len(fresh), -1)])
        prompts = [r.request_id.rpartition("/")[0] for r in fresh]
        siblings = np.unique(prompts, return_counts=True)[1]
        self.siblings = float(siblings.mean())
        self._generated = np.zeros(len(self.requests), dtype=np.int64)
        self._drawn.clear()
        return True

    @property
    def certain(self) -> bool:
        """Whether lengths are known, and nothing is left to forecast."""
        return isinstance(self.lengths, ForcedLengths)

    @property
    def ended(self) -> float:
        """Share of all requests."""
        return float((self.total >= 0).mean()) if len(self.total) else 0.0

    def first_forecast(self) -> LengthForecast | None:
        """Of the requests that the last `take` found; None where their lengths are known."""
        if self.certain:
            return None
        rows = np.arange(self._taken, len(self.requests))
        none = np.zeros(len(rows), dtype=np.int64)
        tokens = np.stack([self._remaining(rows, none, level) for level in _TOLD_LEVELS])
        return LengthForecast([r.request_id for r in self.requests[self._taken :]], _TOLD_LEVELS, tokens)

    def bind(self, rows: Sequence[int]) -> None:
        """These do not wait any more."""
        bound = set(rows)
        self.waiting = [row for row in self.waiting if row not in bound]

    def observe(self, progress: Progress) -> None:
        """Learn from the responses that have ended."""
        self._drawn.clear()
        ended = [p for p in progress.requests if p.finish_reason is not None and p.request_id in self._rows]
        if ended:
            rows = np.array([self._rows[p.request_id] for p in ended], dtype=np.int64)
            tokens = np.array([p.response_tokens for p in ended], dtype=np.int64)
            self.total[rows] = tokens
            self.lengths.finished(rows, tokens)

    def live(self, status: FleetStatus) -> Live:
        table = status.live_requests
        rows = np.fromiter(map(self._rows.__getitem__, table.ids), dtype=np.int64, count=len(table.ids))
        own = table.kv_pages - table.shared_pages
        return Live(rows, table.worker, table.response_tokens, tokens_of(status), own, table.decoding)

    def expected(self, rows: np.ndarray) -> np.ndarray:
        """Mean length of responses that have not begun, by the forecast: float64 [n]."""
        none = np.zeros(len(rows), dtype=np.int64)
        return np.mean([self._remaining(rows, none, level) for level in _LEVELS], axis=0)

    def draws(self) -> tuple[Draw, ...]:
        """Futures to compare plans on: in each another one of those that arrived last has its longest response.

        When the longest begins decides when all have ended, and a queue may be long: it stands in the first, the second
        and the last third of them.
        """
        count = len(self.requests) - self._taken
        rows = [self._taken + int(place * count) for place in _PLACES]
        return tuple(Draw((1 - 0.5 / count - (row + 1) * _GOLDEN) % 1.0) for row in rows)

    def left(
        self, rows: np.ndarray, generated: np.ndarray, draw: Draw | None = None, reserve: float = 0.0
    ) -> np.ndarray:
        """A draw of the tokens that each still generates: float64 [n].

        Every row has a level of its own, spread evenly over all rows, so that sums over many are those of the forecast.
        reserve: share by which levels are raised towards the longest.
        """
        draw = draw or Draw()
        if not np.array_equal(self._generated[rows], generated):
            self._generated[rows] = generated
            self._drawn.clear()
        drawn = self._drawn.get((draw, reserve))
        if drawn is None:
            drawn = self._drawn[draw, reserve] = np.full(len(self.requests), np.nan)
        fresh = np.isnan(drawn[rows])
        if fresh.any():  # a decision asks for the same rows many times
            new = rows[fresh]
            level = np.modf((new + 1) * _GOLDEN + draw.shift)[0] * draw.cut
            drawn[new] = self._remaining(new, generated[fresh], level + (1 - level) * reserve)
        return drawn[rows]

    def _remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        """The forecast within what is possible, whatever it says; the limit where it is no number."""
        found = np.asarray(self.lengths.remaining(rows, generated, level), dtype=np.float64)
        most = np.maximum(self.most[rows] - generated, 1.0)
        return np.clip(np.where(np.isnan(found), most, found), 1.0, most)
