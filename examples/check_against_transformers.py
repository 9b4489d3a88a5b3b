"""Check the responses of a rollout against stock transformers: log-probabilities, greedy choices, `generate`.

    flexfloor rollout --model DIR --prompts FILE --out runs/out.jsonl --temperature 0
    python examples/check_against_transformers.py --model DIR --prompts FILE --responses runs/out.jsonl --temperature 0

Give the sampling options of the rollout again. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import flexfloor
from flexfloor.prompts import load_tokenizer, read_prompts


@dataclass(frozen=True)
class Agreement:
    """How far a rollout is from stock transformers.

    logprob: largest difference of a log-probability; logit_gap: largest distance of a greedy token's logit from the
    largest one; generated: share of greedy responses that `generate` gives too, token by token (None if not asked).
    """

    responses: int
    tokens: int
    logprob: float
    logit_gap: float
    generated: float | None

    @property
    def holds(self) -> bool:
        return self.logprob < 1e-4 and self.logit_gap < 1e-3 and (self.generated is None or self.generated >= 0.95)


@torch.inference_mode()
def compare(
    model: Path, requests: Sequence[flexfloor.Request], responses: Sequence[flexfloor.Response], generate: bool = True
) -> Agreement:
    """Teacher-force the responses through the stock model in float32."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logprob, gap, equal = 0.0, 0.0, []
    for request, response in zip(requests, responses, strict=True):
        prompt, tokens = list(request.prompt_tokens), torch.tensor(response.tokens)
        logits = stock(torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1].float()
        scaled = logits / (request.sampling.temperature or 1.0)
        expected = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
        logprob = max(logprob, float(np.abs(expected - response.logprobs).max()))
        if request.sampling.temperature == 0:
            own = logits.gather(1, tokens[:, None])[:, 0]
            gap = max(gap, float((logits.max(dim=-1).values - own).max()))
            if generate:
                ids = torch.tensor([prompt])
                out = stock.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=request.sampling.max_tokens,
                    do_sample=False,
                )
                equal.append(out[0, len(prompt) :].tolist() == response.tokens)
    share = sum(equal) / len(equal) if equal else None
    return Agreement(len(responses), sum(len(r.tokens) for r in responses), logprob, gap, share)


def read_responses(path: Path) -> list[flexfloor.Response]:
    """The responses of a `responses.jsonl`."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row["logprobs"] = np.array(row["logprobs"], dtype=np.float32)
        found.append(flexfloor.Response(**row))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--responses", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    sampling = flexfloor.SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    prompts = read_prompts(args.prompts, load_tokenizer(args.model))
    requests = flexfloor.make_requests(prompts, samples=args.samples, sampling=sampling)
    agreement = compare(args.model, requests, read_responses(args.responses))
    print(agreement)
    return 0 if agreement.holds else 1


if __name__ == "__main__":
    sys.exit(main())
