"""Memory of a run, computed from the model's configuration only, and the choice of settings that fit.

Activations are traced: the model runs forward and backward on fake tensors, which have shapes but no memory, under
PyTorch's MemTracker. A setting is the number of pairs in a micro-batch and the share of layers that is checkpointed.
"""

import copy
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel, local_torch_dtype
from trl import get_peft_config

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.model.attention import boundary_arguments, packed_attention_forward, packed_mask
from sfm_dpo.model.flops import count_experts
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.model.packing import why_not_shared
from sfm_dpo.model.sharding import blocks

SHAPES = "packed_shapes"  # packed attention with the GPU's kernel, whose shapes are known on every device
TRACED_TOKENS = 1024
TRACED_SEQUENCES = 2
HEAD_TOKENS = 4096  # rows of a tile of logits (TRL 1.16, kernels/chunked_logprob.py)
HEAD_COLUMNS = 32768
EVERY_N_LAYERS = (0, 8, 4, 3, 2, 1)  # transformers' every_n_layers: which layers are checkpointed; 0: none
USABLE = 0.9  # share of a GPU's memory; the rest is for CUDA's context, NCCL and fragmentation


AttentionInterface.register(SHAPES, partial(packed_attention_forward, varlen=True))
AttentionMaskInterface.register(SHAPES, packed_mask)


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro-batch holds, each [2]: a fixed part, and a part for each computed token."""

    saved: np.ndarray  # at the end of the backbone's forward
    peak: np.ndarray  # at the peak of its backward

    def peak_bytes(self, tokens: int, head: int) -> int:
        """Peak of a micro-batch of `tokens`, with an LM head that takes `head` bytes."""
        saved = self.saved[0] + self.saved[1] * tokens
        peak = self.peak[0] + self.peak[1] * tokens
        return int(max(saved + head, peak))

    @classmethod
    def mix(cls, checkpointed: "Activations", stored: "Activations", share: float) -> "Activations":
        """Activations with a `share` of the layers checkpointed, from those with all and with none checkpointed."""
        saved = share * checkpointed.saved + (1 - share) * stored.saved
        backward = np.maximum(checkpointed.peak - checkpointed.saved, stored.peak - stored.saved)
        return cls(saved, saved + backward)


def meta_model(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    with torch.device("meta"):
        return _build(config, dtype)


def _build(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as its class builds it. `from_config` would shard it under ZeRO-3, which needs all ranks."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model_name_or_path: {config.model_type} is not a causal language model; choose one")
    with no_init_weights(), local_torch_dtype(dtype):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def trace_activations(
    config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool, copies: float | None = None
) -> Activations:
    """Activations of the backbone, without the LM head, on the packed path: traced at two lengths, and with one and
    two blocks of each kind, to find what each token and each further block adds. `copies`: second copies of keys for
    each computed token under prefix sharing, or None without it."""
    text = config.get_text_config()
    if dtype == torch.float32 and count_experts(text):
        half = trace_activations(config, torch.bfloat16, checkpointing, copies)  # products over experts need 16 bit
        return Activations(2 * half.saved, 2 * half.peak)
    counts = Counter(getattr(text, "layer_types", None) or ["block"] * text.num_hidden_layers)
    totals = []
    for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS):
        one_each = _trace_bytes(config, dtype, checkpointing, list(counts), tokens, copies)
        others = 0
        for kind, count in counts.items():
            if count > 1:
                with_another = _trace_bytes(config, dtype, checkpointing, [*counts, kind], tokens, copies)
                others = others + (count - 1) * (with_another - one_each)
        totals.append(one_each + others)
    per_token = (totals[1] - totals[0]) / TRACED_TOKENS
    fixed = totals[0] - per_token * TRACED_TOKENS
    saved, peak = np.stack([fixed, per_token], axis=1)
    return Activations(saved, peak)


def head_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """Peak bytes of TRL's fused LM head, reached in its backward: gradients of hidden states and head in fp32, copies
    of them in `dtype`, and a tile of logits in `dtype`; without Triton seven more tiles in fp32."""
    text = config.get_text_config()
    size = dtype.itemsize
    weights = text.vocab_size * text.hidden_size
    hidden = tokens * text.hidden_size
    copies = 4 if size == 4 else 4 + size  # .to(fp32) copies nothing if it is fp32 already
    rows = min(tokens, HEAD_TOKENS)
    tile = size * rows * HEAD_COLUMNS
    if not on_gpu:
        tile = (size + 7 * 4) * rows * min(text.vocab_size, HEAD_COLUMNS)
    return copies * (weights + hidden) + tile


# Upstream: torch 2.13, distributed/_tools/mem_tracker.py, MemTracker._update_peak_stats: updates the peaks of all
# modules after every operation, too, so that a trace takes ten times as long.
# Canary: test_canary_mem_tracker_visits_every_module_after_every_operation
class _PeakTracker(MemTracker):
    def _update_peak_stats(self, peak_state) -> None:
        for device, current in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < current["Total"]:
                self._peak_mem[device] = current["Total"]
                self._peak_mem_snap[device] = dict(current)


def _trace_bytes(
    config: PretrainedConfig,
    dtype: torch.dtype,
    checkpointing: bool,
    kinds: list[str],
    tokens: int,
    copies: float | None,
) -> np.ndarray:
    """[2] bytes besides the weights, after the forward and at the backward's peak, with a block for each kind."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    text.vocab_size = min(text.vocab_size, 1024)  # the embedding's gradient is not an activation
    text.pad_token_id = None
    with FakeTensorMode(allow_non_fake_inputs=True):
        config._attn_implementation = SHAPES
        model = _build(config, dtype).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():  # as the launchers do: a gradient is freed once it is reduced
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        tracker = _PeakTracker()
        tracker.track_external(model)
        start = _total(tracker, "current")
        with tracker, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Expected a tensor or a traceable", UserWarning)  # MemTracker's own
            ids = torch.zeros(1, tokens, dtype=torch.long)
            bounds = torch.zeros(TRACED_SEQUENCES + 1, dtype=torch.int32)
            boundaries = boundary_arguments(bounds, tokens)
            if copies is not None:
                keys = torch.zeros(tokens + round(copies * tokens), dtype=torch.int32)
                boundaries = boundary_arguments(bounds, tokens, bounds, keys, keys)
            output = model.base_model(ids, position_ids=ids, use_cache=False, **boundaries).last_hidden_state
            saved = _total(tracker, "current")
            output.sum().backward()
        peak = _total(tracker, "peak")
    return np.array([saved - start, peak - start], dtype=float)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(device["Total"] for device in tracker.get_tracker_snapshot(moment).values())


