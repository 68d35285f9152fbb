"""One step: TRL's DPOTrainer with tokenised pairs in, packed forward, cached reference, balanced batches."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model
from datasets import Dataset, concatenate_datasets
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from trl import DPOTrainer
from trl.models import prepare_deepspeed

from sfm_dpo.common.errors import DiskFull, UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.data.tokenization import pair_tokens
from sfm_dpo.health.guard_rules import STEP_0_TOLERANCE
from sfm_dpo.model.attention import describe_kernel
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import loading
from sfm_dpo.model.packing import compile_layers, enable_padding_free
from sfm_dpo.model.sharding import hybrid_warning, keep_outputs, launched_with, use_fsdp_on_cpu
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.checkpoint import COMPLETE, mark_complete, newest_checkpoint, rotate
from sfm_dpo.train import reference_cache
from sfm_dpo.train.metrics import gather_unequal, loss_scale, reward_metrics
from sfm_dpo.train.reference_cache import fill
from sfm_dpo.train.throughput import Meter, MeterCallback


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


COMPILE_FIELDS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


class SFMDPOTrainer(LaunchedTrainer):
    """TRL's DPOTrainer on the columns of tokenization.py. Arguments as there; `args` is our TrainConfig."""

    precompute_ref_logps: bool  # TRL's

    def __init__(self, *, args: TrainConfig, **kwargs: Any):
        self._packed, args.padding_free = args.padding_free, False  # TRL 1.16 would warn that it pads
        self._compilation = {name: getattr(args, name) for name in COMPILE_FIELDS}  # see compile.py
        args.torch_compile, args.torch_compile_backend, args.torch_compile_mode = False, None, None
        self._patched = False
        self._rebalance: Any = None  # transformers' BatchRebalanceSampler, where that is the strategy
        self._length_sampler: BatchRebalanceSampler | LengthGroupedSampler | None = None
        self._step_0_checked = False
        self._eval_batches: list[tuple[int, tuple[str, ...]]] = []  # pairs in each, names of the metrics over pairs
        self._reference_folder: Path | None = None
        self._reference_shards = 0  # of the splits whose pass is over
        self.train_tokens = reference_cache.token_hash(kwargs["train_dataset"])
        self.data_facts: dict[str, Any] = {"train_tokens": self.train_tokens, "reference": {}}  # for data.json
        with loading(str(kwargs["model"]), args.model_init_kwargs):
            super().__init__(args=args, **kwargs)
        args.padding_free = self._packed
        for name, value in self._compilation.items():
            setattr(args, name, value)
        self._patch_models()
        self.meter = Meter(ForwardFlops.of(self._bare_model()), reference_in_step=not self.precompute_ref_logps)
        self.add_callback(MeterCallback(self.meter))

    def _patch_models(self) -> None:
        """Packs and compiles policy and reference, as asked, once TRL has given them their fused LM head."""
        if self._patched:
            return
        for model in (self._bare_model(), self.ref_model):
            if model is None:
                continue
            model = self.accelerator.unwrap_model(model)
            try:
                if self._packed:
                    enable_padding_free(model)
            except ValueError as error:  # a model in which sequences of one row would see each other
                raise UserError(str(error)) from error
            if self._compilation["torch_compile"]:
                compile_layers(
                    model, self._compilation["torch_compile_backend"], self._compilation["torch_compile_mode"]
                )
        self._patched = True

    def attention_kernel(self) -> str:
        """What computes packed attention, for the log; it takes the place of `attn_implementation`."""
        config = self._bare_model().config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        return describe_kernel(self.accelerator.device, dtype, head_dim)

    # ---- data

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: TrainConfig, name: str) -> Dataset:
        """Adds what a pair costs. TRL 1.16 would tokenise again: it does not notice that the ids are there."""
        if args.length_column_name in dataset.column_names:
            return dataset
        return dataset.add_column(args.length_column_name, pair_tokens(dataset, args.max_length))

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the length column, which transformers' samplers read after unused columns are dropped."""
        super()._set_signature_columns_if_needed()
        if self.args.length_column_name not in self._signature_columns:
            self._signature_columns.append(self.args.length_column_name)

    def _get_train_sampler(self, train_dataset: Dataset | None = None):
        """transformers' sampler, with the run's seed, which the two that look at lengths ignore (5.23), and costs."""
        sampler = super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(sampler, BatchRebalanceSampler):
            sampler.seed, self._rebalance = seed, sampler
            # transformers' 0.001 lets attention outweigh all else from 1,000 tokens on. A token of a pair of P tokens
            # sees P/4 others: h P FLOPs a layer for hidden size h, against 24 h^2 of the matrices (bench/balance.py).
            sampler.QUADRATIC_COST_COEF = 1 / (24 * self._bare_model().config.get_text_config().hidden_size)
            self._length_sampler = sampler
        elif isinstance(sampler, LengthGroupedSampler):
            sampler.lengths = list(sampler.lengths)  # a column of the dataset is read from disk one by one
            generator = sampler.generator = torch.Generator().manual_seed(seed)
            # Its order would else depend on how many epochs this process has seen, which a resumed run has not
            sampler.set_epoch = lambda epoch: generator.manual_seed(seed + epoch)
            self._length_sampler = sampler
        return sampler

    def _global_batch_pairs(self) -> int:
        """Pairs in the current optimizer step, over all ranks."""
        sampler = self._rebalance
        if sampler.has_tail and (self.state.global_step + 1) % sampler.num_global_batches == 0:
            return max(sampler.remainder, sampler.dp_size * sampler.grad_accum)
        return sampler.effective_batch_size

    # ---- reference

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """`dataset` with ref_chosen_logps and ref_rejected_logps, from the cache of reference_cache.py.

        TRL calls this at the end of its __init__, so the weights are those of the base model also when the run
        resumes from a checkpoint, which is loaded later.
        """
        self._patch_models()
        columns = fill(self, dataset, name, batch_size)
        return concatenate_datasets([dataset, columns], axis=1)

    # ---- checkpoints

    def resume_facts(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must agree with."""
        launch = "FSDP2" if self.is_fsdp_enabled else "whole weights"
        if self.zero_stage:
            launch = f"ZeRO-{self.zero_stage}"
        return {"world_size": self.accelerator.num_processes, "launch": launch, "train_tokens": self.train_tokens}

    def _run_epoch(self, **kwargs: Any) -> None:
        """transformers 5.23 does a step too many where the last checkpoint lies in the middle of an epoch.

        And it does not reach a sampler under two wrappers (several ranks, skipped batches) with the epoch's number.
        """
        if self._length_sampler is not None:
            self._length_sampler.set_epoch(kwargs["epoch"])
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        """transformers', then the mark that it is complete, then the rotation that transformers would do before."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():  # a skipped one of this step is written anew: it must not look complete now
            (checkpoint / COMPLETE).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # torch, safetensors and the OS each have their own for a full disk
            full = "No space left" in str(error) or "quota exceeded" in str(error)
            if not full and shutil.disk_usage(self.args.output_dir).free > 64 * 2**20:
                raise
            newest = newest_checkpoint(self.args.output_dir)[0]
            raise DiskFull(f"disk full while writing {checkpoint}; the run can go on from {newest}") from error
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            mark_complete(checkpoint, {"step": self.state.global_step, **self.resume_facts()})
            rotate(self.args.output_dir, limit)
        self.accelerator.wait_for_everyone()

    # ---- loss

    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss, weighted where micro-batches hold unequal numbers of pairs.

        The reference's log-probs are put into the batch first, so that metrics can use them too.
        """
        training = self.model.training
        if training:
            self.meter.add(inputs["attention_mask"], inputs["completion_mask"], self._packed)
        cached, gather = self.precompute_ref_logps, self.accelerator.gather
        if not cached:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        log_probs = []

        def recording(**kwargs):
            outputs = model(**kwargs)
            if kwargs.get("fused_lm_head"):
                log_probs.append(outputs.log_probs.detach())
            return outputs

        unequal = training and self._rebalance is not None
        self.precompute_ref_logps = True
        if unequal:
            self.accelerator.gather = lambda tensor: gather_unequal(gather, tensor, self.accelerator.num_processes)
        try:
            result = super()._compute_loss(recording, inputs, return_outputs)
            if self.ld_alpha is None:  # with it the log-probs are weighted sums, and TRL's metrics stand
                self._record_rewards(log_probs[0], inputs, model)
        finally:
            self.precompute_ref_logps = cached
            self.accelerator.__dict__.pop("gather", None)
        if unequal and not return_outputs:
            # Trainer and the all-reduce average over micro-batches as if each held the same number of pairs
            micro_batches = self._rebalance.dp_size * self._rebalance.grad_accum
            result = result * (len(inputs["ref_chosen_logps"]) * micro_batches / self._global_batch_pairs())
        return result

    def _record_rewards(self, log_probs: torch.Tensor, inputs: dict[str, torch.Tensor], model) -> None:
        """Replaces TRL's rewards/*, which are sums over tokens also where the loss uses means (TRL 1.16).

        Args:
            log_probs: [2B, L - 1], the policy's log-prob of each response token, 0 elsewhere.
            inputs: TRL's batch with `completion_mask` [2B, L] and the reference's sums [B] each.
        """
        given = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        scale = loss_scale(inputs["completion_mask"], self.loss_types[0])
        metrics = reward_metrics(log_probs.sum(dim=1), given, scale, self.beta)
        mode = "train" if self.model.training else "eval"
        if mode == "train" and not self._step_0_checked:
            self._check_step_0(metrics["rewards/margins"], given, scale, inputs, model)
        gather = self.accelerator.gather if mode == "train" else self.accelerator.gather_for_metrics
        pairs = gather(torch.stack(list(metrics.values()), dim=1).float())  # [pairs of all ranks, 8]
        weight = 1.0
        if mode == "train" and self._rebalance is not None:
            weight = len(pairs) * self._rebalance.grad_accum / self._global_batch_pairs()
        for name, value in zip(metrics, (pairs.mean(dim=0) * weight).tolist(), strict=True):
            if name not in ("rewards/average", "logps/accuracies"):
                self._metrics[mode][name].pop()  # what TRL has just recorded
            self._metrics[mode][name].append(value)
        if mode == "eval":
            self._eval_batches.append((len(pairs), tuple(metrics)))

    def skip_step_0_check(self) -> None:
        """For scripts/parity.py, which measures what the check would stop at."""
        self._step_0_checked = True

    def _check_step_0(self, margins, given: torch.Tensor, scale: torch.Tensor, inputs: dict, model) -> None:
        """At policy = reference the loss is ln 2. If it is not, training would optimise something else.

        Raises:
            UserError: naming the likeliest of the causes: dropout, a stale cache, other weights.
        """
        self._step_0_checked = True
        tolerance = STEP_0_TOLERANCE["16-bit" if self.args.bf16 or self.args.fp16 else "32-bit"]
        # The worst rank's: all must agree, for what follows may be a forward that all have to call
        error = self.accelerator.gather(margins.abs().mean()).max().item() / 2
        if self.state.global_step or error <= tolerance:
            return
        once, again = (torch.cat(self.compute_ref_log_probs(model, inputs)) for _ in range(2))

        def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
            return self.accelerator.gather((self.beta * (a - b) / scale).abs().mean()).max().item() > tolerance

        if differ(once, again):
            cause = "two forwards of one batch differ: dropout is on; set disable_dropout: true"
        elif self._reference_folder is not None:
            cause = f"the cached reference does not fit these weights; remove {self._reference_folder}"
        else:
            cause = "policy and reference are different models" if differ(once, given) else "the forward is unstable"
        raise UserError(f"step 0: the loss is off ln 2 by {error:.3g}, more than {tolerance:g}: {cause}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called when a run goes on; TRL would count its tokens from 0 again."""
        super()._load_optimizer_and_scheduler(checkpoint)
        self._total_train_tokens = next(
            (int(entry["num_tokens"]) for entry in reversed(self.state.log_history) if "num_tokens" in entry), 0
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.model.training:
            counts = torch.tensor([list(self.meter.counts.values())], dtype=torch.float64)
            totals = self.accelerator.gather(counts.to(self.accelerator.device)).sum(dim=0).tolist()
            ranks = self.accelerator.num_processes
            logs |= self.meter.metrics(dict(zip(self.meter.counts, totals, strict=True)), ranks)
        if not self.model.training and self._eval_batches:
            # TRL would take the mean over batches, in which the pairs of a smaller last one count for more
            sizes = np.array([size for size, _ in self._eval_batches])
            for name in self._eval_batches[0][1]:
                self._metrics["eval"][name] = [float(np.average(self._metrics["eval"][name], weights=sizes))]
            self._eval_batches.clear()
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Ours instead of TRL's, which knows neither the loss nor the data. TRL calls it with every checkpoint."""
        if self.is_world_process_zero():
            write_model_card(self.args.output_dir)
