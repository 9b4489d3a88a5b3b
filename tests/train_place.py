"""A place to train in, for tests of `flexfloor train`: a config file, and a task whose reward breaks off on demand."""

from __future__ import annotations

from pathlib import Path

from flexfloor.cli import main

MODULE = """
import os, random, signal
from pathlib import Path
import psutil

def rows(n=4, begin="tell me"):
    return [{"prompt": f"{begin} {i}", "n": i} for i in range(n)]

def reward(completions, trainer_state, n, **_):
    noise = random.random()
    what, _, step = os.environ.get("BREAK", "").partition(":")
    if what and trainer_state.global_step + 1 == int(step):
        if what == "raise":
            raise ValueError("out of ideas")
        if what == "nan":
            return [float("nan")] * len(n)
        if what == "none":
            return [None] * len(n)
        if what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if what == "kill":
            workers = [p for p in psutil.Process().children(recursive=True) if not p.children()]
            max(workers, key=lambda p: p.create_time()).kill()
        if what == "full":
            folder = Path(os.environ["OUT"], f"checkpoint-{step}")
            folder.mkdir()
            (folder / "optimizer.pt").symlink_to("/dev/full")
    return [(sum(map(ord, c)) % 7 + noise * i) / 7 for i, c in enumerate(completions)]
"""
CONFIG = """
workers = 2
[engine]
worker_memory = "96MiB"
[task]
train = "break_task:rows"
reward = "break_task:reward"
[trl]
per_device_train_batch_size = 4
num_generations = 2
max_completion_length = 8
max_steps = 5
save_steps = 2
learning_rate = 1e-3
beta = 0.05
gradient_checkpointing = false
"""


class Place:
    """A folder with a config file and a task module beside it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.config = folder, model, folder / "train.toml"
        self.config.write_text(CONFIG)
        (folder / "break_task.py").write_text(MODULE)

    def arguments(self, name: str, *options: str) -> list[str]:
        changes = [f"model={self.model}", f"output={self.folder / name}"]
        return ["train", str(self.config), *(part for change in changes for part in ("--set", change)), *options]

    def train(self, name: str, *options: str) -> int:
        return main(self.arguments(name, *options))
