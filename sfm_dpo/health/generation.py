"""Greedy answers to prompts."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], limit: int
) -> list[str]:
    """Greedy answers of up to `limit` tokens to prompts of token ids, in one batch. `model` must be in eval mode."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    with torch.inference_mode():
        rows = model.generate(**batch, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    answers = rows[:, batch["input_ids"].shape[1] :].tolist()
    answers = [ids[: ids.index(eos)] if eos in ids else ids for ids in answers]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]
