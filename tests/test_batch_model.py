"""The batch model in virtual time against the engine's own scheduler, count by count, and against hand calculation."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.errors import PlanRefusedError
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.scheduler import Scheduler, Sequence
from flexfloor.requests import Request
from flexfloor.world.batch import BatchModel, PagesLackingError, Steps

PAGE = 4


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


def made(requests: Many[tuple[int, int, int]], **limits: int) -> BatchModel:
    """One worker that has all of them in its line."""
    options = {"pages": 40, "max_batch": 16, "prefill_tokens": 16} | limits
    pages = options.pop("pages")
    model = BatchModel(pages=[pages], page_tokens=PAGE, **options)
    model.assign(0, model.add(*zip(*requests, strict=True)))
    return model


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


def test_a_request_alone_by_hand() -> None:
    # 10 prompt tokens in budgets of 4: 3 iterations, the last of which draws; then one token each.
    model = made([(10, 5, 0)], prefill_tokens=4)
    steps = model.advance(100, [0], detail=True)
    assert steps.iterations == 3 + 4
    assert steps.spans.tolist() == [1, 1, 1, 4]
    assert steps.prefill_total.tolist() == [4, 4, 2, 0]
    assert steps.batch_total.tolist() == [1, 1, 1, 1]
    assert steps.kv_total.tolist() == [0, 0, 0, (11 + 12 + 13 + 14) / 4]
    assert steps.rows_max.tolist() == [5, 5, 3, 1]
    assert steps.finished_at.tolist() == [6]
    assert (steps.tokens.tolist(), steps.last_live.tolist()) == ([5], [7])
    assert model.finished.tolist() == [True]
    assert model.advance(5, [0]).iterations == 0


def test_siblings_compute_their_prompt_once_by_hand() -> None:
    # The first computes all 9 tokens; the second waits for the 8 in full pages, then computes its last one.
    model = made([(9, 3, 7), (9, 3, 7)])
    steps = model.advance(1, [0])
    assert model.computed.tolist() == [9, 0]
    assert model.response.tolist() == [1, 0]
    assert (model.kv_pages.tolist(), model.shared_pages.tolist()) == ([3, 2], [2, 2])
    assert model.free_pages.tolist() == [40 - 3]
    steps = model.advance(9, [0])
    assert steps.iterations == 3
    assert steps.prefill_total.tolist() == [1, 0, 0]
    assert steps.finished_at.tolist() == [1, 2]
    assert model.free_pages.tolist() == [40]


def test_the_youngest_is_preempted_by_hand() -> None:
    # Two of 4 prompt tokens; each holds a page after prefill, two after the next iteration, 3 from the sixth on.
    model = made([(4, 20, 0), (4, 20, 1)], pages=6)
    assert model.copy().advance(10, [0]).spans.tolist() == [1, 8, 1]
    steps = model.advance(9, [0])
    assert (steps.preempted.tolist(), model.kv_pages.tolist()) == ([], [3, 3])
    steps = model.advance(1, [0])
    assert (steps.preempted.tolist(), steps.preempted_at.tolist()) == ([1], [0])
    assert (model.running.tolist(), model.response.tolist(), model.computed.tolist()) == (
        [True, False],
        [10, 9],
        [13, 0],
    )
    assert model.free_pages.tolist() == [2]
    # 13 tokens and one more need 4 pages and one for the other's growth: it comes back when the first has ended.
    rest = model.advance(100, [0])
    assert rest.finished.tolist() == [0, 1]
    assert rest.finished_at.tolist() == [9, 10 + 10]
    assert rest.preempted.tolist() == []


def test_quiet_iterations_are_one_step() -> None:
    model = made([(4, 5000, 0), (4, 9000, 1)], pages=10_000)
    steps = model.advance(10**6, [0])
    assert steps.spans.tolist() == [1, 4999, 4000]
    assert steps.kv_max.tolist() == [0, 2 * (5 + 5003) / 2, (5004 + 9003) / 2]


def test_a_worker_without_requests_idles_and_all_stop_together() -> None:
    model = BatchModel(pages=[40, 40, 40], page_tokens=PAGE, max_batch=4, prefill_tokens=16)
    rows = model.add([4, 4], [3, 8], [0, 1])
    for row in rows:
        model.assign(int(row), [row])
    steps = model.advance(100, [0, 1, 2], detail=True)
    assert steps.iterations == 8
    assert steps.last_live.tolist() == [3, 8, 0]
    assert steps.spans.tolist() == [1, 2, 5]
    assert steps.batch is not None
    assert steps.batch.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert steps.kv_mean.tolist() == [(5 + 6) / 8, sum(range(5, 12)) / 8, 0]


def test_pages_that_arrive_are_shared_with_siblings_there() -> None:
    model = BatchModel(pages=[20, 20], page_tokens=PAGE, max_batch=4, prefill_tokens=64)
    first, second = model.add([9, 9], [9, 9], [3, 3])
    model.assign(0, [first])
    model.assign(1, [second])
    model.advance(2, [0, 1])
    assert model.free_pages.tolist() == [17, 17]
    model.move(first, 1, with_kv=True)
    assert model.free_pages.tolist() == [20, 16]
    assert model.live_rows().tolist() == [second, first]
    model.move(second, 0, with_kv=False)
    assert (model.running[second], model.computed[second], model.response[second]) == (False, 0, 2)
    assert model.free_pages.tolist() == [20, 17]
    steps = model.advance(99, [0, 1])
    assert steps.finished_at.tolist() == [6, 6]
    assert steps.prefill_total[0] == 11


def test_adopted_requests_are_as_if_they_had_run_here() -> None:
    ran, adopted = (
        made([(9, 30, 0), (9, 20, 0), (5, 30, 1)]),
        BatchModel(pages=[40], page_tokens=PAGE, max_batch=16, prefill_tokens=16),
    )
    ran.advance(7, [0])
    adopted.adopt(0, adopted.add(ran.prompt, ran.length, ran.group, ran.response))
    for name in ("computed", "kv_pages", "shared_pages", "free_pages", "decoding"):
        assert getattr(adopted, name).tolist() == getattr(ran, name).tolist(), name
    assert adopted.advance(99, [0]).finished_at.tolist() == ran.advance(99, [0]).finished_at.tolist()


def test_a_copy_goes_its_own_way() -> None:
    model = made([(9, 30, 0), (9, 20, 0), (5, 30, 1)], pages=15)
    model.advance(3, [0])
    before = [a.copy() for a in model._state]
    other = model.copy()
    other.set_lengths([0, 2], [12, 40])
    other.assign(0, other.add([4], [4], [9]))
    other.advance(100, [0])
    other.set_pages(0, 3)
    assert other.finished.all()
    assert all(np.array_equal(a, b) for a, b in zip(before, model._state, strict=True))
    # Group 9 is known to the copy alone: here its prompt may be of another length.
    model.assign(0, model.add([5], [4], [9]))
    model.advance(100, [0])
    assert model.response.tolist() == [30, 20, 30, 4]
    assert other.response.tolist() == [12, 20, 40, 4]


def test_what_cannot_be_is_refused() -> None:
    model = BatchModel(pages=[10, 10], page_tokens=PAGE, max_batch=4, prefill_tokens=16)
    rows = model.add([4, 4, 30], [10, 10, 20], [0, 0, 1])
    model.assign(0, rows[:2])
    model.advance(1, [0])
    used = int(model.pages[0] - model.free_pages[0])
    for message, call in [
        ("on a worker already", lambda: model.assign(1, [0])),
        ("given twice", lambda: model.assign(1, [2, 2])),
        ("no complete KV", lambda: model.adopt(1, [2])),
        ("is not live", lambda: model.move(2, 1, False)),
        ("already", lambda: model.move(0, 0, True)),
        ("worker 2 is unknown", lambda: model.move(0, 2, True)),
        ("numbered from 0", lambda: model.cancel([-1])),
        ("numbered from 0", lambda: model.assign(0, [3])),
        ("different lengths", lambda: model.add([5], [4], [0])),
        ("different lengths", lambda: model.add([5, 6], [4, 4], [5, 5])),
        ("empty prompt", lambda: model.add([0], [4], [6])),
        ("before it begins", lambda: model.add([4], [4], [6], [4])),
        ("would end with", lambda: model.set_lengths([0], [1])),
        ("not active", lambda: model.advance(1, [1])),
        ("are in use, ", lambda: model.set_pages(0, used - 1)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    model.set_pages(0, used)
    model.set_pages(1, 0)
    with pytest.raises(PagesLackingError, match="0 KV pages free"):
        model.move(0, 1, True)
    model.set_pages(1, 7)
    model.assign(1, [2])
    with pytest.raises(ValueError, match="no complete KV"):
        model.move(2, 0, True)
    model.cancel([0, 1])
    with pytest.raises(PlanRefusedError, match=r"worker 1 has 7 KV pages; request row 2 needs 8 to run"):
        model.advance(100, [0, 1])
