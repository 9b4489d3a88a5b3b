"""A small byte-level BPE tokenizer with a ChatML template, made in-process."""

from __future__ import annotations

import json
from typing import Any

from writing_checkpoints import InputError

BOS, IM_START, EOS, PAD = range(4)
SPECIAL_TOKENS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]  # at the ids above
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOKENIZER_TEXT = """\
What is the capital of France? The capital of France is Paris, a city on the river Seine.
Write a short story about a lighthouse. Every evening the old keeper climbed the stairs and lit the lamp.
Explain why the sky is blue. Sunlight is scattered by the air, and blue light is scattered more than red light.
List three things to pack for a hike: water, a map, and a warm jacket. Then tell your friends where you are going.
If a train travels 60 kilometres in 45 minutes, how fast is it? 60 / 0.75 = 80, so it is 80 kilometres per hour.
def add(first, second):
    return first + second
for number in range(10):
    print(number, number * number)
The model generates one token after another until the end of the response. Some answers are short; others are long.
There are many ways in which people learn: they read, they listen, they practise, and they make mistakes.
"""


def build_tokenizer(vocab: int, max_position: int) -> Any:
    """A byte-level BPE tokenizer with exactly `vocab` tokens and a ChatML template.

    Merges are learned from a short text; when that is used up, pairs of known tokens are joined in order.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([TOKENIZER_TEXT], trainer)
    learned = json.loads(trained.to_str())["model"]
    ids: dict[str, int] = learned["vocab"]
    merges = [(left, right) for left, right in learned["merges"]]
    endings = [token for token in ids if token.isascii() and token.isalpha()]
    for left, right in ((left, right) for left in list(ids)[SMALLEST_VOCAB:] for right in endings):
        if len(ids) == vocab:
            break
        if left + right not in ids:
            ids[left + right] = len(ids)
            merges.append((left, right))
    if len(ids) != vocab:
        raise InputError(f"--vocab {vocab}: the built-in text yields at most {len(ids)} tokens")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
        additional_special_tokens=[SPECIAL_TOKENS[IM_START]],
        model_max_length=max_position,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
