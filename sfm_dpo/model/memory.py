"""What will it hold? Memory of a training process, from the model's configuration alone.

Weights, gradients and optimizer are arithmetic. Activations are traced: the model runs forward and backward on fake
tensors, which have shapes and no memory, under PyTorch's MemTracker, so that whatever the architecture saves for its
backward is counted, and nothing is assumed of it.
"""

import copy
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from sfm_dpo.model.sharding import blocks

SHAPES = "shapes_only"  # transformers takes a name with "flash" in it for a package
TRACED_TOKENS = 1024
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768  # a tile of logits (TRL 1.16, kernels/chunked_logprob.py)


class _Flash(torch.autograd.Function):
    """What a flash attention saves for its backward: query, key, value, output, and a number a head and token."""

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, tokens, _ = query.shape
        output = value.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, value.new_empty(batch, heads, tokens, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


AttentionInterface.register(
    SHAPES, lambda module, query, key, value, mask, **kwargs: (_Flash.apply(query, key, value), None)
)
AttentionMaskInterface.register(SHAPES, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro-batch holds, each as (fixed, for each computed token).

    Attributes:
        saved: when the forward of the backbone is over.
        peak: at the worst moment of its backward, one gradient of a weight included: it lives until it is reduced.
    """

    saved: tuple[float, float]
    peak: tuple[float, float]

    def __call__(self, tokens: int, head: int) -> int:
        """With an LM head that holds `head` bytes, and computes while what the backbone saved is still there."""
        saved, peak = (fixed + each * tokens for fixed, each in (self.saved, self.peak))
        return int(max(saved + head, peak))


def meta_model(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def activations(config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool) -> Activations:
    """Of the backbone, without the LM head; attention by a flash kernel, which every token of a packed row meets.

    Two lengths give the part of each token. One block of each kind is traced, and then one more of each: the
    difference stands for all others of its kind. Where the kernels of linear attention are not installed, PyTorch's
    reference is traced, which saves more.
    """
    kinds = _kinds(config)
    base = list(dict.fromkeys(kinds))
    peaks = []
    for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS):
        least = _traced_peak(config, dtype, checkpointing, base, tokens)
        more = {
            kind: _traced_peak(config, dtype, checkpointing, [*base, kind], tokens) - least
            for kind in base
            if kinds.count(kind) > 1
        }
        peaks.append(least + sum((kinds.count(kind) - 1) * size for kind, size in more.items()))
    per_token = (peaks[1] - peaks[0]) / TRACED_TOKENS
    return Activations(*zip(peaks[0] - per_token * TRACED_TOKENS, per_token, strict=True))


def head_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """What TRL's fused LM head holds at its peak, its backward, for so many computed tokens.

    Gradients of hidden states and head in fp32, copies of them in `dtype`, and a tile of logits: one in `dtype` with
    Triton, as wide as its buffer, and without, where PyTorch computes operation by operation, seven more in fp32.
    """
    text = config.get_text_config()
    weights, hidden, size = text.vocab_size * text.hidden_size, tokens * text.hidden_size, dtype.itemsize
    rows, columns = min(tokens, HEAD_TOKENS), min(text.vocab_size, HEAD_COLUMNS)
    copies = 4 if size == 4 else 4 + size  # .to(fp32) of what is fp32 copies nothing
    # Of the buffer a GPU allocates all, and a CPU the pages that are touched
    tiles = size * rows * HEAD_COLUMNS if on_gpu else (size + 7 * 4) * rows * columns
    return copies * (weights + hidden) + tiles


def _kinds(config: PretrainedConfig) -> list[str]:
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or ["block"] * text.num_hidden_layers)


class _Peak(MemTracker):
    def _update_peak_stats(self, peak_state) -> None:
        """Of the whole alone: PyTorch 2.13 does it for every module after every operation, ten times the time."""
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device], self._peak_mem_snap[device] = now["Total"], dict(now)


def _traced_peak(
    config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool, kinds: list[str], tokens: int
) -> np.ndarray:
    """[2] bytes alive beside the weights after the forward, and at most, with blocks of these kinds and one row of
    `tokens` tokens."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    text.vocab_size, text.pad_token_id = min(text.vocab_size, 1024), None  # its gradient is no activation
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=SHAPES, dtype=dtype).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():  # as the launchers do: a gradient is reduced, and gone
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tracker = _Peak()
        tracker.track_external(model)
        start = tracker.get_tracker_snapshot("current")
        with tracker, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Expected a tensor or a traceable", UserWarning)  # MemTracker's own
            ids = torch.zeros(1, tokens, dtype=torch.long)
            output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
            saved = tracker.get_tracker_snapshot("current")
            output.sum().backward()
        peak = tracker.get_tracker_snapshot("peak")
    before, kept, most = (sum(device["Total"] for device in found.values()) for found in (start, saved, peak))
    return np.array([kept - before, most - before], dtype=float)


# ---- weights, gradients, optimizer


def model_states(
    parameters: int, largest: int, block: int, launch: str, num_gpus: int, num_nodes: int, zero: dict[str, Any]
) -> dict[str, int]:
    """Bytes on each GPU of 16-bit training with AdamW: weights, gradients, optimizer, buffers.

    Args:
        parameters: of the model; `largest`: of its largest module; `block`: of its largest FSDP2 unit.
        launch: zero2, zero3 or fsdp2.
        num_gpus: on a node.
        zero: `zero_optimization` of the DeepSpeed file, for the sizes of its buckets.

    ZeRO: DeepSpeed's own estimators give the sum of the first three; they count 16-bit weights, gradients in 16 and 32
    bit, and fp32 weights and two moments. Buckets come on top: of gradients, two in flight under overlap_comm.
    FSDP2: fp32 weights, gradients and moments, split; a 16-bit copy of two gathered units and of the tail.
    """
    gpus = num_gpus * num_nodes
    if launch == "fsdp2":
        gathered = 2 * 2 * block + 2 * largest  # this unit and the next; embedding or head
        return {
            "weights": 4 * parameters // gpus,
            "gradients": 4 * parameters // gpus,
            "optimizer": 8 * parameters // gpus,
            "buffers": gathered + 2 * 2 * block,  # and as much for gradients on their way
        }
    bucket = 2 * min(int(zero["reduce_bucket_size"]), parameters)
    buffers = bucket * (2 if zero.get("overlap_comm") else 1)
    with redirect_stdout(StringIO()):
        if launch == "zero2":
            from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as estimate

            _, total = estimate(parameters, num_gpus, num_nodes, cpu_offload=False)
            weights = 2 * parameters
        else:
            from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate

            _, total, _ = estimate(parameters, largest, num_gpus, num_nodes, cpu_offload=False)
            weights = 2 * parameters // gpus + 4 * largest
    optimizer = 12 * parameters // gpus
    return {"weights": weights, "gradients": total - weights - optimizer, "optimizer": optimizer, "buffers": buffers}


def largest_module(model: PreTrainedModel) -> int:
    """Parameters of the module that holds most, its submodules' not counted."""
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def largest_block(model: PreTrainedModel) -> int:
    return max(sum(p.numel() for p in block.parameters()) for block in blocks(model))
