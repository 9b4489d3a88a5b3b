"""The requests of one simulated rollout, with the lengths they turn out to have and what was seen before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexfloor.requests import Request, SamplingParams
from flexfloor.simulate.distributions import LengthDistribution, draw
from flexfloor.simulate.traces import Trace
from flexfloor.world.lengths.observations import Observations

EARLIER_EPOCHS = 2
"""Epochs of a drawn scenario whose lengths are known to the history."""


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, siblings next to each other. One entry a request in all sequences.

    ids: request ids; keys: prompt keys, under which the history knows them. group: int64, equal for siblings.
    prompt_tokens, lengths: int64 tokens. max_tokens: the limit of every response. earlier: what the history has seen.
    """

    ids: Sequence[str]
    keys: Sequence[str]
    group: np.ndarray
    sample: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    max_tokens: int
    earlier: Observations

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
    before = drawn[:EARLIER_EPOCHS]
    epoch, key, _ = np.indices(before.shape)
    return Workload(
        ids=[f"p{g}#0/{s}" for g, s in zip(group.tolist(), sample.tolist(), strict=True)],
        keys=[keys[g] for g in group.tolist()],
        group=group,
        sample=sample,
        prompt_tokens=np.full(requests, prompt_tokens, dtype=np.int64),
        lengths=drawn[EARLIER_EPOCHS].reshape(-1)[:requests],
        max_tokens=source.max_tokens,
        earlier=Observations.from_lengths(
            keys,
            key.reshape(-1),
            before.reshape(-1),
            max_tokens=source.max_tokens,
            censored=before.reshape(-1) >= source.max_tokens,
            epoch=epoch.reshape(-1),
            prompt_tokens=prompt_tokens,
        ),
    )


def replay_trace(trace: Trace, requests: int, rng: np.random.Generator) -> Workload:
    """Prompts of a trace in random order, each with all its siblings; again from the start when all have had a turn.

    No trace has the same prompt in several epochs. In place of earlier epochs every request has a key of its own, under
    which the history has the lengths of its siblings, not its own.
    """
    order: list[int] = []
    sizes = np.array([len(siblings) for siblings in trace.lengths])
    turns: list[int] = []
    while sizes[order].sum() < requests:
        turns += [len(turns) // len(sizes)] * len(sizes)
        order += rng.permutation(len(sizes)).tolist()
    chosen = np.repeat(np.arange(len(order)), sizes[order])[:requests]
    sample = np.concatenate([np.arange(sizes[prompt]) for prompt in order])[:requests]
    prompt = np.array(order)[chosen]
    lengths = np.concatenate([trace.lengths[p] for p in order])[:requests]
    named = list(zip(prompt.tolist(), sample.tolist(), chosen.tolist(), strict=True))
    return Workload(
        ids=[f"t{p}#{turns[c]}/{s}" for p, s, c in named],
        keys=[f"t{p}.{s}" for p, s, _ in named],
        group=chosen,
        sample=sample,
        prompt_tokens=trace.prompt_tokens[prompt],
        lengths=lengths,
        max_tokens=trace.max_tokens,
        earlier=_siblings(trace, sorted(set(prompt.tolist()))),
    )


def _siblings(trace: Trace, prompts: Sequence[int]) -> Observations:
    """For each response of these prompts the lengths of the others, under the key of the response."""
    keys: list[str] = []
    key, lengths, tokens = [], [], []
    for prompt in prompts:
        own = trace.lengths[prompt]
        responses, siblings = np.nonzero(~np.eye(len(own), dtype=bool))
        key.append(responses + len(keys))
        lengths.append(own[siblings])
        tokens.append(np.full(len(siblings), trace.prompt_tokens[prompt]))
        keys += [f"t{prompt}.{sample}" for sample in range(len(own))]
    seen = np.concatenate(lengths)
    return Observations.from_lengths(
        keys,
        np.concatenate(key),
        seen,
        max_tokens=trace.max_tokens,
        censored=seen >= trace.max_tokens,
        prompt_tokens=np.concatenate(tokens),
    )
