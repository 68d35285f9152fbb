"""Calibration: before anything is spent, a start measures its noise, paths, kernels, memory and speed.

It measures on the model, the pairs and the device of the run, before the reference pass. Gradients are dropped as they
arrive, so no weight changes. What it finds is recorded in data.json as `calibration`; a resumed run reads that.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.train.fit_memory import MemoryPlan
from sfm_dpo.train.frozen_model import frozen_model
from sfm_dpo.train.settings import Settings

log = logging.getLogger(__name__)

# Rounding of a log-prob relative to the largest logit: half a unit of roundoff in 16 bit; in fp32, where nothing is
# accumulated in a higher precision, up to 2**-21.4 was measured (SmolLM2-135M and tiny models, packed against padded)
ROUNDING = {"bf16": 2**-9, "fp16": 2**-12, "no": 2**-20}
GRADIENT = 8  # relative rounding of a gradient over that of a log-prob: 2**-6.2 and 2**-17.8 were measured
ALLOWED = 4  # a path may differ from the padded one by this many times the noise
WINDOW = 16  # tokens: a leaked key changes only an answer's first log-probs
SAMPLE = 16_384  # gradient elements of each tensor
SMALL = 0.01  # kinds of tensor with a smaller share of the gradient's norm are not compared
FASTER = 0.95  # of FA2's time: another kernel is chosen only if it takes less
ROUNDS = 3  # settings that are tried
REMEDIES = {"packed": "padding_free: false", "shared": "prefix_sharing: false"}

Differences = dict[str, float]  # of "log-probs" in nats; of the gradient's "norm" and of kinds of tensor, relative


@dataclass(frozen=True)
class Calibration:
    noise: float  # nats: a log-prob's difference between two batch shapes, the largest mean over WINDOW tokens
    paths: dict[str, float]  # the largest difference of each path and kernel, in multiples of the noise
    kernels: dict[str, float]  # milliseconds of an average micro-batch, forward and backward
    planned_bytes: int | None  # of the largest micro-batch and the states of training, on each device
    measured_bytes: int | None
    tokens_per_second: float | None  # of a device in an average micro-batch, without communication
    mfu: float | None
    seconds: float


@dataclass
class Computed:
    """What one path gives for a pair: log-probs (nats) of the trained tokens of both responses, and gradients."""

    logps: list[torch.Tensor]
    norm: float = 0.0  # of the gradients of all trained parameters
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # a sample, by the kind of tensor


class Gradients:
    """Takes each gradient of a backward as it arrives: its norm and, if asked, a sample; `grad` stays None."""

    def __init__(self, model: torch.nn.Module, sample: bool):
        self.squares: list[torch.Tensor] = []
        self.sample: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.handles = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind = re.sub(r"\.\d+\.", ".", name) if sample else ""  # the same tensor of all layers
                hook = self._make_hook(kind)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, kind: str) -> Any:
        def take(parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad.flatten()
            parameter.grad = None
            if kind:
                self.squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float32).square())
                self.sample[kind].append(gradient[:: max(1, gradient.numel() // SAMPLE)].float())

        return take

    def collect(self) -> tuple[float, dict[str, torch.Tensor]]:
        for handle in self.handles:
            handle.remove()
        norm = torch.stack(self.squares).sum().sqrt().item() if self.squares else 0.0
        return norm, {kind: torch.cat(parts).cpu() for kind, parts in self.sample.items()}


def calibrate(trainer: Any, plan: MemoryPlan | None) -> tuple[Calibration, Settings]:
    """Measures, and returns the settings that the run should have; a trainer with others must be built again. All
    ranks must call it before the reference pass, and get the same.

    `plan`: the settings from which memory may choose, or None if it is not measured. Raises UserError for a path or
    kernel that differs from the padded one by more than the noise, and if no setting fits into memory.
    """
    begin = time.monotonic()
    trainer.progress.phase = "calibration"
    # ZeRO-3 and FSDP2 shard the policy only when training begins
    has_backward = trainer.zero_stage != 3 and not trainer.is_fsdp_enabled
    settings = trainer.settings
    result = Calibration(0.0, {}, {}, None, None, None, None, 0.0)
    with frozen_model(trainer, "policy") as policy, torch.random.fork_rng():
        model = policy.model
        noise, paths = compare_paths(trainer, model, has_backward)
        result = replace(result, noise=noise["log-probs"], paths=paths)
        if plan and has_backward:
            measured, candidate = find_setting(trainer, model, plan)
            settings = settings.with_candidate(candidate, trainer.config.train)
            result = replace(result, planned_bytes=candidate.bytes, measured_bytes=measured)
        ...
    return result, settings


def select_pairs(trainer: Any) -> list[int]:
    """Two pairs of median length; on a CPU, where a token is slow, the shortest."""
    lengths = Lengths.of(trainer.train_dataset).truncate(trainer.args.max_length)
    is_trained = count_trained(trainer.train_dataset, trainer.args.max_length).min(axis=1) > 0
    order = np.argsort(np.where(is_trained, lengths.total, np.iinfo(np.int64).max), kind="stable")
    middle = int(is_trained.sum()) // 2 if trainer.accelerator.device.type == "cuda" else 0
    return [int(order[middle]), int(order[min(middle + 1, len(order) - 1)])]


def compute_pair(trainer: Any, model: Any, rows: Sequence[int], path: str, backward: bool) -> Computed:
    """The first of the pairs `rows`, computed in one batch with the others. The gradient is that of the loss at step
    0, where policy and reference agree: of mean log-prob (rejected) - mean log-prob (chosen), up to a factor."""
    batch = trainer.load_batch(trainer.train_dataset, rows)
    mask = batch.pop("completion_mask")
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    gradients = Gradients(model, sample=True) if backward else None
    options: dict[str, Any] = {"path": path} if trainer.packed else {}
    with torch.set_grad_enabled(backward), precision(trainer):
        log_probs = model(**batch, labels=labels, fused_lm_head=True, use_cache=False, **options).log_probs
    pair = [0, len(rows)]
    trained = mask[pair, 1:].bool()
    logps = log_probs[pair]
    if gradients:
        signs = torch.tensor([[-1.0], [1.0]], device=mask.device)
        (signs * trained / trained.sum(dim=1, keepdim=True) * logps).sum().backward()
    computed = Computed([row[of_row].detach().float().cpu() for row, of_row in zip(logps, trained, strict=True)])
    if gradients:
        computed.norm, computed.gradients = gradients.collect()
    return computed
