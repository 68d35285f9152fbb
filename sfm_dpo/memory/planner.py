"""The memory of a run, by arithmetic from its model and lengths, and the choice of a setting that fits.

A candidate is a number of pairs in a micro-batch and of checkpointed layers. The start of a run and the plan before
submission choose one in the same way (`MemoryPlanner.choose`).
"""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from sfm_dpo.common.errors import user_input
from sfm_dpo.config.fields import Config, TrainConfig, build_optimizer
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.memory.activations import Activations, head_bytes, trace_activations
from sfm_dpo.memory.asked import Asked
from sfm_dpo.memory.host import host_bytes
from sfm_dpo.model.loading import blocks, load_model_config, meta_adapter, meta_model

log = logging.getLogger(__name__)

# What a micro-batch costs on a GPU however small it is, in tokens of equal time: its gradients of all weights pass
# through memory several times, and the host waits for the device. The weights cancel: both grow alike. By count, not
# measured: gradients are reduced only in training, after the choice. If 300 or 800 were right, the settings chosen by
# 500 would take at most 4% longer (each recipe but the hybrid, each launch, 4 to 64 H100, H200 or B200)
FIXED_TOKENS = 500
SIDE = 512  # of the matrix whose optimizer state is measured; bitsandbytes keeps small ones in 32 bit
USABLE = 0.9  # share of a GPU's memory; the rest is for CUDA's context, NCCL and fragmentation


def memory_limit(total: float, memory_gib: float | None) -> float:
    """Bytes that a process may use of its device's `total`."""
    return memory_gib * 2**30 if memory_gib else USABLE * total


def measure_optimizer(args: TrainConfig, is_flat: bool) -> float:
    """Bytes of the optimizer's state for each trained weight, after a step with one matrix or, if DeepSpeed gives it
    flat partitions (`is_flat`), for which Adafactor keeps more, with a vector."""
    shape = (SIDE * SIDE,) if is_flat else (SIDE, SIDE)
    weight = torch.nn.Parameter(torch.zeros(shape, device=args.device))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer: Any = build_optimizer(args, torch.nn.ParameterList([weight]))
        if hasattr(optimizer, "train"):  # ScheduleFree
            optimizer.train()
        optimizer.step()
    except Exception as error:  # its library is only on the cluster, or it must choose among a model's layers
        log.info(f"optim {args.optim.value}: planned as AdamW, because it cannot be measured here: {error}")
        return 8.0
    file = io.BytesIO()  # a quantized state's `nbytes` are not what it holds
    torch.save(optimizer.state_dict()["state"], file)
    return round(file.tell() / weight.numel(), 1)


@dataclass(frozen=True)
class Candidate:
    per_device: int  # pairs in a micro-batch
    checkpointed_layers: int
    layers: int
    tokens: int  # computed in the largest micro-batch
    activations: int  # bytes of them at their peak
    bytes: int = field(compare=False)  # peak of a process, by what is known of activations then
    work: float  # relative to a run without recomputation
    smaller: str | None = field(default=None, compare=False)  # options of the next candidate that takes less memory

    def takes_as_much(self, other: "Candidate") -> bool:
        """Whether it needs at least as much memory as `other`, whatever a token takes."""
        return self.tokens >= other.tokens and self.checkpointed_layers <= other.checkpointed_layers

    @property
    def share(self) -> str:
        return f"{self.checkpointed_layers} of {self.layers}"

    @property
    def options(self) -> str:
        checkpointing = f"--gradient_checkpointing true --checkpointed_layers {self.checkpointed_layers}"
        return f"--per_device_train_batch_size {self.per_device} {checkpointing}"

    @property
    def setting(self) -> str:
        return f"{self.per_device} pair(s) per device, {self.share} layers checkpointed"

    def __str__(self) -> str:
        return f"{self.setting}: {self.bytes / 2**30:.2f} GiB at the largest micro-batch of {self.tokens:,} tokens"


