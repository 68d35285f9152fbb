"""The micro-batch: pairs per device and checkpointed layers, planned by arithmetic, then measured until one fits.

`calibrate` is the one decision of what a run uses: the path (choose_path.py), then the micro-batch on it.
"""

import ctypes
import logging
import math
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import release_memory
from datasets import Dataset

from sfm_dpo.calibration.choose_path import (
    KernelError,
    choose_path,
    keeps_path,
    measure_seconds,
    select_average,
    try_kernel,
)
from sfm_dpo.common.distributed import gather_values, is_on_gpu, launch_name
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import format_table
from sfm_dpo.common.process import available_memory, resident_bytes
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.memory.asked import Asked
from sfm_dpo.memory.host import update_seconds
from sfm_dpo.memory.planner import Candidate, MemoryPlanner, memory_limit
from sfm_dpo.model.flops import peak_flops
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.model.sharding import suggest_sharding
from sfm_dpo.run.facts import Calibration, ForwardPath, MicroBatch
from sfm_dpo.run.reader import describe_calibration
from sfm_dpo.run.start import Before
from sfm_dpo.train.base_model import BaseModel
from sfm_dpo.train.callbacks import is_out_of_memory
from sfm_dpo.train.metrics import peak_memory_gib

log = logging.getLogger(__name__)

ROUNDS = 5  # settings that are tried
AIM = 0.97  # of the limit, until a setting has been measured to fit
# Measured over planned activations on a CPU before the first measurement: up to 1.9 was seen (SmolLM2-135M), and a
# process that exceeds its memory there is killed
CPU_RATIO = 2.0


def calibrate(
    base: BaseModel, tokens: Dataset, asked: Asked, before: Before
) -> tuple[ForwardPath, MicroBatch, Calibration]:
    """The path and the micro-batch that are fastest, as measured on the model, the pairs and the device; a resumed run
    keeps its own where that is possible. All ranks must call it, and get the same. Raises UserError if a path or
    kernel that is asked for differs from the padded one by more than noise, and if no micro-batch fits into memory."""
    facts = before.facts
    keeps = keeps_path(asked, before) and keeps_micro_batch(base.config.train, asked, before)
    if keeps and facts.path and facts.micro_batch:
        return facts.path, facts.micro_batch, facts.calibration
    log.info("calibration: measuring noise, memory and speed of this model on these pairs")
    begin = time.monotonic()
    resident = max(gather_values(int(reset_peak_memory())))  # before anything has run
    remedy = "choose another model, set flash_attention: fa2, or report it upstream"
    failing = user_input("calibration: the model's own code fails", remedy)
    broken: list[str] = []  # kernels
    with failing, base.progress.during("calibration"):
        while True:
            path, compared = choose_path(base, tokens, asked, before, broken)
            try:
                micro_batch, measured = choose_micro_batch(base, tokens, path, asked, resident)
                break
            except KernelError as error:  # on rows longer than those compared
                log.warning(f"calibration: {error}; it is not used")
                broken.append(path.kernel)
    found = replace(measured, noise=compared.noise, ratios=compared.ratios, kernels=compared.kernels)
    found = replace(found, seconds=time.monotonic() - begin)
    reset_peak_memory()  # otherwise training's first log would show that of a setting that is not used
    log.info(f"calibration\n{format_table(describe_calibration(found))}")
    return path, micro_batch, found


def keeps_micro_batch(args: TrainConfig, asked: Asked, before: Before) -> bool:
    """Whether a run keeps the micro-batch of the run that it resumes from: there is one, no other is asked for,
    and the memory that it took is there. All ranks must call it."""
    was = before.facts.micro_batch
    if was is None:
        return False
    size = before.facts.calibration.measured_bytes or before.facts.calibration.planned_bytes
    if size and size > find_limit(args, asked):
        log.info(f"the settings of {before.checkpoint} need {size / 2**30:.2f} GiB: others are chosen")
        return False
    return asked.pairs in (None, was.pairs) and asked.layers in (None, was.checkpointed_layers)


