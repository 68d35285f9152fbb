"""Calibration: before anything is spent, a start measures noise, paths and kernels on its own model, pairs and device.

The gradients are those of the loss at step 0, where policy and reference agree: of (mean log-prob of the rejected
response - that of the chosen one), up to a factor. They are dropped as they arrive, so no weight changes.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import avg_pool1d

WINDOW = 16  # tokens: a leaked key changes only an answer's first log-probs
SAMPLE = 16_384  # gradient elements of each tensor


@dataclass
class Computed:
    """What one path gives for a pair: log-probs (nats) of the trained tokens of both responses, and gradients."""

    logps: list[torch.Tensor]
    norm: float = 0.0  # of the gradients of all trained parameters
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # a sample, by the kind of tensor


class Gradients:
    """Takes the gradients of a backward as they arrive: their norm and a sample; nothing is left in `grad`."""

    def __init__(self, model: torch.nn.Module):
        self.squares: list[torch.Tensor] = []
        self.sample: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.handles = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind = re.sub(r"\.\d+\.", ".", name)  # the same tensor of all layers
                hook = lambda p, kind=kind: self._take(p, kind)  # noqa: E731
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _take(self, parameter: torch.nn.Parameter, kind: str) -> None:
        gradient = parameter.grad.flatten()
        self.squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float32).square())
        self.sample[kind].append(gradient[:: max(1, gradient.numel() // SAMPLE)].float())
        parameter.grad = None

    def collect(self) -> tuple[float, dict[str, torch.Tensor]]:
        for handle in self.handles:
            handle.remove()
        norm = torch.stack(self.squares).sum().sqrt().item()
        return norm, {kind: torch.cat(parts).cpu() for kind, parts in self.sample.items()}


def compute_pair(trainer: Any, model: Any, rows: Sequence[int], path: str, backward: bool) -> Computed:
    """The first of the pairs `rows`, computed in one batch with the others."""
    batch = trainer.load_batch(trainer.train_dataset, rows)
    mask = batch.pop("completion_mask")
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    gradients = Gradients(model) if backward else None
    with torch.set_grad_enabled(backward), trainer.accelerator.autocast():
        log_probs = model(**batch, labels=labels, fused_lm_head=True, use_cache=False, path=path).log_probs
    pair = [0, len(rows)]
    trained = mask[pair, 1:].bool()
    logps = log_probs[pair]
    if gradients:
        weights = trained / trained.sum(dim=1, keepdim=True) * torch.tensor([[-1.0], [1.0]], device=mask.device)
        (weights * logps).sum().backward()
    computed = Computed([row[of_row].detach().float().cpu() for row, of_row in zip(logps, trained, strict=True)])
    if gradients:
        computed.norm, computed.gradients = gradients.collect()
    return computed


def compare_logps(a: Computed, b: Computed) -> float:
    """The largest mean difference over WINDOW tokens, in nats."""
    gaps = [(x - y).abs() for x, y in zip(a.logps, b.logps, strict=True)]
    return max(avg_pool1d(gap[None], min(WINDOW, len(gap)), stride=1).max().item() for gap in gaps)


def compare_gradients(a: Computed, b: Computed) -> float:
    sizes = {kind: sample.norm().item() for kind, sample in a.gradients.items()}
    total = sum(size**2 for size in sizes.values()) ** 0.5
    errors = {}
    for kind, sample in a.gradients.items():
        if sizes[kind] > 0.01 * total:
            errors[kind] = (sample - b.gradients[kind]).norm().item() / sizes[kind]
    errors["norm"] = abs(b.norm / a.norm - 1)
    return errors
