"""The requests of one simulated rollout, with the lengths they turn out to have and what was seen before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexfloor.requests import Request, SamplingParams
from flexfloor.simulate.distributions import LengthDistribution, draw
from flexfloor.simulate.traces import Trace
from flexfloor.world.lengths.observations import Observations

EARLIER_EPOCHS = 2
"""Epochs of a drawn scenario whose lengths are known to the history."""

MOST_SIBLINGS = 32
"""Of a traced response, whose lengths the history knows; of more siblings so many, drawn at random."""


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, siblings next to each other. One entry a request in all sequences.

    ids: request ids; keys: prompt keys, under which the history knows them. group: int64, equal for siblings.
    prompt_tokens, lengths: int64 tokens. max_tokens: the limit of every response. history: makes `earlier`.
    """

    ids: Sequence[str]
    keys: Sequence[str]
    group: np.ndarray
    sample: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    max_tokens: int
    history: Callable[[], Observations]

    @cached_property
    def earlier(self) -> Observations:
        """What the history has seen; made when asked for, which not every knowledge does."""
        return self.history()

    @cached_property
    def by_id(self) -> dict[str, int]:
        """Request id → response tokens."""
        return dict(zip(self.ids, self.lengths.tolist(), strict=True))

    @property
    def longest(self) -> int:
        """Most tokens, of prompt and response, that one request comes to."""
        return int((self.prompt_tokens + self.lengths).max())

    def requests(self, *, known: bool) -> list[Request]:
        """known: lengths are forced, so that everyone may know them; else a request tells only its limit."""
        shared = SamplingParams(max_tokens=self.max_tokens)
        prompts: dict[int, tuple[int, ...]] = {}
        made = []
        columns = (self.group, self.sample, self.prompt_tokens, self.lengths)
        for name, key, *numbers in zip(self.ids, self.keys, *(column.tolist() for column in columns), strict=True):
            group, sample, tokens, length = numbers
            prompt = prompts.setdefault(group, (group,) * tokens)
            sampling = SamplingParams(max_tokens=length, ignore_eos=True) if known else shared
            made.append(Request(name, key, sample, prompt, sampling))
        return made


def draw_workload(
    source: LengthDistribution, requests: int, samples: int, prompt_tokens: int, rng: np.random.Generator
) -> Workload:
    """Fresh prompts with `samples` siblings each, the last one with fewer where the number asks for it.

    The history has EARLIER_EPOCHS epochs of the same prompts, all siblings of each.
    """
    prompts = -(-requests // samples)
    drawn = draw(source, (EARLIER_EPOCHS + 1, prompts, samples), rng)
    group = np.repeat(np.arange(prompts), samples)[:requests]
    sample = np.tile(np.arange(samples), prompts)[:requests]
    keys = [f"p{prompt}" for prompt in range(prompts)]

    def earlier() -> Observations:
        before = drawn[:EARLIER_EPOCHS]
        epoch, key, _ = np.indices(before.shape)
        return Observations.from_lengths(
            keys,
            key.reshape(-1),
            before.reshape(-1),
            max_tokens=source.max_tokens,
            censored=before.reshape(-1) >= source.max_tokens,
            epoch=epoch.reshape(-1),
            prompt_tokens=prompt_tokens,
        )

    return Workload(
        ids=[f"p{g}#0/{s}" for g, s in zip(group.tolist(), sample.tolist(), strict=True)],
        keys=[keys[g] for g in group.tolist()],
        group=group,
        sample=sample,
        prompt_tokens=np.full(requests, prompt_tokens, dtype=np.int64),
        lengths=drawn[EARLIER_EPOCHS].reshape(-1)[:requests],
        max_tokens=source.max_tokens,
        history=earlier,
    )


def replay_trace(trace: Trace, requests: int, rng: np.random.Generator) -> Workload:
    """Prompts of a trace in random order, each with all its siblings; again from the start when all have had a turn.

    No trace has the same prompt in several epochs. In place of earlier epochs every request has a key of its own, under
    which the history has the lengths of its siblings, not its own; of many MOST_SIBLINGS.
    """
    sizes = np.array([len(siblings) for siblings in trace.lengths])
    rounds = -(-requests // int(sizes.sum()))
    order = np.concatenate([rng.permutation(len(sizes)) for _ in range(rounds)])
    order = order[: np.searchsorted(np.cumsum(sizes[order]), requests) + 1]
    turns = np.arange(len(order)) // len(sizes)
    chosen = np.repeat(np.arange(len(order)), sizes[order])[:requests]
    sample = np.concatenate([np.arange(size) for size in sizes[order].tolist()])[:requests]
    prompt = order[chosen]
    lengths = np.concatenate([trace.lengths[p] for p in order.tolist()])[:requests]
    named = list(zip(prompt.tolist(), sample.tolist(), turns[chosen].tolist(), strict=True))
    keys = [f"t{p}.{s}" for p, s, _ in named]
    seed = int(rng.integers(2**32))
    return Workload(
        ids=[f"t{p}#{turn}/{s}" for p, s, turn in named],
        keys=keys,
        group=chosen,
        sample=sample,
        prompt_tokens=trace.prompt_tokens[prompt],
        lengths=lengths,
        max_tokens=trace.max_tokens,
        history=lambda: _siblings(trace, keys, prompt, sample, seed),
    )


def _siblings(trace: Trace, keys: Sequence[str], prompt: np.ndarray, sample: np.ndarray, seed: int) -> Observations:
    """For each response the lengths of others of its prompt, all or MOST_SIBLINGS of them, under its key.

    keys: of the responses; prompt, sample: int64, which of the trace they are; some may be there several times.
    seed: of the choice.
    """
    rng = np.random.default_rng(seed)
    width = int(sample.max()) + 1
    responses, first = np.unique(prompt * width + sample, return_index=True)
    numbers, begins = np.unique(responses // width, return_index=True)
    lengths, tokens, counts = [], [], []
    for number, own in zip(numbers.tolist(), np.split(responses % width, begins[1:]), strict=True):
        siblings = trace.lengths[number]
        others = _others(own, len(siblings), rng)
        lengths.append(siblings[others].reshape(-1))
        tokens.append(np.full(others.size, trace.prompt_tokens[number]))
        counts.append(np.full(len(own), others.shape[1]))
    seen = np.concatenate(lengths)
    return Observations.from_lengths(
        [keys[i] for i in first.tolist()],
        np.repeat(np.arange(len(responses)), np.concatenate(counts)),
        seen,
        max_tokens=trace.max_tokens,
        censored=seen >= trace.max_tokens,
        prompt_tokens=np.concatenate(tokens),
    )


def _others(own: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """For each number in `own` (int64 [n], below size) others below size: all, or MOST_SIBLINGS at random; [n, k]."""
    if size - 1 <= MOST_SIBLINGS:
        others = np.arange(size - 1)
        return others + (others >= own[:, None])
    # Those that follow it in a circle of all: everyone has different ones, and is among as many others' as they.
    circle = rng.permutation(size)
    place = np.empty(size, dtype=np.int64)
    place[circle] = np.arange(size)
    return circle[(place[own][:, None] + 1 + np.arange(MOST_SIBLINGS)) % size]
