"""Settings under one name everywhere: command line, TOML, trainer options. Units stand in the field names or docs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from flexfloor.errors import InputError

if TYPE_CHECKING:  # numpy comes with it; options and help texts do without
    from flexfloor.requests import SamplingParams

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: Any) -> Any:
    """'2GiB', '512MiB', '1.5GB' or a number → bytes. Other types pass through for pydantic to judge."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", value, re.IGNORECASE)
    if not found or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 2GiB or 500MB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


MISSING = "is missing"
MOST_WORKERS, MOST_LOAD = 4096, 10**6
"""Of a simulated fleet: workers, and requests for each."""
_ALIASES = {"static": "static-spread"}


def explain(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """pydantic's report as one line: (path of the first field at fault, what is wrong with it)."""
    first = error.errors()[0]
    field = tuple(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return field, MISSING
    if first["type"] == "extra_forbidden":
        return field, "is not a setting"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    # What is wrong with several settings together names them.
    return field, message if isinstance(first["input"], dict) else f"{message}, got {first['input']!r}"


def unknown_key(name: str, known: Iterable[str], table: str = "") -> str:
    """`unknown key 'polcy'; did you mean 'policy'?`, or what there is where nothing comes near. table: its name."""
    known = list(known)
    guess = get_close_matches(name, known, 1)
    remedy = f"did you mean {guess[0]!r}?" if guess else f"there is {', '.join(known)}"
    return f"unknown key {name!r}{f' in [{table}]' if table else ''}; {remedy}"


def read_toml(path: Path, option: str = "") -> dict[str, Any]:
    """The content of a TOML file. option: that names it. Raises InputError."""
    where = f"{option} {path}".strip()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{where} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{where} is not TOML ({error})") from None


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, **values: Any) -> Self:
        """Like the constructor, with pydantic's report turned into one line.

        Raises InputError naming the first field at fault.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            field, message = explain(error)
            raise InputError(f"{'.'.join(field) or 'settings'}: {message}") from None


class EngineSettings(Settings):
    """What a fleet of worker processes is made of."""

    worker_memory: Bytes = Field(2 * 2**30, gt=0, description="dense weights + arena + activation reserve, per worker")
    threads_per_worker: int = Field(1, ge=1, le=256, description="CPU threads of one worker")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu, or cuda (NCCL, one worker per GPU)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: as in the checkpoint")
    numerics: Literal["auto", "bitwise", "fast"] = Field(
        "auto", description="bitwise: tokens do not depend on batch, workers or preemption; auto: bitwise on cpu"
    )
    transport: Literal["auto", "socket", "gloo", "nccl"] = Field(
        "auto", description="between workers; auto: socket on cpu, nccl on cuda"
    )
    worker_timeout: float = Field(30.0, gt=0, description="seconds without a heartbeat after which a worker is failed")
    launcher: str = Field("local", description="how worker processes are started: local, or ray")
    release: Literal["park", "end"] = Field(
        "park", description="a released worker's process: parked with its dense weights, or ended and started anew"
    )
    page_tokens: int = Field(16, ge=4, le=256, multiple_of=4, description="tokens of one KV page")
    max_batch: int = Field(256, ge=1, description="most live requests on one worker")
    prefill_tokens: int = Field(512, ge=1, description="most prompt tokens a worker computes in one iteration")
    pace: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="every iteration lasts at least this many times what it takes on the device of `profile`",
    )
    pace_model: str | None = Field(
        None,
        min_length=1,
        description="model whose iterations `pace` emulates: a preset like qwen3-30b-a3b, or a config.json; "
        "if not given, the one that runs",
    )
    profile: str | None = Field(
        None,
        min_length=1,
        description="device profile to plan and to pace by: h200, h800, slow, cpu, or a TOML file; "
        "if not given, cpu on a CPU without `pace`, else h200",
    )

    @property
    def resolved_profile(self) -> str:
        return self.profile or ("cpu" if self.device == "cpu" and self.pace is None else "h200")

    @property
    def resolved_transport(self) -> Literal["socket", "gloo", "nccl"]:
        if self.transport == "auto":
            return "socket" if self.device == "cpu" else "nccl"
        return self.transport

    @property
    def resolved_numerics(self) -> Literal["bitwise", "fast"]:
        if self.numerics == "auto":
            return "bitwise" if self.device == "cpu" else "fast"
        return self.numerics


class SamplingSettings(Settings):
    samples: int = Field(1, ge=1, description="responses per prompt")
    max_tokens: int = Field(128, ge=1, description="most tokens of a response")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of tokens with this probability")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    stop: tuple[str, ...] = Field((), description="strings that end a response")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the sampling")
    step: int = Field(0, ge=0, lt=2**63, description="training step; changes the random numbers like the seed does")

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    def to_params(self) -> SamplingParams:
        from flexfloor.requests import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            seed=self.seed,
            step=self.step,
        )


class RunSettings(Settings):
    """What every command takes that generates responses."""

    model: Path = Field(description="folder of a Hugging Face mixture-of-experts checkpoint")
    prompts: Path = Field(description="JSONL or Parquet with prompt or prompt_tokens, optional uid and max_tokens")
    workers: int = Field(2, ge=1, description="expert-parallel worker processes")
    knowledge: Literal["auto", "none", "history", "shuffled", "oracle"] = Field(
        "auto",
        description="what the policy knows of lengths; shuffled: other prompts' history; oracle: the forced lengths; "
        "auto: history where `history` is given",
    )
    history: Path | None = Field(None, description="length history: read, and added to at the end; made if missing")
    split: Literal["train", "eval"] = Field(
        "train", description="which lengths of the history count, and what these are added to it as"
    )
    max_slowdown: float = Field(
        0.02, ge=0, lt=1, allow_inf_nan=False, description="share of throughput that releasing workers may cost"
    )
    min_workers: int = Field(1, ge=1, description="workers that are never released")
    order: str = Field("arrival", description="arrival, or shuffle:SEED")
    chunk: int = Field(16, ge=1, description="iterations between two looks of the driver")
    force_lengths: str | None = Field(
        None,
        min_length=1,
        description="every response gets exactly its length of this file, or the max_tokens of its row in the prompts",
    )
    tensorboard: Path | None = Field(None, description="folder for TensorBoard's scalars, a run for each policy")
    quiet: bool = Field(False, description="no live view and no progress lines")
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        if order != "arrival" and not re.fullmatch(r"shuffle(:\d+)?", order):
            raise ValueError("order must be 'arrival' or 'shuffle:SEED'")
        return order


class RolloutSettings(RunSettings):
    """Everything `flexfloor rollout` takes."""

    out: Path = Field(description="responses, one JSON object a line in input order")
    summary: Path | None = Field(None, description="what the rollout took; next to `out` as summary.json if not given")
    ledger: Path | None = Field(None, description="record of the run; next to `out` as ledger.jsonl if not given")
    trace: Path | None = Field(None, description="Chrome trace of the run, for Perfetto; gzipped if named .gz")
    policy: str = Field(
        "static",
        description="static, static-grouped, planned, release, fixed:N or flexfloor: who runs where and leaves",
    )


def _split_names(value: Any) -> Any:
    """'a, b' → ('a', 'b'). Other types pass through for pydantic to judge."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class CompareSettings(RunSettings):
    """Everything `flexfloor compare` takes."""

    policies: Names = Field(
        description="policies to compare, with commas; the baseline is static or static-spread, else the first"
    )
    out_dir: Path = Field(Path("runs/compare"), description="folder for comparison.json and a folder for each policy")
    traces: bool = Field(False, description="a Chrome trace of each rollout, for Perfetto, in its policy's folder")

    @field_validator("policies")
    @classmethod
    def _different_names(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        if not all(policies) or not policies:
            raise ValueError("name policies with one comma between them")
        if len({_ALIASES.get(name, name) for name in policies}) < len(policies):
            raise ValueError("a policy is named twice")
        return policies


Numbers = Annotated[tuple[int, ...], BeforeValidator(_split_names)]
Shares = Annotated[tuple[float, ...], BeforeValidator(_split_names)]


class SimulateSettings(Settings):
    """Everything `flexfloor simulate` takes. Where several values may stand, all combinations are simulated."""

    lengths: str = Field(
        min_length=1,
        description="scenario (R1, R2, lognormal, deepcoder-like, dapo), .toml file of one, or .csv file of a trace",
    )
    trace: Path | None = Field(None, description="CSV file of a scenario that replays one (dapo)")
    workload: str | None = Field(None, description="which workload of a trace that has several")
    architecture: str = Field(
        "qwen3-30b-a3b", min_length=1, description="config.json of a Hugging Face model, or the name of a preset"
    )
    profile: str | None = Field(None, description="device profile; the scenario's if not given")
    workers: Numbers = Field((), description="expert-parallel workers, with commas; the scenario's if not given")
    load: Numbers = Field((), description="requests for each worker, with commas; the scenario's if not given")
    policies: Names = Field(
        ("static-spread", "static-grouped", "planned", "release", "flexfloor", "fixed:best"),
        description="policies, with commas; fixed:best: the best fixed:N, chosen in hindsight",
    )
    knowledge: Names = Field(("history",), description="what is known of lengths: none, history, shuffled, oracle")
    max_slowdown: Shares = Field((0.02,), description="shares of throughput that releasing workers may cost")
    seeds: int = Field(8, ge=1, le=10_000, description="draws of the lengths")
    first_seed: int = Field(0, ge=0, lt=2**32, description="seed of the first draw; the others follow")
    chunk: int = Field(16, ge=1, description="iterations between two looks of the driver")
    max_batch: int = Field(256, ge=1, description="most live requests on one worker")
    prefill_tokens: int = Field(8192, ge=1, description="most prompt tokens a worker computes in one iteration")
    jobs: int = Field(1, ge=1, le=1024, description="processes that simulate")
    out: Path | None = Field(None, description="JSON file for every run, what they come to, and what the words mean")
    ledgers: Path | None = Field(None, description="folder for the ledger of every run; fixed:best has several")
    quiet: bool = Field(False, description="no progress bar")

    @field_validator("workers", "load", "policies", "knowledge", "max_slowdown")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        values = tuple(_ALIASES.get(value, value) for value in values)
        if len(set(values)) < len(values):
            raise ValueError("a value is given twice")
        if any(isinstance(value, int) and value < 1 for value in values):
            raise ValueError("give whole numbers from 1, with commas between them")
        if any(isinstance(value, float) and not 0 <= value < 1 for value in values):
            raise ValueError("give shares of at least 0 and below 1, with commas between them")
        return values

    @field_validator("workers", "load")
    @classmethod
    def _not_too_many(cls, values: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        most = MOST_WORKERS if info.field_name == "workers" else MOST_LOAD
        if max(values, default=0) > most:
            raise ValueError(f"at most {most} are simulated")
        return values

    @field_validator("policies", "knowledge", "max_slowdown")
    @classmethod
    def _at_least_one(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values or not all(value != "" for value in values):
            raise ValueError("give values with one comma between them")
        return values
