"""One expert-parallel worker: a shard of the model, its requests, and the numbered commands of the driver."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexfloor.fleets.engine.arena import Arena, KVLayout
from flexfloor.fleets.engine.batching import build_batch
from flexfloor.fleets.engine.checkpoint import CheckpointInfo
from flexfloor.fleets.engine.comm import EpochGroup, Transport, join_group
from flexfloor.fleets.engine.machine import THIS_MACHINE, Machine
from flexfloor.fleets.engine.model import ShardedModel
from flexfloor.fleets.engine.moving import Mover, inject_fault
from flexfloor.fleets.engine.numerics import NumericsPath
from flexfloor.fleets.engine.pacing import IterationCounts, Pace, Pacer
from flexfloor.fleets.engine.pages import PageAllocator
from flexfloor.fleets.engine.sampling import request_key, sample
from flexfloor.fleets.engine.scheduler import Chunk, Scheduler, Sequence
from flexfloor.fleets.engine.selfcheck import check_row_invariance
from flexfloor.progress import Preemption, RequestProgress, WorkerIterations, WorkerStatus
from flexfloor.requests import Request
from flexfloor.world.experts import ExpertPlacement
from flexfloor.world.memory import MemoryPlan

_LOGIT_ROWS = 64  # most rows of logits at once; they are as wide as the vocabulary


@dataclass(frozen=True)
class WorkerConfig:
    """All that a worker process is told at its start."""

    worker: int
    info: CheckpointInfo  # whose weights are loaded
    model: Path  # folder of the model that was launched, which has the tokenizer
    memory: MemoryPlan
    placement: ExpertPlacement
    eos_token_ids: frozenset[int]
    device: str
    transport: Transport
    threads: int
    page_tokens: int
    max_batch: int
    prefill_tokens: int
    group_timeout: float  # seconds
    pace: Pace
    machine: Machine = THIS_MACHINE


@dataclass(frozen=True)
class ChunkResult:
    """One worker's part of a Progress."""

    iterations: WorkerIterations
    requests: tuple[RequestProgress, ...]
    preemptions: tuple[Preemption, ...]
    status: WorkerStatus
    expert_load: np.ndarray  # int64 [moe_layers, experts], tokens computed here for each expert since `start`


