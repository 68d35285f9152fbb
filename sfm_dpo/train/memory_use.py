"""Memory of training: the optimizer's state before the first step, measured peak beside planned, out of memory.

The first optimizer step holds the largest micro-batch (data/sampler.py), so that what does not fit shows in minutes:
provided that everything else that stays in memory is there by then.
"""

import contextlib
import gc
import logging
import re
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import get_model_param_count

from sfm_dpo.common.distributed import local_world_size
from sfm_dpo.common.errors import OutOfMemory
from sfm_dpo.config import TrainConfig
from sfm_dpo.model.memory import USABLE, Activations, head_bytes, meta_model, model_states, trace_activations
from sfm_dpo.model.packing import find_shared
from sfm_dpo.run.folder import DATA, read_mapping
from sfm_dpo.train.position import Position
from sfm_dpo.train.throughput import peak_memory_gib

PLANNED_FROM = 10_000_000  # parameters: planning takes seconds, and a smaller model fits anywhere
FORWARD_TOKENS = {"cuda": 65_536, "cpu": 4_096}  # at most: matrix products as large are no faster
# torch on CUDA and on CPU, CUDA's libraries, the operating system
SIGNS = re.compile("out of memory|can't allocate memory|Cannot allocate memory|_ALLOC_FAILED")
ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMG]iB)")  # also numpy's
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
REMEDIES = {
    "training": "use a smaller per_device_train_batch_size, gradient_checkpointing: true, a smaller max_length, or "
    "more GPUs under LAUNCH=zero3 or fsdp2",
    "evaluation": "use a smaller per_device_eval_batch_size, or a smaller max_length",
    "loading": "split the weights by LAUNCH=zero3 or fsdp2, or use GPUs with more memory",
    "the reference's forward": "use a smaller precompute_ref_batch_size, or a smaller max_length",
}

log = logging.getLogger(__name__)


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


class FirstStepMemory(TrainerCallback):
    """Logs the peak of a start's first step beside the planned one: what was in use before it, and gradients and
    activations by model/memory.py."""

    def __init__(self, trainer: Any):
        self.trainer, self.logged = trainer, False

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.in_use = memory_in_use()
        self.peak = peak_memory_gib()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, (tokens, responses) = self.trainer, self.trainer.meter.largest
        if self.logged:
            return
        self.logged = True
        line = f"memory of step {state.global_step}, with up to {tokens:,} tokens at once: {peak_memory_gib():.2f} GiB"
        if state.is_world_process_zero and get_model_param_count(trainer.model) >= PLANNED_FROM:
            try:
                activations = activation_bytes(trainer, args.gradient_checkpointing)(tokens, responses)
                planned = (self.in_use + gradient_bytes(trainer) + activations) / 2**30
                line += f", planned {max(self.peak, planned):.2f}"
            except Exception as error:  # an architecture that cannot be traced is no reason to end a run
                line += f", not planned: {error}"
        log.info(line)


def gradient_bytes(trainer: Any) -> int:
    """Gradients on each rank, with the buffers in which they are reduced."""
    trained, ranks = get_model_param_count(trainer.model, trainable_only=True), trainer.accelerator.num_processes
    launch = f"zero{trainer.zero_stage}" if trainer.zero_stage else "fsdp2" if trainer.is_fsdp_enabled else None
    if launch is None:
        return trained * (8 if ranks > 1 else 4)  # fp32; DDP's buckets hold a second copy
    zero = trainer.args.deepspeed_plugin.deepspeed_config["zero_optimization"] if trainer.zero_stage else {}
    states = model_states(meta_model(trainer.bare_model().config), trained, launch, ranks, zero)
    return states["gradients"] + states["buffers"]


def activation_bytes(trainer: Any, checkpointing: bool, saved: bool = True) -> Callable[[int, int], int]:
    """A function: computed tokens of a micro-batch, and how many of them belong to responses -> its peak in bytes,
    with what the forward keeps for the backward if `saved`."""
    args, config = trainer.args, trainer.bare_model().config
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    traced, on_gpu = trace_activations(config, dtype, checkpointing), torch.cuda.is_available()
    if not saved:
        traced = Activations((0, 0), tuple(np.subtract(traced.peak, traced.saved)))
    return lambda tokens, responses: traced.peak_bytes(tokens, head_bytes(config, responses, dtype, on_gpu))


