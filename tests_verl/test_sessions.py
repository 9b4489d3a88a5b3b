"""Announcements and sessions: keys, identity of requests, who waits for whom, and when a rollout is over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from serving import announced

from flexfloor.errors import FlexFloorError
from flexfloor.integrations.verl.sessions import SessionBook, announce, prompt_keys
from flexfloor.requests import SamplingParams

SAMPLING = SamplingParams(max_tokens=4)


def row(text: str, index: Any = None, **more: Any) -> dict[str, Any]:
    extra = {} if index is None else {"index": index}
    return {"uid": text, "raw_prompt": [{"role": "user", "content": text}], "extra_info": extra, "samples": 2} | more


def test_keys_are_the_index_of_the_dataset_where_that_tells_prompts_apart() -> None:
    keys = prompt_keys([row("a", 3, data_source="math"), row("b", 4, data_source="math"), row("c", 3, data_source="x")])
    assert keys == ["math:3", "math:4", "x:3"]


def test_a_missing_or_shared_index_falls_back_to_a_hash_of_the_messages() -> None:
    keys = prompt_keys([row("a"), row("b", 0), row("c", 0), row("d", 7), row("a", 8) | {"extra_info": None}])
    assert keys[0] == keys[4]
    assert len(set(keys)) == 4
    assert keys[3] == "data:7"
    assert all(len(key) == 16 for key in keys[:3])


def test_the_same_prompt_twice_in_a_step_is_told_apart() -> None:
    seen: Counter[str] = Counter()
    first = announce([row("a", 1), row("a", 1)], step=2, number=0, split="train", seen=seen)
    second = announce([row("a", 1)], step=2, number=1, split="train", seen=seen)
    assert [p.occurrence for p in (*first.prompts, *second.prompts)] == [0, 1, 2]


def test_random_numbers_of_steps_announcements_and_validations_are_their_own() -> None:
    steps = [
        announced(1, 1, step, number, split).sampling_step
        for step in (1, 2)
        for number in (0, 1)
        for split in ("train", "eval")
    ]
    assert len(set(steps)) == len(steps)
    assert all(0 <= step < 2**63 for step in steps)


def test_first_turns_wait_for_each_other_and_come_in_one_order() -> None:
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        book = SessionBook()
        book.announce(announced(2, 2))
        sessions = [("uid-0-0", 0), ("uid-0-0", 1), ("uid-0-1", 0), ("uid-0-1", 1)]
        ready = [book.arrive(sessions[i], book.request(sessions[i], [1, 2], SAMPLING)) for i in order]
        assert ready[:3] == [[], [], []]
        assert [r.request_id for r in ready[3]] == ["data:0#0/0", "data:0#0/1", "data:1#0/0", "data:1#0/1"]


def test_later_turns_do_not_wait_and_have_keys_of_their_own() -> None:
    book = SessionBook()
    book.announce(announced(1, 2))
    a, b = ("uid-0-0", 0), ("uid-0-0", 1)
    book.arrive(a, book.request(a, [1], SAMPLING))
    assert len(book.arrive(b, book.request(b, [1], SAMPLING))) == 2
    second = book.request(a, [1, 2, 3], SAMPLING)
    assert book.arrive(a, second) == [second]
    assert (second.prompt_key, second.request_id) == ("data:0@1", "data:0@1#0/0")


def test_who_ends_without_a_request_is_waited_for_by_nobody() -> None:
    book = SessionBook()
    book.announce(announced(2, 1))
    a, b = ("uid-0-0", 0), ("uid-0-1", 0)
    assert book.arrive(a, book.request(a, [1], SAMPLING)) == []
    assert [r.sample for r in book.end_prompt("uid-0-1")] == [0]
    assert not book.is_done
    assert book.end([a, a, b]) == []
    assert book.is_done
    with pytest.raises(FlexFloorError, match="belongs to no rollout"):
        book.request(a, [1], SAMPLING)


def test_unknown_prompts_are_refused_and_their_end_means_nothing() -> None:
    book = SessionBook()
    book.announce(announced(1, 1))
    assert book.end_prompt("nobody") == []
    with pytest.raises(FlexFloorError, match="nobody was not announced"):
        book.sampling_step(("nobody", 0))
