"""verl's handle on the fleet: one replica, which serves all workers of the training."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutReplica

from flexfloor.errors import UnsupportedError
from flexfloor.fleets.engine.machine import Machine
from flexfloor.integrations.ray.leases import Place
from flexfloor.integrations.verl.consumers import Bundle
from flexfloor.integrations.verl.server import MOST_CALLS, SERVER, RolloutServer
from flexfloor.integrations.verl.settings import check_options, read_config


class FlexFloorReplica(RolloutReplica):
    """Its server runs on the machine of the training's first worker and owns a worker process for each of them.

    Raises InputError for options that are not known or not good, before anything is started.
    """

    def __init__(self, replica_rank: int, config: Any, model_config: Any, **options: Any) -> None:
        super().__init__(replica_rank, config, model_config, **options)
        if replica_rank > 0:
            raise UnsupportedError(
                "there are more trainer workers than actor_rollout_ref.rollout.data_parallel_size; one fleet serves "
                "them all: set it to trainer.nnodes * trainer.n_gpus_per_node"
            )
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedError("reward and teacher models need one of verl's own rollouts: give them another name")
        self._settings = read_config(self.config, copy_to_local(model_config.path), get_platform().device_name)
        check_options(self._settings)

    async def launch_servers(self) -> None:
        found = await asyncio.gather(*[worker.__ray_call__.remote(_where) for worker in self.workers])
        places, bundles = [place for place, _ in found], [bundle for _, bundle in found]
        actor: Any = ray.remote(RolloutServer).options(
            name=SERVER,
            num_cpus=0,
            max_concurrency=MOST_CALLS,
            # Rank 0 writes new weights to this machine's memory.
            scheduling_strategy=NodeAffinitySchedulingStrategy(places[0].machine.name, soft=False),
            runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
        )
        server = actor.remote(self._settings, places, bundles)
        await server.launch.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, SERVER

    async def init_standalone(self) -> NoReturn:
        raise UnsupportedError("a rollout apart from the trainer's workers is not supported: leave rollout.nnodes at 0")

    async def init_colocated(self, resource_pool: Any) -> NoReturn:
        raise UnsupportedError("a rollout in processes of its own is not supported: leave rollout.nnodes at 0")


def _where(worker: Any) -> tuple[Place, Bundle]:
    """The machine and the accelerator of a worker of the training, and its bundle; runs in it."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_platform().ray_resource_name(), [])
    # verl has a placement group a machine, and gives a worker the bundle with the number that it has there.
    index = int(os.environ["RANK"]) % int(os.environ["RAY_LOCAL_WORLD_SIZE"])
    bundle = Bundle(ray.util.get_current_placement_group(), index)
    machine = Machine(context.get_node_id(), ray.util.get_node_ip_address())
    return Place(machine, tuple(str(device) for device in devices[:1])), bundle
