"""Overrides of TRL, Transformers and Accelerate that mend faults of theirs, each with its upstream and its fault.

A comment `Upstream: library version, file, function: fault. Canary: test` stands at each, here and in the few other
modules whose subject a patch is. The canary exercises stock upstream alone and asserts the fault: the day it fails,
the override can go. tests/train/test_upstream.py holds the canaries and compares docs/design.md with these comments.
"""

from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model, load_fsdp_model
from datasets import Dataset
from trl import DPOTrainer

from sfm_dpo.config_checks import HELD_OUT
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.model.sharding import keep_outputs, launched_with, use_fsdp_on_cpu


class UpstreamFixes(DPOTrainer):
    """DPOTrainer without the faults of TRL 1.16, transformers 5.23 and accelerate 1.15 that this project meets."""

    _total_train_tokens: int  # TRL's
    _eval_prefix = "eval"
    train_sampler: PairSampler

    def __init__(self, *, args: Any, **kwargs: Any):
        self._eval_batches: list[tuple[int, tuple[str, ...]]] = []  # pairs in each, names of the metrics over pairs
        if launched_with() == "fsdp":
            # Upstream: transformers 5.23, trainer.py, Trainer._run_epoch: enters no_sync for all micro-batches of a
            # step but the last, in which FSDP2 keeps the gradients of the whole model on each rank.
            # Canary: test_canary_sync_each_batch
            args.accelerator_config.gradient_accumulation_kwargs = {"sync_each_batch": True}
        # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: padding_free warns and pads.
        # Canary: test_canary_padding_free
        # Upstream: transformers 5.23, trainer.py, Trainer._build_accelerator_args: torch_compile compiles the model as
        # a whole, with each layer anew in its graph, and no field asks for accelerate's regional compilation.
        # Canary: test_canary_torch_compile
        hidden = {"padding_free": False, "torch_compile": False, "torch_compile_backend": None}
        hidden |= {"torch_compile_mode": None, "model_init_kwargs": None}  # TRL says it ignores them; see load_model
        fields = {name: getattr(args, name) for name in hidden}
        vars(args).update(hidden)
        super().__init__(args=args, **kwargs)
        vars(args).update(fields)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self.accelerator)
        self.is_fsdp_enabled = self.accelerator.distributed_type == DistributedType.FSDP
        if self.is_fsdp_enabled:
            keep_outputs(self.accelerator.state.fsdp_plugin)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._prepare_dataset: asks for the text and tokenises it
    # though the ids are there, one row at a time; with truncation_mode keep_start the fingerprint of the result
    # changes with any argument of the run (its last filter's function holds args). Canary: test_canary_prepare_dataset
    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        return dataset

    # Upstream: transformers 5.23, trainer.py, Trainer._get_eval_sampler: sorts held-out rows by length as well where
    # train_sampling_strategy is group_by_length, and fails without a length column. Canary: test_canary_eval_sampler
    def _get_eval_sampler(self, eval_dataset: Dataset) -> None:
        """None: in the order of the data."""

    # Upstream: transformers 5.23, trainer.py, Trainer._prepare_input: casts every floating input to DeepSpeed's dtype,
    # the fp32 reference log-probs too: a sum of 1,000 nats is rounded to 4. Canary: test_canary_prepare_input
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        exact = {name: value.to(self.args.device) for name, value in tensors.items() if value.is_floating_point()}
        return super()._prepare_inputs(inputs) | exact

    # Upstream: transformers 5.23, trainer.py, Trainer._run_epoch: trains a step too many where a run resumes from its
    # last step and that lies inside an epoch; does not reach a sampler under two wrappers (several ranks, skipped
    # batches) with the epoch. Canary: test_canary_run_epoch
    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: counts num_tokens from 0 again in a resumed run,
    # in the private _total_train_tokens. Canary: test_canary_num_tokens
    def _run_epoch(self, **kwargs: Any) -> None:
        self.train_sampler.set_epoch(kwargs["epoch"])
        logged = [entry["num_tokens"] for entry in self.state.log_history if "num_tokens" in entry]
        self._total_train_tokens = max([self._total_train_tokens, *map(int, logged)])
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.log: takes the mean of held-out metrics over batches, in
    # which the pairs of a smaller last one count for more. Canary: test_canary_eval_metrics
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training and self._eval_batches:
            metrics, sizes = self._metrics["eval"], np.array([size for size, _ in self._eval_batches])
            for name in self._eval_batches[0][1]:
                metrics[name] = [float(np.average(metrics[name], weights=sizes))]
            for name in list(metrics):
                metrics[f"{self._eval_prefix}_{name}".removeprefix("eval_")] = metrics.pop(name)
            self._eval_batches.clear()
        super().log(logs, start_time)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.log: logs the rewards of several held-out sets under one
    # name, without that of the set. Canary: test_canary_eval_names
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """transformers'; of a mapping of sets that named HELD_OUT keeps the prefix `eval_`."""
        self._eval_prefix = metric_key_prefix.removesuffix(f"_{HELD_OUT}")
        return super().evaluate(eval_dataset, ignore_keys, self._eval_prefix)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.compute_ref_log_probs: computes under autocast, which the
    # policy under FSDP2 does not: in 16 bit step 0 is not ln 2. Canary: test_canary_compute_ref_log_probs
    # Upstream: trl 1.16, models/utils.py, disable_gradient_checkpointing: checkpoints every layer afterwards, also
    # those that were not (every_n_layers). Canary: test_canary_checkpointed_layers
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

    # Upstream: transformers 5.23, trainer.py, Trainer.evaluation_loop: takes the mean of a batch for the loss of each
    # of its pairs, also of those that only fill up the last batch of several ranks. Canary: test_canary_eval_loss
    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's; of a last held-out batch that was filled up, the mean over its real pairs. Batches are [2B, ...]."""
        pairs, state = len(inputs["input_ids"]) // 2, self.accelerator.gradient_state
        filled = not self.model.training and state.end_of_dataloader
        filled = filled and 0 < state.remainder < pairs * self.accelerator.num_processes
        if not filled:
            return super()._compute_loss(model, inputs, return_outputs)
        outputs = []

        def forward(**kwargs: Any) -> Any:
            outputs.append(model(**kwargs))
            return outputs[-1]

        result = super()._compute_loss(forward, inputs, return_outputs)
        metrics = {name: list(values) for name, values in self._metrics["eval"].items()}
        losses = []
        for i in range(pairs):  # each pair again, without the model; equally often on each rank
            rows = [i, pairs + i]
            row = {k: v[rows] if len(v) == 2 * pairs else v[i : i + 1] for k, v in inputs.items()}
            fields = {k: v[rows] if v.dim() and len(v) == 2 * pairs else v for k, v in outputs[0].items()}
            one = type(outputs[0])(**fields)
            losses.append(super()._compute_loss(lambda **kwargs: one, row, False))  # noqa: B023
        self._metrics["eval"].update(metrics)
        real = min(max(state.remainder - self.accelerator.process_index * pairs, 0), pairs)
        loss = torch.stack(losses[: max(real, 1)]).mean()  # of a rank without real pairs nobody reads it
        return (loss, result[1]) if return_outputs else loss

    # Upstream: transformers 5.23, trainer.py, Trainer._load_from_checkpoint: reads the names in the file as they are,
    # but save_pretrained may write others (GPT-NeoX's lm_head becomes embed_out), and only warns of what it did not
    # find: the head of the base model would train on. Canary: test_canary_load_from_checkpoint
    # Upstream: transformers 5.23, trainer.py, Trainer._load_from_checkpoint: reads config.json as a PreTrainedConfig,
    # which fails on the rope_scaling of Transformers 4's files. Canary: test_canary_rope_scaling_of_a_checkpoint
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads every weight of a checkpoint, or raises. ZeRO and FSDP have checkpoints of their own."""
        if self.is_fsdp_enabled:
            plugin, adapter = self.accelerator.state.fsdp_plugin, is_peft_model(self.model)
            load_fsdp_model(plugin, self.accelerator, model, resume_from_checkpoint, adapter_only=adapter)
        elif is_peft_model(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())

    # Upstream: transformers 5.23, trainer.py, Trainer._load_best_model: reads the names in the file as they are, and
    # only warns of what it did not find: the head of the last step would be saved. Canary: test_canary_load_best_model
    def _load_best_model(self) -> None:
        """Nothing: train_dpo.py copies the files of the best checkpoint (run/checkpoint.py), whatever the launcher."""

    # Upstream: transformers 5.23, trainer.py, Trainer.save_model: writes no model under FSDP with SHARDED_STATE_DICT
    # checkpoints, and says nothing; with FULL_STATE_DICT the optimizer, too, goes through rank 0's memory.
    # Canary: test_canary_save_model
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, as from_pretrained reads it; under FSDP2 in checkpoints too."""
        if self.is_fsdp_enabled:
            self._save(output_dir or self.args.output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._save_checkpoint: writes a model card into the run's
    # folder with every checkpoint, which knows neither the loss nor the data. Canary: test_canary_model_card
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: train_dpo.py writes the card (report/model_card.py)."""
