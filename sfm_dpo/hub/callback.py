"""Pushes checkpoints during training: each in a process of its own, which runs scripts/push_to_hub.py.

Trainer's own push (transformers 5.23) copies every checkpoint into output_dir, uploads whatever lies there, checks
nothing, and runs in threads that the interpreter waits for at its exit: at a time limit, until Slurm kills it.
"""

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config import TrainConfig
from sfm_dpo.hub.upload import format_push_command
from sfm_dpo.run.checkpoint import PUSHING

log = logging.getLogger(__name__)

# Variables of a launcher's ranks: with them the process would take itself for one of the ranks
_LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "GROUP_", "ROLE_", "FSDP_")


class PushCheckpoints(TrainerCallback):
    """Pushes each checkpoint of a run whose hub_strategy is every_save.

    As in Trainer, a checkpoint is skipped while the push of another one runs, unless hub_always_push. A push that
    fails logs it and does not affect the training. Pushes that still run when the training stops early are ended;
    the end of a run waits for them and calls `beat`, the watchdog's.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._pushes: dict[Path, subprocess.Popen] = {}

    def on_save(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not is_main_process() or args.hub_strategy == HubStrategy.END:
            return
        if state.global_step >= state.max_steps or control.should_training_stop:
            return
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._pushes = {path: push for path, push in self._pushes.items() if push.poll() is None}
        if self._pushes and not args.hub_always_push:
            log.info(f"{checkpoint} is not pushed: the push of {next(iter(self._pushes))} still runs")
            return
        command = shlex.split(_format_command(checkpoint, args))
        command[:2] = [sys.executable, str(PROJECT / command[1])]
        env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        push = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        self._pushes[checkpoint] = push
        (checkpoint / PUSHING).write_text(str(push.pid))

    def on_train_end(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        for checkpoint, push in self._pushes.items():
            if push.poll() is None and state.global_step < state.max_steps:
                push.terminate()
                log.info(f"the push of {checkpoint} was ended; push later with: {_format_command(checkpoint, args)}")
            while push.poll() is None:
                self._beat()
                time.sleep(1)


def _format_command(checkpoint: Path, args: TrainConfig) -> str:
    return format_push_command(checkpoint, args.hub_model_id, args.hub_revision, args.hub_private_repo)
