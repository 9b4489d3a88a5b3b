"""`flexfloor` on a simulated fleet that takes its time, for tests that look on: python slow_fleet.py ARGUMENTS.

The model is not read, of the prompts the lengths (max_tokens) alone.
WARN_AT, FAIL_AT: iterations from which on it warns, prints and starts others that do, and at which a worker fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any

from simulated import DEVICE, PAGE_TOKENS, SHAPE, make_requests, with_pages

from flexfloor.cli import compare, main, rollout
from flexfloor.errors import WorkerFailedError
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.progress import Progress

SECONDS = 0.04  # of an advance


class SlowFleet(SimulatedFleet):
    warn_at, fail_at = (int(os.environ.get(name, 10**9)) for name in ("WARN_AT", "FAIL_AT"))

    def advance(self, iterations: int) -> Progress:
        time.sleep(SECONDS)
        progress = super().advance(iterations)
        reached = progress.first_iteration + progress.iterations
        if reached >= self.warn_at:
            warnings.warn(f"something odd at {reached}", RuntimeWarning, stacklevel=2)
            print(f"a word from elsewhere at {reached}")
            subprocess.run(["sh", "-c", f"echo a worker at {reached} >&2"], check=True)
        if reached >= self.fail_at:
            raise WorkerFailedError(1, "died (signal 9)")
        return progress


def read_work(settings: Any, show: Any) -> rollout.Work:
    show.phase("reading model and prompts")
    rows = [json.loads(line) for line in settings.prompts.read_text().splitlines()]
    return rollout.Work(make_requests([row["max_tokens"] for row in rows]), None)


def launch(settings: Any, work: Any, show: Any) -> SlowFleet:
    show.phase("checking numerics")
    workers = settings.workers
    return SlowFleet(SHAPE, with_pages(80, workers, DEVICE), workers, page_tokens=PAGE_TOKENS)


if __name__ == "__main__":
    for module in (rollout, compare):
        module.launch, module.read_work = launch, read_work  # type: ignore[attr-defined]
    sys.exit(main())
