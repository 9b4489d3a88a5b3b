"""Scenarios: population values worked out or integrated, not sampled, where the definition promises them."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from flexfloor.errors import InputError
from flexfloor.simulate import workload as workload_module
from flexfloor.simulate.distributions import Capped, Lognormal, draw
from flexfloor.simulate.runs import Cell, Experiment, run_cell
from flexfloor.simulate.scenarios import load_scenario, named_scenarios
from flexfloor.simulate.workload import EARLIER_EPOCHS, MOST_SIBLINGS, Workload
from flexfloor.world.costs import PROFILES
from flexfloor.world.model_config import shape_from_config

DRAWN = [name for name, values in named_scenarios().items() if values["kind"] != "trace"]
HEAD = "workload,step,dp_rank,prompt_index,input_tokens,sample_index,output_tokens"


def capped() -> Capped:
    source = load_scenario("deepcoder-like").definition.source  # type: ignore[union-attr]
    assert isinstance(source, Capped)
    return source


def test_the_long_scenario_has_exactly_its_population_values():
    source = capped()
    u = (np.arange(400_000) + 0.5) / 400_000
    exact = source.quantile(u)
    assert exact.mean() == pytest.approx(9380, rel=1e-6)
    assert source.quantile(np.array([0.5])) == pytest.approx(9960)
    assert (exact >= 16_000).mean() == pytest.approx(0.15, abs=3e-6)
    assert (np.diff(exact) >= 0).all()
    assert exact.min() >= 256
    lengths = source.lengths(np.linspace(-6, 6, 100_001))
    assert (lengths == 16_000).sum() == (ndtr(np.linspace(-6, 6, 100_001)) >= 0.85).sum()


def test_siblings_of_the_long_scenario_are_as_alike_as_it_says():
    """The correlation of log-lengths, by integrating over the shared part and the own parts of the normal numbers."""
    source = capped()
    nodes = np.linspace(-6, 6, 1201)
    weights = np.exp(-(nodes**2) / 2)
    weights /= weights.sum()
    rho = source.correlation
    log = np.log(source.quantile(ndtr(np.sqrt(rho) * nodes[:, None] + np.sqrt(1 - rho) * nodes)))
    middle = log @ weights  # expected log-length of a prompt
    mean = weights @ middle
    between = weights @ (middle - mean) ** 2
    total = weights @ ((log - mean) ** 2) @ weights
    assert between / total == pytest.approx(0.92, abs=2e-4)


@given(
    share=st.floats(0, 0.4), median=st.floats(2000, 12_000), at=st.floats(0.1, 0.9), correlation=st.floats(0.01, 0.99)
)
@settings(max_examples=15, deadline=None)
def test_capped_distributions_have_any_mean_that_is_possible(
    share: float, median: float, at: float, correlation: float
):
    least, limit = 100, 16_000
    upper = share * limit + (0.5 - share) * (median + limit) / 2
    mean = upper + 0.5 * (least + at * (median - least))
    source = Capped(mean, median, least, limit, share, correlation)
    u = (np.arange(100_000) + 0.5) / 100_000
    assert source.quantile(u).mean() == pytest.approx(mean, rel=1e-3)
    assert 0 < source.correlation < 1


def test_a_mean_that_no_distribution_has():
    with pytest.raises(ValueError, match="no distribution has mean 15000 with median 9960"):
        _ = Capped(15_000, 9960, 256, 16_000, 0.15, 0.9).power


@pytest.mark.parametrize(
    ("name", "middle", "between", "within"), [("R1", 8.4, 0.8, 0.35), ("lognormal", 8.1, 0.55, 0.45)]
)
def test_lognormal_scenarios_have_their_moments(name: str, middle: float, between: float, within: float):
    source = load_scenario(name).definition.source  # type: ignore[union-attr]
    assert isinstance(source, Lognormal)
    log = np.log(draw(source, (1, 20_000, 8), np.random.default_rng(1))[0].astype(float))
    assert np.median(log) == pytest.approx(middle, abs=0.03)
    assert log.mean(axis=1).var() == pytest.approx(between**2 + within**2 / 8, rel=0.05)
    assert log.var(axis=1, ddof=1).mean() == pytest.approx(within**2, rel=0.05)


def check(work: Workload, requests: int) -> None:
    columns = (work.ids, work.keys, work.group, work.sample, work.prompt_tokens, work.lengths)
    assert [len(column) for column in columns] == [requests] * 6
    assert len(set(work.ids)) == requests
    assert work.lengths.min() >= 1
    assert work.lengths.max() <= work.max_tokens
    assert set(work.keys) <= set(work.earlier.keys)
    assert work.earlier.tokens.max(initial=0) <= work.max_tokens
    assert (work.earlier.censored == (work.earlier.tokens == work.max_tokens)).all()


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_workloads(name: str):
    scenario = load_scenario(name)
    work = scenario.draw(100, seed=3)
    check(work, 100)
    samples = scenario.definition.samples  # type: ignore[union-attr]
    assert work.ids[samples] == "p1#0/0"
    assert work.keys[samples] == "p1"
    prompts = -(-100 // samples)
    assert len(work.earlier.tokens) == EARLIER_EPOCHS * prompts * samples
    assert set(work.earlier.epoch.tolist()) == set(range(EARLIER_EPOCHS))
    again, other = scenario.draw(100, seed=3), scenario.draw(100, seed=4)
    assert (again.lengths == work.lengths).all()
    assert (again.earlier.tokens == work.earlier.tokens).all()
    assert (other.lengths != work.lengths).mean() > 0.5


def test_earlier_epochs_are_fresh_draws_of_the_same_prompts():
    work = load_scenario("deepcoder-like").draw(8 * 400, seed=1)
    own = np.log(work.lengths.reshape(400, 8).astype(float)).mean(axis=1)
    before = np.log(work.earlier.tokens[: 8 * 400].reshape(400, 8).astype(float)).mean(axis=1)
    assert np.corrcoef(own, before)[0, 1] > 0.9
    assert (work.earlier.tokens[: 8 * 400] != work.lengths).mean() > 0.7


def test_requests_of_a_workload():
    work = load_scenario("R1").draw(40, seed=0)
    free, known = work.requests(known=False), work.requests(known=True)
    assert [r.request_id for r in free] == list(work.ids)
    assert {r.sampling.max_tokens for r in free} == {32_768}
    assert {r.sampling.forced_length for r in free} == {None}
    assert [r.sampling.forced_length for r in known] == work.lengths.tolist()
    assert [len(r.prompt_tokens) for r in free] == [300] * 40
    assert free[0].prompt_tokens is free[15].prompt_tokens
    assert free[0].prompt_tokens != free[16].prompt_tokens
    assert free[17].request_id == "p1#0/1"
    assert work.by_id["p1#0/1"] == work.lengths[17]
    assert work.longest == 300 + work.lengths.max()


def test_memory_of_a_scenario_replaces_the_profile_s():
    h800 = PROFILES["h800"]
    assert load_scenario("lognormal").device(h800) == h800
    assert load_scenario("R1").device(h800) == replace(h800, memory_bytes=40e9, reserve_bytes=4e9)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts of 2, 3 and 1 siblings in one workload, one prompt in another; not in order."""
    rows = [
        "b,0,0,0,9,0,77",
        "a,0,0,0,10,0,100",
        "a,0,1,0,20,0,200",
        "a,0,0,0,10,1,101",
        "a,0,1,0,20,1,201",
        "",
        "a,1,0,0,30,0,300",
        "a,0,1,0,20,2,202",
    ]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([HEAD, *rows, ""]))
    return path


