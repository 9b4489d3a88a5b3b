"""Sizes from a config alone: against checkpoints that the engine inspects, against the library's models, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexfloor.errors import InputError
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.world.model_config import FAMILIES, PRESETS, shape_from_config

COMMON = {
    "vocab_size": 320, "max_position_embeddings": 512, "hidden_size": 48, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "intermediate_size": 40, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LIKE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 36, "head_dim": None},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6, "head_dim": None, "tie_word_embeddings": True},
    "gpt_oss": {"num_local_experts": 6},
    "glm4_moe": {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 2, "use_qk_norm": True},
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT | {"q_lora_rank": 14},
    "qwen3_next": {
        "num_experts": 6, "shared_expert_intermediate_size": 36, "full_attention_interval": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["tiny", "qwen3_moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_as_the_engine_finds_it_in_the_checkpoint(checkpoint: Callable[[str], Path], name: str, dtype: str):
    folder = checkpoint(name)
    expected = inspect_checkpoint(folder, dtype).shape
    given = None if dtype == "auto" else dtype
    assert shape_from_config(folder, given) == expected
    assert shape_from_config(json.loads((folder / "config.json").read_text()), given) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_elements_as_the_library_builds(family: str, tmp_path: Path):
    fields = COMMON | LIKE[family]
    config = AutoConfig.for_model(family, **{k: v for k, v in fields.items() if v is not None or k == "q_lora_rank"})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = shape_from_config(tmp_path, "bfloat16")
    elements = dict.fromkeys(("experts", "dense"), 0)
    layers = set()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        part = "experts" if ".experts." in name else "dense"
        elements[part] += weight.numel() if "inv_freq" not in name else 0
        if part == "experts":
            layers.add(int(name.split("layers.")[1].split(".")[0]))
    assert found.moe_layers == tuple(sorted(layers))
    assert found.all_expert_bytes == 2 * elements["experts"]
    assert found.dense_bytes == 2 * elements["dense"]
    assert found.lookup_bytes == (0 if fields["tie_word_embeddings"] else 2 * 320 * 48)


@pytest.mark.parametrize(
    ("family", "elements"),
    [
        ("qwen3_moe", 5 * 2 * 2 * 16),
        ("olmoe", 5 * 2 * 2 * 12),
        ("deepseek_v3", 5 * (20 + 8)),
        ("qwen3_next", 1 * 2 * 2 * 16),  # the fourth of five layers
        ("gpt_oss", 2 * 2 * 2 * 16),  # the second and the fourth
    ],
)
def test_kv_of_one_token(family: str, elements: int):
    found = shape_from_config(COMMON | LIKE[family] | {"model_type": family}, "float32")
    assert found.kv_token_bytes == 4 * elements


# Published: total parameters in billions, KV bytes of one token in bfloat16.
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 98304),
    "qwen3-235b-a22b": (235.1, 192512),
    "mixtral-8x7b": (46.7, 131072),
    "olmoe-1b-7b": (6.92, 131072),
    "deepseek-v3": (671.0, 70272),
}


@pytest.mark.parametrize("name", PRESETS)
def test_published_models(name: str):
    shape = shape_from_config(name)
    billions, kv = PUBLISHED[name]
    assert (shape.all_expert_bytes + shape.dense_bytes) / 2e9 == pytest.approx(billions, rel=2e-3)
    assert shape.kv_token_bytes == kv


def test_the_model_of_the_study():
    shape = shape_from_config("qwen3-30b-a3b")
    assert shape.all_expert_bytes / 1e9 == pytest.approx(57.98, abs=0.005)
    # Routers (25 MB) and norms are left out of the study's 3.05 and 2.43.
    assert shape.dense_bytes / 1e9 == pytest.approx(3.05 + 0.03, abs=0.005)
    assert (shape.dense_bytes - shape.lookup_bytes) / 1e9 == pytest.approx(2.43 + 0.03, abs=0.005)
    assert (shape.layers, shape.experts, shape.top_k, shape.hidden) == (48, 128, 8, 2048)


def test_the_dtype_of_the_config_and_another():
    config = COMMON | LIKE["mixtral"] | {"model_type": "mixtral"}
    two, four = shape_from_config(config), shape_from_config(config | {"torch_dtype": "float32"})
    assert (two.itemsize, four.itemsize) == (2, 4)
    doubled = {n: 2 * getattr(two, n) for n in ("dense_bytes", "expert_bytes", "kv_token_bytes", "lookup_bytes")}
    assert four == replace(two, itemsize=4, **doubled)


def test_the_text_part_of_a_model_with_several():
    config = COMMON | LIKE["mixtral"] | {"model_type": "mixtral"}
    assert shape_from_config({"model_type": "pictures", "text_config": config}) == shape_from_config(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not known; there is deepseek_v2, "),
        ({"num_local_experts": None}, "num_experts is missing; give the model's whole config.json"),
        ({"hidden_size": "48"}, "hidden_size is '48'; give a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; give a whole number from 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, with 6 experts"),
        ({"first_k_dense_replace": 5}, "no layer has experts"),
        ({"dtype": "int4"}, "dtype 'int4' is not known; there is float32, bfloat16, float16"),
    ],
)
def test_a_config_that_is_not_one(tmp_path: Path, change: dict[str, Any], told: str):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(COMMON | LIKE["mixtral"] | {"model_type": "mixtral"} | change))
    with pytest.raises(InputError) as caught:
        shape_from_config(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ("[]", "is not an object"), ("{}", "model_type")])
def test_a_file_that_is_no_config(tmp_path: Path, text: str, told: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        shape_from_config(path)


def test_a_model_that_is_not_there():
    with pytest.raises(InputError, match=r"gpt-9 cannot be read .*name a config.json or one of .*qwen3-30b-a3b"):
        shape_from_config("gpt-9")
