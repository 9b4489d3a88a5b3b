"""A stock transformers model on the meta device, with its experts and attention sent through FlexFloor's hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from flexfloor.errors import InputError
from flexfloor.fleets.engine.arena import Arena
from flexfloor.fleets.engine.attention import ATTENTION, Batch, PagedKV, flexfloor_attention, no_mask
from flexfloor.fleets.engine.checkpoint import CheckpointInfo, TensorEntry, open_tensors
from flexfloor.fleets.engine.experts import EXPERTS, ExpertParallel, flexfloor_experts
from flexfloor.fleets.engine.numerics import NumericsPath, install_linear, numerics_mode

_TABLE_BLOCK = 1024  # positions


def register_hooks() -> None:
    """Make `flexfloor` known to transformers as an attention, a mask and an experts implementation."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, flexfloor_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, flexfloor_experts)


class RotaryTable(nn.Module):
    """Cosines and sines of the stock rotary embedding, kept by position: same bits in every batch, and cheaper.

    The stock module computes them in blocks of a fixed size. Positions grow on demand (`reach`).
    """

    def __init__(self, stock: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._stock = stock
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def reach(self, position: int) -> None:
        have = 0 if self._tables is None else len(self._tables[0])
        if position < have:
            return
        blocks = [] if self._tables is None else [self._tables]
        for begin in range(have, position + 1, _TABLE_BLOCK):
            at = torch.arange(begin, begin + _TABLE_BLOCK, device=self._like.device)[None]
            cos, sin = self._stock(self._like, at)
            blocks.append((cos[0], sin[0]))
        self._tables = (torch.cat([b[0] for b in blocks]), torch.cat([b[1] for b in blocks]))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: int64 [1, tokens]. Returns cos, sin [1, tokens, head_dim]."""
        assert self._tables is not None
        return self._tables[0][position_ids], self._tables[1][position_ids]


class ShardedModel:
    """The model of one worker: all dense weights, its own experts in the arena, keys and values in pages."""

    def __init__(self, info: CheckpointInfo, arena: Arena, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        register_hooks()
        self.info, self.arena, self.device = info, arena, device
        config = copy.deepcopy(info.config)
        config._experts_implementation = "eager"
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=info.dtype
            ).eval()
        self.kv = PagedKV(arena.pages)
        self.experts = ExpertParallel(arena, info.intermediate)
        self._path: NumericsPath = "fast"
        self._moe_index = {layer: index for index, layer in enumerate(info.shape.moe_layers)}
        self._expert_parameters = self._install_hooks()
        base = self.model.model
        with torch.device(device):
            stock = type(base.rotary_emb)(config=config)
        self.rotary = base.rotary_emb = RotaryTable(stock, info.dtype, device)
        # Inner widths of elementwise functions in stock modules: dense layers' activations.
        self._widths = {
            m.out_features for n, m in self.model.named_modules() if isinstance(m, nn.Linear) and "gate_proj" in n
        }

    def _install_hooks(self) -> set[str]:
        """Tell attention and experts modules where to go. Returns names of the parameters that stay on meta."""
        names = set()
        for name, module in self.model.named_modules():
            if name.endswith(".self_attn"):
                module.flexfloor_kv = self.kv
            elif name.endswith(".experts"):
                layer = int(name.split(".layers.")[1].split(".")[0])
                if layer not in self._moe_index:
                    raise InputError(f"{self.info.path}: layer {layer} has experts in the model but not in the files")
                # Not through the constructor: some releases check the name there against their own list.
                module.config._experts_implementation = EXPERTS
                module.flexfloor_experts = self.experts
                module.flexfloor_layer = self._moe_index[layer]
                names |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters()}
        return names

    def set_numerics(self, path: NumericsPath) -> None:
        self._path = path
        install_linear(self.model, path)

    @torch.inference_mode()
    def load_dense(self) -> int:
        """Load everything but the experts. Returns bytes. Raises InputError for a missing, unknown or misshapen one."""
        info, state, loaded = self.info, {}, 0
        wanted = {n: p for n, p in self.model.state_dict().items() if n not in self._expert_parameters}
        tied = bool(getattr(info.config, "tie_word_embeddings", False))
        if tied:
            wanted.pop("lm_head.weight", None)
        names = {
            n for n in info.dense if not n.endswith("rotary_emb.inv_freq") and not (tied and n == "lm_head.weight")
        }
        if missing := sorted(set(wanted) - names):
            raise InputError(f"{info.path}: tensor {missing[0]} is missing; the checkpoint is incomplete")
        if unknown := sorted(names - set(wanted)):
            raise InputError(f"{info.path}: tensor {unknown[0]} does not belong to a {info.config.model_type} model")
        for entry, tensor in _read(info.dense[n] for n in sorted(names)):
            name = entry.name.replace(".block_sparse_moe.", ".mlp.")
            if entry.shape != tuple(wanted[name].shape):
                raise InputError(
                    f"{entry.file}: {entry.name} has shape {list(entry.shape)}, "
                    f"config.json wants {list(wanted[name].shape)}"
                )
            # A copy of our own: the reader's tensors are views of the mapped file. Loaded once, weights keep their
            # memory, which linear layers hold views of.
            own = wanted[name]
            if own.is_meta:
                own = state[name] = torch.empty(entry.shape, dtype=info.dtype, device=self.device)
            own.copy_(tensor)
            loaded += own.nbytes
        if state:
            self.model.load_state_dict(state, strict=False, assign=True)
            if tied:
                self.model.lm_head.weight = self.model.get_input_embeddings().weight
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.rotary.reach(0)
        return loaded

    @torch.inference_mode()
    def load_experts(self, wanted: Iterable[tuple[int, int, int]]) -> int:
        """Load experts into slots. wanted: (index among the layers with experts, expert, slot). Returns bytes."""
        info, size = self.info, self.info.intermediate * self.info.hidden
        places = {"gate": (0, size), "up": (size, 2 * size), "gate_up": (0, 2 * size), "down": (2 * size, 3 * size)}
        jobs: dict[TensorEntry, list[tuple[int, int, str]]] = {}
        for index, expert, slot in wanted:
            layer = info.shape.moe_layers[index]
            for part in places:
                for source in (expert, -1):
                    if entry := info.experts.get((layer, source, part)):  # type: ignore[arg-type]
                        jobs.setdefault(entry, []).append((expert if source < 0 else -1, slot, part))
        loaded = 0
        for entry, tensor in _read(iter(jobs), slices=True):
            for row, slot, part in jobs[entry]:
                begin, end = places[part]
                target = self.arena.slots[self.arena.slot_row(slot)][begin:end]
                target.copy_((tensor[:] if row < 0 else tensor[row]).reshape(-1))
                loaded += target.nbytes
        return loaded

    @torch.inference_mode()
    def forward(self, batch: Batch, draws: np.ndarray, depth: int | None = None) -> torch.Tensor:
        """One pass over the batch. Returns the last hidden states [draws, hidden] of the tokens that `draws` indexes.

        draws: int64; depth: layers to run, all by default. Collective, also with an empty batch.
        """
        base = self.model.model
        self.rotary.reach(int(batch.positions.max(initial=0)))
        self.kv.batch = batch
        ids, positions = (torch.from_numpy(a).to(self.device)[None] for a in (batch.input_ids, batch.positions))
        with numerics_mode(self._path, self._widths), _depth(base.config, depth):
            if len(batch):
                hidden = base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
                return hidden[torch.from_numpy(draws).to(self.device)]
            self._serve_others(base.config.num_hidden_layers)
            return torch.empty(0, self.info.hidden, dtype=self.info.dtype, device=self.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden] → [n, vocab]."""
        with numerics_mode(self._path, self._widths):
            return self.model.lm_head(hidden)

    def _serve_others(self, layers: int) -> None:
        """Take part in the exchanges of an iteration without tokens of our own."""
        empty = torch.empty(0, self.info.hidden, dtype=self.info.dtype, device=self.device)
        choice = torch.empty(0, self.info.shape.top_k, dtype=torch.int64, device=self.device)
        for layer, index in self._moe_index.items():
            if layer < layers:
                self.experts.forward(index, empty, choice, choice.to(self.info.dtype))


@contextmanager
def _depth(config: Any, layers: int | None) -> Iterator[None]:
    """Let stock model code run only its first layers: it slices them by this field of its config."""
    if layers is None:
        yield
        return
    whole, config.num_hidden_layers = config.num_hidden_layers, layers
    try:
        yield
    finally:
        config.num_hidden_layers = whole


def _read(entries: Iterator[TensorEntry], slices: bool = False) -> Iterator[tuple[TensorEntry, Any]]:
    """Tensors (or safetensors slices) of entries, file by file."""
    by_file: dict[Any, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, own in by_file.items():
        with open_tensors(file) as tensors:
            for entry in own:
                yield entry, tensors.get_slice(entry.name) if slices else tensors.get_tensor(entry.name)
