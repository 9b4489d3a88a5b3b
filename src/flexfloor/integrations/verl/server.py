"""The rollout server: a Ray actor that owns the fleet of a replica and runs verl's steps on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError
from flexfloor.fleets.engine.fleet import EngineFleet, launch_engine
from flexfloor.integrations.ray.launcher import RayLauncher
from flexfloor.integrations.ray.leases import Place
from flexfloor.integrations.verl.consumers import Bundle, Consumers, RecallingFleet
from flexfloor.integrations.verl.driving import AbandonedError, Outcome, StepRollout
from flexfloor.integrations.verl.sampling import read_sampling
from flexfloor.integrations.verl.sessions import Announcement, Session
from flexfloor.integrations.verl.settings import VerlSettings, check_options
from flexfloor.ledger.metrics import PREFIX
from flexfloor.world.lengths.store import load_history
from flexfloor.world.profiles import load_profile

SERVER = "flexfloor_server"
"""Name of the actor, within the run's Ray namespace."""

MOST_CALLS = 100_000
"""Calls that may wait in the actor at once: all first requests of a batch wait there for one another."""


class RolloutServer:
    """Verbs that verl calls, and (last) those of this package. One event loop runs them all."""

    def __init__(self, settings: VerlSettings, places: Sequence[Place] = (), bundles: Sequence[Bundle] = ()) -> None:
        """places: where the workers of the training are, and the accelerators that they hold; bundles: where these are
        reserved; both in the order of the workers."""
        check_options(settings)
        self._settings = settings
        self._launcher: RayLauncher | None = None
        if len({place.machine.name for place in places}) > 1:
            self._launcher = RayLauncher(settings.engine.device, places)
        elif settings.engine.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device for place in places for device in place.devices)
        options = settings.options
        self._consumers = (
            None
            if options.consumer is None
            else Consumers(options.consumer, list(bundles), options.consumer_gpus, options.consumer_grace_s)
        )
        self._fleet: EngineFleet | None = None
        self._history: Path | None = None
        self._current: StepRollout | None = None
        self._outcomes: list[asyncio.Task[Outcome]] = []
        self._asleep = False
        self._has_weights = True

    async def launch(self) -> None:
        """Start the fleet. Raises InputError before a process is started."""
        s = self._settings
        options = s.engine.model_dump()
        self._fleet = await asyncio.to_thread(launch_engine, s.model, s.workers, start_by=self._launcher, **options)

    @property
    def fleet(self) -> EngineFleet:
        if self._fleet is None:
            raise FlexFloorError("the fleet was not launched")
        return self._fleet

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        flexfloor: Session | None = None,
        **rest: Any,
    ) -> TokenOutput:
        """One turn. flexfloor: the session it belongs to, which our agent-loop worker adds."""
        if image_data or video_data or any(value for value in rest.values()):
            raise UnsupportedError("images, videos and sound cannot be generated from; FlexFloor serves text models")
        if flexfloor is None or self._current is None:
            raise InputError(
                "a request came without its session; set +actor_rollout_ref.rollout.agent.agent_loop_manager_class="
                "flexfloor.integrations.verl.manager.FlexFloorManager"
            )
        s, session = self._settings, (str(flexfloor[0]), int(flexfloor[1]))
        step = self._current.sampling_step(session)
        sampling, wants_logprobs = read_sampling(sampling_params, s, len(prompt_ids), step)
        version = self.fleet.info.weights_version
        try:
            response = await self._current.generate(session, [int(t) for t in prompt_ids], sampling)
        except AbandonedError:
            return TokenOutput(
                token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": version}
            )
        return TokenOutput(
            token_ids=response.tokens,
            log_probs=response.logprobs.tolist() if wants_logprobs else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": version, "request_id": response.request_id},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Give the rollout up: what is under way is answered as aborted, without tokens."""
        if self._current is not None and self._current.takes_more:
            self._current.abandon()
            await asyncio.wait(self._outcomes)
            await asyncio.to_thread(self.fleet.start)  # nothing is live any more, and released workers are back

    async def resume_generation(self) -> None:
        """After an abort there is nothing to resume: the next announcement begins the next rollout."""

    async def clear_kv_cache(self) -> None:
        """No KV outlives its rollout."""

    async def start_profile(self, **_: Any) -> None:
        """verl's profilers look at Ray actors; the workers of a fleet have the ledger."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    # -- memory and weights ----------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Wait for the end of the rollout, then give the memory of experts and KV back for the training."""
        await self._quiet()
        if self._settings.sleeps and not self._asleep:
            await asyncio.to_thread(self.fleet.sleep)
            self._asleep, self._has_weights = True, False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Memory again; the weights come after it."""
        if self._asleep:
            await asyncio.to_thread(self.fleet.wake)
            self._asleep = False

    async def load_weights(self, folder: str, version: int | None) -> None:
        """Weights that the training side has written to this machine's shared memory. version: the training step."""
        await self._quiet()
        await self.wake_up()
        version = self.fleet.info.weights_version if version is None else version
        await asyncio.to_thread(self.fleet.load_weights, Path(folder), version, only_here=True)
        self._has_weights = True

    async def memory(self) -> list[int]:
        """Bytes that each worker's process holds beside what it shares with others."""
        await self._quiet()
        status = await asyncio.to_thread(self.fleet.status)
        return [w.memory_bytes for w in status.workers]

    async def processes(self) -> list[int]:
        """Process ids of the workers."""
        return list(self.fleet.processes.values())

    # -- sessions --------------------------------------------------------------------------------------------------

    async def announce(self, announcement: Announcement, folder: str) -> None:
        """The prompts of a batch, before any of its requests is sent. folder: where the run keeps its files."""
        if (sessions := len(announcement.sessions)) > MOST_CALLS // 2:
            raise InputError(f"a batch asks for {sessions} samples; a rollout takes {MOST_CALLS // 2}: make it smaller")
        current = self._current
        if current is not None and current.takes_more and current.split == announcement.split:
            current.extend(announcement)
            return
        await self._quiet(keep=True)
        if self._asleep or not self._has_weights:
            raise FlexFloorError("the fleet has no weights; verl updates them after it has put a rollout to sleep")
        consumers = self._consumers
        self._current = StepRollout(
            self.fleet if consumers is None else RecallingFleet(self.fleet, consumers),
            announcement,
            self._options(folder),
            ledger=self._ledger(announcement),
            on_release=None if consumers is None else consumers.start,
            more_metrics=None if consumers is None else consumers.take_metrics,
        )
        self._outcomes.append(asyncio.create_task(self._current.outcome()))

    async def end_session(self, session: Session) -> None:
        if self._current is not None:
            self._current.end_sessions([(str(session[0]), int(session[1]))])

    async def end_prompt(self, uid: str) -> None:
        if self._current is not None:
            self._current.end_prompt(str(uid))

    async def collect(self) -> list[Outcome]:
        """What the rollouts since the last call came to; waits for the one that runs. Raises what one failed with."""
        outcomes, self._outcomes = self._outcomes, []
        return [await outcome for outcome in outcomes]

    async def _quiet(self, keep: bool = False) -> None:
        """Wait until no rollout runs. keep: errors for `collect`, else they are raised here as well."""
        if self._outcomes:
            await asyncio.wait(self._outcomes)
            for outcome in () if keep else self._outcomes:
                outcome.result()

    def _options(self, folder: str) -> dict[str, Any]:
        options = self._settings.options
        if options.history == "auto":
            self._history = Path(folder) / "length_history.sqlite"
            self._history.parent.mkdir(parents=True, exist_ok=True)
        elif options.history is not None:
            self._history = Path(options.history)
        load_history(self._history)
        return {
            "policy": options.policy,
            "knowledge": options.knowledge,
            "history": self._history,
            "max_slowdown": options.max_slowdown,
            "min_workers": options.min_workers,
            "chunk": options.chunk,
            "profile": load_profile(self._settings.engine.resolved_profile),
        }

    def _ledger(self, announcement: Announcement) -> Path | None:
        folder = self._settings.options.ledgers
        if folder is None:
            return None
        number = f"-{announcement.number}" if announcement.number else ""
        return folder / f"{announcement.split}-{announcement.step:06d}{number}.jsonl"


def metrics_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For verl's loggers. Those of a validation stand under `flexfloor/val/`; of several rollouts, the last counts."""
    shown: dict[str, Any] = {}
    for outcome in outcomes:
        prefix = PREFIX if outcome.split == "train" else f"{PREFIX}val/"
        shown |= {f"{prefix}{name}": value for name, value in outcome.values.items()}
    return shown
