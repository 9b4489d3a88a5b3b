#!/usr/bin/env python3
"""Write a random mixture-of-experts checkpoint that behaves like a language model, in seconds and offline.

The files are those of a stock transformers model (config.json, generation_config.json, safetensors in the
per-expert checkpoint layout, tokenizer), for Qwen3-MoE, OLMoE and Mixtral. The text means nothing, but the
statistics that an inference engine meets are lifelike: next-token distributions are peaked, routers spread
their load unevenly, and responses end by eos after widely varying lengths (about geometric, the same law for
every prompt). Norm weights differ from one, so that a forgotten norm shows.

    python examples/make_tiny_model.py --out runs/tiny-moe
    python examples/make_tiny_model.py --out runs/small-moe --preset small --dtype bfloat16

presets (further options override single sizes):
  tiny   hidden 256, 4 layers, 16 experts top-4 of 128, vocabulary 512
         7.2 M parameters, 2.5 M active, 29 MB in float32
  small  hidden 1024, 12 layers, 16 experts top-4 of 512, vocabulary 4096
         342 M parameters, 116 M active, 1.4 GB in float32
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from tiny_tokenizer import BOS, EOS, IM_START, PAD, SMALLEST_VOCAB, build_tokenizer
from writing_checkpoints import InputError, OneLineParser, new_directory, quiet_transformers

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden": 256, "layers": 4, "experts": 16, "top_k": 4, "intermediate": 128,
        "heads": 8, "kv_heads": 2, "vocab": 512,
    },
    "small": {
        "hidden": 1024, "layers": 12, "experts": 16, "top_k": 4, "intermediate": 512,
        "heads": 16, "kv_heads": 4, "vocab": 4096,
    },
}  # fmt: skip
ARCHS = ("qwen3_moe", "olmoe", "mixtral")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelSizes:
    """Everything that determines a checkpoint's bytes; raises InputError when the parts do not fit together."""

    arch: str
    hidden: int
    layers: int
    experts: int
    top_k: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    dense_layers: tuple[int, ...]
    tie_word_embeddings: bool
    clip_qkv: float | None
    dtype: str
    seed: int
    entropy: float
    mean_tokens: float

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise InputError(message)

        require(self.arch in ARCHS, f"--arch {self.arch}: unknown; choose one of {', '.join(ARCHS)}")
        require(self.dtype in DTYPES, f"--dtype {self.dtype}: unknown; choose one of {', '.join(DTYPES)}")
        for name in ("layers", "experts", "top_k", "intermediate", "heads", "kv_heads", "max_position"):
            require(getattr(self, name) >= 1, f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        require(self.hidden >= 16, f"--hidden {self.hidden}: must be at least 16")
        require(self.vocab >= 16, f"--vocab {self.vocab}: must be at least 16")
        require(self.top_k <= self.experts, f"--top-k {self.top_k}: more than --experts {self.experts}")
        require(
            self.heads % self.kv_heads == 0,
            f"--heads {self.heads}: not divisible by --kv-heads {self.kv_heads}",
        )
        require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            f"--head-dim {self.head_dim}: must be even and positive, since rotary embedding turns pairs",
        )
        require(
            self.arch != "olmoe" or self.heads * self.head_dim == self.hidden,
            f"--head-dim {self.head_dim}: OLMoE needs heads * head_dim = hidden ({self.heads} heads, {self.hidden})",
        )
        require(
            self.arch == "qwen3_moe" or not self.dense_layers,
            f"--dense-layers: {self.arch} has experts in every layer; use --arch qwen3_moe",
        )
        for layer in self.dense_layers:
            require(0 <= layer < self.layers, f"--dense-layers {layer}: outside 0..{self.layers - 1}")
        require(
            self.clip_qkv is None or (self.arch == "olmoe" and self.clip_qkv > 0),
            f"--clip-qkv {self.clip_qkv}: must be positive, and only olmoe has it",
        )
        highest = 0.9 * math.log(self.vocab)
        require(
            0.5 <= self.entropy <= highest,
            f"--entropy {self.entropy}: must lie in 0.5..{highest:.1f} nats for a vocabulary of {self.vocab}",
        )
        require(self.mean_tokens >= 2, f"--mean-tokens {self.mean_tokens}: must be at least 2")


