"""Profile of the steps in `profile_steps`, by torch's profiler."""

import logging
from pathlib import Path

import torch
from torch.profiler import profile
from transformers import TrainerCallback

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import write_atomically

log = logging.getLogger(__name__)


class Profiler(TrainerCallback):
    """Writes profile/trace.json (for Perfetto) and profile.txt into the run's folder, for rank 0."""

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
            folder = Path(args.output_dir) / "profile"
            folder.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(folder / "trace.json"))
            order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table = self.profiler.key_averages().table(sort_by=order, row_limit=15)
            text = f"profile of steps {self.first} to {self.last}, rank 0:\n{table}"
            write_atomically(folder / "profile.txt", text)
            log.info(text)
            self.profiler = None
        self.on_train_begin(args, state, control)
