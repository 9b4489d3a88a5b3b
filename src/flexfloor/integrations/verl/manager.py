"""verl's agent-loop manager, which announces the requests of a batch to the server before it sends any."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
from tensordict import NonTensorData
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from flexfloor.integrations.verl.agent import SessionWorker
from flexfloor.integrations.verl.server import SERVER
from flexfloor.integrations.verl.sessions import announce
from flexfloor.integrations.verl.settings import check_run
from flexfloor.world.lengths.observations import Split


class FlexFloorManager(AgentLoopManagerTQ):
    """`actor_rollout_ref.rollout.agent.agent_loop_manager_class`. Raises UnsupportedError for asynchronous trainers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_run(self.config)
        self.agent_loop_workers_class = ray.remote(SessionWorker)
        self._server = ray.get_actor(SERVER)
        self._at: tuple[Split, int] = ("train", -1)
        self._number = 0
        self._seen: Counter[str] = Counter()

    def generate_sequences(self, prompts: Any) -> None:
        """prompts: TensorDict of a batch, a row for every prompt."""
        split: Split = "eval" if _is_true(prompts, "validate") else "train"
        step = int(_plain(prompts["global_steps"]))
        if (split, step) != self._at:
            self._at, self._number, self._seen = (split, step), 0, Counter()
        rows = read_rows(prompts, self._samples(split))
        announced = announce(rows, step=step, number=self._number, split=split, seen=self._seen)
        self._number += 1
        ray.get(self._server.announce.remote(announced, str(self.config.trainer.default_local_dir)))
        super().generate_sequences(prompts)

    def _samples(self, split: Split) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return int(rollout.n if split == "train" else rollout.val_kwargs.n)


def read_rows(batch: Any, samples: int) -> list[dict[str, Any]]:
    """The rows of a batch as `announce` takes them. samples: of a prompt that asks for no other number."""
    columns = {
        name: [_plain(value) for value in batch[name]]
        for name in ("uid", "raw_prompt", "data_source", "extra_info", "__rollout_n__")
        if name in batch
    }
    columns["samples"] = columns.pop("__rollout_n__", [samples] * len(batch))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_true(batch: Any, name: str) -> bool:
    return name in batch and bool(_plain(batch[name]))


def _plain(value: Any) -> Any:
    """What a TensorDict holds, without its wrapping."""
    return value.data if isinstance(value, NonTensorData) else value
