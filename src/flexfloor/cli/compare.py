"""`flexfloor compare`: the same requests under several policies, on one fleet, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flexfloor.cli.display import format_count, make_display, print_table, warn_of_overruns
from flexfloor.cli.rollout import (
    add_to_history,
    check_policies,
    history_file,
    input_files,
    launch,
    read_work,
    rollout_arguments,
)
from flexfloor.cli.trace import trace_ledger
from flexfloor.errors import FlexFloorError
from flexfloor.ledger.accounting import Summary
from flexfloor.ledger.comparison import ComparisonRow, choose_baseline, compare_summaries
from flexfloor.ledger.events import LedgerWriter
from flexfloor.outputs import check_outputs, write_json
from flexfloor.report.tensorboard import check_tensorboard, write_scalars
from flexfloor.settings import CompareSettings

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.requests import Response


TRACE = "trace.json.gz"


def run_compare(settings: CompareSettings) -> int:
    """One rollout for each policy; writes their summaries and ledgers, comparison and report. Returns the exit code.

    Raises InputError before any process is started, FlexFloorError when responses differ that must not.
    """
    names = settings.policies
    folders = {name: settings.out_dir / name.replace(":", "-") for name in names}
    outputs = {"--out-dir": settings.out_dir / "comparison.json"}
    files = ["summary.json", "ledger.jsonl", *([TRACE] if settings.traces else [])]
    for name, folder in folders.items():
        outputs |= {f"--out-dir ({name}, {file})": folder / file for file in files}
    outputs["--out-dir (report)"] = settings.out_dir / "report.html"
    check_outputs(outputs | history_file(settings), input_files(settings))
    check_tensorboard(settings.tensorboard)
    baseline = choose_baseline(names)
    summaries: dict[str, Summary] = {}
    ledgers: dict[str, LedgerWriter] = {}
    responses: list[Response] = []
    with make_display(settings.quiet) as show:
        observed = check_policies(names, settings, show)
        work = read_work(settings, show)
        import flexfloor
        from flexfloor.report.html import write_report

        with launch(settings, work, show) as fleet:
            for file in ("--out-dir", "--out-dir (report)"):  # of an earlier run
                outputs[file].unlink(missing_ok=True)
            for name, folder in folders.items():
                show.begin_rollout(name)
                ledgers[name] = LedgerWriter(folder / "ledger.jsonl", on_record=show.record)
                result = flexfloor.rollout(
                    fleet,
                    work.requests,
                    policy=name,
                    ledger=ledgers[name],
                    **rollout_arguments(settings, observed),
                )
                summaries[name] = result.summary
                show.end_rollout(result.summary)
                if name == baseline:
                    responses = result.responses
                write_json(folder / "summary.json", summaries[name].to_json())
    rows = compare_summaries(summaries)
    knowledge = settings.knowledge if settings.knowledge != "auto" else "none" if observed is None else "history"
    told = {"knowledge": knowledge, "history_responses": len(observed or ())}
    write_json(outputs["--out-dir"], _to_json(rows, summaries[baseline], baseline) | told)
    show.phase("done")
    for summary in summaries.values():
        warn_of_overruns(summary)
    print_table(_table(rows, baseline))
    if any(row.pace_valid is False for row in rows):
        print("  ! times are not valid: the machine could not keep the pace; raise --pace")
    print(f"  * tokens and throughput as ratios to {baseline}; bringing workers back (regrow) counts as occupied")
    print(f"  comparison  {outputs['--out-dir']}")
    write_report(outputs["--out-dir (report)"], [folder / "ledger.jsonl" for folder in folders.values()])
    print(f"  report      {outputs['--out-dir (report)']}")
    differing = [row.policy for row in rows if not row.equal]
    if differing and summaries[baseline].numerics == "bitwise":
        raise FlexFloorError(f"numerics is bitwise, but responses differ from {baseline}: {', '.join(differing)}")
    add_to_history(settings, work, responses)  # once: the policies answered the same requests
    if settings.tensorboard is not None:
        for ledger in ledgers.values():
            write_scalars(settings.tensorboard, ledger.records)
    for folder in folders.values() if settings.traces else ():
        trace_ledger(folder / "ledger.jsonl", folder / TRACE)
    return 0


def _to_json(rows: Sequence[ComparisonRow], base: Summary, baseline: str) -> dict[str, Any]:
    """The object of `comparison.json`."""
    return {
        "baseline": baseline,
        "equal": all(row.equal for row in rows),
        "workers": base.workers,
        "requests": base.requests,
        "response_tokens": base.response_tokens,
        "numerics": base.numerics,
        "pace": base.pace,
        "profile": base.profile,
        "model": base.model,
        "policies": [asdict(row) for row in rows],
    }


def _table(rows: Sequence[ComparisonRow], baseline: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Comparison", title_justify="left", title_style="bold", collapse_padding=True)
    table.add_column("\npolicy", no_wrap=True)
    for name in (
        "\niterations",
        "occupied\niterations",
        "tokens /\nocc. iter.",
        "\nwall",
        "through-\nput",
        "tokens /\nocc. s",
        "post-\nfinish",
        "preemp-\ntions",
        "\nresizes",
        "hashes\nequal",
    ):
        table.add_column(name, justify="right")
    base_valid = all(row.pace_valid is not False for row in rows if row.policy == baseline)
    for row in rows:
        own = "" if row.pace_valid is not False else " !"
        ratio = own if base_valid else " !"
        table.add_row(
            row.policy + (" *" if row.policy == baseline else ""),
            format_count(row.iterations),
            format_count(row.occupied_iterations),
            f"{row.tokens_per_occupied_iteration_ratio:.3f}",
            f"{row.wall_s:.2f} s{own}",
            f"{row.throughput_ratio:.3f}{ratio}",
            f"{row.tokens_per_occupied_s_with_regrow_ratio:.3f}{ratio}",
            f"{row.post_finish_share:.1%}{own}",
            format_count(row.preemptions),
            format_count(row.resizes),
            "yes" if row.equal else "no",
        )
    return table
