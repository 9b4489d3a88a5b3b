"""Hugging Face checkpoints of mixture-of-experts models: what is in them, and reading tensors one by one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from flexfloor.errors import InputError, UnsupportedError
from flexfloor.fleet import ModelShape

SUPPORTED_MODELS = ("mixtral", "olmoe", "qwen3_moe")
Part = Literal["gate", "up", "down", "gate_up"]

_PARTS: dict[str, Part] = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_ONE_EXPERT = re.compile(r".*\blayers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
_ALL_EXPERTS = re.compile(r".*\blayers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies. shape as stored; dtype in torch's words."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that this engine can run.

    dense: parameter name in the model → entry. experts: (layer, expert, part) → entry; expert -1 stands for a tensor
    that holds all experts of the layer along its first axis.
    """

    path: Path
    config: Any
    dtype: torch.dtype  # that the fleet computes in
    shape: ModelShape
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    dense: dict[str, TensorEntry]
    experts: dict[tuple[int, int, Part], TensorEntry]

    def check_readable(self, machine: str) -> None:
        """Asked by a worker, which may be on another machine than who inspected the files. Raises InputError."""
        for file in {entry.file for entry in [*self.dense.values(), *self.experts.values()]}:
            if not os.access(file, os.R_OK):
                raise InputError(
                    f"machine {machine} cannot read {file}; a checkpoint must lie at the same path on every machine "
                    "with a worker"
                )

    def moved_to(self, folder: Path) -> CheckpointInfo:
        """The same, read from a copy."""

        def move(entry: TensorEntry) -> TensorEntry:
            return replace(entry, file=folder / entry.file.relative_to(self.path))

        dense = {name: move(entry) for name, entry in self.dense.items()}
        return replace(self, path=folder, dense=dense, experts={key: move(e) for key, e in self.experts.items()})


