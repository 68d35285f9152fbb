"""Progress of a run: one line of the log a logging step, and status.json kept up to date."""

import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sfm_dpo.common.files import format_clock
from sfm_dpo.run.folder import write_status
from sfm_dpo.run.reader import eval_prefix

log = logging.getLogger(__name__)

# (name in the log, name on the line, format)
_SHOWN = (
    ("loss", "loss", "{:.4f}"),
    ("rewards/margins", "margin", "{:+.4f}"),
    ("rewards/accuracies", "accuracy", "{:.2f}"),
    ("logps/chosen", "logp chosen", "{:.1f}"),
    ("logps/rejected", "rejected", "{:.1f}"),
    ("grad_norm", "grad", "{:.2f}"),
    ("learning_rate", "lr", "{:.1e}"),
)
# name in status.json: name in the log
_KEPT = {"loss": "loss", "margin": "rewards/margins", "pairs_per_second": "perf/pairs_per_second"}


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
        self.shown: dict[str, float] = {}
        write_status(args.output_dir, "running", step=state.global_step, max_steps=state.max_steps)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if prefix := eval_prefix(logs):
            logs = {key.removeprefix(prefix): value for key, value in logs.items()}
            head = f"{prefix[5:-1] or 'held out'} at step {state.global_step}"
        elif "loss" in logs:
            head = f"step {state.global_step}/{state.max_steps}"
        else:
            return  # the closing summary
        parts = [head] + [f"{name} {form.format(float(logs[key]))}" for key, name, form in _SHOWN if key in logs]
        seconds = self._seconds_left(state)
        if seconds:
            parts.append(f"ETA {format_clock(seconds)}")
        log.info("  ".join(parts))
        if "loss" in logs:
            self.shown = {key: float(logs[name]) for key, name in _KEPT.items() if name in logs}
        facts = {"step": state.global_step, "max_steps": state.max_steps, "eta_seconds": seconds} | self.shown
        facts |= describe_best(args, state)
        write_status(args.output_dir, "running", **facts)

    def _seconds_left(self, state: TrainerState) -> int | None:
        """By the mean pace since this start; None before its first step."""
        done = state.global_step - self.first_step
        left = state.max_steps - state.global_step
        return int((time.monotonic() - self.start) / done * left) if done else None
