"""The trainer: TRL's DPOTrainer with tokenised pairs in, packed forward, cached reference, balanced micro-batches.

The loss is TRL's, computed in `DPOTrainer._compute_loss` (trl/trainer/dpo_trainer.py). For the recipes' `loss_type:
sigmoid_norm`, open-instruct's `dpo_norm`, it is the mean over the pairs of a micro-batch of

    -log sigmoid(beta * (r(chosen) - r(rejected))),   r = mean over the response's tokens of log pi - log pi_ref

Micro-batches hold equally many pairs (data/sampler.py), so that their mean is the mean over the global batch.
"""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset, concatenate_datasets
from peft.utils.error import NoMatchingPeftModuleError
from trl.models import prepare_deepspeed

from sfm_dpo.common.distributed import broadcast, main_process_first
from sfm_dpo.common.errors import DiskFull, StopRequested, UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.config_checks import main_loss
from sfm_dpo.data.sampler import ORDER_VERSION, PairSampler
from sfm_dpo.data.tokenization import pair_tokens
from sfm_dpo.model.attention import activate_flash, check_shared_keys, describe_kernel
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import hash_config, load_model
from sfm_dpo.model.packing import compile_layers, describe_delta_nets, enable_padding_free, why_not_shared
from sfm_dpo.model.saving import mend_saved_files, read_base_config
from sfm_dpo.model.sharding import hash_weights, hybrid_warning, launched_with
from sfm_dpo.run.checkpoint import COMPLETE, mark_complete, newest_checkpoint, rotate, stop_requested
from sfm_dpo.train.memory_use import allocate_optimizer_state, tokens_of_forward
from sfm_dpo.train.metrics import loss_scale, reward_metrics, step_0_tolerance
from sfm_dpo.train.position import Position
from sfm_dpo.train.reference_cache import ReferenceCache, cache_folder, hash_tokens, make_folder
from sfm_dpo.train.throughput import CountingCollator, Meter
from sfm_dpo.train.upstream import UpstreamFixes

log = logging.getLogger(__name__)


