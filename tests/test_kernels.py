"""The CPU kernels against torch, and their row invariance at widths that suit no vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexfloor.fleets.engine import kernels
from flexfloor.fleets.engine.attention import Batch, PagedKV
from flexfloor.fleets.engine.numerics import RowInvariant, block_linear


def random_batch(generator: torch.Generator, lengths: list[int], page: int, spare: int = 3) -> tuple[Batch, int]:
    """The last token of sequences of the given lengths, in shuffled pages. Returns the batch and the page count."""
    needs = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needs) + spare, generator=generator).numpy()
    tables = np.zeros((len(lengths), max(needs)), dtype=np.int64)
    begin = 0
    for row, need in enumerate(needs):
        tables[row, :need] = order[begin : begin + need]
        begin += need
    positions = np.array(lengths, dtype=np.int64) - 1
    rows = np.arange(len(lengths))
    batch = Batch(rows, positions, rows, tables[rows, positions // page], positions % page, tables)
    return batch, sum(needs) + spare


@pytest.mark.parametrize(("kv_heads", "group", "dim", "page"), [(2, 4, 32, 16), (1, 3, 14, 4), (2, 1, 72, 16)])
@pytest.mark.parametrize("window", [0, 20])
def test_attention_equals_torch(kv_heads: int, group: int, dim: int, page: int, window: int) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 16, 17, 100, 64, 3]
    batch, pages = random_batch(generator, lengths, page)
    arena = torch.full((pages, 2, 2, kv_heads, page, dim), float("nan"))  # what is unwritten must not matter
    keys = [torch.randn(n, kv_heads, dim, generator=generator) for n in lengths]
    values = [torch.randn(n, kv_heads, dim, generator=generator) for n in lengths]
    for row, length in enumerate(lengths):
        for position in range(length):
            where = batch.tables[row, position // page]
            arena[where, 1, 0, :, position % page] = keys[row][position]
            arena[where, 1, 1, :, position % page] = values[row][position]
    q = torch.randn(len(lengths), kv_heads * group, dim, generator=generator)
    k, v = (torch.stack([x[-1] for x in xs]) for xs in (keys, values))
    kv = PagedKV(arena)
    kv.batch = batch
    out = kv.forward(1, q, k, v, dim**-0.5, window)
    for row, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        expected = F.scaled_dot_product_attention(
            q[row].view(kv_heads, group, dim), keys[row][first:].transpose(0, 1), values[row][first:].transpose(0, 1)
        )
        torch.testing.assert_close(out[row].view(kv_heads, group, dim), expected, atol=2e-6, rtol=1e-5)
    grouped = q.view(len(q), kv_heads, group, dim)
    torch.testing.assert_close(
        kv._forward_torch(1, grouped, k, v, dim**-0.5, window).view(q.shape), out, atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (72, 56), (56, 72), (15, 7)])
def test_expert_kernel_equals_torch_and_ignores_the_other_rows(hidden: int, inner: int) -> None:
    torch.manual_seed(2)
    experts, top_k, tokens = 7, 3, 45
    x = torch.randn(tokens, hidden)
    slots = torch.randn(experts + 2, 3 * inner * hidden) * 0.2
    choice = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k)
    row_of = np.random.default_rng(0).permutation(experts + 2)[:experts].astype(np.int64)

    def run(rows: slice) -> torch.Tensor:
        own, mine, w = x[rows].contiguous(), choice[rows].contiguous().numpy(), weights[rows].contiguous().numpy()
        pairs = mine.size
        pair_rows, pair_out = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
        counts, slot_rows, ends = (np.empty(experts, np.int64) for _ in range(3))
        n, groups = kernels.group_pairs(mine, row_of, counts, pair_rows, pair_out, slot_rows, ends)
        assert n == pairs
        assert counts.sum() == pairs
        results, out = torch.empty(pairs, hidden), torch.empty(len(own), hidden)
        kernels.expert_ffn(
            own.numpy(), slots.numpy(), inner, pair_rows, pair_out, slot_rows[:groups], ends[:groups], results.numpy()
        )
        kernels.combine_pairs(results.numpy(), mine, w, np.zeros(experts, np.int64), np.zeros(1, np.int64), out.numpy())
        return out

    whole = run(slice(None))
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for k in range(top_k):
            flat = slots[row_of[choice[token, k]]]
            gate_up, down = (
                flat[: 2 * inner * hidden].view(2 * inner, hidden),
                flat[2 * inner * hidden :].view(hidden, inner),
            )
            gate, up = (gate_up @ x[token]).chunk(2)
            expected[token] += weights[token, k] * (down @ (F.silu(gate) * up))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    for rows in (slice(0, 1), slice(44, 45), slice(3, 10), slice(20, 45)):
        assert torch.equal(run(rows), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(72, 56), (64, 130), (33, 5)])
def test_block_linear_equals_torch_and_ignores_the_other_rows(inner: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(1, 37, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    whole = block_linear(x, weight)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-1
    torch.testing.assert_close(whole, F.linear(x, weight), atol=tolerance, rtol=1e-2)
    for rows in (slice(0, 1), slice(5, 9), slice(36, 37)):
        assert torch.equal(block_linear(x[:, rows], weight), whole[:, rows])


@pytest.mark.parametrize("width", [56, 72, 64])
def test_padded_elementwise_functions_ignore_the_other_rows(width: int) -> None:
    torch.manual_seed(4)
    x = torch.randn(33, width)
    with RowInvariant(blocks=False):
        whole = F.silu(x)
        for rows in (slice(0, 1), slice(1, 4), slice(32, 33)):
            assert torch.equal(F.silu(x[rows]), whole[rows])
    torch.testing.assert_close(whole, x * torch.sigmoid(x))


def test_exp_of_the_kernels_is_accurate() -> None:
    x = np.linspace(-87, 0, 20001, dtype=np.float32)
    out = np.array([kernels._exp(v) for v in x])
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
