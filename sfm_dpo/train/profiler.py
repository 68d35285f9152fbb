"""Where the time of a step goes: torch's profiler over the steps of `profile_steps`, and a table of its shares.

Every moment is counted once, as the first of these that holds: data loading (a batch is awaited), optimizer, compute,
communication, idle. So communication is what compute does not hide. With a GPU, optimizer, compute and communication
are its kernels, and idle is a GPU that waits for Python or for the host. Without one they are PyTorch's operators on
the CPU and gloo's, and idle is Python between them; the profiler itself adds to that, more the smaller the model.
"""

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import write_atomically, write_json
from sfm_dpo.common.tables import format_table

log = logging.getLogger(__name__)

FOLDER = "profile"
LISTED = 15  # kernels in the table
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms", "mpi:")
_MARK = "sfm_dpo::optimizer"
_ADVICE = {
    "compute": "the device computes; what helps is less to compute (padding_free, no gradient checkpointing where "
    "memory allows) and faster kernels (torch_compile)",
    "communication": "ranks exchange weights or gradients, or wait for the slowest one; what helps is a larger "
    "per_device_train_batch_size (fewer exchanges a step), batch_rebalance, and ZeRO-2 where the model fits",
    "data loading": "batches are awaited; what helps is dataloader_num_workers: 2 or more",
    "optimizer": "the optimizer's update; what helps is a larger global_batch_size, or more ranks to share it",
    "idle": "the device waits for Python; what helps is a larger per_device_train_batch_size, torch_compile, and "
    "less logging",
}

KINDS = ("data loading", "optimizer", "compute", "communication")
Interval = tuple[float, float]


def time_shares(intervals: dict[str, list[Interval]], wall: Interval) -> dict[str, float]:
    """Share of each of the five in `wall`, in the order of the module's first lines; they add up to 1."""
    every = [np.clip(np.array(intervals.get(name, ())).reshape(-1, 2), *wall) for name in KINDS]
    edges = np.unique(np.concatenate([np.array(wall), *(spans.ravel() for spans in every)]))
    lengths, free = np.diff(edges) / (wall[1] - wall[0]), np.ones(len(edges) - 1, dtype=bool)
    shares: dict[str, float] = {}
    for name, spans in zip(KINDS, every, strict=True):
        depth = np.zeros(len(edges))
        np.add.at(depth, np.searchsorted(edges, spans[:, 0]), 1)
        np.add.at(depth, np.searchsorted(edges, spans[:, 1]), -1)
        covered = (depth.cumsum()[:-1] > 0) & free
        shares[name], free = float(lengths[covered].sum()), free & ~covered
    return shares | {"idle": float(lengths[free].sum())}


def classify_events(
    events: list[Any], on_gpu: bool
) -> tuple[dict[str, list[Interval]], dict[str, float], dict[str, int]]:
    """Intervals (microseconds) of each kind, seconds of each kernel without those it calls, collectives by name.

    `events`: of torch.profiler. With a GPU, the optimizer's kernels are those launched from its step.
    """
    intervals: dict[str, list[Interval]] = defaultdict(list)
    kernels: dict[str, float] = defaultdict(float)
    collectives: dict[str, int] = defaultdict(int)
    updates = [e for e in events if _is_on_cpu(e) and (e.name == _MARK or e.name.startswith("Optimizer.step"))]
    launched = {kernel.name for event in updates for child in _descendants(event) for kernel in child.kernels}
    for event in events:
        name, span = event.name, (event.time_range.start, event.time_range.end)
        if name.startswith("c10d::"):
            collectives[name.removeprefix("c10d::").strip("_")] += 1
        if _is_on_cpu(event) and name.startswith("enumerate(DataLoader)"):
            intervals["data loading"].append(span)
        elif event in updates:
            intervals["optimizer"] += [] if on_gpu else [span]
        elif on_gpu == _is_on_cpu(event) or (on_gpu and event.is_user_annotation):
            continue  # record_function of FSDP2 and the optimizer spans kernels on the GPU's own row, and is none
        elif name.startswith(_COMMUNICATION):
            intervals["communication"].append(span)
        elif on_gpu:
            intervals["optimizer" if name in launched else "compute"].append(span)
            kernels[name] += (span[1] - span[0]) / 1e6
        elif name.startswith(("aten::", "sfm_dpo::")):
            intervals["compute"].append(span)
            kernels[name] += event.self_cpu_time_total / 1e6
    return intervals, kernels, collectives


