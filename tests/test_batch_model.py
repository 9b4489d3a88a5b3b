"""The batch model in virtual time against the engine's own scheduler, count by count."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch_by_hand import PAGE, made

from flexfloor.errors import PlanRefusedError
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.scheduler import Scheduler, Sequence
from flexfloor.requests import Request
from flexfloor.world.batch import BatchModel, PagesLackingError, Steps


@dataclass
class Trace:
    """What iterations brought; entries of [iterations][workers]."""

    batch: list[list[int]] = field(default_factory=list)
    prefill: list[list[int]] = field(default_factory=list)
    kv: list[list[int]] = field(default_factory=list)
    live: list[list[bool]] = field(default_factory=list)
    finished: list[tuple[int, int, int]] = field(default_factory=list)  # iteration, worker, row
    preempted: list[tuple[int, int, int]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class Real:
    """Schedulers of the engine with a pretended model; rows are request ids. Steps as `Worker.advance` does."""

    def __init__(self, pages: Many[int], max_batch: int, prefill: int) -> None:
        self.schedulers = [Scheduler(PageAllocator(p), PAGE, max_batch, prefill) for p in pages]
        self.sequences: list[Sequence] = []
        self.home: dict[int, int] = {}

    def add(self, prompt: int, length: int, group: int) -> None:
        row = len(self.sequences)
        request = Request(str(row), str(group), row, (group,) * prompt)
        self.sequences.append(Sequence(request, 0, length, [group] * prompt))

    def assign(self, worker: int, rows: Many[int]) -> None:
        for row in rows:
            s = self.sequences[row]
            self.schedulers[worker].add(Sequence(s.request, 0, s.max_tokens, s.tokens))
            self.sequences[row] = self.schedulers[worker].waiting[-1]
            self.home[row] = worker

    def cancel(self, rows: Many[int]) -> None:
        for scheduler in self.schedulers:
            scheduler.cancel([str(row) for row in rows])
        for row in rows:
            self.home.pop(row, None)

    def move(self, row: int, target: int, with_kv: bool) -> None:
        """As `Mover` does it: pack, make room, cancel at the source, adopt."""
        source, old = self.schedulers[self.home[row]], self.sequences[row]
        kept = len(old.pages) if with_kv else 0
        new = Sequence(old.request, 0, old.max_tokens, list(old.tokens), computed=old.computed if kept else 0)
        if kept:
            self.schedulers[target].make_room(new, kept)
        source.cancel([str(row)])
        self.schedulers[target].adopt(new)
        self.sequences[row], self.home[row] = new, target

    def set_pages(self, worker: int, pages: int) -> None:
        scheduler = self.schedulers[worker]
        scheduler.renumber(scheduler.allocator.resize(pages))

    def advance(self, iterations: int, active: Many[int]) -> Trace:
        trace = Trace(drawn=[0] * len(self.schedulers))
        for at in range(iterations):
            if not any(self.schedulers[w].live for w in active):
                break
            columns: list[list[int]] = [[0] * len(self.schedulers) for _ in range(3)]
            trace.live.append([s.live > 0 for s in self.schedulers])
            for w in active:
                self._iterate(w, at, trace, columns)
            for into, column in zip((trace.batch, trace.prefill, trace.kv), columns, strict=True):
                into.append(column)
        return trace

    def _iterate(self, w: int, at: int, trace: Trace, columns: list[list[int]]) -> None:
        scheduler = self.schedulers[w]
        chunks = scheduler.schedule()
        trace.preempted += [(at, w, int(name)) for name in scheduler.take_preempted()]
        columns[0][w] = len(chunks)
        columns[1][w] = sum(c.end - c.begin for c in chunks if not c.sequence.is_decoding)
        columns[2][w] = sum(c.end for c in chunks if c.sequence.is_decoding)
        for chunk in chunks:
            scheduler.note_computed(chunk)
        for chunk in chunks:
            if chunk.draws:
                s = chunk.sequence
                s.tokens.append(0)
                trace.drawn[w] += 1
                if s.response_length >= s.max_tokens:
                    scheduler.remove(s)
                    trace.finished.append((at, w, int(s.request.request_id)))


def compare_states(real: Real, model: BatchModel) -> None:
    assert model.free_pages.tolist() == [s.allocator.free for s in real.schedulers]
    assert model.pages.tolist() == [s.allocator.count for s in real.schedulers]
    assert model.live.tolist() == [s.live for s in real.schedulers]
    expected = [int(s.request.request_id) for one in real.schedulers for s in [*one.running, *one.waiting]]
    assert model.live_rows().tolist() == expected
    for row in expected:
        status, sequence = real.sequences[row].status, real.sequences[row]
        assert model.worker[row] == real.home[row]
        assert model.running[row] == sequence.is_running
        assert model.decoding[row] == status.decoding
        assert model.response[row] == status.response_tokens
        assert model.computed[row] == sequence.computed
        assert model.kv_pages[row] == status.kv_pages
        assert model.shared_pages[row] == status.shared_pages


def compare_steps(trace: Trace, steps: Steps, workers: int) -> None:
    """Every iteration's counts, taken out of the steps; within a step they are straight lines."""
    done = len(trace.batch)
    assert steps.iterations == done == steps.spans.sum()
    assert steps.batch is not None
    assert steps.prefill_tokens is not None
    assert steps.kv_tokens is not None
    batch, prefill, kv = (
        np.array(t, dtype=np.int64).reshape(done, workers).T for t in (trace.batch, trace.prefill, trace.kv)
    )
    starts = np.cumsum(steps.spans) - steps.spans
    assert np.array_equal(np.repeat(steps.batch, steps.spans, axis=1), batch)
    assert np.array_equal(np.repeat(steps.prefill_tokens, steps.spans, axis=1), prefill)
    for step, (start, span) in enumerate(zip(starts.tolist(), steps.spans.tolist(), strict=True)):
        part = kv[:, start : start + span]
        assert np.array_equal(steps.kv_tokens[:, step], part.mean(axis=1))
        assert span == 1 or (np.diff(part, axis=1) == batch[:, start : start + 1]).all()
        assert steps.kv_max[step] == part.mean(axis=1).max()
        assert steps.kv_total[step] == part.mean(axis=1).sum()
    at = batch[:, starts], prefill[:, starts]
    assert np.array_equal(steps.batch_max, at[0].max(axis=0))
    assert np.array_equal(steps.batch_total, at[0].sum(axis=0))
    assert np.array_equal(steps.prefill_max, at[1].max(axis=0))
    assert np.array_equal(steps.prefill_total, at[1].sum(axis=0))
    assert np.array_equal(steps.rows_max, (at[0] + at[1]).max(axis=0))
    assert steps.tokens.tolist() == trace.drawn
    live = np.array(trace.live, dtype=bool).reshape(done, workers)
    assert steps.last_live.tolist() == [int(np.flatnonzero(live[:, w]).max(initial=-1)) + 1 for w in range(workers)]
    assert np.allclose(steps.kv_mean, kv.sum(axis=1) / max(1, done))
    triples = zip(steps.finished_at.tolist(), steps.finished_worker.tolist(), steps.finished.tolist(), strict=True)
    assert sorted(triples) == sorted(trace.finished)
    triples = zip(steps.preempted_at.tolist(), steps.preempted_worker.tolist(), steps.preempted.tolist(), strict=True)
    assert list(triples) == trace.preempted


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Requests (prompt, length, group) in the order they come, and pages that any of them can run in alone."""
    groups = draw(
        st.lists(
            st.tuples(st.integers(1, 30), st.lists(st.integers(1, 50), min_size=1, max_size=5)), min_size=1, max_size=8
        )
    )
    requests = [(prompt, length, g) for g, (prompt, lengths) in enumerate(groups) for length in lengths]
    longest = max(prompt + length for prompt, length, _ in requests)
    return draw(st.permutations(requests)), -(-(longest + 1) // PAGE)


@settings(max_examples=200, deadline=None)
@given(
    workload=workloads(),
    workers=st.integers(1, 4),
    extra=st.integers(0, 25),
    max_batch=st.integers(1, 12),
    prefill=st.integers(1, 40),
    data=st.data(),
)
def test_counts_are_those_of_the_engine(
    workload: tuple[list[tuple[int, int, int]], int],
    workers: int,
    extra: int,
    max_batch: int,
    prefill: int,
    data: st.DataObject,
) -> None:
    """Requests come, move, are cancelled and preempted, the cut moves; one tells the other nothing."""
    requests, alone = workload
    pages = [alone + extra] * workers
    real = Real(pages, max_batch, prefill)
    model = BatchModel(pages=pages, page_tokens=PAGE, max_batch=max_batch, prefill_tokens=prefill)
    for request in requests:
        real.add(*request)
    rows = model.add(*zip(*requests, strict=True))
    assert rows.tolist() == list(range(len(requests)))
    queue = rows.tolist()
    everyone = range(workers)
    for _ in range(data.draw(st.integers(1, 12), label="rounds")):
        taken, queue = queue[: (n := data.draw(st.integers(0, 8), label="assigned"))], queue[n:]
        worker = data.draw(st.sampled_from(everyone), label="to")
        real.assign(worker, taken)
        model.assign(worker, taken)
        live = model.live_rows().tolist()
        if live and workers > 1 and data.draw(st.booleans(), label="moves"):
            for row in data.draw(st.lists(st.sampled_from(live), unique=True, max_size=6), label="movers"):
                target = data.draw(st.sampled_from([w for w in everyone if w != model.worker[row]]))
                kv = bool(model.decoding[row]) and data.draw(st.booleans(), label="with KV")
                before = model.copy()
                try:
                    model.move(row, target, kv)
                except PagesLackingError:
                    compare_states(real, before)
                    need = model.kv_pages[row]
                    assert need > model.free_pages[target]
                    continue
                real.move(row, target, kv)
        if live and data.draw(st.integers(0, 5), label="cancels") == 0:
            gone = data.draw(st.lists(st.sampled_from(live), unique=True, max_size=3))
            real.cancel(gone)
            model.cancel(gone)
        if data.draw(st.integers(0, 3), label="cut moves") == 0:
            worker = data.draw(st.sampled_from(everyone))
            count = alone + data.draw(st.integers(0, 30))
            try:
                model.set_pages(worker, count)
                real.set_pages(worker, count)
            except PagesLackingError:
                with pytest.raises(PlanRefusedError):
                    real.set_pages(worker, count)
        compare_states(real, model)
        iterations = data.draw(st.one_of(st.just(1), st.integers(0, 60)), label="iterations")
        compare_steps(real.advance(iterations, everyone), model.advance(iterations, everyone, detail=True), workers)
        compare_states(real, model)
    compare_steps(real.advance(10**4, everyone), model.advance(10**4, everyone, detail=True), workers)
    compare_states(real, model)
    assert not model.live.any()
    assert np.array_equal(model.free_pages, model.pages)


@settings(max_examples=60, deadline=None)
@given(workload=workloads(), extra=st.integers(0, 20), cuts=st.lists(st.integers(1, 40), max_size=20))
def test_chunks_of_any_size_count_the_same(
    workload: tuple[list[tuple[int, int, int]], int], extra: int, cuts: list[int]
) -> None:
    requests, alone = workload
    whole, cut = (made(requests, pages=alone + extra, prefill_tokens=9) for _ in range(2))
    steps = whole.advance(10**6, [0], detail=True)
    parts: list[Steps] = []
    offsets: list[int] = []
    for iterations in [*cuts, 10**6]:
        offsets.append(sum(p.iterations for p in parts))
        parts.append(cut.advance(iterations, [0], detail=True))
    assert sum(p.iterations for p in parts) == steps.iterations
    for name in ("finished", "preempted"):
        assert np.concatenate([getattr(p, name) for p in parts]).tolist() == getattr(steps, name).tolist()
        at = np.concatenate([getattr(p, name + "_at") + o for p, o in zip(parts, offsets, strict=True)])
        assert at.tolist() == getattr(steps, name + "_at").tolist()
    for name in ("batch_total", "prefill_total"):
        pieces = [np.repeat(getattr(p, name), p.spans) for p in parts]
        assert np.concatenate(pieces).tolist() == np.repeat(getattr(steps, name), steps.spans).tolist()
    assert sum((p.kv_total * p.spans).sum() for p in parts) == (steps.kv_total * steps.spans).sum()
    assert sum(p.tokens[0] for p in parts) == steps.tokens[0]