def choose_micro_batch(
    base: BaseModel, tokens: Dataset, path: ForwardPath, asked: Asked, resident: int
) -> tuple[MicroBatch, Calibration]:
    """The micro-batch of least work that fits, measured or, where weights are sharded, planned; and its memory and
    speed. `resident`: bytes that each process took before. All ranks must call it. Raises UserError if none fits, and
    KernelError for a kernel that nobody has asked for."""
    args = base.config.train
    is_measured = not (base.is_sharded or args.preflight_only)
    plan = plan_memory(base, tokens, path, asked, resident)
    found = Calibration()
    if plan is None:
        assert asked.pairs and asked.layers is not None
        micro_batch = MicroBatch(asked.pairs, asked.layers)
    else:
        candidate = plan.planner.choose(plan.limit, plan.states)
        size = None
        if is_measured:
            measure = partial(measure_memory, base, tokens, plan)
            if path.kernel != "fa2" and not asked.kernel:  # which may fail on rows longer than those compared
                measure = partial(try_kernel, path.kernel, measure)
            with base.computing(path):
                candidate, size = find_setting(plan, lambda setting: max(gather_values(measure(setting))))
        elif candidate.bytes > plan.limit and not (args.preflight_only or asked.is_complete):
            plan.refuse(f"planned, {candidate}")
        else:
            log.info(f"planned, not measured: {candidate}")
        micro_batch = MicroBatch(candidate.per_device, candidate.checkpointed_layers)
        planned = plan.states + candidate.activations
        found = Calibration(planned_bytes=planned, measured_bytes=size, smaller=candidate.smaller or "")
    if is_measured:
        with base.computing(path):
            found = replace(found, **measure_speed(base, tokens, path, micro_batch))
    return micro_batch, found


@dataclass(frozen=True)
class MemoryPlan:
    """What memory a run may use, and what training will need of it; the same on all ranks."""

    planner: MemoryPlanner
    states: int  # bytes of weights, gradients, optimizer and buffers, on a CPU also of the process
    absent: int  # of these, bytes that training will allocate beyond what it frees
    limit: int  # bytes that each process may use

    def refuse(self, smallest: str) -> NoReturn:
        """Raises the UserError for settings of which none fits; names the fields that leave no smaller one."""
        args = self.planner.config.train
        names = ("per_device_train_batch_size", "gradient_checkpointing", "checkpointed_layers")
        given = [name for name in names if vars(args)[name] is not None]
        what = f"with {' and '.join(given)} as set, " if given else ""
        remedy = f"remove {'these fields' if len(given) > 1 else given[0]}, or " if given else ""
        raise UserError(
            f"memory: {what}no setting fits in {self.limit / 2**30:.2f} GiB; the smallest is {smallest}; "
            f"{remedy}use a smaller max_length, or more GPUs{suggest_sharding()}"
        )


def plan_memory(base: BaseModel, tokens: Dataset, path: ForwardPath, asked: Asked, resident: int) -> MemoryPlan | None:
    """The plan by which memory decides; None if pairs and layers are set, on a CPU or for a model that can neither be
    traced nor measured. One that can be measured gets a rough plan; else UserError is raised. All ranks must call."""
    args = base.config.train
    if args.use_cpu and asked.is_complete:
        return None
    model_config = load_model_config(base.config)
    lengths = Lengths.of(tokens).truncate(args.max_length)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    packing = (path.packed, path.prefix_sharing)
    options: dict[str, Any] = {"dtype": dtype, "on_gpu": not args.use_cpu, "launch": launch_name()}
    planner = MemoryPlanner(base.config, model_config, asked, lengths, args.world_size, *packing, **options)
    try:
        _ = planner.activations
    except UserError as error:
        if base.is_sharded and asked.is_complete:
            return None
        if base.is_sharded:
            raise UserError(f"{error}; set per_device_train_batch_size and gradient_checkpointing") from error
        log.info(f"{error}; one pair is measured first")
        planner.guess_activations()
    zero = args.deepspeed_plugin.deepspeed_config["zero_optimization"] if args.deepspeed_plugin else {}
    parts = planner.states(zero)
    absent = parts["gradients"] + parts["optimizer"] + parts["buffers"]
    if args.use_cpu and planner.launch == "offload":
        absent += planner.host_bytes()
    absent = max(0, absent - base.freed_bytes())
    # On a CPU weights, a live reference and the rest of the process are there
    states = absent + resident if args.use_cpu else sum(parts.values())
    return MemoryPlan(planner, states, absent, find_limit(args, asked))


def find_limit(args: TrainConfig, asked: Asked) -> int:
    """Bytes that a process may use of its device, the least of all ranks; all of it if pairs and layers are set."""
    if args.use_cpu:  # other processes use some of the machine's memory, and so does this one already
        total = resident_bytes() + available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        total = torch.cuda.mem_get_info()[1]
    is_decided = asked.is_complete and not args.memory_gib
    return min(gather_values(int(total if is_decided else memory_limit(total, args.memory_gib))))


