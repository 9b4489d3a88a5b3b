"""Counting: the prompt "17 - 43 :" asks for "17 18 19 … 43".

The prompt decides how long the right response is, and the lengths are heavy-tailed: most counts have a few numbers,
a few have ten times as many. `flexfloor train config.toml` takes its datasets and its reward from here.
"""

from __future__ import annotations

import random
from collections.abc import Collection

HIGHEST = 199
MEDIAN_NUMBERS, SPREAD, MOST_NUMBERS = 10, 1.0, 120
"""A count has a lognormal number of numbers: its median, the deviation of its logarithm, and where it is cut."""
TRAIN_PROMPTS, EVAL_PROMPTS = 256, 128


def solution(prompt: str) -> str:
    """The right response to a prompt, without the end of the text."""
    first, last = map(int, prompt.removesuffix(" :").split(" - "))
    return " ".join(map(str, range(first, last + 1)))


def draw_prompt(source: random.Random) -> str:
    numbers = min(MOST_NUMBERS, max(2, round(MEDIAN_NUMBERS * source.lognormvariate(0, SPREAD))))
    first = source.randint(0, HIGHEST + 1 - numbers)
    return f"{first} - {first + numbers - 1} :"


def distinct_prompts(count: int, seed: int, without: Collection[str] = ()) -> list[str]:
    """`count` different prompts, none of them in `without`."""
    source, found = random.Random(seed), dict.fromkeys(without)
    missing = len(found) + count
    while len(found) < missing:
        found.setdefault(draw_prompt(source))
    return list(found)[missing - count :]


def eval_set(prompts: int = EVAL_PROMPTS) -> list[dict[str, str]]:
    """The held-out rows: always the same ones, and never trained on, not even by warm_up.py."""
    return [{"prompt": prompt} for prompt in distinct_prompts(prompts, seed=2**31)]


def train_set(prompts: int = TRAIN_PROMPTS, seed: int = 0) -> list[dict[str, str]]:
    """Rows for GRPO, disjoint from `eval_set`."""
    held_out = [row["prompt"] for row in eval_set()]
    return [{"prompt": prompt} for prompt in distinct_prompts(prompts, seed, held_out)]


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """For every response, the share of it that is right: 0 to 1.

    Right are the numbers before the first mistake. The share is of the numbers that were asked for or of those that
    were written, whichever are more: a number too many costs as much as one that is missing.
    """
    return [share_right(solution(prompt), completion) for prompt, completion in zip(prompts, completions, strict=True)]


def share_right(wanted: str, written: str) -> float:
    asked, given = wanted.split(), written.split()
    pairs = zip(asked, given, strict=False)
    right = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(given)))
    return right / max(len(asked), len(given))
