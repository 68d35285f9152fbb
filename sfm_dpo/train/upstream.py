"""Overrides that fix bugs of TRL, Transformers and Accelerate; other such fixes are in the module of their subject.

Above each is `Upstream: library version, file, function: bug. Canary: test`. The canary runs the unpatched library;
once it fails, the override can be removed. tests/train/test_upstream.py compares these comments with the docs.
"""

import copy
import dataclasses
import math
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model, load_fsdp_model
from datasets import Dataset
from torch.utils.data import DataLoader
from trl import DPOTrainer

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.config_checks import HELD_OUT
from sfm_dpo.model.loading import load_model
from sfm_dpo.model.sharding import keep_precision, launched_with, use_fsdp_on_cpu
from sfm_dpo.train.metrics import MetricSums


def arguments_for_trl(args: TrainConfig) -> TrainConfig:
    """A copy of the arguments that makes TRL and Transformers leave to this package what it does itself."""
    derived = copy.copy(args)
    derived.to_dict = args.to_dict  # trackers such as W&B record it
    derived.model_init_kwargs = None  # TRL warns that it ignores them; see load_model
    derived.push_to_hub = False  # hub/callback.py
    derived.save_total_limit = None  # run/checkpoint.py, `rotate`: after a checkpoint is marked complete
    derived.remove_unused_columns = False  # the collator reads one more
    derived.use_cache = True  # saved in config.json; the forwards of training set it to false themselves
    derived.load_best_model_at_end = False  # run/checkpoint.py, `copy_best`: whatever the launcher
    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: padding_free warns and pads; sets use_reentrant,
    # which LoRA needs under ZeRO-3, under a deprecated name that Trainer does not read. Canary: test_canary_arguments
    derived.padding_free = False
    kwargs = {"every_n_layers": 1} | (args.activation_checkpointing_kwargs or {})
    derived.gradient_checkpointing_kwargs = derived.activation_checkpointing_kwargs = kwargs  # so both names have it
    # Upstream: transformers 5.23, trainer.py, Trainer._build_accelerator_args: torch_compile compiles all layers
    # into one graph; no field selects accelerate's regional compilation. Canary: test_canary_torch_compile
    derived.torch_compile = False
    derived.torch_compile_backend = None
    derived.torch_compile_mode = None
    if launched_with() == "fsdp":
        # Upstream: transformers 5.23, trainer.py, Trainer._run_epoch: enters no_sync for all but the last micro-batch
        # of a step, so FSDP2 keeps all gradients on each rank. Canary: test_canary_sync_each_batch
        derived.accelerator_config = dataclasses.replace(
            args.accelerator_config, gradient_accumulation_kwargs={"sync_each_batch": True}
        )
    return derived


class UpstreamFixes(DPOTrainer):
    """DPOTrainer without the bugs of TRL 1.16, transformers 5.23 and accelerate 1.15 that affect this project."""

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

    # Upstream: transformers 5.23, trainer.py, Trainer._prepare_input: casts every floating input to DeepSpeed's dtype,
    # even the fp32 reference log-probs: a sum of 1,000 nats is rounded to multiples of 4.
    # Canary: test_canary_prepare_input
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        exact = {name: value.to(self.args.device) for name, value in tensors.items() if value.is_floating_point()}
        return super()._prepare_inputs(inputs) | exact

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.compute_ref_log_probs: computes under autocast, unlike the
    # policy under FSDP2, so in 16 bit the loss does not start at ln 2. Canary: test_canary_compute_ref_log_probs
    # Upstream: trl 1.16, models/utils.py, disable_gradient_checkpointing: checkpoints every layer afterwards,
    # even those that were not checkpointed before (every_n_layers). Canary: test_canary_checkpointed_layers
    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Sums of log-probs ([B] chosen, [B] rejected) by `model`, in the policy's precision."""

        def forward(**kwargs: Any) -> Any:
            with torch.autocast(self.accelerator.device.type, enabled=False):
                return model(**kwargs)

        names = ("gradient_checkpointing", "_gradient_checkpointing_func")
        layers = [module for module in self.model.modules() if hasattr(module, names[1])]
        before = [[getattr(module, name) for name in names] for module in layers]
        try:
            return super().compute_ref_log_probs(forward if self.is_fsdp_enabled else model, inputs)
        finally:
            for module, values in zip(layers, before, strict=True):
                for name, value in zip(names, values, strict=True):
                    setattr(module, name, value)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Rank r computes rows r, r + ranks, ...; a rank without a last row repeats one, which does not count."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        size = self.args.per_device_eval_batch_size
        ranks = self.accelerator.num_processes
        rows = self._eval_rows(dataset)
        # TRL gathers from all ranks, so they need batches of equal size; the remaining pairs form batches of one
        full = len(dataset) // (size * ranks) * size
        batches = [rows[start : start + size] for start in range(0, full, size)]
        batches += [[row] for row in rows[full:]]
        if len(rows) < math.ceil(len(dataset) / ranks):
            batches.append([0])
        loading = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        return DataLoader(dataset, batch_sampler=batches, collate_fn=self.data_collator, **loading)

    def _eval_rows(self, dataset: Dataset) -> list[int]:
        return list(range(self.accelerator.process_index, len(dataset), self.accelerator.num_processes))

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Transformers' `evaluate`; in a mapping of sets, the one named HELD_OUT keeps the prefix `eval_`."""
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix.removesuffix(f"_{HELD_OUT}"))

    # Upstream: transformers 5.23, trainer.py, Trainer.evaluation_loop: also counts pairs that only pad the last
    # batch of several ranks; TRL averages its metrics over batches, and logs several held-out sets under one name.
    # Canary: test_canary_eval_metrics
    def evaluation_loop(self, dataloader: DataLoader, *args, metric_key_prefix: str = "eval", **kwargs) -> Any:
        """Transformers' loop, but each metric is the mean over all pairs or tokens, whatever the batches and ranks."""
        self.eval_sums = MetricSums(pairs=len(self._eval_rows(dataloader.dataset)))
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, value in self.eval_sums.means().items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        self._metrics["eval"].clear()
        return output

    # Upstream: transformers 5.23, trainer.py, Trainer._load_from_checkpoint: only warns about missing names, although
    # save_pretrained may write others (GPT-NeoX's lm_head becomes embed_out): training would continue with the base
    # model's head; fails on the rope_scaling of Transformers 4's files. Canary: test_canary_load_from_checkpoint
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads every weight of a checkpoint, or raises."""
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            adapter_only = is_peft_model(self.model)
            load_fsdp_model(plugin, self.accelerator, model, resume_from_checkpoint, adapter_only=adapter_only)
        elif is_peft_model(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            options = {"dtype": self.model.dtype, "device_map": None, "trust_remote_code": self.args.trust_remote_code}
            self.model.load_state_dict(load_model(resume_from_checkpoint, options).state_dict())

    # Upstream: transformers 5.23, trainer.py, Trainer.save_model: writes no model under FSDP with SHARDED_STATE_DICT
    # checkpoints, without a warning; with FULL_STATE_DICT rank 0's memory must also hold the optimizer.
    # Canary: test_canary_save_model
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the complete model for from_pretrained, under FSDP2 in checkpoints too."""
        if self.is_fsdp_enabled:
            self._save(output_dir or self.args.output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: TRL would write a card with every checkpoint; report/model_card.py writes one at the end."""