def find_setting(plan: MemoryPlan, measure: Callable[[Candidate], float]) -> tuple[Candidate, int]:
    """The setting of least work that fits, and its bytes by `measure`. Raises UserError if none fits.

    The next one to try is chosen by the largest ratio of measured to planned activations so far. Whatever has as many
    tokens and no more checkpointed layers than a setting that did not fit is never tried.
    """
    ratio = 1.0 if plan.planner.on_gpu else CPU_RATIO
    fitting: dict[Candidate, int] = {}
    failed: dict[Candidate, str] = {}  # with what was measured
    candidate = plan.planner.choose(plan.limit if plan.planner.is_traced else 0, plan.states, ratio)
    while candidate not in failed and len(fitting) + len(failed) < ROUNDS:
        size = measure(candidate)
        shown = f"{size / 2**30:.2f} GiB" if math.isfinite(size) else "more than there is"
        log.info(f"calibration: {candidate}; measured: {shown} of {plan.limit / 2**30:.2f} GiB")
        activations = max(1.0, size - plan.states)
        if not math.isfinite(size):
            activations = 1.1 * max(plan.limit - plan.states, candidate.activations)
        measured = activations / candidate.activations
        ratio = max(ratio, measured) if fitting or failed else measured
        if size <= plan.limit:
            fitting[candidate] = int(size)
        else:
            failed[candidate] = shown
        aim = AIM * plan.limit
        if len(failed) == ROUNDS - 1:
            aim = 0  # the smallest of those that are left
        elif fitting and plan.planner.on_gpu:
            aim = plan.limit
        candidate = plan.planner.choose(aim, plan.states, ratio, [*failed])
        if fitting and candidate.work >= min(known.work for known in fitting):
            break
    if not fitting:
        smallest, shown = min(failed.items(), key=lambda item: item[0].activations)
        plan.refuse(f"{smallest.setting}; measured: {shown}")
    best = min(fitting, key=lambda candidate: candidate.work)
    return best, fitting[best]


def measure_memory(base: BaseModel, tokens: Dataset, plan: MemoryPlan, candidate: Candidate) -> float:
    """Bytes of this process at the peak of the largest micro-batch, with training's states; inf if out of memory."""
    rows = plan.planner.sampler.largest_micro_batch(candidate.per_device)
    release_memory()
    try:
        # A CPU's pages would be taken only when they are written
        reserved: Any = torch.empty(plan.absent if plan.planner.on_gpu else 0, dtype=torch.uint8, device=base.device)
        reset_peak_memory()
        base.run_micro_batch(tokens, rows.tolist(), candidate.checkpointed_layers)
        return peak_memory_gib() * 2**30 + plan.absent - reserved.nbytes
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return math.inf


def reset_peak_memory() -> float:
    """Begins a new peak; returns the bytes that are allocated on the GPU or, without one, resident."""
    if is_on_gpu():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(AttributeError):  # glibc keeps what is freed, so it would count as used; others have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # then the peak since the start counts
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak resident set (proc(5))
    return resident_bytes()


def measure_speed(base: BaseModel, tokens: Dataset, path: ForwardPath, micro_batch: MicroBatch) -> dict[str, Any]:
    """For `Calibration`: what an average micro-batch takes, and the hours that follow."""
    args = base.config.train
    pairs = micro_batch.pairs
    sampler = base.make_sampler(tokens, path.packed, path.prefix_sharing, pairs)
    rows = select_average(sampler)
    seconds = measure_seconds(base, partial(base.run_micro_batch, tokens, rows, micro_batch.checkpointed_layers))
    milliseconds = 1000 * seconds
    forward = measure_seconds(base, partial(base.score, tokens, rows))
    reference_hours = len(sampler) / pairs / args.world_size * forward / 3600
    if not args.precompute_ref_log_probs:  # the reference is a part of each step, also of its FLOPs
        seconds += forward
        reference_hours = 0.0
    counts = base.collate(tokens, rows)["counts"]
    peak = peak_flops(torch.cuda.get_device_name()) if base.device.type == "cuda" else None
    steps = args.count_steps(len(sampler))
    accumulation = micro_batch.count_accumulation(args.global_batch_size, args.world_size)
    update = 0.0  # seconds; on a GPU next to nothing
    if launch_name() == "offload":
        trained = sum(p.numel() for p in base.policy.parameters() if p.requires_grad)
        update = update_seconds(trained, args.world_size)  # not measured: here gradients are dropped
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": counts["tokens"] / seconds,
        "mfu": counts["flops"] / seconds / peak if peak else None,
        "hours": steps * (accumulation * seconds + update) / 3600,
        "reference_hours": reference_hours,
    }
