"""Fits a run to its memory: chooses the pairs per device and the number of checkpointed layers before training.

Both follow from the memory of the largest micro-batch (memory/planner.py), which runs first. An out-of-memory error
names a setting that would fit.
"""

import logging
import os
import re
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import broadcast, is_main_process, launched_with, main_process_first
from sfm_dpo.common.errors import OutOfMemory, UserError
from sfm_dpo.config import Config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.memory.planner import MemoryPlanner, memory_limit
from sfm_dpo.model.attention import measured_here
from sfm_dpo.run.checkpoint import COMPLETE, checkpoints
from sfm_dpo.run.files import RESOLVED_CONFIG, read_file
from sfm_dpo.run.folder import DATA
from sfm_dpo.train.callbacks import Progress

log = logging.getLogger(__name__)

# Messages of torch on CUDA and on CPU, of CUDA's libraries, and of the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
# By phase, fields that may change when the run resumes (config_effects.py)
REMEDIES = {
    "training": "use a smaller per_device_train_batch_size",
    "evaluation": "use a smaller per_device_eval_batch_size",
    "the reference's forward": "use precompute_ref_batch_size: 1",
}
NEW_RUN = "in a new output_dir, use a smaller max_length or model, or more GPUs under LAUNCH=zero3 or fsdp2"


def fit_memory(config: Config, dataset: Dataset, model_config: PretrainedConfig, earlier: dict) -> dict[str, Any]:
    """The setting for the fields that the configuration leaves open, for data.json, the same on all ranks. `earlier`,
    that of the resumed run or empty, is chosen again if it fits. Raises UserError if no setting fits."""

    def choose() -> dict[str, Any]:
        return _choose(config, dataset, model_config, earlier) if is_main_process() else {}

    return broadcast(main_process_first(choose))


def _choose(config: Config, dataset: Dataset, model_config: PretrainedConfig, earlier: dict) -> dict[str, Any]:
    args = config.train
    lengths = Lengths.of(dataset).truncate(args.max_length)
    dtype = torch.bfloat16 if args.bf16 or args.fp16 else torch.float32
    planner = MemoryPlanner(config, model_config, lengths, args.world_size, dtype, on_gpu=not args.use_cpu)
    launch = "fsdp2" if launched_with() == "fsdp" else "none"
    zero = {}
    if args.deepspeed_plugin is not None:
        launch = f"zero{args.deepspeed_plugin.zero_stage}"
        zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"]
    states = sum(planner.states(launch, zero).values())
    if args.use_cpu:  # the limit is a share of the machine's memory, and this process already uses some
        states += psutil.Process().memory_info().rss
        total = psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.mem_get_info()[1]
    limit = memory_limit(total, args.memory_gib)
    same = (earlier["per_device"], earlier.get("checkpointed_layers", -1)) if earlier else None
    ratio = float(measured_here().get("memory_ratio", 1))
    setting = planner.choose(limit, states, ratio, same)
    if setting.bytes > limit:
        raise UserError(
            f"fit_memory true: no setting fits in {limit / 2**30:.2f} GiB; the smallest is {setting}; use a smaller "
            "max_length, more GPUs, or LAUNCH=zero3"
        )
    log.info(f"fit_memory: {setting}, of {limit / 2**30:.2f} GiB; {setting.work - 1:.0%} recomputation and waiting")
    return asdict(setting) | {"limit": int(limit)}


def explain_out_of_memory(error: BaseException, progress: Progress, run: Path) -> OutOfMemory | None:
    """One line that says what did not fit and what would; None for any other error. `run`: the run's folder."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not SIGNS.search(str(error)):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold the activations; the report needs memory
    what = f"out of memory in {progress.phase}"
    remedies = [REMEDIES[progress.phase]] if progress.phase in REMEDIES else []
    if progress.phase == "training":
        what += f", step {progress.step + 1}"
        settings = read_file(run / DATA).get("settings", {})
        is_fixed = any(
            read_file(folder / COMPLETE).get("micro_batch") for folder in checkpoints(run)
        )  # balancing loss
        if settings.get("micro_batch") == 1 or is_fixed:
            remedies = []
        if read_file(run / RESOLVED_CONFIG).get("checkpointed_layers") is not None:
            remedies.append("remove checkpointed_layers")
        elif not settings.get("checkpointed_layers"):
            remedies.append("set gradient_checkpointing: true")
        if not is_fixed and (fitted := settings.get("fit_memory")):
            smaller = fitted["smaller"]
            remedies = [f"use the next smaller setting of fit_memory: {smaller}"] if smaller else []
    if progress.inputs:
        mask = progress.inputs["attention_mask"].cpu()
        what += f", micro-batch of {len(mask) // 2} pairs, {int(mask.sum()):,} tokens without padding"
    reason = str(error)[:120].partition("\n")[0] or type(error).__name__
    return OutOfMemory(f"{what} ({reason}); {'; or '.join([*remedies, NEW_RUN])}", step=progress.step)
