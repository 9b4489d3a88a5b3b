"""Paged attention behind the library's attention hook: write the new keys and values into pages, then attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flexfloor.fleets.engine import kernels

ATTENTION = "flexfloor"
_PAD = 64  # tokens; context lengths are padded to a multiple, so that one reduction order serves all batches
_GATHER_ELEMENTS = 2**23  # most gathered elements of one step of the torch path


@dataclass(slots=True)
class Batch:
    """The tokens of one iteration on this worker, in one flat row; all arrays are int64.

    input_ids, positions, sequence (row of `tables`), pages and offsets (where keys and values go): [tokens];
    tables: [sequences, pages], page numbers padded with 0.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    sequence: np.ndarray
    pages: np.ndarray
    offsets: np.ndarray
    tables: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


class PagedKV:
    """The KV pages of a worker and the batch that is being computed. pages: [pages, layers, 2, kv_heads, page, dim]."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.batch: Batch | None = None
        self._native = pages.device.type == "cpu" and pages.dtype == torch.float32
        self._array = pages.numpy() if self._native else None

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim] of the tokens in `batch`.

        window: most recent tokens that are seen, 0 for all. Returns [tokens, heads, dim].
        """
        assert self.batch is not None
        kv_heads = k.shape[1]
        grouped = q.reshape(len(q), kv_heads, -1, q.shape[-1]).contiguous()
        if not self._native:
            return self._forward_torch(layer, grouped, k, v, scale, window).reshape(q.shape)
        b = self.batch
        kernels.write_kv(self._array, layer, b.pages, b.offsets, k.contiguous().numpy(), v.contiguous().numpy())
        out = torch.empty_like(grouped)
        kernels.attend(
            grouped.numpy(),
            self._array,
            layer,
            b.tables,
            b.sequence,
            b.positions,
            np.float32(scale),
            window,
            out.numpy(),
        )
        return out.view(q.shape)

    def _forward_torch(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """The same for any device and dtype: each token is a batch row of its own over gathered, padded pages."""
        b = self.batch
        assert b is not None
        device = q.device
        pages, offsets = torch.from_numpy(b.pages).to(device), torch.from_numpy(b.offsets).to(device)
        kv = self.pages[:, layer]
        kv[pages, 0, :, offsets] = k
        kv[pages, 1, :, offsets] = v
        out = torch.empty_like(q)
        page_tokens = kv.shape[3]
        for rows in self._slices(b, page_tokens, q.shape[1] * q.shape[3]):
            longest = int(b.positions[rows].max()) + 1
            longest += -longest % _PAD
            need = -(-longest // page_tokens)
            table = np.zeros((len(rows), need), dtype=np.int64)
            own = b.tables[b.sequence[rows], : min(need, b.tables.shape[1])]
            table[:, : own.shape[1]] = own
            gathered = kv[torch.from_numpy(table).to(device)]  # [rows, pages, 2, kv_heads, page_tokens, dim]
            keys, values = (
                gathered[:, :, i].transpose(1, 2).reshape(len(rows), q.shape[1], need * page_tokens, -1) for i in (0, 1)
            )
            last = torch.from_numpy(b.positions[rows]).to(device)[:, None]
            at = torch.arange(need * page_tokens, device=device)
            seen = at <= last
            if window:
                seen &= at > last - window
            index = torch.from_numpy(rows).to(device)
            # Pages may hold anything beyond the context, not-a-number included, which no mask takes out of a sum.
            keys, values = (x.masked_fill(~seen[:, None, :, None], 0) for x in (keys, values))
            out[index] = F.scaled_dot_product_attention(
                q[index], keys, values, attn_mask=seen[:, None, None, :], scale=scale
            )
        return out

    @staticmethod
    def _slices(b: Batch, page_tokens: int, width: int) -> list[np.ndarray]:
        """Rows in groups whose gathered keys stay bounded; long contexts go together."""
        order = np.argsort(b.positions, kind="stable")
        groups, begin = [], 0
        for end in range(1, len(order) + 1):
            full = (
                end < len(order)
                and (int(b.positions[order[end]]) + 1 + _PAD) * (end + 1 - begin) * width > _GATHER_ELEMENTS
            )
            if end == len(order) or full:
                groups.append(order[begin:end])
                begin = end
        return groups


def flexfloor_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The library's attention interface: query [1, heads, tokens, dim]; key, value [1, kv_heads, tokens, dim].

    Returns [1, tokens, heads, dim] and no weights. `module.flexfloor_kv` is the PagedKV of the worker.
    """
    window = kwargs.get("sliding_window") or 0
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return module.flexfloor_kv.forward(module.layer_idx, q, k, v, kwargs["scaling"], window)[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The library asks for a mask; paged attention knows each token's context from the page tables."""
