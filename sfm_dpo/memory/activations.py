"""Memory of activations, traced from the model's configuration only.

The model runs forward and backward on fake tensors, which have shapes but no memory.
"""

import copy
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sfm_dpo.model.attention import boundary_arguments, packed_attention_forward
from sfm_dpo.model.flops import count_experts
from sfm_dpo.model.loading import build_model, checkpoint_layers
from sfm_dpo.model.packing import find_delta_nets

SHAPES = "packed_shapes"  # packed attention with the GPU's kernel, whose shapes are known on every device
TRACED_TOKENS = 4096  # below, a mixture of experts and an LM head's copies are not linear in the tokens
TRACED_RECURRENT_TOKENS = 1024  # transformers' own code of a gated delta net is slow
TRACED_SEQUENCES = 2
HEAD_TOKENS = 4096  # rows of a tile of logits (TRL 1.16, kernels/chunked_logprob.py)
HEAD_COLUMNS = 32768

AttentionInterface.register(SHAPES, partial(packed_attention_forward, varlen=True))
AttentionMaskInterface.register(SHAPES, sdpa_mask)


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
        last = checkpointed if share == 1 else stored  # see checkpoint_layers
        return cls(saved, saved + last.peak - last.saved)


def trace_activations(config: PretrainedConfig, dtype: torch.dtype, checkpointing: bool, keys: float) -> Activations:
    """Activations of the backbone, without the LM head. `keys`: for each computed token, 1 in packed rows, more where
    they share prompts, 0 in padded rows. If the model has no gradient checkpointing, `checkpointing` changes nothing.

    Traced at two lengths, and with one and two blocks of each kind, to find what each token and each further block
    adds. Raises whatever the model's code raises."""
    text = config.get_text_config()
    if dtype == torch.float32 and count_experts(text):
        half = trace_activations(config, torch.bfloat16, checkpointing, keys)  # products over experts need 16 bit
        return Activations(2 * half.saved, 2 * half.peak)
    counts = Counter(getattr(text, "layer_types", None) or ["block"] * text.num_hidden_layers)
    base = TRACED_RECURRENT_TOKENS if "linear_attention" in counts else TRACED_TOKENS
    totals = []
    for tokens in (base, 2 * base):
        one_each = _trace_bytes(config, dtype, checkpointing, list(counts), tokens, keys)
        others = 0
        for kind, count in counts.items():
            if count > 1:
                with_another = _trace_bytes(config, dtype, checkpointing, [*counts, kind], tokens, keys)
                others = others + (count - 1) * (with_another - one_each)
        totals.append(one_each + others)
    per_token = (totals[1] - totals[0]) / base
    fixed = totals[0] - per_token * base
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


class LiveBytes(TorchDispatchMode):
    """Bytes of the living tensors that operators have made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._storages:
            self._storages[storage] = True
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._discount, storage.nbytes())

    def _discount(self, size: int) -> None:
        self.now -= size


def _trace_bytes(
    config: PretrainedConfig, dtype: torch.dtype, share: float, kinds: list[str], tokens: int, keys: float = 1.0
) -> np.ndarray:
    """[2] bytes besides the weights, after the forward and at the backward's peak, with a block for each kind, a
    `share` of them checkpointed."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        model = build_backbone(config, dtype, kinds, packed=keys > 0)
        if share and model.supports_gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            checkpoint_layers(model, round(share * len(kinds)))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:  # as the launchers do: a gradient is freed once it is reduced
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        weights = live.now
        output = run_backbone(model, tokens, keys)
        saved = live.now
        output.sum().backward()
        return np.array([saved - weights, live.peak - weights], dtype=float)


def build_backbone(config: PretrainedConfig, dtype: torch.dtype, kinds: list[str], packed: bool) -> PreTrainedModel:
    """The model with a block for each kind, if `packed` attention by the GPU's kernel, and a small vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    text.vocab_size = min(text.vocab_size, 1024)  # the embedding's gradient is not an activation
    text.pad_token_id = None
    if packed:
        config._attn_implementation = SHAPES
    model = build_model(config, dtype).train()
    for net in find_delta_nets(model):  # their code without kernels refuses boundaries
        net.register_forward_pre_hook(_drop_boundaries, with_kwargs=True)
    return model


def run_backbone(model: PreTrainedModel, tokens: int, keys: float) -> torch.Tensor:
    """Its last hidden states for `tokens`; `keys` as in `trace_activations`."""
    if not keys:
        rows = torch.zeros(TRACED_SEQUENCES, tokens // TRACED_SEQUENCES, dtype=torch.long)
        return model.base_model(rows, attention_mask=torch.ones_like(rows), use_cache=False).last_hidden_state
    ids = torch.zeros(1, tokens, dtype=torch.long)
    bounds = torch.zeros(TRACED_SEQUENCES + 1, dtype=torch.int32)
    shared: dict[str, torch.Tensor] = {}
    if keys > 1:  # they are copied, which frees the output of a projection of queries, keys and values in one
        gathered = torch.zeros(round(keys * tokens), dtype=torch.int32)
        shared = {"cu_seq_lens_k": bounds, "shared_keys": gathered, "shared_order": gathered}
    boundaries = boundary_arguments(bounds, tokens, **shared) | {"attention_mask": ids.new_empty(0, 0, 0, 0)}
    return model.base_model(ids, position_ids=ids, use_cache=False, **boundaries).last_hidden_state


def _drop_boundaries(net: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"cu_seq_lens_q": None}


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
