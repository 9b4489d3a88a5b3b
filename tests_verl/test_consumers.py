"""Consumers as Ray actors in a placement group: what they did counts, and what they do wrong ends nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from flexfloor.errors import InputError
from flexfloor.integrations.verl.consumers import Bundle, Consumers, load_consumer


class Works:
    def __init__(self, worker: int) -> None:
        self._stopped = threading.Event()

    def run(self) -> float:
        self._stopped.wait()
        return 7.0

    def stop(self) -> None:
        self._stopped.set()


class Raises(Works):
    def run(self) -> float:
        raise ValueError("the judge does not answer")


class CannotBegin(Works):
    def __init__(self, worker: int) -> None:
        raise OSError("no such checkpoint")


class Stuck(Works):
    def stop(self) -> None:
        """Asked in vain."""


@pytest.fixture(scope="module")
def bundle() -> Iterator[Bundle]:
    where = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False, runtime_env=where)
    group = ray.util.placement_group([{"GPU": 2}])
    ray.get(group.ready())
    yield Bundle(group, 0)
    ray.shutdown()


def run(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, *kinds: type) -> dict[str, float]:
    """One after the other on the same bundle, recalled together."""
    consumers = Consumers(f"{__name__}:Works", [bundle] * len(kinds), gpus=0.2, grace=3.0)
    for number, kind in enumerate(kinds):
        monkeypatch.setattr(consumers, "_kind", kind)
        consumers.start(number)
    ready: list[Any] = [running.ready for running in consumers._running]
    ray.wait(ready, num_returns=len(ready), timeout=60)
    begin = time.monotonic()
    assert consumers.recall() <= time.monotonic() - begin + 1e-3
    return consumers.take_metrics()


def test_what_they_did_counts(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = run(bundle, monkeypatch, Works, Works)
    assert taken.pop("consumer_s") > 0
    assert taken == {
        "consumers": 2,
        "consumers_killed": 0,
        "consumers_failed": 0,
        "freed_bytes": 0,
        "consumer_units": 14,
    }


def test_one_that_fails_is_a_warning_and_the_others_count(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        taken = run(bundle, monkeypatch, Raises, CannotBegin, Works, Stuck)
    del taken["consumer_s"]
    assert taken == {
        "consumers": 4,
        "consumers_killed": 1,
        "consumers_failed": 2,
        "freed_bytes": 0,
        "consumer_units": 7,
    }
    told = "rollout.custom.consumer: it failed, and counts nothing: ValueError: the judge does not answer"
    assert told in caplog.text
    assert "no such checkpoint" in caplog.text


def test_a_consumer_that_is_none_is_refused() -> None:
    none = "cannot be imported"
    for name, told in (("nosuch:X", none), ("threading", none), ("time:sleep", "has no run")):
        with pytest.raises(InputError, match=told):
            load_consumer(name)
