"""A consumer of what released workers free: it evaluates a checkpoint while the tail of the rollout still generates.

    +actor_rollout_ref.rollout.custom.consumer=evaluation:Evaluation

with the folder of this file in PYTHONPATH. EVALUATE_MODEL names the checkpoint. It goes through its texts as long as it
may, and returns how many it has done. Torch is imported when it starts; on a cluster a consumer brings its own model.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from tiny_tokenizer import TOKENIZER_TEXT


class Evaluation:
    def __init__(self, worker: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        folder = os.environ.get("EVALUATE_MODEL", "runs/verl/model")
        self._worker, self._asked = worker, threading.Event()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(folder).to(self._device).eval()
        self._texts = AutoTokenizer.from_pretrained(folder)(TOKENIZER_TEXT.splitlines())["input_ids"]

    def run(self) -> float:
        """Returns the number of texts."""
        import torch

        losses: list[float] = []
        while not self._asked.is_set():
            ids = torch.tensor([self._texts[len(losses) % len(self._texts)]], device=self._device)
            with torch.no_grad():
                losses.append(float(self._model(input_ids=ids, labels=ids).loss))
        if found := os.environ.get("EVALUATE_OUT"):
            with Path(found).open("a", encoding="utf-8") as file:
                told = {"worker": self._worker, "texts": len(losses), "loss": sum(losses) / max(1, len(losses))}
                print(json.dumps(told), file=file)
        return float(len(losses))

    def stop(self) -> None:
        self._asked.set()
