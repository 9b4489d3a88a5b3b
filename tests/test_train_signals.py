"""`flexfloor train` asked to end: by a signal to its process group, and in the middle of a step of the optimizer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from train_place import Place

from flexfloor.cli.signals import Stopped, stoppable
from flexfloor.integrations.trl.checkpoints import WholeSteps, newest_whole


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Place:
    return Place(tmp_path_factory.mktemp("train"), checkpoint("tiny"))


def test_a_signal_waits_for_the_end_of_the_optimizer_s_step():
    steps = WholeSteps()
    reached: list[object] = []
    state = SimpleNamespace(num_input_tokens_seen=0)
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with stoppable():
            steps.on_pre_optimizer_step(None, state, None)
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(steps.whole)
            steps.on_step_end(None, state, None)
            reached.append("after")

    with pytest.raises(Stopped):
        work()
    assert (reached, steps.whole) == ([False], True)
    assert signal.getsignal(signal.SIGINT) is before
    steps.release()  # again, with nothing held


def test_sigterm_ends_a_run_with_its_workers(place: Place):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "flexfloor",
            *place.arguments("terminated", "--set", "trl.max_steps=500", "--set", "trainer_threads=1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "step 3/" in line:
            break
    assert "step 3/" in lines[-1], lines
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1] == "flexfloor: terminated"
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    found = newest_whole(place.folder / "terminated", pytest.fail)
    assert found is not None
    assert found[0] >= 3
