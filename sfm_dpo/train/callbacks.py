"""Callbacks of a run: progress of each rank, stopping on request, log lines, profile; and out-of-memory errors."""

import json
import logging
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.profiler import profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sfm_dpo.common.distributed import is_main_process, is_on_gpu
from sfm_dpo.common.errors import OutOfMemory
from sfm_dpo.common.files import format_clock, write_atomically
from sfm_dpo.model.sharding import suggest_sharding
from sfm_dpo.run.checkpoint import stop_requested
from sfm_dpo.run.folder import LOG, State, write_status
from sfm_dpo.run.reader import eval_prefix

log = logging.getLogger(__name__)

SHOWN = {  # name in the log: (name on the progress line, format)
    "loss": ("loss", "{:.4f}"),
    "rewards/margins": ("margin", "{:+z.4f}"),  # z: no -0.0000
    "rewards/accuracies": ("accuracy", "{:.2f}"),
    "logps/chosen": ("logp chosen", "{:.1f}"),
    "logps/rejected": ("rejected", "{:.1f}"),
    "grad_norm": ("grad", "{:.2f}"),
    "learning_rate": ("lr", "{:.1e}"),
}
KEPT = {"loss": "loss", "margin": "rewards/margins", "pairs_per_second": "perf/pairs_per_second"}  # in status.json


class Progress(TrainerCallback):
    """What this rank is computing, for the watchdog and for out-of-memory errors."""

    def __init__(self) -> None:
        self.count = 0  # micro-batches (reference pass, training, evaluation), steps and saves so far
        self.moved = time.monotonic()
        self.phase = "loading"
        self.step = 0
        self.inputs: dict[str, Any] = {}  # TRL's tensors [2B, L] of the current micro-batch
        self.saving: Path | None = None  # the checkpoint that is being written

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names what is computed, until an error or the end."""
        before = self.phase
        self.phase = phase
        yield
        self.phase = before

    def begin_micro_batch(self, step: int, inputs: dict[str, Any]) -> None:
        self.step = step
        self.inputs = inputs
        self.advance()

    def advance(self) -> None:
        self.count += 1
        self.moved = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.advance()

    on_save = on_evaluate = on_step_end

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.phase = "training"
        self.on_step_end(args, state, control)


# Messages of torch on CUDA and on CPU, of CUDA's libraries, and of the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
# By phase, fields that may change when the run resumes (config/effects.py); the first is for a batch of several pairs
REMEDIES = {
    "training": ["use a smaller per_device_train_batch_size", "set gradient_checkpointing: true"],
    "the preflight": ["use a smaller per_device_train_batch_size"],
    "evaluation": ["use a smaller per_device_eval_batch_size"],
    "the reference's forward": ["use precompute_ref_batch_size: 1"],
}
NEW_RUN = "in a new output_dir, use a smaller max_length or model, or more GPUs"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(SIGNS.search(str(error)))


def explain_out_of_memory(error: BaseException, progress: Progress, smaller: str | None) -> OutOfMemory | None:
    """One line that says what did not fit and what would; None for any other error. `smaller`: of `Calibration`."""
    if not is_out_of_memory(error):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold the activations; the report needs memory
    what = f"out of memory in {progress.phase}"
    remedies = REMEDIES.get(progress.phase, [])
    if progress.phase == "training":
        what += f", step {progress.step + 1}"
    if progress.inputs:
        mask = progress.inputs["attention_mask"].cpu()
        what += f", micro-batch of {len(mask) // 2} pairs, {int(mask.sum()):,} tokens without padding"
        remedies = remedies[len(mask) == 2 :]
    if progress.phase == "training" and smaller is not None:
        remedies = [f"use the next smaller setting: {smaller}"] if smaller else []
    reason = str(error)[:120].partition("\n")[0] or type(error).__name__
    text = "; or ".join([*remedies, f"{NEW_RUN}{suggest_sharding()}"])
    return OutOfMemory(f"{what} ({reason}); {text}", step=progress.step)


class StopCallback(TrainerCallback):
    """Ends the run after the step at which rank 0 sees the stop file: all ranks save and exit together."""

    stopped = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # A run that is killed and resumed from a checkpoint then logs the same values as an undisturbed run
        control.should_log = control.should_log or control.should_save

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.on_epoch_end(args, state, control)
        # Rank 0 decides: a rank that checked a moment earlier could continue alone and hang
        asked = torch.full((), is_main_process() and stop_requested(args.output_dir), device=args.device)
        if broadcast(asked).item() and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = args.save_strategy != "epoch"  # else the epoch, which ends here, saves the step
            control.should_log = True
            control.should_training_stop = True


def describe_progress(state: TrainerState) -> dict[str, Any]:
    """For status.json: the steps and the newest training metrics of KEPT."""
    newest: dict[str, Any] = next((entry for entry in reversed(state.log_history) if "loss" in entry), {})
    kept = {key: newest.get(name) for key, name in KEPT.items()}
    return {"step": state.global_step, "max_steps": state.max_steps} | kept


class ProgressLine(TrainerCallback):
    """Writes a log line, log.jsonl and status.json at each logging step; a progress bar would fill the log."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.start = time.monotonic()
        self.first_step = state.global_step
        if state.is_world_process_zero:  # removes what an earlier start logged after this checkpoint
            entries = [json.dumps(entry) + "\n" for entry in state.log_history]
            write_atomically(Path(args.output_dir) / LOG, "".join(entries))
        write_status(args.output_dir, State.RUNNING, **describe_progress(state))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs, **kwargs):
        if not state.is_world_process_zero:
            return
        prefix = eval_prefix(logs)
        with (Path(args.output_dir) / LOG).open("a") as file:
            file.write(json.dumps(state.log_history[-1]) + "\n")
        if not (prefix or "loss" in logs):
            return
        parts = [f"step {state.global_step}/{state.max_steps}"]
        if prefix:
            parts = [f"{prefix[5:-1] or 'held out'} at step {state.global_step}"]
        for key, (name, form) in SHOWN.items():
            if prefix + key in logs:
                parts.append(f"{name} {form.format(float(logs[prefix + key]))}")
        seconds = None
        if done := state.global_step - self.first_step:
            seconds = int((time.monotonic() - self.start) / done * (state.max_steps - state.global_step))
            parts.append(f"ETA {format_clock(seconds)}")
        log.info("  ".join(parts))
        write_status(args.output_dir, State.RUNNING, eta_seconds=seconds, **describe_progress(state))


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
            order = "self_cuda_time_total" if is_on_gpu() else "self_cpu_time_total"
            table = self.profiler.key_averages().table(sort_by=order, row_limit=15)
            text = f"profile of steps {self.first} to {self.last}, rank 0:\n{table}"
            write_atomically(folder / "profile.txt", text)
            log.info(text)
            self.profiler = None
        self.on_train_begin(args, state, control)