def make_tiny_model(
    out: Path,
    arch: str = "qwen3_moe",
    *,
    hidden: int = 256,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 4,
    intermediate: int = 128,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    tie_word_embeddings: bool = False,
    dense_layers: tuple[int, ...] = (),
    clip_qkv: float | None = None,
    tokenizer: bool = True,
    max_position: int = 2048,
    entropy: float = 2.5,
    mean_tokens: float = 100.0,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a random MoE checkpoint into the new or empty directory `out` and return `out`.

    hidden, intermediate (of one expert), head_dim: elements; head_dim is hidden / heads unless given.
    vocab: token ids, all of them known to the tokenizer if one is written (then at least 260).
    dense_layers: layers without experts, whose feed-forward width is top_k * intermediate (qwen3_moe only).
    clip_qkv: bound on attention's q, k, v elements (olmoe only).
    entropy: aimed-at mean entropy of the next token at temperature 1, nats.
    mean_tokens: aimed-at mean response length at temperature 1, tokens.
    max_shard_size: largest safetensors file, such as "200KB" or "5GB".

    Equal arguments give equal bytes. Either a whole checkpoint appears at `out` or nothing.
    Raises InputError (a ValueError) for sizes that do not fit together and for an `out` that has content.
    """
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise InputError(f"--hidden {hidden}: not divisible by --heads {heads}; give --head-dim")
        head_dim = hidden // heads
    sizes = ModelSizes(
        arch=arch, hidden=hidden, layers=layers, experts=experts, top_k=top_k, intermediate=intermediate,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, max_position=max_position,
        dense_layers=tuple(dense_layers), tie_word_embeddings=tie_word_embeddings, clip_qkv=clip_qkv,
        dtype=dtype, seed=seed, entropy=entropy, mean_tokens=mean_tokens,
    )  # fmt: skip
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", max_shard_size):
        raise InputError(f"--max-shard-size {max_shard_size}: must look like 200KB, 50MB or 5GB")
    if tokenizer and vocab < SMALLEST_VOCAB:
        raise InputError(f"--vocab {vocab}: the byte-level tokenizer needs at least {SMALLEST_VOCAB}")
    with new_directory(out) as partial:
        model = build_model(sizes)
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        if tokenizer:
            build_tokenizer(vocab, max_position).save_pretrained(partial)
    return out


def build_config(sizes: ModelSizes) -> Any:
    """The stock transformers config of `sizes`."""
    from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "num_experts_per_tok": sizes.top_k,
        "max_position_embeddings": sizes.max_position,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": sizes.dtype,
    }
    if sizes.arch != "olmoe":  # OLMoE's is hidden / heads by definition
        shared["head_dim"] = sizes.head_dim
    if sizes.arch == "qwen3_moe":
        return Qwen3MoeConfig(
            **shared,
            num_experts=sizes.experts,
            moe_intermediate_size=sizes.intermediate,
            intermediate_size=sizes.top_k * sizes.intermediate,
            norm_topk_prob=True,
            mlp_only_layers=list(sizes.dense_layers),
        )
    if sizes.arch == "olmoe":
        return OlmoeConfig(
            **shared, num_experts=sizes.experts, intermediate_size=sizes.intermediate, clip_qkv=sizes.clip_qkv
        )
    return MixtralConfig(**shared, num_local_experts=sizes.experts, intermediate_size=sizes.intermediate)


def logit_scale(entropy: float, vocab: int) -> tuple[float, float]:
    """Standard deviation of Gaussian logits whose softmax has `entropy` nats, and their log partition function.

    Solved on the `vocab` mid-quantiles of a Gaussian, a typical set of logits.
    """
    quantiles = [NormalDist().inv_cdf((i + 0.5) / vocab) for i in range(vocab)]

    def partition_and_entropy(scale: float) -> tuple[float, float]:
        weights = [math.exp(scale * z) for z in quantiles]
        total = math.fsum(weights)
        mean_logit = math.fsum(w * scale * z for w, z in zip(weights, quantiles, strict=True)) / total
        return math.log(total), math.log(total) - mean_logit

    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if partition_and_entropy(middle)[1] > entropy else (low, middle)
    return high, partition_and_entropy(high)[0]


def mixing_gain(sizes: ModelSizes) -> float:
    """RMS of the routing-weighted sum of independent unit expert outputs, for a typical set of router logits."""
    weights = [math.exp(ROUTER_SPREAD * NormalDist().inv_cdf((i + 0.5) / sizes.experts)) for i in range(sizes.experts)]
    chosen = weights[-sizes.top_k :]
    # Qwen3-MoE and Mixtral renormalise the weights of the chosen experts, OLMoE does not.
    return math.sqrt(math.fsum(w * w for w in chosen)) / math.fsum(weights if sizes.arch == "olmoe" else chosen)


# One channel of the residual stream is the same for every token, so that what the head reads there is a bias.
CONSTANT = 0
CONSTANT_SHARE = 0.2  # its share of the embedding's norm
EOS_SPREAD = 1.0  # standard deviation of eos's logit, nats
EOS_HASTE = 0.5  # nats by which spread makes responses end earlier than eos's mean logit says, measured
ATTENTION_SPREAD = 1.5  # standard deviation of attention logits, nats
ROUTER_SPREAD = 1.5  # standard deviation of router logits, nats
LAYER_GAIN = 0.7  # RMS that experts add per layer, in units of the embedding's RMS


def build_model(sizes: ModelSizes) -> Any:
    """A transformers model of `sizes` with the weights described at the top of this file."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = build_config(sizes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype)).eval()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    generator = torch.Generator().manual_seed(sizes.seed)
    scale, log_partition = logit_scale(sizes.entropy, sizes.vocab)
    mixing = mixing_gain(sizes)
    # A tied embedding has the head's scale; all that is added to the residual stream follows it.
    unit = scale / math.sqrt(sizes.hidden) if sizes.tie_word_embeddings else 1.0

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            path: list[str] = name.removesuffix(".weight").split(".")
            module, leaf = path[-2] if len(path) > 1 else "", path[-1]
            if leaf in ("embed_tokens", "lm_head"):
                continue
            if "norm" in leaf:
                value = 1 + 0.1 * normal(*weight.shape)
                value *= ATTENTION_SPREAD if leaf == "q_norm" else 1.0
            else:
                value = normal(*weight.shape) / math.sqrt(weight.shape[-1])
                if leaf == "q_proj" and sizes.arch == "mixtral":  # no q_norm to set the spread
                    value *= ATTENTION_SPREAD
                elif leaf == "gate":
                    value *= ROUTER_SPREAD
                elif leaf == "o_proj":
                    value *= LAYER_GAIN * unit * 1.5  # averaging over the context shrinks the values
                elif leaf == "down_proj":
                    # silu(gate) * up of unit Gaussians has RMS 0.6.
                    value *= LAYER_GAIN * unit / 0.6 / (mixing if module == "experts" else 1.0)
                if leaf in ("o_proj", "down_proj"):
                    value[..., CONSTANT, :] = 0
            weight.copy_(value)
        # Attention adds about half of what experts add, since it averages over the context.
        residual_rms = math.sqrt(1 + 1.3 * sizes.layers * LAYER_GAIN**2)
        constant = CONSTANT_SHARE * math.sqrt(sizes.hidden)
        nat = residual_rms / constant  # head weight on the constant channel that shifts a logit by one nat

        head = scale / math.sqrt(sizes.hidden) * normal(sizes.vocab, sizes.hidden)
        head[EOS] *= EOS_SPREAD / scale
        embedding = head if sizes.tie_word_embeddings else normal(sizes.vocab, sizes.hidden)
        embedding[:, CONSTANT] = constant * unit
        # A tied head reads the constant for every token; only differences between tokens count.
        level = head[PAD, CONSTANT].item() if sizes.tie_word_embeddings else 0.0
        head[EOS, CONSTANT] = level + nat * (log_partition - math.log(sizes.mean_tokens) - EOS_HASTE)
        head[[BOS, IM_START, PAD], CONSTANT] = level - 6 * nat  # no trained model generates these
        model.get_output_embeddings().weight.copy_(head)
        final_norm = model.model.norm.weight
        final_norm[CONSTANT] = 1
        if sizes.tie_word_embeddings:
            # Random signs, or else every token would predict itself.
            signs = torch.where(torch.rand(sizes.hidden, generator=generator) < 0.5, -1.0, 1.0)
            signs[CONSTANT] = 1
            final_norm.mul_(signs)
        else:
            model.get_input_embeddings().weight.copy_(embedding)
    return model


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new or empty directory")
    parser.add_argument("--arch", default="qwen3_moe", help=f"one of {', '.join(ARCHS)} (default qwen3_moe)")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes to start from (default tiny)")
    for name, text in (
        ("hidden", "hidden size"),
        ("layers", "layers"),
        ("experts", "experts per layer"),
        ("top-k", "experts per token"),
        ("intermediate", "width of one expert"),
        ("heads", "query heads"),
        ("kv-heads", "key-value heads"),
        ("head-dim", "elements of a head (default hidden / heads)"),
        ("vocab", "token ids"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--max-position", type=int, default=2048, metavar="N", help="context length (default 2048)")
    parser.add_argument("--dense-layers", type=int, nargs="+", default=[], metavar="N", help="layers without experts")
    parser.add_argument("--tie-word-embeddings", action="store_true", help="the head is the embedding")
    parser.add_argument("--clip-qkv", type=float, metavar="X", help="bound on q, k, v elements (olmoe)")
    parser.add_argument("--entropy", type=float, default=2.5, metavar="NATS", help="of the next token (default 2.5)")
    parser.add_argument("--mean-tokens", type=float, default=100, metavar="N", help="response length (default 100)")
    parser.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default 5GB)")
    parser.add_argument("--no-tokenizer", dest="tokenizer", action="store_false", help="write no tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="of all randomness (default 0)")
    options = vars(parser.parse_args(arguments))
    out: Path = options["out"]
    sizes: dict[str, Any] = dict(PRESETS[options.pop("preset")])
    options["dense_layers"] = tuple(options["dense_layers"])
    quiet_transformers()
    started = time.perf_counter()
    try:
        make_tiny_model(**(sizes | {name: value for name, value in options.items() if value is not None}))
    except InputError as error:
        parser.error(str(error))
    files = list(out.glob("*.safetensors"))
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    seconds = time.perf_counter() - started
    print(f"wrote {out}: {megabytes:.1f} MB of weights in {len(files)} file(s), {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
