"""`flexfloor rollout`: files → requests → the Python API → files."""

from __future__ import annotations

import os
from pathlib import Path

from flexfloor.cli.display import ProgressLines, print_summary, warn_of_overruns
from flexfloor.errors import InputError
from flexfloor.outputs import check_outputs, decode_responses, write_json, write_responses
from flexfloor.policy.static import make_policy
from flexfloor.prompts import load_tokenizer, read_prompts
from flexfloor.requests import make_requests
from flexfloor.settings import RolloutSettings


def run_rollout(settings: RolloutSettings) -> int:
    """One rollout as the settings say; writes responses, summary and ledger. Returns the exit code.

    Raises InputError before any process is started, WorkerFailedError when one of them fails.
    """
    show = ProgressLines(settings.quiet)
    files = output_files(settings)
    check_outputs(
        {f"--{name}": path for name, path in files.items()},
        {"--prompts": settings.prompts, "--model": settings.model},
    )

    make_policy(settings.policy)  # refuses an unknown name before a worker is started
    show.phase("reading model and prompts")
    quiet_libraries()
    from flexfloor.fleets.engine.checkpoint import inspect_checkpoint

    shape = inspect_checkpoint(settings.model, settings.engine.dtype).shape
    tokenizer = load_tokenizer(settings.model)
    if settings.sampling.stop and tokenizer is None:
        raise InputError(f"--stop needs a tokenizer and {settings.model} has none; leave it out or add the tokenizer")
    prompts = read_prompts(settings.prompts, tokenizer, vocab_size=shape.vocab_size, max_context=shape.max_context)
    sampling = settings.sampling
    requests = make_requests(prompts, samples=sampling.samples, sampling=sampling.to_params())
    show.phase(f"{len(requests)} requests from {len(prompts)} prompts")

    import flexfloor

    options = settings.engine.model_dump()
    with flexfloor.Fleet.launch(
        settings.model, workers=settings.workers, requests=requests, on_phase=show.phase, **options
    ) as fleet:
        result = flexfloor.rollout(
            fleet,
            requests,
            policy=settings.policy,
            order=settings.order,
            chunk=settings.chunk,
            ledger=files["ledger"],
            on_progress=show.progress,
        )
    decode_responses(result.responses, tokenizer, requests)
    write_responses(files["out"], result.responses)
    write_json(files["summary"], result.summary.to_json())
    show.phase("done")
    warn_of_overruns(result.summary)
    print_summary(result.summary, {"responses": files["out"], "summary": files["summary"], "ledger": files["ledger"]})
    return 0


def output_files(settings: RolloutSettings) -> dict[str, Path]:
    """Option name → file; summary and ledger lie next to the responses unless they are given."""
    folder = settings.out.parent
    return {
        "out": settings.out,
        "summary": settings.summary or folder / "summary.json",
        "ledger": settings.ledger or folder / "ledger.jsonl",
    }


def quiet_libraries() -> None:
    """Keep transformers from giving advice on stderr, which is ours; also in the workers, through the environment."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
