"""The report: one HTML file that needs nothing else, from one or more ledgers.

plotly.js, styles and all data are in the file; a content security policy keeps it from asking any network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flexfloor.ledger.comparison import choose_baseline, compare_summaries
from flexfloor.ledger.events import refusing
from flexfloor.outputs import atomic_write
from flexfloor.report import html_charts, html_lengths, html_memory
from flexfloor.report.html_run import Run, name_runs, read_run, same_requests
from flexfloor.report.html_words import (
    Entry,
    at_time,
    decision_log,
    key_figures,
    plural,
    significant,
    warnings_of,
    where_times_come_from,
)
from flexfloor.report.timeline import Timeline
from flexfloor.report.words import format_count, shorten_name
from flexfloor.world.memory import format_bytes

_MOST_PLOTS = 8  # workers that get a chart of their memory each
_MOST_LISTED = 64  # workers in the table
_MOST_TOLD = 400  # decisions in the log
_MOST_UNFOLDED, _MOST_LANES = 4, 8  # rollouts that are shown whole, and whose Gantt charts stand below each other

_STATE_WORDS = {"idle": "idle but occupied", "stall": "stall (resize or move)", "planning": "planning (driver)"}

Chart = dict[str, Any]
"""What the template shows in the place of a figure: `id`, `title`, `about`, `height` (pixels)."""


def write_report(out: Path, ledgers: Sequence[Path]) -> list[Path]:
    """The report on ledgers, at least one, in this order. Returns those that are incomplete. Raises InputError naming
    a file that is none."""
    runs = [read_run(path) for path in ledgers]
    names = name_runs([run.name for run in runs], ledgers)
    with refusing(", ".join(map(str, ledgers[:3])) + (", …" if len(ledgers) > 3 else "")):
        content = render_report([replace(run, name=name) for run, name in zip(runs, names, strict=True)])
    with atomic_write(out) as file:
        file.write(content)
    return [path for path, run in zip(ledgers, runs, strict=True) if not run.summary.complete]


@dataclass
class _Page:
    """The figures of a page by the ids of their places."""

    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, figure: Any, title: str, about: str = "") -> Chart:
        name = f"chart-{len(self.figures)}"
        self.figures[name] = json.loads(figure.to_json())
        return {"id": name, "title": title, "about": about, "height": figure.layout.height}


def render_report(runs: Sequence[Run]) -> str:
    """The file's content. runs: at least one, each with a name of its own."""
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    templates = Environment(
        loader=PackageLoader("flexfloor.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "seconds": at_time,
        "count": format_count,
        "size": format_bytes,
        "short": shorten_name,
        "significant": significant,
    }
    page = _Page()
    longest = max(run.line.end_s for run in runs)
    return templates.get_template("report.html.j2").render(
        title=f"Rollout: {shorten_name(runs[0].name, 80)}" if len(runs) == 1 else f"{len(runs)} rollouts compared",
        comparison=_comparison(runs, page) if len(runs) > 1 else None,
        runs=[_run_parts(run, page, longest) for run in runs],
        colours=html_charts.STATE_COLOURS,
        memory_colours=html_memory.MEMORY_COLOURS,
        figures=page.figures,
        plotly=get_plotlyjs(),
        version=version("flexfloor"),
    )


def _comparison(runs: Sequence[Run], page: _Page) -> dict[str, Any]:
    """The baseline is the first static one, else the first; of those that ran to their end, if any did."""
    summaries = {run.name: run.summary for run in runs}
    whole = [run for run in runs if run.summary.complete] or runs
    policies = [run.summary.policy for run in whole]
    baseline = whole[policies.index(choose_baseline(policies))].name
    origins = {where_times_come_from(run.summary) for run in runs}
    shown = list(summaries.values())
    lines = {run.name: run.line for run in runs if run.summary.iterations}
    same = same_requests(runs)
    alike = same and len({s.seed for s in shown}) == 1
    return {
        "ratios": same,
        "baseline": baseline,
        "rows": [(row, summaries[row.policy]) for row in compare_summaries(summaries, baseline)],
        "origin": origins.pop() if len(origins) == 1 else None,
        "hashed": alike and summaries[baseline].responses_sha256 is not None,
        "same_work": len({s.response_tokens for s in shown if s.complete}) <= 1,
        "folded": len(runs) > _MOST_UNFOLDED,
        "lanes": len(runs) <= _MOST_LANES,
        "charts": [] if same else list(_rollout_charts(runs, page)),
        "chart": page.add(html_charts.active_sets(lines), "Active set over time") if lines else None,
    }


def _rollout_charts(runs: Sequence[Run], page: _Page) -> Iterator[Chart]:
    """What there is to see where ratios would compare unlike work."""
    names, shown = [run.name for run in runs], [run.summary if run.summary.iterations else None for run in runs]
    for title, key, axis in (
        ("Response tokens", "response_tokens", "tokens"),
        ("Tokens per occupied worker-second", "occupied_rate", "tokens per worker-s"),
        ("Throughput", "throughput_tok_s", "tokens/s"),
        ("Post-finish share", "post_finish_share", "share of occupied time"),
    ):
        values = [None if summary is None else getattr(summary, key) for summary in shown]
        yield page.add(html_charts.by_rollout(names, values, axis), title)


def _run_parts(run: Run, page: _Page, longest_s: float) -> dict[str, Any]:
    """All that the template shows of a rollout."""
    summary, log = run.summary, decision_log(run.summary)
    origin, explained = where_times_come_from(summary)
    begun = summary.iterations > 0
    gantt = html_charts.gantt(run.line, run.rows(html_charts.MOST_ROWS), summary.resizes, longest_s)
    return {
        "name": run.name,
        "source": run.source,
        "summary": summary,
        "settings": run.settings,
        "told_settings": {k: _with_unit(k, v) for k, v in run.settings.items() if v is not None},
        "started_at": run.started_at.replace("T", " ").removesuffix("+00:00"),
        "origin": origin,
        "explained": explained,
        "warnings": list(warnings_of(summary)),
        "figures": key_figures(summary),
        "begun": begun,
        "states": list(_states(run.line)),
        "gantt": page.add(gantt, f"Where worker time went: {shorten_name(run.name)}") if begun else None,
        "crowd": list(_crowd_chart(run, page, longest_s)) if begun else [],
        "over_time": list(_time_charts(run, page)) if begun else [],
        "lengths": list(_length_charts(run, page)),
        "scores": dict(_scores(run)),
        "unscored": _why_unscored(run),
        "memory": list(_memory_charts(run, page)) if begun else [],
        "budget": run.memory and run.memory.budget,
        "each_memory": summary.workers <= _MOST_PLOTS,
        "log": _shorten(log),
        "log_left_out": max(0, len(log) - _MOST_TOLD),
        "workers": summary.workers_detail if summary.workers <= _MOST_LISTED else (),
    }


def _states(line: Timeline) -> Iterator[dict[str, Any]]:
    """Where worker time went; share: of occupied time."""
    seconds = line.seconds_by_state()
    occupied = sum(seconds.values()) - seconds["released"]
    for name, value in seconds.items():
        share = value / occupied if occupied > 0 and name != "released" else None
        yield {"name": name, "words": _STATE_WORDS.get(name, name), "worker_s": value, "share": share}


def _crowd_chart(run: Run, page: _Page, longest_s: float) -> Iterator[Chart]:
    """Where a row of the Gantt chart stands for several workers."""
    if run.summary.workers > html_charts.MOST_ROWS:
        yield page.add(html_charts.states_over_time(run.line, longest_s), "Workers by what they do")


def _time_charts(run: Run, page: _Page) -> Iterator[Chart]:
    about = "Waiting: not bound to a worker yet, or waiting on one for memory or a place in its batch."
    yield page.add(html_charts.activity(run.line), "Active set and live requests", about)
    about = "Response tokens per second; below, per worker that is occupied."
    yield page.add(html_charts.throughput(run.line), "Throughput", about)


def _length_charts(run: Run, page: _Page) -> Iterator[Chart]:
    if not len(run.tokens):
        return
    about = f"{plural(len(run.tokens), 'response')}, {plural(int(run.tokens.max()), 'token')} at most."
    if not run.summary.complete:
        about += " Those that ended before the run was cut off: the shorter ones."
    yield page.add(html_lengths.lengths(run.tokens, run.cut), "Response lengths", about)
    if (made := run.forecast) is None or not run.summary.complete:
        return
    below = (made.tokens[:, None] <= made.quantiles).mean(axis=0)
    about = "Responses no longer than each quantile of the forecast made before they began; above the diagonal, "
    about += "forecasts were too long."
    yield page.add(html_lengths.calibration(made.levels, below), "Forecast calibration", about)
    points = html_lengths.forecasts(made.at(0.5), made.at(0.1), made.at(0.9), made.tokens)
    yield page.add(points, "Forecasts and responses", "One point a response; of many, every so many.")


def _why_unscored(run: Run) -> str | None:
    """None where forecasts are shown."""
    if run.settings.get("knowledge") == "oracle":
        return "The policy knew all lengths: there was nothing to forecast."
    if run.forecast is not None and not run.summary.complete:
        return "Forecasts are not scored: the run was cut off, and of its responses only the shorter ones have ended."
    return None if run.forecast is not None else "The ledger has no forecasts to compare with what came out."


def _with_unit(name: str, value: Any) -> str:
    return format_bytes(value) if name == "worker_memory" and isinstance(value, int) else str(value)


def _scores(run: Run) -> Iterator[tuple[str, str]]:
    """What was known of lengths, and how good that was."""
    yield "knowledge of lengths", str(run.settings.get("knowledge", "unknown"))
    if (made := run.forecast) is None or not run.summary.complete:
        return
    # Here, because scipy takes longer to load than all the rest of the report.
    from flexfloor.world.lengths.metrics import score

    found = score(made.quantiles, made.tokens, levels=made.levels)
    told = ", ".join(f"{level:.0%}" for level in made.levels)
    yield f"pinball loss, mean over the quantiles {told}", f"{found.pinball:.3g} tokens"
    yield "in the central 50%", f"{found.coverage_50:.1%} of responses"
    yield "in the central 90%", f"{found.coverage_90:.1%} of responses"
    yield "rank correlation", f"{found.rank_correlation:.2f}"


def _memory_charts(run: Run, page: _Page) -> Iterator[Chart]:
    if (memory := run.memory) is None:
        return
    end_s, workers = run.line.end_s, run.summary.workers
    if workers <= _MOST_PLOTS:
        for worker in range(workers):
            yield page.add(html_memory.worker_memory(memory, worker, end_s), f"Worker {worker}")
        return
    yield page.add(html_memory.fleet_memory(memory, end_s), "All active workers")
    groups = run.rows(html_charts.MOST_ROWS)
    about = "Share of a worker's room that is in use" + (
        "; of each row, the fullest worker's." if len(groups) < workers else "."
    )
    share = html_memory.memory_share(memory, groups, end_s)
    yield page.add(share, "Room in use", about)


def _shorten(log: Sequence[Entry]) -> Sequence[Entry]:
    """The first and the last ones, where there are very many."""
    return log if len(log) <= _MOST_TOLD else [*log[: _MOST_TOLD // 2], *log[-_MOST_TOLD // 2 :]]
