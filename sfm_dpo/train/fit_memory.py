"""Fits a run to its memory: chooses the pairs per device and the number of checkpointed layers before training.

Both follow from the largest micro-batch (data/sampler.py), which runs first, and from the memory that the planner
computes for it (model/memory.py). An out-of-memory error names a setting that would fit.
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

from sfm_dpo.common.distributed import broadcast, is_main_process, main_process_first
from sfm_dpo.common.errors import OutOfMemory, UserError
from sfm_dpo.config import Config
from sfm_dpo.data.sampler import list_micro_batches
from sfm_dpo.data.tokenization import Lengths
from sfm_dpo.model.memory import MemoryPlanner, choose_setting, memory_limit
from sfm_dpo.model.sharding import launched_with
from sfm_dpo.run.folder import DATA, read_mapping
from sfm_dpo.train.callbacks import Position

log = logging.getLogger(__name__)

# Messages of torch on CUDA and on CPU, of CUDA's libraries, and of the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
# By phase, fields that may change when the run resumes (config_effects.py)
REMEDIES = {
    "training": "use a smaller per_device_train_batch_size or gradient_checkpointing: true",
    "evaluation": "use a smaller per_device_eval_batch_size",
    "the reference's forward": "use precompute_ref_batch_size: 1",
}
NEW_RUN = "in a new output_dir, use a smaller max_length or model, or more GPUs under LAUNCH=zero3 or fsdp2"


def fit_memory(config: Config, dataset: Dataset, shape: PretrainedConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Chooses on rank 0 the fields that the configuration leaves open, sets them in `config.train` on all ranks, and
    returns them for data.json. `kept`, the choice of the resumed run or empty, is used again if it fits. Raises
    UserError if no setting fits."""
    choice = broadcast(main_process_first(lambda: _choose(config, dataset, shape, kept)))
    args = config.train
    args.per_device_train_batch_size = choice["per_device"]
    args.gradient_accumulation_steps = args.global_batch_size // (choice["per_device"] * args.world_size)
    if "gradient_checkpointing" in config.fitted:
        every = choice["every_n_layers"]
        kwargs = {"use_reentrant": False, "every_n_layers": every} if every else None
        args.gradient_checkpointing = args.activation_checkpointing = every > 0
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = kwargs
    return choice


def _choose(config: Config, dataset: Dataset, shape: PretrainedConfig, kept: dict[str, Any]) -> dict[str, Any]:
    if not is_main_process():
        return {}
    args = config.train
    planner = MemoryPlanner(config, shape, args.world_size, half=args.bf16 or args.fp16, on_gpu=not args.use_cpu)
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
    lengths = Lengths.of(dataset).truncate(args.max_length)
    micro_batches = list_micro_batches(config, lengths, planner.prefix_sharing, args.world_size)
    settings = planner.list_settings(micro_batches, states)
    setting = choose_setting(settings, limit, config)
    for other in settings:  # all are valid for this number of processes
        is_kept = (other.per_device, other.every_n_layers) == (kept.get("per_device"), kept.get("every_n_layers"))
        if is_kept and other.bytes <= limit:
            setting = other
    if setting.bytes > limit:
        raise UserError(
            f"fit_memory true: no setting fits in {limit / 2**30:.2f} GiB; the smallest is {setting}; use a smaller "
            "max_length, more GPUs, or LAUNCH=zero3"
        )
    log.info(f"fit_memory: {setting}, of {limit / 2**30:.2f} GiB; {setting.work - 1:.0%} recomputation and waiting")
    smaller = next((other.options for other in settings if other.bytes < setting.bytes), None)
    return asdict(setting) | {"limit": int(limit), "smaller": smaller}


def explain_out_of_memory(error: BaseException, position: Position, run: Path) -> OutOfMemory | None:
    """One line that says what did not fit and what would; None for any other error. `run`: the run's folder."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not SIGNS.search(str(error)):
        return None
    traceback.clear_frames(error.__traceback__)  # they hold the activations; the report needs memory
    what = f"out of memory in {position.phase}"
    remedies = [REMEDIES[position.phase]] if position.phase in REMEDIES else []
    if position.phase == "training":
        what += f", step {position.step + 1}"
        if fitted := read_mapping(run / DATA).get("fit_memory"):
            smaller = fitted["smaller"]
            remedies = [f"use the next smaller setting of fit_memory: {smaller}"] if smaller else []
    if position.inputs:
        mask = position.inputs["attention_mask"].cpu()
        what += f", micro-batch of {len(mask) // 2} pairs, {int(mask.sum()):,} tokens without padding"
    reason = str(error)[:120].partition("\n")[0] or type(error).__name__
    return OutOfMemory(f"{what} ({reason}); {'; or '.join([*remedies, NEW_RUN])}", step=position.step)
