"""`flexfloor rollout`: files → requests → the Python API → files. What other commands share of that stands here too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexfloor.cli.display import Display, make_display, print_summary, warn_of_overruns
from flexfloor.cli.trace import trace_ledger
from flexfloor.errors import FlexFloorError, InputError
from flexfloor.ledger.events import LedgerWriter
from flexfloor.outputs import check_outputs, decode_responses, write_json, write_responses
from flexfloor.policy import make_policy
from flexfloor.report.tensorboard import check_tensorboard, write_scalars
from flexfloor.settings import RolloutSettings, RunSettings
from flexfloor.world.lengths.base import check_oracle
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.lengths.store import load_history, remember
from flexfloor.world.profiles import load_profile

if TYPE_CHECKING:
    from flexfloor.fleet import Fleet
    from flexfloor.requests import Request, Response
    from flexfloor.world.lengths.observations import Observations


def run_rollout(settings: RolloutSettings) -> int:
    """One rollout as the settings say; writes responses, summary and ledger. Returns the exit code.

    Raises InputError before any process is started, WorkerFailedError when one of them fails.
    """
    files = output_files(settings)
    check_outputs({f"--{name}": path for name, path in files.items()} | history_file(settings), input_files(settings))
    check_tensorboard(settings.tensorboard)
    with make_display(settings.quiet) as show:
        ledger = LedgerWriter(files["ledger"], on_record=show.record)
        observed = check_policies([settings.policy], settings, show)
        work = read_work(settings, show)
        import flexfloor

        with launch(settings, work, show) as fleet:
            for name in files.keys() - {"ledger"}:  # of an earlier run: they would lie beside this one's ledger
                files[name].unlink(missing_ok=True)
            result = flexfloor.rollout(
                fleet,
                work.requests,
                policy=settings.policy,
                ledger=ledger,
                **rollout_arguments(settings, observed),
            )
    decode_responses(result.responses, work.tokenizer, work.requests)
    write_responses(files["out"], result.responses)
    write_json(files["summary"], result.summary.to_json())
    show.phase("done")
    warn_of_overruns(result.summary)
    print_summary(result.summary, {"responses": files["out"], "summary": files["summary"], "ledger": files["ledger"]})
    add_to_history(settings, work, result.responses)
    if settings.tensorboard is not None:
        write_scalars(settings.tensorboard, ledger.records)
    if settings.trace is not None:
        trace_ledger(files["ledger"], settings.trace)
    return 0


def check_policies(names: Sequence[str], settings: RunSettings, show: Display) -> Observations | None:
    """Refuse what a policy does not take before a worker is started. Returns what the history holds.

    Raises InputError.
    """
    observed = load_history(settings.history, settings.split)
    if observed is not None:
        show.phase(f"history of {len(observed)} responses")
    for name in names:
        make_policy(
            name,
            lengths=make_lengths(settings.knowledge, observed, split=settings.split),
            max_slowdown=settings.max_slowdown,
            min_workers=settings.min_workers,
            workers=settings.workers,
            profile=load_profile(settings.engine.resolved_profile),
        )
    return observed


def rollout_arguments(settings: RunSettings, observed: Observations | None) -> dict[str, Any]:
    """What every command passes on to `flexfloor.rollout`, besides policy, ledger and progress.

    observed: the history as it is now; to the file, the command adds by itself when responses are safe.
    """
    names = ("knowledge", "split", "max_slowdown", "min_workers", "order", "chunk")
    own = {name: getattr(settings, name) for name in names}
    return own | {"history": observed, "profile": settings.engine.resolved_profile}


def add_to_history(settings: RunSettings, work: Work, responses: Sequence[Response]) -> None:
    """The lengths of one rollout, where there is a history. Raises FlexFloorError."""
    if settings.history is None:
        return
    try:
        # Workers have read the weights once, from the checkpoint.
        remember(settings.history, work.requests, responses, split=settings.split, policy_version=0)
    except FlexFloorError as error:
        raise FlexFloorError(f"{error}; the history lacks this rollout") from None


@dataclass(frozen=True)
class Work:
    """What the files of a command came to. tokenizer: None where the model has none."""

    requests: list[Request]
    tokenizer: Any | None


def read_work(settings: RunSettings, show: Display) -> Work:
    """The requests that model, prompts and lengths make. Raises InputError."""
    show.phase("reading model and prompts")
    quiet_libraries()
    from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
    from flexfloor.lengths_file import force_lengths, read_lengths
    from flexfloor.prompts import load_tokenizer, read_prompts
    from flexfloor.requests import make_requests

    shape = inspect_checkpoint(settings.model, settings.engine.dtype).shape
    tokenizer = load_tokenizer(settings.model)
    if settings.sampling.stop and tokenizer is None:
        raise InputError(f"--stop needs a tokenizer and {settings.model} has none; leave it out or add the tokenizer")
    forced = settings.force_lengths
    prompts = read_prompts(
        settings.prompts,
        tokenizer,
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        need_max_tokens=forced == "prompts",
    )
    sampling = settings.sampling
    requests = make_requests(prompts, samples=sampling.samples, sampling=sampling.to_params())
    if forced is not None:
        own = [r.sampling.max_tokens for r in requests]
        lengths = own if forced == "prompts" else read_lengths(Path(forced), requests)
        requests = force_lengths(requests, lengths, max_context=shape.max_context)
    if settings.knowledge == "oracle":
        check_oracle(requests)
    show.phase(f"{len(requests)} requests from {len(prompts)} prompts")
    return Work(requests, tokenizer)


def launch(settings: RunSettings, work: Work, show: Display) -> Fleet:
    """The fleet that the settings describe. Raises InputError before any process is started."""
    from flexfloor.fleet import Fleet

    options = settings.engine.model_dump()
    return Fleet.launch(
        settings.model, workers=settings.workers, requests=work.requests, on_phase=show.phase, **options
    )


def input_files(settings: RunSettings) -> dict[str, Path]:
    """Option → file that must not be overwritten."""
    files = {"--prompts": settings.prompts, "--model": settings.model}
    if settings.force_lengths is not None and settings.force_lengths != "prompts":
        files["--force-lengths"] = Path(settings.force_lengths)
    return files


def history_file(settings: RunSettings) -> dict[str, Path]:
    """Option → file that is read and written."""
    return {} if settings.history is None else {"--history": settings.history}


def output_files(settings: RolloutSettings) -> dict[str, Path]:
    """Option name → file; summary and ledger lie next to the responses unless they are given."""
    folder = settings.out.parent
    return {
        "out": settings.out,
        "summary": settings.summary or folder / "summary.json",
        "ledger": settings.ledger or folder / "ledger.jsonl",
    } | ({} if settings.trace is None else {"trace": settings.trace})


def quiet_libraries() -> None:
    """Keep transformers from giving advice on stderr, which is ours; also in the workers, through the environment."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
