"""CPU kernels in float32, row-invariant by construction: a row's arithmetic is one fixed sequence of operations,
whatever the batch, the place in it, the page numbers or the slot numbers.

One attention kernel serves prefill, chunked prefill, decode and recompute; it reads pages in place.
One expert kernel serves every slot; it reads weights in place through slot numbers.
"""

from __future__ import annotations

import numpy as np

from flexfloor.fleets.engine.jit import exact_kernel, kernel, prefetch

_ZERO = np.float32(0)
_BLOCK = 128  # rows of one pass over a weight matrix: they and their intermediates stay in the cache of a core


@kernel
def write_kv(kv, layer, pages, offsets, k, v):
    """Store new keys and values.

    kv: [pages, layers, 2, kv_heads, page_tokens, head_dim]; pages, offsets: int64 [tokens];
    k, v: [tokens, kv_heads, head_dim].
    """
    for t in range(k.shape[0]):
        page, offset = pages[t], offsets[t]
        for h in range(k.shape[1]):
            for d in range(k.shape[2]):
                kv[page, layer, 0, h, offset, d] = k[t, h, d]
                kv[page, layer, 1, h, offset, d] = v[t, h, d]


@kernel
def attend(q, kv, layer, tables, sequence, positions, scale, window, out):
    """Attention of each token over its own context, pages read in place. Softmax in float32.

    q, out: [tokens, kv_heads, heads per kv head, head_dim]; kv: as in `write_kv`, page_tokens a multiple of 4;
    tables: int64 [sequences, pages]; sequence, positions: int64 [tokens]; window: most recent tokens seen, 0 for all.
    """
    tokens, kv_heads, group, dim = q.shape
    size = kv.shape[4]
    scores = np.empty((group, tables.shape[1] * size), np.float32)
    total = np.empty((group, dim), np.float32)
    for t in range(tokens):
        table = tables[sequence[t]]
        end = positions[t] + 1
        begin = 0 if window == 0 or end <= window else end - window
        first, last = begin // size, (end + size - 1) // size
        for h in range(kv_heads):
            for page in range(first, last):
                # Whole pages, whatever lies beyond the context: only scores in [begin, end) are looked at.
                keys = kv[table[page], layer, 0, h]
                for j in range(0, size, 4):
                    k0, k1, k2, k3 = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
                    for g in range(group):
                        x = q[t, h, g]
                        a0 = a1 = a2 = a3 = _ZERO
                        for d in range(dim):
                            a0 += x[d] * k0[d]
                            a1 += x[d] * k1[d]
                            a2 += x[d] * k2[d]
                            a3 += x[d] * k3[d]
                        at = page * size + j
                        scores[g, at], scores[g, at + 1] = a0 * scale, a1 * scale
                        scores[g, at + 2], scores[g, at + 3] = a2 * scale, a3 * scale
            for g in range(group):
                row = scores[g]
                peak = row[begin]
                for j in range(begin, end):
                    peak = max(peak, row[j])
                norm = _ZERO
                for j in range(begin, end):
                    e = _exp(row[j] - peak)
                    row[j] = e
                    norm += e
                inverse = np.float32(1.0) / norm
                for j in range(begin, end):
                    row[j] *= inverse
                for d in range(dim):
                    total[g, d] = _ZERO
            for page in range(first, last):
                values = kv[table[page], layer, 1, h]
                low, high = max(begin - page * size, 0), min(size, end - page * size)
                if low == 0 and high == size:
                    for j in range(0, size, 4):
                        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
                        at = page * size + j
                        for g in range(group):
                            w0, w1, w2, w3 = scores[g, at], scores[g, at + 1], scores[g, at + 2], scores[g, at + 3]
                            for d in range(dim):
                                total[g, d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                else:
                    for j in range(low, high):
                        for g in range(group):
                            weight = scores[g, page * size + j]
                            for d in range(dim):
                                total[g, d] += weight * values[j, d]
            for g in range(group):
                for d in range(dim):
                    out[t, h, g, d] = total[g, d]


@kernel
def _exp(x):
    """e**x for x <= 0, polynomial of Cephes' expf (relative error below 2e-7); unlike libm's it vectorises."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * (np.int32((np.int32(n) + np.int32(127)) << 23)).view(np.float32)  # 2**n by its exponent bits


@kernel
def matmul_rows(x, rows, weight, columns, out, out_rows):
    """out[out_rows[i]] = weight @ x[rows[i]], tile by tile.

    x: [*, inner]; rows, out_rows: int64 [n]; weight: [columns * inner], row-major; out: [*, columns].
    Every element is one dot product along `inner`, summed in the same order in each place of a tile; tiles at the
    border repeat their last row or column instead of taking another path.
    """
    inner = x.shape[1]
    n = len(rows)
    # A few rows are done as fast as their weights arrive; many leave time to fetch the next columns meanwhile.
    ahead = 4 * inner // (n // 4) + 1 if n >= 16 else 0
    for c in range(0, columns, 4):
        c1, c2, c3 = min(c + 1, columns - 1), min(c + 2, columns - 1), min(c + 3, columns - 1)
        w0 = weight[c * inner : (c + 1) * inner]
        w1 = weight[c1 * inner : (c1 + 1) * inner]
        w2 = weight[c2 * inner : (c2 + 1) * inner]
        w3 = weight[c3 * inner : (c3 + 1) * inner]
        for i in range(0, n, 4):
            if ahead:
                begin = (c + 4) * inner + i // 4 * ahead
                for at in range(begin, min(begin + ahead, len(weight)), 16):
                    prefetch(weight, at)
            i1, i2, i3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
            x0, x1, x2, x3 = x[rows[i]], x[rows[i1]], x[rows[i2]], x[rows[i3]]
            a00 = a01 = a02 = a03 = _ZERO
            a10 = a11 = a12 = a13 = _ZERO
            a20 = a21 = a22 = a23 = _ZERO
            a30 = a31 = a32 = a33 = _ZERO
            for k in range(inner):
                a00 += x0[k] * w0[k]
                a01 += x0[k] * w1[k]
                a02 += x0[k] * w2[k]
                a03 += x0[k] * w3[k]
                a10 += x1[k] * w0[k]
                a11 += x1[k] * w1[k]
                a12 += x1[k] * w2[k]
                a13 += x1[k] * w3[k]
                a20 += x2[k] * w0[k]
                a21 += x2[k] * w1[k]
                a22 += x2[k] * w2[k]
                a23 += x2[k] * w3[k]
                a30 += x3[k] * w0[k]
                a31 += x3[k] * w1[k]
                a32 += x3[k] * w2[k]
                a33 += x3[k] * w3[k]
            # Repeated rows and columns write the same value again.
            o0, o1, o2, o3 = out_rows[i], out_rows[i1], out_rows[i2], out_rows[i3]
            out[o3, c3], out[o3, c2], out[o3, c1], out[o3, c] = a33, a32, a31, a30
            out[o2, c3], out[o2, c2], out[o2, c1], out[o2, c] = a23, a22, a21, a20
            out[o1, c3], out[o1, c2], out[o1, c1], out[o1, c] = a13, a12, a11, a10
            out[o0, c3], out[o0, c2], out[o0, c1], out[o0, c] = a03, a02, a01, a00


@kernel
def _aligned(rows, columns):
    """An array that begins at a cache line: loads that straddle two lines cost products a quarter of their speed."""
    flat = np.empty(rows * columns + 16, np.float32)
    begin = (-(flat.ctypes.data // 4)) % 16
    return flat[begin : begin + rows * columns].reshape(rows, columns)


@kernel
def expert_ffn(x, slots, intermediate, pair_rows, pair_out, group_slots, group_ends, out):
    """SwiGLU feed-forward of (token, expert) pairs grouped by slot: down @ (silu(gate @ x) * (up @ x)).

    x: [tokens, hidden]; slots: [slots, 3 * intermediate * hidden], one expert as gate, up [intermediate, hidden],
    then down [hidden, intermediate]; pair_rows, pair_out: int64 [pairs], row of x and row of out of each pair;
    group_slots, group_ends: int64 [groups], slot and end of each run of pairs; out: [*, hidden].
    """
    hidden = x.shape[1]
    most = min(len(pair_rows), _BLOCK)
    gate_up, active = _aligned(most, 2 * intermediate), _aligned(most, intermediate)
    here = np.arange(most)
    end = 0
    for g in range(len(group_slots)):
        weights = slots[group_slots[g]]
        begin, end = end, group_ends[g]
        for first in range(begin, end, _BLOCK):
            last = min(first + _BLOCK, end)
            n = last - first
            rows = pair_rows[first:last]
            matmul_rows(x, rows, weights[: 2 * intermediate * hidden], 2 * intermediate, gate_up, here[:n])
            for i in range(n):
                for j in range(intermediate):
                    gate = gate_up[i, j]
                    # sigmoid through e**-|gate|, which cannot overflow
                    e = _exp(-abs(gate))
                    sigmoid = (np.float32(1.0) if gate >= _ZERO else e) / (np.float32(1.0) + e)
                    active[i, j] = gate * sigmoid * gate_up[i, intermediate + j]
            matmul_rows(active, here[:n], weights[2 * intermediate * hidden :], hidden, out, pair_out[first:last])


@exact_kernel
def group_pairs(experts, slot_of, counts, pair_rows, pair_out, group_slots, group_ends):
    """List this worker's (token, expert) pairs, grouped by expert.

    experts: int64 [tokens, top_k]; slot_of: int64 [experts], -1 for experts that live elsewhere;
    counts: int64 [experts], scratch, left with the pairs of each local expert;
    pair_out numbers the local pairs in (token, k) order. Returns (pairs, groups).
    """
    tokens, top_k = experts.shape
    counts[:] = 0
    for t in range(tokens):
        for j in range(top_k):
            if slot_of[experts[t, j]] >= 0:
                counts[experts[t, j]] += 1
    begins = np.empty(len(counts), np.int64)
    total = groups = 0
    for expert in range(len(counts)):
        begins[expert] = total
        if counts[expert] > 0:
            total += counts[expert]
            group_slots[groups] = slot_of[expert]
            group_ends[groups] = total
            groups += 1
    local = 0
    for t in range(tokens):
        for j in range(top_k):
            expert = experts[t, j]
            if slot_of[expert] >= 0:
                pair_rows[begins[expert]] = t
                pair_out[begins[expert]] = local
                begins[expert] += 1
                local += 1
    return total, groups


@exact_kernel
def combine_pairs(results, experts, weights, owner_of, owner_begins, out):
    """out[t] = sum over k of weights[t, k] * result of (t, k), added in top-k order.

    results: [pairs, hidden], one block an owner, inside a block in (token, k) order; experts: int64 [tokens, top_k];
    weights: [tokens, top_k]; owner_of: int64 [experts]; owner_begins: int64 [owners], block starts (overwritten).
    """
    tokens, top_k = experts.shape
    for t in range(tokens):
        for j in range(top_k):
            owner = owner_of[experts[t, j]]
            row = results[owner_begins[owner]]
            owner_begins[owner] += 1
            w = weights[t, j]
            if j == 0:
                for d in range(out.shape[1]):
                    out[t, d] = w * row[d]
            else:
                for d in range(out.shape[1]):
                    out[t, d] += w * row[d]


@kernel
def linear_rows(x, weight, out):
    """out = x @ weight.T with the row-invariant tiles.

    x: [rows, inner]; weight: [columns, inner]; out: [rows, columns].
    """
    here = np.arange(x.shape[0])
    for first in range(0, len(here), _BLOCK):
        rows = here[first : first + _BLOCK]
        matmul_rows(x, rows, weight.reshape(weight.size), weight.shape[0], out, rows)


def warm_up() -> None:
    """Compile every kernel (or load it from the cache on disk) for the types that the engine calls it with."""
    x, one, hidden = np.ones((1, 2), np.float32), np.zeros(1, np.int64), np.ones((1, 1, 1, 4), np.float32)
    kv = np.ones((1, 1, 2, 1, 4, 4), np.float32)
    write_kv(kv, 0, one, one, hidden[0], hidden[0])
    attend(hidden, kv, 0, np.zeros((1, 1), np.int64), one, one, np.float32(1), 0, hidden.copy())
    choice, counts = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    pairs, groups = group_pairs(choice, one, counts, one.copy(), one.copy(), one.copy(), one.copy())
    expert_ffn(x, np.ones((1, 6), np.float32), 1, one, one, one, np.ones(1, np.int64), x.copy())
    combine_pairs(x, choice, np.ones((1, 1), np.float32), one, one.copy(), x.copy())
    linear_rows(x, x, np.empty((1, 1), np.float32))
    assert (pairs, groups) == (1, 1)
