"""The rule reward of the example, as verl calls it: the share of a response's letters that are vowels, 0 to 1."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    letters = [character for character in solution_str.lower() if character.isascii() and character.isalpha()]
    return sum(character in "aeiou" for character in letters) / max(1, len(letters))
