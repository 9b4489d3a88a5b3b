"""Making dense layers row-invariant: a row's result may not depend on the rows computed next to it.

`bitwise` has two paths, tried in order and proved by the self-check on the machine and model at hand:

* `cbwr`: Intel MKL in its conditional-reproducibility mode, which the launcher switches on by an environment
  variable, for the products that stock code computes by itself.
* `blocks`: those products too are computed in our own fixed-order tiles (float32) or in blocks of a fixed number of
  rows.

Linear layers in float32 on a single-threaded worker run in our own tiles on every path (`RowLinear`): for the few rows
of a decode iteration they are up to twice as fast as MKL.

Both pad the width of elementwise functions whose vector code and remainder code round differently. Attention and
experts have kernels of their own, see `kernels`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from flexfloor.fleets.engine import kernels

Numerics = Literal["bitwise", "fast"]
NumericsPath = Literal["fast", "cbwr", "blocks"]
BITWISE_PATHS: tuple[NumericsPath, ...] = ("cbwr", "blocks")

_BLOCK = 16  # rows of one product on the block path
_FEW_ROWS = 96  # up to here our tiles beat MKL on layers of all sizes
_VECTOR = 32  # elements; widest vector loop of the elementwise kernels

_ELEMENTWISE = {F.silu, torch.sigmoid, torch.Tensor.sigmoid, F.gelu, torch.tanh, torch.exp}


def cbwr_setting(dtype: torch.dtype) -> str | None:
    """Value of MKL_CBWR that makes products row-invariant here; None where MKL has no such mode.

    The mode covers float32: other dtypes are not computed by MKL.
    """
    if dtype != torch.float32 or not torch.backends.mkl.is_available():
        return None
    return {"AVX512": "AVX512,STRICT", "AVX2": "AVX2,STRICT"}.get(torch.backends.cpu.get_cpu_capability())


def paths_to_try(wanted: Numerics, cbwr: bool) -> tuple[NumericsPath, ...]:
    """By which `wanted` may hold, the best first. cbwr: whether workers run MKL in its reproducible mode.

    The environment variable FLEXFLOOR_NUMERICS_PATH leaves one path of `bitwise`.
    """
    if wanted == "fast":
        return ("fast",)
    forced = os.environ.get("FLEXFLOOR_NUMERICS_PATH")
    return tuple(p for p in BITWISE_PATHS if (cbwr or p != "cbwr") and forced in (None, "", p))


def numerics_mode(path: NumericsPath, widths: set[int]) -> AbstractContextManager[Any]:
    """Context for a forward pass. widths: inner widths of the model's layers, in elements."""
    if path == "fast" or (path == "cbwr" and all(w % _VECTOR == 0 for w in widths)):
        return nullcontext()
    return RowInvariant(blocks=path == "blocks")


class RowInvariant(TorchFunctionMode):
    """Replaces the functions of stock modules whose result depends on a row's neighbours."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self._blocks = blocks

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._blocks and func is F.linear:
            return block_linear(*args, **kwargs)
        if func in _ELEMENTWISE and args[0].shape[-1] % _VECTOR:
            x = args[0]
            padded = F.pad(x, (0, -x.shape[-1] % _VECTOR))
            return func(padded, *args[1:], **kwargs)[..., : x.shape[-1]]
        return func(*args, **kwargs)


def install_linear(model: nn.Module, path: NumericsPath) -> None:
    """Send the model's linear layers through `RowLinear` where that fits. Safe to call again with another path."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            layer.__dict__.pop("forward", None)
            if torch.get_num_threads() == 1:
                layer.forward = RowLinear(layer, _FEW_ROWS if path == "fast" else None)  # type: ignore[method-assign, assignment]


class RowLinear:
    """The forward pass of an nn.Linear in float32 on the CPU, in our own tiles.

    most_rows: products of more rows are left to the library, which is faster there but not row-invariant; None: never.
    """

    def __init__(self, layer: nn.Linear, most_rows: int | None = None) -> None:
        self._layer, self._most_rows = layer, most_rows
        self._weight = layer.weight.detach().numpy()  # the same memory: replaced weights are seen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._most_rows is not None and len(rows) > self._most_rows:
            return F.linear(x, self._layer.weight, self._layer.bias)
        out = rows.new_empty(len(rows), len(self._weight))
        kernels.linear_rows(rows.contiguous().numpy(), self._weight, out.numpy())
        if self._layer.bias is not None:
            out += self._layer.bias
        return out.view(*x.shape[:-1], -1)


def block_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear whose rows are computed alike in any batch. x: [..., inner]; weight: [columns, inner]."""
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu" and x.dtype == torch.float32:
        out = torch.empty(rows.shape[0], weight.shape[0])
        kernels.linear_rows(rows.contiguous().numpy(), weight.detach().contiguous().numpy(), out.numpy())
    else:
        padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % _BLOCK)).view(-1, _BLOCK, rows.shape[1])
        shared = weight.t().expand(padded.shape[0], -1, -1)
        out = torch.bmm(padded, shared).view(-1, weight.shape[0])[: rows.shape[0]]
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])
