"""FlexFloor: elastic expert-parallel rollouts for reinforcement-learning post-training of mixture-of-experts models.

import flexfloor

requests = flexfloor.make_requests([[1, 2, 3], [4, 5]], samples=4)
with flexfloor.Fleet.launch("path/to/checkpoint", workers=2) as fleet:
    result = flexfloor.rollout(fleet, requests)
print(result.summary.tokens_per_occupied_s)
"""

from __future__ import annotations

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError, WorkerFailedError
from flexfloor.fleet import Fleet
from flexfloor.requests import Prompt, Request, Response, SamplingParams, make_requests
from flexfloor.rollout import Rollout, RolloutProgress, RolloutResult, rollout
from flexfloor.settings import EngineSettings
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

__all__ = [
    "EngineSettings",
    "Fleet",
    "FlexFloorError",
    "InputError",
    "LengthHistory",
    "Observations",
    "Prompt",
    "Request",
    "Response",
    "Rollout",
    "RolloutProgress",
    "RolloutResult",
    "SamplingParams",
    "UnsupportedError",
    "WorkerFailedError",
    "make_requests",
    "rollout",
]
