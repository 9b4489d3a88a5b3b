"""The first test of all: keys, values and log-probs after a re-prefill are those of the decode, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES

import flexfloor
from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
from flexfloor.fleets.engine.fleet import plan_memory
from flexfloor.fleets.engine.numerics import NumericsPath, RowLinear
from flexfloor.fleets.engine.pacing import Pace
from flexfloor.fleets.engine.worker import Worker, WorkerConfig
from flexfloor.settings import EngineSettings
from flexfloor.world.experts import place_contiguous


def make_worker(model: Path, path: NumericsPath = "blocks", **engine: object) -> Worker:
    """A worker inside this process, alone in its group. `blocks` does not depend on how this process was started."""
    settings = EngineSettings.parse(worker_memory="256MiB", **engine)
    info = inspect_checkpoint(model, settings.dtype)
    placement = place_contiguous(len(info.shape.moe_layers), info.shape.experts, 1)
    worker = Worker(
        WorkerConfig(
            worker=0,
            info=info,
            model=info.path,
            memory=plan_memory(info, placement, 1, settings)[0],
            placement=placement,
            eos_token_ids=frozenset(),
            device="cpu",
            transport="socket",
            threads=1,
            page_tokens=settings.page_tokens,
            max_batch=settings.max_batch,
            prefill_tokens=settings.prefill_tokens,
            group_timeout=30,
            pace=Pace.of(settings),
        )
    )
    worker.load()
    worker.connect("alone", placement, (0,))
    worker.model.set_numerics(path)
    return worker


def cached(worker: Worker, name: str, tokens: int) -> torch.Tensor:
    """Keys and values of a live request's first tokens: [tokens, ...]."""
    sequence = next(s for s in worker.scheduler.running if s.request.request_id == name)
    pages = worker.arena.pages[sequence.pages].transpose(1, 4).flatten(0, 1)
    return pages[:tokens].clone()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_of_generated_tokens_equals_their_decode(checkpoint: Callable, architecture: str) -> None:
    worker = make_worker(checkpoint(architecture), prefill_tokens=13)
    request = flexfloor.make_requests(
        [list(range(4, 41))], sampling=flexfloor.SamplingParams(max_tokens=100, temperature=0.7)
    )[0]
    others = flexfloor.make_requests([[9] * n for n in (3, 30, 50)])
    worker.assign([request, *others])
    worker.advance(60)
    sequence = next(s for s in worker.scheduler.running if s.request is request)
    tokens, logprobs = list(sequence.tokens), list(sequence.logprobs)
    count = len(tokens) - 1
    decoded = cached(worker, request.request_id, count)

    worker.start()
    resumed = replace(request, prompt_tokens=tuple(tokens[:-1]))
    worker.assign([resumed])
    while not worker.scheduler.running or not worker.scheduler.running[0].response_length:
        worker.advance(1)
    again = worker.scheduler.running[0]
    assert torch.equal(cached(worker, request.request_id, count), decoded)

    # The same position draws from the same random number only as the same response token: compare log-probs by force.
    hidden = prefill_hidden(worker, again.request.prompt_tokens)
    start = len(request.prompt_tokens) - 1
    scaled = worker.model.logits(hidden).float()[start:] / 0.7
    forced = torch.log_softmax(scaled, dim=-1).gather(1, torch.tensor(tokens[start + 1 :])[:, None])[:, 0]
    assert np.array_equal(forced.numpy(), np.array(logprobs, dtype=np.float32))


def prefill_hidden(worker: Worker, prompt: tuple[int, ...]) -> torch.Tensor:
    """Last hidden states of a whole prompt computed in one piece, in pages of its own."""
    from flexfloor.fleets.engine.batching import build_batch
    from flexfloor.fleets.engine.scheduler import Chunk, Sequence

    request = flexfloor.make_requests([prompt])[0]
    pages = [worker.allocator.take() for _ in range(-(-len(prompt) // worker.config.page_tokens))]
    sequence = Sequence(request, 0, 1, list(prompt), pages=pages)
    batch, _ = build_batch([Chunk(sequence, 0, len(prompt))], worker.config.page_tokens)
    worker._share_rows(len(batch))
    return worker.model.forward(batch, np.arange(len(prompt)))


@pytest.mark.parametrize("architecture", ["tiny", *ARCHITECTURES])
def test_self_check_accepts_the_block_path_and_would_refuse_a_batch_dependent_one(
    checkpoint: Callable, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(checkpoint(architecture))
    assert worker.check_numerics("blocks")
    right = RowLinear.__call__

    def batch_dependent(self: RowLinear, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) + 1e-6 * x.shape[-2]

    monkeypatch.setattr(RowLinear, "__call__", batch_dependent)
    assert not worker.check_numerics("blocks")


def test_kernels_are_compiled_before_a_worker_starts(checkpoint: Callable) -> None:
    """A compilation inside a worker would cost seconds and memory at its first request."""
    from flexfloor.fleets.engine import kernels

    kernels.warm_up()
    functions = [kernels.write_kv, kernels.attend, kernels.group_pairs, kernels.expert_ffn, kernels.combine_pairs]
    before = [len(f.signatures) for f in (*functions, kernels.linear_rows)]
    worker = make_worker(checkpoint("tiny"))
    worker.assign(flexfloor.make_requests([[5] * 30, [6] * 3]))
    worker.advance(4)
    assert [len(f.signatures) for f in (*functions, kernels.linear_rows)] == before
