"""The log-probs of a pair in plain PyTorch, one sequence at a time, without the package's code."""

import re

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_tokenizer


def response_logps(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-prob of each response token [len(response)] from plain logits: no batch, no padding, no mask."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
    logps = F.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logps.gather(1, torch.tensor(response)[:, None])[:, 0]


def trained_logps(model, row: dict, side: str, max_length: int | None = None) -> torch.Tensor:
    """Log-probs of the tokens of a response that are trained: those that the model writes."""
    prompt = row["prompt_ids"]
    ids = (prompt + row[f"{side}_ids"])[:max_length]
    return response_logps(model, prompt, ids[len(prompt) :])[find_trained(ids)[len(prompt) :]]


def find_trained(ids: list[int]) -> torch.Tensor:
    """Of a ChatML row, bool [L]: all but the turns of tool and environment, which may be cut, and the header that
    follows; each byte is a token."""
    tokens = tiny_tokenizer().convert_ids_to_tokens(ids)
    text = "".join({"<|im_start|>": "[", "<|im_end|>": "]"}.get(token, token[0]) for token in tokens)
    trained = torch.ones(len(ids), dtype=torch.bool)
    for result in re.finditer(r"\[(t|e|$).*?(\[assistantĊ|$)", text):
        trained[slice(*result.span())] = False
    return trained


@torch.no_grad()
def by_hand(folder, rows) -> dict[str, torch.Tensor]:
    """Per-pair sums and means [N] of the log-probs of both responses under a model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = {}
    for side in ("chosen", "rejected"):
        logps = [trained_logps(model, row, side) for row in rows]
        out[f"{side}_sum"] = torch.stack([each.sum() for each in logps])
        out[f"{side}_mean"] = torch.stack([each.mean() for each in logps])
    return out
