"""A fleet between two rollouts without its memory: for trainers that need the device in the meantime."""

from __future__ import annotations

from flexfloor.errors import FlexFloorError
from flexfloor.fleets.engine.fleet import EngineFleet


def sleep(fleet: EngineFleet) -> int:
    """Give the memory of experts and KV back, on every worker. Returns bytes of arenas.

    What stays are the processes, their group and the dense weights. Until `wake` and new weights after it, the fleet
    must not be used. Raises FlexFloorError while workers are released, or with requests that are not done.
    """
    status = fleet.status()
    if len(status.active) < fleet.info.workers or status.requests:
        raise FlexFloorError("a fleet sleeps between rollouts, when all workers are back and all requests are done")
    fleet._call("sleep", dict.fromkeys(status.active, ()))
    fleet._update_status()
    return sum(w.arena_bytes for w in status.workers)


def wake(fleet: EngineFleet) -> None:
    """Memory again, without experts in it: `fleet.load_weights` comes next, before any rollout."""
    fleet._call("wake", dict.fromkeys(range(fleet.info.workers), ()))
    fleet._update_status()
