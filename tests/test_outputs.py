from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from flexfloor.errors import InputError
from flexfloor.outputs import atomic_write, check_outputs, decode_responses, write_json, write_responses
from flexfloor.requests import Request, Response, SamplingParams


def make_response(request_id: str = "a#0/0", tokens: tuple[int, ...] = (65, 66, 67)) -> Response:
    return Response(request_id, "a", 0, 2, list(tokens), np.full(len(tokens), -0.1, np.float32), "length")


class Letters:
    """A tokenizer whose token ids are code points; 0 is special."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(t) for t in tokens if t or not skip_special_tokens)


def test_responses_are_written_one_a_line_in_order(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "responses.jsonl"
    write_responses(path, [make_response("b#0/0"), make_response("a#0/0", ())])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["b#0/0", "a#0/0"]
    assert list(rows[0]) == [
        "request_id",
        "prompt_key",
        "sample",
        "prompt_tokens",
        "tokens",
        "logprobs",
        "text",
        "finish_reason",
    ]
    assert np.array(rows[0]["logprobs"], np.float32).tobytes() == make_response().logprobs.tobytes()


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "responses.jsonl"
    path.write_text("old")

    def responses():
        yield make_response()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_responses(path, responses())
    assert [p.name for p in tmp_path.iterdir()] == ["responses.jsonl"]
    assert path.read_text() == "old"


def test_a_written_file_has_ordinary_permissions_and_a_link_stays_one(tmp_path: Path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    before = os.umask(0o022)
    try:
        write_json(link, {"text": "ü"})
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"text": "ü"}
    assert target.stat().st_mode & 0o777 == 0o644


def test_nothing_is_visible_before_the_block_ends(tmp_path: Path):
    with atomic_write(tmp_path / "x") as file:
        file.write("text")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_text() == "text"


def test_outputs_that_cannot_be_written_are_refused_by_option_name(tmp_path: Path):
    def refused(told: str, outputs: dict[str, Path], inputs: dict[str, Path] | None = None) -> None:
        with pytest.raises(InputError, match=told):
            check_outputs(outputs, inputs or {})

    file = tmp_path / "file"
    file.write_text("")
    refused("--out .* is a folder", {"--out": tmp_path})
    refused("--out .* is not a regular file", {"--out": Path("/dev/null")})
    refused(
        "--summary and --out are the same file", {"--out": tmp_path / "a", "--summary": tmp_path / "b" / ".." / "a"}
    )
    refused("--out and --prompts are the same file", {"--out": file}, {"--prompts": file})
    refused("--ledger .*: .*file is not a folder", {"--ledger": file / "ledger.jsonl"})
    check_outputs({"--out": tmp_path / "new" / "out", "--summary": file}, {"--prompts": tmp_path / "p"})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o500)
    with pytest.raises(InputError, match=r"--out .* is not writable"):
        check_outputs({"--out": folder / "out"}, {})


def test_text_leaves_out_special_tokens_and_ends_before_the_first_stop_string():
    sampling = SamplingParams(stop=("D", "BC"))
    plain, stopped = make_response("a#0/0", (65, 66, 67, 0)), make_response("b#0/0", (65, 66, 67, 68))
    decode_responses([plain, stopped], Letters(), [Request("b#0/0", "b", 0, (1,), sampling)])
    assert (plain.text, stopped.text) == ("ABC", "A")
    decode_responses([plain], None)
    assert plain.text == "ABC"
