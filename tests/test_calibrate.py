"""Profiles fitted to recorded iterations: known ones are found again, real runs are predicted, odd files refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexfloor
from flexfloor.cli import main
from flexfloor.errors import InputError
from flexfloor.progress import ModelShape
from flexfloor.world.calibrate import calibrate, held_out, read_run
from flexfloor.world.costs import PROFILES, DeviceProfile, iteration_seconds, load_profile
from flexfloor.world.model_config import shape_from_config

TRUTH = replace(
    PROFILES["cpu"], bandwidth=6e9, flops=2e10, fixed_s=3e-3, request_s=2e-5, gather_link=3e8, cores=2.0, look_s=1e-3,
    latency_s=((2, 1e-4), (3, 4e-4), (4, 3e-4)), switch_s=0.04, pause_s=0.01, move_bytes_per_s=2e9,
)  # fmt: skip
SMALL = shape_from_config({
    "model_type": "qwen3_moe", "dtype": "float32", "vocab_size": 512, "max_position_embeddings": 2048,
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "intermediate_size": 128,
})  # fmt: skip
LARGE = replace(SMALL, dense_bytes=SMALL.dense_bytes * 8, expert_bytes=SMALL.expert_bytes * 6)


def write_ledger(
    path: Path, truth: DeviceProfile, workers: int, shape: ModelShape = SMALL, seed: int = 0, **fleet: Any
) -> Path:
    """A ledger of a run that takes exactly what `truth` says: batches drawn at random, prompts first, two resizes."""
    rng = random.Random(seed)
    info = {
        "kind": "engine", "model": "small", "shape": asdict(shape), "workers": workers, "numerics_path": "cbwr",
        "dtype": "float32", "device": "cpu", "threads_per_worker": 1, "pace": None, "profile": None,
    }  # fmt: skip
    records: list[dict[str, Any]] = [{"type": "start", "schema": 1, "fleet": info | fleet, "settings": {}}]
    t, members = 0.0, list(range(workers))
    kv = dict.fromkeys(members, 0)
    live = {w: rng.randrange(8, 40) for w in members}
    for number in range(40):
        columns: dict[int, dict[str, list]] = {
            w: {"seconds": [], "batch": [], "prefill_tokens": [], "kv_tokens": [], "experts_touched": [], "overran": []}
            for w in members
        }
        begin = t
        for _ in range(8):
            prefill = {w: rng.randrange(200) if number % 10 == 0 else 0 for w in members}
            live = {w: max(1, n - (rng.random() < 0.06)) for w, n in live.items()}
            kv = {w: kv[w] + live[w] * rng.randrange(1, 5) for w in members}
            seconds = iteration_seconds(
                truth, shape, batch=[live[w] for w in members], kv_tokens=[kv[w] for w in members],
                prefill_tokens=[prefill[w] for w in members],
            )  # fmt: skip
            t += seconds
            for w in members:
                columns[w]["seconds"].append(seconds)
                columns[w]["batch"].append(live[w])
                columns[w]["prefill_tokens"].append(prefill[w])
                columns[w]["kv_tokens"].append(kv[w])
        records.append({
            "type": "chunk", "epoch": 0, "first_iteration": number * 8, "iterations": 8, "t0": begin, "t1": t,
            "workers": [{"worker": w} | columns[w] for w in members],
        })  # fmt: skip
        t += truth.look_s
        if number in (10, 20, 30) and len(members) > 1:
            leaver, moved = members.pop(), rng.randrange(10**6, 10**8)
            took = truth.switch_s + moved / truth.move_bytes_per_s
            records.append(resize(t, took, members, [leaver], moved))
            t += took
        if number in (5, 15, 25):
            moved = rng.randrange(10**6, 10**8)
            took = truth.pause_s + moved / truth.move_bytes_per_s
            records.append(resize(t, took, members, [], moved))
            t += took
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def resize(t: float, took: float, members: list[int], leaving: list[int], moved: int) -> dict[str, Any]:
    return {
        "type": "resize", "t0": t, "t1": t + took, "members": list(members), "leaving": leaving, "joining": [],
        "expert_bytes": moved // 2, "kv_bytes": moved - moved // 2, "failed": None,
    }  # fmt: skip


def test_a_profile_is_found_again(tmp_path: Path):
    """From exact times of two models: which term is which shows only where models differ."""
    runs = [
        read_run(write_ledger(tmp_path / f"{m}-{shape.dense_bytes}.jsonl", TRUTH, m, shape, seed=m))
        for m in (1, 2, 3, 4)
        for shape in (SMALL, LARGE)
    ]
    found = calibrate(runs, load_profile("h200"), cores=2)
    profile = found.profile
    assert found.held_out.p90 < 1e-4  # the base has other links
    assert abs(found.held_out.total) < 1e-4
    assert sorted(found.by_workers) == [1, 2, 3, 4]
    for name in ("bandwidth", "flops", "fixed_s", "request_s", "gather_link", "look_s", "move_bytes_per_s"):
        assert getattr(profile, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name
    assert (profile.switch_s, profile.pause_s) == pytest.approx((TRUTH.switch_s, TRUTH.pause_s), rel=0.02)
    assert [m for m, _ in profile.latency_s] == [2, 3, 4]
    assert [s for _, s in profile.latency_s] == pytest.approx([s for _, s in TRUTH.latency_s], rel=0.05)


def test_outliers_do_not_move_the_fit(tmp_path: Path):
    path = write_ledger(tmp_path / "run.jsonl", TRUTH, 2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rng = random.Random(1)
    spoiled = 0
    for record in records:
        if record["type"] == "chunk":
            for i in range(record["iterations"]):
                factor = 1 + 0.02 * rng.gauss(0, 1)
                if rng.random() < 0.08:
                    factor, spoiled = 4.0, spoiled + 1
                for worker in record["workers"]:
                    worker["seconds"][i] *= factor
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    truth, run = calibrate([read_run(write_ledger(tmp_path / "clean.jsonl", TRUTH, 2))], TRUTH, 2), read_run(path)
    found = calibrate([run], TRUTH, 2)
    assert spoiled > 15
    assert found.outliers > 10
    assert (found.fitted + found.outliers, found.held_out.iterations) == (256, 64), "every fifth of 40 chunks of 8"
    assert found.held_out.median < 0.03
    clean = run.predict(truth.profile)
    assert np.abs(run.predict(found.profile) / clean - 1).max() < 0.05


def test_groups_that_scatter_more_are_not_taken_for_accidents(tmp_path: Path):
    """Four workers on two cores whose times have a long tail, beside quiet runs of one: their sum must be met."""
    quiet = [write_ledger(tmp_path / f"1-{seed}.jsonl", TRUTH, 1, seed=seed) for seed in range(3)]
    wide = write_ledger(tmp_path / "4.jsonl", TRUTH, 4)
    records, rng = [json.loads(line) for line in wide.read_text().splitlines()], random.Random(2)
    for record in records:
        for i in range(record.get("iterations", 0)):
            factor = 0.7 + rng.expovariate(1 / 0.3)
            for worker in record["workers"]:
                worker["seconds"][i] *= factor
    wide.write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = [read_run(path) for path in (*quiet, wide)]
    profile = calibrate(runs, TRUTH, 2).profile
    assert runs[-1].predict(profile).sum() == pytest.approx(runs[-1].seconds.sum(), rel=0.08)


def test_what_runs_do_not_tell_is_the_base(tmp_path: Path):
    base = replace(PROFILES["h800"], imbalance=1.3)
    found = calibrate([read_run(write_ledger(tmp_path / "one.jsonl", TRUTH, 1))], base, cores=math.inf)
    assert found.profile.latency_s == base.latency_s
    assert (found.profile.switch_s, found.profile.pause_s) == (base.switch_s, pytest.approx(TRUTH.pause_s))
    kept = {"switch_s", "latency_s", "gather_link", "memory_bytes", "reserve_bytes", "imbalance", "node_link"}
    assert kept <= set(found.kept)
    assert all(getattr(found.profile, name) == getattr(base, name) for name in found.kept)


def test_real_runs(checkpoint: Callable[[str], Path], tmp_path: Path):
    """The whole way on this machine, however busy it is: the measured accuracy stands in docs/profiles.md."""
    paths = []
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2, worker_memory="256MiB") as fleet:
        for seed in (0, 1):
            rng = random.Random(seed)
            prompts = [[rng.randrange(4, 250) for _ in range(rng.randrange(3, 60))] for _ in range(5)]
            sampling = flexfloor.SamplingParams(max_tokens=150, ignore_eos=False)
            paths.append(tmp_path / f"{seed}.jsonl")
            flexfloor.rollout(fleet, flexfloor.make_requests(prompts, samples=2, sampling=sampling), ledger=paths[-1])
    out = tmp_path / "mine.toml"
    assert main(["calibrate", *map(str, paths), "--out", str(out)]) == 0
    profile = load_profile(out)
    assert profile.name == "mine"
    assert [size for size, _ in profile.latency_s] == [2]
    # Least squares of relative errors: whatever the machine did meanwhile, single iterations may be far off, but not
    # too long on the mean of those that were fitted.
    runs = [read_run(path) for path in paths]
    relative = np.concatenate([r.predict(profile) / r.seconds for r in runs])[~held_out(runs)]
    assert 0.1 < relative.mean() < 3
    assert runs[1].seconds.sum() == pytest.approx(sum(runs[1].looks_s) * -1 + chunk_time(paths[1]), rel=1e-6)


def chunk_time(path: Path) -> float:
    """Seconds that the driver waited for chunks."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sum(r["t1"] - r["t0"] for r in records if r["type"] == "chunk")


