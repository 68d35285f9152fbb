"""Model FLOPs by formula.

The count includes 2 FLOPs for each weight that a real token is multiplied with, 4 x head size x heads for each visible
(query, key) pair, and the LM head for response tokens. A backward takes as much again for the activations and for the
trained weights. Padding, shared prompts, recomputation (gradient checkpointing) and the optimizer are not counted.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel
from trl.trainer.utils import get_peak_flops

from sfm_dpo.model.loading import ATTENTION
from sfm_dpo.model.sharding import numel, shape


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 FLOPs per second of a GPU with a name such as torch.cuda's; None if TRL's table lacks it."""
    # The GPU of a GH200 has the 989 TFLOPS of an H200 (NVIDIA's data sheets)
    return get_peak_flops(gpu.replace("GH200", "H200"), "bfloat16")


def count_experts(config: PretrainedConfig) -> int | None:
    """Experts in each layer of a mixture of experts, else None."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), None)


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward, computed from the model's shape."""

    per_token: int  # in the layers' matrices
    per_response_token: int  # in the LM head
    attention: tuple[tuple[int | None, int], ...]  # (window, FLOPs of a visible pair) of each kind of layer
    trained: tuple[float, float] = (1.0, 1.0)  # trained share of the layers' matrices, and of the head

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ForwardFlops":
        """From a model, which may be on the meta device; in a mixture of experts only the active weights count."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        experts = count_experts(config)
        active = (getattr(config, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
        weights = trained = 0
        reader = model if config is model.config else model.get_decoder()  # of a multimodal model, what reads text
        for name, parameter in reader.named_parameters():
            if parameter is head or parameter in embeddings or len(shape(parameter)) < 2:
                continue
            is_expert = ".experts." in name or (len(shape(parameter)) == 3 and shape(parameter)[0] == experts)
            count = int(numel(parameter) * (active if is_expert else 1))
            weights += count
            trained += count * parameter.requires_grad
        shares = (trained / weights, float(head.requires_grad))
        return cls(2 * weights, 2 * numel(head), attention_flops(config), shares)

    def __call__(
        self, lengths: torch.Tensor, response_tokens: int, training: bool = False, shared: torch.Tensor | None = None
    ) -> int:
        """FLOPs of a forward (or of a forward and backward, if `training`) over sequences of `lengths` [n] real
        tokens; prefix sharing does not compute the first `shared` [n] tokens."""
        layers, head = (2 + share if training else 1 for share in self.trained)
        shared = torch.zeros_like(lengths) if shared is None else shared
        tokens = int((lengths - shared).sum())
        total = layers * self.per_token * tokens + head * self.per_response_token * response_tokens
        for window, flops in self.attention:
            visible = _visible(lengths, window) - _visible(shared, window)
            total += (3 if training else 1) * flops * float(visible.sum())
        return int(total)


def _visible(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """[n] number of causal (query, key) pairs within the window in sequences of these lengths."""
    n = lengths.double()
    inside = n.clamp(max=window) if window is not None else n
    return inside * (inside + 1) / 2 + (n - inside) * inside


def attention_flops(config: PretrainedConfig) -> tuple[tuple[int | None, int], ...]:
    """(window, FLOPs for a visible pair) of each kind of layer."""
    total: Counter[int | None] = Counter()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * getattr(config, "num_hidden_layers", 0)
    for kind, layer in zip(kinds, config.per_layer_config, strict=False):  # layers may differ in their heads
        if kind not in ATTENTION or not hasattr(layer, "num_attention_heads"):
            continue  # in linear attention only the projections count
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        sizes = (getattr(layer, name, None) for name in ("qk_head_dim", "v_head_dim"))  # as in DeepSeek
        window = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        total[window] += 2 * sum(size or head_dim for size in sizes) * layer.num_attention_heads
    return tuple(total.items())
