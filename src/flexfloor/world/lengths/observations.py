"""Observed response lengths as arrays: what a history holds and what forecasts are fitted to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flexfloor.requests import SamplingParams

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
MOST = 2**53
"""Numbers of a history lie below it: exact in float64, and far from the end of int64."""


@dataclass(frozen=True, eq=False)
class Observations:
    """Responses of earlier rollouts, one entry a response in every array [n].

    keys: the prompt keys; prompt: int64, index into keys. samplings: the sampling keys (`sampling_key`); sampling:
    int64, index into samplings. evaluation: bool, of the split "eval". epoch: int64, rises with every call of
    `observe`. policy_version: int64. tokens: int64, of the response. max_tokens: int64. censored: bool, cut by the
    limit, so that the response is at least `tokens` long. prompt_tokens: int64.
    """

    keys: Sequence[str]
    samplings: Sequence[str]
    prompt: np.ndarray
    sampling: np.ndarray
    evaluation: np.ndarray
    epoch: np.ndarray
    policy_version: np.ndarray
    tokens: np.ndarray
    max_tokens: np.ndarray
    censored: np.ndarray
    prompt_tokens: np.ndarray

    def __post_init__(self) -> None:
        assert len({len(getattr(self, name)) for name in ARRAYS}) == 1, "arrays of different lengths"

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_lengths(
        cls,
        keys: Sequence[str],
        prompt: Any,
        tokens: Any,
        *,
        max_tokens: Any,
        censored: Any = False,
        epoch: Any = 0,
        prompt_tokens: Any = 0,
        policy_version: Any = 0,
        sampling: str = "",
        split: Split = "train",
    ) -> Observations:
        """From arrays, or one number for all, without any file; `prompt` indexes `keys`."""
        tokens = np.asarray(tokens, np.int64)

        def full(value: Any, dtype: type = np.int64) -> np.ndarray:
            return np.broadcast_to(np.asarray(value, dtype), tokens.shape)

        return cls(
            keys=keys,
            samplings=[sampling],
            prompt=full(prompt),
            sampling=full(0),
            evaluation=full(split == "eval", bool),
            epoch=full(epoch),
            policy_version=full(policy_version),
            tokens=tokens,
            max_tokens=full(max_tokens),
            censored=full(censored, bool),
            prompt_tokens=full(prompt_tokens),
        )

    def where(self, chosen: np.ndarray) -> Observations:
        """Those that chosen (bool [n] or indices) picks; keys stay."""
        return Observations(self.keys, self.samplings, *(getattr(self, name)[chosen] for name in ARRAYS))

    def alike(self, split: str, samplings: set[str]) -> Observations:
        """Those of the split that were sampled in one of these ways; without any, those of the split; else all."""
        same_split = self.evaluation == (split == "eval")
        known = [index for index, key in enumerate(self.samplings) if key in samplings]
        for chosen in (same_split & np.isin(self.sampling, known), same_split):
            if chosen.any():
                return self if chosen.all() else self.where(chosen)
        return self

    def shuffled(self, seed: int) -> Observations:
        """The same lengths under other prompts' keys, every prompt's together: what a wrong history looks like."""
        order = np.random.default_rng(seed).permutation(len(self.keys))
        return Observations([self.keys[i] for i in order], self.samplings, *(getattr(self, name) for name in ARRAYS))


ARRAYS = (
    "prompt",
    "sampling",
    "evaluation",
    "epoch",
    "policy_version",
    "tokens",
    "max_tokens",
    "censored",
    "prompt_tokens",
)


def sampling_key(sampling: SamplingParams) -> str:
    """All that shifts lengths by itself, except max_tokens, which only cuts them: as text that people can read."""
    if sampling.forced_length is not None:
        return "forced"  # the length comes from outside, however tokens are drawn
    parts = [f"temperature={sampling.temperature:g}", f"top_p={sampling.top_p:g}", f"top_k={sampling.top_k}"]
    if sampling.stop or sampling.stop_token_ids:
        stops = json.dumps([sorted(sampling.stop), sorted(sampling.stop_token_ids)])
        parts.append(f"stop={hashlib.sha256(stops.encode()).hexdigest()[:8]}")
    if sampling.ignore_eos:
        parts.append("ignore_eos")
    return " ".join(parts)
