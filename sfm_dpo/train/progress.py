"""Progress of a run: one line of the log a logging step, and status.json kept up to date."""

import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sfm_dpo.common.files import format_clock
from sfm_dpo.run.folder import write_status
from sfm_dpo.run.reader import eval_prefix

log = logging.getLogger(__name__)

SHOWN = {  # by the name in the log: name on the line, format
    "loss": ("loss", "{:.4f}"),
    "rewards/margins": ("margin", "{:+.4f}"),
    "rewards/accuracies": ("accuracy", "{:.2f}"),
    "logps/chosen": ("logp chosen", "{:.1f}"),
    "logps/rejected": ("rejected", "{:.1f}"),
    "grad_norm": ("grad", "{:.2f}"),
    "learning_rate": ("lr", "{:.1e}"),
}
KEPT = {"loss": "loss", "margin": "rewards/margins", "pairs_per_second": "perf/pairs_per_second"}  # in status.json


def describe_best(args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """For status.json: the best checkpoint so far by metric_for_best_model, or None."""
    step = state.best_global_step
    if not step:
        return {"best": None}
    metric = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
    checkpoint = f"{args.output_dir}/checkpoint-{step}"
    return {"best": {"checkpoint": checkpoint, "step": step, "metric": metric, "value": state.best_metric}}


class ProgressLine(TrainerCallback):
    """Replaces transformers' progress bar, which fills a batch job's log with control characters."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.start = time.monotonic()
        self.first_step = state.global_step
        self.kept: dict[str, float] = {}
        write_status(args.output_dir, "running", step=state.global_step, max_steps=state.max_steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        logs = logs or {}
        prefix = eval_prefix(logs)
        if not state.is_world_process_zero or not (prefix or "loss" in logs):
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
        if not prefix:
            self.kept = {key: float(logs[name]) for key, name in KEPT.items() if name in logs}
        facts = {"step": state.global_step, "max_steps": state.max_steps, "eta_seconds": seconds} | self.kept
        write_status(args.output_dir, "running", **facts, **describe_best(args, state))
