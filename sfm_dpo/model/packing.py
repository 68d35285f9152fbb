"""Packing: the padding-free forward, one row of real tokens (attention.py keeps them apart); compiled layers.

TRL pads chosen and rejected to the longest of the batch and has no padding-free DPO (1.16: `padding_free` warns and
pads). Here padding is undone at the model's door: the forward that TRL's fused LM head put in place is wrapped, so
collator, losses and metrics stay TRL's and never see the difference.
"""

import functools
import inspect
import types

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sfm_dpo.model.attention import PACKED, boundary_mask, register

# Kinds of layer (config.layer_types) in which only attention carries anything from one token to another
_PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention"}


def enable_padding_free(model: PreTrainedModel) -> None:
    """Make `model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` compute only real tokens.

    `model` has been given TRL's `add_fused_lm_head`; under PEFT it is the base model. Such a call takes TRL's padded
    `[rows, L]` batch, runs the fused forward once on one row `[1, T]` of the T real tokens, and returns TRL's
    `FusedCausalLMOutput` with each per-token field back in `[rows, L - 1]`, zero where the padded path has zero. Every
    other call (`generate`, a plain forward) goes to the forward that was there.

    Raises ValueError, one line, where sequences in one row would not be independent of each other.
    """
    check_packable(model)
    if "forward" not in vars(model):
        raise ValueError("enable_padding_free needs a model on which TRL's add_fused_lm_head was called")
    register()
    model.set_attn_implementation(PACKED)
    fused_forward = model.forward
    # How many arguments stand between input_ids and attention_mask: none but in GPT-2, whose cache does
    gap = list(inspect.signature(type(model.base_model).forward).parameters).index("attention_mask") - 2

    # An attribute of the instance, like TRL's own: DeepSpeed, DDP, FSDP and PEFT all call it through the module. The
    # signature stays the model's own, against which `generate` validates its arguments.
    @functools.wraps(type(model).forward)
    def packed_forward(self, *args, fused_lm_head=False, **kwargs):
        if fused_lm_head and kwargs.get("attention_mask") is not None:
            return _run_packed(fused_forward, gap, *args, **kwargs)
        return fused_forward(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = types.MethodType(packed_forward, model)


def _run_packed(fused_forward, gap, *, input_ids, attention_mask, labels, num_items_in_batch=None, **kwargs):
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"padding_free: true cannot pack the model input '{name}'; set padding_free: false")
    rows, length = input_ids.shape
    # The only two places where the host waits for the device: how many real tokens, and the longest sequence
    real = attention_mask.flatten().nonzero().squeeze(1)
    lengths = attention_mask.sum(dim=1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    boundaries = boundary_mask(cu_seqlens, int(lengths.max()))
    # What each position predicts: shifted in the grid, where no sequence's last position can reach the next sequence
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)

    output = fused_forward(
        input_ids.flatten()[real][None],
        # By position: TRL also looks for a keyword `attention_mask`, to leave padding out of the routers' balancing
        # loss, and there is none left
        *[None] * gap,
        boundaries,
        position_ids=(attention_mask.cumsum(dim=1) - 1).flatten()[real][None],
        shift_labels=next_labels.flatten()[real][None],
        num_items_in_batch=num_items_in_batch,
        fused_lm_head=True,
        **kwargs,
    )
    for name, value in list(output.items()):
        if value.shape == (1, real.numel()):
            grid = value.new_zeros(rows * length).index_copy(0, real, value[0])
            output[name] = grid.view(rows, length)[:, :-1].clone()  # FSDP2 wants no view: it hooks the tensor itself
    return output


def check_packable(model: PreTrainedModel) -> None:
    """Raise ValueError if anything but attention with boundaries could carry one sequence into the next.

    Decided by what the model is, not by its name: the kinds of layer it declares, transformers' own flags, and the
    modules themselves (each layer must compute its attention through AttentionInterface, and none may convolve).
    """
    config = model.config.get_text_config()
    obstacle = _why_not_packable(model, config)
    if obstacle is not None:
        raise ValueError(
            f"padding_free: true is not possible for model_type '{config.model_type}': {obstacle}; "
            "set padding_free: false"
        )


def _why_not_packable(model: PreTrainedModel, config) -> str | None:
    carries = "carry state along the row, from one sequence into the next"
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _PACKABLE_LAYER_TYPES:
            return f"its '{layer_type}' layers {carries} or see whom packed attention does not know"
    layers = [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                return f"convolutions ({type(module).__name__} in {type(layer).__name__}) {carries}"
    if model._is_stateful:
        return f"it has recurrent layers (transformers marks it stateful), which {carries}"
    # A model that transformers runs with FlashAttention tells its attention everything by keyword (window, sinks,
    # softcap); another one may say it in a mask, and packed attention has none to read
    if not layers or not model._supports_flash_attn or not model._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface with FlashAttention's arguments"
    for layer in layers:
        if not any(map(_calls_attention_interface, map(type, layer.modules()))):
            return f"{type(layer).__name__} does not compute attention through transformers' AttentionInterface"
    if getattr(config, "attention_dropout", 0.0):
        return "packed attention has no dropout (attention_dropout > 0: set it to 0.0 in model_init_kwargs)"
    return None


# Upstream: transformers 5.23, modeling_utils.py, PreTrainedModel._can_set_attn_implementation: says of a model as a
# whole whether it uses AttentionInterface, also by its source; no flag says it of a layer.
# Canary: test_canary_attention_interface_of_a_layer
@functools.cache
def _calls_attention_interface(module_class: type[torch.nn.Module]) -> bool:
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(module_class.forward)


def compile_layers(model: PreTrainedModel, backend: str, mode: str | None) -> None:
    """torch.compile for each decoder layer of `model`, in place: names in the state dict stay as they were.

    Layers that differ in weights only share one graph; kinds of layer (OLMo 3's windows), training and reference
    forward have one each. `generate` runs uncompiled.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend, mode=mode, recompile_limit=32)
    # Upstream: transformers 5.23, cache_utils.py, Cache.update: takes the layer's index, for each of which
    # torch.compile makes a graph of the layer. Canary: test_canary_graph_for_every_layer
    model.generate = torch.compiler.set_stance("force_eager")(model.generate)
