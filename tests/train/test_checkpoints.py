"""What a resumed run takes from its configuration, and what from its checkpoint."""

import pytest
import torch
from transformers import Trainer

from tests.train.test_trainer import make_trainer


class Counting(torch.optim.SGD):
    """Keeps a part of its state in its parameter groups, as ScheduleFree does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for group in self.param_groups:
            group["updates"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] += 1
        return super().step(closure)


def test_state_in_parameter_groups_survives_a_resume_and_the_learning_rate_is_the_configured_one(
    tiny_folder, tmp_path, monkeypatch
):
    options = {"momentum": 0.5}

    @staticmethod
    def choose(args, model):
        return Counting, options | {"lr": args.learning_rate}

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", choose)
    fields = ["--lr_scheduler_type=constant", "--save_strategy=steps", "--save_steps=2", "--max_steps"]
    make_trainer(tiny_folder("llama"), tmp_path, *fields, "2").train()
    options["momentum"] = 0.25
    trainer = make_trainer(tiny_folder("llama"), tmp_path, *fields, "3", "--learning_rate=1e-4", "--weight_decay=0.5")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for group in trainer.optimizer.param_groups:
        assert group["updates"] == 3
        assert (group["momentum"], group["lr"]) == (0.25, pytest.approx(1e-4))
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.5
