"""`flexfloor history`: look at a length history, move it, and see what its forecasts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexfloor.cli.display import format_count, print_table
from flexfloor.errors import InputError
from flexfloor.outputs import check_outputs
from flexfloor.world.lengths.exchange import export_history, import_history
from flexfloor.world.lengths.forecast import HistoryLengths
from flexfloor.world.lengths.metrics import forecast_quantiles, score_last_epoch
from flexfloor.world.lengths.model import LEAST_DRIFT, LengthModel, fit_model
from flexfloor.world.lengths.observations import Observations
from flexfloor.world.lengths.store import LengthHistory

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_LEVELS = (0.1, 0.5, 0.9, 0.99)
_MOST_SHOWN = 20


def show_history(file: Path) -> int:
    """What is in the file, and how much prompts and epochs say about lengths."""
    from flexfloor.world.memory import format_bytes

    with LengthHistory(file, create=False) as history:
        observed = history.load()
    table = _table("Length history", "", "")
    rows = {"file": f"{file} ({format_bytes(file.stat().st_size)})", "responses": format_count(len(observed))}
    if len(observed):
        rows |= _described(observed)
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(table)
    return 0


def _described(observed: Observations) -> dict[str, str]:
    tokens = observed.tokens
    model = fit_model(observed, float(np.log(max(int(observed.max_tokens.max()), 1))))
    quantiles = " / ".join(format_count(q) for q in np.quantile(tokens, [0.5, 0.9, 0.99, 1.0]))
    samplings = [observed.samplings[i] or "(not told)" for i in np.unique(observed.sampling).tolist()]
    return {
        "prompts": format_count(len(np.unique(observed.prompt))),
        "epochs": f"{format_count(len(np.unique(observed.epoch)))} (last {observed.epoch.max()})",
        "of evaluations": f"{observed.evaluation.mean():.1%}",
        "sampling": "; ".join(samplings[:3]) + (f"; {len(samplings) - 3} more" if len(samplings) > 3 else ""),
        "mean tokens": format_count(float(tokens.mean())),
        "median / p90 / p99 / most": quantiles,
        "cut by the limit": f"{observed.censored.mean():.1%}",
        "explained by the prompt": _explained(model),
        "change from epoch to epoch": _change(observed, model),
    }


def _explained(model: LengthModel) -> str:
    """As the responses themselves have it; forecasts begin with a guess, and leave it as responses come."""
    if model.between_seen is None:
        return "not known: it takes several prompts with several responses"
    share = model.between_seen / (model.between_seen + model.within)
    return f"{f'{share:.0%}' if share >= 0.01 else 'under 1%'} of the variance of log length"


def _change(observed: Observations, model: LengthModel) -> str:
    visits = np.unique(np.stack([observed.prompt, observed.epoch]), axis=1)
    if len(np.unique(visits[0])) == visits.shape[1]:
        return "not known: no prompt was seen in two epochs"
    least = model.drift <= LEAST_DRIFT**2
    return f"{'under ' if least else ''}{np.expm1(np.sqrt(model.drift)):.0%}"


def export_to(file: Path, out: Path) -> int:
    check_outputs({"--out": out}, {"FILE": file})
    with LengthHistory(file, create=False) as history:
        count = export_history(history, out)
    print(f"{format_count(count)} responses written to {out}")
    return 0


def import_from(file: Path, source: Path) -> int:
    if file.exists() and source.exists() and file.samefile(source):
        raise InputError(f"--from {source} is the history itself; name an exported file")
    made = not file.exists()
    try:
        with LengthHistory(file) as history:
            count = import_history(history, source)
    except BaseException:
        if made:  # a refused import leaves nothing behind
            file.unlink(missing_ok=True)
        raise
    print(f"{format_count(count)} responses added to {file}")
    return 0


def score_history(file: Path) -> int:
    """The newest epoch as the earlier ones would have forecast it."""
    with LengthHistory(file, create=False) as history:
        observed = history.load()
    try:
        scores = score_last_epoch(observed)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    names = ("forecast", "responses", "pinball loss", "in 50%", "in 90%", "below .9", "rank corr.", "width")
    whole, some = int((observed.epoch == observed.epoch.max()).sum()), scores["history"].responses
    title = "Forecasts of the last epoch"
    title += f" ({format_count(some)} of its {format_count(whole)} responses, evenly taken)" if some < whole else ""
    table = _table(title, *names)
    for name, own in scores.items():
        shares = (f"{value:.1%}" for value in (own.coverage_50, own.coverage_90, own.below_90))
        row = (format_count(own.responses), f"{own.pinball:.1f}", *shares, f"{own.rank_correlation:.2f}")
        table.add_row(name, *row, f"{own.sharpness:.2f}")
    print_table(table)
    return 0


def show_forecasts(file: Path, keys: Sequence[str], max_tokens: int | None) -> int:
    """What the next epoch's responses of these prompts are expected to come to; without any, those of the newest epoch.

    max_tokens: their limit; None: the largest one of the newest epoch.
    """
    from rich.text import Text

    with LengthHistory(file, create=False) as history:
        observed = history.load()
    if not len(observed):
        raise InputError(f"{file}: holds no responses to forecast from; name a history that has some")
    newest = observed.where(observed.epoch == observed.epoch.max())
    known = [newest.keys[i] for i in np.unique(newest.prompt).tolist()]
    shown = list(dict.fromkeys(keys)) or known[:_MOST_SHOWN]
    limit = max_tokens or int(newest.max_tokens.max())
    lengths = HistoryLengths(observed, split="eval" if newest.evaluation.all() else "train")
    lengths.add_keys(shown, float(limit), samplings={newest.samplings[i] for i in np.unique(newest.sampling)})
    quantiles = forecast_quantiles(lengths, np.arange(len(shown)), levels=np.array(_SHOWN_LEVELS))
    seen = dict(zip(observed.keys, np.bincount(observed.prompt, minlength=len(observed.keys)).tolist(), strict=True))
    names = (f"p{level * 100:.0f}" if level != 0.5 else "median" for level in _SHOWN_LEVELS)
    table = _table("Forecasts of the next epoch", "prompt", "seen", *names)
    for key, own in zip(shown, quantiles.tolist(), strict=True):
        table.add_row(Text(key), format_count(seen.get(key, 0)), *map(format_count, own))
    print_table(table)
    print(f"  response tokens, at most {format_count(limit)}; seen: responses in the history")
    if not keys and len(known) > len(shown):
        print(f"  {len(shown)} of {format_count(len(known))} prompts of the last epoch; name those to be shown")
    return 0


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table
