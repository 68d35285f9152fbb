"""One trainer for every launcher: TRL's DPOTrainer with whole weights, under ZeRO-2, ZeRO-3 and FSDP2."""

from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model
from trl import DPOTrainer
from trl.models import prepare_deepspeed

from sfm_dpo.config import TrainConfig
from sfm_dpo.sharding import hybrid_warning, keep_outputs, launched_with, use_fsdp_on_cpu


class LaunchedTrainer(DPOTrainer):
    """What DPOTrainer lacks where the weights are split. The steps are those of trainer.py."""

    def __init__(self, *, args: TrainConfig, **kwargs: Any):
        self._forward_model: Any = None
        if launched_with() == "fsdp":
            # FSDP2 would keep the gradients of the whole model on each rank until the last micro-batch of a step
            args.accelerator_config.gradient_accumulation_kwargs = {"sync_each_batch": True}
        super().__init__(args=args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self.accelerator)
        self.is_fsdp_enabled = self.accelerator.distributed_type == DistributedType.FSDP
        if self.is_fsdp_enabled:
            keep_outputs(self.accelerator.state.fsdp_plugin)

    def _bare_model(self):
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    # ---- before training

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed."""
        return self.args.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0

    @property
    def is_zero3(self) -> bool:
        return self.zero_stage == 3

    def launch_warning(self) -> str | None:
        """A line about a launcher that does not suit the model."""
        if not self.is_zero3:
            return None
        args, zero = self.args, self.args.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return hybrid_warning(self.model, args.gradient_accumulation_steps, args.gradient_checkpointing, zero)

    def forward_model(self) -> torch.nn.Module:
        """What computes log-probs of the base model before training begins, in eval mode or not.

        Under ZeRO-3 and FSDP2 no rank has whole weights: there all ranks must call the forward equally often.
        """
        if self._forward_model is None:
            model = self.ref_model or self.model
            if self.ref_model is None and self.is_zero3:
                model = prepare_deepspeed(self.model, self.accelerator)  # the hooks that gather the weights
            elif self.ref_model is None:
                if self.is_deepspeed_enabled and self.args.bf16:
                    model.to(torch.bfloat16)  # what DeepSpeed's engine will do to the policy
                model.to(self.accelerator.device)  # Trainer leaves that to DeepSpeed, which comes later
            self._forward_model = model
        return self._forward_model

    def forwards_in_lockstep(self) -> bool:
        return self.is_zero3 or (self.is_fsdp_enabled and not is_peft_model(self.model))

    def _prepare_for_training(self, *args: Any, **kwargs: Any):
        """Lets go of what computed log-probs until now: FSDP2's reference model, ZeRO-3's hooks."""
        if self.is_zero3 and self.ref_model is None and self._forward_model is not None:
            self._forward_model.optimizer.destroy()  # or the engine that trains would gather everything twice
        self._forward_model = None
        return super()._prepare_for_training(*args, **kwargs)

    # ---- saved

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads every weight of a checkpoint, or raises.

        Trainer's own (transformers 5.23) reads the names in the file as they are, but `save_pretrained` may write
        others (GPT-NeoX's lm_head becomes embed_out, OLMoE's experts are split), and it only warns of what it did not
        find: the head of the base model would train on. ZeRO and FSDP have checkpoints of their own.
        """
        if self.is_fsdp_enabled or is_peft_model(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, as from_pretrained reads it; under FSDP2 in checkpoints too.

        transformers 5.23 does that under FSDP only where checkpoints are FULL_STATE_DICT, all of it through rank 0.
        """
        if self.is_fsdp_enabled:
            self._save(output_dir or self.args.output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)
