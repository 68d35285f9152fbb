"""Packing: the padding-free forward on one row of real tokens (attention.py separates the sequences).

TRL has no padding-free DPO (1.16: `padding_free` warns and pads). This module wraps the forward that TRL's fused LM
head installs, so collator, losses and metrics stay TRL's.
"""

import functools
import importlib.util
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sfm_dpo.common.errors import UserError
from sfm_dpo.model.attention import PACKED, boundary_arguments
from sfm_dpo.model.loading import ATTENTION, balancing_coefficient, blocks

log = logging.getLogger(__name__)


def enable_padding_free(model: PreTrainedModel, prefix_sharing: bool = False) -> Callable[[], None]:
    """Makes `model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` compute only real tokens.

    `model` must have TRL's `add_fused_lm_head`; under PEFT it is the base model. Such a call takes TRL's padded
    `[rows, L]` batch, runs the fused forward on one row `[1, T]` of the T real tokens, and returns TRL's
    `FusedCausalLMOutput` with each per-token field back in `[rows, L - 1]`, zero where the padded path has zero. With
    `prefix_sharing` the row holds the prompt of a pair once (`find_shared`); neither log-probs nor gradients change.
    `counts`, its numbers of `tokens` and of `computed` tokens, saves the host from waiting for the device.
    Returns the function that undoes it. Raises UserError if sequences in one row would not be independent of each
    other.
    """
    if obstacle := why_not_packed(model):
        raise UserError(f"padding_free True: {obstacle}; set padding_free: false")
    before = model.config._attn_implementation
    model.set_attn_implementation(PACKED)
    nets = find_delta_nets(model)
    if not has_delta_net_kernels():
        for net in nets:
            net.forward = functools.partial(_run_by_sequence, net.forward)
    hook = model.base_model.register_forward_pre_hook(_add_empty_mask, with_kwargs=True)
    fused_forward = model.forward

    # Set on the instance, as TRL does. It keeps the model's signature, which `generate` inspects
    @functools.wraps(type(model).forward)
    def packed_forward(self, *args, fused_lm_head=False, **kwargs):
        if fused_lm_head and kwargs.get("attention_mask") is not None:
            return _run_packed(fused_forward, prefix_sharing, bool(nets), *args, **kwargs)
        kwargs.pop("counts", None)
        return fused_forward(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = types.MethodType(packed_forward, model)

    def disable() -> None:
        model.forward = fused_forward
        model.set_attn_implementation(before)
        hook.remove()
        for net in nets:
            vars(net).pop("forward", None)

    return disable


def _run_packed(fused_forward, prefix_sharing, hybrid, *, input_ids, attention_mask, labels, counts=None, **kwargs):
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"the model input '{name}' cannot be packed")
    rows, length = input_ids.shape
    counts = counts or {}
    real = _find(attention_mask, counts.get("tokens"))
    lengths = attention_mask.sum(dim=1)
    cu_seqlens = _cumulate(lengths)
    shared_keys: dict[str, torch.Tensor] = {}
    if prefix_sharing:
        shared = find_shared(input_ids, attention_mask, labels != -100)
        computed = attention_mask.bool() & ~shared
        position = (computed.flatten().cumsum(0, dtype=torch.int32) - 1).view(rows, length)  # in the row
        keys = torch.where(shared, position.roll(rows // 2, 0), position).flatten()[real]
        order = shared.flatten()[real].byte().argsort(stable=True)  # own keys first
        shared_keys = {"cu_seq_lens_k": cu_seqlens, "shared_keys": keys, "shared_order": order.to(torch.int32)}
        cu_seqlens = _cumulate(computed.sum(dim=1))
        real = _find(computed, counts.get("computed"))
    if hybrid and has_delta_net_kernels():  # the convolution takes only this, and without it mixes sequences silently
        kwargs["seq_idx"] = torch.repeat_interleave(lengths, output_size=len(real)).to(torch.int32)[None]
    # What each position predicts: shifted in the padded grid, where a sequence's last position has no successor
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)

    output = fused_forward(
        input_ids.flatten()[real][None],
        position_ids=(attention_mask.cumsum(dim=1) - 1).flatten()[real][None],
        shift_labels=next_labels.flatten()[real][None],
        fused_lm_head=True,
        **boundary_arguments(cu_seqlens, length, **shared_keys),
        **kwargs,
    )
    for name, value in list(output.items()):
        if value.shape == (1, real.numel()):
            grid = value.new_zeros(rows * length).index_copy(0, real, value[0])
            output[name] = grid.view(rows, length)[:, :-1].clone()  # not a view: FSDP2 hooks the tensor itself
    return output


def _add_empty_mask(backbone: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Adds a 4-D mask, which transformers passes on as it is; without one, the host waits to learn whether positions
    restart. The head must not get it, because TRL's balancing loss reads it."""
    if "cu_seq_lens_q" in kwargs:
        kwargs["attention_mask"] = kwargs["cu_seq_lens_q"].new_empty(0, 0, 0, 0)
    return args, kwargs


def has_delta_net_kernels() -> bool:
    """Whether transformers computes gated delta nets by kernels, which take boundaries; its own code does not."""
    return all(map(importlib.util.find_spec, ("fla", "causal_conv1d")))


@torch.compiler.disable
def _run_by_sequence(forward, hidden_states: torch.Tensor, *args, cu_seq_lens_q=None, **kwargs) -> torch.Tensor:
    """A gated delta net's forward, `[1, T, hidden]`, one sequence at a time, each from an empty state."""
    if cu_seq_lens_q is None:
        return forward(hidden_states, *args, **kwargs)
    sequences = hidden_states.split(cu_seq_lens_q.diff().tolist(), dim=1)
    return torch.cat([forward(sequence, *args, **kwargs) for sequence in sequences], dim=1)


def _find(mask: torch.Tensor, number: int | None) -> torch.Tensor:
    """Positions of the `number` ones in the flattened mask, counted if it is None."""
    size = int(mask.sum()) if number is None else number
    return mask.flatten().nonzero_static(size=size).squeeze(1)


def _cumulate(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def find_shared(input_ids: torch.Tensor, attention_mask: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Tokens that prefix sharing does not compute, bool `[2B, L]`, in TRL's batch, where chosen rows precede rejected
    ones: the tokens of a rejected row that its chosen row also begins with. The last one before the first response
    token is computed in both, because it predicts different tokens."""
    half = len(input_ids) // 2
    ids = input_ids.masked_fill(attention_mask == 0, -1)
    predicts = F.pad(responses[:, 1:], (0, 1))
    alike = (ids[:half] == ids[half : 2 * half]) & ~predicts[:half] & ~predicts[half : 2 * half]
    prefix = alike.cumprod(dim=1).bool() & (attention_mask[half : 2 * half] == 1)
    return F.pad(prefix, (0, 0, half, len(input_ids) - 2 * half))


def why_not_shared(model: PreTrainedModel, packed: bool, router_aux_loss_coef: float | None) -> str | None:
    """Why a pair's prompt cannot be computed once for both answers, or None."""
    config = model.config.get_text_config()
    if not packed:
        return "padding_free is off"
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in ATTENTION:
            return f"'{layer_type}' layers of model_type '{config.model_type}' carry state along the sequence"
    if balancing_coefficient(router_aux_loss_coef, config):
        return "router_aux_loss_coef: that loss counts the tokens of both prompts"
    return None


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why layers carry state from one sequence into the next, by declared types, transformers' flags and modules; or
    None. What else cannot be packed raises when it is tried, or differs from the padded path (choose_path.py)."""
    config = model.config.get_text_config()
    nets = find_delta_nets(model)
    inside = {module for net in nets for module in net.modules()}
    modules = [module for layer in blocks(model) for module in layer.modules() if module not in inside]
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in modules)
    is_recurrent = model._is_stateful or "linear_attention" in (getattr(config, "layer_types", None) or ())
    if convolves or (is_recurrent and not nets):
        what = "its convolutions or recurrent layers carry state from one sequence into the next"
        return f"model_type '{config.model_type}': {what}"
    return None


# Upstream: transformers 5.24, models/*/modeling_*.py, *GatedDeltaNet: no base class or flag marks these nets. Their
# parameters do: Mamba also has D, and Kimi's decay is a module of its own. Canary: test_canary_delta_nets
def find_delta_nets(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Gated delta nets of transformers, whose code passes boundaries to kernels (OLMo-Hybrid, Qwen3-Next, Qwen3.5)."""
    return [module for module in model.modules() if _is_delta_net(module)]


def _is_delta_net(module: torch.nn.Module) -> bool:
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if parameters != {"A_log", "dt_bias"} or "conv1d" not in dict(module.named_children()):
        return False
    return type(module).forward.__module__.startswith("transformers.models.")  # all of them are tried by the canary