class SFMDPOTrainer(UpstreamFixes):
    """TRL's DPOTrainer on the columns of data/tokenization.py, for one process, DDP, ZeRO-2, ZeRO-3 and FSDP2.

    Args:
        model: folder or Hub id, loaded with `args.model_init_kwargs`.
        args: our TrainConfig.
        position: is told of each micro-batch.
        kwargs: as DPOTrainer's.

    Raises:
        UserError: weights and config.json do not fit; the model cannot be packed; LoRA targets that do not exist; the
            first batch's loss is not ln 2 (in training).
        StopRequested: the stop file was seen during the reference pass.
    """

    precompute_ref_logps: bool  # TRL's
    data_collator: Any

    def __init__(
        self,
        *,
        model: str,
        args: TrainConfig,
        quantization_config: Any = None,
        position: Position | None = None,
        **kwargs: Any,
    ):
        self.position = position or Position()
        self.packed, self.prefix_sharing = args.padding_free, False
        self.compilation = {
            name: getattr(args, name) for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        }
        self.step_0_checked = False
        self.reference_folder: Path | None = None
        self._patched = False
        self._forward_model: Any = None
        self._reference_shards = 0  # of the splits whose pass is over
        self.train_tokens = hash_tokens(kwargs["train_dataset"])
        self.reference_facts: dict[str, Any] = {}  # by split
        if self.packed and not args.use_cpu:
            activate_flash(args.flash_attention)
        init_kwargs = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        live = not args.precompute_ref_log_probs or launched_with() == "fsdp"  # which splits the policy later
        reference = load_model(model, init_kwargs) if live and kwargs.get("peft_config") is None else None
        policy = load_model(model, init_kwargs)
        self.base_config = read_base_config(model, init_kwargs.get("revision"), policy.config)
        try:
            super().__init__(model=policy, ref_model=reference, args=args, **kwargs)
        except NoMatchingPeftModuleError as error:
            raise UserError(f"lora_target_modules: {error}") from error
        if args.precompute_ref_log_probs:
            self.ref_model = None
        self._patch_models()
        self.meter = Meter()
        flops = ForwardFlops.of(self.bare_model())
        self.data_collator = CountingCollator(
            self.data_collator, flops, not self.precompute_ref_logps, self.packed, self.prefix_sharing
        )
        for callback in (self.meter, self.position):
            self.add_callback(callback)

    def bare_model(self) -> Any:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _patch_models(self) -> None:
        """Packs and compiles policy and reference, as asked, once TRL has given them their fused LM head."""
        if self._patched:
            return
        self.prefix_sharing = self._resolve_prefix_sharing()
        for model in filter(None, (self.bare_model(), self.ref_model)):
            model = self.accelerator.unwrap_model(model)
            try:
                if self.packed:
                    enable_padding_free(model, self.prefix_sharing)
            except ValueError as error:  # a model in which sequences of one row would see each other
                raise UserError(str(error)) from error
            if self.compilation["torch_compile"]:
                compile_layers(
                    model, self.compilation["torch_compile_backend"], self.compilation["torch_compile_mode"]
                )
        self._patched = True

    def _resolve_prefix_sharing(self) -> bool:
        """Whether prompts are shared. Raises UserError where that was asked for and the model or the kernel cannot."""
        asked, args = self.args.prefix_sharing, self.args
        obstacle = why_not_shared(self.bare_model(), self.packed, args.router_aux_loss_coef)
        if obstacle and asked:
            raise UserError(f"prefix_sharing True: {obstacle}; set prefix_sharing: false")
        if obstacle and asked is None:
            log.info(f"prefix_sharing is off: {obstacle}")
        if obstacle or asked is False:
            return False
        try:
            check_shared_keys(*self._attention_call())
        except ValueError as error:
            raise UserError(str(error)) from error
        return True

    def _attention_call(self) -> tuple[torch.device, torch.dtype, int]:
        """Device, dtype and head size of the attention."""
        config = self.bare_model().config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        return self.accelerator.device, dtype, head_dim

    def attention_kernel(self) -> str:
        """What computes packed attention, for the log; it takes the place of `attn_implementation`."""
        return describe_kernel(*self._attention_call()) + describe_delta_nets(self.bare_model())

    def describe_sharing(self) -> str:
        """For the log: how much prefix sharing saves."""
        real, computed = (pair_tokens(self.train_dataset, self.args.max_length, on) for on in (False, True))
        return (
            f"prefix sharing: {1 - computed.sum() / real.sum():.1%} of {real.sum():,} tokens are not computed; "
            f"{(real == computed).sum():,} of {len(real):,} pairs have no prompt to share"
        )

    # ---- launchers

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed."""
        return self.args.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0

    @property
    def is_zero3(self) -> bool:
        return self.zero_stage == 3

    def launch_warning(self) -> str | None:
        """A line about a launcher that does not suit the model."""
        return hybrid_warning(self.model.config) if self.is_zero3 else None

    def forward_model(self) -> torch.nn.Module:
        """What computes log-probs of the base model before training begins, in eval mode or not.

        Under ZeRO-3 and FSDP2 no rank has whole weights: there all ranks must call the forward equally often.
        """
        if self._forward_model is None:
            model = self.ref_model or self.model
            if self.ref_model is None and self.is_zero3:
                model = prepare_deepspeed(self.model, self.accelerator)  # the hooks that gather the weights
            elif self.ref_model is None:
                if self.is_deepspeed_enabled and self.args.bf16:  # what DeepSpeed's engine will do to the policy
                    for parameter in model.parameters():  # no buffer: RoPE's inv_freq stays fp32
                        parameter.data = parameter.data.to(torch.bfloat16)
                model.to(self.accelerator.device)  # Trainer leaves that to DeepSpeed, which comes later
            self._forward_model = model
        return self._forward_model

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._precompute_ref_logps: never destroys the DeepSpeed engine
    # of the reference pass, whose hooks gather ZeRO-3's weights a second time while it trains.
    # Canary: test_canary_precompute_engine
    def _prepare_for_training(self, *args: Any, **kwargs: Any):
        """Lets go of what computed log-probs until now: FSDP2's reference model, ZeRO-3's hooks."""
        if self.is_zero3 and self.ref_model is None and self._forward_model is not None:
            self._forward_model.optimizer.destroy()  # or the engine that trains would gather everything twice
        self._forward_model = None
        prepared = super()._prepare_for_training(*args, **kwargs)
        if not self.zero_stage:  # DeepSpeed has it already
            allocate_optimizer_state(self.optimizer.optimizer)  # of accelerate's wrapper
        return prepared

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called for each micro-batch, also of evaluation, preflight and reference pass."""
        begun = self.is_in_train or self.state.global_step > 0
        phase = "the reference's forward" if not begun else "training" if self.model.training else "evaluation"
        self.position.begin_micro_batch(phase, self.state.global_step, inputs)
        if self.model.training:
            self.meter.add(inputs["counts"])
        return super()._prepare_inputs(inputs)

    # ---- data

    # Upstream: transformers 5.23, trainer.py, Trainer._get_train_sampler: batch_rebalance deals unequal numbers of
    # pairs to the micro-batches, in whose means each pair then weighs differently, and ignores the run's seed.
    # Canary: test_canary_batch_rebalance
    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PairSampler:
        self.train_sampler = build_sampler(self.train_dataset, self.args, self.prefix_sharing)
        return self.train_sampler

    def describe_data(self) -> dict[str, Any]:
        """For data.json: the hash of the tokens, the order of each epoch, and the reference cache of each split."""
        args, sampler = self.args, build_sampler(self.train_dataset, self.args, self.prefix_sharing)
        epochs = args.num_train_epochs
        if args.max_steps > 0:
            epochs = args.max_steps * args.global_batch_size / len(sampler)
        order = [sampler.fingerprint(epoch) for epoch in range(math.ceil(epochs))]
        return {"train_tokens": self.train_tokens, "reference": self.reference_facts, "order": order}

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._precompute_ref_logps: computes again for another learning
    # rate, as the fingerprint of the data changes; keeps nothing of a killed pass; fails with two ranks on in-memory
    # data, for which each has a cache folder of its own. Canary: test_canary_precompute_ref_logps
    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """`dataset` with ref_chosen_logps and ref_rejected_logps, from the cache, which all ranks complete.

        TRL calls this at the end of its __init__, so the weights are those of the base model also when the run
        resumes from a checkpoint, which is loaded later.

        Raises:
            StopRequested: the stop file was seen; the shards done are kept.
        """
        self._patch_models()
        # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: the hash of the weights, taken before FSDP2
        # splits them, and the metrics of a step have no public name. Canary: test_canary_private_attributes
        accelerator, args, model = self.accelerator, self.args, self.forward_model()
        model.eval()
        adapter = is_peft_model(self.model)
        settings = {
            "weights": hash_weights(model, gather=self.is_zero3, frozen_only=adapter)
            if self.is_zero3 or adapter
            else self._precompute_model_hash,
            "config": hash_config(self.bare_model().config),
            "dtype": next(model.parameters()).dtype,
            "precision": self._precision(),
            "attention": self.bare_model().config._attn_implementation,
            "kernel": self.attention_kernel() if self.packed else None,
            "packed": self.packed,
            "compilation": self.compilation,
            "max_length": args.max_length,
            "truncation_mode": args.truncation_mode,
        }
        if self.prefix_sharing:  # a key without it is that of a cache from before there was such a thing
            settings["prefix_sharing"] = True
        tokens = pair_tokens(dataset, args.max_length, self.prefix_sharing)
        cache = ReferenceCache(cache_folder(dataset, **settings), tokens)
        # Rank 0 alone looks: on NFS who looks for a file before it is written may not see it for a minute
        missing = broadcast(cache.missing_shards() if accelerator.is_main_process else [])
        if missing:
            main_process_first(lambda: make_folder(cache.folder))
            cache.batch_tokens = self._choose_reference_batch(cache)
            log.info(f"reference, {name}: up to {cache.batch_tokens:,} tokens at once, and at least a pair")
        together = self.is_zero3 or (self.is_fsdp_enabled and not adapter)
        rank, ranks = accelerator.process_index, accelerator.num_processes

        def forward(rows: np.ndarray) -> torch.Tensor:
            batch = self._prepare_inputs(self.data_collator([dataset[int(i)] for i in rows]))
            with torch.no_grad() if together else torch.inference_mode():  # gathered weights outlive the forward
                return torch.stack(self.compute_ref_log_probs(model, batch), dim=1)

        def should_stop() -> bool:
            return broadcast(stop_requested(args.output_dir)) if together else stop_requested(args.output_dir)

        shards = len(cache.shards)
        log.info(
            f"reference log-probs of the {name} pairs: {shards - len(missing)} of {shards} shards in {cache.folder}"
        )
        progress = cache.report_progress(name, missing, args.output_dir)
        lockstep = (rank, ranks, gather_object, broadcast) if together else ()
        done = cache.compute(missing, forward, progress, should_stop, *lockstep)
        counts = accelerator.gather(torch.tensor([[int(done), cache.computed]], device=accelerator.device))
        if not counts[:, 0].all():
            message = f"stopped on request during the reference pass; its shards are kept in {cache.folder}"
            raise StopRequested(message, shards=self._reference_shards + cache.count())
        if missing:
            computed = counts[:, 1].sum().item()
            log.info(f"reference, {name}: {computed} shards computed here, {len(missing) - computed} by other jobs")
        self._reference_shards += len(cache.shards)
        self.reference_folder = cache.folder
        logps = cache.read_all()
        if accelerator.is_main_process:
            self.reference_facts[name] = cache.describe(settings)
        columns = Dataset.from_dict({"ref_chosen_logps": logps[:, 0], "ref_rejected_logps": logps[:, 1]})
        return concatenate_datasets([dataset, columns], axis=1)

    def _choose_reference_batch(self, cache: ReferenceCache) -> int:
        """Tokens at once: of so many of the longest pairs where `precompute_ref_batch_size` is named, else the cache's
        own, which its first job chose by memory."""
        if named := self.args.precompute_ref_batch_size:
            return named * int(cache.lengths.max(initial=1))
        choose = lambda: max(1, tokens_of_forward(self) // (1 if self.packed else 2))  # noqa: E731  (padding)
        rank_0 = self.accelerator.is_main_process
        return broadcast(main_process_first(lambda: cache.agree_on_batch(choose) if rank_0 else 0))

    def _precision(self) -> str:
        """What computes in which precision: in 16 bit the launchers differ."""
        mixed = self.accelerator.mixed_precision
        if mixed == "no":
            return mixed
        return f"{mixed}, {'DeepSpeed' if self.zero_stage else 'FSDP2' if self.is_fsdp_enabled else 'autocast'}"

    # ---- checkpoints

    def resume_facts(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must agree with."""
        launch = "FSDP2" if self.is_fsdp_enabled else "whole weights"
        if self.zero_stage:
            launch = f"ZeRO-{self.zero_stage}"
        world_size = self.accelerator.num_processes
        facts = {"world_size": world_size, "launch": launch, "train_tokens": self.train_tokens}
        return facts | {"order_version": ORDER_VERSION, "prefix_sharing": self.prefix_sharing}

    # Upstream: transformers 5.23, trainer.py, Trainer._save_checkpoint: has no mark of a complete checkpoint, counts
    # one that was killed half-written as one to keep, and deletes others while ranks still write the new one.
    # Canary: test_canary_save_checkpoint
    def _save_checkpoint(self, model, trial) -> None:
        """transformers', then the mark that it is complete, then the rotation that transformers would do before."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self.position.saving = checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():  # a skipped one of this step is written anew: it must not look complete now
            (checkpoint / COMPLETE).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # torch, safetensors and the OS each have their own for a full disk
            full = "No space left" in str(error) or "quota exceeded" in str(error)
            if not full and shutil.disk_usage(self.args.output_dir).free > 64 * 2**20:
                raise
            newest = newest_checkpoint(self.args.output_dir)
            raise DiskFull(f"disk full while writing {checkpoint}; the run can go on from {newest}") from error
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        mark_complete(checkpoint, {"step": self.state.global_step, **self.resume_facts()})
        self.position.saving = None
        if self.is_world_process_zero():
            rotate(self.args.output_dir, limit)
        self.accelerator.wait_for_everyone()

    # Upstream: transformers 5.23, tokenization_utils_base.py, PreTrainedTokenizerBase.save_pretrained: writes a
    # tokenizer class and a list of special tokens that Transformers 4 refuses, and how it was loaded here; the Trainer
    # saves use_cache: false. Canary: test_canary_saved_files
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            mend_saved_files(Path(output_dir or self.args.output_dir), self.base_config)

    # ---- loss

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: logs rewards/* as sums over tokens also
    # where the loss uses means. Canary: test_canary_compute_loss
    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss, and metrics on its scale. The live reference's log-probs are put into the batch first."""
        cached = self.precompute_ref_logps
        if not cached:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        per_token_logps = []

        def forward(**kwargs):
            outputs = model(**kwargs)
            if kwargs.get("fused_lm_head"):
                per_token_logps.append(outputs.log_probs.detach())
            return outputs

        self.precompute_ref_logps = True
        try:
            result = super()._compute_loss(forward, inputs, return_outputs)
        finally:
            self.precompute_ref_logps = cached
        self._record_rewards(per_token_logps[0], inputs, model)
        return result

    def _record_rewards(self, per_token_logps: torch.Tensor, inputs: dict[str, torch.Tensor], model) -> None:
        """Puts reward_metrics in the place of what TRL has just recorded.

        Args:
            per_token_logps: [2B, L - 1], the policy's log-prob of each response token, 0 elsewhere.
            inputs: TRL's batch with `completion_mask` [2B, L] and the reference's sums [B] each.
        """
        ref_logps = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        scale = loss_scale(inputs["completion_mask"], main_loss(self.loss_types))
        metrics = reward_metrics(per_token_logps.sum(dim=1), ref_logps, scale, self.beta)
        mode = "train" if self.model.training else "eval"
        self.position.advance()  # what follows waits for the other ranks
        if mode == "train" and not self.step_0_checked:
            self._check_step_0(metrics["rewards/margins"], ref_logps, scale, inputs, model)
        gather = self.accelerator.gather if mode == "train" else self.accelerator.gather_for_metrics
        pairs = gather(torch.stack(list(metrics.values()), dim=1).float())  # [pairs of all ranks, 8]
        earlier = len(self._metrics[mode]["rewards/average"])  # micro-batches; TRL has recorded this one, too
        for name, value in zip(metrics, pairs.mean(dim=0).tolist(), strict=True):
            self._metrics[mode][name][earlier:] = [value]
        if mode == "eval":
            self._eval_batches.append((len(pairs), tuple(metrics)))

    def _check_step_0(self, margins, ref_logps: torch.Tensor, scale: torch.Tensor, inputs: dict, model) -> None:
        """At policy = reference the loss is ln 2. If it is not, training would optimise something else.

        Raises:
            UserError: naming what was found out by computing the batch again.
        """
        self.step_0_checked = True
        if self.state.global_step:
            return
        precision = self.accelerator.mixed_precision
        tolerance = step_0_tolerance(inputs["completion_mask"], scale, self.beta, precision)

        def worst(margin: torch.Tensor, tolerance: torch.Tensor) -> float:
            """Of all ranks, for all must agree: what follows may be a forward that all have to call."""
            return self.accelerator.gather(margin.abs().mean() / 2 / tolerance.mean()).max().item()

        def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
            return worst(self.beta * (a - b) / scale, tolerance.repeat(2) / 2) > 1

        if worst(margins, tolerance) <= 1:
            return
        once, again = (torch.cat(self.compute_ref_log_probs(model, inputs)) for _ in range(2))
        if differ(once, again):
            cause = "two forwards of this batch differ: is dropout on? disable_dropout: true turns it off"
        elif not differ(once, ref_logps):
            cause = "the training forward differs from an evaluation of the same weights: dropout, or another kernel"
        elif self.reference_folder is not None:
            cause = (
                f"the reference log-probs in {self.reference_folder} are not those of the model that is trained; "
                "precompute_ref_log_probs: false trains without them"
            )
        else:
            cause = "policy and reference are different models"
        error, allowed = (self.accelerator.gather(v.mean()).max().item() for v in (margins.abs() / 2, tolerance))
        raise UserError(f"step 0: the loss is off ln 2 by {error:.3g}, more than {allowed:.3g} of rounding: {cause}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds perf/*, summed over ranks."""
        if "loss" in logs and self.model.training:
            counts = torch.tensor([list(self.meter.counts.values())], dtype=torch.float64)
            totals = self.accelerator.gather(counts.to(self.accelerator.device)).sum(dim=0).tolist()
            ranks = self.accelerator.num_processes
            logs |= self.meter.metrics(dict(zip(self.meter.counts, totals, strict=True)), ranks)
        super().log(logs, start_time)


def build_sampler(dataset: Dataset, args: TrainConfig, prefix_sharing: bool = False) -> PairSampler:
    """The order in which a run trains on tokenised pairs. Raises UserError for fewer pairs than a global batch."""
    tokens, strategy = pair_tokens(dataset, args.max_length, prefix_sharing), args.train_sampling_strategy
    seed = args.seed if args.data_seed is None else args.data_seed
    batch = args.global_batch_size, args.per_device_train_batch_size
    return PairSampler(tokens, strategy, *batch, seed, args.padding_free)
