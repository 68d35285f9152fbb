"""The base model before training: the policy and the reference, on their device, lent to what chooses and judges."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from datasets import Dataset
from transformers import PreTrainedModel
from trl.models import prepare_deepspeed

from sfm_dpo.config.fields import Config
from sfm_dpo.data.sampler import PairSampler, order_pairs
from sfm_dpo.model.loading import blocks, checkpoint_layers
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.train.callbacks import Progress
from sfm_dpo.train.trainer import SFMDPOTrainer


@dataclass
class BaseModel:
    """What may be read of a trainer that has not begun, and computed by it; a path and checkpointed layers are tried
    in contexts that restore what was. It is made by `base_model`, on all ranks together."""

    config: Config
    progress: Progress
    device: torch.device
    precision: str  # of autocast: bf16 or no
    zero_stage: int
    is_fsdp: bool
    policy: Any  # as it is called; under FSDP2 the reference, because the policy is split only when training begins
    reference: Any  # the policy itself, unless a separate model was loaded; both are None once they are released
    _trainer: SFMDPOTrainer

    @property
    def is_sharded(self) -> bool:
        """Whether a forward needs all ranks, and no backward is possible before training."""
        return self.zero_stage == 3 or self.is_fsdp

    def unwrapped(self) -> PreTrainedModel:
        """The policy without PEFT's and other wrappers."""
        return self._trainer.accelerator.unwrap_model(self._trainer.bare_model())

    def unwrapped_reference(self) -> PreTrainedModel:
        is_separate = self.config.train.ref_model_name_or_path
        return self._trainer.accelerator.unwrap_model(self.reference) if is_separate else self.unwrapped()

    def eos_ids(self) -> set[int]:
        """The tokens that end a response, of the tokenizer and of generation."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        of_model = model.generation_config.eos_token_id if model.can_generate() else None
        of_model = of_model if isinstance(of_model, list) else [of_model]
        return {self._trainer.processing_class.eos_token_id, *of_model} - {None}

    def freed_bytes(self) -> int:
        """Of a separate reference, which is freed once its log-probs are cached."""
        reference = self._trainer.ref_model
        if reference is None or not self.config.train.precompute_ref_log_probs:
            return 0
        return sum(parameter.nbytes for parameter in reference.parameters())

    def attention_kernel(self, model: PreTrainedModel | None = None) -> str:
        return self._trainer.attention_kernel(model)

    def make_sampler(self, tokens: Dataset, packed: bool, prefix_sharing: bool, pairs: int = 1) -> PairSampler:
        """The order in which a run trains on `tokens`, `pairs` in a micro-batch."""
        return order_pairs(tokens, self.config.train, pairs, packed, prefix_sharing)

    def computing(self, path: ForwardPath | None) -> AbstractContextManager[None]:
        """Policy and reference compute by `path`; None is the models' own padded forward."""
        return self._trainer.computing(path)

    @contextmanager
    def checkpointing(self, layers: int) -> Iterator[None]:
        """Checkpoints so many layers, as training does; dropout stays off."""
        if not layers:  # also of a model that has no checkpointing
            yield
            return
        model = self._trainer.bare_model()
        options = dict(self._trainer.args.activation_checkpointing_kwargs)
        del options["every_n_layers"]
        offload = options.pop("offload", False)
        model.activation_checkpointing_enable(options or None, offload=offload)
        checkpoint_layers(model, layers)
        for layer in blocks(model):
            layer.training = True  # not the modules in it
        try:
            yield
        finally:
            model.eval()
            model.activation_checkpointing_disable()

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast, as in training; FSDP2 and DeepSpeed compute in the precision of their weights."""
        return self._trainer.accelerator.autocast(AutocastKwargs(enabled=not self.is_fsdp))

    def collate(self, dataset: Dataset, rows: Sequence[int]) -> dict[str, Any]:
        """TRL's batch of these rows, [2B, L] with chosen sequences first, on the CPU, with its `counts`."""
        return self._trainer.data_collator([dataset[int(row)] for row in rows])

    def load_batch(self, dataset: Dataset, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch on the device."""
        return self._trainer._prepare_inputs(self.collate(dataset, rows))

    @contextmanager
    def taking_gradients(self, keep: Callable[[str, torch.Tensor], None] | None = None) -> Iterator[None]:
        """Takes each gradient of a backward as it arrives, so that `grad` stays None; `keep` gets its tensor's name
        and the gradient, flat."""

        def take(name: str, parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad
            parameter.grad = None
            if keep and gradient is not None:
                keep(name, gradient.flatten())

        trained = {name: parameter for name, parameter in self.policy.named_parameters() if parameter.requires_grad}
        handles = [p.register_post_accumulate_grad_hook(partial(take, name)) for name, p in trained.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.policy.zero_grad()  # of a backward that ran out of memory

    def run_micro_batch(self, tokens: Dataset, rows: Sequence[int], checkpointed_layers: int) -> None:
        """Forward and backward of TRL's loss, as in training, with its offloading; gradients are dropped."""
        batch = self.load_batch(tokens, rows)
        reference = batch["input_ids"].new_zeros(len(rows), dtype=torch.float32)
        batch |= {"ref_chosen_logps": reference, "ref_rejected_logps": reference}
        offloading = self._trainer.maybe_activation_offload_context  # as TRL's training_step
        with self.taking_gradients(), self.checkpointing(checkpointed_layers), offloading:
            with self.autocast():
                loss = self._trainer.trl_loss(self.policy, batch, False)
            loss.backward()

    def score(self, dataset: Dataset, rows: Sequence[int], by_reference: bool = False) -> torch.Tensor:
        """[B, 2] sums of log-probs (nats) of the chosen and rejected responses of these rows by the policy."""
        model = self.reference if by_reference else self.policy
        batch = self.load_batch(dataset, rows)
        return torch.stack(self._trainer.compute_ref_log_probs(model, batch), dim=1)


@contextmanager
def base_model(trainer: SFMDPOTrainer) -> Iterator[BaseModel]:
    """The base model of a trainer, until training begins. The random state is restored afterwards. All ranks must
    enter it together."""
    policy = trainer.ref_model if trainer.is_fsdp_enabled else _place_policy(trainer)
    reference = policy if trainer.ref_model is None else trainer.ref_model
    device = trainer.accelerator.device
    precision = trainer.accelerator.mixed_precision
    launch = (trainer.zero_stage, trainer.is_fsdp_enabled)
    base = BaseModel(trainer.config, trainer.progress, device, precision, *launch, policy, reference, trainer)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield base
    finally:
        if trainer.zero_stage == 3:
            policy.optimizer.destroy()  # otherwise the training engine would gather everything twice
        policy = reference = base.policy = base.reference = None  # only then can they be freed


def _place_policy(trainer: SFMDPOTrainer) -> Any:
    trainer.model.eval()
    if trainer.zero_stage == 3:
        return prepare_deepspeed(trainer.model, trainer.accelerator)  # the hooks that gather the weights
    if trainer.is_deepspeed_enabled and trainer.args.bf16:  # as DeepSpeed's engine will do with the policy
        for parameter in trainer.model.parameters():  # buffers such as RoPE's inv_freq stay fp32
            parameter.data = parameter.data.to(torch.bfloat16)
    return trainer.model.to(trainer.accelerator.device)  # Trainer leaves this to DeepSpeed, which starts later
