"""The planner of memory: which settings of a run fit, and which of them means the least work.

A setting is the number of pairs in a micro-batch and how many layers are checkpointed. Recomputation adds work, and so
does waiting, which grows as a micro-batch holds fewer pairs.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from transformers import PretrainedConfig
from trl import get_peft_config

from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.model.memory import Activations, head_bytes, meta_model, trace_activations
from sfm_dpo.model.packing import why_not_shared
from sfm_dpo.model.sharding import blocks

EVERY_N_LAYERS = (0, 8, 4, 3, 2, 1)  # transformers' every_n_layers: which layers are checkpointed; 0: none
USABLE = 0.9  # of a GPU's memory; the rest: CUDA's context, NCCL, and what the allocator cannot join


def memory_limit(total: float, memory_gib: float | None) -> float:
    """Bytes that a process may take of the `total` of its device: the field `memory_gib`, or a share."""
    return memory_gib * 2**30 if memory_gib else USABLE * total


class MicroBatch(NamedTuple):
    """The largest micro-batch of a run with so many pairs per device."""

    per_device: int
    tokens: int  # computed, padding included where there is any
    responses: int  # tokens that reach the LM head
    waiting: float  # work of the slowest rank over that of the mean one


@dataclass(frozen=True)
class Setting:
    """A choice and what it costs."""

    per_device: int  # pairs in a micro-batch
    every_n_layers: int  # every n-th layer is checkpointed; 0: none
    tokens: int  # computed in the largest micro-batch
    bytes: int  # of a process at its peak
    work: float  # against that of a run without recomputation whose ranks never wait

    @property
    def layers(self) -> str:
        """Which layers are checkpointed."""
        return {0: "no layer", 1: "all layers"}.get(self.every_n_layers, f"1 of {self.every_n_layers} layers")

    @property
    def options(self) -> str:
        """That train_dpo.py takes for it."""
        options = f"--per_device_train_batch_size {self.per_device} --gradient_checkpointing {self.every_n_layers > 0}"
        if self.every_n_layers > 1:
            kwargs = json.dumps({"use_reentrant": False, "every_n_layers": self.every_n_layers})
            options += f" --gradient_checkpointing_kwargs '{kwargs}'"
        return options

    def __str__(self) -> str:
        return (
            f"{self.per_device} pairs per device, {self.layers} checkpointed: {self.bytes / 2**30:.2f} GiB at the "
            f"largest micro-batch of {self.tokens:,} tokens"
        )


class MemoryPlanner:
    """Memory of a run on `gpus` GPUs, or processes on CPUs; `half`: in 16 bit; `shape`: the model's configuration."""

    def __init__(self, config: Config, shape: PretrainedConfig, gpus: int, half: bool = True, on_gpu: bool = True):
        self.config = config
        self.shape = shape
        self.gpus = gpus
        self.half = half
        self.on_gpu = on_gpu
        self.dtype = torch.bfloat16 if half else torch.float32
        self.model = meta_model(shape)
        self.parameters = self.model.num_parameters()
        self.adapter = None
        if lora := get_peft_config(config.model):
            with torch.device("meta"):
                self.adapter = get_peft_model(meta_model(shape), lora)
        self.trained = (self.adapter or self.model).num_parameters(only_trainable=True)
        obstacle = why_not_shared(self.model, config.train.padding_free, config.train.router_aux_loss_coef)
        self.prefix_sharing = not obstacle and config.train.prefix_sharing is not False

    def states(self, launch: str, zero: dict[str, Any]) -> dict[str, int]:
        """Bytes on each GPU of weights, gradients, AdamW's optimizer state, buffers, and a live reference model.

        `launch`: zero2, zero3, fsdp2, or none (DDP too); `zero`: `zero_optimization` of the DeepSpeed file.

        ZeRO: as DeepSpeed's estimators (estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs):
        16-bit weights, gradients in 16 and 32 bit, fp32 weights and two moments. FSDP2: fp32 weights, gradients and
        moments. None: the same undivided, autocast's 16-bit copy of the weights, DDP's buckets of gradients.
        Buffers: ZeRO's buckets of gradients, two in flight under overlap_comm; under FSDP2 a 16-bit copy of two
        gathered blocks, as much for gradients on their way, and the embedding or head.
        """
        gpus = self.gpus
        size = 2 if self.half else 4
        total = self.parameters
        if self.adapter:  # comes on top
            total += self.trained
        weights, gradients, optimizer = {  # bytes a parameter, all of them and the trained ones
            "zero2": (size, (6 if self.half else 4) / gpus, 12 / gpus),
            "zero3": (size / gpus, 4 / gpus, 12 / gpus),
            "fsdp2": (4 / gpus, 4 / gpus, 8 / gpus),
            "none": (6 if self.half else 4, 4 if gpus == 1 else 8, 8),
        }[launch]
        largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in self.model.modules())
        gathered = 2 * size * largest if launch == "zero3" else 0
        buffers = 0
        if launch == "fsdp2":
            largest_block = max(sum(p.numel() for p in block.parameters()) for block in blocks(self.model))
            buffers = 4 * size * largest_block + size * largest
        elif launch != "none":
            bucket = zero.get("reduce_bucket_size", "auto")
            if bucket == "auto":  # as transformers fills it in
                bucket = self.shape.get_text_config().hidden_size ** 2
            buffers = size * min(int(bucket), self.trained) * (2 if zero.get("overlap_comm") else 1)
        states = {
            "weights": int(weights * total) + gathered,
            "gradients": int(gradients * self.trained),
            "optimizer": int(optimizer * self.trained),
            "buffers": buffers,
        }
        if not self.adapter and not self.config.train.precompute_ref_log_probs:
            states["reference"] = int(size * total / (gpus if launch == "zero3" else 1))
        return states

    def list_settings(self, micro_batches: Iterable[MicroBatch], states: int = 0, ratio: float = 1.0) -> list[Setting]:
        """Every setting, the least work first; its bytes are those of the activations and the `states`, times a
        measured ratio."""
        args = self.config.train
        forwards = 3 if args.precompute_ref_log_probs else 4  # of a step; the backward counts as two
        settings = []
        for per_device, tokens, responses, waiting in micro_batches:
            head = head_bytes(self.shape, responses, self.dtype, self.on_gpu)
            for every in {*EVERY_N_LAYERS, checkpointed_layers(args)}:
                recomputed = 1 / every if every else 0
                work = waiting * (1 + recomputed / forwards)
                size = states + self._activations(every).peak_bytes(tokens, head)
                settings.append(Setting(per_device, every, tokens, round(ratio * size), work))
        return sorted(settings, key=lambda setting: (round(setting.work, 3), -setting.per_device))

    def _activations(self, every_n_layers: int) -> Activations:
        layers = self.shape.get_text_config().num_hidden_layers
        share = math.ceil(layers / every_n_layers) / layers if every_n_layers else 0.0
        return Activations.mix(*self._traced, share)

    @cached_property
    def _traced(self) -> tuple[Activations, Activations]:
        """All layers checkpointed, and none."""
        checkpointed = trace_activations(self.shape, self.dtype, checkpointing=True)
        stored = trace_activations(self.shape, self.dtype, checkpointing=False)
        return checkpointed, stored


def checkpointed_layers(args: TrainConfig) -> int:
    """`every_n_layers` of a configuration; 0 without gradient checkpointing."""
    if not args.gradient_checkpointing:
        return 0
    return (args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1)


def choose_setting(settings: list[Setting], limit: float, config: Config) -> Setting:
    """The first that has what the configuration names and fits into `limit` bytes; where none does, the smallest."""
    if "per_device_train_batch_size" not in config.fitted:
        settings = [setting for setting in settings if setting.per_device == config.micro_batch]
    if "gradient_checkpointing" not in config.fitted:
        every = checkpointed_layers(config.train)
        settings = [setting for setting in settings if setting.every_n_layers == every]
    for setting in settings:
        if setting.bytes <= limit:
            return setting
    return min(settings, key=lambda setting: setting.bytes)
