"""Stopping on request: after each step rank 0 looks for the stop file; all ranks save and exit together."""

import logging
import math
import os
import time

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sfm_dpo.common.distributed import broadcast
from sfm_dpo.run.checkpoint import stop_requested

log = logging.getLogger(__name__)


class StopCallback(TrainerCallback):
    """Ends the run after the step at which rank 0 sees the stop file: all ranks save, and exit together.

    STOP_LEAD_SECONDS is how long before the time limit the batch script writes the file. A step and the evaluation
    and save that may follow it must fit into that, or the run is killed while it saves.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.lead = float(os.environ.get("STOP_LEAD_SECONDS") or "inf")
        self.began = self.save_began = time.monotonic()

    def on_step_begin(self, *args, **kwargs) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.save_began = time.monotonic()
        # What is logged between two saves is then the same in a run that was killed and resumed from the first
        control.should_log = control.should_log or control.should_save
        # Rank 0 decides: a rank that looked a moment later could continue alone, and hang
        if broadcast(stop_requested(args.output_dir)) and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = True
            control.should_log = True
            control.should_training_stop = True

    def on_evaluate(self, *args, **kwargs) -> None:
        self.save_began = time.monotonic()

    def on_save(self, *args, **kwargs) -> None:
        now = time.monotonic()
        log.info(f"checkpoint saved in {now - self.save_began:.1f} s")
        needed = now - self.began
        if needed > self.lead:
            longer = math.ceil(needed * 1.5 / 60) * 60
            log.warning(
                f"the batch script asks to stop {self.lead:g} s before the time limit, but step, evaluation and save "
                f"take {needed:.0f} s: submit with STOP_LEAD_SECONDS={longer} and the same in --signal=B:USR1@"
            )
            self.lead = math.inf  # the warning comes once
