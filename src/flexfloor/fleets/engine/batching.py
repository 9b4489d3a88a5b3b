"""From scheduled chunks to the arrays that the model's forward pass reads."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from flexfloor.fleets.engine.attention import Batch
from flexfloor.fleets.engine.scheduler import Chunk


def build_batch(chunks: Many[Chunk], page_tokens: int) -> tuple[Batch, np.ndarray]:
    """The tokens of all chunks in one flat row, and the indices of the tokens that draw a next one (int64)."""
    ids: list[int] = []
    lengths = [c.end - c.begin for c in chunks]
    width = max((len(c.sequence.pages) for c in chunks), default=1)
    tables = np.zeros((len(chunks), width), dtype=np.int64)
    for row, chunk in enumerate(chunks):
        pages = chunk.sequence.pages
        tables[row, : len(pages)] = pages
        ids.extend(chunk.sequence.tokens[chunk.begin : chunk.end])
    sequence = np.repeat(np.arange(len(chunks)), lengths)
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = np.array([c.begin for c in chunks], dtype=np.int64)
    positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths) + np.repeat(begins, lengths)
    pages_of = tables[sequence, positions // page_tokens] if len(ids) else np.empty(0, np.int64)
    draws = np.array([end - 1 for end, c in zip(ends.tolist(), chunks, strict=True) if c.draws], dtype=np.int64)
    batch = Batch(np.array(ids, dtype=np.int64), positions, sequence, pages_of, positions % page_tokens, tables)
    return batch, draws
