"""FlexFloor as a rollout backend of verl: `actor_rollout_ref.rollout.name=flexfloor`.

`plugin` registers it in every verl process, `replica` and `server` own the fleet, `weights` brings the trained weights
into it, `manager` and `agent` tell the server what belongs to a step, `sampler` hands its metrics to verl's loggers.
"""
