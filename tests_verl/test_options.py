"""What is read from verl's config, and what is refused in one line that names the key."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.config import RolloutConfig

from flexfloor.errors import InputError, UnsupportedError
from flexfloor.integrations.verl import plugin
from flexfloor.integrations.verl.sampling import read_sampling
from flexfloor.integrations.verl.settings import VerlSettings, check_options, check_run, read_config


def config(custom: dict[str, Any] | None = None, **fields: Any) -> RolloutConfig:
    own = {"name": "flexfloor", "tensor_model_parallel_size": 1, "data_parallel_size": 2, "dtype": "float32"}
    return RolloutConfig(**{**own, **fields}, custom=custom)


def settings(custom: dict[str, Any] | None = None, **fields: Any) -> VerlSettings:
    read = read_config(config(custom, **fields), "model", "cpu")
    check_options(read)
    return read


def test_options_reach_the_fleet_and_the_rollout() -> None:
    read = settings({"policy": "static", "worker_memory": "64MiB", "chunk": 8}, seed=7, max_num_seqs=33)
    assert (read.workers, read.seed, read.options.policy, read.options.chunk) == (2, 7, "static", 8)
    assert (read.engine.worker_memory, read.engine.max_batch, read.engine.dtype) == (64 * 2**20, 33, "float32")
    assert read_config(config(), "model", "cuda").engine.device == "cuda"


@pytest.mark.parametrize(
    ("custom", "fields", "told"),
    [
        ({"polcy": "static"}, {}, "custom: unknown key 'polcy'; did you mean 'policy'"),
        ({"workers": 4}, {}, "custom.workers: verl has it; set actor_rollout_ref.rollout.data_parallel_size"),
        ({"max_slowdown": -1}, {}, "custom.max_slowdown: "),
        ({"worker_memory": "much"}, {}, "custom.worker_memory: "),
        ({"release": "end"}, {}, "custom.release is 'end'"),
        ({"knowledge": "history", "history": None}, {}, "custom.history: give a file or auto"),
        ({"min_workers": 3}, {}, "min_workers is 3, more than the 2 workers"),
        ({"policy": "releas"}, {}, "custom.policy: policy 'releas' is not known"),
        ({"policy": "fixed:9"}, {}, "custom.policy: "),
        ({"profile": "nosuch"}, {}, "custom.profile: profile 'nosuch' is not known"),
        ({"history": __file__}, {}, "custom.history: "),
        ({}, {"dtype": "fp8"}, "actor_rollout_ref.rollout.dtype: "),
        ({"launcher": "carrier pigeon"}, {}, "launcher 'carrier pigeon' is not known"),
        ({"launcher": "ray"}, {}, "custom.launcher is 'ray'; under verl the fleet runs where the training does"),
        ({}, {"tensor_model_parallel_size": 2}, "tensor_model_parallel_size is 2; set it to 1"),
        ({}, {"quantization": "fp8"}, "quantization is 'fp8'; leave it out"),
        ({}, {"enable_rollout_routing_replay": True}, "routed experts are not put out"),
    ],
)
def test_refused(custom: dict[str, Any], fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        settings(custom, **fields)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def run_config(**changes: Any) -> Any:
    values = {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 2,
        "algorithm.filter_groups.enable": False,
        "trainer.v1.sampler.custom_sampler.name": "FlexFloorSampler",
        "actor_rollout_ref.rollout.data_parallel_size": 2,
    } | changes
    made = OmegaConf.create({})
    for name, value in values.items():
        OmegaConf.update(made, name, value)
    return made


def test_runs_that_cannot_be_served_are_refused() -> None:
    check_run(run_config())
    for name, value, told in (
        ("trainer.use_v1", False, "set trainer.use_v1=True"),
        ("trainer.v1.trainer_mode", "separate_async", "trainer_mode=sync"),
        ("algorithm.filter_groups.enable", True, "algorithm.filter_groups.enable=True"),
        ("trainer.v1.sampler.custom_sampler", None, "sampler.custom_sampler is not set"),
        ("trainer.v1.sampler.custom_sampler.name", None, "and name=FlexFloorSampler"),
        ("trainer.n_gpus_per_node", 4, "data_parallel_size is 2 and there are 4 trainer workers"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            check_run(run_config(**{name: value}))
        assert told in str(caught.value)


def test_sampling_is_verls() -> None:
    read = settings(response_length=100, prompt_length=50)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    sampling, logprobs = read_sampling(given, read, prompt_tokens=20, step=9)
    assert logprobs
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.max_tokens, sampling.seed, sampling.step) == (100, 42, 9)


def test_the_budget_of_a_later_turn_shrinks_with_its_prompt() -> None:
    read = settings(response_length=100, prompt_length=50)
    assert read_sampling({}, read, prompt_tokens=90, step=0)[0].max_tokens == 60
    assert read_sampling({}, read, prompt_tokens=150, step=0)[0].max_tokens == 1
    assert read_sampling({"max_tokens": 7}, read, prompt_tokens=20, step=0)[0].max_tokens == 7
    assert read_sampling({"max_new_tokens": 8}, read, prompt_tokens=20, step=0)[0].max_tokens == 8


@pytest.mark.parametrize("param", [{"repetition_penalty": 1.1}, {"min_p": 0.1}, {"best_of": 2}])
def test_sampling_that_would_be_left_out_is_refused(param: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(param))):
        read_sampling(param, settings(), prompt_tokens=1, step=0)


def test_another_verl_is_refused_when_the_rollout_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.11.0")
    with pytest.raises(UnsupportedError, match=r"verl is 0\.11\.0.*pip install verl==0\.9\.1"):
        plugin.load_replica()


def test_verl_knows_the_rollout() -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert get_rollout_replica_class("flexfloor").__name__ == "FlexFloorReplica"
    assert get_rollout_class("flexfloor").__name__ == "FlexFloorAdapter"
