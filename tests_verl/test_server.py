"""The rollout server on a real fleet: what verl may do to it, and what must come of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from serving import announced, prompt_of

from flexfloor.errors import FlexFloorError, InputError, WorkerFailedError
from flexfloor.integrations.verl.driving import Outcome
from flexfloor.integrations.verl.server import RolloutServer
from flexfloor.integrations.verl.sessions import Announcement, Session

pytest_plugins = ("serving",)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def turn(server: RolloutServer, session: Session, prompt: list[int] | None = None, **sampling: Any) -> Any:
    prompt = prompt_of(session[0]) if prompt is None else prompt
    return server.generate(prompt, SAMPLING | sampling, "request", flexfloor=session)


async def sample(server: RolloutServer, session: Session, **sampling: Any) -> Any:
    """A session of one turn, as our agent-loop worker runs it."""
    try:
        return await turn(server, session, **sampling)
    finally:
        await server.end_session(session)


async def step(
    server: RolloutServer, announcement: Announcement, folder: Path, shuffle: int | None = None
) -> tuple[dict[Session, Any], Outcome]:
    await server.announce(announcement, str(folder))
    sessions = announcement.sessions
    if shuffle is not None:
        random.Random(shuffle).shuffle(sessions)
    answers = await asyncio.gather(*[sample(server, session) for session in sessions])
    (outcome,) = await server.collect()
    return dict(zip(sessions, answers, strict=True)), outcome


def test_every_sample_is_generated_once_with_the_same_bits_under_any_policy_and_arrival(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    async def run(policy: str, shuffle: int) -> tuple[dict[Session, list[int]], list[str | None], list[float]]:
        async with serve(policy) as server:
            tokens: dict[Any, list[int]] = {}
            hashes, released = [], []
            for number in (1, 2):
                answers, outcome = await step(server, announced(6, 3, step=number), tmp_path, shuffle)
                assert all(len(a.token_ids) == len(a.log_probs) <= 64 for a in answers.values())
                assert {a.extra_fields["request_id"] for a in answers.values()} == {
                    f"data:{p}#0/{s}" for p in range(6) for s in range(3)
                }
                tokens |= {(number, *session): answer.token_ids for session, answer in answers.items()}
                hashes.append(outcome.responses_sha256)
                released.append(outcome.values["released_workers"])
            return tokens, hashes, released

    static = asyncio.run(run("static", 0))
    assert static[1][0] != static[1][1]
    assert sum(static[2]) == 0
    for policy in ("release", "flexfloor"):
        elastic = asyncio.run(run(policy, 1))
        assert static[0] == elastic[0]
        assert static[1] == elastic[1]
        # Whether flexfloor finds a release worth it depends on how long iterations take here.
        assert sum(elastic[2]) > 0 or policy == "flexfloor"


def test_fewer_requests_than_workers(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(workers=3) as server:
            answers, outcome = await step(server, announced(1, 1), tmp_path)
            (answer,) = answers.values()
            assert outcome.values["response_tokens"] == len(answer.token_ids) > 0

    asyncio.run(run())


def test_a_late_request_is_waited_for_and_a_late_batch_joins(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve() as server:
            first, second = announced(2, 1), announced(2, 1, number=1)
            await server.announce(first, str(tmp_path))
            early = asyncio.create_task(turn(server, ("uid-0-0", 0)))
            await asyncio.sleep(0.3)
            assert not early.done()
            late = asyncio.create_task(sample(server, ("uid-0-1", 0)))
            await early
            await late
            await server.announce(second, str(tmp_path))  # the first session of the first batch is still open
            await asyncio.gather(*[sample(server, session) for session in second.sessions])
            await server.end_session(("uid-0-0", 0))
            (outcome,) = await server.collect()
            assert len(outcome.uids) == 4

    asyncio.run(run())


def test_agent_loops_that_raise_before_they_generate(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve() as server:
            await server.announce(announced(2, 2), str(tmp_path))
            await server.end_prompt("uid-0-1")
            answers = await asyncio.gather(*[sample(server, ("uid-0-0", s)) for s in range(2)])
            assert all(a.token_ids for a in answers)
            assert (await server.collect())[0].values["response_tokens"] > 0
            await server.announce(announced(1, 2, step=2), str(tmp_path))
            await server.end_prompt("uid-0-0")  # nobody generates
            (outcome,) = await server.collect()
            assert outcome.responses_sha256 is None
            assert (await step(server, announced(1, 2, step=3), tmp_path))[1].values["response_tokens"] > 0

    asyncio.run(run())


def test_a_request_that_cannot_run_is_refused_alone(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve() as server:
            await server.announce(announced(2, 1), str(tmp_path))
            long = asyncio.create_task(turn(server, ("uid-0-0", 0), [9] * 400))
            good = await sample(server, ("uid-0-1", 0))
            with pytest.raises(InputError, match="400"):
                await long
            (outcome,) = await server.collect()
            assert good.token_ids
            assert outcome.values["refused_requests"] == 1
            assert "400" in str(outcome.refused)

    asyncio.run(run())


def test_an_abort_answers_everybody_and_the_next_rollout_is_whole(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(chunk=1) as server:
            announcement = announced(4, 2)
            await server.announce(announcement, str(tmp_path))
            waiting = [asyncio.create_task(sample(server, s, ignore_eos=True)) for s in announcement.sessions]
            await asyncio.sleep(0.01)
            await server.abort_all_requests()
            answers = await asyncio.gather(*waiting)
            assert {a.stop_reason for a in answers} <= {"aborted", "completed"}
            assert any(a.stop_reason == "aborted" for a in answers)
            with pytest.raises(FlexFloorError, match="given up"):
                await server.collect()
            _, outcome = await step(server, announced(4, 2, step=2), tmp_path)
            assert outcome.values["response_tokens"] > 0

    asyncio.run(run())


def test_a_caller_that_is_cancelled_disturbs_nobody(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve() as server:
            await server.announce(announced(1, 2), str(tmp_path))
            gone = asyncio.create_task(sample(server, ("uid-0-0", 0)))
            kept = asyncio.create_task(sample(server, ("uid-0-0", 1)))
            await asyncio.sleep(0.01)
            gone.cancel()
            assert (await kept).token_ids
            await server.collect()

    asyncio.run(run())


def test_several_turns_of_a_session(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def talk(server: RolloutServer, session: Session) -> list[int]:
        prompt = prompt_of(session[0])
        for _ in range(3):
            answer = await turn(server, session, prompt, max_tokens=6)
            prompt = [*prompt, *answer.token_ids, 7]
        await server.end_session(session)
        return prompt

    async def run() -> list[list[int]]:
        async with serve() as server:
            announcement = announced(2, 2)
            await server.announce(announcement, str(tmp_path))
            texts = await asyncio.gather(*[talk(server, session) for session in announcement.sessions])
            (outcome,) = await server.collect()
            assert outcome.values["response_tokens"] == sum(
                len(t) - len(prompt_of(s[0])) - 3 for t, s in zip(texts, announcement.sessions, strict=True)
            )
            return texts

    assert asyncio.run(run()) == asyncio.run(run())


def test_sleep_gives_memory_back_and_new_weights_bring_the_same_tokens(
    serve: Callable[..., Any], models: Callable[[int], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        async with serve() as server:
            before = (await step(server, announced(4, 2), tmp_path))[1].responses_sha256
            awake = await server.memory()
            await server.sleep()
            await server.sleep()  # verl may do so twice
            asleep = await server.memory()
            experts = sum(t.nbytes for t in load_file(models(0) / "model.safetensors").values()) // 2
            assert sum(awake) - sum(asleep) > experts // 4
            with pytest.raises(FlexFloorError, match="has no weights"):
                await server.announce(announced(1, 1), str(tmp_path))
            await server.wake_up(["weights"])
            await server.load_weights(str(models(0)), 5)
            answers, outcome = await step(server, announced(4, 2), tmp_path)
            assert outcome.responses_sha256 == before
            assert {a.extra_fields["global_steps"] for a in answers.values()} == {5}

    asyncio.run(run())


def test_weights_twice_in_a_row_and_weights_that_do_not_belong(
    serve: Callable[..., Any], models: Callable[[int], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        async with serve() as server:
            old = (await step(server, announced(3, 2), tmp_path))[1].responses_sha256
            await server.load_weights(str(models(1)), 1)
            await server.load_weights(str(models(1)), 2)
            new = (await step(server, announced(3, 2), tmp_path))[1].responses_sha256
            assert new != old
            with pytest.raises(InputError):
                await server.load_weights(str(tmp_path), 3)
            assert (await step(server, announced(3, 2), tmp_path))[1].responses_sha256 == new

    asyncio.run(run())


def test_a_request_without_its_session_is_told_what_is_missing(serve: Callable[..., Any]) -> None:
    async def run() -> None:
        async with serve() as server:
            with pytest.raises(InputError, match="agent_loop_manager_class"):
                await server.generate([1, 2], SAMPLING, "request")

    asyncio.run(run())


def test_a_worker_that_dies_is_named(serve: Callable[..., Any], tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(chunk=1) as server:
            announcement, victim = announced(4, 2), (await server.processes())[1]
            await server.announce(announcement, str(tmp_path))
            waiting = [asyncio.create_task(sample(server, s, ignore_eos=True)) for s in announcement.sessions]
            await asyncio.sleep(0.01)  # all of it takes less than a tenth of a second
            os.kill(victim, signal.SIGKILL)
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert any(isinstance(a, WorkerFailedError) for a in answers)
            with pytest.raises(WorkerFailedError, match="worker 1"):
                await server.collect()

    asyncio.run(run())
