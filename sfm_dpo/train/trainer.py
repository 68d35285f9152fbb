"""The trainer: TRL's DPOTrainer with tokenised pairs, packed forward, cached reference and balanced micro-batches.

The loss is TRL's (`DPOTrainer._compute_loss`): for `loss_type: sigmoid_norm`, open-instruct's `dpo_norm`, the mean
over the pairs of -log sigmoid(beta * (r(chosen) - r(rejected))), r = mean over the response of log pi - log pi_ref.
Micro-batches hold equal numbers of pairs (data/sampler.py), so their mean is the mean over the global batch.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import is_peft_model, release_memory
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback
from trl import get_peft_config

from sfm_dpo.common.distributed import launched_with
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.statistics import LOGP_ROUNDING, TYPICAL_LOGIT
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.config_checks import main_loss
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.data.tokenization import hash_tokens
from sfm_dpo.model.attention import activate_flash, kernel_name
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.layers import compile_layers
from sfm_dpo.model.loading import load_model, load_model_config, model_init_kwargs
from sfm_dpo.model.packing import enable_padding_free, find_delta_nets, has_delta_net_kernels
from sfm_dpo.train.callbacks import Progress
from sfm_dpo.train.checkpoints import CheckpointCallback, CompleteCheckpoints, ResumeCallback
from sfm_dpo.train.held_out import ExactEvaluation
from sfm_dpo.train.metrics import (
    CountingCollator,
    Meter,
    MetricSums,
    check_step_0,
    count_chosen,
    loss_scale,
    reward_metrics,
)
from sfm_dpo.train.settings import Settings, decide_settings
from sfm_dpo.train.upstream import UpstreamFixes, arguments_for_trl

log = logging.getLogger(__name__)


class SFMDPOTrainer(ExactEvaluation, CompleteCheckpoints, UpstreamFixes):
    """TRL's DPOTrainer on the columns of data/tokenization.py, for one process, DDP, ZeRO-2, ZeRO-3 and FSDP2.

    With `precompute_ref_log_probs`, `add_reference` (reference_cache.py) must add the reference's columns before
    training. Raises UserError for a model that cannot be loaded or packed.

    Args:
        config: kept unchanged; `self.args` is a copy of its arguments for TRL (upstream.py, `arguments_for_trl`).
        settings: by default those of `decide_settings`.
        kwargs: those of DPOTrainer.
    """

    model: Any
    model_wrapped: Any
    data_collator: Any
    loss_weights: list[Any]
    ref_model: Any  # a separate reference model, while there is one

    def __init__(
        self,
        config: Config,
        settings: Settings | None = None,
        *,
        progress: Progress | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **kwargs: Any,
    ):
        args = config.train
        self.config = config
        self.settings = settings or decide_settings(config, kwargs["train_dataset"], load_model_config(config))[0]
        self.progress = progress or Progress()
        self.packed = self.settings.packed
        self.prefix_sharing = self.settings.prefix_sharing
        self.train_sums = MetricSums()  # since the last log
        self.num_tokens = 0
        self.is_resumed = False
        self.step_0_checked = bool(args.ref_model_name_or_path)  # with another reference the loss is not ln 2
        self.reference_facts: dict[str, Any] = {}  # by split: the cache that `add_reference` read or computed
        self.train_tokens = hash_tokens(kwargs["train_dataset"])
        if self.packed and not args.use_cpu:
            activate_flash(self.settings.flash_attention)
        options = {"peft_config": get_peft_config(config.model)} | kwargs
        with user_input("building the trainer", "correct the field it names; for LoRA, lora_target_modules"):
            super().__init__(
                ref_model=load_reference(config, options["peft_config"] is not None),
                model=load_configured_model(config),
                args=arguments_for_trl(args, self.settings),
                callbacks=[CheckpointCallback(self), ResumeCallback(self), *callbacks],
                **options,
            )
        # Nats, of a log-prob, until calibration has measured it
        self.noise = TYPICAL_LOGIT * LOGP_ROUNDING[self.accelerator.mixed_precision]
        self.precompute_ref_logps = True  # tells TRL that each batch holds the reference's sums, see _compute_loss
        self.chosen_tokens = count_trained(self.train_dataset, args.max_length)[:, 0].mean()  # until a step begins
        self.configured_weights = args.loss_weights or [1.0] * len(args.loss_type)
        self._pack_and_compile()
        self.train_sampler = self._get_train_sampler()
        self.meter = Meter()
        flops = ForwardFlops.of(self.bare_model())
        live = not args.precompute_ref_log_probs
        self.data_collator = CountingCollator(self.data_collator, flops, live, self.packed, self.prefix_sharing)
        self.add_callback(self.meter)
        self.add_callback(self.progress)

    def adopt(self, calibration: Any, settings: Settings) -> None:
        """Takes what calibration has found before training begins; pairs per device and layers must be as built."""
        self.settings = settings
        self.noise = calibration.noise or self.noise
        if self.packed and not self.config.train.use_cpu:
            activate_flash(settings.flash_attention)

    def discard(self) -> None:
        """Frees the models and accelerate's state, so that another trainer can be built in this process."""
        for model in filter(None, (self.model, self.ref_model)):
            for parameter in model.parameters():
                parameter.data = parameter.data.new_empty(0)  # whatever else may hold the model
        self.model = self.model_wrapped = self.ref_model = self.callback_handler.model = None
        self.accelerator.free_memory()
        AcceleratorState._reset_state()
        self.progress.count = 0  # the watchdog waits while a model is loaded

    def bare_model(self) -> Any:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _pack_and_compile(self) -> None:
        """Packs and compiles policy and reference, as configured, after TRL has given them their fused LM head."""
        args = self.config.train
        if args.torch_compile:
            log.info("torch_compile: layers are compiled in their first forward and backward")
        for model in filter(None, (self.bare_model(), self.ref_model)):
            model = self.accelerator.unwrap_model(model)
            if self.packed:
                enable_padding_free(model, self.prefix_sharing)
            if args.torch_compile:
                compile_layers(model, args.torch_compile_backend, args.torch_compile_mode)

    def attention_kernel(self, model: Any = None) -> str:
        """Name of the packed attention kernel of the policy, or of `model`; it replaces `attn_implementation`."""
        model = model or self.bare_model()
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[self.accelerator.mixed_precision]
        kernel = kernel_name(self.accelerator.device, dtype, head_dim)
        if find_delta_nets(model):
            kernel += f", gated delta nets by {'fla' if has_delta_net_kernels() else 'transformers'}"
        return kernel

    def release_reference(self) -> None:
        """Frees a separate reference model whose log-probs are cached."""
        if self.config.train.precompute_ref_log_probs:
            self.ref_model = None
        self.accelerator.free_memory()  # accelerate also keeps a reference that it prepared,
        release_memory()  # and collects garbage before it drops that one

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.release_reference()
        return super().train(*args, **kwargs)

    def load_batch(self, dataset: Dataset, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """TRL's batch of these rows, [2B, L] with chosen sequences first, on the device."""
        return self._prepare_inputs(self.data_collator([dataset[int(row)] for row in rows]))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Called for each micro-batch, including those of evaluation, preflight and reference pass."""
        counts = inputs["counts"]
        phase = "evaluation"
        if not self.is_in_train and not self.state.global_step:
            phase = "the reference's forward"
        elif self.model.training:
            phase = "training"
            self.meter.add(counts)
        if not self.packed:  # only the packed forward takes them
            inputs = {name: value for name, value in inputs.items() if name != "counts"}
        self.progress.begin_micro_batch(phase, self.state.global_step, inputs)
        return super()._prepare_inputs(inputs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> PairSampler:
        """Replaces Transformers' batch_rebalance, whose micro-batches hold unequal numbers of pairs."""
        self.train_sampler = build_sampler(self.train_dataset, self.config.train, self.settings)
        return self.train_sampler

    def describe_data(self) -> dict[str, Any]:
        """For data.json: the hash of the tokens, the order of each epoch, the reference cache of each split, the
        launch and the models."""
        order = [self.train_sampler.fingerprint(epoch) for epoch in range(self.train_sampler.epochs)]
        facts = self.resume_facts()
        facts = {name: facts[name] for name in ("train_tokens", "launch")}
        return facts | {"reference": self.reference_facts, "order": order, "models": self.config.model_ids}

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' micro-batches of an optimizer step."""
        result = super().get_batch_samples(*args, **kwargs)
        if "sft" in self.loss_types and result[0]:  # a run resumed at its last step has no more
            counts = torch.stack([count_chosen(batch["completion_mask"]) for batch in result[0]])
            self.chosen_tokens = self.accelerator.gather(counts.to(self.accelerator.device)).mean().item()
        return result

    def _compute_loss(self, model, inputs: dict[str, torch.Tensor], return_outputs: bool):
        """TRL's loss with the reference's log-probs in the batch; its metrics are recorded on its own scale."""
        if not self.config.train.precompute_ref_log_probs:  # else they are columns of the data
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self._weigh_sft(inputs["completion_mask"])
        ref_logps = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        forwards = []

        def forward(**kwargs):
            forwards.append(model(**kwargs))
            return forwards[-1]

        result = super()._compute_loss(forward, inputs, return_outputs)
        self.progress.advance()  # the following calls wait for the other ranks
        logps = forwards[0].log_probs.detach().sum(dim=1)  # [2B], zero outside of the responses
        if self.model.training and not self.step_0_checked and not self.state.global_step:
            self.step_0_checked = True
            check_step_0(self, model, inputs, logps, ref_logps)
        loss = result[0] if return_outputs else result
        self._record(loss, inputs["completion_mask"], logps, ref_logps, forwards[0])
        return result

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer._compute_loss: the term sft is the mean over the tokens of
    # a micro-batch, so a response's weight depends on the others in it. Canary: test_canary_sft_weight
    def _weigh_sft(self, completion_mask: torch.Tensor) -> None:
        """Makes the term sft the mean over the chosen tokens of the global batch, or of a held-out set."""
        if "sft" not in self.loss_types:
            return
        share = count_chosen(completion_mask) / self.chosen_tokens
        weighted = zip(self.loss_types, self.configured_weights, strict=True)
        self.loss_weights = [weight * share if loss == "sft" else weight for loss, weight in weighted]

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

    # Upstream: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__: restarts num_tokens at 0 in a resumed run.
    # Canary: test_canary_num_tokens
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means over all pairs or tokens since the last log, and the metrics perf/*."""
        if "loss" in logs:
            exact = self.train_sums.reduce(self.meter.counts)
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


def load_configured_model(config: Config) -> PreTrainedModel:
    """The model of a configuration, for the policy or the reference."""
    options = {"trust_remote_code": config.train.trust_remote_code} | model_init_kwargs(config)
    if launched_with() == "zero" and config.train.bf16 and options["dtype"] == "float32":
        # DeepSpeed casts the weights to bf16 and makes fp32 masters of that: the same bits in half the host's memory
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
        return load_configured_model(config.reference)
    # FSDP2 splits the policy only when training begins, so even a cached reference needs its own model
    needs_reference = not config.train.precompute_ref_log_probs or launched_with() == "fsdp"
    return load_configured_model(config) if needs_reference and not has_adapter else None


def build_sampler(dataset: Dataset, args: TrainConfig, settings: Settings) -> PairSampler:
    """The order in which a run trains on tokenised pairs. Raises UserError for fewer pairs than a global batch."""
    lengths = Lengths.of(dataset).truncate(args.max_length)
    return PairSampler.of(lengths, args, settings.micro_batch, settings.packed, settings.prefix_sharing)
