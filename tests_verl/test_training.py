"""verl's own trainer, unmodified, end to end on a CPU: the example, on one machine and on two, under two policies, and
resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from flexfloor.ledger.accounting import Summary, summarize
from flexfloor.ledger.events import read_ledger

ROOT = Path(__file__).parents[1]
STEPS = 3
pytestmark = pytest.mark.timeout(600)


ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "flexfloor.integrations.verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "examples" / "verl"), str(ROOT / "examples")]),
}


@dataclass
class Run:
    """What a run of verl left behind."""

    code: int
    output: str
    metrics: dict[int, dict[str, float]]
    folder: Path

    def ledger(self, step: int, split: str = "train") -> list[dict]:
        return read_ledger(self.folder / "ledgers" / f"{split}-{step:06d}.jsonl")

    def account(self, step: int, split: str = "train") -> Summary:
        return summarize(self.ledger(step, split))


def train(inputs: Path, folder: Path, *overrides: str, **more: str) -> Run:
    """Run the example in verl; nothing that it starts may outlive it."""
    mark = uuid.uuid4().hex
    own = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), "FLEXFLOOR_TEST_MARK": mark}
    environment = os.environ | ENVIRONMENT | own | more
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(ROOT / "examples" / "verl"),
        "--config-name", "tiny_cpu", f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'train.parquet'}", f"data.val_files={inputs / 'val.parquet'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder}",
        f"+actor_rollout_ref.rollout.custom.ledgers={folder / 'ledgers'}", *overrides,
    ]  # fmt: skip
    log = folder / "log.txt"
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    wait_until_gone(mark)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    entries = [json.loads(line) for line in lines]
    return Run(code, log.read_text(), {entry["step"]: entry["data"] for entry in entries}, folder)


def wait_until_gone(mark: str, seconds: float = 60.0) -> None:
    """Fails when a process with this mark in its environment is still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while left := [name for name in os.listdir("/proc") if name.isdigit() and _has(name, mark)]:
        assert time.monotonic() < deadline, f"processes outlive the run: {[_command(name) for name in left]}"
        time.sleep(0.2)


def _has(process: str, mark: str) -> bool:
    try:
        return mark.encode() in Path("/proc", process, "environ").read_bytes()
    except OSError:
        return False


def _command(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return f"{process}, gone"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inputs")
    script = ROOT / "examples" / "verl" / "make_inputs.py"
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True, capture_output=True)
    return out


@contextmanager
def two_machines() -> Iterator[str]:
    """Address of a cluster: two nodes of Ray on this computer, with an accelerator each."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"FLEXFLOOR_TEST_MARK": mark}).items():
            patch.setenv(name, value)
        cluster = Cluster()
        for _ in range(2):
            cluster.add_node(num_cpus=8, num_gpus=1, include_dashboard=False)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
        wait_until_gone(mark)


@pytest.fixture(scope="module")
def elastic(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On two machines, one worker on each. The other runs are on one machine."""
    folder = tmp_path_factory.mktemp("elastic") / "run"
    with two_machines() as address:
        return train(
            inputs,
            folder,
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=1",
            "trainer.save_freq=2",
            f"trainer.test_freq={STEPS}",
            f"ray_kwargs.ray_init.address={address}",
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            # The processes of a cluster have the environment that the cluster was started in.
            f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={folder / 'metrics.jsonl'}",
        )


