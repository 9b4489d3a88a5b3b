"""New weights in a running fleet: the same bits as a fresh launch on them, or an error and the old ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file, save_file
from test_resize import Scripted, consolidate, forced_requests, hashes, leave, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import flexfloor
from flexfloor.errors import FlexFloorError, InputError, UnsupportedError
from flexfloor.requests import SamplingParams

Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """others(architecture, seed) → a checkpoint of the same shapes with other values."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str, seed: int) -> Path:
        if (architecture, seed) not in made:
            folder = tmp_path_factory.mktemp("others") / f"{architecture}-{seed}"
            made[architecture, seed] = make_tiny_model(folder, **SIZES[architecture], seed=seed)
        return made[architecture, seed]

    return make


def fresh(model: Path) -> tuple:
    with flexfloor.Fleet.launch(model, workers=1) as fleet:
        return hashes(run(fleet, "static"))


def on_disk(model: Path) -> Named:
    """Per expert, as checkpoints name them."""
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def in_memory(model: Path) -> Named:
    """As the library's model names them: experts fused."""
    return dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmoe", "mixtral"])
def test_an_update_equals_a_fresh_launch_bit_for_bit(checkpoint: Callable, others: Callable, architecture: str) -> None:
    first, second = others(architecture, 5), others(architecture, 6)
    with flexfloor.Fleet.launch(checkpoint(architecture), workers=3) as fleet:
        old = hashes(run(fleet, consolidate()))
        for model, weights in (
            (first, in_memory(first)),
            (second, on_disk(second)),
            (first, first),
            (second, {name: tensor.double() for name, tensor in in_memory(second).items()}),
        ):
            fleet.load_weights(weights)
            assert hashes(run(fleet, consolidate())) == fresh(model)
            assert fresh(model) != old
        assert fleet.info.weights_version == 4
        fleet.load_weights(first, version=1000)
        assert fleet.info.weights_version == 1000


def test_updates_beside_resizes_and_two_in_a_row(checkpoint: Callable, others: Callable) -> None:
    model = others("qwen3_moe", 5)
    expected = fresh(model)
    with flexfloor.Fleet.launch(checkpoint("qwen3_moe"), workers=3, release="end") as fleet:
        run(fleet, Scripted([(8, leave(0, 2))]))  # ended processes come back, then everything is replaced
        fleet.load_weights(others("qwen3_moe", 6))
        fleet.load_weights(in_memory(model).items())
        # The first thing that happens to the new weights is a resize; ended processes load them, not the old ones.
        assert hashes(run(fleet, Scripted([(0, leave(1)), (4, leave(0))]))) == expected
        assert hashes(run(fleet, "static")) == expected


@pytest.fixture(scope="module")
def fleet(checkpoint: Callable) -> Iterator[flexfloor.Fleet]:
    with flexfloor.Fleet.launch(checkpoint("mixtral"), workers=2) as launched:
        yield launched


def without(name: str) -> Callable[[Named], Named]:
    return lambda w: {n: t for n, t in w.items() if name not in n}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1.self_attn.q_proj"), "tensor model.layers.1.self_attn.q_proj.weight is missing"),
        (without("layers.2.block_sparse_moe.experts.3.w2"), "layer 2, expert 3 is missing"),
        (without("layers.2.block_sparse_moe.experts"), "layer 2 has experts in only one"),
        (lambda w: w | {"model.extra.weight": torch.zeros(3)}, "tensor model.extra.weight does not belong"),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, "model.norm.weight has shape"),
        (lambda w: w | {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.zeros(3, 3)}, "has shape"),
        (lambda w: [*w.items(), ("model.norm.weight", torch.zeros(72))], "model.norm.weight is there twice"),
        (lambda w: {}, "there are none"),
        (
            lambda w: w | {"model.layers.0.mlp.experts.down_proj": torch.zeros(7, 72, 72)},
            "expert 0 of layer 0 is there twice",
        ),
    ],
)
def test_wrong_weights_are_refused_and_the_old_ones_stay(
    checkpoint: Callable, fleet: flexfloor.Fleet, change: Callable, message: str
) -> None:
    before, version = hashes(run(fleet, "static")), fleet.info.weights_version
    with pytest.raises(InputError, match=message) as caught:
        fleet.load_weights(change(on_disk(checkpoint("mixtral"))))
    assert "\n" not in str(caught.value)
    assert (hashes(run(fleet, "static")), fleet.info.weights_version) == (before, version)


