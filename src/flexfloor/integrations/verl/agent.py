"""verl's agent-loop worker, which tells the server to which session a request belongs, and when a session has ended."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from flexfloor.integrations.verl.server import SERVER
from flexfloor.integrations.verl.sessions import Session

_session: ContextVar[Session | None] = ContextVar("session", default=None)

# verl decorates the class, and an actor class cannot be inherited from.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class SessionClient:
    """verl's client of rollout servers, which adds the session of the agent loop that calls it.

    Agent loops run as tasks of one event loop, each in a context of its own: they need not know about it.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request_id: str, **arguments: Any) -> Any:
        return await self._client.generate(request_id, flexfloor=_session.get(), **arguments)


class SessionWorker(_Worker):
    llm_client: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.llm_client = SessionClient(self.llm_client)
        self._server = ray.get_actor(SERVER)

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        uid = prompt["uid"]
        try:
            await super()._run_prompt(prompt, *args, **kwargs)
        finally:  # also when it fails before there is a session
            self._server.end_prompt.remote(uid)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        session = (kwargs["uid"], kwargs["session_id"])
        before = _session.set(session)
        try:
            return await super()._run_agent_loop(*args, **kwargs)
        finally:
            _session.reset(before)
            self._server.end_session.remote(session)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        # The loop has generated what it wants; rewards, which come next, need no fleet.
        self._server.end_session.remote((kwargs["uid"], kwargs["session_id"]))
        return await super()._agent_loop_postprocess(output, validate, **kwargs)