def test_a_trace_is_drawn_without_replacement_and_then_again(trace: Path):
    scenario = load_scenario(str(trace), workload="a")
    work = scenario.draw(15, seed=5)
    check(work, 15)
    assert sorted(work.lengths[:6].tolist()) == [100, 101, 200, 201, 202, 300]
    assert sorted(work.lengths[6:12].tolist()) == [100, 101, 200, 201, 202, 300]
    for group in set(work.group.tolist()):
        assert len(set(work.prompt_tokens[work.group == group].tolist())) == 1
    orders = {tuple(scenario.draw(6, seed=seed).lengths.tolist()) for seed in range(30)}
    assert len(orders) == 6
    assert work.max_tokens == 300


def test_the_history_of_a_traced_response_is_its_siblings(trace: Path):
    work = load_scenario(str(trace), workload="a").draw(6, seed=0)
    seen = defaultdict(list)
    for key, length in zip(work.earlier.prompt.tolist(), work.earlier.tokens.tolist(), strict=True):
        seen[work.earlier.keys[key]].append(length)
    known = dict(zip(work.lengths.tolist(), work.keys, strict=True))
    assert sorted(seen[known[200]]) == [201, 202]
    assert seen[known[100]] == [101]
    assert seen[known[300]] == []


def test_a_prompt_with_very_many_responses_takes_memory_by_the_response(tmp_path: Path):
    path, many = tmp_path / "t.csv", 30_000
    path.write_text(
        "prompt_index,input_tokens,output_tokens\n" + "".join(f"0,5,{length}\n" for length in range(1, many + 1))
    )
    scenario = load_scenario(str(path))
    tracemalloc.start()
    try:
        work = scenario.draw(many, seed=1)
        before = tracemalloc.get_traced_memory()[1]
        earlier = work.earlier
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert before < 100e6, "without a history there are no pairs of siblings"
    assert peak < 400e6, "every response beside every other takes 900e6 entries"
    assert len(earlier) == many * MOST_SIBLINGS
    own = dict(zip(work.keys, work.lengths.tolist(), strict=True))
    known = earlier.tokens.reshape(many, MOST_SIBLINGS)
    assert all((known[row] != own[key]).all() for row, key in enumerate(earlier.keys))
    assert all(len(set(row)) == MOST_SIBLINGS for row in known[::500].tolist())
    assert 0.9 < np.bincount(earlier.tokens)[1:].mean() / MOST_SIBLINGS < 1.1
    middles = known.mean(axis=1)
    assert abs(np.corrcoef(middles, [own[key] for key in earlier.keys])[0, 1]) < 0.05, "not those next in the file"


