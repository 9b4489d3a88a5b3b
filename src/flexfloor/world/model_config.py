"""The sizes of a mixture-of-experts model from its Hugging Face config.json alone: no weights, no library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexfloor.errors import InputError
from flexfloor.progress import ModelShape

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

_FOLDER = Path(__file__).parent / "models"
PRESETS: dict[str, Path] = {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}
"""Published models by name: the fields of their config.json that decide sizes."""

# One layer's attention over a bounded window or in a recurrent state: its memory does not grow with the context.
_BOUNDED_ATTENTION = ("sliding_attention", "linear_attention", "chunked_attention")


def shape_from_config(source: str | Path | Mapping[str, Any], dtype: str | None = None) -> ModelShape:
    """The shape of the model that a config describes: a name of PRESETS, a config.json, its folder or its content.

    dtype: float32, bfloat16 or float16, which all weights and the KV cache are held in; None takes what the config
    says, bfloat16 where it says nothing. A quantisation is left out of account.

    Experts shared by all tokens count as dense weights. With multi-head latent attention a token's KV is its latent
    vector and its rotary key. Layers whose attention is bounded (a sliding window, a recurrent state) have no KV.

    Raises InputError naming the file and the field.
    """
    where, config = _read(source)
    config = config.get("text_config") or config
    try:
        return _Config(where, config).shape(dtype)
    except KeyError as error:
        raise InputError(f"{where}: {error.args[0]} is missing; give the model's whole config.json") from None


def _read(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The words that name it, and its content."""
    if isinstance(source, Mapping):
        return "model config", source
    if str(source) in PRESETS:
        path = PRESETS[str(source)]
    else:
        path = Path(source)
        if path.is_dir():
            path /= "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"model config {path} cannot be read ({error.strerror}); name a config.json or one of {', '.join(PRESETS)}"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"model config {path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"model config {path} is not an object with the fields of a model; name a config.json")
    return f"model config {path}", content


