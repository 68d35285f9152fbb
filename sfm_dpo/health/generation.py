"""Greedy answers to prompts, and how repetitive the answers are."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Answer(NamedTuple):
    text: str
    cut: bool  # ended by the token limit


def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], limit: int
) -> list[Answer]:
    """Greedy answers of up to `limit` tokens to prompts of token ids, in one batch. `model` must be in eval mode."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    with torch.inference_mode():
        rows = model.generate(**batch, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answers = []
    for row in rows[:, batch["input_ids"].shape[1] :].tolist():
        cut = tokenizer.eos_token_id not in row
        ids = row if cut else row[: row.index(tokenizer.eos_token_id)]
        answers.append(Answer(tokenizer.decode(ids, skip_special_tokens=True).strip(), cut))
    return answers


def repeated_4grams(texts: list[str]) -> float:
    """Share of word 4-grams that occurred before in the same text; 0 for texts of fewer than 4 words."""
    total = 0
    distinct = 0
    for words in map(str.split, texts):
        grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        total += len(grams)
        distinct += len(set(grams))
    return (total - distinct) / total if total else 0.0
