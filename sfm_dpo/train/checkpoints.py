"""Checkpoints of the trainer: complete or not counted, readable by from_pretrained, and resumed exactly."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model, load_fsdp_model
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from trl import DPOTrainer

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import follow_umask
from sfm_dpo.config import Config
from sfm_dpo.data.sampler import ORDER_VERSION
from sfm_dpo.model.layers import checkpoint_layers
from sfm_dpo.model.loading import identify_model, load_model
from sfm_dpo.run.checkpoint import COLLAPSE_STEPS, COMPLETE, mark_complete, rotate
from sfm_dpo.train.settings import Settings

log = logging.getLogger(__name__)


class CompleteCheckpoints(DPOTrainer):
    """A checkpoint starts with `save_model` and ends with CheckpointCallback; `_load_from_checkpoint` resumes it."""

    config: Config
    progress: Any
    train_tokens: str  # hash of the token ids
    is_resumed: bool
    num_tokens: int  # trained so far, prompts included, over all ranks
    is_fsdp_enabled: bool
    settings: Settings
    aux_loss_enabled: bool

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed."""
        return self.args.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0

    def resume_facts(self) -> dict[str, Any]:
        """The facts that must be the same in a run that resumes from a checkpoint."""
        launch = "FSDP2" if self.is_fsdp_enabled else "whole weights"
        return {
            "world_size": self.accelerator.num_processes,
            "launch": f"ZeRO-{self.zero_stage}" if self.zero_stage else launch,
            "train_tokens": self.train_tokens,
            "order_version": ORDER_VERSION,
            "micro_batch": self.settings.micro_batch if self.aux_loss_enabled else None,  # the loss depends on it
            **{part.model_field: identify_model(part) for part in self.config.parts},
        }

    # Upstream: transformers 5.24, trainer.py, Trainer.save_model: writes no model under FSDP with SHARDED_STATE_DICT
    # checkpoints, without a warning; with FULL_STATE_DICT rank 0's memory must also hold the optimizer.
    # Canary: test_canary_save_model
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the complete model for from_pretrained, under FSDP2 in checkpoints too."""
        folder = Path(output_dir or self.args.output_dir)
        self.progress.saving = folder
        if is_main_process():  # a skipped checkpoint of this step must not look complete while it is rewritten
            (folder / COMPLETE).unlink(missing_ok=True)
        if self.is_fsdp_enabled:
            self._save(str(folder), state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)

    # Upstream: deepspeed 0.19, checkpoint/utils.py, clone_tensors_for_torch_save: clones a tied weight twice, so
    # save_pretrained saves it twice under ZeRO-2. Canary: test_canary_tied_weights
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        tied = self.model.all_tied_weights_keys if isinstance(self.model, PreTrainedModel) else {}
        if state_dict:
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle nobody reads
        for weights in folder.glob("*.safetensors") if self.args.should_save else ():
            follow_umask(weights)  # safetensors makes files that only their owner can read

    # Upstream: transformers 5.24, trainer.py, Trainer._load_from_checkpoint: only warns about missing names, although
    # save_pretrained may write others (GPT-NeoX's lm_head becomes embed_out): training would continue with the base
    # model's head; fails on the rope_scaling of Transformers 4's files. Canary: test_canary_load_from_checkpoint
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads every weight of a checkpoint, or raises."""
        if self.is_fsdp_enabled:
            load_fsdp_model(self.accelerator.state.fsdp_plugin, self.accelerator, model, resume_from_checkpoint)
        elif is_peft_model(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            options = {"dtype": self.model.dtype, "device_map": None, "trust_remote_code": self.args.trust_remote_code}
            self.model.load_state_dict(load_model(resume_from_checkpoint, options).state_dict())

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: TRL would write a card with every checkpoint; report/model_card.py writes one at the end."""


class CheckpointCallback(TrainerCallback):
    """Marks a checkpoint as complete once all ranks have written their part, then deletes the oldest checkpoints.
    Transformers would delete while ranks still write, and would count a checkpoint that a kill left incomplete."""

    def __init__(self, trainer: CompleteCheckpoints):
        self.trainer = trainer

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.accelerator.wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        mark_complete(checkpoint, {"step": state.global_step, **trainer.resume_facts()})
        trainer.progress.saving = None
        seconds = time.monotonic() - trainer.progress.moved
        log.info(f"checkpoint saved in {seconds:.1f} s")
        if seconds > float(os.environ.get("SFM_GRACE_SECONDS") or "inf"):  # scripts/common.sh
            remedy = f"submit with --signal=B:USR1@{2 * seconds:.0f}, unless you gave a longer one"
            log.warning(f"a stop at the time limit may not be saved: a save takes longer than --signal; {remedy}")
        if is_main_process():
            horizon = 0 if args.guard == "skip" else COLLAPSE_STEPS
            rotate(args.output_dir, trainer.config.train.save_total_limit, horizon)
        trainer.accelerator.wait_for_everyone()


class ResumeCallback(TrainerCallback):
    """Sets what Transformers 5.24 does not: the epoch's order, the count of tokens, which layers are checkpointed, and
    the steps between logs, evaluations and saves."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.is_resumed = state.global_step > 0
        # Upstream: transformers 5.24, trainer.py, Trainer._init_training_state: a resumed run keeps its checkpoint's
        # logging_steps, eval_steps and save_steps. Canary: test_canary_steps_of_a_resumed_run
        state.compute_steps(args, state.max_steps)
        logged = [int(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.trainer.num_tokens = max(logged, default=0)
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                saved = state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
                vars(callback).update(saved["attributes"])
        checkpoint_layers(self.trainer.bare_model(), self.trainer.settings.checkpointed_layers)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sampler = self.trainer.train_sampler
        steps_per_epoch = len(sampler) // sampler.global_batch
        sampler.set_epoch(state.global_step // steps_per_epoch)
        sampler.is_over = state.global_step >= state.max_steps  # a run may resume from its last step
