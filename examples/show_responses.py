#!/usr/bin/env python3
"""Print prompts with the texts that a rollout gave them.

python examples/show_responses.py prompts.jsonl responses.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_words(prompt: Any) -> str:
    """A prompt as people read it: of a chat, its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", type=Path, help="JSONL with uid and prompt")
    parser.add_argument("responses", type=Path, help="responses.jsonl of a rollout")
    args = parser.parse_args()
    texts: dict[str, list[str]] = defaultdict(list)
    for response in read_lines(args.responses):
        end = "" if response["finish_reason"] == "stop" else " …"
        texts[response["prompt_key"]].append(response["text"].strip() + end)
    for row in read_lines(args.prompts):
        print(f"\n> {last_words(row['prompt'])}")
        for text in texts[str(row["uid"])]:
            print(text)


if __name__ == "__main__":
    main()
