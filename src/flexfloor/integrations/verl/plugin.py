"""What `import verl` loads in every process, through the entry point group `verl.plugins`.

Only names are registered here; nothing heavy is imported until a run asks for the rollout named `flexfloor`.
verl logs what fails in here at debug level alone, so that a failure is kept and raised by who asks for the name.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from flexfloor.errors import UnsupportedError

NAME = "flexfloor"
"""Of the rollout: `actor_rollout_ref.rollout.name`."""

MADE_FOR = "0.9.1"
"""The release of verl whose interfaces this package was written against."""


def load_replica() -> Any:
    """The class of the replica. Raises UnsupportedError for another verl."""
    check_version(version("verl"))
    from flexfloor.integrations.verl.replica import FlexFloorReplica

    return FlexFloorReplica


def check_version(found: str) -> None:
    if found.split(".")[:2] != MADE_FOR.split(".")[:2]:
        remedy = f"pip install verl=={MADE_FOR}"
        raise UnsupportedError(f"verl is {found}; the rollout {NAME!r} works with {MADE_FOR}: {remedy}")


def register() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, load_replica)
    # verl has no function for the training side of a rollout; the table is all there is.
    base._ROLLOUT_REGISTRY[NAME, "async"] = "flexfloor.integrations.verl.weights.FlexFloorAdapter"


try:
    register()
except Exception as error:
    # To stderr, in one line: verl would not show it, and then only say that it does not know the rollout.
    import sys

    print(f"flexfloor: the verl plugin cannot be loaded with verl {version('verl')}: {error}", file=sys.stderr)
    raise