def memory_limit(total: float, memory_gib: float | None) -> float:
    """Bytes that a process may use of its device's `total`."""
    return memory_gib * 2**30 if memory_gib else USABLE * total


class MicroBatch(NamedTuple):
    """The largest micro-batch of a run with `per_device` pairs per device."""

    per_device: int
    tokens: int  # computed tokens, including padding if there is any
    copies: int  # second copies of keys under prefix sharing
    responses: int  # tokens that reach the LM head
    waiting: float  # work of the slowest rank over the mean of all ranks


@dataclass(frozen=True)
class Setting:
    per_device: int  # pairs in a micro-batch
    every_n_layers: int  # every n-th layer is checkpointed; 0: none
    tokens: int  # computed in the largest micro-batch
    bytes: int  # peak of a process
    work: float  # relative to a run without recomputation whose ranks never wait

    @property
    def layers(self) -> str:
        return {0: "no layer", 1: "all layers"}.get(self.every_n_layers, f"1 in {self.every_n_layers} layers")

    @property
    def options(self) -> str:
        options = f"--per_device_train_batch_size {self.per_device} --gradient_checkpointing {self.every_n_layers > 0}"
        if self.every_n_layers > 1:
            kwargs = json.dumps({"use_reentrant": False, "every_n_layers": self.every_n_layers})
            options += f" --gradient_checkpointing_kwargs '{kwargs}'"
        return options

    def __str__(self) -> str:
        size = f"{self.bytes / 2**30:.2f} GiB at the largest micro-batch of {self.tokens:,} tokens"
        return f"{self.per_device} pair(s) per device, {self.layers} checkpointed: {size}"


