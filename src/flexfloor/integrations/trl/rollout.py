"""TRL's rollout function: prompts of a generation batch → one rollout on a fleet that it owns → token ids.

TRL hands over prompts as the dataset has them, each repeated as often as it is to be sampled, and wants token ids and
log-probabilities back in that order (`GRPOTrainer(rollout_func=...)`, experimental in TRL).
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from flexfloor.errors import FlexFloorError, InputError, UnsupportedError
from flexfloor.fleet import Fleet
from flexfloor.integrations.trl.metrics import StepCallback, log_metrics
from flexfloor.integrations.trl.weights import (
    check_gap,
    check_numerics,
    check_resumed,
    fingerprint,
    logprob_gap,
    policy_of,
)
from flexfloor.ledger.events import LedgerWriter
from flexfloor.ledger.metrics import rollout_metrics
from flexfloor.ledger.timing import split_time
from flexfloor.policy import make_policy
from flexfloor.prompts import encode_prompt
from flexfloor.requests import Request, Response, SamplingParams, hash_prompt
from flexfloor.rollout import RolloutResult, rollout
from flexfloor.settings import EngineSettings
from flexfloor.world.lengths.knowledge import make_lengths
from flexfloor.world.lengths.observations import Split
from flexfloor.world.lengths.store import LengthHistory, load_history
from flexfloor.world.profiles import load_profile

HISTORY_FILE = "length_history.sqlite"
"""Name of the history in the trainer's output folder, and of its copy in every checkpoint."""

_IN_A_STEP = 2**20  # rollouts of one training step that get random numbers of their own
_EVALUATION = 2**62


