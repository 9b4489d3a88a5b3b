#!/usr/bin/env python3
"""Write what the example trains with: a tiny random mixture of experts, and prompts as verl's datasets.

    python examples/verl/make_inputs.py --out runs/verl

A prompt is one message; `extra_info.index` is the number of its row, by which the length history knows the prompt
again in the next epoch. Takes seconds, offline.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tiny_model import make_tiny_model

SIZES: dict[str, Any] = {"hidden": 128, "layers": 2, "experts": 8, "top_k": 2, "intermediate": 64, "mean_tokens": 40}
TOPICS = ("the sea", "a train", "winter", "bread", "the moon", "a garden", "glass", "a river")


def prompts_of(split: str, count: int) -> list[dict[str, Any]]:
    """Rows as verl's RLHFDataset reads them."""
    return [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": f"{split} {index}: write about {TOPICS[index % len(TOPICS)]}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": split},
        }
        for index in range(count)
    ]


def main() -> None:
    import pandas

    parser = argparse.ArgumentParser(description="a tiny model and prompts for verl")
    parser.add_argument("--out", type=Path, required=True, help="folder; model and datasets in it are replaced")
    parser.add_argument("--train", type=int, default=32, help="training prompts")
    parser.add_argument("--val", type=int, default=8, help="prompts of validations")
    given = parser.parse_args()
    shutil.rmtree(given.out / "model", ignore_errors=True)
    make_tiny_model(given.out / "model", **SIZES)
    for split, count in (("train", given.train), ("val", given.val)):
        pandas.DataFrame(prompts_of(split, count)).to_parquet(given.out / f"{split}.parquet")


if __name__ == "__main__":
    main()
