"""Commands, their options, and how each way to end becomes an exit code and at most one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from flexfloor.cli.options import load_settings, parse_settings, takes
from flexfloor.cli.signals import Stopped, stoppable
from flexfloor.errors import FlexFloorError
from flexfloor.settings import CompareSettings, RolloutSettings, SimulateSettings

app = typer.Typer(
    help="Elastic expert-parallel rollouts for reinforcement-learning post-training of mixture-of-experts models.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

# Typer brings a copy of click's exceptions in some releases and uses click's own in others.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Command = Callable[[], int]
"""What a command returns to `main`: the work, to be done outside of the option parser, and its exit code."""


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"flexfloor {version('flexfloor')}")
        except PackageNotFoundError:
            print("flexfloor (not installed)")
        raise typer.Exit


@app.callback()
def flexfloor(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@takes(RolloutSettings)
def rollout(config: Path | None, given: dict[str, Any]) -> Command:
    """Generate the responses to a file of prompts, once, and account for the time of every worker."""

    def run() -> int:
        from flexfloor.cli.rollout import run_rollout

        return run_rollout(load_settings(config, given))

    return run


@app.command()
@takes(CompareSettings)
def compare(config: Path | None, given: dict[str, Any]) -> Command:
    """Run the same requests under several policies and compare them. Exit code 1 if their responses differ."""

    def run() -> int:
        from flexfloor.cli.compare import run_compare

        return run_compare(parse_settings(CompareSettings, config, given))

    return run


@app.command()
@takes(SimulateSettings)
def simulate(config: Path | None, given: dict[str, Any]) -> Command:
    """Simulate policies in virtual time, on a scenario or a trace of lengths, and compare them."""

    def run() -> int:
        from flexfloor.cli.simulate import run_simulate

        return run_simulate(parse_settings(SimulateSettings, config, given))

    return run


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option("--model", metavar="DIR", help="a checkpoint to look at too")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="most workers to work out memory for")] = 4,
) -> Command:
    """Show what this machine can run. Exit code 0 if a rollout on the CPU can, 1 if a check failed."""

    def run() -> int:
        from flexfloor.doctor import run_doctor

        return run_doctor(model, workers)

    return run


history = typer.Typer(
    help="Look at a length history, export and import it, and score its forecasts.",
    rich_markup_mode=None,
)
app.add_typer(history, name="history")
HistoryFile = Annotated[Path, typer.Argument(metavar="FILE", help="the length history", show_default=False)]


@history.command("show")
def history_show(file: HistoryFile) -> Command:
    """Show what the history holds, and how much prompts and epochs say about lengths."""

    def run() -> int:
        from flexfloor.cli.history import show_history

        return show_history(file)

    return run


@history.command("export")
def history_export(
    file: HistoryFile,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="JSONL, or Parquet if named .parquet")],
) -> Command:
    """Write every observed response to a file."""

    def run() -> int:
        from flexfloor.cli.history import export_to

        return export_to(file, out)

    return run


@history.command("import")
def history_import(
    file: HistoryFile,
    source: Annotated[Path, typer.Option("--from", metavar="FILE", help="an exported JSONL or .parquet file")],
) -> Command:
    """Add the responses of an exported file, all or none; the history is made if there is none."""

    def run() -> int:
        from flexfloor.cli.history import import_from

        return import_from(file, source)

    return run


@history.command("score")
def history_score(file: HistoryFile) -> Command:
    """Forecast the newest epoch from the earlier ones and show how good that is, beside knowing less."""

    def run() -> int:
        from flexfloor.cli.history import score_history

        return score_history(file)

    return run


@app.command()
def calibrate(
    ledgers: Annotated[list[Path], typer.Argument(metavar="LEDGER...", help="of runs on real workers, without --pace")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the profile, a .toml file")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="NAME|FILE", help="profile for what the runs do not tell [default: cpu or h200]"
        ),
    ] = None,
    cores: Annotated[
        float | None,
        typer.Option("--cores", min=1, metavar="N", help="processors that all workers share [default: this machine's]"),
    ] = None,
) -> Command:
    """Fit a device profile to the iterations of real runs, and state its error on iterations that it did not see."""

    def run() -> int:
        from flexfloor.cli.calibrate import run_calibrate

        return run_calibrate(ledgers, out, base, cores)

    return run


@app.command("profile-comm")
def profile_comm(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="the latency table, a .toml file")],
    workers: Annotated[str, typer.Option("--workers", metavar="N,N,...", help="sizes of groups")] = "2,4",
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N,N,...", help="rows of a worker; the fewest make the table")
    ] = "1,32,256",
    model_config: Annotated[
        str, typer.Option("--model-config", metavar="NAME|FILE", help="whose rows: a config.json, or a published model")
    ] = "qwen3-30b-a3b",
    base: Annotated[
        str | None, typer.Option("--base", metavar="NAME|FILE", help="write this profile with its latencies replaced")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="exchanges of each kind, of which the median")] = 200,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="auto: as in the config")] = "auto",
    transport: Annotated[str, typer.Option("--transport", metavar="auto|socket|gloo|nccl")] = "auto",
    launcher: Annotated[str, typer.Option("--launcher", metavar="NAME")] = "local",
    worker_timeout: Annotated[float, typer.Option("--worker-timeout", metavar="SECONDS")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress lines")] = False,
) -> Command:
    """Measure dispatch and combine by size of the group on this machine, for the latency table of a profile."""

    def run() -> int:
        from flexfloor.cli.profile_comm import run_profile_comm

        engine = {"device": device, "dtype": dtype, "transport": transport, "launcher": launcher}
        return run_profile_comm(
            out=out,
            workers=workers,
            tokens=tokens,
            model_config=model_config,
            base=base,
            repeats=repeats,
            quiet=quiet,
            engine=engine | {"worker_timeout": worker_timeout},
        )

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed, 2 bad input, 128 + signal when stopped."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with stoppable():
            # Without standalone mode the parser raises what it finds instead of printing several lines.
            command = typer.main.get_command(app)
            work = command.main(args=arguments or ["--help"], prog_name="flexfloor", standalone_mode=False)
            code = work() if callable(work) else int(work or 0)
            sys.stdout.flush()
            return code
    except FlexFloorError as error:
        return _fail(f"error: {error}", error.exit_code)
    except _UsageError as error:
        return _fail(f"error: {error.format_message()}", 2)
    except Stopped as stop:
        return _fail(stop.word, stop.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away. Python flushes once more at exit; give that a place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _fail(message: str, code: int) -> int:
    """One line on stderr."""
    try:
        print("flexfloor:", " ".join(message.split()), file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code
