"""The trainer: TRL's DPOTrainer with tokenised pairs, packed forward, cached reference and balanced micro-batches.

The loss is TRL's (`DPOTrainer._compute_loss`): for `loss_type: sigmoid_norm`, open-instruct's `dpo_norm`, the mean
over the pairs of -log sigmoid(beta * (r(chosen) - r(rejected))), r = mean over the response of log pi - log pi_ref.
Micro-batches hold equal numbers of pairs (data/sampler.py), so their mean is the mean over the global batch.
"""

import copy
import dataclasses
import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model, load_fsdp_model, release_memory
from datasets import Dataset
from torch.utils import serialization
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback
from transformers.trainer import TRAINING_ARGS_NAME
from trl import DPOTrainer
from trl.trainer import dpo_trainer

from sfm_dpo.common.distributed import (
    gather_values,
    is_main_process,
    launch_name,
    launched_with,
    on_main_process,
    set_zero_timeout,
)
from sfm_dpo.common.errors import GuardStopped, UserError, user_input
from sfm_dpo.common.statistics import LOGP_ROUNDING, TYPICAL_LOGIT
from sfm_dpo.config.checks import HELD_OUT, main_loss
from sfm_dpo.config.fields import FOLDER, Config, TrainConfig
from sfm_dpo.data.lengths import count_trained
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.sampler import PairSampler, order_pairs
from sfm_dpo.memory.asked import Asked
from sfm_dpo.model.attention import activate_flash, kernel_name
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import (
    compile_layers,
    disable_noise,
    find_base,
    load_model,
    load_model_config,
    lora_config,
    meta_adapter,
    meta_model,
    read_adapter,
)
from sfm_dpo.model.packing import enable_padding_free, find_delta_nets, has_delta_net_kernels
from sfm_dpo.model.sharding import (
    OffloadCallback,
    fit_buckets,
    free_weights,
    keep_precision,
    local_shard,
    prepare_blocks,
    use_fsdp_on_cpu,
)
from sfm_dpo.run.checkpoint import COMPLETE, keep_before
from sfm_dpo.run.facts import ForwardPath, RunFacts
from sfm_dpo.run.model_files import find_folder, finish_model
from sfm_dpo.train.callbacks import Progress
from sfm_dpo.train.checkpoints import CheckpointCallback, ResumeCallback
from sfm_dpo.train.metrics import (
    OF_PAIRS,
    CountingCollator,
    Meter,
    MetricSums,
    check_loss,
    check_step_0,
    count_chosen,
    loss_scale,
    peak_memory_gib,
    reward_metrics,
    write_margins,
)

log = logging.getLogger(__name__)


class SFMDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer on the columns of data/tokenization.py, for one process, DDP, ZeRO-2, ZeRO-3 and FSDP2.

    After construction it is changed by `apply` alone, once, before training. Raises UserError for a model that cannot
    be loaded.

    Args:
        config: kept unchanged; `self.args` is a copy of its arguments for TRL (`arguments_for_trl`).
        asked: what the configuration asks for (memory/asked.py).
        kwargs: those of DPOTrainer.
    """

    model: Any
    model_wrapped: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any  # by name
    loss_weights: list[Any]
    ref_model: Any  # a separate reference model, while there is one
    accelerator: Any
    is_fsdp_enabled: bool
    aux_loss_enabled: bool
    eval_sums: MetricSums  # of the current evaluation
    eval_pairs: list[torch.Tensor]  # its metrics OF_PAIRS [B, 3], by batch

    def __init__(self, config: Config, asked: Asked, *, progress: Progress | None = None, **kwargs: Any):
        args = config.train
        self.config = config
        self.facts = RunFacts()  # until `apply`
        self.path: ForwardPath | None = None  # by which policy and reference compute; None: their own padded forward
        self.undo_packing: list[Callable[[], None]] = []
        self.progress = progress or Progress()
        self.train_sums = MetricSums()  # since the last log
        self.num_tokens = 0
        self.is_resumed = False
        self.step_0_checked = False
        model_config = load_model_config(config)
        if args.deepspeed_plugin:  # before its engine is made
            trained = meta_adapter(config, model_config) or meta_model(model_config)
            deepspeed = args.deepspeed_plugin.deepspeed_config
            deepspeed["zero_optimization"] = fit_buckets(deepspeed["zero_optimization"], trained)
        options = {"peft_config": lora_config(config, model_config)} | kwargs
        building = user_input("building the trainer", "correct the field it names; for LoRA, lora_target_modules")
        # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: hashes all weights on each rank for
        # the cache of _precompute_ref_logps below: 22 s for 7B. Canary: test_canary_hash_module
        patches = patch.multiple(dpo_trainer, hash_module=lambda model: None, prepare_fsdp=prepare_blocks)
        with building, patches:
            super().__init__(
                ref_model=load_reference(config, options["peft_config"] is not None),
                model=load_configured_model(config),
                args=arguments_for_trl(args, asked),
                callbacks=[CheckpointCallback(self), ResumeCallback(self)],
                **options,
            )
        self.zero_stage = self.args.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0
        self.is_offloaded = launch_name() == "offload"
        if self.is_offloaded:
            self.add_callback(OffloadCallback())
        self.precompute_ref_logps = True  # tells TRL that each batch holds the reference's sums, see _compute_loss
        self.chosen_tokens = count_trained(self.train_dataset, args.max_length)[:, 0].mean()  # until a step begins
        self.meter = Meter()
        flops = ForwardFlops.of(self.bare_model())
        self.data_collator = CountingCollator(self.data_collator, flops, not args.precompute_ref_log_probs)
        for model in self._bare_models() if args.disable_dropout else ():
            disable_noise(model)
        if args.torch_compile:
            log.info("torch_compile: layers are compiled in their first forward and backward")
            for model in self._bare_models():
                compile_layers(model, args.torch_compile_backend, args.torch_compile_mode)
        self.remove_callback(PrinterCallback)  # train_dpo.py adds a ProgressLine
        self.remove_callback(ProgressCallback)
        self.add_callback(self.meter)
        self.add_callback(self.progress)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpu(self.accelerator)
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin:
            set_zero_timeout(self.args.ddp_timeout)
        if plugin and plugin.zero_stage not in (2, 3):
            raise UserError(f"DeepSpeed configuration: zero_optimization.stage {plugin.zero_stage}: set it to 2 or 3")
        field = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        if plugin and plugin.zero_stage == 3 and not plugin.get_value(field, False):
            raise UserError(f"DeepSpeed configuration: {field} must be true; otherwise only shards would be saved")
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
        return dataset  # `add_reference` (reference_cache.py) runs before `apply`

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the engine, and loads the checkpoint of a resumed run. With the optimizer on the host its files are
        mapped; otherwise they would be in memory beside the states, 4 bytes a weight more."""
        with serialization.config.patch("load.mmap", self.is_offloaded):  # type: ignore[attr-defined]
            return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        # For ResumeCallback: loading a checkpoint restores the values of its run
        self.configured_groups = [dict(group) for group in optimizer.param_groups]
        for group in self.configured_groups:
            del group["params"]
        return optimizer

    @property
    def noise(self) -> float:
        """Of a log-prob, in nats: as measured, or what rounding gives a typical logit."""
        typical = TYPICAL_LOGIT * LOGP_ROUNDING[self.accelerator.mixed_precision]
        return self.facts.calibration.noise or typical

    def apply(self, facts: RunFacts, pairs: Pairs) -> None:
        """Takes the path and the micro-batch of `facts`, and the pairs with the reference's log-probs; frees a
        separate reference that is not needed any more."""
        assert facts.path and facts.micro_batch
        self.facts = facts
        self.train_dataset = pairs.train
        self.eval_dataset = pairs.held_out() or None
        size = facts.micro_batch.pairs
        batch = self.config.train.global_batch_size
        accumulation = facts.micro_batch.count_accumulation(batch, self.accelerator.num_processes)
        set_micro_batch(self.args, self.config.train, size, accumulation, facts.micro_batch.checkpointed_layers > 0)
        self._train_batch_size = size
        if self.is_deepspeed_enabled:  # its "auto" values are numbers by now
            names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
            values = zip(names, (size, accumulation, batch), strict=True)
            self.args.deepspeed_plugin.deepspeed_config.update(values)
        if self.config.train.precompute_ref_log_probs and self.ref_model:
            if self.zero_stage == 3:
                free_weights(self.ref_model)
            self.ref_model = None
        self._take_path(facts.path)  # only now: what undoes the packing of a model keeps it
        self.accelerator.free_memory()  # accelerate also keeps a reference that it prepared,
        release_memory()  # and collects garbage before it drops that one

    @contextmanager
    def computing(self, path: ForwardPath | None) -> Iterator[None]:
        """Policy and reference compute by `path`, for this time. Raises an error of any kind for a model whose
        attention cannot be exchanged, and UserError for a kernel that cannot be activated."""
        before = self.path
        try:
            self._take_path(path)
            yield
        finally:
            self._take_path(before)

    def _take_path(self, path: ForwardPath | None) -> None:
        if path == self.path:
            return
        for undo in self.undo_packing:
            undo()
        self.undo_packing = []
        self.path = self.data_collator.path = path
        if path is None or not path.packed:
            return
        for model in self._bare_models():
            self.undo_packing.append(enable_padding_free(model, path.prefix_sharing))
        if not self.config.train.use_cpu:
            activate_flash(path.kernel)

    def _bare_models(self) -> list[Any]:
        """Policy and reference, without wrappers."""
        return [self.accelerator.unwrap_model(model) for model in (self.bare_model(), self.ref_model) if model]

    def bare_model(self) -> Any:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def attention_kernel(self, model: Any = None) -> str:
        """Name of the packed attention kernel of the policy, or of `model`; it replaces `attn_implementation`."""
        model = model or self.bare_model()
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = {"bf16": torch.bfloat16, "no": torch.float32}[self.accelerator.mixed_precision]
        kernel = kernel_name(self.accelerator.device, dtype, head_dim)
        if find_delta_nets(model):
            kernel += f", gated delta nets by {'fla' if has_delta_net_kernels() else 'transformers'}"
        return kernel

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

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PairSampler:
        """Replaces Transformers' batch_rebalance, whose micro-batches hold unequal numbers of pairs."""
        assert self.path
        layout = (self.args.per_device_train_batch_size, self.path.packed, self.path.prefix_sharing)
        self.train_sampler = order_pairs(self.train_dataset, self.config.train, *layout)
        return self.train_sampler

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' micro-batches of an optimizer step."""
        result = super().get_batch_samples(*args, **kwargs)
        if "sft" in self.loss_types and result[0]:  # a run resumed at its last step has no more
            counts = torch.stack([count_chosen(batch["completion_mask"]) for batch in result[0]])
            self.chosen_tokens = self.accelerator.gather(counts.to(self.accelerator.device)).mean().item()
        return result

    # Upstream: transformers 5.24, trainer.py, Trainer._prepare_input: casts every floating input to DeepSpeed's dtype,
    # even the fp32 reference log-probs: a sum of 1,000 nats is rounded to multiples of 4.
    # Canary: test_canary_prepare_input
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called for each micro-batch, including those of evaluation, preflight and reference pass."""
        if self.model.training:
            self.meter.add(inputs["counts"])
        if self.path is None or not self.path.packed:  # only the packed forward takes them
            inputs = {name: value for name, value in inputs.items() if name != "counts"}
        self.progress.begin_micro_batch(self.state.global_step, inputs)
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        exact = {name: value.to(self.args.device) for name, value in tensors.items() if value.is_floating_point()}
        return super()._prepare_inputs(inputs) | exact

    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss with the reference's log-probs in the batch; its metrics are recorded on its own scale."""
        if not self.config.train.precompute_ref_log_probs:  # else they are columns of the data
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        ref_logps = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        forwards = []

        def forward(**kwargs):
            forwards.append(model(**kwargs))
            return forwards[-1]

        result = self.trl_loss(forward, inputs, return_outputs)
        self.progress.advance()  # the following calls wait for the other ranks
        logps = forwards[0].log_probs.detach().sum(dim=1)  # [2B], zero outside of the responses
        loss = result[0] if return_outputs else result
        if self.model.training and not self.step_0_checked and not self.state.global_step:
            self.step_0_checked = True
            check_loss(self, loss)
            if not self.config.train.ref_model_name_or_path:  # else the loss is not ln 2
                check_step_0(self, model, inputs, logps, ref_logps)
        self._record(loss, inputs["completion_mask"], logps, ref_logps, forwards[0])
        return result

    def trl_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> Any:
        """TRL's loss, without its metrics."""
        view = LossView(self, self._weigh_losses(inputs["completion_mask"]))
        return DPOTrainer._compute_loss(view, model, inputs, return_outputs)

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: the term sft is the mean over the tokens of
    # a micro-batch, so a response's weight depends on the others in it. Canary: test_canary_sft_weight
    def _weigh_losses(self, completion_mask: torch.Tensor) -> list[Any]:
        """The weights of the losses, for which the term sft becomes the mean over the chosen tokens of the global
        batch, or of a held-out set."""
        if "sft" not in self.loss_types:
            return self.loss_weights
        share = count_chosen(completion_mask) / self.chosen_tokens
        weighted = zip(self.loss_types, self.loss_weights, strict=True)
        return [weight * share if loss == "sft" else weight for loss, weight in weighted]

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: logs rewards/* as sums over tokens even
    # if the loss uses means, and means of micro-batch means. Canary: test_canary_compute_loss
    def _record(self, loss: torch.Tensor, mask: torch.Tensor, logps: torch.Tensor, ref_logps, outputs: Any) -> None:
        scale = loss_scale(mask, main_loss(self.loss_types))
        rewards = reward_metrics(logps, ref_logps, scale, self.beta)
        means = {"aux_loss": outputs.aux_loss.detach()} if self.aux_loss_enabled else {}
        if self.model.training:
            self.train_sums.add(means, rewards, outputs, mask)
            return
        if self.aux_loss_enabled:  # the balancing loss depends on which sequences share a batch
            loss = loss - self.router_aux_loss_coef * outputs.aux_loss
        self.eval_sums.add({"loss": loss}, rewards, outputs, mask)
        self.eval_pairs.append(torch.stack([rewards[name] for name in OF_PAIRS], dim=1))

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: restarts num_tokens at 0 in a resumed run.
    # Canary: test_canary_num_tokens
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means over all pairs or tokens since the last log, and the metrics perf/*."""
        if "loss" in logs:
            exact = self.train_sums.reduce(self.meter.counts, {"perf/peak_memory_gib": peak_memory_gib()})
            totals = {name: exact.pop(name) for name in self.meter.counts}
            self.num_tokens += int(totals["tokens"])
            self.train_sums = MetricSums()
            logs |= self.meter.metrics(totals, self.accelerator.num_processes) | exact
            logs["num_tokens"] = self.num_tokens
            if self.zero_stage and (skipped := self.model_wrapped.skipped_steps):  # also before a resume
                logs["skipped_updates"] = skipped
        if self.is_resumed:
            logs.pop("train_loss", None)  # a mean over the steps since the last start alone
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any) -> DataLoader:
        """Rank r computes rows r, r + ranks, ...; a rank without a last row repeats one, which does not count."""
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
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
        prefix = "eval" if metric_key_prefix == f"eval_{HELD_OUT}" else metric_key_prefix
        return super().evaluate(eval_dataset, ignore_keys, prefix)

    # Upstream: transformers 5.24, trainer.py, Trainer.evaluation_loop: also counts pairs that only pad the last
    # batch of several ranks; TRL averages its metrics over batches, and logs several held-out sets under one name.
    # Canary: test_canary_eval_metrics
    def evaluation_loop(self, dataloader: DataLoader, *args, metric_key_prefix: str = "eval", **kwargs) -> Any:
        dataset: Any = dataloader.dataset
        count = len(self._eval_rows(dataset))
        self.eval_sums = MetricSums(count)
        self.eval_pairs = []
        self.chosen_tokens = count_trained(dataset, self.args.max_length)[:, 0].mean()
        with self.progress.during("evaluation"):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, value in self.eval_sums.reduce().items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        ranks = gather_values(torch.cat(self.eval_pairs)[:count].tolist())
        if is_main_process():
            file = f"{metric_key_prefix}-{self.state.global_step}.jsonl"
            write_margins(Path(self.args.output_dir, "margins", file), dataset, ranks)
        return output

    def check_finite(self) -> None:
        """Raises GuardStopped if a weight or the newest loss is not finite. All ranks must call it."""
        shards = [local_shard(parameter) for parameter in self.model.parameters()]
        is_finite = torch.stack([shard.isfinite().all() for shard in shards if shard.numel()]).all().item()
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        what = "the loss" if losses and not math.isfinite(losses[-1]) else None
        if not all(gather_values(is_finite)):
            what = "a weight"
        if not what:
            return
        step = self.state.global_step
        healthy = on_main_process(lambda: keep_before(self.args.output_dir, step))
        raise GuardStopped(
            f"step {step}: {what} is not finite, so nothing is saved",
            "lower learning_rate by a factor of 3 to 10",
            step=step,
            checkpoint=str(healthy) if healthy else None,
        )

    # Upstream: transformers 5.24, trainer.py, Trainer.save_model: writes no model under FSDP with SHARDED_STATE_DICT
    # checkpoints, without a warning; with FULL_STATE_DICT rank 0's memory must also hold the optimizer.
    # Canary: test_canary_save_model
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the complete model for from_pretrained, under FSDP2 in checkpoints too. Raises GuardStopped before it
        writes anything if the model is not finite."""
        self.check_finite()
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
        commit = self.config.model_ids.get("model_name_or_path", FOLDER)
        if is_peft_model(self.model) and not commit.startswith(FOLDER):
            self.model.active_peft_config.revision = commit  # of the base that the adapter names
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle nobody reads
        if not self.args.should_save:
            return
        name = self.config.model.model_name_or_path
        tokenizer = find_folder(name, self.config.revision, local_files_only=True)
        base = find_folder(*find_base(name, self.config.revision), local_files_only=True)
        is_final = folder == Path(self.args.output_dir)  # a checkpoint resumes with the bits that it had
        finish_model(folder, tokenizer, base, narrow=is_final and self.args.save_dtype == "base")

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


# Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: gathers 15 metrics of each micro-batch, for
# which the host waits for the GPU and for other ranks. Canary: test_canary_gathered_metrics
class LossView:
    """A trainer as TRL's loss reads it, with an accelerator that gathers nothing and metrics that nobody reads."""

    def __init__(self, trainer: SFMDPOTrainer, loss_weights: list[Any]):
        self._trainer = trainer
        gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda values: torch.zeros(()))  # on the CPU
        self.accelerator = SimpleNamespace(device=trainer.accelerator.device, **gather)
        self._metrics: dict[str, Any] = {mode: defaultdict(list) for mode in ("train", "eval")}
        self.loss_weights = loss_weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def set_micro_batch(
    args: TrainConfig, configured: TrainConfig, pairs: int, accumulation: int, checkpoints: bool
) -> None:
    """Sets the fields of TRL's arguments that follow from the micro-batch; the others are recorded as `configured`."""
    args.per_device_train_batch_size = pairs
    args.gradient_accumulation_steps = accumulation
    batch = {"per_device_train_batch_size": pairs, "gradient_accumulation_steps": accumulation}
    args.to_dict = functools.partial(dict, configured.to_dict() | batch)  # trackers such as W&B record it
    args.gradient_checkpointing = checkpoints
    args.activation_checkpointing = checkpoints


def arguments_for_trl(args: TrainConfig, asked: Asked) -> TrainConfig:
    """A copy of the arguments, which makes TRL and Transformers leave to this package what it does itself. Where
    memory decides, it has the smallest micro-batch and checkpointing, which constructors prepare, until `apply`.
    Callbacks read the fields that differ from the configuration, not from this copy."""
    derived = copy.copy(args)
    derived.deepspeed_plugin = copy.copy(args.deepspeed_plugin)  # Trainer fills its "auto" values
    pairs = asked.pairs or 1
    set_micro_batch(derived, args, pairs, args.global_batch_size // (pairs * args.world_size), asked.layers != 0)
    derived.logging_nan_inf_filter = False  # it would log a NaN loss as 0
    derived.model_init_kwargs = None  # TRL warns that it ignores them; see load_model
    derived.push_to_hub = False  # hub/upload.py
    derived.save_total_limit = None  # run/checkpoint.py, `rotate`: after a checkpoint is marked complete
    derived.remove_unused_columns = False  # the collator reads one more
    derived.use_cache = True  # saved in config.json; the forwards of training set it to false themselves
    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: padding_free warns and pads; sets use_reentrant,
    # which LoRA needs under ZeRO-3, under a deprecated name that Trainer does not read. Canary: test_canary_arguments
    derived.padding_free = False
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


def check_weights(config: Config) -> None:
    """Raises UserError for what `load_configured_model` refuses, such as missing shards or weights, but reads only
    the names and shapes of weights. Adapters are left to the loading."""
    with patch("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", None):  # ZeRO-3 would shard them
        for part in config.parts:
            if not read_adapter(part.model.model_name_or_path, part.revision):
                load_configured_model(part, device_map="meta")


def load_configured_model(config: Config, is_reference: bool = False, **more: Any) -> PreTrainedModel:
    """The model of a configuration, for the policy or the reference; `more` options of from_pretrained."""
    options = {
        "trust_remote_code": config.train.trust_remote_code,
        "revision": config.revision,
        "dtype": config.model.dtype,
        "attn_implementation": config.model.attn_implementation,
        **(config.train.model_init_kwargs or {}),
        **more,
    }
    casts = launched_with() == "zero" or (launched_with() == "fsdp" and is_reference)
    if casts and config.train.bf16 and options["dtype"] == "float32":
        # DeepSpeed casts the weights to bf16 and makes fp32 masters of that; FSDP2 casts what it gathers. So these are
        # the same bits in half the host's memory
        options["dtype"] = "bfloat16"
    name = config.model.model_name_or_path
    model = load_model(name, options, config.model_field)
    if model.base_model is model:  # as for llama4_text, whose base_model_prefix names no attribute
        raise UserError(
            f"{config.model_field} {name}: TRL's fused LM head finds no backbone in {type(model).__name__}; "
            "choose a model of another architecture"
        )
    return model


def load_reference(config: Config, has_adapter: bool) -> PreTrainedModel | None:
    """A separate reference model; None if the policy's weights are the reference's, or their log-probs are cached."""
    if config.train.ref_model_name_or_path:
        return load_configured_model(config.reference, is_reference=True)
    # FSDP2 splits the policy only when training begins, so even a cached reference needs its own model
    needs_reference = not config.train.precompute_ref_log_probs or launched_with() == "fsdp"
    return load_configured_model(config, is_reference=True) if needs_reference and not has_adapter else None