class Worker:
    """Verbs are methods; the driver calls the same ones on all active workers where they are collective."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config = config
        self.device = torch.device(config.device)
        self.iteration = 0
        self.peak_memory = 0
        self.mover = Mover(self)
        self._store: Any = None
        self._pacer = Pacer(config.pace, config.info.shape)
        self._group: EpochGroup | None = None
        self._tokenizer: Any = None

    def load(self) -> int:
        """Build the model and load this worker's weights. Returns expert bytes loaded. Raises InputError."""
        c, info = self.config, self.config.info
        info.check_readable(c.machine.address)
        layout = KVLayout(info.shape.layers, info.kv_heads, c.page_tokens, info.head_dim)
        self.arena = Arena(c.memory, layout, info.dtype, self.device)
        self.model = ShardedModel(info, self.arena, self.device)
        self.model.load_dense()
        loaded = self.model.load_experts(c.placement.experts_on(c.worker))
        self.model.experts.load = np.zeros(c.placement.worker.shape, dtype=np.int64)
        self.start()
        return loaded

    def open_store(self, address: tuple[str, int]) -> None:
        """Reach the driver's store, through which members of a group find each other."""
        self._store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)

    def connect(self, tag: str, placement: ExpertPlacement, members: Many[int]) -> None:
        """Enter the group of a membership epoch. Collective over `members`."""
        self.enter_epoch(placement, self.join(tag, placement.epoch, members))

    def join(self, tag: str, epoch: int, members: Many[int], timeout: float | None = None) -> EpochGroup | None:
        """A group with the other members; None for a worker alone. Collective over `members`."""
        if len(members) == 1:
            return None
        c = self.config
        limit = timeout or c.group_timeout
        return join_group(c.transport, self._store, tag, epoch, members, c.worker, limit, c.machine)

    def enter_epoch(self, placement: ExpertPlacement, group: EpochGroup | None) -> None:
        """Leave the group of before and compute in this one from now on."""
        if self._group is not None:
            self._group.close()
        self._group, self.placement = group, placement
        if self.config.worker in (group.members if group else np.unique(placement.worker)):
            self.model.experts.set_epoch(placement, group, self.config.worker)

    def release(self) -> None:
        """Leave for the rest of the rollout: no group, no expert, no KV; the dense weights stay."""
        inject_fault("release", self.config.worker)
        assert self.scheduler.live == 0, "requests would be lost"
        if self._group is not None:
            self._group.close()
            self._group = None
        self.arena.release()
        self.allocator.resize(0)

    def rejoin(self) -> None:
        """Memory for pages again, as `prepare` will divide it."""
        self.arena.restore()
        self.allocator.resize(self.arena.page_count)

    def sleep(self) -> None:
        """Between rollouts: no memory for experts and KV until `wake`; the group and the dense weights stay."""
        assert self.scheduler.live == 0, "requests would be lost"
        self.arena.release()
        self.allocator.resize(0)

    def wake(self) -> None:
        """Memory again, divided as at the launch, with nothing in it: the experts are loaded next."""
        self.arena.restore()
        self.arena.slot_count = self.config.memory.slots
        self.allocator.resize(self.arena.page_count)

    def load_weights(self, info: CheckpointInfo) -> None:
        """Replace every weight in place, from another checkpoint of the same shapes."""
        info.check_readable(self.config.machine.address)
        self.config = replace(self.config, info=info)
        self.model.info = info
        self.model.load_dense()
        self.model.load_experts(self.config.placement.experts_on(self.config.worker))

    def check_numerics(self, path: NumericsPath) -> bool:
        """Whether `path` keeps the promise of bitwise on this model and machine; the path stays set. Collective."""
        self.model.set_numerics(path)
        if path == "fast":
            return True
        rank = self._group.rank if self._group else 0
        return check_row_invariance(self.model, self._share_rows, rank, self.config.page_tokens)

    def start(self) -> None:
        """Begin a rollout with nothing live, at iteration 0."""
        c = self.config
        self.allocator = PageAllocator(self.arena.page_count)
        self.scheduler = Scheduler(self.allocator, c.page_tokens, c.max_batch, c.prefill_tokens)
        self.iteration = 0
        self.peak_memory = process_memory()  # one that is released before the first iteration has this and no more
        self.model.experts.load[:] = 0
        self._finished: list[Sequence] = []

    def assign(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.sampling.stop and self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self.config.model, local_files_only=True)
            room = self.config.info.shape.max_context - len(request.prompt_tokens)
            self.scheduler.add(
                Sequence(
                    request, request_key(request), min(request.sampling.max_tokens, room), list(request.prompt_tokens)
                )
            )

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.scheduler.cancel(request_ids)

    def advance(self, iterations: int) -> ChunkResult:
        """Up to `iterations`, fewer when no request is live on any worker; all stop at the same one. Collective."""
        records: list[tuple[float, float, int, int, int, int, int]] = []
        preemptions: list[Preemption] = []
        self._pacer.begin_chunk()
        for _ in range(iterations):
            chunks = self.scheduler.schedule()
            preemptions += [
                Preemption(name, self.config.worker, self.iteration) for name in self.scheduler.take_preempted()
            ]
            batch, draws = build_batch(chunks, self.config.page_tokens)
            kv_tokens = sum(c.end for c in chunks if c.sequence.is_decoding)
            prefill_tokens = sum(c.end - c.begin for c in chunks if not c.sequence.is_decoding)
            own = IterationCounts(len(batch), self.scheduler.live, len(chunks), kv_tokens, prefill_tokens)
            counts = self._share(own)
            if sum(c.live for c in counts) == 0:
                break
            hidden = self.model.forward(batch, draws)
            self._take_tokens(chunks, hidden)
            touched, exchange_s = self.model.experts.touched, self.model.experts.exchange_s
            seconds, overran = self._pacer.end_iteration(self._pacer.target(counts))
            records.append((seconds, exchange_s, len(chunks), prefill_tokens, kv_tokens, touched, int(overran)))
            self.iteration += 1
        self.note_memory()
        report = tuple(self._report())
        columns = list(zip(*records, strict=True)) if records else [()] * 7
        seconds_of, exchange_of = (np.array(c, dtype=np.float64) for c in columns[:2])
        live, prefill, kv, experts, late = (np.array(c, dtype=np.int64) for c in columns[2:])
        return ChunkResult(
            WorkerIterations(
                self.config.worker,
                seconds_of,
                live,
                prefill,
                kv,
                experts,
                late,
                tokens=sum(len(r.tokens) for r in report),
                kv_pages=self.allocator.used,
                # Kernels and collectives of a GPU run behind the host's back: its clock knows nothing of them.
                exchange_s=exchange_of if self.device.type == "cpu" else None,
            ),
            report,
            tuple(preemptions),
            self.status(),
            self.model.experts.load,
        )

    def status(self) -> WorkerStatus:
        page = self.arena.page_bytes
        return WorkerStatus(
            worker=self.config.worker,
            active=True,
            live_requests=self.scheduler.live,
            kv_pages_free=self.allocator.free,
            kv_pages=self.allocator.count,
            peak_kv_bytes=self.allocator.peak * page,
            peak_memory_bytes=self.peak_memory,
            memory_bytes=process_memory(),
            arena_bytes=self.arena.nbytes,
            slots=self.arena.slot_count,
            requests=tuple(s.status for s in [*self.scheduler.running, *self.scheduler.waiting]),
        )

    def note_memory(self) -> None:
        self.peak_memory = max(self.peak_memory, process_memory())

    def _share_rows(self, rows: int) -> None:
        self._share(IterationCounts(rows, live=1))

    def _share(self, own: IterationCounts) -> list[IterationCounts]:
        """Tell all members what this iteration holds here; returns what it holds everywhere, in rank order."""
        group, begin = self._group, time.perf_counter()
        counts = [own] if group is None else [IterationCounts(*c) for c in group.share_counts(own, self.device)]
        waited = 0.0 if group is None else time.perf_counter() - begin
        self.model.experts.begin_iteration([c.rows for c in counts], waited)
        return counts

    def _take_tokens(self, chunks: Many[Chunk], hidden: torch.Tensor) -> None:
        """Draw a token for each chunk that asks for one, and end the sequences that are complete."""
        for chunk in chunks:
            self.scheduler.note_computed(chunk)
        drawing = [c.sequence for c in chunks if c.draws]
        for begin in range(0, len(drawing), _LOGIT_ROWS):
            own = drawing[begin : begin + _LOGIT_ROWS]
            logits = self.model.logits(hidden[begin : begin + _LOGIT_ROWS])
            tokens, logprobs = sample(
                logits,
                [s.request for s in own],
                np.array([s.key for s in own], dtype=np.uint64),
                np.array([s.response_length for s in own], dtype=np.int64),
            )
            for sequence, token, logprob in zip(own, tokens.tolist(), logprobs.tolist(), strict=True):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                self._finish_if_complete(sequence, token)

    def _finish_if_complete(self, sequence: Sequence, token: int) -> None:
        sampling = sequence.request.sampling
        ends = token in self.config.eos_token_ids and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids or self._hits_stop(sequence):
            sequence.finish_reason = "stop"
        elif sequence.response_length >= sequence.max_tokens:
            sequence.finish_reason = "length"
        else:
            return
        sequence.finish_iteration = self.iteration
        self.scheduler.remove(sequence)
        self._finished.append(sequence)

    def _hits_stop(self, sequence: Sequence) -> bool:
        stops = sequence.request.sampling.stop
        if not stops:
            return False
        # A token may be less than a character, never less than a byte.
        window = max(len(s.encode()) for s in stops) + 8
        tail = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - window) :]
        text = self._tokenizer.decode(tail, skip_special_tokens=True)
        return any(s in text for s in stops)

    def _report(self) -> Iterable[RequestProgress]:
        """What the driver has not seen yet."""
        for sequence in [*self._finished, *self.scheduler.running, *self.scheduler.waiting]:
            fresh = sequence.response_length - sequence.reported
            if fresh:
                yield RequestProgress(
                    sequence.request.request_id,
                    self.config.worker,
                    tuple(sequence.tokens[-fresh:]),
                    np.array(sequence.logprobs[-fresh:], dtype=np.float32),
                    sequence.finish_reason,
                    sequence.finish_iteration,
                    sequence.response_length,
                )
                sequence.reported += fresh
        self._finished = []


def process_memory() -> int:
    """Anonymous and shared memory of this process, bytes: what it alone keeps from others (files it maps are not)."""
    fields = {}
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                fields[name] = int(value.split()[0]) * 1024
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss
    return sum(fields.values())
