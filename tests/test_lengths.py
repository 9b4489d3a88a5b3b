"""Forced lengths: files in, requests out, and responses that have exactly these lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import make_requests as make_mixed

import flexfloor
from flexfloor.cli import main
from flexfloor.errors import InputError
from flexfloor.lengths_file import force_lengths, read_lengths
from flexfloor.requests import Prompt, SamplingParams, make_requests

REQUESTS = make_requests([Prompt((1, 2), "a"), Prompt((3,), "b")], samples=2)  # a#0/0, a#0/1, b#0/0, b#0/1


def lines(*lengths: object, names: tuple[str, ...] = ("a#0/0", "a#0/1", "b#0/0", "b#0/1"), key: str = "length") -> str:
    return "".join(json.dumps({"request_id": n, key: v}) + "\n" for n, v in zip(names, lengths, strict=True))


@pytest.mark.parametrize(
    "content",
    [
        "3\n1\n4\n2\n",
        "\ufeff3\r\n\r\n1 \n4\n\n2\n77\n99",
        lines(3, 1, 4, 2),
        lines(2, 4, 1, 3, names=("b#0/1", "b#0/0", "a#0/1", "a#0/0")),
        "\n" + lines([7] * 3, [7], [7] * 4, [8, 9], key="tokens"),
    ],
    ids=["numbers", "more numbers than requests", "objects", "any order", "responses"],
)
def test_lengths_from_a_file(tmp_path: Path, content: str):
    (tmp_path / "lengths").write_text(content, newline="")
    assert read_lengths(tmp_path / "lengths", REQUESTS) == [3, 1, 4, 2]


REFUSED = {
    "zero": ("3\n0\n1\n1", "line 2: '0' is not a length; give a whole number from 1"),
    "negative": ("-3\n1\n1\n1", "line 1: '-3' is not a length"),
    "fraction": ("1\n\n1.5\n1\n1", "line 3: '1.5' is not a length"),
    "word": ("1\n1\nmany\n1", "line 3: 'many' is not a length"),
    "too few": ("1\n1\n1\n", "has 3 lengths for 4 requests; give one for each"),
    "empty": ("", "has 0 lengths for 4 requests"),
    "object among numbers": ("1\n{}\n1\n1", "line 2: '{}' is not a length"),
    "huge": ("9" * 5000 + "\n1\n1\n1", "is not a length"),
    "number among objects": (lines(1, 1, 1, 1) + "5\n", "line 5 has no request_id"),
    "broken object": ("{oops\n", "line 1 is not JSON"),
    "no request id": ('{"length": 3}\n', "line 1 has no request_id; give one as a string"),
    "no length": ('{"request_id": "a#0/0"}\n', "line 1 has neither length nor tokens"),
    "zero length": (lines(1, 0, 1, 1), "line 2: length is 0; give a whole number from 1"),
    "no tokens": (lines([1], [], [1], [1], key="tokens"), "line 2: length is 0"),
    "length is text": (lines(1, "2", 1, 1), "line 2: length is '2'"),
    "length is true": (lines(1, True, 1, 1), "line 2: length is True"),
    "unknown id": (lines(1, 1, names=("a#0/0", "c#0/0")), "line 2: no request has the id 'c#0/0'"),
    "same id twice": (lines(1, 1, names=("a#0/0", "a#0/0")), "line 2: request a#0/0 has a line already"),
    "missing id": (lines(1, 1, names=("a#0/0", "b#0/1")), "has no line for request a#0/1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files_are_refused(tmp_path: Path, case: str):
    content, told = REFUSED[case]
    (tmp_path / "lengths").write_text(content)
    with pytest.raises(InputError) as caught:
        read_lengths(tmp_path / "lengths", REQUESTS)
    assert told in str(caught.value)
    assert str(tmp_path / "lengths") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match=r"lengths cannot be read \(No such file"):
        read_lengths(tmp_path / "missing", REQUESTS)
    with pytest.raises(InputError, match=r"lengths cannot be read \(Is a directory"):
        read_lengths(tmp_path, REQUESTS)
    (tmp_path / "binary").write_bytes(b"3\n\xff\xfe\n")
    with pytest.raises(InputError, match="line 2 is not UTF-8"):
        read_lengths(tmp_path / "binary", REQUESTS)


def test_forced_requests_ignore_every_end():
    sampling = SamplingParams(max_tokens=99, stop=("x",), stop_token_ids=(5,), seed=4)
    requests = make_requests([(1, 2), (3,)], sampling=sampling)
    forced = force_lengths(requests, [7, 9], max_context=10)
    assert [r.sampling.forced_length for r in forced] == [7, 9]
    assert [r.request_id for r in forced] == [r.request_id for r in requests]
    assert forced[0].sampling == SamplingParams(max_tokens=7, ignore_eos=True, seed=4)
    assert requests[0].sampling.forced_length is None
    assert SamplingParams(ignore_eos=True, stop=("x",)).forced_length is None


def test_a_length_has_to_fit_into_the_context():
    with pytest.raises(InputError, match=r"a#0/1: length 9 cannot be forced, its prompt of 2 tokens leaves 8 in the"):
        force_lengths(REQUESTS, [8, 9, 1, 1], max_context=10)
    with pytest.raises(InputError, match="length 0 cannot be forced"):
        force_lengths(REQUESTS, [0, 1, 1, 1])


def test_responses_have_exactly_these_lengths_whatever_the_policy(checkpoint: Callable) -> None:
    """The tiny model ends some of these by itself, early; prefixes up to there stay the same tokens."""
    requests = make_mixed(prompts=6, samples=2, max_tokens=60)
    lengths = [1 + (17 * i) % 70 for i in range(len(requests))]
    with flexfloor.Fleet.launch(checkpoint("tiny"), workers=2) as fleet:
        free = flexfloor.rollout(fleet, requests).responses
        forced = [
            flexfloor.rollout(fleet, force_lengths(requests, lengths), policy=policy).responses
            for policy in ("static-spread", "static-grouped")
        ]
    for responses in forced:
        assert [len(r.tokens) for r in responses] == lengths
        assert {r.finish_reason for r in responses} == {"length"}
    assert [r.tokens for r in forced[0]] == [r.tokens for r in forced[1]]
    assert any(len(f.tokens) < n and f.finish_reason == "stop" for f, n in zip(free, lengths, strict=True))
    for response, was in zip(forced[0], free, strict=True):
        shared = min(len(response.tokens), len(was.tokens))
        assert response.tokens[:shared] == was.tokens[:shared]


@pytest.fixture
def command(tmp_path: Path, checkpoint: Callable) -> list[str]:
    rows = [{"prompt_tokens": [5, 6], "uid": "a", "max_tokens": 3}, {"prompt_tokens": [7], "uid": "b"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl")]
    return ["rollout", *files, "--out", str(tmp_path / "out" / "r.jsonl"), "--quiet", "--workers", "1"]


def test_an_earlier_run_is_replayed(command: list[str], tmp_path: Path):
    (tmp_path / "lengths").write_text("9\n30\n")
    out = tmp_path / "out" / "r.jsonl"
    assert main([*command, "--force-lengths", str(tmp_path / "lengths")]) == 0
    first = out.read_text()
    assert [len(json.loads(line)["tokens"]) for line in first.splitlines()] == [9, 30]
    replay = tmp_path / "replay.jsonl"
    out.rename(replay)
    assert main([*command, "--force-lengths", str(replay)]) == 0
    assert out.read_text() == first


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("prompts", "line 2 has no max_tokens, which --force-lengths prompts takes the length from; add it"),
        ("missing", "missing: lengths cannot be read"),
        ("out", "--force-lengths are the same file"),
        ("long", "length 3000 cannot be forced"),
        ("", "--force-lengths: "),
    ],
)
def test_the_command_refuses_on_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, told: str
):
    (tmp_path / "long").write_text("3000\n1\n")
    paths = {"missing": tmp_path / "missing", "long": tmp_path / "long", "out": tmp_path / "out" / "r.jsonl"}
    assert main([*command, f"--force-lengths={paths.get(given, given)}"]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_lengths_of_the_prompt_rows(command: list[str], tmp_path: Path):
    rows = [{"prompt_tokens": [5, 6], "uid": "a", "max_tokens": 3}, {"prompt_tokens": [7], "max_tokens": 40}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*command, "--force-lengths", "prompts", "--samples", "2"]) == 0
    written = (tmp_path / "out" / "r.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["tokens"]) for line in written] == [3, 3, 40, 40]
