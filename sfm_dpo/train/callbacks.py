"""Callbacks by which a run resumes exactly and keeps only complete checkpoints."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.run.checkpoint import mark_complete, rotate
from sfm_dpo.train.memory_use import allocate_optimizer_state


class ResumeCallback(TrainerCallback):
    """Brings back what Transformers 5.23 and TRL 1.16 do not: the order of the epoch and the count of tokens."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: counts num_tokens from 0 again in a resumed run,
    # in the private _total_train_tokens. Canary: test_canary_num_tokens
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logged = [int(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.trainer._total_train_tokens = max(logged, default=0)
        if not self.trainer.zero_stage:  # DeepSpeed has it already
            allocate_optimizer_state(self.trainer.optimizer.optimizer)  # of accelerate's wrapper

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sampler = self.trainer.train_sampler
        steps_per_epoch = len(sampler) // sampler.global_batch
        sampler.set_epoch(state.global_step // steps_per_epoch)
        sampler.is_over = state.global_step >= state.max_steps  # a run that resumes from its last step


class CheckpointCallback(TrainerCallback):
    """Marks a checkpoint as complete once all ranks have written theirs, then deletes the oldest ones.

    Transformers would delete others while ranks still write the new one, and count one that was killed half-written.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.accelerator.wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        mark_complete(checkpoint, {"step": state.global_step, **trainer.resume_facts()})
        trainer.position.saving = None
        if is_main_process():
            rotate(args.output_dir, trainer.train_config.save_total_limit)
        trainer.accelerator.wait_for_everyone()