def inspect_checkpoint(path: Path | str, dtype: str = "auto") -> CheckpointInfo:
    """Read config and tensor headers (no weights) and check that the model can run.

    Raises InputError for a folder that is not a complete checkpoint, UnsupportedError for a model that is one.
    """
    path = Path(path)
    config = _read_config(path)
    entries = _read_headers(path)
    dense, experts = _sort_entries(entries)
    compute_dtype = _choose_dtype(dtype, config, entries)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    count = _first(config, "num_experts", "num_local_experts")
    intermediate = _first(config, "moe_intermediate_size", "intermediate_size")
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    moe_layers = tuple(sorted({layer for layer, _, _ in experts}))
    if not moe_layers:
        raise UnsupportedError(
            f"{path}: the checkpoint has no expert weights; FlexFloor runs mixture-of-experts models"
        )
    _check_experts(path, experts, count, hidden, intermediate)
    if moe_layers[-1] >= layers:
        raise InputError(f"{path}: weights for layer {moe_layers[-1]}, but config.json says {layers} layers")
    itemsize = compute_dtype.itemsize
    tied = bool(getattr(config, "tie_word_embeddings", False))
    shape = ModelShape(
        model_type=config.model_type,
        layers=layers,
        moe_layers=moe_layers,
        experts=count,
        top_k=config.num_experts_per_tok,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        dense_bytes=sum(_elements(e.shape) for e in dense.values()) * itemsize,
        expert_bytes=3 * hidden * intermediate * itemsize,
        kv_token_bytes=layers * 2 * kv_heads * head_dim * itemsize,
        hidden=hidden,
        itemsize=itemsize,
        lookup_bytes=0 if tied else config.vocab_size * hidden * itemsize,
    )
    return CheckpointInfo(path, config, compute_dtype, shape, hidden, intermediate, kv_heads, head_dim, dense, experts)


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give a Hugging Face checkpoint as `model`")
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: config.json is missing; give a folder with a Hugging Face checkpoint") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error})") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if raw and isinstance(raw, dict):
        if raw.get("quantization_config"):
            raise UnsupportedError(f"{path}: quantised checkpoints are not supported; give the bf16 or fp32 weights")
        if raw.get("kv_lora_rank"):
            raise UnsupportedError(f"{path}: multi-head latent attention ({kind}) is not supported")
    if (path / "adapter_config.json").exists():
        raise UnsupportedError(f"{path}: LoRA adapters are not supported; merge the adapter into the base model first")
    if kind not in SUPPORTED_MODELS:
        raise UnsupportedError(
            f"{file}: model_type {kind!r} is not supported; FlexFloor runs {', '.join(SUPPORTED_MODELS)}"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        rope = getattr(config, "rope_parameters", None) or {}
    except Exception as error:  # transformers validates configs with many exception types
        raise InputError(f"{file}: {' '.join(str(error).split())[:300]}") from None
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"{file}: rope_type {rope['rope_type']!r} depends on the length of the batch; not supported"
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{file}: hidden_act {config.hidden_act!r} is not supported; experts must use silu")
    if not 0 < config.num_experts_per_tok <= (_first(config, "num_experts", "num_local_experts") or 0):
        raise InputError(f"{file}: num_experts_per_tok {config.num_experts_per_tok} does not fit the number of experts")
    return config


def _read_headers(path: Path) -> dict[str, TensorEntry]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            expected = set(weight_map)
            files = sorted({path / str(name) for name in weight_map.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index}: has no usable weight_map; the checkpoint is damaged") from None
    else:
        expected, files = set(), sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"{path}: no *.safetensors files; convert the checkpoint to safetensors")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name in entries:
                    raise InputError(f"{file}: tensor {name} stands in {entries[name].file.name} too")
                part = tensors.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise UnsupportedError(
                        f"{file}: tensor {name} has dtype {part.get_dtype()}, which is not supported"
                    )
                entries[name] = TensorEntry(file, name, tuple(part.get_shape()), dtype)
    missing = expected - set(entries)
    if missing:
        raise InputError(f"{path}: tensor {min(missing)} is in the index but in no file; the checkpoint is incomplete")
    return entries


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """safetensors' reader of a file. Raises InputError for a file that is missing or damaged."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise InputError(f"{file}: missing; the checkpoint is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: cannot be read ({error}); the file is damaged or incomplete") from None


def _sort_entries(
    entries: dict[str, TensorEntry],
) -> tuple[dict[str, TensorEntry], dict[tuple[int, int, Part], TensorEntry]]:
    dense: dict[str, TensorEntry] = {}
    experts: dict[tuple[int, int, Part], TensorEntry] = {}
    for name, entry in entries.items():
        if found := _ONE_EXPERT.fullmatch(name):
            experts[int(found[1]), int(found[2]), _PARTS[found[3]]] = entry
        elif found := _ALL_EXPERTS.fullmatch(name):
            experts[int(found[1]), -1, _PARTS[found[2]]] = entry
        else:
            # Mixtral files use the name of its first release for the block that the library calls mlp.
            dense[name.replace(".block_sparse_moe.", ".mlp.")] = entry
    return dense, experts


def _check_experts(
    path: Path, experts: dict[tuple[int, int, Part], TensorEntry], count: int, hidden: int, intermediate: int
) -> None:
    wanted = {
        "gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate),
        "gate_up": (2 * intermediate, hidden),
    }  # fmt: skip
    for (_layer, expert, part), entry in experts.items():
        shape = wanted[part] if expert >= 0 else (count, *wanted[part])
        if entry.shape != shape:
            raise InputError(
                f"{entry.file}: {entry.name} has shape {list(entry.shape)}, config.json wants {list(shape)}"
            )
        if expert >= count:
            raise InputError(f"{entry.file}: {entry.name} is expert {expert}, config.json says {count} experts")
    for layer in {layer for layer, _, _ in experts}:
        if (layer, -1, "gate_up") in experts and (layer, -1, "down") in experts:
            continue
        for expert in range(count):
            for part in ("gate", "up", "down"):
                if (layer, expert, part) not in experts:
                    raise InputError(
                        f"{path}: {part}_proj of layer {layer}, expert {expert} is missing; incomplete checkpoint"
                    )


def _choose_dtype(dtype: str, config: Any, entries: dict[str, TensorEntry]) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    stated = getattr(config, "dtype", None)
    if isinstance(stated, str):
        stated = getattr(torch, stated, None)
    chosen = stated if isinstance(stated, torch.dtype) else next(iter(entries.values())).dtype
    return torch.float32 if chosen == torch.float64 else chosen


def _first(config: Any, *names: str) -> Any:
    """The first of the named config fields that is set: families name the same thing differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
