"""`flexfloor train`: a config file → a training run, with a line for every log step and a table at the end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexfloor.cli.display import Display, format_count, format_rate, make_display, print_table
from flexfloor.cli.rollout import quiet_libraries
from flexfloor.integrations.trl.settings import read_settings
from flexfloor.integrations.trl.training import train

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.integrations.trl.records import TrainResult


def run_train(config: Path, *, resume: bool, changes: Sequence[str], quiet: bool) -> int:
    """Train as the config file says. Returns the exit code.

    changes: `key=value` that win over the file. Raises InputError before any process is started or file written.
    """
    settings = read_settings(config, changes)
    quiet_trainer()
    with make_display(quiet or settings.quiet) as show:
        show.status("training")
        result = train(
            settings,
            config,
            changes=changes,
            resume=resume,
            tell=show.phase,
            on_log=lambda record: show_step(show, record),
            on_record=show.record,
        )
    show.phase("done")
    print_table(_totals(result))
    if result.epochs:
        print_table(_epochs(result))
    width = max(map(len, result.files))
    for what, path in result.files.items():
        print(f"  {what:<{width}}  {path}")
    return 0


def quiet_trainer() -> None:
    """Keep TRL and what it stands on from bars and advice on stderr, which is ours. Before they are loaded."""
    quiet_libraries()
    for name in ("TRL_EXPERIMENTAL_SILENCE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("ACCELERATE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorboard looks for TensorFlow
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def show_step(show: Display, record: dict[str, Any]) -> None:
    """The line of a log call; what it logged in full is in metrics.jsonl."""
    step = f"step {record['step']}/{record['steps']}"
    if "eval_reward" in record:
        show.phase(f"{step}  held out: reward {_number(record['eval_reward'])}")
    elif "reward" in record:
        parts = [step, f"reward {_number(record['reward'])}", f"loss {_number(record.get('loss'))}"]
        if (length := record.get("completions/mean_length")) is not None:
            parts.append(f"length {length:.1f}")
        if (rate := record.get("flexfloor/tokens_per_occupied_s_with_regrow")) is not None:
            parts.append(f"{format_rate(rate)} tokens per occupied s with regrow")
        if (seconds := record.get("flexfloor/step_s", record.get("step_time"))) is not None:
            parts.append(f"{seconds:.1f} s")
        show.phase("  ".join(parts))
        show.status(f"{step} done  {parts[1]}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _totals(result: TrainResult) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, title="Training", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps", format_count(result.steps))
    for when, reward in (("before", result.reward_before), ("after", result.reward_after)):
        if reward is not None:
            table.add_row(f"held-out reward {when}", _number(reward))
    return table


def _epochs(result: TrainResult) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Epochs", title_justify="left", title_style="bold")
    for name in ("epoch", "log steps", "reward", "tokens per occupied s with regrow", "per occupied iteration"):
        table.add_column(name, justify="right")
    for epoch in result.epochs:
        rates = (epoch.tokens_per_occupied_s_with_regrow, epoch.tokens_per_occupied_iteration)
        shown = ("" if rate is None else format_rate(rate) for rate in rates)
        table.add_row(str(epoch.epoch), str(epoch.steps), _number(epoch.reward), *shown)
    return table
