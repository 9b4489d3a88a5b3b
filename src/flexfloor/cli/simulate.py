"""`flexfloor simulate`: policies in virtual time on scenarios or traces of lengths, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from flexfloor.cli.display import format_count, print_table
from flexfloor.errors import InputError
from flexfloor.outputs import check_outputs, write_json
from flexfloor.report.live_runs import show_runs
from flexfloor.settings import SimulateSettings

if TYPE_CHECKING:
    from rich.table import Table

    from flexfloor.simulate.results import Row, Spread
    from flexfloor.simulate.runs import Experiment

_RATIOS = {
    "static-spread": "to static-\nspread",
    "static-grouped": "to static-\ngrouped",
    "planned": "to\nplanned",
    "fixed:best": "to best\nfixed:N",
}
_LEGEND = (
    "tokens per occupied second / throughput, as ratios; with several seeds medians, and minima below them",
    "best fixed:N: in hindsight, for every seed; *: no row of the same workers, load and knowledge has more of both",
    "of ref., of LP: worker-seconds of the clairvoyant reference and of the lower bound, over those of the policy",
    "nothing here was measured: times come from the cost model of the device profile",
)


def run_simulate(settings: SimulateSettings) -> int:
    """All combinations of the settings; prints one table, writes `--out`. Returns the exit code.

    Raises InputError before anything is simulated.
    """
    outputs = {"--out": settings.out} if settings.out else {}
    inputs = {
        name: path
        for name, path in {"--trace": settings.trace, "--lengths": Path(settings.lengths)}.items()
        if path is not None and path.exists()
    }
    if settings.ledgers:
        outputs["--ledgers"] = settings.ledgers / "any.jsonl"  # the folder is what matters
    check_outputs(outputs, inputs)
    from flexfloor.simulate.results import make_rows, to_json
    from flexfloor.simulate.runs import Cell, count_runs, run_all

    experiment = make_experiment(settings)
    defined = experiment.scenario.definition
    cells = [
        Cell(workers, load, seed)
        for workers in settings.workers or (defined.workers,)
        for load in settings.load or (defined.load,)
        for seed in range(settings.first_seed, settings.first_seed + settings.seeds)
    ]
    for workers in dict.fromkeys(cell.workers for cell in cells):
        experiment.check_memory(workers)
    with show_runs(len(cells) * count_runs(experiment), quiet=settings.quiet) as show:
        on_record = None if settings.quiet else show.record
        runs = run_all(experiment, cells, jobs=settings.jobs, on_runs=show.done, on_begin=show.now, on_record=on_record)
    rows = make_rows(runs)
    if settings.out:
        versions = {name: version(name) for name in ("flexfloor", "numpy", "scipy", "numba")}
        write_json(settings.out, to_json(experiment, runs, rows, versions, settings.model_dump(mode="json")))
    print_table(make_table(rows, experiment.scenario.name, experiment.device.name))
    for line in _LEGEND:
        print(f"  {line}")
    if settings.out:
        print(f"  result  {settings.out}")
    if settings.ledgers:
        print(f"  ledgers  {settings.ledgers}")
    return 0


def make_experiment(settings: SimulateSettings) -> Experiment:
    """Raises InputError for a scenario, model, device or policy that is none."""
    from flexfloor.policy import make_policy
    from flexfloor.simulate.runs import BEST_FIXED, Experiment
    from flexfloor.simulate.scenarios import load_scenario
    from flexfloor.world.costs import load_profile
    from flexfloor.world.lengths.knowledge import KNOWLEDGE, make_lengths
    from flexfloor.world.model_config import shape_from_config

    scenario = load_scenario(settings.lengths, trace=settings.trace, workload=settings.workload)
    device = scenario.device(load_profile(settings.profile or scenario.definition.profile))
    for name in settings.knowledge:
        if name not in KNOWLEDGE:
            raise InputError(f"--knowledge: {name!r} is not known; there is {', '.join(KNOWLEDGE)}")
    for name in settings.policies:
        if name != BEST_FIXED:
            make_policy(
                name,
                lengths=make_lengths("none"),
                max_slowdown=0.0,
                min_workers=1,
                workers=min(settings.workers or (scenario.definition.workers,)),
                profile=device,
            )
    return Experiment(
        scenario=scenario,
        shape=shape_from_config(settings.architecture),
        device=device,
        policies=settings.policies,
        knowledge=settings.knowledge,
        max_slowdown=settings.max_slowdown,
        chunk=settings.chunk,
        max_batch=settings.max_batch,
        prefill_tokens=settings.prefill_tokens,
        ledgers=settings.ledgers,
    )


def make_table(rows: Sequence[Row], scenario: str, device: str) -> Table:
    """One line for each row and, with several seeds, one of minima below it."""
    from rich import box
    from rich.table import Table

    seeds = rows[0].seeds
    title = f"Simulated: {scenario} on {device}, {seeds} seed{'s' if seeds > 1 else ''}"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold", collapse_padding=True)
    shown = {name: head for name, head in _RATIOS.items() if any(name in row.ratios for row in rows)}
    named = [len({getattr(row, name) for row in rows} - {None}) > 1 for name in ("knowledge", "max_slowdown")]
    sweeps = len({(row.workers, row.load) for row in rows}) > 1
    table.add_column("\npolicy", no_wrap=True)
    if sweeps:
        table.add_column("workers\n×load", no_wrap=True)
    for head in (*shown.values(), "post-\nfinish", "pre-\nempt.", "re-\nsizes", "\nstall", "of\nref.", "of\nLP"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            _name(row, *named),
            *([f"{row.workers}×{row.load}"] if sweeps else []),
            *(_pairs(row.ratios.get(name), seeds) for name in shown),
            f"{row.post_finish_share.median:.0%}",
            format_count(row.preemptions),
            format_count(row.resizes),
            f"{row.stall_share.median:.1%}",
            "" if row.of_reference is None else f"{row.of_reference.median:.2f}",
            f"{row.of_bound.median:.2f}",
        )
    return table


def _name(row: Row, knowledge: bool, slowdown: bool) -> str:
    """The policy, where asked for with its knowledge and max_slowdown; a star if nothing beats it."""
    parts = [row.policy]
    if row.policy == "fixed:best":
        counts = {int(name.removeprefix("fixed:").replace("planned", str(row.workers))) for name in row.ran}
        parts = ["fixed:" + ",".join(map(str, sorted(counts)))]
    if knowledge and row.knowledge is not None:
        parts.append(row.knowledge)
    if slowdown and row.max_slowdown is not None:
        parts.append(_share(row.max_slowdown))
    return " ".join(parts) + (" *" if row.pareto else "")


def _share(value: float) -> str:
    """0.02 → '2%', 0.025 → '2.5%'."""
    return f"{value * 100:.6g}%"


def _pairs(ratios: tuple[Spread, Spread] | None, seeds: int) -> str:
    if ratios is None:
        return ""
    lines = ["/".join(f"{ratio.median:.2f}" for ratio in ratios)]
    if seeds > 1:
        lines.append("/".join(f"{ratio.least:.2f}" for ratio in ratios))
    return "\n".join(lines)
