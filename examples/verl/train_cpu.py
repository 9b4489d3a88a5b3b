#!/usr/bin/env python3
"""Train the example with verl's own trainer on a CPU, two workers, three steps. Further arguments go to verl.

python examples/verl/train_cpu.py
python examples/verl/train_cpu.py trainer.total_training_steps=8 actor_rollout_ref.rollout.custom.policy=static
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    # verl knows accelerators only: these make a CPU one of them. A run on GPUs needs none of it.
    "VERL_USE_EXTERNAL_MODULES": "flexfloor.integrations.verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def train(overrides: list[str], **environment: str) -> int:
    """Run verl from the root of the project, making model and datasets if they are missing. Returns its exit code."""
    root = HERE.parents[1]
    if not (root / "runs" / "verl" / "val.parquet").exists():
        subprocess.run([sys.executable, str(HERE / "make_inputs.py"), "--out", str(root / "runs/verl")], check=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(HERE), "--config-name", "tiny_cpu"]
    python_path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    metrics = {"VERL_FILE_LOGGER_PATH": str(root / "runs" / "verl" / "metrics.jsonl")}
    own = os.environ | ENVIRONMENT | metrics | {"PYTHONPATH": python_path} | environment
    # Ctrl-C reaches verl as well, which needs its time to end Ray; who waits for it must not be ended first.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run([*command, *overrides], cwd=root, env=own).returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
