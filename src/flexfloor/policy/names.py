"""Policies by their names."""

from __future__ import annotations

import re

from flexfloor.errors import InputError
from flexfloor.policy.base import Policy
from flexfloor.policy.elastic import FixedPolicy, ReleasePolicy
from flexfloor.policy.flexfloor import FlexFloorPolicy
from flexfloor.policy.planned import PlannedPolicy
from flexfloor.policy.static import StaticPolicy
from flexfloor.world.costs import DeviceProfile
from flexfloor.world.lengths.base import Lengths

POLICIES = ("static", "static-spread", "static-grouped", "planned", "release", "fixed:N", "flexfloor")


def make_policy(
    name: str,
    *,
    lengths: Lengths,
    max_slowdown: float,
    min_workers: int,
    workers: int,
    profile: DeviceProfile,
    time_scale: float = 1.0,
) -> Policy:
    """workers: of the fleet. time_scale: seconds of the fleet for one of the profile's device, as far as it is known.
    Raises InputError naming the choices, or the limit that is passed."""
    if not 1 <= min_workers <= workers:
        told = f"min_workers is {min_workers}; the fleet has {workers} workers, give 1 to {workers}"
        raise InputError(told, settings=("min_workers", "workers"))
    if not 0 <= max_slowdown < 1:
        told = f"max_slowdown is {max_slowdown}; give a share of throughput from 0 to below 1, like 0.02"
        raise InputError(told, settings=("max_slowdown",))
    if found := re.fullmatch(r"fixed:(\d+)", name):
        count = int(found[1])
        if not 1 <= count <= workers:
            told = f"policy {name!r}: the fleet has {workers} workers; give fixed:1 to fixed:{workers}"
            raise InputError(told, settings=("policy", "workers"))
        if count < min_workers:
            told = f"policy {name!r}: min_workers is {min_workers}; give one or the other"
            raise InputError(told, settings=("policy", "min_workers"))
        return FixedPolicy(lengths, profile, count, time_scale)
    match name:
        case "static" | "static-spread":
            return StaticPolicy(grouped=False)
        case "static-grouped":
            return StaticPolicy(grouped=True)
        case "planned":
            return PlannedPolicy(lengths, profile, time_scale=time_scale)
        case "release":
            return ReleasePolicy(lengths, profile, min_workers)
        case "flexfloor":
            return FlexFloorPolicy(lengths, profile, max_slowdown, min_workers, time_scale)
    raise InputError(f"policy {name!r} is not known; there is {', '.join(POLICIES)}", settings=("policy",))
