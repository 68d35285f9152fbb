"""Profile of the steps in `profile_steps`: torch's profiler, and the share of time that each kind of work takes.

On a GPU the work is its kernels, otherwise PyTorch's operators. Each moment counts once, for the first of KINDS that
is running, so communication is only what computation does not hide. Idle is the rest: waiting for data, Python, host.
"""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import format_table, write_atomically, write_json

log = logging.getLogger(__name__)

OPERATORS = ("aten::", "sfm_dpo::", "gloo:", "c10d::", "record_param_comms")
KINDS = {  # matched in the name of a kernel or operator; names of flash attention kernels may also contain cutlass
    "attention": re.compile("attention|attn|sdpa|flash|fmha", re.IGNORECASE),
    "products": re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|^aten::(add|b|badd)?mm$", re.IGNORECASE),
    "copies": re.compile("copy|memcpy|memset|catarray|^aten::cat$", re.IGNORECASE),
    "other": re.compile("^(?!nccl|gloo:|c10d::|record_param_comms)"),
    "communication": re.compile(""),
}


def time_shares(events: list[Any], wall: float, on_gpu: bool) -> dict[str, float]:
    """Share of each kind of work among torch.profiler's events, and of idle, in `wall` (microseconds); sum 1."""
    rest = [e for e in events if e.name.startswith(OPERATORS)]
    if on_gpu:  # an annotation (FSDP2's, the optimizer's) is no kernel: it spans kernels and the pauses between them
        rest = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    shares = {}
    counted: list[tuple[float, float]] = []
    before = 0.0
    for kind, pattern in KINDS.items():
        counted += [(e.time_range.start, e.time_range.end) for e in rest if pattern.search(e.name)]
        rest = [e for e in rest if not pattern.search(e.name)]
        covered = 0.0  # length of the union of the counted intervals
        covered_until = float("-inf")
        for start, end in sorted(counted):
            covered += max(0.0, end - max(start, covered_until))
            covered_until = max(covered_until, end)
        shares[kind] = (covered - before) / wall
        before = covered
    return shares | {"idle": 1 - before / wall}


class Profiler(TrainerCallback):
    """Writes profile/trace.json (for Perfetto), profile.json and profile.txt into the run's folder, for rank 0."""

    def __init__(self, first: int, last: int):
        self.first = first
        self.last = last
        self.profiler: profile | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        # Starts at the end of the preceding step, because a batch is fetched before on_step_begin
        if state.global_step == self.first - 1 and is_main_process():
            self.profiler = profile()
            self.profiler.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.profiler and state.global_step in (self.last, state.max_steps):
            self.profiler.stop()
            self._write(self.profiler, Path(args.output_dir) / "profile")
            self.profiler = None
        self.on_train_begin(args, state, control)

    def _write(self, profiler: profile, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        events = profiler.events()
        wall = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        on_gpu = torch.cuda.is_available()
        shares = time_shares(events, wall, on_gpu)
        write_json(folder / "profile.json", {"steps": [self.first, self.last], "shares": shares})
        order = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=15)
        percentages = format_table([(kind, f"{share:.1%}") for kind, share in shares.items()], align="lr")
        text = f"profile of steps {self.first} to {self.last}, rank 0, {wall / 1e6:.2f} s:\n{percentages}\n{table}"
        write_atomically(folder / "profile.txt", text)
        log.info(text)
