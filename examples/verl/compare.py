#!/usr/bin/env python3
"""The same training under several policies of FlexFloor's rollout, side by side: verl's timings, our metrics, rewards.

python examples/verl/compare.py
python examples/verl/compare.py --policies static,release,flexfloor trainer.total_training_steps=5

Further arguments go to verl. All runs look for the end of a rollout equally often (sampler_kwargs.poll_interval).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from train_cpu import train

SHOWN = {
    "timing_s/gen": "gen s",
    "timing_s/step": "step s",
    "flexfloor/throughput_tok_s": "tok/s",
    "flexfloor/tokens_per_occupied_s_with_regrow": "tok/occupied s",
    "flexfloor/tokens_per_occupied_iteration": "tok/occ. iter.",
    "flexfloor/post_finish_share": "post-finish",
    "flexfloor/released_workers": "released",
    "critic/score/mean": "reward",
    "training/rollout_actor_probs_pearson_corr": "corr.",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="the example's training under several policies")
    parser.add_argument("--policies", default="static,flexfloor", help="with commas")
    parser.add_argument("--out", type=Path, default=Path("runs/verl/compare"), help="folder for logs and metrics")
    given, overrides = parser.parse_known_args()
    found = {}
    for policy in given.policies.split(","):
        folder = (given.out / policy).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        (folder / "length_history.sqlite").unlink(missing_ok=True)
        own = [f"actor_rollout_ref.rollout.custom.policy={policy}", f"trainer.default_local_dir={folder}"]
        if code := train([*own, "trainer.logger=[file]", *overrides], VERL_FILE_LOGGER_PATH=str(metrics)):
            return code
        found[policy] = [json.loads(line) for line in metrics.read_text().splitlines()]
    print("\n" + "".join(f"{word:>16}" for word in ("policy", "step", *SHOWN.values())))
    for steps in zip(*found.values(), strict=True):
        for policy, entry in zip(found, steps, strict=True):
            values = "".join(f"{entry['data'].get(name, float('nan')):16.4g}" for name in SHOWN)
            print(f"{policy:>16}{entry['step']:>16}{values}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
