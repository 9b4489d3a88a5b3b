"""The self-check of `numerics=bitwise`: the model at hand, on this machine, computes a row alike in every batch.

A sequence runs through the first layers in several ways: at once, in chunks, token by token, alone and among others.
Logits and the keys and values in the pages must be the same bits each time. All workers check at the same time, each
in another order, so that every exchange also meets uneven and empty batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from flexfloor.fleets.engine.attention import Batch
from flexfloor.fleets.engine.model import ShardedModel

_LENGTH = 75  # tokens of the sequence that is checked: some pages, the last one partly filled
_OTHERS = (9, 131)  # lengths of the sequences that run beside it

# Each way is a list of steps (begin, end, other sequences beside it).
_WAYS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, _LENGTH, 0),),
    ((0, _LENGTH, 2),),
    ((0, 13, 0), (13, 14, 1), (14, 50, 2), (50, _LENGTH, 1)),
    ((0, _LENGTH - 4, 1), *((at, at + 1, at % 3) for at in range(_LENGTH - 4, _LENGTH))),
)


def check_row_invariance(
    model: ShardedModel, begin_iteration: Callable[[int], None], rank: int, page_tokens: int
) -> bool:
    """True if every way gives the same bits. Collective; overwrites pages, so only while no request is live.

    begin_iteration: called with the number of rows before each forward pass.
    """
    length = min(_LENGTH, model.info.shape.max_context, (model.arena.page_count - 1) * page_tokens)
    depth = _depth(model)
    expected: tuple[torch.Tensor, torch.Tensor] | None = None
    same = True
    for turn in range(len(_WAYS)):
        steps = _WAYS[(turn + rank) % len(_WAYS)]
        logits = []
        for index in range(max(map(len, _WAYS))):
            begin, end, others = steps[index] if index < len(steps) else (0, 0, 0)
            begin, end = min(begin, length), min(end, length)
            batch = _batch(model, begin, end, others, page_tokens)
            begin_iteration(len(batch))
            hidden = model.forward(batch, np.arange(end - begin), depth)
            if end > begin:
                logits.append(
                    torch.log_softmax(model.logits(hidden).float(), dim=-1).gather(1, _next(model, begin, end))
                )
        pages = -(-length // page_tokens)
        kv = model.arena.pages[:pages, :depth].transpose(1, 4)  # [pages, page_tokens, 2, kv_heads, layers, dim]
        result = torch.cat(logits), kv.flatten(0, 1)[:length].clone()
        if expected is None:
            expected = result
        same &= all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
    return same


def _depth(model: ShardedModel) -> int:
    """Fewest first layers that hold one layer of each kind."""
    shape = model.info.shape
    dense = [layer for layer in range(shape.layers) if layer not in shape.moe_layers]
    return max(shape.moe_layers[0], dense[0] if dense else 0) + 1


def _next(model: ShardedModel, begin: int, end: int) -> torch.Tensor:
    ids = torch.from_numpy(_tokens(model, end + 1)[begin + 1 :]).to(model.device)
    return ids[:, None]


def _tokens(model: ShardedModel, count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.int64) * 7919 + 17) % model.info.shape.vocab_size


def _batch(model: ShardedModel, begin: int, end: int, others: int, page_tokens: int) -> Batch:
    """Tokens [begin, end) of the checked sequence, then whole other sequences while the arena has pages for them."""
    parts, next_page = [], 0
    for number, (first, last) in enumerate([(begin, end), *((0, n) for n in _OTHERS[:others])]):
        reserved = -(-(_LENGTH if number == 0 else last) // page_tokens)
        if end == begin or next_page + reserved > model.arena.page_count:
            break
        parts.append((first, last, next_page + np.arange(reserved)))
        next_page += reserved
    return _join(list(_rows(parts, page_tokens)), model)


def _rows(parts: list, page_tokens: int) -> Iterator[tuple[int, int, np.ndarray]]:
    for row, (first, last, table) in enumerate(parts):
        for position in range(first, last):
            yield row, position, table


def _join(rows: list[tuple[int, int, np.ndarray]], model: ShardedModel) -> Batch:
    page_tokens = model.arena.pages.shape[4]
    width = max((len(t) for _, _, t in rows), default=1)
    tables = np.zeros((len({r for r, _, _ in rows}), width), dtype=np.int64)
    for row, _, table in rows:
        tables[row, : len(table)] = table
    sequence = np.array([r for r, _, _ in rows], dtype=np.int64)
    positions = np.array([p for _, p, _ in rows], dtype=np.int64)
    ids = _tokens(model, int(positions.max(initial=0)) + 1)[positions]
    pages = tables[sequence, positions // page_tokens] if len(rows) else positions
    return Batch(ids, positions, sequence, pages, positions % page_tokens, tables)
