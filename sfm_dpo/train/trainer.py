"""The trainer: TRL's DPOTrainer with tokenised pairs, packed forward, cached reference and balanced micro-batches.

The loss is TRL's (`DPOTrainer._compute_loss`): for `loss_type: sigmoid_norm`, open-instruct's `dpo_norm`, the mean
over the pairs of -log sigmoid(beta * (r(chosen) - r(rejected))), r = mean over the response of log pi - log pi_ref.
Micro-batches hold equal numbers of pairs (data/sampler.py), so their mean is the mean over the global batch.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft.utils.error import NoMatchingPeftModuleError
from transformers import TrainerCallback
from trl.models import prepare_deepspeed

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.config_checks import main_loss
from sfm_dpo.data.sampler import ORDER_VERSION, PairSampler
from sfm_dpo.data.tokenization import Lengths, hash_tokens
from sfm_dpo.model.attention import activate_flash, check_shared_keys, kernel_name
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import load_model
from sfm_dpo.model.packing import compile_layers, delta_net_kernel, enable_padding_free, why_not_shared
from sfm_dpo.model.sharding import launched_with
from sfm_dpo.run.checkpoint import COMPLETE
from sfm_dpo.train.callbacks import CheckpointCallback, Position, ResumeCallback
from sfm_dpo.train.metrics import CountingCollator, Meter, MetricSums, check_step_0, loss_scale, reward_metrics
from sfm_dpo.train.upstream import UpstreamFixes, arguments_for_trl

log = logging.getLogger(__name__)


class SFMDPOTrainer(UpstreamFixes):
    """TRL's DPOTrainer on the columns of data/tokenization.py, for one process, DDP, ZeRO-2, ZeRO-3 and FSDP2.

    With `precompute_ref_log_probs`, `add_reference` (reference_cache.py) must add the reference's columns before
    training. Raises UserError for a model that cannot be loaded or packed.

    Args:
        model: folder or Hub id, loaded with `args.model_init_kwargs`.
        args: kept unchanged as `train_config`; `self.args` is a copy for TRL (upstream.py, `arguments_for_trl`).
        kwargs: those of DPOTrainer.
    """

    data_collator: Any
    ref_model: Any
    forward_model: Any  # computes reference log-probs until training begins

    def __init__(
        self,
        *,
        model: str,
        args: TrainConfig,
        quantization_config: Any = None,
        position: Position | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        self.train_config = args
        self.position = position or Position()
        self.packed = args.padding_free
        self.eval_sums = MetricSums(pairs=0)  # of the current evaluation
        self.step_0_checked = False
        self.reference_facts: dict[str, Any] = {}  # by split: the cache that `add_reference` read or computed
        self.train_tokens = hash_tokens(kwargs["train_dataset"])
        if self.packed and not args.use_cpu:
            activate_flash(args.flash_attention)
        init_kwargs = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        # FSDP2 splits the policy only when training begins, so even a cached reference needs its own model
        needs_reference = not args.precompute_ref_log_probs or launched_with() == "fsdp"
        reference = None
        if other := args.ref_model_name_or_path:
            reference = load_model(other, init_kwargs | {"revision": "main"}, "ref_model_name_or_path")
        elif needs_reference and kwargs.get("peft_config") is None:
            reference = load_model(model, init_kwargs)
        policy = load_model(model, init_kwargs)
        callbacks = [CheckpointCallback(self), ResumeCallback(self), *callbacks]
        kwargs |= {"ref_model": reference, "args": arguments_for_trl(args), "callbacks": callbacks}
        try:
            super().__init__(policy, **kwargs)
        except NoMatchingPeftModuleError as error:
            raise UserError(f"lora_target_modules: {error}") from error
        self.precompute_ref_logps = True  # tells TRL that each batch holds the reference's sums, see _compute_loss
        self.prefix_sharing = self._resolve_prefix_sharing()
        self._pack_and_compile()
        self.train_sampler = build_sampler(self.train_dataset, args, self.prefix_sharing)
        self.forward_model = self.ref_model or self._prepare_policy()
        if args.precompute_ref_log_probs:
            self.ref_model = None
        self.meter = Meter()
        flops = ForwardFlops.of(self.bare_model())
        live_reference = not args.precompute_ref_log_probs
        self.data_collator = CountingCollator(
            self.data_collator, flops, live_reference, self.packed, self.prefix_sharing
        )
        self.add_callback(self.meter)
        self.add_callback(self.position)

    def bare_model(self) -> Any:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _pack_and_compile(self) -> None:
        """Packs and compiles policy and reference, as configured, after TRL has given them their fused LM head."""
        args = self.train_config
        if args.torch_compile:
            where = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR, now a folder in /tmp")
            log.info(f"torch_compile: layers are compiled in their first forward and backward, and cached in {where}")
        for model in filter(None, (self.bare_model(), self.ref_model)):
            model = self.accelerator.unwrap_model(model)
            obstacle = why_not_shared(model, self.packed, args.router_aux_loss_coef)  # another reference may have one
            try:
                if self.packed:
                    enable_padding_free(model, self.prefix_sharing and not obstacle)
            except ValueError as error:  # in this model, sequences packed into one row would see each other
                raise UserError(str(error)) from error
            if args.torch_compile:
                compile_layers(model, args.torch_compile_backend, args.torch_compile_mode)

    def _resolve_prefix_sharing(self) -> bool:
        """Whether prompts are shared. Raises UserError if it is set but model or kernel do not allow it."""
        asked = self.train_config.prefix_sharing
        obstacle = why_not_shared(self.bare_model(), self.packed, self.train_config.router_aux_loss_coef)
        if obstacle and asked:
            raise UserError(f"prefix_sharing True: {obstacle}; set prefix_sharing: false")
        if obstacle and asked is None:
            log.info(f"prefix_sharing is off: {obstacle}")
        if obstacle or asked is False:
            return False
        try:
            check_shared_keys(*self.attention_call())
        except ValueError as error:
            raise UserError(str(error)) from error
        return True

    def attention_call(self, model: Any = None) -> tuple[torch.device, torch.dtype, int]:
        """Device, dtype and head size of the attention of the policy, or of `model`."""
        config = (model or self.bare_model()).config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[self.accelerator.mixed_precision]
        return self.accelerator.device, dtype, head_dim

    def attention_kernel(self) -> str:
        """Name of the packed attention kernel, for the log; it replaces `attn_implementation`."""
        nets = delta_net_kernel(self.bare_model())
        return kernel_name(*self.attention_call()) + (f", gated delta nets by {nets}" if nets else "")

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed."""
        return self.args.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0

    def _prepare_policy(self) -> Any:
        """The policy, ready for forwards before training begins; all ranks must call it equally often."""
        self.model.eval()
        if self.zero_stage == 3:
            return prepare_deepspeed(self.model, self.accelerator)  # the hooks that gather the weights
        if self.is_deepspeed_enabled and self.args.bf16:  # as DeepSpeed's engine will do with the policy
            for parameter in self.model.parameters():  # buffers such as RoPE's inv_freq stay fp32
                parameter.data = parameter.data.to(torch.bfloat16)
        return self.model.to(self.accelerator.device)  # Trainer leaves this to DeepSpeed, which starts later

    def use_policy(self) -> None:
        """After the reference pass, replaces another reference with the policy, unless FSDP2 has yet to split it."""
        if self.train_config.ref_model_name_or_path and not self.is_fsdp_enabled:
            self._release_forward_model()
            self.forward_model = self._prepare_policy()

    def _release_forward_model(self) -> None:
        if self.zero_stage == 3 and self.forward_model not in (None, self.ref_model):
            self.forward_model.optimizer.destroy()  # otherwise the training engine would gather everything twice
        self.forward_model = None
        self.accelerator.free_memory()  # accelerate also keeps a reference that it prepared

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`, after releasing the model that computed reference log-probs, or ZeRO-3's hooks."""
        self._release_forward_model()
        return super().train(*args, **kwargs)

    def load_batch(self, dataset: Dataset, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """TRL's batch of these rows, [2B, L] with chosen sequences first, on the device."""
        return self._prepare_inputs(self.data_collator([dataset[int(row)] for row in rows]))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called for each micro-batch, including those of evaluation, preflight and reference pass."""
        counts = inputs.pop("counts", None)
        phase = "evaluation"
        if not self.is_in_train and not self.state.global_step:
            phase = "the reference's forward"
        elif self.model.training:
            phase = "training"
            self.meter.add(counts)
        self.position.begin_micro_batch(phase, self.state.global_step, inputs)
        return super()._prepare_inputs(inputs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PairSampler:
        """Replaces Transformers' batch_rebalance, whose micro-batches hold unequal numbers of pairs."""
        self.train_sampler = build_sampler(self.train_dataset, self.train_config, self.prefix_sharing)
        return self.train_sampler

    def describe_data(self) -> dict[str, Any]:
        """For data.json: the hash of the tokens, the order of each epoch, the reference cache of each split, and the
        launch."""
        epochs = self.args.num_train_epochs
        if self.args.max_steps > 0:
            epochs = self.args.max_steps * self.train_config.global_batch_size / len(self.train_sampler)
        order = [self.train_sampler.fingerprint(epoch) for epoch in range(math.ceil(epochs))]
        launch = self.resume_facts()["launch"]
        return {"train_tokens": self.train_tokens, "reference": self.reference_facts, "order": order, "launch": launch}

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: logs rewards/* as sums over tokens even
    # if the loss uses means. Canary: test_canary_compute_loss
    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss, and metrics on its scale. A live reference's log-probs are first added to the batch."""
        if not self.train_config.precompute_ref_log_probs:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        is_step_0 = self.model.training and not self.step_0_checked and not self.state.global_step
        is_compared = is_step_0 and self.train_config.ref_model_name_or_path  # the policy with itself
        expected = torch.cat(self.compute_ref_log_probs(model, inputs)) if is_compared else None
        forwards = []

        def forward(**kwargs):
            forwards.append(model(**kwargs))
            return forwards[-1]

        result = super()._compute_loss(forward, inputs, return_outputs)
        outputs = forwards[0]
        ref_logps = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        scale = loss_scale(inputs["completion_mask"], main_loss(self.loss_types))
        logps = outputs.log_probs.detach().sum(dim=1)  # [2B], zero outside of the responses
        rewards = reward_metrics(logps, ref_logps, scale, self.beta)
        self.position.advance()  # the following calls wait for the other ranks
        if self.model.training:
            self.step_0_checked = True
            if is_step_0:
                check_step_0(self, model, inputs, logps, ref_logps if expected is None else expected)
            self._record_rewards(rewards)
        else:
            loss = result[0] if return_outputs else result
            self.eval_sums.add(loss, rewards, outputs, inputs["completion_mask"])
        return result

    def _record_rewards(self, rewards: dict[str, torch.Tensor]) -> None:
        """Replaces the values that TRL has just recorded with means over the pairs of all ranks."""
        recorded = self._metrics["train"]
        pairs = self.accelerator.gather(torch.stack(list(rewards.values()), dim=1).float())  # [pairs of all ranks, 8]
        earlier = len(recorded["rewards/average"])  # earlier micro-batches; TRL has also recorded this one
        for name, value in zip(rewards, pairs.mean(dim=0).tolist(), strict=True):
            recorded[name][earlier:] = [value]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics perf/*, summed over ranks."""
        if "loss" in logs and self.model.training:
            counts = torch.tensor([list(self.meter.counts.values())], dtype=torch.float64)
            totals = self.accelerator.gather(counts.to(self.accelerator.device)).sum(dim=0).tolist()
            ranks = self.accelerator.num_processes
            logs |= self.meter.metrics(dict(zip(self.meter.counts, totals, strict=True)), ranks)
        super().log(logs, start_time)

    def resume_facts(self) -> dict[str, Any]:
        """The facts that must be the same in a run that resumes from a checkpoint."""
        launch = "FSDP2" if self.is_fsdp_enabled else "whole weights"
        return {
            "world_size": self.accelerator.num_processes,
            "launch": f"ZeRO-{self.zero_stage}" if self.zero_stage else launch,
            "train_tokens": self.train_tokens,
            "order_version": ORDER_VERSION,
        }

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the complete model. A checkpoint starts with this."""
        folder = Path(output_dir or self.args.output_dir)
        self.position.saving = folder
        if is_main_process():  # a skipped checkpoint of this step must not look complete while it is rewritten
            (folder / COMPLETE).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)


def build_sampler(dataset: Dataset, args: TrainConfig, prefix_sharing: bool = False) -> PairSampler:
    """The order in which a run trains on tokenised pairs. Raises UserError for fewer pairs than a global batch."""
    return PairSampler.of(Lengths.of(dataset).truncate(args.max_length), args, prefix_sharing)
