"""Fits a run to its memory: chooses the pairs per device and the checkpointed layers that are not set.

Both follow from the memory of the largest micro-batch (memory/planner.py), which runs first. An out-of-memory error
names a setting that would fit.
"""

import logging
import os
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast, launched_with, on_main_process
from sfm_dpo.common.errors import OutOfMemory, UserError
from sfm_dpo.config.fields import Config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.memory.planner import Candidate, MemoryPlanner, asked_layers, asked_pairs, memory_limit
from sfm_dpo.run.folder import DATA, read_file
from sfm_dpo.train.callbacks import Progress

log = logging.getLogger(__name__)

# Messages of torch on CUDA and on CPU, of CUDA's libraries, and of the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
# By phase, fields that may change when the run resumes (config/effects.py)
REMEDIES = {
    "training": "use a smaller per_device_train_batch_size, or set gradient_checkpointing: true",
    "evaluation": "use a smaller per_device_eval_batch_size",
    "the reference's forward": "use precompute_ref_batch_size: 1",
}
NEW_RUN = "in a new output_dir, use a smaller max_length or model, or more GPUs under LAUNCH=zero3 or fsdp2"


@dataclass
class MemoryPlan:
    """What memory a run may use, and what training will need of it."""

    planner: MemoryPlanner | None  # on rank 0
    states: int  # bytes of weights, gradients, optimizer and buffers, on a CPU also of the process
    absent: int  # of these, bytes that training will allocate
    limit: int  # bytes that each process may use

    def choose(self, states: int, ratio: float = 1.0, earlier: tuple[int, int] | None = None) -> Candidate:
        """`MemoryPlanner.choose` on all ranks; `ratio`: of activations over those that are planned."""
        choice: Any = self.planner and self.planner.choose(self.limit, states, ratio, earlier)
        return broadcast(choice)

    def refuse(self, candidate: Candidate) -> NoReturn:
        raise UserError(
            f"memory: no setting fits in {self.limit / 2**30:.2f} GiB; the smallest is {candidate}; use a smaller "
            "max_length, more GPUs, or LAUNCH=zero3"
        )


def plan_memory(
    config: Config, dataset: Dataset, model_config: PretrainedConfig, packed: bool, prefix_sharing: bool
) -> MemoryPlan:
    """All ranks must call it."""
    args = config.train
    planners: list[MemoryPlanner] = []

    def plan() -> MemoryPlan:
        lengths = Lengths.of(dataset).truncate(args.max_length)
        dtype = torch.bfloat16 if args.bf16 or args.fp16 else torch.float32
        packing = (packed, prefix_sharing)
        planner = MemoryPlanner(config, model_config, lengths, args.world_size, *packing, dtype, not args.use_cpu)
        planners.append(planner)
        launch = "fsdp2" if launched_with() == "fsdp" else "none"
        zero = {}
        if args.deepspeed_plugin is not None:
            launch = f"zero{args.deepspeed_plugin.zero_stage}"
            zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"]
        parts = planner.states(launch, zero)
        states = sum(parts.values())
        if args.use_cpu:  # other processes use some of the machine's memory, and so does this one already
            used = psutil.Process().memory_info().rss
            states += used
            total = used + psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        else:
            total = torch.cuda.mem_get_info()[1]
        absent = parts["gradients"] + parts["optimizer"] + parts["buffers"]
        layers = model_config.get_text_config().num_hidden_layers
        is_asked = asked_pairs(args) is not None and asked_layers(args, layers) is not None
        limit = memory_limit(total, args.memory_gib)
        return MemoryPlan(None, states, absent, int(total if is_asked and not args.memory_gib else limit))

    planned = on_main_process(plan)
    return replace(planned, planner=planners[0]) if planners else planned


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(SIGNS.search(str(error)))


def explain_out_of_memory(error: BaseException, progress: Progress, run: Path) -> OutOfMemory | None:
    """One line that says what did not fit and what would; None for any other error. `run`: the run's folder."""
    if not is_out_of_memory(error):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold the activations; the report needs memory
    what = f"out of memory in {progress.phase}"
    remedies = [REMEDIES[progress.phase]] if progress.phase in REMEDIES else []
    if progress.phase == "training":
        what += f", step {progress.step + 1}"
        if chosen := read_file(run / DATA).get("settings", {}).get("memory"):
            smaller = chosen["smaller"]
            remedies = [f"use the next smaller setting: {smaller}"] if smaller else []
    if progress.inputs:
        mask = progress.inputs["attention_mask"].cpu()
        what += f", micro-batch of {len(mask) // 2} pairs, {int(mask.sum()):,} tokens without padding"
    reason = str(error)[:120].partition("\n")[0] or type(error).__name__
    return OutOfMemory(f"{what} ({reason}); {'; or '.join([*remedies, NEW_RUN])}", step=progress.step)
