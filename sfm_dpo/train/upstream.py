"""Overrides that fix bugs of TRL, Transformers and Accelerate; other such fixes are in the module of their subject.

Above each is `Upstream: library version, file, function: bug. Canary: test`. The canary runs the unpatched library;
once it fails, the override can be removed. tests/train/test_upstream.py compares these comments with the docs.
"""

import copy
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType
from datasets import Dataset
from trl import DPOTrainer

from sfm_dpo.common.distributed import launched_with
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.model.sharding import keep_precision, use_fsdp_on_cpu
from sfm_dpo.train.settings import Settings


def arguments_for_trl(args: TrainConfig, settings: Settings) -> TrainConfig:
    """A copy of the arguments with the settings of this run, which makes TRL and Transformers leave to this package
    what it does itself. Callbacks read the fields that differ from the configuration, not from this copy."""
    derived = copy.copy(args)
    derived.deepspeed_plugin = copy.copy(args.deepspeed_plugin)  # Trainer fills its "auto" values
    derived.per_device_train_batch_size = settings.micro_batch
    derived.gradient_accumulation_steps = settings.accumulation_steps
    batch = {name: getattr(derived, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    derived.to_dict = functools.partial(dict, args.to_dict() | batch)  # trackers such as W&B record it
    derived.eval_on_start = settings.eval_on_start
    derived.logging_nan_inf_filter = False  # it would log a NaN loss as 0
    derived.model_init_kwargs = None  # TRL warns that it ignores them; see load_model
    derived.push_to_hub = False  # hub/callback.py
    derived.save_total_limit = None  # run/checkpoint.py, `rotate`: after a checkpoint is marked complete
    derived.remove_unused_columns = False  # the collator reads one more
    derived.use_cache = True  # saved in config.json; the forwards of training set it to false themselves
    derived.load_best_model_at_end = False  # run/checkpoint.py, `copy_best`: whatever the launcher
    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: padding_free warns and pads; sets use_reentrant,
    # which LoRA needs under ZeRO-3, under a deprecated name that Trainer does not read. Canary: test_canary_arguments
    derived.padding_free = False
    derived.gradient_checkpointing = derived.activation_checkpointing = settings.checkpointed_layers > 0
    kwargs = {"every_n_layers": 1} | (args.activation_checkpointing_kwargs or {})  # TRL would not add to an empty one
    derived.gradient_checkpointing_kwargs = derived.activation_checkpointing_kwargs = kwargs  # so both names have it
    # Upstream: transformers 5.24, trainer.py, Trainer._build_accelerator_args: torch_compile compiles all layers
    # into one graph; no field selects accelerate's regional compilation. Canary: test_canary_torch_compile
    derived.torch_compile = False
    derived.torch_compile_backend = None
    derived.torch_compile_mode = None
    copying = {"non_blocking": args.dataloader_pin_memory}  # the host need not wait until a batch is on the GPU
    if launched_with() == "fsdp":
        # Upstream: transformers 5.24, trainer.py, Trainer._run_epoch: enters no_sync for all but the last micro-batch
        # of a step, so FSDP2 keeps all gradients on each rank. Canary: test_canary_sync_each_batch
        copying["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
    derived.accelerator_config = dataclasses.replace(args.accelerator_config, **copying)
    return derived


class UpstreamFixes(DPOTrainer):
    """DPOTrainer without the bugs of TRL 1.16, transformers 5.24 and accelerate 1.15 that affect this project."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self.accelerator)
        plugin = self.accelerator.state.deepspeed_plugin
        gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        if plugin and plugin.zero_stage == 3 and not plugin.get_value(gather, False):
            raise UserError(f"DeepSpeed configuration: {gather} must be true; otherwise only shards would be saved")
        self.is_fsdp_enabled = self.accelerator.distributed_type == DistributedType.FSDP
        if self.is_fsdp_enabled:
            keep_precision(self.accelerator.state.fsdp_plugin)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._prepare_dataset: tokenises text although the ids exist;
    # any argument of the run changes the fingerprint of the result. Canary: test_canary_prepare_dataset
    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        return dataset

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._precompute_ref_logps: computes again for another learning
    # rate; keeps nothing of a killed pass; fails with two ranks on in-memory data, for which each rank has its own
    # cache folder. Canary: test_canary_precompute_ref_logps
    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        return dataset  # `add_reference` (train/reference_cache.py) runs after construction

    # Upstream: transformers 5.24, trainer.py, Trainer._prepare_input: casts every floating input to DeepSpeed's dtype,
    # even the fp32 reference log-probs: a sum of 1,000 nats is rounded to multiples of 4.
    # Canary: test_canary_prepare_input
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        exact = {name: value.to(self.args.device) for name, value in tensors.items() if value.is_floating_point()}
        return super()._prepare_inputs(inputs) | exact

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: gathers 15 metrics of each micro-batch, for
    # which the host waits for the GPU and for other ranks. Canary: test_canary_gathered_metrics
    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's loss without its metrics; the trainer records its own."""
        accelerator = self.accelerator
        gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda values: torch.zeros(()))  # on the CPU
        self.accelerator = SimpleNamespace(device=accelerator.device, **gather)
        try:
            return super()._compute_loss(model, inputs, return_outputs)
        finally:
            self.accelerator = accelerator
            self._metrics["train" if self.model.training else "eval"].clear()

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.compute_ref_log_probs: computes under autocast, unlike the
    # policy under FSDP2, so in 16 bit the loss does not start at ln 2. Canary: test_canary_compute_ref_log_probs
    # Upstream: trl 1.16, models/utils.py, disable_gradient_checkpointing: checkpoints every layer afterwards,
    # even those that were not before, and adds another hook to the embedding. Canary: test_canary_checkpointed_layers
    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Sums of log-probs ([B] chosen, [B] rejected) by `model`, in the policy's precision."""

        def forward(**kwargs: Any) -> Any:
            with torch.autocast(self.accelerator.device.type, enabled=False):
                return model(**kwargs)

        layers = [module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False)]
        try:
            for layer in layers:
                layer.gradient_checkpointing = False
            return super().compute_ref_log_probs(forward if self.is_fsdp_enabled else model, inputs)
        finally:
            for layer in layers:
                layer.gradient_checkpointing = True
