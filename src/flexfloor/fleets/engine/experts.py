"""Expert parallelism: dispatch tokens to the owners of their experts, compute there, combine at the token's owner.

The number of rows that every worker brings is exchanged once an iteration. Each layer then needs two exchanges whose
sizes all members can derive: out go the rows with their expert choice, back come the results of the (token, expert)
pairs in (token, k) order, which the token's owner adds in top-k order.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flexfloor.fleets.engine import kernels
from flexfloor.fleets.engine.arena import Arena
from flexfloor.fleets.engine.comm import EpochGroup
from flexfloor.world.experts import ExpertPlacement

EXPERTS = "flexfloor"


class ExpertParallel:
    """The experts of all layers, seen from one worker. Everything goes through the placement table.

    load: int64 [moe_layers, experts], pairs computed on this worker since it was last set to zero.
    """

    load: np.ndarray

    def __init__(self, arena: Arena, intermediate: int) -> None:
        self._arena = arena
        self._intermediate = intermediate
        self._native = arena.slots.device.type == "cpu" and arena.slots.dtype == torch.float32
        self._slots = arena.slots.numpy() if self._native else None
        self.rows: list[int] = []  # rows of each member in this iteration
        self.touched = 0  # (layer, expert) pairs computed in this iteration
        self.exchange_s = 0.0  # spent in exchanges with other workers in this iteration

    def set_epoch(self, placement: ExpertPlacement, group: EpochGroup | None, worker: int) -> None:
        """Enter a membership epoch. group None: this worker is alone."""
        self._group = group
        members = group.members if group else (worker,)
        placement.check(members)
        rank_of = {member: rank for rank, member in enumerate(members)}
        self._owner = np.vectorize(rank_of.__getitem__, otypes=[np.int64])(placement.worker)
        rows = np.vectorize(self._row_or_none, otypes=[np.int64])(placement.worker == worker, placement.slot)
        self._row = rows
        self._rank = group.rank if group else 0

    def _row_or_none(self, mine: bool, slot: int) -> int:
        return self._arena.slot_row(int(slot)) if mine else -1

    def begin_iteration(self, rows: list[int], exchange_s: float = 0.0) -> None:
        """rows: of each member; exchange_s: seconds that it took to learn them."""
        self.rows, self.touched, self.exchange_s = rows, 0, exchange_s

    def forward(self, layer: int, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]; experts: int64 [tokens, top_k]; weights: [tokens, top_k]. Returns [tokens, hidden].

        layer: index among the layers that have experts. Collective.
        """
        if self._group is None:
            results, splits = self._compute(layer, x, experts), [experts.numel()]
        else:
            results, splits = self._exchange(layer, x, experts)
        return self._combine(layer, results, splits, experts, weights)

    def _exchange(self, layer: int, x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Results of this worker's pairs, one block an owner, and the blocks' sizes."""
        assert self._group is not None
        hidden, top_k = x.shape[1], experts.shape[1]
        # Expert numbers travel in the row, as integers in the bits of its dtype.
        words = experts.to(torch.int32 if x.dtype == torch.float32 else torch.int16).view(x.dtype)
        rows = torch.cat((x, words), dim=1)
        received = x.new_empty(sum(self.rows), hidden + top_k)
        begin = time.perf_counter()
        self._group.all_gather(received, rows, self.rows)
        self.exchange_s += time.perf_counter() - begin
        chosen = received[:, hidden:].contiguous().view(words_dtype(x.dtype)).to(torch.int64)
        results = self._compute(layer, received[:, :hidden].contiguous(), chosen)
        local = self._row[layer][chosen.cpu().numpy()] >= 0
        bounds = np.cumsum([0, *self.rows])
        back = [int(local[begin:end].sum()) for begin, end in pairwise(bounds)]
        owners = np.bincount(self._owner[layer][experts.cpu().numpy()].ravel(), minlength=self._group.size).tolist()
        out = x.new_empty(sum(owners), hidden)
        begin = time.perf_counter()
        self._group.all_to_all(out, results, owners, back)
        self.exchange_s += time.perf_counter() - begin
        return out, owners

    def _compute(self, layer: int, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Results of the local pairs, in (token, k) order: [pairs, hidden]."""
        choice = experts.cpu().numpy()
        rows_of = self._row[layer]
        counts = np.empty(len(rows_of), np.int64)
        pair_rows, pair_out = np.empty(choice.size, np.int64), np.empty(choice.size, np.int64)
        group_slots, group_ends = np.empty_like(counts), np.empty_like(counts)
        pairs, groups = kernels.group_pairs(choice, rows_of, counts, pair_rows, pair_out, group_slots, group_ends)
        self.load[layer] += counts
        self.touched += groups
        out = x.new_empty(pairs, x.shape[1])
        pair_rows, pair_out = pair_rows[:pairs], pair_out[:pairs]
        if self._native:
            kernels.expert_ffn(
                x.contiguous().numpy(), self._slots, self._intermediate, pair_rows, pair_out,
                group_slots[:groups], group_ends[:groups], out.numpy(),
            )  # fmt: skip
            return out
        begin = 0
        rows, places = torch.from_numpy(pair_rows).to(x.device), torch.from_numpy(pair_out).to(x.device)
        for slot, end in zip(group_slots[:groups].tolist(), group_ends[:groups].tolist(), strict=True):
            out[places[begin:end]] = self._expert(slot, x[rows[begin:end]])
            begin = end
        return out

    def _expert(self, slot_row: int, x: torch.Tensor) -> torch.Tensor:
        hidden, inner = x.shape[1], self._intermediate
        weights = self._arena.slots[slot_row]
        gate_up = F.linear(x, weights[: 2 * inner * hidden].view(2 * inner, hidden))
        active = F.silu(gate_up[:, :inner].contiguous()) * gate_up[:, inner:]
        return F.linear(active, weights[2 * inner * hidden :].view(hidden, inner))

    def _combine(
        self, layer: int, results: torch.Tensor, splits: list[int], experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        begins = np.cumsum([0, *splits[:-1]])
        choice = experts.cpu().numpy()
        if self._native:
            out = results.new_empty(len(choice), results.shape[1])
            kernels.combine_pairs(
                results.numpy(), choice, weights.contiguous().numpy(), self._owner[layer], begins, out.numpy()
            )
            return out
        owners = self._owner[layer][choice].ravel()
        order = np.argsort(owners, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        picked = results[torch.from_numpy(place.reshape(choice.shape)).to(results.device)]
        out = picked[:, 0] * weights[:, :1]
        for k in range(1, choice.shape[1]):
            out = out + picked[:, k] * weights[:, k : k + 1]
        return out.to(results.dtype)


def words_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int16


def flexfloor_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The library's experts interface. `module.flexfloor_experts` is the worker's ExpertParallel."""
    return module.flexfloor_experts.forward(module.flexfloor_layer, hidden_states, top_k_index, top_k_weights)
