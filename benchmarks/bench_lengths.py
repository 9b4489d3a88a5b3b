"""What learning response lengths is worth in a training: the same run with the history, a wrong one, and without one.

    make bench-lengths                       # about 15 minutes on two cores

First the counting example is trained until its prompts, and not chance, decide how long responses are. Then that model
is trained on for a few epochs, once for each knowledge. What is generated does not depend on it, so that all train the
same: the responses are equal, only where and with how many workers they are generated differs. An epoch is one pass
over the prompts; the first knows no prompt yet. Forecasts are those of each rollout before it began, held against its
real responses.

The fleet is small for its load, four workers with at most 16 requests each for 256 responses, so that it matters which
are taken first. Its iterations last what those of Qwen3-30B-A3B would on H200s, six times stretched. Tokens per
occupied worker-iteration are exact; seconds hold the real time of planning, and are to be compared within one run.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from flexfloor.cli.train import quiet_trainer
from flexfloor.errors import FlexFloorError
from flexfloor.integrations.trl.rollout import HISTORY_FILE
from flexfloor.integrations.trl.settings import TrainSettings, read_settings
from flexfloor.integrations.trl.training import train
from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import read_ledger
from flexfloor.world.lengths.metrics import Scores, score_epoch
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

KNOWLEDGE = ("history", "shuffled", "none")
TRAINING = ("trl.max_steps=48", "evaluate=false", "trl.save_strategy=no")
DEFAULTS = (
    "trl.max_steps=24", "trl.learning_rate=1e-5", "trl.save_strategy=no", "evaluate=false", "workers=4", "chunk=8",
    "engine.max_batch=16", "engine.pace=6", "engine.pace_model=qwen3-30b-a3b", "engine.profile=h200",
)  # fmt: skip
CHANGES = f"wins over the config and over these: {' '.join(DEFAULTS)}"


@dataclass
class Arm:
    """One training. summaries: of its training rollouts, by epoch."""

    summaries: dict[int, list[Summary]] = field(default_factory=lambda: defaultdict(list))
    observed: Observations | None = None

    def per_occupied(self, epoch: int, what: str) -> float:
        """Tokens per occupied worker-iteration or worker-second of an epoch, the way back of the workers included."""
        own = self.summaries[epoch]
        tokens = sum(s.response_tokens for s in own)
        if what == "iteration":
            return tokens / sum(s.occupied_iterations for s in own)
        return tokens / sum(s.occupied_worker_s + s.workers * (s.regrow_s or 0.0) for s in own)

    def hashes(self) -> list[str | None]:
        return [s.responses_sha256 for epoch in sorted(self.summaries) for s in self.summaries[epoch]]


def run_arm(settings: TrainSettings, config: Path, knowledge: str, console: Console) -> Arm:
    """Raises FlexFloorError."""
    output = settings.output / knowledge
    shutil.rmtree(output, ignore_errors=True)
    own = settings.model_copy(update={"output": output, "knowledge": knowledge})
    console.print(f"training with knowledge {knowledge} …")
    train(own, config)
    arm = Arm()
    with LengthHistory(output / HISTORY_FILE, create=False) as history:
        arm.observed = history.load()
    seen: set[str] = set()
    epoch = 0
    for file in sorted((output / "ledgers").glob("train-*.jsonl")):
        records = read_ledger(file)
        names = {f["request_id"].split("#")[0] for r in records if r["type"] == "chunk" for f in r["finished"]}
        if names & seen:  # a prompt comes again: a new pass has begun
            epoch, seen = epoch + 1, set()
        seen |= names
        arm.summaries[epoch].append(summarize(records))
    return arm


def scores_by_epoch(arm: Arm) -> dict[int, dict[str, list[Scores]]]:
    """Forecasts of every rollout but the first, by epoch and by what they knew."""
    assert arm.observed is not None
    observed = arm.observed.where(~arm.observed.evaluation)
    rollouts = np.unique(observed.epoch).tolist()
    epochs = [epoch for epoch in sorted(arm.summaries) for _ in arm.summaries[epoch]]
    found: dict[int, dict[str, list[Scores]]] = defaultdict(lambda: defaultdict(list))
    for number, (rollout, epoch) in enumerate(zip(rollouts, epochs, strict=True)):
        if number:
            for knowledge, scores in score_epoch(observed, rollout).items():
                found[epoch][knowledge].append(scores)
    return found


def forecast_table(found: dict[int, dict[str, list[Scores]]]) -> Table:
    table = Table(
        title="Forecasts of the rollouts before they began, mean over an epoch's rollouts", title_justify="left"
    )
    for name in ("epoch", "forecast from", "pinball loss", "rank corr.", "below .9", "in 90%"):
        table.add_column(name, justify="left" if name == "forecast from" else "right", no_wrap=True)
    for epoch, by_knowledge in found.items():
        for knowledge, scores in by_knowledge.items():
            values = [
                f"{statistics.mean(getattr(s, name) for s in scores):.3g}"
                for name in ("pinball", "rank_correlation", "below_90", "coverage_90")
            ]
            table.add_row(str(epoch + 1), knowledge, *values)
    return table


def cost_table(arms: dict[str, Arm], epochs: Sequence[int]) -> Table:
    title = "Tokens per occupied worker-iteration and worker-second; ratios to the same epoch without history"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("epoch", *(f"{k} / it." for k in arms), *(f"{k} / s" for k in arms)):
        table.add_column(name, justify="right", no_wrap=True)
    for epoch in epochs:
        rates = [f"{arm.per_occupied(epoch, what):.4g}" for what in ("iteration", "s") for arm in arms.values()]
        table.add_row(str(epoch + 1), *rates)
    if "none" in arms:
        for epoch in epochs:
            gains = [
                arm.per_occupied(epoch, what) / arms["none"].per_occupied(epoch, what)
                for what in ("iteration", "s")
                for arm in arms.values()
            ]
            table.add_row(f"{epoch + 1} to none", *(f"{gain:.3f}" for gain in gains))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/counting/config.toml"))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=CHANGES,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/lengths"))
    parser.add_argument("--knowledge", nargs="+", choices=KNOWLEDGE, default=list(KNOWLEDGE))
    args = parser.parse_args(arguments)
    console = Console()
    quiet_trainer()
    trained = args.out / "trained"
    try:
        if not (trained / "model").is_dir():
            console.print("training the model …")
            shutil.rmtree(trained, ignore_errors=True)
            train(read_settings(args.config, [*TRAINING, f"output={str(trained)!r}"]), args.config)
        model = f"model={str(trained / 'model')!r}"
        settings = read_settings(args.config, [model, *DEFAULTS, *args.set, f"output={str(args.out)!r}"])
        arms = {name: run_arm(settings, args.config, name, console) for name in args.knowledge}
    except FlexFloorError as error:
        print(f"bench_lengths: {error}", file=sys.stderr)
        return error.exit_code
    first = next(iter(arms.values()))
    epochs = sorted(first.summaries)
    console.print(forecast_table(scores_by_epoch(first)))
    console.print(cost_table(arms, epochs))
    same = all(arm.hashes() == first.hashes() for arm in arms.values())
    console.print(f"responses of all trainings {'equal' if same else 'DIFFER'} ({len(first.hashes())} rollouts)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
