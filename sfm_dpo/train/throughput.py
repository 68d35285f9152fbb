"""Throughput: tokens and pairs a second, padding, MFU (model/flops.py) and peak memory between two logs."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.utils import get_peak_flops

from sfm_dpo.model.flops import ForwardFlops


@dataclass
class CountingCollator:
    """TRL's collator, whose batch also gets `counts`, taken on the CPU."""

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
            half = len(mask) // 2
            shared[half:] = (prompts[half:] - 1).clamp(min=0)  # the last token of a prompt predicts each answer
        responses = int(completion.sum())
        computed = int((lengths - shared).sum())
        flops = self.forward_flops(lengths, responses, training=True, shared=shared)
        if self.reference_in_step:
            flops += self.forward_flops(lengths, responses, shared=shared)
        return {
            "pairs": len(mask) // 2,
            "tokens": int(lengths.sum()),
            "computed": computed,  # a shared prompt once
            "grid": computed if self.packed else mask.numel(),  # with padding
            "flops": flops,
        }


class Meter(TrainerCallback):
    """Adds up the work of this rank between two logs, and the seconds of its steps without evaluation and saving."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, float] = defaultdict(float)  # of CountingCollator
        self.seconds = 0.0
        self._mark = time.monotonic()

    def add(self, counts: dict[str, float]) -> None:
        for name, count in counts.items():
            self.counts[name] += count

    def on_step_end(self, *args, **kwargs) -> None:
        now = time.monotonic()
        self.seconds += now - self._mark
        self._mark = now

    def on_train_begin(self, *args, **kwargs) -> None:
        self._mark = time.monotonic()

    on_evaluate = on_save = on_train_begin

    def metrics(self, totals: dict[str, float], world_size: int) -> dict[str, float]:
        """perf/* from the counts summed over ranks; begins anew."""
        seconds = max(self.seconds, 1e-9)
        self.seconds = 0.0
        self.counts.clear()
        metrics = {
            "perf/tokens_per_second": totals["tokens"] / seconds,
            "perf/pairs_per_second": totals["pairs"] / seconds,
            "perf/padding_fraction": 1 - totals["computed"] / max(totals["grid"], 1),
            "perf/shared_fraction": 1 - totals["computed"] / max(totals["tokens"], 1),
            "perf/peak_memory_gib": peak_memory_gib(),
        }
        if torch.cuda.is_available() and (peak := get_peak_flops(torch.cuda.get_device_name(), "bfloat16")):
            metrics["perf/mfu"] = totals["flops"] / seconds / (peak * world_size)
        return metrics


def peak_memory_gib() -> float:
    """Peak of this process: allocated on the GPU, or resident on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
