"""Checkpoints of the trainer: complete or not counted, readable by from_pretrained, and resumed exactly."""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.model.loading import checkpoint_layers
from sfm_dpo.run.checkpoint import mark_complete, rotate_run

if TYPE_CHECKING:
    from sfm_dpo.train.trainer import SFMDPOTrainer

log = logging.getLogger(__name__)


class CheckpointCallback(TrainerCallback):
    """Marks a checkpoint as complete once all ranks have written their part, then deletes the oldest checkpoints.
    Transformers would delete while ranks still write, and would count a checkpoint that a kill left incomplete."""

    def __init__(self, trainer: "SFMDPOTrainer"):
        self.trainer = trainer

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.accelerator.wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        mark_complete(checkpoint, {"step": state.global_step, **trainer.facts.as_dict()})
        trainer.progress.saving = None
        seconds = time.monotonic() - trainer.progress.moved
        log.info(f"checkpoint saved in {seconds:.1f} s")
        if seconds > float(os.environ.get("SFM_GRACE_SECONDS") or "inf"):  # scripts/common.sh
            remedy = f"submit with --signal=B:USR1@{2 * seconds:.0f}, unless you gave a longer one"
            log.warning(f"a stop at the time limit may not be saved: a save takes longer than --signal; {remedy}")
        if is_main_process():
            rotate_run(trainer.config.train)
        trainer.accelerator.wait_for_everyone()


# Of an optimizer's parameter groups; others may be its state, as ScheduleFree's count of steps
CONFIGURED = {"weight_decay", "betas", "eps", "momentum"}


# Upstream: transformers 5.24, trainer.py, Trainer._load_optimizer_and_scheduler: restores learning rate, weight decay
# and betas of the run that wrote the checkpoint; deepspeed 0.19, runtime/zero/stage_1_and_2.py, load_state_dict: also
# its clipping. Canary: test_canary_learning_rate_of_a_resumed_run
def apply_configuration(trainer: "SFMDPOTrainer") -> None:
    """Gives the loaded optimizer and schedule the values of this run's configuration; where they are those of the run
    that wrote the checkpoint, nothing changes."""
    optimizer = trainer.optimizer
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # accelerate's wrapper
    for number, group in enumerate(optimizer.param_groups):
        configured = trainer.configured_groups[number]
        rate = group["lr"]  # of reduce_lr_on_plateau, which has no schedule
        if isinstance(scheduler, LambdaLR):
            rate = configured["lr"] * scheduler.lr_lambdas[number](scheduler.last_epoch)
            scheduler.base_lrs[number] = configured["lr"]
            scheduler._last_lr[number] = rate
        group.update({name: configured[name] for name in CONFIGURED & configured.keys()})
        group.update({"initial_lr": configured["lr"], "lr": rate})
    if trainer.zero_stage:
        optimizer.optimizer.clip_grad = trainer.args.max_grad_norm


class ResumeCallback(TrainerCallback):
    """Sets what Transformers 5.24 does not: the epoch's order, the count of tokens, which layers are checkpointed, and
    the steps between logs, evaluations and saves."""

    def __init__(self, trainer: "SFMDPOTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.is_resumed = state.global_step > 0
        if self.trainer.is_resumed:
            self.trainer.check_finite()
            apply_configuration(self.trainer)
        # Upstream: transformers 5.24, trainer.py, Trainer._init_training_state: a resumed run keeps its checkpoint's
        # logging_steps, eval_steps and save_steps. Canary: test_canary_steps_of_a_resumed_run
        state.compute_steps(args, state.max_steps)
        logged = [int(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.trainer.num_tokens = max(logged, default=0)
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                saved = state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
                vars(callback).update(saved["attributes"])
        micro_batch = self.trainer.facts.micro_batch
        assert micro_batch
        checkpoint_layers(self.trainer.bare_model(), micro_batch.checkpointed_layers)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sampler = self.trainer.train_sampler
        steps_per_epoch = len(sampler) // sampler.global_batch
        sampler.set_epoch(state.global_step // steps_per_epoch)
        sampler.is_over = state.global_step >= state.max_steps  # a run may resume from its last step
