"""Memory of activations, computed from the model's configuration alone.

They are traced: the model runs forward and backward on fake tensors, which have shapes and no memory, under PyTorch's
MemTracker.
"""

import copy
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

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


def _attention_of_shapes(module, query, key, value, mask, **kwargs):
    return _Flash.apply(query, key, value), None


def _no_mask(*args, **kwargs):
    return None


AttentionInterface.register(SHAPES, _attention_of_shapes)
AttentionMaskInterface.register(SHAPES, _no_mask)


@dataclass(frozen=True)
class Activations:
    """Bytes that a micro-batch holds, each [2] (fixed, and for each computed token): when the forward of the backbone
    is over, and at the worst moment of its backward."""

    saved: np.ndarray
    peak: np.ndarray

    def peak_bytes(self, tokens: int, head: int) -> int:
        """Of a micro-batch of `tokens`, with an LM head that takes `head` bytes."""
        saved = self.saved[0] + self.saved[1] * tokens
        peak = self.peak[0] + self.peak[1] * tokens
        return int(max(saved + head, peak))

    @classmethod
    def mix(cls, checkpointed: "Activations", stored: "Activations", share: float) -> "Activations":
        """Where a `share` of the layers is checkpointed, from those of all layers `checkpointed` and all `stored`."""
        saved = share * checkpointed.saved + (1 - share) * stored.saved
        backward = np.maximum(checkpointed.peak - checkpointed.saved, stored.peak - stored.saved)
        return cls(saved, saved + backward)


def meta_model(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return _build(config, dtype)


def _build(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as its class makes it. `from_config` would split it under ZeRO-3, which all ranks must do together."""
    with no_init_weights(), local_torch_dtype(dtype):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def trace_activations(config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool) -> Activations:
    """Activations of the backbone, without the LM head, under a flash attention kernel.

    Traced at two lengths, whose difference is the part of each token; with one block of each kind, and then one more
    of each, whose difference stands for all others of its kind.
    """
    text = config.get_text_config()
    if dtype == torch.float32 and getattr(text, "num_experts", None):
        # The product over experts is traced in 16 bit only
        half = trace_activations(config, torch.bfloat16, checkpointing)
        return Activations(2 * half.saved, 2 * half.peak)
    counts = Counter(getattr(text, "layer_types", None) or ["block"] * text.num_hidden_layers)
    totals = []
    for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS):
        one_each = _trace_bytes(config, dtype, checkpointing, list(counts), tokens)
        others = 0
        for kind, count in counts.items():
            if count > 1:
                with_another = _trace_bytes(config, dtype, checkpointing, [*counts, kind], tokens)
                others = others + (count - 1) * (with_another - one_each)
        totals.append(one_each + others)
    per_token = (totals[1] - totals[0]) / TRACED_TOKENS
    fixed = totals[0] - per_token * TRACED_TOKENS
    saved, peak = np.stack([fixed, per_token], axis=1)
    return Activations(saved, peak)


def head_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """Peak bytes of TRL's fused LM head, reached in its backward, for `tokens` computed tokens.

    Gradients of hidden states and head in fp32, copies of them in `dtype`, and a tile of logits in `dtype`; without
    Triton seven more tiles in fp32.
    """
    text = config.get_text_config()
    size = dtype.itemsize
    weights = text.vocab_size * text.hidden_size
    hidden = tokens * text.hidden_size
    copies = 4 if size == 4 else 4 + size  # .to(fp32) of what is fp32 copies nothing
    rows = min(tokens, HEAD_TOKENS)
    tile = size * rows * HEAD_COLUMNS
    if not on_gpu:
        tile = (size + 7 * 4) * rows * min(text.vocab_size, HEAD_COLUMNS)
    return copies * (weights + hidden) + tile


# Upstream: torch 2.13, distributed/_tools/mem_tracker.py, MemTracker._update_peak_stats: also updates the peaks of
# all modules after every operation, so that a trace takes ten times the time.
# Canary: test_canary_mem_tracker_visits_every_module_after_every_operation
class _PeakTracker(MemTracker):
    def _update_peak_stats(self, peak_state) -> None:
        for device, current in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < current["Total"]:
                self._peak_mem[device] = current["Total"]
                self._peak_mem_snap[device] = dict(current)


def _trace_bytes(
    config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool, kinds: list[str], tokens: int
) -> np.ndarray:
    """[2] bytes beside the weights, after the forward and at the peak of the backward, with a block for each kind."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    text.vocab_size = min(text.vocab_size, 1024)  # the embedding's gradient is no activation
    text.pad_token_id = None
    with FakeTensorMode(allow_non_fake_inputs=True):
        config._attn_implementation = SHAPES
        model = _build(config, dtype).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():  # as the launchers do: a gradient is reduced, and gone
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        tracker = _PeakTracker()
        tracker.track_external(model)
        start = _total(tracker, "current")
        with tracker, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Expected a tensor or a traceable", UserWarning)  # MemTracker's own
            ids = torch.zeros(1, tokens, dtype=torch.long)
            output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
            saved = _total(tracker, "current")
            output.sum().backward()
        peak = _total(tracker, "peak")
    return np.array([saved - start, peak - start], dtype=float)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _total(tracker: MemTracker, moment: str) -> int:
    return sum(device["Total"] for device in tracker.get_tracker_snapshot(moment).values())
