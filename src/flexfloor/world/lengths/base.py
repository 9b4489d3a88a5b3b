"""What planning asks about the lengths of one rollout's responses, and the answer when they are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from flexfloor.errors import InputError
from flexfloor.requests import Request


class Lengths(Protocol):
    """Forecasts for the requests of one rollout. Rows number them in the order of `add`."""

    def add(self, requests: Sequence[Request]) -> None:
        """Requests become known; their rows follow those known before."""

    def finished(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Responses of this rollout have ended with `tokens` tokens each; forecasts may learn from them."""

    def remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        """Tokens that each response still generates, as a quantile of what is possible given those it has.

        rows, generated: int64 [n]; level: in [0, 1], one for all or float64 [n]. Drawing levels at random samples the
        forecast. Returns float64 [n], at least 1 and at most max_tokens − generated (1 where that is less).
        """


def check_oracle(requests: Sequence[Request]) -> None:
    """Raises InputError for a request whose length is not forced."""
    for request in requests:
        if request.sampling.forced_length is None:
            raise InputError(
                f"knowledge 'oracle' needs forced lengths, and request {request.request_id} may end by itself; "
                "give `force_lengths`",
                settings=("knowledge",),
            )


class ForcedLengths:
    """Every response has the length that was forced upon it."""

    def __init__(self) -> None:
        self._totals = np.zeros(0)

    def add(self, requests: Sequence[Request]) -> None:
        check_oracle(requests)
        self._totals = np.concatenate([self._totals, [float(r.sampling.max_tokens) for r in requests]])

    def finished(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        pass

    def remaining(self, rows: np.ndarray, generated: np.ndarray, level: np.ndarray | float) -> np.ndarray:
        return np.maximum(self._totals[rows] - generated, 1.0)
