"""Fits a run to its memory: chooses pairs per device and how many layers are checkpointed, before training.

Both follow from the largest micro-batch that the sampler will deal (data/sampler.py), the first that runs, and
from the memory that model/memory.py computes for it. Of the settings that fit, the one with the least work is taken:
recomputation adds to it, and so does waiting, which grows as a micro-batch holds fewer pairs.
"""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import PretrainedConfig
from trl import get_peft_config

from sfm_dpo.common.distributed import broadcast, is_main_process, main_process_first
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.model.memory import Activations, head_bytes, meta_model, model_states, trace_activations
from sfm_dpo.model.packing import why_not_shared
from sfm_dpo.model.sharding import launched_with
from sfm_dpo.train.memory_use import memory_in_use, memory_limit
from sfm_dpo.train.trainer import build_sampler

log = logging.getLogger(__name__)

EVERY_N_LAYERS = (0, 8, 4, 3, 2, 1)  # transformers' every_n_layers: which layers are checkpointed; 0: none


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
        every = self.every_n_layers
        kwargs = json.dumps({"use_reentrant": False, "every_n_layers": every})
        some = f" --gradient_checkpointing_kwargs '{kwargs}'" if every > 1 else ""
        return f"--per_device_train_batch_size {self.per_device} --gradient_checkpointing {every > 0}{some}"

    def __str__(self) -> str:
        return (
            f"{self.per_device} pairs per device, {self.layers} checkpointed: {self.bytes / 2**30:.2f} GiB at the "
            f"largest micro-batch of {self.tokens:,} tokens"
        )