def _is_on_cpu(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def _descendants(event: Any) -> list[Any]:
    return [event] + [e for child in event.cpu_children for e in _descendants(child)]


def format_profile(result: dict[str, Any]) -> str:
    """The plain table of a profile (the dict in profile.json)."""
    first, last = result["steps"]
    lines = [
        f"profile of steps {first} to {last} on rank 0 of {result['ranks']} ({result['device']}): "
        f"{result['seconds']:.2f} s, {result['tokens']:,} tokens of all ranks, "
        f"{result['tokens'] / result['seconds']:,.0f} tokens/s while profiled",
        format_table([(name, f"{share:.1%}") for name, share in result["shares"].items()], align="lr"),
    ]
    kernels = [(f"{spent:.3f}", f"{spent / result['seconds']:.1%}", name[:80]) for name, spent in result["kernels"]]
    lines.append(format_table(kernels, ("seconds", "share", "kernels by time"), align="rrl"))
    if result["collectives"]:
        steps = last - first + 1
        counts = ", ".join(f"{name} {count / steps:g}" for name, count in result["collectives"].items())
        lines.append(f"  collectives a step: {counts}")
    return "\n".join([*lines, f"  {result['bottleneck']}"])


def describe_bottleneck(shares: dict[str, float]) -> str:
    name = max(shares, key=lambda name: shares[name])
    return f"bottleneck: {name}, {shares[name]:.0%} of the time: {_ADVICE[name]}"


class Profiler(TrainerCallback):
    """Writes profile/trace.json (chrome://tracing, Perfetto), profile.json and profile.txt into the run's folder.

    Rank 0 alone is looked at. The window begins where the step before ended, for the batch is fetched before
    `on_step_begin`; checkpoints and evaluations in it count as what they do.
    """

    def __init__(self, trainer: Any, first: int, last: int):
        self.trainer, self.first, self.last = trainer, first, last
        self.profiler: profile | None = None
        self.mark: torch.profiler.record_function | None = None
        self.tokens = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.profiler and state.global_step == self.last:
            self._end(args)
        self._begin(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.profiler:
            self.mark = torch.profiler.record_function(_MARK)
            self.mark.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.mark:
            self.mark.__exit__(None, None, None)
            self.mark = None

    def on_train_end(self, args, state, control, **kwargs):
        if self.profiler:  # the run ended before the last step to profile
            self.last = state.global_step
            self._end(args)

    def _begin(self, step: int) -> None:
        if step != self.first - 1 or not is_main_process():
            return
        self.tokens = self.trainer._total_train_tokens
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self.profiler.start()

    def _end(self, args) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler, self.profiler = self.profiler, None
        assert profiler is not None
        profiler.stop()
        folder = Path(args.output_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        events = profiler.events()
        wall = (min(e.time_range.start for e in events), max(e.time_range.end for e in events))
        intervals, kernels, collectives = classify_events(events, torch.cuda.is_available())
        result = {
            "steps": [self.first, self.last],
            "ranks": self.trainer.accelerator.num_processes,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "seconds": (wall[1] - wall[0]) / 1e6,
            "tokens": int(self.trainer._total_train_tokens - self.tokens),
            "shares": time_shares(intervals, wall),
            "kernels": sorted(kernels.items(), key=lambda item: -item[1])[:LISTED],
            "collectives": dict(collectives),
        }
        result["bottleneck"] = describe_bottleneck(result["shares"])
        write_json(folder / "profile.json", result)
        write_atomically(folder / "profile.txt", format_profile(result) + "\n")
        log.info(format_profile(result))


def add_profiler(trainer: Any) -> None:
    """Adds the profiler that `profile_steps` asks for, or none."""
    if trainer.args.profile_steps:
        trainer.add_callback(Profiler(trainer, *trainer.args.profile_steps))
