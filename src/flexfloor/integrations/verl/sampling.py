"""verl's sampling parameters of a request as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexfloor.errors import UnsupportedError
from flexfloor.integrations.verl.settings import VerlSettings
from flexfloor.requests import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "min_p": (0.0, None),
    "min_tokens": (0, None),
    "n": (1, None),
    "seed": (None,),
    "skip_special_tokens": (True, False, None),
    "include_stop_str_in_output": (True, None),
}
"""Parameters that FlexFloor does not carry out → the values with which they ask for nothing."""


def read_sampling(
    params: Mapping[str, Any], s: VerlSettings, prompt_tokens: int, step: int
) -> tuple[SamplingParams, bool]:
    """(sampling, whether log-probabilities are wanted). step: of the random numbers.

    Without max_tokens the budget is verl's own rule: the response length, less what a prompt of several turns has
    used of prompt and response length together. Raises UnsupportedError for a parameter that would be left out.
    """
    rest = dict(params)
    logprobs = rest.pop("logprobs", False)
    given = [rest.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    budget = next((int(g) for g in given if g is not None), None)
    if budget is None:
        budget = min(s.response_length, s.prompt_length + s.response_length - prompt_tokens)
    stop = rest.pop("stop", None) or ()
    taken: dict[str, Any] = {
        "temperature": float(rest.pop("temperature", 1.0)),
        "top_p": float(rest.pop("top_p", 1.0)),
        "top_k": max(0, int(rest.pop("top_k", -1))),  # verl's -1 keeps all
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": tuple(int(t) for t in rest.pop("stop_token_ids", None) or ()),
        "ignore_eos": bool(rest.pop("ignore_eos", s.ignore_eos)),
    }
    for name, value in rest.items():
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise UnsupportedError(
                f"sampling parameter {name}={value!r}; FlexFloor does not sample with it: leave it out"
            )
    return SamplingParams(max_tokens=max(1, budget), seed=s.seed, step=step, **taken), logprobs not in (False, None)
