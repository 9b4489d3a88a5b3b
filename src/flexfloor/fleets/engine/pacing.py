"""Pace: an iteration lasts at least as long as it would on the device of a profile, times a scale.

Workers that share a core wait for each other while they compute; as long as each iteration's real work fits into its
target time, the sleep hides that, and a fleet behaves as if every worker had a device of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexfloor.errors import InputError
from flexfloor.progress import ModelShape
from flexfloor.settings import EngineSettings
from flexfloor.world.costs import DeviceProfile, iteration_seconds, load_profile
from flexfloor.world.model_config import shape_from_config


class IterationCounts(NamedTuple):
    """What every worker tells the others at the start of an iteration: all that the time of one depends on."""

    rows: int
    live: int
    batch: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """scale: seconds of this fleet for one second of the profile's device; None lets iterations run as they can.

    shape: of the model whose iterations are emulated, None for the one that runs.
    """

    scale: float | None
    profile: DeviceProfile
    shape: ModelShape | None = None

    @classmethod
    def of(cls, settings: EngineSettings) -> Pace:
        """Raises InputError for a profile or a model that cannot be loaded, also where no pace is asked for."""
        if settings.pace_model is not None and settings.pace is None:
            told = f"pace_model {settings.pace_model!r} without a pace; give a scale as `pace` too"
            raise InputError(told, settings=("pace_model", "pace"))
        shape = None if settings.pace_model is None else shape_from_config(settings.pace_model)
        return cls(settings.pace, load_profile(settings.resolved_profile), shape)


class Pacer:
    """The clock of one worker's iterations. All workers work out the same target from the same counts."""

    def __init__(self, pace: Pace, shape: ModelShape) -> None:
        self._pace, self._shape = pace, pace.shape or shape
        self._begin = time.perf_counter()

    def begin_chunk(self) -> None:
        self._begin = time.perf_counter()

    def target(self, counts: Sequence[IterationCounts]) -> float:
        """Seconds that this iteration has to last, 0 without pace. counts: of every active worker."""
        if self._pace.scale is None:
            return 0.0
        return self._pace.scale * iteration_seconds(
            self._pace.profile,
            self._shape,
            batch=[c.batch for c in counts],
            kv_tokens=[c.kv_tokens for c in counts],
            prefill_tokens=[c.prefill_tokens for c in counts],
        )

    def end_iteration(self, target: float) -> tuple[float, bool]:
        """Sleep until the iteration has lasted `target`. Returns its seconds and whether its work took longer.

        The next iteration begins at the deadline, not when the sleeper wakes: waking late does not add up.
        """
        now, deadline = time.perf_counter(), self._begin + target
        if now < deadline:
            time.sleep(deadline - now)
            now = deadline
        seconds, self._begin = now - self._begin, now
        return seconds, self._pace.scale is not None and now > deadline