@dataclass
class MemoryPlanner:
    """Memory of a run on `gpus` GPUs or CPU processes."""

    config: Config
    model_config: PretrainedConfig
    asked: Asked
    lengths: Lengths  # of its pairs, truncated
    gpus: int
    packed: bool
    prefix_sharing: bool
    dtype: torch.dtype = torch.bfloat16
    on_gpu: bool = True
    is_traced: bool = True  # otherwise activations are guessed
    launch: str = "none"  # of LAUNCHES, or none: also DDP

    def __post_init__(self) -> None:
        self.model = meta_model(self.model_config)
        self.reference = self.model
        if self.config.train.ref_model_name_or_path:
            self.reference = meta_model(load_model_config(self.config.reference))
        self.adapter = meta_adapter(self.config, self.model_config)
        self.parameters = self.model.num_parameters()
        self.trained = (self.adapter or self.model).num_parameters(only_trainable=True)

    @cached_property
    def sampler(self) -> PairSampler:
        """The order of the pairs, in micro-batches of any size."""
        return PairSampler.of(self.lengths, self.config.train, 1, self.packed, self.prefix_sharing)

    @cached_property
    def micro_batches(self) -> dict[int, tuple[int, int]]:
        """For each usual number of pairs per device and the configured one, if the global batch is a multiple of it,
        of the largest micro-batch: computed tokens, with padding, and tokens that reach the LM head."""
        micro_batches = {}
        for size in sorted({*FIRST_STEPS_FOR, self.asked.pairs or 1}):
            if self.config.train.global_batch_size % (size * self.gpus):
                continue
            rows = self.sampler.largest_micro_batch(size)
            micro_batches[size] = int(self.sampler.layout.count(rows)), int(self.lengths.responses[rows].sum())
        return micro_batches

    @cached_property
    def activations(self) -> tuple[Activations, Activations]:
        """With all layers checkpointed, and with none. Raises UserError for a model that cannot be traced, which may
        still train."""
        computed = self.lengths.computed(self.prefix_sharing).sum()
        keys = self.packed * self.lengths.sequences.sum() / computed
        trace = partial(trace_activations, self.model_config, self.dtype)
        with user_input(f"memory cannot be planned for {self.model_config.model_type}"):
            return trace(True, keys), trace(False, keys)

    def guess_activations(self) -> None:
        """For a model that cannot be traced: 34 bytes a token, hidden unit and layer in 16 bit (Korthikanti et al.,
        arXiv 2205.05198, without attention scores), of which 2 are the input of a checkpointed layer."""
        self.is_traced = False
        text = self.model_config.get_text_config()
        unit = text.hidden_size * self.dtype.itemsize
        layers = text.num_hidden_layers
        checkpointed = Activations(np.array([0, layers * unit]), np.array([0, (layers + 17) * unit]))
        stored = Activations(np.array([0, 17 * layers * unit]), np.array([0, 17 * layers * unit]))
        self.activations = checkpointed, stored

    def states(self, zero: dict[str, Any]) -> dict[str, int]:
        """Bytes on each GPU for weights, gradients, the optimizer's state, buffers, and a live reference model.

        zero2 and zero3 as in DeepSpeed's estimators, with `zero`, its `zero_optimization`; fsdp2: fp32, and as buffers
        16-bit copies of two gathered blocks, their gradients, and the embedding or head; none: unsharded, in the
        model's own dtype, autocast's 16-bit copy of the weights, and DDP's gradient buckets.
        offload: zero2 without its optimizer, which `host_bytes` counts, and with a buffer for a gradient.
        """
        launch = self.launch
        gpus = self.gpus
        size = self.dtype.itemsize
        total = self.parameters + (self.trained if self.adapter else 0)
        state = measure_optimizer(self.config.train, is_flat=launch not in ("fsdp2", "none"))
        stored = getattr(torch, self.config.model.dtype or "float32", self.model_config.dtype)  # the latter for auto
        copy = size if size == 2 and stored != self.dtype else 0
        weights, gradients, optimizer = {  # bytes: weights per parameter; gradients, optimizer per trained one
            "zero2": (size, 4 / gpus, (4 + state) / gpus),  # gradients of 16-bit weights are accumulated in fp32
            "zero3": (size / gpus, 4 / gpus, (4 + state) / gpus),
            "offload": (size, 4 / gpus, 0),
            "fsdp2": (4 / gpus, 4 / gpus, state / gpus),
            "none": (stored.itemsize + copy, 4 if gpus == 1 else 8, state),
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
                bucket = self.model_config.get_text_config().hidden_size ** 2
            buffers = size * int(bucket) * (2 if zero.get("overlap_comm") else 1)
            buffers += size * min(int(bucket), self.trained)  # what is in a bucket, flattened while it is reduced
            if launch in ("zero2", "offload"):  # each tensor is then added to the fp32 gradients
                wide = 4 if launch == "zero2" else 4 + size
                buffers += wide * max(p.numel() for p in (self.adapter or self.model).parameters() if p.requires_grad)
        states = {
            "weights": int(weights * total) + gathered,
            "gradients": int(gradients * self.trained),
            "optimizer": int(optimizer * self.trained),
            "buffers": buffers,
        }
        if not self.config.train.precompute_ref_log_probs and (self.reference is not self.model or not self.adapter):
            held = weights if launch == "none" else size
            states["reference"] = int(held * self.reference.num_parameters() / (gpus if launch == "zero3" else 1))
        return states

    def host_bytes(self) -> int:
        """Bytes of host memory for each rank under LAUNCH=offload."""
        return host_bytes(self.model, self.adapter or self.model, self.gpus, self.dtype.itemsize)

    def list_candidates(self, states: int = 0, ratio: float = 1.0) -> list[Candidate]:
        """All candidates, least work first; their bytes are those of `states` and, times `ratio`, of activations."""
        args = self.config.train
        forwards = 3 if args.precompute_ref_log_probs else 4  # in a step; the backward counts as two
        layers = self.model_config.get_text_config().num_hidden_layers
        # DeepSpeed's copy of a rank's gradients, after activations are freed. On the host it takes nothing here, but
        # before training weights were converted to fp32 on the GPU, 2 bytes more than the gradients that follow
        update = (2 if self.launch == "offload" else 4) * self.trained // self.gpus
        fixed = FIXED_TOKENS / self.lengths.computed(self.prefix_sharing).mean() if self.on_gpu else 0.0
        candidates = []
        for pairs, (tokens, responses) in self.micro_batches.items():
            head = head_bytes(self.model_config, responses, self.dtype, self.on_gpu)
            for count in range(layers + 1 if self.model.supports_gradient_checkpointing else 1):
                work = 1 + count / layers / forwards + fixed / pairs
                activations = Activations.mix(*self.activations, count / layers).peak_bytes(tokens, head)
                size = states + max(update, round(ratio * activations))
                candidates.append(Candidate(pairs, count, layers, tokens, activations, size, work))
        return sorted(candidates, key=lambda candidate: (round(candidate.work, 3), -candidate.per_device))

    def choose(self, limit: float, states: int, ratio: float = 1.0, failed: Sequence[Candidate] = ()) -> Candidate:
        """The candidate of least work that is as configured and fits into `limit` bytes; if none fits, the smallest.
        One that must take as much as one of `failed` is chosen only if all must."""
        every = self.list_candidates(states, ratio)
        pairs = self.asked.pairs
        layers = self.asked.layers
        asked = [c for c in every if pairs in (None, c.per_device) and layers in (None, c.checkpointed_layers)]
        left = [candidate for candidate in asked if not any(map(candidate.takes_as_much, failed))] or asked
        fitting = [candidate for candidate in left if candidate.bytes <= limit]
        choice = fitting[0] if fitting else min(left, key=lambda candidate: candidate.bytes)
        enough = choice.bytes - (choice.bytes - states) / 10  # one more checkpointed layer may save too little
        smaller = next((other.options for other in every if other.bytes < enough), None)
        return replace(choice, smaller=smaller)
