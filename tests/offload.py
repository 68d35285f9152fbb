"""An engine of DeepSpeed with the optimizer of ds_config.json or ds_offload.json, in this process."""

import json
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.utils import groups

from sfm_dpo.common.files import PROJECT

FILES = {"zero2": "ds_config.json", "offload": "configs/accelerate/ds_offload.json"}


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(8, 8)
        self.sometimes = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        outputs = self.always(inputs) + self.sometimes(inputs) if both else self.always(inputs)
        return outputs.float().pow(2).mean()


def make_engine(launch: str, model: torch.nn.Module, optimizer: Any, bf16: bool = True) -> Any:
    config = json.loads((PROJECT / FILES[launch]).read_text()) | {"bf16": {"enabled": bf16}, "gradient_clipping": 1.0}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "train_batch_size": 2}
    with (
        patch.dict(deepspeed.ops.__compatible_ops__, {"deepspeed_shm_comm": False}),  # otherwise it is compiled
        patch.object(groups, "_WORLD_GROUP", None),  # it would outlive the process group
    ):
        return deepspeed.initialize(model=model, optimizer=optimizer(model.parameters(), lr=0.1), config=config)[0]


def train_engine(launch: str, steps: list[tuple[bool, float]], after_step=None) -> tuple[list[int], list[float]]:
    """Trains in bf16 on two micro-batches a step: whether they use both layers, and by what the loss is multiplied.
    Returns, of each step, how many updates were skipped so far, and a weight of the layer that not all steps use."""
    torch.manual_seed(0)
    model = Branches()
    engine = make_engine(launch, model, torch.optim.SGD)
    skipped = []
    weights = []
    for both, factor in steps:
        for _ in range(2):
            engine.backward(factor * engine(torch.ones(1, 8, dtype=torch.bfloat16), both))
            engine.step()
        if after_step:
            after_step(engine)
        skipped.append(engine.skipped_steps)
        weights.append(model.sometimes.weight[0, 0].item())
    return skipped, weights
