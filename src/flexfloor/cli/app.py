"""Commands, their options, and how each way to end becomes an exit code and at most one line on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from flexfloor.cli.options import load_settings, option
from flexfloor.cli.signals import Stopped, stoppable
from flexfloor.errors import FlexFloorError

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
def rollout(
    model: Annotated[Path | None, option("model", "DIR")] = None,
    prompts: Annotated[Path | None, option("prompts", "FILE")] = None,
    out: Annotated[Path | None, option("out", "FILE")] = None,
    summary: Annotated[Path | None, option("summary", "FILE")] = None,
    ledger: Annotated[Path | None, option("ledger", "FILE")] = None,
    workers: Annotated[int | None, option("workers")] = None,
    policy: Annotated[str | None, option("policy")] = None,
    knowledge: Annotated[str | None, option("knowledge")] = None,
    max_slowdown: Annotated[float | None, option("max_slowdown")] = None,
    min_workers: Annotated[int | None, option("min_workers")] = None,
    order: Annotated[str | None, option("order", "arrival|shuffle:SEED")] = None,
    force_lengths: Annotated[str | None, option("force_lengths", "FILE|prompts")] = None,
    samples: Annotated[int | None, option("samples")] = None,
    max_tokens: Annotated[int | None, option("max_tokens")] = None,
    temperature: Annotated[float | None, option("temperature")] = None,
    top_p: Annotated[float | None, option("top_p")] = None,
    top_k: Annotated[int | None, option("top_k")] = None,
    stop: Annotated[list[str] | None, option("stop")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    step: Annotated[int | None, option("step")] = None,
    worker_memory: Annotated[str | None, option("worker_memory", "SIZE")] = None,
    threads_per_worker: Annotated[int | None, option("threads_per_worker")] = None,
    device: Annotated[str | None, option("device")] = None,
    dtype: Annotated[str | None, option("dtype")] = None,
    numerics: Annotated[str | None, option("numerics")] = None,
    transport: Annotated[str | None, option("transport")] = None,
    worker_timeout: Annotated[float | None, option("worker_timeout", "SECONDS")] = None,
    launcher: Annotated[str | None, option("launcher", "NAME")] = None,
    release: Annotated[str | None, option("release")] = None,
    page_tokens: Annotated[int | None, option("page_tokens")] = None,
    max_batch: Annotated[int | None, option("max_batch")] = None,
    prefill_tokens: Annotated[int | None, option("prefill_tokens")] = None,
    pace: Annotated[float | None, option("pace", "SCALE")] = None,
    profile: Annotated[str | None, option("profile", "NAME|FILE")] = None,
    chunk: Annotated[int | None, option("chunk")] = None,
    quiet: Annotated[bool | None, option("quiet")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="TOML file with any of these options as keys (max_tokens = 64); the command line wins",
        ),
    ] = None,
) -> Command:
    """Generate the responses to a file of prompts, once, and account for the time of every worker."""
    given = {name: value for name, value in locals().items() if name != "config" and value not in (None, [])}

    def run() -> int:
        from flexfloor.cli.rollout import run_rollout

        return run_rollout(load_settings(config, given))

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
