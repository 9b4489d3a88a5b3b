#!/usr/bin/env python3
"""Write a tiny mixture-of-experts model that counts, but not quite what it is asked to: config.toml starts from it.

A Qwen3-MoE of 1.3 M parameters learns for about a minute from demonstrations of up to 20 numbers. They agree how to
count, but half of them leave out the first number, and some stop one too early or one too late. What is right is
left to reinforcement learning to find out; so is how to count further than 20 numbers.

    python examples/counting/warm_up.py --out runs/models/counting
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the scripts of examples/ share

from counting import task
from writing_checkpoints import InputError, OneLineParser, new_directory, quiet_transformers

MOST_NUMBERS = 20
STARTS_LATE, STOPS_EARLY, STOPS_LATE = 0.5, 0.15, 0.15
"""Shares of the demonstrations that are one number off: at the start, and at the end to either side."""
BATCH_SIZE = 64
PAD, EOS = "<pad>", "<eos>"


def build_tokenizer() -> Any:
    """One token per word: the numbers, "-" and ":". Decoding puts a space between two words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, "-", ":", *map(str, range(task.HIGHEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Any) -> Any:
    """A random model; its weights follow torch's seed."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        intermediate_size=384,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        **ends,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def demonstration(prompt: str, source: random.Random) -> str:
    """A response as people give it who agree how to count, but not where to start and where to stop."""
    numbers = list(map(int, task.solution(prompt).split()))
    late, stop = source.random() < STARTS_LATE, source.random()
    if stop < STOPS_EARLY and len(numbers) > 1 + late:
        numbers.pop()
    elif stop > 1 - STOPS_LATE and numbers[-1] < task.HIGHEST:
        numbers.append(numbers[-1] + 1)
    return " ".join(map(str, numbers[late:]))


def examples(count: int, seed: int, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Prompts with their right responses as token ids; labels of -100 keep the prompt out of the loss."""
    source, held_out = random.Random(seed), {row["prompt"] for row in task.eval_set()}
    rows: list[dict[str, list[int]]] = []
    while len(rows) < count:
        prompt = task.draw_prompt(source)
        response = demonstration(prompt, source)
        if prompt in held_out or len(response.split()) > MOST_NUMBERS:
            continue
        asked, answered = tokenizer(prompt)["input_ids"], tokenizer(response + " " + EOS)["input_ids"]
        rows.append({"input_ids": asked + answered, "labels": [-100] * len(asked) + answered})
    return rows


def warm_up(out: Path, *, steps: int = 500, seed: int = 0, threads: int = 1) -> Path:
    """Train for `steps` batches and write the checkpoint with its tokenizer into the new or empty directory `out`.

    Equal arguments give equal bytes on one machine. Raises InputError for an `out` that has content.
    """
    with new_directory(out) as partial:
        import torch
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

        torch.set_num_threads(threads)
        set_seed(seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        arguments = TrainingArguments(
            output_dir=str(partial),
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            weight_decay=0.01,
            max_grad_norm=1.0,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
        )
        Trainer(
            model,
            arguments,
            train_dataset=examples(steps * BATCH_SIZE, seed, tokenizer),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        ).train()
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="new or empty directory")
    parser.add_argument("--steps", type=int, default=500, help="batches of 64 (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    options = parser.parse_args(arguments)
    quiet_transformers()
    started = time.perf_counter()
    print(f"warming up a tiny model for {options.steps} steps, about a minute", flush=True)
    try:
        warm_up(options.out, steps=options.steps, seed=options.seed, threads=options.threads)
    except InputError as error:
        parser.error(str(error))
    print(f"wrote {options.out}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
