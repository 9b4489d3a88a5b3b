"""FlexFloor under TRL's GRPOTrainer: generation by an elastic fleet, with the trainer's current weights.

from flexfloor.integrations.trl import FlexFloorRollout

with FlexFloorRollout(model, workers=4) as rollout:
    GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data, rollout_func=rollout).train()
"""

from __future__ import annotations

from flexfloor.integrations.trl.rollout import FlexFloorRollout

__all__ = ["FlexFloorRollout"]
