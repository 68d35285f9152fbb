"""What the base model computes before training is what training computes."""

import torch

from sfm_dpo.train.base_model import base_model
from tests.train.test_trainer import build_trainer


def test_a_measured_micro_batch_offloads_what_training_offloads(tiny_folder, tmp_path):
    """TRL's context, which needs a GPU, is replaced by one that counts the tensors it is given."""
    trainer, _, _ = build_trainer(tiny_folder("llama"), tmp_path, "--gradient_checkpointing=false")
    counts = {"measured": 0, "trained": 0}
    now = "measured"

    def count(tensor: torch.Tensor) -> torch.Tensor:
        counts[now] += tensor.nbytes >= 1024  # TRL leaves smaller ones where they are
        return tensor

    trainer.maybe_activation_offload_context = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with base_model(trainer) as base:
        base.run_micro_batch(trainer.train_dataset, [0, 1, 2, 3], checkpointed_layers=0)
    now = "trained"
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    trainer.current_gradient_accumulation_steps = 1
    trainer.state.global_step = 1  # past the check of step 0
    trainer.training_step(trainer.model, batch)
    assert counts["measured"] == counts["trained"] > 0
