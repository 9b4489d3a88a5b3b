"""Prompt files: every form that is read, every row that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexfloor.errors import InputError
from flexfloor.prompts import load_tokenizer, read_prompts
from flexfloor.requests import hash_prompt, make_requests

TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls is defined %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer that puts its bos token, id 0, before plain strings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("model")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_every_form_of_a_jsonl_row(tmp_path: Path, tokenizer: Any):
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "hé", "uid": "first", "source": "left alone"},
        "",
        {"prompt": [{"role": "user", "content": "hi"}], "max_tokens": 7},
        {"prompt_tokens": [5, 6], "uid": 12, "prompt": None},
    )
    text, chat, ids = read_prompts(path, tokenizer)
    assert text.tokens[0] == 0
    assert tokenizer.decode(text.tokens, skip_special_tokens=True) == "hé"
    assert tokenizer.decode(chat.tokens) == "<user>hi<assistant>"
    assert (text.key, chat.key, ids.key) == ("first", None, "12")
    assert (text.max_tokens, chat.max_tokens) == (None, 7)
    assert ids.tokens == (5, 6)
    assert [r.request_id for r in make_requests([chat])] == [f"{hash_prompt(chat.tokens)}#0/0"]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "prompts.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt_tokens": [1]}\r\n{"prompt_tokens": [2]}\r\n')
    assert [p.tokens for p in read_prompts(path, None)] == [(1,), (2,)]


def test_parquet_as_verl_writes_it(tmp_path: Path, tokenizer: Any):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "user", "content": f"{i}?", "tool_calls": None},
            ],
            "reward_model": {"ground_truth": "1", "style": "rule"},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in (2, 4)
    ]
    path = tmp_path / "train.parquet"
    # Every message has a null tool_calls, as where one message of the file has tool calls.
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = read_prompts(path, tokenizer)
    assert [tokenizer.decode(p.tokens) for p in prompts] == ["<user>2?<assistant>", "<user>4?<assistant>"]


def test_parquet_with_strings_tokens_and_gaps(tmp_path: Path, tokenizer: Any):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "prompts.PARQUET"
    rows = [
        {"prompt": "a", "prompt_tokens": None, "uid": "u", "max_tokens": None},
        {"prompt": None, "prompt_tokens": [3, 4], "uid": None, "max_tokens": 9.0},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = read_prompts(path, tokenizer)
    assert (first.key, first.max_tokens) == ("u", None)
    assert (second.tokens, second.key, second.max_tokens) == ((3, 4), None, 9)


def test_broken_or_foreign_parquet_is_refused(tmp_path: Path, tokenizer: Any):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"prompts\.parquet: prompts cannot be read as Parquet"):
        read_prompts(path, tokenizer)
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "missing.parquet", tokenizer)
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "?"}]), path)
    with pytest.raises(InputError, match=r"row 1 has no prompt; give prompt or prompt_tokens"):
        read_prompts(path, tokenizer)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'flexfloor\[parquet\]'"):
        read_prompts(tmp_path / "prompts.parquet", None)


BAD_ROWS = {
    "not json": ("{oops", "line 2 is not JSON"),
    "array": ([1], "line 2 is not an object"),
    "no prompt": ({"question": "?"}, "line 2 has no prompt"),
    "both": ({"prompt": "a", "prompt_tokens": [1]}, "line 2 has both prompt and prompt_tokens"),
    "empty string": ({"prompt": ""}, "line 2: prompt is empty"),
    "empty chat": ({"prompt": []}, "line 2: prompt has no messages"),
    "number": ({"prompt": 3}, "line 2: prompt is neither a string nor a list"),
    "string as message": ({"prompt": ["hi"]}, "line 2: prompt holds a message without role and content"),
    "no content": ({"prompt": [{"role": "user"}]}, "line 2: prompt holds a message without role and content"),
    "parts": ({"prompt": [{"role": "user", "content": [{"text": "x"}]}]}, "line 2: .* both as strings"),
    "template refuses": (
        {"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        "line 2: the chat template refuses prompt .no tools",
    ),
    "surrogate": ('{"prompt": "\\ud800"}', "line 2: prompt holds half of a surrogate pair"),
    "no list": ({"prompt_tokens": "12"}, "line 2: prompt_tokens is not a list"),
    "no tokens": ({"prompt_tokens": []}, "line 2: prompt_tokens is empty"),
    "float token": ({"prompt_tokens": [1, 2.0]}, r"line 2: prompt_tokens holds 2\.0"),
    "true token": ({"prompt_tokens": [True]}, "line 2: prompt_tokens holds True"),
    "negative token": ({"prompt_tokens": [-1]}, "line 2: prompt_tokens holds -1"),
    "token outside": ({"prompt_tokens": [1, 300]}, "line 2: token id 300 is outside .* 300; give ids below it"),
    "uid list": ({"prompt": "a", "uid": [1]}, r"line 2: uid is \[1\]"),
    "uid empty": ({"prompt": "a", "uid": ""}, "line 2: uid is ''"),
    "uid surrogate": ('{"prompt": "a", "uid": "\\ud800"}', "line 2: uid holds half of a surrogate pair"),
    "no room": ({"prompt": "a", "max_tokens": 0}, "line 2: max_tokens is 0; give a whole number from 1"),
    "max text": ({"prompt": "a", "max_tokens": "9"}, "line 2: max_tokens is '9'"),
    "max half": ({"prompt": "a", "max_tokens": 1.5}, r"line 2: max_tokens is 1\.5"),
}


@pytest.mark.parametrize(("row", "told"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_name_line_field_and_remedy(tmp_path: Path, tokenizer: Any, row: Any, told: str):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(InputError, match=told) as caught:
        read_prompts(path, tokenizer, vocab_size=300)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_prompt_files(tmp_path: Path, tokenizer: Any):
    with pytest.raises(InputError, match="is a folder; name a JSONL or Parquet file"):
        read_prompts(tmp_path, tokenizer)
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "missing.jsonl", tokenizer)
    with pytest.raises(InputError, match="holds no prompts; give at least one row"):
        read_prompts(write(tmp_path / "empty.jsonl", "", "  "), tokenizer)
    (tmp_path / "latin1.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match="line 1 is not UTF-8 text"):
        read_prompts(tmp_path / "latin1.jsonl", tokenizer)


def test_text_needs_a_tokenizer_that_belongs_to_the_model(tmp_path: Path, tokenizer: Any):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a"})
    with pytest.raises(InputError, match="line 1: prompt is text but the model has no tokenizer; give prompt_tokens"):
        read_prompts(path, None)
    with pytest.raises(InputError, match="use the tokenizer that belongs to the model"):
        read_prompts(path, tokenizer, vocab_size=2)


def test_a_prompt_must_leave_room_in_the_context(tmp_path: Path):
    path = write(tmp_path / "prompts.jsonl", {"prompt_tokens": [1]}, {"prompt_tokens": [1, 2]})
    assert len(read_prompts(path, None, max_context=3)) == 2
    with pytest.raises(InputError, match="line 2: prompt has 2 tokens, which leaves no room in the model's context"):
        read_prompts(path, None, max_context=2)


def test_chat_needs_a_template(tmp_path: Path, model: Path):
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    tokenizer.chat_template = None
    path = write(tmp_path / "prompts.jsonl", {"prompt": [{"role": "user", "content": "a"}]})
    with pytest.raises(InputError, match="the tokenizer has no chat template; give a string"):
        read_prompts(path, tokenizer)


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