class ActivationModel:
    """Bytes of a micro-batch's activations, by its tokens and the layers that are checkpointed.

    Args:
        dtype: in which they are computed.
    """

    def __init__(self, shape: PretrainedConfig, dtype: torch.dtype, on_gpu: bool):
        self.shape, self.dtype, self.on_gpu = shape, dtype, on_gpu
        self.traced = {on: trace_activations(shape, dtype, on) for on in (False, True)}

    def peak_bytes(self, tokens: int, responses: int, every_n_layers: int) -> int:
        """Of `tokens` computed tokens, of which `responses` reach the LM head."""
        layers = self.shape.get_text_config().num_hidden_layers
        share = -(-layers // every_n_layers) / layers if every_n_layers else 0.0
        held = Activations.mix(self.traced[True], self.traced[False], share)
        return held.peak_bytes(tokens, head_bytes(self.shape, responses, self.dtype, self.on_gpu))


def list_settings(
    sampler: PairSampler,
    lengths: Lengths,
    ranks: int,
    activations: ActivationModel,
    states: int = 0,
    epochs: int = 1,
    forwards: int = 3,
    sizes: Iterable[int] = FIRST_STEPS_FOR,
    every_n_layers: Iterable[int] = EVERY_N_LAYERS,
) -> list[Setting]:
    """Every setting that the global batch allows, the least work first.

    Args:
        lengths: of the sampler's pairs, truncated.
        states: bytes of a process that do not depend on the setting.
        sizes: pairs per device to choose from.
        forwards: that a step takes, the backward counted as two: 3, and 4 with a live reference.
    """
    settings = []
    longest = lengths.sequences.max(axis=1)
    for size in sizes:
        if sampler.global_batch % (size * ranks):
            continue
        rows = sampler.largest_micro_batch(size, epochs)
        tokens = int(sampler.tokens[rows].sum()) if sampler.packed else 2 * size * int(longest.max())
        responses = int(lengths.responses[rows].sum())
        waiting = sampler.imbalance(size, ranks, None if sampler.packed else longest)
        for every in every_n_layers:
            work = waiting * (1 + (1 / every if every else 0) / forwards)
            size_bytes = states + activations.peak_bytes(tokens, responses, every)
            settings.append(Setting(size, every, tokens, size_bytes, work))
    return sorted(settings, key=lambda setting: (round(setting.work, 3), -setting.per_device))


def checkpointed_layers(args: TrainConfig) -> int:
    """`every_n_layers` of a configuration; 0 without gradient checkpointing."""
    return (args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1) if args.gradient_checkpointing else 0


def choose_setting(settings: list[Setting], limit: float, config: Config) -> Setting:
    """The first that fits into `limit` bytes and has what the configuration names.

    Raises:
        UserError: none fits.
    """
    open_fields, every = config.fitted, checkpointed_layers(config.train)
    sizes = FIRST_STEPS_FOR if "per_device_train_batch_size" in open_fields else (config.micro_batch,)
    settings = [setting for setting in settings if setting.per_device in sizes]
    if "gradient_checkpointing" not in open_fields:
        settings = [setting for setting in settings if setting.every_n_layers == every]
    fitting = [setting for setting in settings if setting.bytes <= limit]
    if not fitting:
        least = min(settings, key=lambda setting: setting.bytes)
        raise UserError(
            f"fit_memory true: {limit / 2**30:.2f} GiB hold no setting; the smallest needs {least}; use a shorter "
            "max_length, more GPUs, or LAUNCH=zero3"
        )
    return fitting[0]


def fit_memory(config: Config, dataset: Dataset, shape: PretrainedConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Chooses, on rank 0 for all, what the configuration leaves open, and sets it in `config.train`.

    Args:
        dataset: the tokenised pairs to train on.
        shape: the model's configuration.
        kept: the choice of the run that is resumed (data.json), or empty.

    Returns:
        The choice, for data.json.

    Raises:
        UserError: no setting fits.
    """
    args = config.train
    choice = broadcast(
        kept or main_process_first(lambda: _choose(config, dataset, shape) if is_main_process() else {})
    )
    args.per_device_train_batch_size = choice["per_device"]
    args.gradient_accumulation_steps = args.global_batch_size // (choice["per_device"] * args.world_size)
    if "gradient_checkpointing" in config.fitted:
        every = choice["every_n_layers"]
        args.gradient_checkpointing = args.activation_checkpointing = every > 0
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = (
            {"use_reentrant": False, "every_n_layers": every} if every else None
        )
    return choice


def _choose(config: Config, dataset: Dataset, shape: PretrainedConfig) -> dict[str, Any]:
    args, on_gpu, lora = config.train, not config.train.use_cpu, get_peft_config(config.model)
    model = meta_model(shape)
    trained = model.num_parameters()
    if lora:
        with torch.device("meta"):
            trained = get_peft_model(meta_model(shape), lora).num_parameters(only_trainable=True)
    zero, launch = {}, "fsdp2" if launched_with() == "fsdp" else "none"
    if args.deepspeed_plugin is not None:
        zero, launch = (
            args.deepspeed_plugin.deepspeed_config["zero_optimization"],
            f"zero{args.deepspeed_plugin.zero_stage}",
        )
    live, half = not args.precompute_ref_log_probs, args.bf16 or args.fp16
    states = sum(model_states(model, trained, launch, args.world_size, zero, live and not lora, half).values())
    if not on_gpu:  # a share of the machine, of which the process itself has taken some
        states += memory_in_use()
    limit = memory_limit(args)
    sharing = args.prefix_sharing is not False and not why_not_shared(
        model, args.padding_free, args.router_aux_loss_coef
    )
    columns = dataset.select_columns(["prompt_length", "chosen_length", "rejected_length"]).with_format("numpy")[:]
    settings = list_settings(
        build_sampler(dataset, args, sharing),
        Lengths.from_columns(columns).truncate(args.max_length),
        args.world_size,
        ActivationModel(shape, torch.bfloat16 if half else torch.float32, on_gpu),
        states,
        epochs=math.ceil(args.num_train_epochs),
        forwards=3 + live,
        sizes={*FIRST_STEPS_FOR, config.micro_batch},
        every_n_layers={*EVERY_N_LAYERS, checkpointed_layers(args)},
    )
    setting = choose_setting(settings, limit, config)
    log.info(f"fit_memory: {setting}, of {limit / 2**30:.2f} GiB; work {setting.work:.3f} times the least")
    smaller = next((other.options for other in settings if other.bytes < setting.bytes), None)
    return asdict(setting) | {"limit": int(limit), "smaller": smaller}
