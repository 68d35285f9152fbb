"""Where the time of a step goes: torch's profiler over the steps of `profile_steps`, and a table of its shares.

Every moment is counted once, as the first of these that holds: data loading (a batch is awaited), optimizer, compute,
communication, idle. So communication is what compute does not hide. With a GPU, optimizer, compute and communication
are its kernels, and idle is a GPU that waits for Python or for the host. Without one they are PyTorch's operators on
the CPU and gloo's, and idle is Python between them; the profiler itself adds to that, more the smaller the model.
"""

import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import write_atomically

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

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    out: list[list[float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        elif end > start:
            out.append([start, end])
    return [(start, end) for start, end in out]


def without(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """What is left of disjoint `intervals` outside of disjoint `taken`; both in order."""
    out = []
    for start, end in intervals:
        for t_start, t_end in taken:
            if t_end <= start or t_start >= end:
                continue
            if t_start > start:
                out.append((start, t_start))
            start = t_end
            if start >= end:
                break
        if start < end:
            out.append((start, end))
    return out


def seconds(intervals: list[Interval]) -> float:
    """Their length; the profiler counts microseconds."""
    return sum(end - start for start, end in intervals) / 1e6


def shares(found: dict[str, list[Interval]], wall: Interval) -> dict[str, float]:
    """Share of each of the five in `wall`, in the order of the module's first lines; they add up to 1."""
    out: dict[str, float] = {}
    taken: list[Interval] = []
    for name in ("data loading", "optimizer", "compute", "communication"):
        inside = [(max(start, wall[0]), min(end, wall[1])) for start, end in found.get(name, [])]
        mine = without(union(inside), taken)
        out[name] = seconds(mine) / seconds([wall])
        taken = union(taken + mine)
    return out | {"idle": 1 - sum(out.values())}


def classify(events: list[Any], on_gpu: bool) -> tuple[dict[str, list[Interval]], dict[str, float], dict[str, int]]:
    """Intervals of each kind; seconds of each kernel, the time of those it calls taken out; collectives by name.

    `events`: of torch.profiler.
    """
    found: dict[str, list[Interval]] = defaultdict(list)
    kernels: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    stepping = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == torch.autograd.DeviceType.CPU:
            if event.name.startswith("enumerate(DataLoader)"):
                found["data loading"].append(span)
            elif event.name == _MARK or event.name.startswith("Optimizer.step"):
                stepping.append(event)
    if not on_gpu:
        found["optimizer"] = [(e.time_range.start, e.time_range.end) for e in stepping]
    else:  # the kernels that were launched from there; they run later than that
        launched = [kernel for event in stepping for child in _below(event) for kernel in child.kernels]
        names = {kernel.name for kernel in launched}
    for event in events:
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        name, span = event.name, (event.time_range.start, event.time_range.end)
        talks = name.startswith(_COMMUNICATION)
        if name.startswith("c10d::"):
            calls[name.removeprefix("c10d::").strip("_")] += 1
        if on_gpu != is_kernel or name == _MARK:
            continue
        if talks:
            found["communication"].append(span)
        elif on_gpu:
            found["optimizer" if name in names else "compute"].append(span)
            kernels[name] += seconds([span])
        elif name.startswith(("aten::", "sfm_dpo::")):
            found["compute"].append(span)
            kernels[name] += event.self_cpu_time_total / 1e6
    return found, kernels, calls


def _below(event: Any) -> list[Any]:
    return [event] + [e for child in event.cpu_children for e in _below(child)]


def table(result: dict[str, Any]) -> str:
    """The plain table of a profile (the dict in profile.json)."""
    first, last = result["steps"]
    lines = [
        f"profile of steps {first} to {last} on rank 0 of {result['ranks']} ({result['device']}): "
        f"{result['seconds']:.2f} s, {result['tokens']:,} tokens of all ranks, "
        f"{result['tokens'] / result['seconds']:,.0f} tokens/s while profiled"
    ]
    lines += [f"  {name:<14} {share:6.1%}" for name, share in result["shares"].items()]
    lines.append(f"  {'seconds':>9}  {'share':>6}  kernels by time")
    for name, spent in result["kernels"]:
        lines.append(f"  {spent:9.3f}  {spent / result['seconds']:6.1%}  {name[:80]}")
    if result["collectives"]:
        steps = last - first + 1
        counts = ", ".join(f"{name} {count / steps:g}" for name, count in result["collectives"].items())
        lines.append(f"  collectives a step: {counts}")
    return "\n".join([*lines, f"  {result['bottleneck']}"])


def bottleneck(found: dict[str, float]) -> str:
    name = max(found, key=lambda name: found[name])
    return f"bottleneck: {name}, {found[name]:.0%} of the time: {_ADVICE[name]}"


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
        found, kernels, calls = classify(events, torch.cuda.is_available())
        result = {
            "steps": [self.first, self.last],
            "ranks": self.trainer.accelerator.num_processes,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "seconds": seconds([wall]),
            "tokens": int(self.trainer._total_train_tokens - self.tokens),
            "shares": shares(found, wall),
            "kernels": sorted(kernels.items(), key=lambda item: -item[1])[:LISTED],
            "collectives": dict(calls),
        }
        result["bottleneck"] = bottleneck(result["shares"])
        write_atomically(folder / "profile.json", json.dumps(result, indent=2) + "\n")
        write_atomically(folder / "profile.txt", table(result) + "\n")
        log.info(table(result))


def add_profiler(trainer: Any) -> None:
    """Adds the profiler that `profile_steps` asks for, or none."""
    if trainer.args.profile_steps:
        trainer.add_callback(Profiler(trainer, *trainer.args.profile_steps))
