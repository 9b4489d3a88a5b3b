"""FlexFloor under TRL's GRPOTrainer: generation by an elastic fleet, with the trainer's current weights.

from flexfloor.integrations.trl import FlexFloorRollout

with FlexFloorRollout(model, workers=4) as rollout:
    GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data, rollout_func=rollout).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexfloor.integrations.trl.rollout import FlexFloorRollout

__all__ = ["FlexFloorRollout"]


def __getattr__(name: str) -> Any:
    """The class on first use: it loads transformers, which checking a config file does without."""
    if name == "FlexFloorRollout":
        from flexfloor.integrations.trl.rollout import FlexFloorRollout

        return FlexFloorRollout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
