"""Throughput: tokens and pairs a second, padding, MFU (model/flops.py) and peak memory between two logs."""

import resource
import time
from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback

from sfm_dpo.model.flops import ForwardFlops, peak_flops


@dataclass
class Meter:
    """Counts the work of this rank between two logs."""

    forward_flops: ForwardFlops
    reference_in_step: bool
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pairs", "tokens", "grid", "flops"), 0.0))
    seconds: float = 0.0
    mark: float = field(default_factory=time.monotonic)

    def add(self, attention_mask: torch.Tensor, completion_mask: torch.Tensor, packed: bool) -> None:
        """A micro-batch: masks are [2B, L]."""
        lengths = attention_mask.sum(dim=1).cpu()
        tokens = int(lengths.sum())
        self.counts["pairs"] += len(lengths) // 2
        self.counts["tokens"] += tokens
        self.counts["grid"] += tokens if packed else attention_mask.numel()
        responses = int(completion_mask.sum())
        self.counts["flops"] += self.forward_flops(lengths, responses, training=True)
        if self.reference_in_step:
            self.counts["flops"] += self.forward_flops(lengths, responses)

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
            "perf/padding_fraction": 1 - totals["tokens"] / max(totals["grid"], 1),
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
