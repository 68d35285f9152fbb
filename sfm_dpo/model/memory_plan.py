"""The planner of memory: which settings of a run fit, and which of them means the least work.

A setting is the number of pairs in a micro-batch and how many layers are checkpointed. fit_memory, scripts/plan.py and
the check at submission all ask here. Recomputation adds work, and so does waiting, which grows as a micro-batch holds
fewer pairs.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from transformers import PretrainedConfig
from trl import get_peft_config

from sfm_dpo.common.gpus import GPU_MEMORY
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.model.memory import Activations, head_bytes, meta_model, model_states, trace_activations
from sfm_dpo.model.packing import why_not_shared
from sfm_dpo.model.sharding import zero_config

EVERY_N_LAYERS = (0, 8, 4, 3, 2, 1)  # transformers' every_n_layers: which layers are checkpointed; 0: none
USABLE = 0.9  # of a GPU's memory; the rest: CUDA's context, NCCL, and what the allocator cannot join


def memory_limit(total: float, memory_gib: float | None) -> float:
    """Bytes that a process may take of the `total` of its device: the field `memory_gib`, or a share."""
    return memory_gib * 2**30 if memory_gib else USABLE * total


def find_gpu(text: str) -> str | None:
    """The name in GPU_MEMORY that torch's name of a GPU or Slurm's type of one holds, if any."""
    return next((name for name in GPU_MEMORY if name in text.upper()), None)


class MicroBatch(NamedTuple):
    """The largest micro-batch of a run with so many pairs per device.

    Attributes:
        tokens: computed, padding included where it is.
        responses: tokens that reach the LM head.
        waiting: work of the slowest rank over that of the mean one.
    """

    per_device: int
    tokens: int
    responses: int
    waiting: float = 1.0


@dataclass(frozen=True)
class Setting:
    """A choice and what it costs.

    Attributes:
        per_device: pairs in a micro-batch.
        every_n_layers: every n-th layer is checkpointed; 0: none.
        tokens: computed in the largest micro-batch.
        bytes: of a process at its peak.
        work: against that of a run without recomputation whose ranks never wait.
    """

    per_device: int
    every_n_layers: int
    tokens: int
    bytes: int
    work: float

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
    """Memory of a run on `gpus` GPUs.

    Args:
        shape: the model's configuration.
        half: computed in 16 bit; otherwise all in fp32.
        on_gpu: otherwise `gpus` counts processes on CPUs.
    """

    def __init__(self, config: Config, shape: PretrainedConfig, gpus: int, half: bool = True, on_gpu: bool = True):
        self.config, self.shape, self.gpus = config, shape, gpus
        self.half, self.on_gpu = half, on_gpu
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
        self.checkpointed = trace_activations(shape, self.dtype, checkpointing=True)
        self.stored = trace_activations(shape, self.dtype, checkpointing=False)

    def states(self, launch: str, zero: dict[str, Any]) -> dict[str, int]:
        """Bytes on each GPU of weights, gradients, optimizer and buffers; arguments of `model_states`."""
        reference = not self.adapter and not self.config.train.precompute_ref_log_probs
        return model_states(self.model, self.trained, launch, self.gpus, zero, reference, self.half)

    def list_settings(self, micro_batches: Iterable[MicroBatch]) -> list[Setting]:
        """Every setting, the least work first; `bytes` are those of the activations alone."""
        args = self.config.train
        forwards = 3 if args.precompute_ref_log_probs else 4  # of a step; the backward counts as two
        settings = []
        for per_device, tokens, responses, waiting in micro_batches:
            head = head_bytes(self.shape, responses, self.dtype, self.on_gpu)
            for every in {*EVERY_N_LAYERS, checkpointed_layers(args)}:
                recomputed = 1 / every if every else 0
                work = waiting * (1 + recomputed / forwards)
                size = self._activations(every).peak_bytes(tokens, head)
                settings.append(Setting(per_device, every, tokens, size, work))
        return sorted(settings, key=lambda setting: (round(setting.work, 3), -setting.per_device))

    def _activations(self, every_n_layers: int) -> Activations:
        layers = self.shape.get_text_config().num_hidden_layers
        share = -(-layers // every_n_layers) / layers if every_n_layers else 0.0
        return Activations.mix(self.checkpointed, self.stored, share)


def checkpointed_layers(args: TrainConfig) -> int:
    """`every_n_layers` of a configuration; 0 without gradient checkpointing."""
    if not args.gradient_checkpointing:
        return 0
    return (args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1)


def add_states(settings: list[Setting], states: int, ratio: float = 1.0) -> list[Setting]:
    """The settings with the bytes of a process: those of the activations and the `states`, times a measured ratio."""
    return [replace(setting, bytes=round(ratio * (states + setting.bytes))) for setting in settings]


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


def describe_fit(config: Config, shape: PretrainedConfig, gpu: str, gpus: int, launch: str) -> str:
    """One line: whether a run fits, before any pair is read: where every sequence fills max_length, or is empty."""
    planner = MemoryPlanner(config, shape, gpus)
    limit = memory_limit(GPU_MEMORY[gpu], config.train.memory_gib)
    least = sum(planner.states(launch, zero_config(launch)).values())
    usable = f"GiB of {limit / 2**30:.0f} usable on each of {gpus} {gpu} under {launch} (computed)"
    if least > limit:
        return (
            f"memory: does not fit: weights, gradients and optimizer alone take {least / 2**30:.1f} {usable}; take "
            "more GPUs, or LAUNCH=zero3 or fsdp2"
        )
    tokens = 2 * config.micro_batch * (config.train.max_length or 0)
    settings = planner.list_settings([MicroBatch(config.micro_batch, tokens, tokens)])
    longest = choose_setting(add_states(settings, least), limit, config)
    if longest.bytes <= limit:
        return f"memory: fits, at most {longest.bytes / 2**30:.1f} {usable} with {longest.per_device} pairs per device"
    return f"memory: {least / 2**30:.1f} {usable} before the first pair; scripts/plan.py knows more, by their lengths"