class _Config:
    """A config with what the families call the same thing by different names. Counts are of elements."""

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self._where, self._fields = where, fields
        self.family = fields["model_type"]
        if self.family not in FAMILIES:
            raise InputError(f"{where}: model_type {self.family!r} is not known; there is {', '.join(FAMILIES)}")
        self.hidden = self._count("hidden_size")
        self.layers = self._count("num_hidden_layers")
        self.vocab = self._count("vocab_size")
        self.heads = self._count("num_attention_heads")
        self.experts = self._count("num_experts", "num_local_experts", "n_routed_experts")
        self.top_k = self._count("num_experts_per_tok", "experts_per_token")
        if self.top_k > self.experts:
            raise InputError(f"{where}: num_experts_per_tok is {self.top_k}, with {self.experts} experts")
        own = () if self.family in ("gpt_oss", "mixtral", "olmoe") else ("moe_intermediate_size",)
        self.intermediate = self._count(*own, "intermediate_size")

    def shape(self, dtype: str | None) -> ModelShape:
        itemsize = self._itemsize(dtype)
        moe_layers = self.moe_layers()
        expert = 3 * self.hidden * self.intermediate
        if self.family == "gpt_oss":
            expert += 2 * self.intermediate + self.hidden  # biases
        per_layer = sum(self._attention(layer) + 2 * self.hidden for layer in range(self.layers))
        blocks = len(moe_layers) * self._beside_experts() + (self.layers - len(moe_layers)) * self._dense_block()
        tied = bool(self._fields.get("tie_word_embeddings", False))
        embeddings = self.vocab * self.hidden * (1 if tied else 2)
        return ModelShape(
            model_type=self.family,
            layers=self.layers,
            moe_layers=moe_layers,
            experts=self.experts,
            top_k=self.top_k,
            vocab_size=self.vocab,
            max_context=self._count("max_position_embeddings"),
            dense_bytes=(embeddings + self.hidden + per_layer + blocks) * itemsize,
            expert_bytes=expert * itemsize,
            kv_token_bytes=sum(self._kv(layer) for layer in range(self.layers)) * itemsize,
            hidden=self.hidden,
            itemsize=itemsize,
            lookup_bytes=0 if tied else self.vocab * self.hidden * itemsize,
        )

    def moe_layers(self) -> tuple[int, ...]:
        """Raises InputError where no layer has experts."""
        first = self._whole("first_k_dense_replace", 0)
        often = self._whole("moe_layer_freq", 1) or 1
        step = self._whole("decoder_sparse_step", 1) or 1
        without = self._fields.get("mlp_only_layers") or ()
        found = tuple(
            i for i in range(self.layers) if i >= first and i % often == 0 and (i + 1) % step == 0 and i not in without
        )
        if not found:
            raise InputError(f"{self._where}: no layer has experts; FlexFloor is for mixture-of-experts models")
        return found

    def _attention(self, layer: int) -> int:
        """Elements of one layer's attention."""
        if self._fields.get("kv_lora_rank"):
            return self._latent_attention()
        if self._kind(layer) == "linear_attention":
            return self._linear_attention()
        hidden, head = self.hidden, self.head_dim
        query, keys = self.heads * head, self.kv_heads * head
        gate = query if self.family == "qwen3_next" else 0
        count = hidden * (query + gate + 2 * keys) + query * hidden
        if self._fields.get("attention_bias", self.family == "gpt_oss"):
            count += query + gate + 2 * keys + (0 if self.family == "glm4_moe" else hidden)
        elif self.family == "qwen2_moe" and self._fields.get("qkv_bias", True):
            count += query + 2 * keys
        if self.family == "olmoe":
            count += query + keys  # norms of whole queries and keys
        elif self.family in ("qwen3_moe", "qwen3_next") or self._fields.get("use_qk_norm"):
            count += 2 * head
        return count + (self.heads if self.family == "gpt_oss" else 0)  # attention sinks

    def _latent_attention(self) -> int:
        """Multi-head latent attention: projections through low ranks."""
        hidden, heads = self.hidden, self.heads
        rank, rotary = self._count("kv_lora_rank"), self._count("qk_rope_head_dim")
        plain, value = self._count("qk_nope_head_dim"), self._count("v_head_dim")
        low = self._whole("q_lora_rank", 0)
        query = heads * (plain + rotary)
        count = hidden * low + low + low * query if low else hidden * query
        count += hidden * (rank + rotary) + rank + rank * heads * (plain + value) + heads * value * hidden
        if self._fields.get("attention_bias"):
            count += low + rank + rotary + hidden
        return count

    def _linear_attention(self) -> int:
        """A gated delta net: queries, keys, values and gates, a short convolution, decays, a norm, the way out."""
        key_heads, value_heads = self._count("linear_num_key_heads"), self._count("linear_num_value_heads")
        value_dim = self._count("linear_value_head_dim")
        keys, values = key_heads * self._count("linear_key_head_dim"), value_heads * value_dim
        count = self.hidden * (2 * keys + 2 * values + 2 * value_heads)
        count += (2 * keys + values) * self._count("linear_conv_kernel_dim")
        return count + 2 * value_heads + value_dim + values * self.hidden

    def _kv(self, layer: int) -> int:
        """Elements that one token adds to the KV cache of a layer."""
        if self._fields.get("kv_lora_rank"):
            return self._count("kv_lora_rank") + self._count("qk_rope_head_dim")
        return 0 if self._kind(layer) in _BOUNDED_ATTENTION else 2 * self.kv_heads * self.head_dim

    def _kind(self, layer: int) -> str:
        kinds = self._fields.get("layer_types")
        if kinds and len(kinds) == self.layers:
            return kinds[layer]
        if self.family == "qwen3_next":
            interval = self._whole("full_attention_interval", 4)
            return "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        return "sliding_attention" if self.family == "gpt_oss" and layer % 2 == 0 else "full_attention"

    @property
    def head_dim(self) -> int:
        return self._whole("head_dim", 0) or self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        return self._whole("num_key_value_heads", 0) or self.heads

    def _beside_experts(self) -> int:
        """Elements of a layer's router and of the experts that every token goes through."""
        router = self.experts * self.hidden
        if self.family in ("deepseek_v3", "glm4_moe", "gpt_oss"):
            router += self.experts  # a bias
        shared = self._whole("n_shared_experts", 0) * self.intermediate
        if width := self._whole("shared_expert_intermediate_size", 0):
            router += self.hidden  # its gate
            shared += width
        return router + 3 * self.hidden * shared

    def _dense_block(self) -> int:
        """Elements of the feed-forward block of a layer without experts."""
        return 3 * self.hidden * self._count("intermediate_size")

    def _itemsize(self, dtype: str | None) -> int:
        name = dtype or self._fields.get("dtype") or self._fields.get("torch_dtype") or "bfloat16"
        if name not in ITEMSIZES:
            raise InputError(f"{self._where}: dtype {name!r} is not known; there is {', '.join(ITEMSIZES)}")
        return ITEMSIZES[name]

    def _count(self, *names: str) -> int:
        """The first of the named fields that is set, a whole number from 1."""
        name = next((n for n in names if self._fields.get(n) is not None), None)
        if name is None:
            raise KeyError(names[0])
        value = self._whole(name, 0)
        if value < 1:
            raise InputError(f"{self._where}: {name} is {value}; give a whole number from 1")
        return value

    def _whole(self, name: str, default: int) -> int:
        value = self._fields.get(name)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            raise InputError(f"{self._where}: {name} is {value!r}; give a whole number")
        return value
