"""Pushes checkpoints during training, each in its own process, which runs scripts/push_to_hub.py.

Trainer's own push (transformers 5.24) uploads every file in output_dir, checks nothing, and runs in threads that the
interpreter waits for at exit: at a time limit, until Slurm kills it.
"""

import logging
import shlex
import subprocess
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.hub.upload import start_push

log = logging.getLogger(__name__)


class PushCheckpoints(TrainerCallback):
    """Pushes each checkpoint of a run whose hub_strategy is every_save.

    As in Trainer, a checkpoint is skipped while an earlier push is running. A push that fails does not affect
    training. A run that stops early terminates its push, a finished one that to the branch of the final model;
    otherwise `wait` waits for it.
    """

    def __init__(self, args: TrainConfig) -> None:
        self.is_active = args.push_to_hub and args.hub_strategy != "end" and is_main_process()
        self._push: subprocess.Popen | None = None
        self._words: list[str] = []  # of its command

    def on_save(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if is_last or not self.is_active:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._push and self._push.poll() is None:
            log.info(f"{checkpoint} is not pushed: the push of an earlier checkpoint is still running")
            return
        self._push, self._words = start_push(checkpoint, args)

    def on_train_end(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        is_finished = state.global_step >= state.max_steps
        if is_finished and "{step}" in (args.hub_revision or ""):
            return
        if self._push and self._push.poll() is None:
            self._push.terminate()
            log.info(f"the push of a checkpoint was terminated; push it later with: python {shlex.join(self._words)}")
        self.wait()

    def wait(self) -> None:
        """Waits for the push, which would end with this job."""
        if self._push:
            self._push.wait()
