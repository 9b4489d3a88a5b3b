"""examples/counting: its datasets, its reward, and the model that training starts from."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from counting import task, warm_up
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexfloor.fleets.engine.checkpoint import inspect_checkpoint

FOLDER = Path(__file__).parents[1] / "examples" / "counting"
numbers = st.integers(0, task.HIGHEST)
counts = st.tuples(numbers, numbers).map(sorted).filter(lambda ends: ends[0] < ends[1])


def prompt_of(ends):
    return f"{ends[0]} - {ends[1]} :"


def score(prompt, completion):
    return task.reward([prompt], [completion], trainer_state=None)[0]


def test_solutions():
    assert task.solution("17 - 20 :") == "17 18 19 20"
    assert task.solution("198 - 199 :") == "198 199"


@pytest.mark.parametrize(
    ("written", "share"),
    [
        ("3 4 5 6", 1),
        ("3 4 5", 3 / 4),
        ("3 4 5 6 7", 4 / 5),
        ("3 4 5 6 6 6 6 6", 4 / 8),
        ("4 5 6", 0),
        ("3 4 6 6", 2 / 4),
        ("3 4 - 6", 2 / 4),
        ("", 0),
    ],
)
def test_reward_by_hand(written, share):
    assert score("3 - 6 :", written) == pytest.approx(share)


@given(counts, st.lists(numbers.map(str), max_size=30))
def test_only_the_right_response_gets_everything(ends, words):
    prompt = prompt_of(ends)
    assert score(prompt, task.solution(prompt)) == 1
    written = " ".join(words)
    assert (score(prompt, written) == 1) == (written == task.solution(prompt))
    assert 0 <= score(prompt, written) <= 1


@given(counts, st.integers(0, 40), st.integers(1, 40))
def test_right_numbers_pay_and_further_ones_cost(ends, right, more):
    prompt = prompt_of(ends)
    whole = task.solution(prompt).split()
    begun = whole[: min(right, len(whole) - 1)]
    further = whole[: len(begun) + 1]
    assert score(prompt, " ".join(begun)) < score(prompt, " ".join(further))
    longer = [whole + [str(ends[1])] * extra for extra in range(more + 1)]
    shares = [score(prompt, " ".join(written)) for written in longer]
    assert all(first > second for first, second in pairwise(shares))


def test_train_and_held_out_prompts_are_distinct_and_stay_the_same():
    held_out = [row["prompt"] for row in task.eval_set()]
    assert len(set(held_out)) == task.EVAL_PROMPTS >= 64
    assert [row["prompt"] for row in task.eval_set(64)] == held_out[:64]
    for seed in range(3):
        train = [row["prompt"] for row in task.train_set(seed=seed)]
        assert len(set(train)) == task.TRAIN_PROMPTS
        assert not set(train) & set(held_out)
        assert train == [row["prompt"] for row in task.train_set(seed=seed)]
    assert task.train_set(seed=0) != task.train_set(seed=1)


def test_lengths_are_heavy_tailed_and_fit_the_config():
    tokenizer = warm_up.build_tokenizer()
    for rows in (task.eval_set(), task.train_set()):
        lengths = sorted(len(tokenizer(task.solution(row["prompt"]))["input_ids"]) + 1 for row in rows)
        assert lengths[-1] / lengths[len(lengths) // 2] >= 6
        assert lengths[-1] <= 130 < int(config()["trl"]["max_completion_length"])


def config():
    read_settings = pytest.importorskip("flexfloor.integrations.trl.settings").read_settings
    return read_settings(FOLDER / "config.toml").model_dump()


def test_every_number_is_one_token_and_texts_survive():
    tokenizer = warm_up.build_tokenizer()
    ids = tokenizer("17 - 117 : 17 18 <eos>")["input_ids"]
    assert len(ids) == 7
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[-3:], skip_special_tokens=True) == "17 18"


@given(counts, st.integers(0, 2**32))
def test_a_demonstration_is_at_most_a_number_off_at_either_end(ends, seed):
    shown = list(map(int, warm_up.demonstration(prompt_of(ends), random.Random(seed)).split()))
    assert shown == list(range(shown[0], shown[-1] + 1))
    assert shown[0] - ends[0] in (0, 1)
    assert abs(shown[-1] - ends[1]) <= 1
    assert shown[-1] <= task.HIGHEST


def test_the_warm_up_sees_no_held_out_prompt():
    tokenizer = warm_up.build_tokenizer()
    rows = warm_up.examples(5000, 0, tokenizer)
    seen = {tokenizer.decode(row["input_ids"][: row["labels"].count(-100)]) for row in rows}
    held_out = {row["prompt"] for row in task.eval_set()}
    assert "0 - 1 :" in seen | held_out  # prompts look alike on both sides
    assert not seen & held_out


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Two models of a few steps with the same seed, and one with another."""
    folder = tmp_path_factory.mktemp("counting")
    return [
        warm_up.warm_up(folder / name, steps=8, seed=seed, threads=1) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]


def test_warm_up_is_deterministic(warmed):
    first, second, other = ((folder / "model.safetensors").read_bytes() for folder in warmed)
    assert first == second != other


def test_the_model_is_one_for_the_engine(warmed):
    inspect_checkpoint(warmed[0])  # raises for what the engine cannot run
    model, tokenizer = AutoModelForCausalLM.from_pretrained(warmed[0]), AutoTokenizer.from_pretrained(warmed[0])
    assert 1e6 < sum(weight.numel() for weight in model.parameters()) < 2e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model(torch.tensor([tokenizer("1 - 9 :")["input_ids"]])).logits.isfinite().all()
    assert {file.name for file in warmed[0].iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_warm_up_learns(warmed, tmp_path):
    tokenizer = warm_up.build_tokenizer()
    rows = warm_up.examples(32, 99, tokenizer)

    def loss(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tensors = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in rows]
        with torch.no_grad():
            return sum(model(**row).loss.item() for row in tensors) / len(tensors)

    assert loss(warm_up.warm_up(tmp_path / "more", steps=40, threads=1)) < 0.7 * loss(warmed[0])


def test_warm_up_refuses_a_folder_with_content(tmp_path):
    (tmp_path / "kept").write_text("mine")
    run = subprocess.run(
        [sys.executable, FOLDER / "warm_up.py", "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "--out" in run.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_the_config_names_functions_that_are_there():
    read = config()
    assert json.loads(json.dumps(read, default=str))["task"]["reward"] == ["task:reward"]
    for name in (read["task"]["train"], read["task"]["eval"], *read["task"]["reward"]):
        module, _, function = name.partition(":")
        assert module == "task"
        assert callable(getattr(task, function))