def test_histories_are_made_where_knowledge_needs_them(trace: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple] = []
    experiment = Experiment(
        load_scenario(str(trace), workload="a"),
        shape_from_config("qwen3-30b-a3b"),
        PROFILES["h200"],
        policies=("planned",),
        knowledge=("none", "oracle"),
    )
    monkeypatch.setattr(workload_module, "_siblings", lambda *arguments: asked.append(arguments))
    assert len(list(run_cell(experiment, Cell(2, 3, 0)))) == 2
    assert asked == []


def test_workloads_of_a_trace(trace: Path):
    assert load_scenario(str(trace), workload="b").draw(1, 0).lengths.tolist() == [77]
    only = load_scenario("dapo", trace=trace, workload="a")
    assert only.to_json()["workload"] == "a"
    for arguments, told in {
        (None, None): "has the workloads 'b', 'a'; choose one with --workload",
        (None, "c"): "has no workload 'c'; there is 'b', 'a'",
    }.items():
        with pytest.raises(InputError, match=told):
            load_scenario(str(trace), workload=arguments[1])
    with pytest.raises(InputError, match="has no workload 'dapo_qwen2"):
        load_scenario("dapo", trace=trace)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "missing column prompt_index, input_tokens, output_tokens"),
        ("prompt_index,input_tokens\n0,1\n", "missing column output_tokens"),
        ("prompt_index,input_tokens,output_tokens\n", "has no rows"),
        ("prompt_index,input_tokens,output_tokens\n0,5,7\n0,5,-3\n", "line 3: output_tokens is '-3'; give a whole"),
        ("prompt_index,input_tokens,output_tokens\n0,5,0\n", "output_tokens is '0'"),
        ("prompt_index,input_tokens,output_tokens\n0,x,3\n", "line 2: input_tokens is 'x'"),
        ("prompt_index,input_tokens,output_tokens\n0,5,7.5\n", "output_tokens is '7.5'"),
        (
            "prompt_index,input_tokens,output_tokens\n0,5,7\n1,6,7\n0,6,7\n",
            "line 4: input_tokens is 6, and 5 in an earlier row of the same prompt; give siblings the same",
        ),
        ("prompt_index,input_tokens,output_tokens\n0,5\n", "line 2 has 2 fields for 3 columns"),
        (b"prompt_index,input_tokens,output_tokens\n\xff\xfe,5,7\n", "is not UTF-8 text"),
        ("prompt_index,input_tokens,output_tokens\n" + "9" * 200_000 + ",5,7\n", "is not a CSV file"),
    ],
)
def test_bad_traces_are_told_in_one_line(tmp_path: Path, content: str | bytes, told: str):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        load_scenario(str(path))
    assert told in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trace_with_the_least_columns(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_index,input_tokens,output_tokens\n0,5,7\n1,6,8\n0,5,9\n")
    assert sorted(load_scenario(str(path)).draw(3, 0).lengths.tolist()) == [7, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"source": "R3"}, "scenario 'R3' is not known; there is R1, R2, lognormal, deepcoder-like, dapo"),
        ({"source": "dapo"}, "give --trace FILE.csv"),
        ({"source": "R1", "workload": "x"}, "--workload x: the lengths of scenario R1 are drawn"),
        ({"source": "R1", "trace": Path("x.csv")}, "--trace x.csv: the lengths of scenario R1 are drawn"),
        ({"source": "a.csv", "trace": Path("x.csv")}, "give one of them"),
        ({"source": "gone.csv"}, "gone.csv: trace cannot be read (No such file or directory)"),
        ({"source": "gone.toml"}, "gone.toml: scenario cannot be read (No such file or directory)"),
    ],
)
def test_scenarios_that_are_none(arguments: dict, told: str):
    with pytest.raises(InputError) as error:
        load_scenario(**arguments)
    assert told in str(error.value)


