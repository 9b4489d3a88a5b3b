"""What is tried for real: GPUs, exchanges between workers, and a rollout on a tiny model."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from flexfloor.doctor.findings import Finding
from flexfloor.world.memory import format_bytes

if TYPE_CHECKING:
    from flexfloor.ledger.accounting import Summary
    from flexfloor.requests import Request
    from flexfloor.rollout import RolloutResult
    from flexfloor.world.resize import ResizePlan
    from flexfloor.world.status import FleetStatus


def check_gpus() -> Iterator[Finding]:
    """GPUs. Having none limits nothing on the CPU."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        yield Finding("note", "gpu", "none that this torch can use; --device cuda is refused")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"gpu {index}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}")
    if dist.is_nccl_available():
        yield Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        remedy = "install a build of torch with NCCL"
        yield Finding("warn", "nccl", "missing; --device cuda is refused", remedy)


def check_exchange(limit_s: float = 10.0) -> Iterator[Finding]:
    """Two members of a group find each other and exchange numbers, over each of the ways that workers on a CPU can."""
    if problem := _cannot_reach_itself(limit_s):
        remedy = "bring the loopback interface up (ip link set lo up), and allow TCP on 127.0.0.1 to this process"
        yield Finding("FAIL", "exchange", f"127.0.0.1 cannot be reached ({problem})", remedy)
        return
    answer = _exchange("socket", limit_s)
    if answer is not None:
        remedy = "allow Unix sockets to this process; a sandbox may forbid them"
        yield Finding("FAIL", "exchange", f"no exchange over Unix sockets ({answer})", remedy)
        return
    yield Finding("ok", "exchange", "two members exchange over Unix sockets")
    answer = _exchange("gloo", limit_s)
    if answer is None:
        yield Finding("ok", "gloo", "two members exchange over the loopback interface")
    else:
        yield Finding("note", "gloo", f"no exchange over loopback ({answer}); --transport gloo will not work")


def _cannot_reach_itself(limit_s: float) -> str | None:
    """Why a connection over loopback fails. The store through which members find each other would try for minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), limit_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _exchange(transport: Literal["socket", "gloo"], limit_s: float) -> object | None:
    """What went wrong between two members, each in a thread; None when nothing did."""
    import torch
    import torch.distributed as dist

    from flexfloor.fleets.engine.comm import join_group

    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        return error
    results: dict[int, object] = {}

    def take_part(worker: int) -> None:
        try:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
            group = join_group(transport, own, "doctor", 0, (0, 1), worker, limit_s)
            results[worker] = group.share_counts([worker + 7], torch.device("cpu"))
            group.close()
        except Exception as error:
            results[worker] = error

    threads = [Thread(target=take_part, args=(worker,), daemon=True) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return None if results == {0: [[7], [8]], 1: [[7], [8]]} else results.get(0, "no answer")


def check_rollout() -> Iterator[Finding]:
    """The main job, small: two workers generate on a random model, then again while one of them leaves."""
    from flexfloor.fleet import Fleet

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flexfloor-doctor-") as folder:
        make_model(Path(folder))
        options: dict[str, Any] = {"worker_memory": "256MiB", "numerics": "bitwise", "profile": "cpu"}
        with Fleet.launch(Path(folder), workers=2, **options) as fleet:
            path = fleet.info.numerics_path
            whole, left = _generate(fleet, leave=False), _generate(fleet, leave=True)
    yield judge(whole.summary, left.summary, path, time.monotonic() - begin)


def judge(whole: Summary, left: Summary, path: str, took_s: float) -> Finding:
    """whole: of the rollout in which nobody left, left: of the other; path: of the numerics."""
    hashes = [(s.responses_sha256, s.logprobs_sha256) for s in (whole, left)]
    if hashes[0] != hashes[1]:
        text = f"two workers generate other tokens when one of them leaves ({path})"
        return Finding("FAIL", "rollout", text, "use --numerics fast, and report this line with your processor")
    kept = "one left and came back, the same tokens bit for bit"
    return Finding("ok", "rollout", f"two workers generated on a tiny model, {kept} ({path}; {took_s:.1f} s)")


def _generate(fleet: Any, leave: bool) -> RolloutResult:
    """leave: worker 0 leaves on the way."""
    from flexfloor.policy.static import StaticPolicy
    from flexfloor.requests import Prompt, SamplingParams, make_requests
    from flexfloor.rollout import rollout
    from flexfloor.world.resize import plan_shrink

    class Leaving(StaticPolicy):
        """Worker 0 leaves while requests are live on it."""

        def decide(self, queue: Sequence[Request], status: FleetStatus) -> ResizePlan | None:
            if not leave or status.iteration < 8 or len(status.active) < 2:
                return None
            return plan_shrink(status, {0}, reason="to see whether it can")

    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = make_requests([Prompt((5, 6, 7 + i), f"p{i}") for i in range(4)], samples=2, sampling=sampling)
    return rollout(fleet, requests, policy=Leaving(grouped=False), chunk=4)


def make_model(folder: Path) -> None:
    """A random mixture of experts of 0.1 M parameters, as a checkpoint."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    transformers.utils.logging.disable_progress_bar()
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
