"""Throughput: tokens and pairs a second, padding, MFU (model/flops.py) and peak memory between two logs."""

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import TrainerCallback

from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.packing import find_shared

COUNTS = ("pairs", "tokens", "computed", "grid", "flops")


@dataclass
class Meter:
    """Counts the work of this rank between two logs."""

    forward_flops: ForwardFlops
    reference_in_step: bool
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))
    seconds: float = 0.0
    largest: tuple[int, int] = (0, 0)  # computed tokens of a micro-batch, and those of its responses
    mark: float = field(default_factory=time.monotonic)

    def add(self, batch: Mapping[str, torch.Tensor], packed: bool, prefix_sharing: bool) -> None:
        """A micro-batch of TRL's collator, tensors [2B, L]."""
        ids, mask, completion = (batch[name] for name in ("input_ids", "attention_mask", "completion_mask"))
        lengths = mask.sum(dim=1).cpu()
        shared = torch.zeros_like(lengths)
        if prefix_sharing:
            shared = find_shared(ids, mask, completion == 1).sum(dim=1).cpu()
        computed = int((lengths - shared).sum())
        self.counts["pairs"] += len(lengths) // 2
        self.counts["tokens"] += int(lengths.sum())
        self.counts["computed"] += computed
        grid = computed if packed else mask.numel()
        self.counts["grid"] += grid
        responses = int(completion.sum())
        self.largest = max(self.largest, (grid, responses))
        self.counts["flops"] += self.forward_flops(lengths, responses, training=True, shared=shared)
        if self.reference_in_step:
            self.counts["flops"] += self.forward_flops(lengths, responses, shared=shared)

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