def test_weights_that_are_not_numbers_are_told_by_name(checkpoint: Callable) -> None:
    weights = on_disk(checkpoint("mixtral"))
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    with flexfloor.Fleet.launch(checkpoint("mixtral"), workers=2) as launched:
        launched.load_weights(weights)
        with pytest.raises(flexfloor.WorkerFailedError, match="logits are not finite"):
            run(launched, "static")


def test_adapters_are_refused_in_words(fleet: flexfloor.Fleet) -> None:
    with pytest.raises(UnsupportedError, match="merge it into the model first"):
        fleet.load_weights({"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)})


def test_weights_are_only_replaced_between_rollouts(checkpoint: Callable, fleet: flexfloor.Fleet) -> None:
    run_ = flexfloor.Rollout(fleet, chunk=2)
    run_.submit(forced_requests())
    run_.seal()
    responses = iter(run_)
    next(responses)
    with pytest.raises(FlexFloorError, match="between rollouts"):
        fleet.load_weights(checkpoint("mixtral"))
    list(responses)


def test_nothing_is_left_in_shared_memory(checkpoint: Callable, fleet: flexfloor.Fleet, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    fleet.load_weights(in_memory(checkpoint("mixtral")))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError):
        fleet.load_weights(tmp_path)
    assert set(Path("/dev/shm").iterdir()) == before


@pytest.mark.parametrize("release", ["park", "end"])
def test_end_ids_and_stop_strings_are_those_of_the_model_after_an_update(
    others: Callable, tmp_path: Path, release: str
) -> None:
    """New weights come without tokenizer and generation config; who starts anew needs both."""
    prompts = [list(range(5 + p, 12 + 2 * p)) for p in range(6)]

    def ends_at(**more: Any) -> list[flexfloor.Request]:
        return flexfloor.make_requests(prompts, sampling=SamplingParams(max_tokens=40, temperature=0, **more))

    with flexfloor.Fleet.launch(others("qwen3_moe", 6), workers=1) as fleet:
        drawn = [response.tokens for response in flexfloor.rollout(fleet, ends_at(ignore_eos=True)).responses]
    tokenizer = AutoTokenizer.from_pretrained(others("qwen3_moe", 6))
    word = next(text for text in map(tokenizer.decode, drawn[0][4:]) if text.isascii() and text.isprintable())
    before, after = (shutil.copytree(others("qwen3_moe", seed), tmp_path / str(seed)) for seed in (5, 6))
    for folder in (before, after):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [drawn[1][7], drawn[2][9]]}))
    requests = ends_at(stop=(word,))
    with flexfloor.Fleet.launch(after, workers=1) as fleet:
        expected = flexfloor.rollout(fleet, requests).summary.responses_sha256
    with flexfloor.Fleet.launch(others("qwen3_moe", 6), workers=1) as fleet:  # else the end ids would show nothing
        assert flexfloor.rollout(fleet, requests).summary.responses_sha256 != expected
    with flexfloor.Fleet.launch(before, workers=3, release=release) as fleet:
        fleet.load_weights(in_memory(after))
        for _ in range(2):  # in the second, one has started anew
            found = flexfloor.rollout(fleet, requests, policy=Scripted([(2, leave(1))]), chunk=2)
            assert found.summary.responses_sha256 == expected
    ends = [response.tokens[-1] for response in found.responses if response.finish_reason == "stop"]
    assert len(ends) > len([token for token in ends if token in (drawn[1][7], drawn[2][9])]) > 0
