"""Drawing the next token of each request, from random numbers that depend on the request and the position alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from flexfloor.errors import FlexFloorError
from flexfloor.requests import Request


def request_key(request: Request) -> int:
    """64 bits that stand for (seed, step, request id)."""
    text = f"{request.sampling.seed}/{request.sampling.step}/{request.request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (key, position): SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based
    generator. keys: uint64 [n]; positions: int64 [n], index of the token within its response; float64 [n]."""
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, requests: Sequence[Request], keys: np.ndarray, positions: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens and their log-probabilities.

    logits: [n, vocab]; requests: n, whose sampling parameters apply; keys: uint64 [n] by `request_key`;
    positions: int64 [n], index of the token to draw within its response.
    Returns tokens int64 [n] and logprobs float32 [n] = log-softmax(logits / temperature) before top-k and top-p
    (temperature 0: of the unscaled logits).
    """
    params = [r.sampling for r in requests]
    logits = logits.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        scale = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if bool(logprobs[:, 0].isnan().any()):  # one such logit makes the whole row so
        raise FlexFloorError("logits are not finite; the weights hold infinity or what is not a number")
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if len(drawn) < len(params):
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if drawn:
        points = torch.from_numpy(uniforms(keys[drawn], positions[drawn])).to(logits.device)
        cut = [i for i in drawn if params[i].top_p < 1 or 0 < params[i].top_k < logits.shape[1]]
        whole = logprobs if len(drawn) == len(params) else logprobs[drawn]
        tokens[drawn] = _invert(whole.exp(), points)
        if cut:
            tokens[cut] = _draw_cut(logprobs[cut], [params[i] for i in cut], points[[drawn.index(i) for i in cut]])
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """First index where the cumulative weight exceeds `points` times the total. weights: [n, m]; points: [n]."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = points * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    # Rounding may put the target on the total itself: then the last token with any weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(found, last)


def _draw_cut(logprobs: torch.Tensor, params: list, points: torch.Tensor) -> torch.Tensor:
    """Draw under top-k, then top-p: among the k likeliest, the smallest set that holds at least p of *their* weight."""
    weights, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    k = torch.tensor([p.top_k or weights.shape[1] for p in params], device=weights.device)
    weights = weights * (ranks < k[:, None])
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=weights.device)
    weights = weights * (before < p[:, None] * weights.sum(dim=-1, dtype=torch.float64)[:, None])
    return order.gather(1, _invert(weights, points)[:, None])[:, 0]