def test_the_command_prints_errors_and_what_was_not_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ledgers = [write_ledger(tmp_path / f"{m}.jsonl", TRUTH, m, seed=m) for m in (1, 2)]
    out = tmp_path / "new" / "mine.toml"
    assert main(["calibrate", *map(str, ledgers), "--out", str(out), "--cores", "2"]) == 0
    text = capsys.readouterr().out
    assert "0.0%" in text
    assert "not fitted  memory_bytes, reserve_bytes, " in text
    assert load_profile(out).cores == 2
    assert "memory_bytes = 2147483648  # not fitted" in out.read_text()


def change(**fleet: object) -> Callable[[list[dict]], object]:
    return lambda records: records[0]["fleet"].update(fleet)


SPOILED: dict[str, tuple[Callable[[list[dict]], object], str]] = {
    "simulated": (change(kind="simulation"), "was made by a simulation fleet; calibrate from runs on real workers"),
    "paced": (change(pace=10.0, profile="h200"), "was paced to profile 'h200'; record one without --pace"),
    "nothing ran": (lambda r: r.__delitem__(slice(1, None)), "no iteration was recorded; give the ledger of a run"),
    "too short": (
        lambda r: r.__delitem__(slice(9, None)),
        "48 iterations, beside 8 that are kept out of the",
    ),
    "too few chunks": (
        lambda r: r.__delitem__(slice(5, None)),
        "4 chunk(s) in all are too few to keep every fifth",
    ),
    "another schema": (lambda r: r[0].update(schema=0), "ledger schema 0, this version reads"),
    "no seconds": (
        lambda r: r[1]["workers"][0].pop("seconds"),
        "a record lacks 'seconds', which ledgers of this version have",
    ),
    "no time passed": (lambda r: r[1]["workers"][0].update(seconds=[0.0] * 8), "iterations of no time are recorded"),
    "ragged": (
        lambda r: r[2]["workers"][0]["batch"].pop(),
        "batch of worker 0 has 7 entries for 8 iterations from 8 on; record the run anew",
    ),
    "one too many": (lambda r: r[1]["workers"][0]["seconds"].append(1.0), "seconds of worker 0 has 9 entries for 8"),
    "text": (
        lambda r: r[1]["workers"][0].update(batch=["many"] * 8),
        "a record is not what ledgers of this version have; record the run anew",
    ),
    "nobody": (lambda r: r[1].update(workers=[]), "a record is not what ledgers of this version have"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_ledgers_that_say_nothing_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    path = write_ledger(tmp_path / "run.jsonl", TRUTH, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    spoil, told = SPOILED[case]
    spoil(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert told in refusal(capsys, path, tmp_path / "out.toml")


def test_runs_of_different_engines(tmp_path: Path):
    runs = [
        read_run(write_ledger(tmp_path / f"{dtype}.jsonl", TRUTH, 1, dtype=dtype)) for dtype in ("float32", "bfloat16")
    ]
    with pytest.raises(InputError, match=r"bfloat16.jsonl: dtype is 'bfloat16', in .* 'float32'; calibrate from runs"):
        calibrate(runs, PROFILES["h200"])


def shortened(path: Path, first: int, chunks: int) -> Path:
    """A ledger with only some of its chunks, and no resizes."""
    lines = path.read_text().splitlines()
    kept = [line for line in lines[1:] if json.loads(line)["type"] == "chunk"][first : first + chunks]
    path.write_text("\n".join([lines[0], *kept]) + "\n")
    return path


def test_chunks_are_kept_out_of_all_runs_together(tmp_path: Path):
    """None of these runs has five chunks of its own."""
    paths = [shortened(write_ledger(tmp_path / f"{i}.jsonl", TRUTH, 1, seed=i), 3 * i, 3) for i in range(6)]
    runs = [read_run(path) for path in paths]
    kept = held_out(runs).reshape(18, 8)
    assert np.flatnonzero(kept.all(axis=1)).tolist() == np.flatnonzero(kept.any(axis=1)).tolist() == [4, 9, 14]
    found = calibrate(runs, TRUTH, 2)
    assert found.fitted + found.outliers == 15 * 8
    assert found.held_out.iterations == 3 * 8
    with pytest.raises(InputError, match=r"0.jsonl and 1 more: 40 iterations, beside 8 that .* it takes 100: give"):
        calibrate(runs[:2], TRUTH, 2)
    with pytest.raises(InputError, match=r"0.jsonl: 3 chunk\(s\) in all are too few to keep every fifth out"):
        calibrate(runs[:1], TRUTH, 2)


def test_a_run_that_is_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_ledger(tmp_path / "run.jsonl", TRUTH, 1)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    for other in (path, copy):
        assert main(["calibrate", str(path), str(other), "--out", str(tmp_path / "out.toml")]) == 2
        told = f"error: {other}: is the run of {path}, which would count twice; give it once\n"
        assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    ("workers", "note"),
    [
        ((1,), "every run had one worker: latency_s and gather_link, of several, are the base's"),
        ((4, 4), "every run had 4 workers: of fixed_s and latency_s only the sum is fitted; add a run on one worker"),
        ((2, 3), "no run had one worker: of fixed_s and latency_s only the sum is fitted; add a run on one worker"),
        ((1, 2), None),
    ],
)
def test_what_other_sizes_would_tell_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: tuple[int, ...], note: str | None
):
    # A worker leaves in each run that has some to spare; not here.
    paths = []
    for i, m in enumerate(workers):
        path = write_ledger(tmp_path / f"{i}.jsonl", TRUTH, m, seed=i)
        chunks = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        whole = [n for n, c in enumerate(c for c in chunks if c["type"] == "chunk") if len(c["workers"]) == m]
        paths.append(shortened(path, whole[0], len(whole)))
    out = tmp_path / "mine.toml"
    assert main(["calibrate", *map(str, paths), "--out", str(out), "--cores", "2"]) == 0
    text, profile = capsys.readouterr().out, out.read_text()
    assert (f"  note        {note}\n" in text) if note else "note" not in text
    vague = "  # fitted in sum only, fixed_s and latency_s\n"
    assert profile.count(vague) == (2 if 1 not in workers else 0)
    # Head and lines count what was fitted, kept out and left out apart.
    numbers = {
        w: int(text.split(f"  {w}")[1].split()[0].replace(" ", "")) for w in ("fitted to", "kept out", "left out")
    }
    runs = [read_run(path) for path in paths]
    assert sum(numbers.values()) == sum(len(run.seconds) for run in runs)
    assert numbers["kept out"] == held_out(runs).sum()
    assert f"of {len(runs)} run{'s' * (len(runs) > 1)} of small\n" in profile
    assert f"fitted to {numbers['fitted to']} iterations of" in profile
    assert f"left out as too far off: {numbers['left out']}.\n" in profile
    assert f"On {numbers['kept out']} iterations kept out of the fit" in profile


def test_a_foreign_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    assert "line 1 is not a ledger record" in refusal(capsys, path, tmp_path / "out.toml")
    assert "cannot be read as a ledger" in refusal(capsys, tmp_path / "missing.jsonl", tmp_path / "out.toml")


def test_outputs_are_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_ledger(tmp_path / "run.jsonl", TRUTH, 1)
    before = path.read_text()
    assert "does not end in .toml" in refusal(capsys, path, tmp_path / "profile.json")
    assert "are the same file" in refusal(capsys, path, path)
    assert path.read_text() == before


def refusal(capsys: pytest.CaptureFixture[str], ledger: Path, out: Path) -> str:
    """The one line with which the command refuses, exit code 2, and no file written."""
    existed = out.exists()
    assert main(["calibrate", str(ledger), "--out", str(out)]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    assert out.exists() == existed
    return error
