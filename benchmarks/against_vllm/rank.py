"""One vLLM process of the benchmark: a whole engine, or one rank of a data-parallel group.

Started by `run_vllm.py`, which sets the environment.  The first line of standard input is the job, a JSON object; every
further line asks for one pass over the requests.  "Ready" and each pass are answered by one JSON line, a pass with its
start and end (monotonic seconds, comparable between processes) and the process's CPU seconds.  Standard output is kept
for these lines; what vLLM prints there goes to standard error.
"""

import gc
import json
import os
import sys
import time

import cpu_expert_parallel


def main() -> None:
    job = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if job["workers"] > 1:
        cpu_expert_parallel.install(job["transport"])

    from vllm import LLM, SamplingParams

    prompts, max_tokens = job["prompts"], job["max_tokens"]
    llm = LLM(job["model"], **job["engine"])
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=limit,
            temperature=job["temperature"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if job["logprobs"] else None,  # 0: the sampled token alone
            flat_logprobs=job["logprobs"],
        )
        for limit in max_tokens
    ]
    answers.write(json.dumps({"ready": True}) + "\n")

    for _ in sys.stdin:
        gc.collect()
        gc.freeze()  # as vLLM's own engine process does after start
        start, cpu_start = time.monotonic(), time.process_time()
        outputs = llm.generate(requests, params, use_tqdm=False)
        end, cpu_s = time.monotonic(), time.process_time() - cpu_start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert [len(ids) for ids in tokens] == max_tokens
        if job["logprobs"]:
            assert [len(output.outputs[0].logprobs) for output in outputs] == max_tokens
        answers.write(json.dumps({"start": start, "end": end, "cpu_s": cpu_s, "tokens": tokens}) + "\n")

    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # vLLM's own teardown can hang at exit


if __name__ == "__main__":
    main()
