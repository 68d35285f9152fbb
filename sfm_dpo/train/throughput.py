"""Throughput: tokens and pairs a second, padding, MFU (model/flops.py) and peak memory between two logs."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from sfm_dpo.model.flops import ForwardFlops, peak_flops

COUNTS = ("pairs", "tokens", "responses", "computed", "grid", "flops")


@dataclass
class CountingCollator:
    """TRL's collator, whose batch also gets `counts`, the numbers of COUNTS. They are taken on the CPU.

    `tokens` are real ones of both sequences of a pair, `responses` those of its answers, `computed` those without the
    prompts that prefix sharing computes once, and `grid` is what the model computes, padding included.
    """

    collate: Callable[[list[dict]], dict[str, Any]]
    forward_flops: ForwardFlops
    reference_in_step: bool
    packed: bool
    prefix_sharing: bool

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        batch = self.collate(rows)
        return batch | {"counts": self.count(batch["attention_mask"], batch["completion_mask"])}

    def count(self, mask: torch.Tensor, completion: torch.Tensor) -> dict[str, float]:
        """Of a micro-batch with masks [2B, L] of its tokens and of the responses', chosen rows first."""
        lengths = mask.sum(dim=1)
        prompts = lengths - completion.sum(dim=1)
        shared = torch.zeros_like(lengths)
        if self.prefix_sharing:
            half = len(prompts) // 2
            shared[half:] = (prompts[half:] - 1).clamp(min=0)  # the last token of a prompt predicts each answer
        responses = int(completion.sum())
        computed = int((lengths - shared).sum())
        flops = self.forward_flops(lengths, responses, training=True, shared=shared)
        if self.reference_in_step:
            flops += self.forward_flops(lengths, responses, shared=shared)
        return {
            "pairs": len(mask) // 2,
            "tokens": int(lengths.sum()),
            "responses": responses,
            "computed": computed,
            "grid": computed if self.packed else mask.numel(),
            "flops": flops,
        }


@dataclass
class Meter:
    """Adds up the work of this rank between two logs."""

    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))
    seconds: float = 0.0
    largest: tuple[int, int] = (0, 0)  # computed tokens of a micro-batch, and those of its responses
    mark: float = field(default_factory=time.monotonic)

    def add(self, counts: dict[str, float]) -> None:
        """A micro-batch's `counts` of CountingCollator."""
        for name in COUNTS:
            self.counts[name] += counts[name]
        self.largest = max(self.largest, (int(counts["grid"]), int(counts["responses"])))

    def skip(self) -> None:
        """Leaves out the time since the last step's end: evaluation, saving."""
        self.mark = time.monotonic()

    def step_ended(self) -> None:
        now = time.monotonic()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def metrics(self, totals: dict[str, float], world_size: int) -> dict[str, float]:
        """perf/* from the counts summed over ranks, and a fresh start."""
        seconds, self.seconds = max(self.seconds, 1e-9), 0.0
        self.counts = dict.fromkeys(self.counts, 0.0)
        out = {
            "perf/tokens_per_second": totals["tokens"] / seconds,
            "perf/pairs_per_second": totals["pairs"] / seconds,
            "perf/padding_fraction": 1 - totals["computed"] / max(totals["grid"], 1),
            "perf/shared_fraction": 1 - totals["computed"] / max(totals["tokens"], 1),
            "perf/peak_memory_gib": peak_memory_gib(),
        }
        peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if peak is not None:
            out["perf/mfu"] = totals["flops"] / seconds / (peak * world_size)
        return out


def peak_memory_gib() -> float:
    """Peak of this process: allocated on the GPU, or resident on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class MeterCallback(TrainerCallback):
    """Tells the meter when a step ended, and what time was not training."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_step_end(self, *args, **kwargs) -> None:
        self.meter.step_ended()

    def on_train_begin(self, *args, **kwargs) -> None:
        self.meter.skip()

    on_evaluate = on_save = on_train_begin