def tokens_of_forward(trainer: Any) -> int:
    """Tokens that a forward without gradients takes at once, by memory: the most, halved until they fit.

    It keeps no activations: at its worst it holds less than a layer's backward does beyond what the forward saved.
    """
    tokens = FORWARD_TOKENS["cpu" if trainer.args.use_cpu else "cuda"]
    if get_model_param_count(trainer.model) >= PLANNED_FROM:
        room = memory_limit(trainer.args) - memory_in_use()
        try:
            needed = activation_bytes(trainer, True, saved=False)
        except Exception as error:
            log.info(f"the reference's forward is not planned: {error}")
            return tokens // 8
        while tokens > 1 and needed(tokens, tokens) > room:
            tokens //= 2
    return tokens


def memory_in_use() -> int:
    """Bytes of this process, on its GPU or resident."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def memory_limit(args: TrainConfig) -> float:
    """Bytes that a process may take: `memory_gib`, or a share of its GPU, or without one of the node."""
    if args.memory_gib:
        return args.memory_gib * 2**30
    if not args.use_cpu:
        return USABLE * torch.cuda.mem_get_info()[1]
    return USABLE * psutil.virtual_memory().total / local_world_size()


def free_memory() -> int:
    """Bytes that this process can still allocate on its GPU, or without one on the machine."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, (limit, _) = psutil.virtual_memory().available, resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else min(free, limit - psutil.Process().memory_info().vms)


def explain_out_of_memory(error: BaseException, position: Position, trainer: Any) -> OutOfMemory | None:
    """One line about what did not fit and what would; None for any other error. Frees what the failed step held.

    Args:
        position: has the micro-batch in hand.
        trainer: None before there is one.
    """
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not SIGNS.search(str(error)):
        return None
    asked, free = ASKED.search(str(error)), 0
    with contextlib.suppress(MemoryError):
        free = free_memory()
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    what, amount = f"out of memory in {position.phase}", ""
    if position.phase == "training":
        what += f", step {position.step + 1}"
    if asked:
        amount = f": {float(asked[1]) * UNITS[asked[2]] / 2**30:.2f} GiB asked, {free / 2**30:.2f} GiB free"
    remedy = REMEDIES[position.phase]
    if position.inputs:
        ids, mask, completion = (
            position.inputs[name].cpu() for name in ("input_ids", "attention_mask", "completion_mask")
        )
        tokens = int(mask.sum()) if trainer is None or trainer.packed else mask.numel()
        if trainer is not None and trainer.prefix_sharing:
            tokens -= int(find_shared(ids, mask, completion == 1).sum())
        what += f", micro-batch of {len(mask) // 2} pairs and {tokens:,} tokens"
        if position.phase == "training" and trainer is not None:
            with contextlib.suppress(Exception):  # too little is left even to compute it; torch then raises anything
                chosen = read_mapping(Path(trainer.args.output_dir) / DATA).get("fit_memory", {})
                if smaller := chosen.get("smaller"):
                    remedy = f"the next smaller setting of fit_memory: {smaller}"
                elif fitting := what_fits(trainer, position.inputs):
                    remedy = f"by the memory model these fit: {fitting}"
    return OutOfMemory(f"{what}{amount}; {remedy}", step=position.step)


def what_fits(trainer: Any, inputs: dict[str, torch.Tensor]) -> str:
    """The settings nearest to these under which such a micro-batch would fit; empty where none would.

    Args:
        inputs: attention_mask and completion_mask [2B, L], chosen sequences first.
    """
    trainer.model.zero_grad()
    room = USABLE * free_memory() - gradient_bytes(trainer)
    mask, completion = (inputs[name].cpu() for name in ("attention_mask", "completion_mask"))
    computed = mask if trainer.packed else torch.ones_like(mask)
    tokens, responses = (part.sum(dim=1).view(2, -1).sum(dim=0) for part in (computed, completion))  # [B]
    longest, pairs, now = tokens.argsort(descending=True), len(tokens), trainer.args.gradient_checkpointing
    fitting = []
    for on in dict.fromkeys((now, True)):
        needed, setting = activation_bytes(trainer, on), "" if on == now else "gradient_checkpointing: true"
        sizes = [n for n in range(pairs - (on == now), 0, -1) if pairs % n == 0]
        held = [n for n in sizes if needed(int(tokens[longest[:n]].sum()), int(responses[longest[:n]].sum())) <= room]
        if held:
            size = f"per_device_train_batch_size {held[0]}" if held[0] < pairs else ""
            fitting.append(" with ".join(filter(None, (setting, size))))
    lengths = [int(mask.sum(dim=1).max()) // n for n in (2, 4, 8, 16)]
    if not fitting and (held := [n for n in lengths if needed(2 * n, 2 * n) <= room]):
        fitting = [f"max_length {held[0]} with per_device_train_batch_size 1 and gradient_checkpointing: true"]
    return "; ".join(fitting)
