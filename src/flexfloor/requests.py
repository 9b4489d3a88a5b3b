"""What is asked of a fleet and what comes back: requests, sampling parameters, responses, and their hashes."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from flexfloor.errors import InputError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one response are drawn.

    max_tokens: most response tokens; the engine clamps it to what the model's context leaves.
    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    ignore_eos: go on after the model's eos ids, up to max_tokens or another stop (for benchmarks).
    stop_token_ids: end the response, in addition to the model's own eos ids; the stop token is part of the response.
    stop: strings that end the response; the token that completes one is part of the response, the text ends before it.
    seed, step: with `request_id` and the position they determine every random number of the response.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}; give at least 1", settings=("max_tokens",))
        if not 0 <= self.temperature < float("inf"):
            told = f"temperature is {self.temperature}; give 0 (greedy) or a positive number"
            raise InputError(told, settings=("temperature",))
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number in (0, 1]", settings=("top_p",))
        if self.top_k < 0:
            told = f"top_k is {self.top_k}; give 0 (all tokens) or a positive number"
            raise InputError(told, settings=("top_k",))
        if any(not s for s in self.stop):
            raise InputError("stop holds an empty string; every response would end at once")

    @property
    def forced_length(self) -> int | None:
        """Tokens of the response where that is certain beforehand, up to the clamp to the context; else None."""
        return self.max_tokens if self.ignore_eos and not self.stop and not self.stop_token_ids else None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt sample to generate. `request_id` is `<prompt_key>#<occurrence>/<sample>`."""

    request_id: str
    prompt_key: str
    sample: int
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise InputError(f"request {self.request_id} has an empty prompt; give at least one token")


@dataclass(slots=True)
class Response:
    """A finished response.

    tokens: int token ids; logprobs: float32 [len(tokens)], log-softmax(logits / temperature) of each token.
    text: decoded tokens, None where the model has no tokenizer.
    """

    request_id: str
    prompt_key: str
    sample: int
    prompt_tokens: int
    tokens: list[int]
    logprobs: np.ndarray
    finish_reason: FinishReason
    text: str | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs), self.request_id

    def to_json(self) -> dict:
        """The response as one object of `responses.jsonl`."""
        return {
            "request_id": self.request_id,
            "prompt_key": self.prompt_key,
            "sample": self.sample,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "logprobs": [float(x) for x in self.logprobs],
            "text": self.text,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt before it is repeated into samples. key: dataset uid, or None for a hash of the tokens."""

    tokens: tuple[int, ...]
    key: str | None = None
    max_tokens: int | None = None


def hash_prompt(tokens: Sequence[int]) -> str:
    """Prompt key of a prompt without a uid: 16 hex digits of SHA-256 over little-endian int64 token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes()).hexdigest()[:16]


def make_requests(
    prompts: Iterable[Prompt | Sequence[int]], *, samples: int = 1, sampling: SamplingParams | None = None
) -> list[Request]:
    """Repeat every prompt `samples` times; siblings stand next to each other, in input order.

    Raises InputError when one prompt key names two different prompts.
    """
    if samples < 1:
        raise InputError(f"samples is {samples}; give at least 1")
    sampling = sampling or SamplingParams()
    seen: Counter[str] = Counter()
    known: dict[str, tuple[int, ...]] = {}
    requests = []
    for entry in prompts:
        prompt = entry if isinstance(entry, Prompt) else Prompt(tuple(entry))
        key = prompt.key if prompt.key is not None else hash_prompt(prompt.tokens)
        if known.setdefault(key, prompt.tokens) != prompt.tokens:
            raise InputError(f"uid {key!r} names two different prompts; a uid must stand for one prompt")
        occurrence = seen[key]
        seen[key] += 1
        own = sampling if prompt.max_tokens is None else replace(sampling, max_tokens=prompt.max_tokens)
        for sample in range(samples):
            requests.append(Request(f"{key}#{occurrence}/{sample}", key, sample, prompt.tokens, own))
    return requests


def shared_sampling(requests: Iterable[Request]) -> dict[str, int | None]:
    """`seed` and `step` where all requests agree on both, else None for each."""
    shared = {(r.sampling.seed, r.sampling.step) for r in requests}
    seed, step = shared.pop() if len(shared) == 1 else (None, None)
    return {"seed": seed, "step": step}


def shuffle(requests: Sequence[Request], order: str) -> list[Request]:
    """The requests in the order `arrival` or `shuffle:SEED` names. Raises InputError."""
    found = re.fullmatch(r"arrival|shuffle(?::(\d+))?", order)
    if not found:
        raise InputError(f"order {order!r} is not known; give 'arrival' or 'shuffle:SEED'")
    ordered = list(requests)
    if order != "arrival":
        random.Random(int(found[1] or 0)).shuffle(ordered)
    return ordered


def hash_responses(responses: Iterable[Response]) -> tuple[str, str]:
    """(responses_sha256, logprobs_sha256) over the responses sorted by request id.

    responses: for each, the UTF-8 request id, a zero byte, the tokens as little-endian int32, then the int32 -1.
    logprobs: for each, the raw little-endian float32 values.
    """
    tokens_hash, logprobs_hash = hashlib.sha256(), hashlib.sha256()
    for response in sorted(responses, key=lambda r: r.request_id):
        tokens_hash.update(response.request_id.encode() + b"\0")
        tokens_hash.update(np.asarray([*response.tokens, -1], dtype="<i4").tobytes())
        logprobs_hash.update(np.asarray(response.logprobs, dtype="<f4").tobytes())
    return tokens_hash.hexdigest(), logprobs_hash.hexdigest()
