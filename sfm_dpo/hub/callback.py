"""Pushes of checkpoints while training goes on: for each that is due, scripts/push_to_hub.py as a process of its own.

Trainer's own push (transformers 5.23) copies every checkpoint into output_dir, uploads whatever lies there, checks
nothing, and runs in threads for which the interpreter waits when it leaves: at a time limit, until Slurm kills it.
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
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config import TrainConfig
from sfm_dpo.hub.upload import format_push_command
from sfm_dpo.run.checkpoint import PUSHING

log = logging.getLogger(__name__)

# What a launcher tells its ranks: with it the process would take itself for one of them.
_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "GROUP_", "ROLE_", "FSDP_")


class PushCheckpoints(TrainerCallback):
    """Pushes the checkpoints of a run whose hub_strategy is every_save, every `hub_push_every` saves.

    One that is due while another is on its way is left out, unless hub_always_push; as in Trainer. A push that fails
    says so and changes nothing about the training. Those on their way when the run stops before its end are ended.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat  # told while the end of the run waits for pushes
        self._pushes: dict[Path, subprocess.Popen] = {}

    def on_save(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not is_main_process() or args.hub_strategy == HubStrategy.END or state.global_step >= state.max_steps:
            return
        by_epoch = args.save_strategy == SaveStrategy.EPOCH
        saves = round(state.epoch) if by_epoch else state.global_step / state.save_steps
        if saves % args.hub_push_every or control.should_training_stop:
            return
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._pushes = {path: push for path, push in self._pushes.items() if push.poll() is None}
        if self._pushes and not args.hub_always_push:
            log.info(f"{checkpoint} is not pushed: the push of {next(iter(self._pushes))} is still going on")
            return
        _, script, *words = shlex.split(_format_command(checkpoint, args))
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROJECT / script), *words]
        push = self._pushes[checkpoint] = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        (checkpoint / PUSHING).write_text(str(push.pid))

    def on_train_end(self, args: TrainConfig, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        for checkpoint, push in self._pushes.items():
            if push.poll() is None and state.global_step < state.max_steps:
                push.terminate()
                log.info(
                    f"the push of {checkpoint} was ended; push it later with: {_format_command(checkpoint, args)}"
                )
            while push.poll() is None:
                self._beat()
                time.sleep(1)


def _format_command(checkpoint: Path, args: TrainConfig) -> str:
    return format_push_command(checkpoint, args.hub_model_id, args.hub_revision, args.hub_private_repo)