def test_steps_end_well_and_train_on_what_was_generated(elastic: Run) -> None:
    assert elastic.code == 0, elastic.output[-3000:]
    assert sorted(elastic.metrics) == list(range(1, STEPS + 1))
    for step in elastic.metrics.values():
        assert step["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert step["actor/grad_norm"] > 0
        assert step["response/aborted_ratio"] == 0
    first, last = elastic.metrics[1], elastic.metrics[STEPS]
    assert first["critic/score/mean"] != last["critic/score/mean"]


def test_a_worker_leaves_during_the_rollout_and_is_back_for_the_next(elastic: Run) -> None:
    for number, step in elastic.metrics.items():
        account = elastic.account(number)
        assert step["flexfloor/response_tokens"] == account.response_tokens
        assert step["flexfloor/refused_requests"] == 0
        start = elastic.ledger(number)[0]
        assert [w["worker"] for w in start["workers"]] == [0, 1]
    # Whether a release is worth it depends on how long iterations take on this machine: in some step it is.
    assert sum(step["flexfloor/released_workers"] for step in elastic.metrics.values()) >= 1


def test_every_step_generates_with_the_weights_of_the_step_before(elastic: Run) -> None:
    assert [elastic.ledger(step)[0]["fleet"]["weights_version"] for step in elastic.metrics] == [0, 1, 2]


def test_validation_and_checkpoints(elastic: Run) -> None:
    assert elastic.account(STEPS, "eval").requests == 8
    assert "val-core/vowels/acc/mean@1" in elastic.metrics[STEPS]
    checkpoints = elastic.folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert (checkpoints / "length_history.sqlite").exists()


def test_static_on_one_machine_and_elastic_on_two_generate_and_train_the_same_bits(
    elastic: Run, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("static") / "run"
    static = train(inputs, folder, "actor_rollout_ref.rollout.custom.policy=static")
    assert static.code == 0, static.output[-3000:]
    for step in range(1, STEPS + 1):
        ours, theirs = elastic.account(step), static.account(step)
        assert ours.responses_sha256 == theirs.responses_sha256
        assert ours.logprobs_sha256 == theirs.logprobs_sha256
        assert ours.occupied_iterations <= theirs.occupied_iterations
        assert static.metrics[step]["flexfloor/released_workers"] == 0
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
            assert elastic.metrics[step][name] == static.metrics[step][name]
    occupied = [sum(run.account(s).occupied_iterations for s in range(1, STEPS + 1)) for run in (elastic, static)]
    assert occupied[0] < occupied[1]


@pytest.fixture(scope="module")
def resumed(elastic: Run, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last step again, from the checkpoint before it, now with a consumer.

    The pace makes the rollout long enough for an actor to start; a consumer that imports torch is given time to go.
    """
    folder = tmp_path_factory.mktemp("resumed") / "run"
    options = ("consumer=evaluation:Evaluation", "consumer_grace_s=20", "pace=60", "pace_model=qwen3-30b-a3b")
    return train(
        inputs,
        folder,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={elastic.folder / 'checkpoints' / 'global_step_2'}",
        *(f"+actor_rollout_ref.rollout.custom.{option}" for option in options),
        EVALUATE_MODEL=str(inputs / "model"),
        EVALUATE_OUT=str(folder / "evaluations.jsonl"),
    )


def test_a_run_resumed_on_one_machine_goes_on_with_the_same_bits(elastic: Run, resumed: Run) -> None:
    assert resumed.code == 0, resumed.output[-3000:]
    assert sorted(resumed.metrics) == [STEPS]
    assert resumed.account(STEPS).responses_sha256 == elastic.account(STEPS).responses_sha256


def test_a_consumer_works_on_what_a_released_worker_frees(resumed: Run) -> None:
    step = resumed.metrics[STEPS]
    assert step["flexfloor/consumers"] == step["flexfloor/released_workers"] == 1  # emulated time: always worth it
    assert step["flexfloor/consumers_killed"] == step["flexfloor/consumers_failed"] == 0
    assert "flexfloor/freed_bytes" in step  # how many is another test's, of a model whose weights outweigh noise
    evaluated = json.loads((resumed.folder / "evaluations.jsonl").read_text())
    assert step["flexfloor/consumer_units"] == evaluated["texts"] > 0
    assert 0 < step["flexfloor/consumer_s"] < resumed.account(STEPS).wall_s


def test_a_wrong_option_ends_the_run_and_is_named(inputs: Path, tmp_path: Path) -> None:
    run = train(inputs, tmp_path / "run", "+actor_rollout_ref.rollout.custom.polcy=static")
    assert run.code != 0
    assert "unknown key 'polcy'; did you mean 'policy'?" in run.output
