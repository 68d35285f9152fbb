"""Greedy generation: answers to prompts, how repetitive they are, and two texts side by side."""

import shutil
import textwrap
from collections import Counter
from itertools import zip_longest
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Answer(NamedTuple):
    """`tokens` counts the answer's tokens without EOS; `cut` says that the limit ended it."""

    text: str
    tokens: int
    cut: bool


def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> list[Answer]:
    """Greedy answers to prompts given as token ids, all in one batch. `model` is in eval mode."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    with torch.inference_mode():
        rows = model.generate(
            **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    answers = []
    for row in rows[:, batch["input_ids"].shape[1] :].tolist():
        cut = tokenizer.eos_token_id not in row
        ids = row if cut else row[: row.index(tokenizer.eos_token_id)]
        answers.append(Answer(tokenizer.decode(ids, skip_special_tokens=True).strip(), len(ids), cut))
    return answers


def repeated_4grams(texts: list[str]) -> float:
    """Share of the 4-grams of words that occurred before in the same text; 0 for texts of under 4 words."""
    total = repeated = 0
    for text in texts:
        words = text.split()
        counts = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
        total, repeated = total + counts.total(), repeated + counts.total() - len(counts)
    return repeated / total if total else 0.0


def side_by_side(left: str, right: str) -> str:
    """Two texts in word-wrapped columns."""
    column = (min(shutil.get_terminal_size().columns, 120) - 4) // 2
    columns = []
    for text in (left, right):
        lines = [line for line in text.splitlines() if line.strip()]
        columns.append([part for line in lines for part in textwrap.wrap(line, column)])
    return "\n".join(f"  {a:<{column}}  {b}".rstrip() for a, b in zip_longest(*columns, fillvalue=""))
