"""Memory of training: the optimizer's state before the first step, and what ran out of memory.

The first optimizer step holds the largest micro-batch (data/sampler.py), so that what does not fit shows in minutes:
provided that everything else that stays in memory is allocated by then.
"""

import re
import traceback
from pathlib import Path

import torch

from sfm_dpo.common.errors import OutOfMemory
from sfm_dpo.run.folder import DATA, read_mapping
from sfm_dpo.train.position import Position

# torch on CUDA and on CPU, CUDA's libraries, the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
BATCH_SIZES = {
    "training": "per_device_train_batch_size",
    "evaluation": "per_device_eval_batch_size",
    "the reference's forward": "precompute_ref_batch_size",
}
SPLIT = "more GPUs under LAUNCH=zero3 or fsdp2"


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's Adam and AdamW the state that they would allocate in their first update; changes no result.

    An update with gradients and learning rate 0 leaves weights and moments as they are; its count is taken back.
    """
    if optimizer.state or not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def explain_out_of_memory(error: BaseException, position: Position, run: Path) -> OutOfMemory | None:
    """One line about what did not fit and what would; None for any other error.

    Args:
        run: its folder, where fit_memory's choice is.
    """
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not SIGNS.search(str(error)):
        return None
    traceback.clear_frames(error.__traceback__)  # which hold the activations; the report needs memory
    what = f"out of memory in {position.phase}"
    remedy = f"use {SPLIT}"
    if field := BATCH_SIZES.get(position.phase):
        remedy = f"use a smaller {field}, gradient_checkpointing: true, a smaller max_length, or {SPLIT}"
    if position.phase == "training":
        what += f", step {position.step + 1}"
        if smaller := read_mapping(run / DATA).get("fit_memory", {}).get("smaller"):
            remedy = f"the next smaller setting of fit_memory: {smaller}"
    if position.inputs:
        mask = position.inputs["attention_mask"].cpu()
        what += f", micro-batch of {len(mask) // 2} pairs, {int(mask.sum()):,} tokens without padding"
    reason = str(error)[:120].partition("\n")[0] or type(error).__name__
    return OutOfMemory(f"{what} ({reason}); {remedy}", step=position.step)
