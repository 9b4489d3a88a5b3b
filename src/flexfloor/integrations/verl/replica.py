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
from flexfloor.integrations.verl.consumers import Bundle
from flexfloor.integrations.verl.server import MOST_CALLS, SERVER, RolloutServer
from flexfloor.integrations.verl.settings import check_options, read_config


class FlexFloorReplica(RolloutReplica):
    """Its server runs on the machine of the training's workers and owns a worker process for each of them.

    Raises InputError for options that are not known or not good, before anything is started.
    """

    def __init__(self, replica_rank: int, config: Any, model_config: Any, **options: Any) -> None:
        super().__init__(replica_rank, config, model_config, **options)
        if replica_rank > 0:
            raise UnsupportedError(
                "there are more trainer workers than actor_rollout_ref.rollout.data_parallel_size; one fleet serves "
                "them all: set it to trainer.n_gpus_per_node"
            )
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedError("reward and teacher models need one of verl's own rollouts: give them another name")
        self._settings = read_config(self.config, copy_to_local(model_config.path), get_platform().device_name)
        check_options(self._settings)

    async def launch_servers(self) -> None:
        places = await asyncio.gather(*[worker.__ray_call__.remote(_where) for worker in self.workers])
        nodes = {node for node, *_ in places}
        if len(nodes) > 1:
            raise UnsupportedError(
                f"the trainer's workers are on {len(nodes)} machines; under verl a fleet lives on one: trainer.nnodes=1"
            )
        actor: Any = ray.remote(RolloutServer).options(
            name=SERVER,
            num_cpus=0,
            max_concurrency=MOST_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes.pop(), soft=False),
            runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
        )
        devices, bundles = [device for _, device, _ in places], [bundle for *_, bundle in places]
        server = actor.remote(self._settings, devices, bundles)
        await server.launch.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, SERVER

    async def init_standalone(self) -> NoReturn:
        raise UnsupportedError("a rollout apart from the trainer's workers is not supported: leave rollout.nnodes at 0")

    async def init_colocated(self, resource_pool: Any) -> NoReturn:
        raise UnsupportedError("a rollout in processes of its own is not supported: leave rollout.nnodes at 0")


def _where(worker: Any) -> tuple[str, str, Bundle]:
    """(Ray's id of the machine, id of the accelerator, its bundle) of a worker of the training; runs in it."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_platform().ray_resource_name(), [])
    # verl gives a worker the bundle with the number that it has on its machine.
    index = int(os.environ["RANK"]) % int(os.environ["RAY_LOCAL_WORLD_SIZE"])
    bundle = Bundle(ray.util.get_current_placement_group(), index)
    return context.get_node_id(), devices[0] if devices else "", bundle