LONG = 'kind = "capped"\nmean = 900\nmedian = 1000\nmax_tokens = 1600\ncapped_share = 0.15\nsibling_correlation = 0.9\n'


FREE = 'kind = "lognormal"\nlog_mean = 5.0\nbetween_sd = 0.5\nwithin_sd = 0.5\nmax_tokens = 900\n'


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "kind is missing; give lognormal, capped, trace"),
        ('kind = "normal"', "kind is 'normal'; give lognormal, capped, trace"),
        ("kind = [1]", "kind is '[1]'; give lognormal"),
        (FREE + "shortest = 900", "shortest 900 is not below max_tokens 900; give a smaller one"),
        (FREE.replace("5.0", "nan"), "log_mean: input should be a finite number, got nan"),
        (FREE.replace("0.5", "inf"), "between_sd: input should be a finite number, got inf"),
        (FREE.replace("max_tokens = 900\n", ""), "max_tokens is missing; a scenario of kind lognormal needs it"),
        (FREE + "sample = 4", "unknown key 'sample'; did you mean 'samples'?"),
        (FREE + "workers = 5000", "workers: input should be less than or equal to 4096, got 5000"),
        (FREE + "load = 1000000000000", "load: input should be less than or equal to 1000000, got"),
        (FREE + "memory_bytes = nan", "memory_bytes: input should be a finite number, got nan"),
        (LONG + "shortest = 1000", "median 1000 is not between shortest 1000 and max_tokens 1600; give one that is"),
        (LONG.replace("1600", "900"), "median 1000 is not between shortest 1 and max_tokens 900"),
        (LONG.replace("mean = 900", "mean = 1500"), "no distribution has mean 1500 with median 1000"),
        (LONG.replace("0.15", "0.5"), "capped_share: input should be less than 0.5, got 0.5"),
        ('kind = "trace"\nfile = 3', "file: "),
        ('kind = "trace"\nlog_mean = 3', "unknown key 'log_mean'; there is "),
    ],
)
def test_definitions_that_are_none_are_told_in_one_line(tmp_path: Path, content: str, told: str):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        load_scenario(str(path))
    message = str(error.value)
    assert message.startswith(f"{path}: {told}")
    assert len(message) < len(str(path)) + 240, "not the whole file"
    assert "{" not in message


@given(
    kind=st.sampled_from(["lognormal", "capped"]),
    reals=st.lists(st.floats(0, 20) | st.sampled_from([0.0, 1.0, 0.499, 5e3]), min_size=4, max_size=4),
    shortest=st.sampled_from([1, 2, 900]),
    most=st.sampled_from([2, 3, 1000, 10**9]),
)
def test_definitions_make_lengths_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, kind: str, reals: list[float], shortest: int, most: int
):
    names = {
        "lognormal": ["log_mean", "between_sd", "within_sd"],
        "capped": ["mean", "median", "capped_share", "sibling_correlation"],
    }
    path = tmp_path_factory.getbasetemp() / "any.toml"
    keys = {"kind": f'"{kind}"', "shortest": shortest, "max_tokens": most}
    keys |= dict(zip(names[kind], map(repr, reals), strict=False))
    path.write_text("\n".join(f"{name} = {value}" for name, value in keys.items()))
    try:
        scenario = load_scenario(str(path))
    except InputError:
        return
    lengths = scenario.draw(50, seed=0).lengths
    assert lengths.min() >= shortest
    assert lengths.max() <= most


def test_a_scenario_of_one_s_own(tmp_path: Path):
    path = tmp_path / "short.toml"
    path.write_text(LONG + "load = 5\n")
    scenario = load_scenario(str(path))
    assert (scenario.name, scenario.definition.load) == ("short", 5)
    assert scenario.to_json()["mean"] == 900
    check(scenario.draw(9, 0), 9)
    for content, told in {
        "kind =": "is not TOML",
        LONG.replace("capped", "uniform", 1): "'uniform'",
        LONG + "hurry = 1\n": "unknown key 'hurry'; there is about, workers",
        LONG.replace("900", '"many"'): "mean: ",
        LONG.replace("900", "1500"): "no distribution has mean 1500",
        LONG + "shortest = 1600\n": "shortest 1600 is not below max_tokens 1600",
        LONG.replace("max_tokens = 1600\n", ""): "max_tokens is missing",
    }.items():
        path.write_text(content)
        with pytest.raises(InputError) as error:
            load_scenario(str(path))
        assert told in str(error.value)
        assert "\n" not in str(error.value)
        assert "short.toml" in str(error.value)
