"""Pushes checkpoints during training, each in its own process, which runs scripts/push_to_hub.py.

Trainer's own push (transformers 5.23) uploads every file in output_dir, checks nothing, and runs in threads that the
interpreter waits for at exit: at a time limit, until Slurm kills it.
"""

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState

from sfm_dpo.common.distributed import environment_outside_launcher, is_main_process
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config import TrainConfig
from sfm_dpo.hub.upload import format_push_command
from sfm_dpo.run.checkpoint import PUSHING, mark_in_use

log = logging.getLogger(__name__)


class PushCheckpoints(TrainerCallback):
    """Pushes each checkpoint of a run whose hub_strategy is every_save.

    As in Trainer, a checkpoint is skipped while an earlier push is running, unless hub_always_push is set. A push that
    fails does not affect training. A finished run waits for its pushes and calls `beat`, the watchdog's; a run that
    stops early terminates them.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._pushes: dict[str, subprocess.Popen] = {}  # by the command that repeats the push

    def on_save(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if is_last or not is_main_process() or args.hub_strategy == "end":
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._pushes = {command: push for command, push in self._pushes.items() if push.poll() is None}
        if self._pushes and not args.hub_always_push:
            log.info(f"{checkpoint} is not pushed: the push of an earlier checkpoint is still running")
            return
        command = format_push_command(checkpoint, args.hub_model_id, args.hub_revision, args.hub_private_repo)
        _, script, *options = shlex.split(command)
        env = environment_outside_launcher()
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        push = subprocess.Popen([sys.executable, PROJECT / script, *options], env=env, stdin=subprocess.DEVNULL)
        self._pushes[command] = push
        mark_in_use(checkpoint, PUSHING, push.pid)

    def on_train_end(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        for command, push in self._pushes.items():
            if push.poll() is None and state.global_step < state.max_steps:
                push.terminate()
                log.info(f"the push of a checkpoint was terminated; push it later with: {command}")
            while push.poll() is None:
                self._beat()
                time.sleep(1)
