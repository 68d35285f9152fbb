"""Model FLOPs by formula, and the peak FLOP/s of known GPUs.

FLOPs counted are the useful ones, for real tokens only (under prefix sharing for a pair's prompt once): 2 for each
weight a token is multiplied with, 4 x head size x heads for each (query, key) pair that attention lets see each other,
in the window of the layer; the LM head for response tokens; for a training step the backward's gradients of
activations once more, and of the weights that are trained once more: three forwards, under LoRA about 2.3. Padding,
recomputation under gradient checkpointing and the optimizer are not counted; a reference forward in the step is
counted once more.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from sfm_dpo.model.sharding import ATTENTION, numel, shape

# Dense bf16 peak in FLOP/s, without sparsity, from the vendors' data sheets.
PEAK_FLOPS = {
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(gpu_name: str) -> float | None:
    """Dense bf16 FLOP/s by the name that torch.cuda.get_device_name gives; None for a GPU that is not listed."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in gpu_name), None)


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward, by the model's shape.

    Attributes:
        per_token: in the layers' matrices.
        per_response_token: in the LM head.
        attention: for each kind of layer (window or None, FLOPs for a visible (query, key) pair over these layers).
        trained: share of the layers' matrices that is trained, and of the head.
    """

    per_token: int
    per_response_token: int
    attention: tuple[tuple[int | None, int], ...]
    trained: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ForwardFlops":
        """Of a model, also on the meta device. Of a mixture of experts the active weights count."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        weights = trained = 0
        for name, parameter in model.named_parameters():
            if parameter is head or parameter is model.get_input_embeddings().weight or len(shape(parameter)) < 2:
                continue
            active = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
            weights += int(numel(parameter) * active)
            trained += int(numel(parameter) * active) * parameter.requires_grad
        return cls(2 * weights, 2 * numel(head), _attention(config), (trained / weights, float(head.requires_grad)))

    def __call__(
        self,
        lengths: torch.Tensor,
        response_tokens: int,
        training: bool = False,
        shared: torch.Tensor | None = None,
    ) -> int:
        """FLOPs of a forward, or of a forward and backward, over sequences of these lengths, [n] real tokens each, of
        which prefix sharing does not compute the first `shared` [n]."""
        layers, head = (2 + share if training else 1 for share in self.trained)
        shared = torch.zeros_like(lengths) if shared is None else shared
        tokens = int((lengths - shared).sum())
        total = layers * self.per_token * tokens + head * self.per_response_token * response_tokens
        for window, flops in self.attention:
            visible = _visible(lengths, window) - _visible(shared, window)
            total += (3 if training else 1) * flops * float(visible.sum())
        return int(total)


def _visible(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """[n] causal (query, key) pairs within the window in sequences of these lengths."""
    n = lengths.double()
    inside = n.clamp(max=window) if window is not None else n
    return inside * (inside + 1) / 2 + (n - inside) * inside


def _attention(config: PretrainedConfig) -> tuple[tuple[int | None, int], ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flops = 4 * head_dim * config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kinds = [kind for kind in kinds if kind in ATTENTION]  # of linear attention the projections alone count
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    return tuple((window, flops * windows.count(window)) for window in dict.fromkeys(windows))
