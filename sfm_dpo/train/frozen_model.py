"""The model that scores pairs before training: placed on its device, gathered under ZeRO-3, and freed again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from datasets import Dataset
from trl.models import prepare_deepspeed


@dataclass
class FrozenModel:
    """`model`, ready for forwards on all ranks; None once `frozen_model` has released it."""

    trainer: Any
    model: Any

    def score(self, dataset: Dataset, rows: Sequence[int]) -> torch.Tensor:
        """[B, 2] sums of log-probs (nats) of the chosen and rejected responses of these rows."""
        batch = self.trainer.load_batch(dataset, rows)
        return torch.stack(self.trainer.compute_ref_log_probs(self.model, batch), dim=1)


@contextmanager
def frozen_model(trainer: Any, role: Literal["reference", "policy"]) -> Iterator[FrozenModel]:
    """The reference, or the policy, which must still be the base model. All ranks must enter it together.

    The reference is the policy itself unless a separate model was loaded. Under FSDP2, which splits the policy only
    when training begins, a separate model always exists and takes the policy's place.
    """
    model = trainer.ref_model
    if model is None or (role == "policy" and not trainer.is_fsdp_enabled):
        model = _place_policy(trainer)
    frozen = FrozenModel(trainer, model)
    try:
        yield frozen
    finally:
        if model is not trainer.ref_model and trainer.zero_stage == 3:
            model.optimizer.destroy()  # otherwise the training engine would gather everything twice
        model = frozen.model = None  # only then can it be freed
        if role == "reference" and not trainer.is_fsdp_enabled:
            trainer.release_reference()


def _place_policy(trainer: Any) -> Any:
    trainer.model.eval()
    if trainer.zero_stage == 3:
        return prepare_deepspeed(trainer.model, trainer.accelerator)  # the hooks that gather the weights
    if trainer.is_deepspeed_enabled and trainer.args.bf16:  # as DeepSpeed's engine will do with the policy
        for parameter in trainer.model.parameters():  # buffers such as RoPE's inv_freq stay fp32
            parameter.data = parameter.data.to(torch.bfloat16)
    return trainer.model.to(trainer.accelerator.device)  # Trainer leaves this to DeepSpeed, which starts later