class FlexFloorRollout:
    """The rollout function of a GRPOTrainer, and the owner of the fleet that it generates with.

    model: checkpoint folder that the fleet starts from; before a rollout it gets the trainer's weights whenever these
    have changed. workers, policy, knowledge, max_slowdown, min_workers, chunk: as of `flexfloor.rollout`. history: file
    of the length history; `auto` is `length_history.sqlite` in the trainer's output folder, which every checkpoint gets
    a copy of and which goes back to that copy at a resume; None forgets lengths. ledgers: folder for a ledger of every
    rollout. check_responses: responses of a rollout whose log-probabilities are held against the trainer's own forward.
    on_phase: told what the launch does. on_record: told each record of a rollout's ledger. engine: fields of
    EngineSettings.

    Use it as a context manager, or `close` it; it also closes when a rollout fails. Raises InputError before a process
    is started.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        workers: int = 2,
        policy: str = "flexfloor",
        knowledge: str = "auto",
        history: Path | str | Literal["auto"] | None = "auto",
        max_slowdown: float = 0.02,
        min_workers: int = 1,
        chunk: int = 16,
        ledgers: Path | str | None = None,
        check_responses: int = 1,
        on_phase: Callable[[str], None] | None = None,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        **engine: Any,
    ) -> None:
        if check_responses < 0:
            raise InputError(f"check_responses is {check_responses}; give 0 (no check) or more")
        if knowledge == "oracle":
            raise InputError("knowledge 'oracle': nobody knows lengths in training; give auto, none or history")
        if knowledge in ("history", "shuffled") and history is None:
            raise InputError(f"knowledge {knowledge!r} needs a length history; leave history as it is, or give a file")
        profile = load_profile(EngineSettings.parse(**engine).resolved_profile)
        limits: dict[str, Any] = {"max_slowdown": max_slowdown, "min_workers": min_workers}
        make_policy(policy, lengths=make_lengths("none"), workers=workers, profile=profile, **limits)  # what it refuses
        self._history = Path(history) if history not in (None, "auto") else None
        load_history(self._history)
        self._history_by_trainer = history == "auto"
        self._ledgers = Path(ledgers) if ledgers is not None else None
        self._on_record = on_record
        self._check_responses = check_responses
        self._options: dict[str, Any] = limits | {
            "policy": policy, "knowledge": knowledge, "chunk": chunk, "profile": profile
        }  # fmt: skip
        self._callback: StepCallback | None = None
        self._trainer: Any = None
        self._loaded: tuple[Any, ...] | None = None
        self._at: dict[Split, tuple[int, int]] = {}  # the trainer's step and the number of the rollout in it
        self.responses_sha256: str | None = None  # of the last rollout
        self._fleet = Fleet.launch(model, workers=workers, on_phase=on_phase, **engine)
        self._closing = weakref.finalize(self, self._fleet.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fleet. Safe to call twice."""
        self._closing()

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def add_reward_seconds(self, seconds: float) -> None:
        """Told by who calls the reward functions, so that their time is not taken for training."""
        if self._callback is not None:
            self._callback.clock.reward_s += seconds

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """prompts: as in the dataset, siblings next to each other. Returns for each prompt, in their order: prompt_ids,
        completion_ids, logprobs; and for the reward functions request_id and finish_reason.

        Raises InputError for what the trainer asks and FlexFloor does not do, FlexFloorError when weights are stale.
        """
        if not self._closing.alive:
            raise FlexFloorError("the rollout function is closed; make a new one")
        begin = time.perf_counter()
        try:
            if self._trainer is not trainer:
                self._attach(trainer, begin)
            mode: Split = "train" if trainer.model.training else "eval"
            model = policy_of(trainer)
            values = {"sync_s": self._sync(model, trainer.state.global_step)}
            requests = self._requests(prompts, trainer, mode)
            result, ledger = self._generate(requests, mode, trainer.state.global_step)
            checked = _spread(len(requests), self._check_responses)
            if checked:
                gap = logprob_gap(model, [requests[i] for i in checked], [result.responses[i] for i in checked])
                values["logprob_gap"] = gap
                check_gap(gap, model, trainer.state.global_step)
        except BaseException:
            self.close()
            raise
        self.responses_sha256 = result.summary.responses_sha256
        split = split_time(ledger.records)
        values |= rollout_metrics(result.summary, split)
        assert self._callback is not None
        clock = self._callback.clock
        spent = time.perf_counter() - begin
        generation = split.prefill_s + split.decode_s + split.resize_s + (result.summary.regrow_s or 0.0)
        clock.rollout_s += spent
        clock.generation_s += generation
        values |= {"rollout_s": spent, "bookkeeping_s": spent - generation - split.plan_s - values["sync_s"]}
        log_metrics(trainer, mode, values)
        return _as_trl_wants(requests, result.responses)

    def _attach(self, trainer: Any, begin: float) -> None:
        """The first rollout for a trainer: look whether we can serve it, and follow its steps from now on."""
        check_numerics(policy_of(trainer), self._fleet.info.dtype)
        callback = StepCallback(lambda values: log_metrics(trainer, "train", values), self._save_history)
        callback.clock.begin = begin  # the step has begun already
        trainer.add_callback(callback)
        self._trainer, self._callback = trainer, callback
        if self._history_by_trainer:
            folder = Path(trainer.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._history = folder / HISTORY_FILE
        checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        if trainer.state.global_step > 0 and checkpoint.is_dir():
            check_resumed(policy_of(trainer), checkpoint)
            if self._history is not None and (checkpoint / HISTORY_FILE).exists():
                with LengthHistory(checkpoint / HISTORY_FILE, create=False) as saved:
                    saved.copy_to(self._history)
        load_history(self._history)

    def _save_history(self, checkpoint: str) -> None:
        if self._history is not None and self._history.exists() and os.path.isdir(checkpoint):
            with LengthHistory(self._history) as history:
                history.copy_to(Path(checkpoint) / HISTORY_FILE)

    def _sync(self, model: Any, step: int) -> float:
        """The trainer's weights into the fleet, unless it has them. Returns seconds."""
        begin = time.perf_counter()
        now = fingerprint(model, step)
        if now != self._loaded:
            self._fleet.load_weights(model.named_parameters(), version=step)
            self._loaded = now
        return time.perf_counter() - begin

    def _requests(self, prompts: Sequence[Any], trainer: Any, mode: Split) -> list[Request]:
        sampling = _sampling(trainer, self._step(trainer.state.global_step, mode))
        samples = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        template = dict(getattr(trainer, "chat_template_kwargs", None) or {})
        template |= {"chat_template": own} if (own := getattr(trainer, "chat_template", None)) else {}
        requests, seen = [], Counter[str]()
        last: Any = None
        for number, prompt in enumerate(prompts, 1):
            if last is None or prompt != last[0]:
                tokens = encode_prompt(f"prompt {number} of the batch", prompt, trainer.processing_class, **template)
                last = (prompt, tokens, hash_prompt(tokens))
            _, tokens, key = last
            occurrence, sample = divmod(seen[key], samples)
            seen[key] += 1
            requests.append(Request(f"{key}#{occurrence}/{sample}", key, sample, tokens, sampling))
        return requests

    def _step(self, step: int, mode: Split) -> int:
        """A number of its own for every rollout, the same after a resume and with or without an evaluation before it:
        with it, its random numbers are its own."""
        before, number = self._at.get(mode, (-1, 0))
        self._at[mode] = (step, number + 1 if before == step else 0)
        return step * _IN_A_STEP + self._at[mode][1] + (_EVALUATION if mode == "eval" else 0)

    def _generate(self, requests: list[Request], mode: Split, step: int) -> tuple[RolloutResult, LedgerWriter]:
        number = self._at[mode][1]
        name = f"{mode}-{step:06d}" + (f"-{number}" if number else "")
        ledger = LedgerWriter(None if self._ledgers is None else self._ledgers / f"{name}.jsonl", self._on_record)
        result = rollout(
            self._fleet,
            requests,
            history=self._history,
            split=mode,
            ledger=ledger,
            **self._options,
        )
        return result, ledger


def _sampling(trainer: Any, step: int) -> SamplingParams:
    """Raises UnsupportedError for a setting of the trainer that would be left out silently."""
    args = trainer.args
    for name, neutral in (("min_p", None), ("repetition_penalty", 1.0), ("generation_kwargs", None)):
        if (value := getattr(args, name, neutral)) not in (neutral, {}):
            raise UnsupportedError(f"{name} is {value!r}; FlexFloor does not sample with it: leave it out")
    if getattr(trainer, "tools", None) or getattr(trainer, "environments", None):
        raise UnsupportedError("tools and environments need several turns; FlexFloor's rollout function has one")
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        stop_token_ids=tuple(trainer.eos_token_ids),
        seed=args.seed,
        step=step,
    )


def _spread(count: int, wanted: int) -> list[int]:
    """`wanted` indices below count, evenly spread."""
    wanted = min(wanted, count)
    return [index * count // wanted for index in range(wanted)]


def _as_trl_wants(requests: Sequence[Request], responses: Sequence[Response]) -> dict[str, list[Any]]:
    return {
        "prompt_ids": [list(r.prompt_tokens) for r in requests],
        "completion_ids": [r.tokens for r in responses],
        "logprobs": [r.logprobs.tolist() for r in responses],
        "request_id": [r.request_id for r in responses],
        "finish_reason": [r.finish_reason for r in responses],
    }