class MemoryPlanner:
    """Memory of a run on `gpus` GPUs or CPU processes; `half`: in 16 bit; `shape`: the model's configuration."""

    def __init__(self, config: Config, shape: PretrainedConfig, gpus: int, half: bool = True, on_gpu: bool = True):
        self.config = config
        self.shape = shape
        self.gpus = gpus
        self.half = half
        self.on_gpu = on_gpu
        self.dtype = torch.bfloat16 if half else torch.float32
        self.model = meta_model(shape)
        self.parameters = self.model.num_parameters()
        self.reference = self.model
        if config.train.ref_model_name_or_path:
            self.reference = meta_model(load_model_config(config.reference))
        self.adapter = None
        if lora := get_peft_config(config.model):
            with torch.device("meta"):
                self.adapter = get_peft_model(meta_model(shape), lora)
        self.trained = (self.adapter or self.model).num_parameters(only_trainable=True)
        obstacle = why_not_shared(self.model, config.train.padding_free, config.train.router_aux_loss_coef)
        self.prefix_sharing = not obstacle and config.train.prefix_sharing is not False
        self._traces: dict[float | None, tuple[Activations, Activations]] = {}

    def states(self, launch: str, zero: dict[str, Any]) -> dict[str, int]:
        """Bytes on each GPU for weights, gradients, AdamW's moments, buffers, and a live reference model.

        `launch`: zero2 and zero3 as in DeepSpeed's estimators (estimate_zero2_model_states_mem_needs), with `zero`,
        its `zero_optimization`; fsdp2: all states in fp32, and as buffers a 16-bit copy of two gathered blocks, as
        much for gradients being reduced, and the embedding or head; none (also DDP): unsharded, autocast's 16-bit copy
        of the weights, and DDP's gradient buckets.
        """
        gpus = self.gpus
        size = 2 if self.half else 4
        total = self.parameters + (self.trained if self.adapter else 0)
        weights, gradients, optimizer = {  # bytes: weights per parameter; gradients, optimizer per trained one
            "zero2": (size, 4 / gpus, 12 / gpus),  # gradients of 16-bit weights are accumulated in fp32
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
            if bucket == "auto":  # as transformers sets it
                bucket = self.shape.get_text_config().hidden_size ** 2
            buffers = size * min(int(bucket), self.trained) * (2 if zero.get("overlap_comm") else 1)
        states = {
            "weights": int(weights * total) + gathered,
            "gradients": int(gradients * self.trained),
            "optimizer": int(optimizer * self.trained),
            "buffers": buffers,
        }
        if not self.config.train.precompute_ref_log_probs and (self.reference is not self.model or not self.adapter):
            states["reference"] = int(size * self.reference.num_parameters() / (gpus if launch == "zero3" else 1))
        return states

    def list_settings(self, micro_batches: Iterable[MicroBatch], states: int = 0, ratio: float = 1.0) -> list[Setting]:
        """All settings, least work first; their bytes are those of activations and `states`, times `ratio`."""
        args = self.config.train
        forwards = 3 if args.precompute_ref_log_probs else 4  # in a step; the backward counts as two
        layers = self.shape.get_text_config().num_hidden_layers
        micro_batches = list(micro_batches)
        copies = max(batch.copies / batch.tokens for batch in micro_batches) if self.prefix_sharing else None
        traced = self._trace(copies)
        update = 4 * self.trained // self.gpus  # DeepSpeed's copy of a rank's gradients, after activations are freed
        settings = []
        for per_device, tokens, _, responses, waiting in micro_batches:
            head = head_bytes(self.shape, responses, self.dtype, self.on_gpu)
            for every in {*EVERY_N_LAYERS, checkpointed_layers(args)}:
                recomputed = 1 / every if every else 0
                work = waiting * (1 + recomputed / forwards)
                share = math.ceil(layers / every) / layers if every else 0.0
                size = states + max(update, Activations.mix(*traced, share).peak_bytes(tokens, head))
                settings.append(Setting(per_device, every, tokens, round(ratio * size), work))
        return sorted(settings, key=lambda setting: (round(setting.work, 3), -setting.per_device))

    def _trace(self, copies: float | None) -> tuple[Activations, Activations]:
        """Activations with all layers checkpointed, and with none."""
        if copies not in self._traces:
            checkpointed = trace_activations(self.shape, self.dtype, True, copies)
            self._traces[copies] = (checkpointed, trace_activations(self.shape, self.dtype, False, copies))
        return self._traces[copies]


def checkpointed_layers(args: TrainConfig) -> int:
    """`every_n_layers` of a configuration; 0 without gradient checkpointing."""
    if not args.gradient_checkpointing:
        return 0
    return (args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1)


def choose_setting(settings: list[Setting], limit: float, config: Config) -> Setting:
    """The first setting that agrees with the configuration and fits into `limit` bytes; if none fits, the smallest."""
    if "per_device_train_batch_size" not in config.fitted:
        settings = [setting for setting in settings if setting.per_device == config.micro_batch]
    if "gradient_checkpointing" not in config.fitted:
        every = checkpointed_layers(config.train)
        settings = [setting for setting in settings if setting.every_n_layers == every]
    for setting in settings:
        if setting.bytes <= limit:
            return setting
    return min(settings, key=lambda setting: setting.bytes)
