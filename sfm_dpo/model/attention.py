"""Packed causal attention: many sequences in one row, no attention across their boundaries.

`register()` adds the attention implementation "packed" to transformers. The boundaries of the sequences travel as the
attention mask (`boundary_mask`): transformers hands a 4-D mask through to every attention call untouched, as an
argument of the layer, and gradient checkpointing, reentrant or not, calls a layer again with the arguments it had. So
a recomputed layer sees the same boundaries by construction; nothing is kept beside the call that could be stale when
the backward pass comes. A 4-D mask also keeps transformers from building a [T, T] mask of its own.

Under prefix sharing a row holds [prompt, chosen] and, of the rejected sequence, only what follows the shared tokens.
Its queries see the keys of the prompt in the chosen sequence: keys and values are gathered, and have boundaries of
their own, longer than those of the queries, whose causal mask is aligned at the end.

A call with any other mask (padded evaluation, `generate`) goes to transformers' own SDPA with the mask made for it.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import CALIBRATION

PACKED = "packed"
_BLOCK = 128  # queries in one call where a window cuts

# What transformers' models ask of an attention function beside scale and window (keywords over all of
# transformers/models). None of it is in varlen_attn's kernel, and nothing a model asks for may be left out in silence.
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")


def register() -> None:
    """Make "packed" a valid `attn_implementation`, whose masks (without boundaries) are those of "sdpa"."""
    AttentionInterface.register(PACKED, packed_attention_forward)
    AttentionMaskInterface.register(PACKED, sdpa_mask)


def boundary_mask(
    cu_seqlens: torch.Tensor, max_length: int, cu_keys: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Boundaries in the form of a 4-D attention mask: int32 `[1, 1, max_length, n + 1]`, a view without memory.

    `cu_seqlens`: int32 `[n + 1]`, where the n sequences begin, and the total; `max_length`: of the longest with its
    keys. Sizes in the shape spare every layer the device sync that reading them from the tensor would be, and are
    dynamic to torch.compile. With other keys than queries it is `[n + 1, 1, max_length, 2 (n + 1) + T_k]`: sequence i
    sees the tokens `keys[cu_keys[i]:cu_keys[i + 1]]` of the row, the last of which are its own (int32 both).
    """
    if cu_keys is None or keys is None:
        return cu_seqlens.view(1, 1, 1, -1).expand(1, 1, max_length, -1)
    return torch.cat([cu_seqlens, cu_keys, keys]).view(1, 1, 1, -1).expand(len(cu_seqlens), 1, max_length, -1)


def activate_flash(choice: str) -> None:
    """Makes `varlen_attn` compute by FA2 (PyTorch's own), FA3 or FA4; auto: check_gpu.sh's fastest here, else FA2.

    Raises UserError where that cannot be activated.
    """
    name = "FA2" if choice == "auto" else choice.upper()
    source = ""
    try:
        if choice == "auto" and CALIBRATION.exists():
            source = f" (by {CALIBRATION})"
            measured = json.loads(CALIBRATION.read_text())
            if measured["gpu"] == torch.cuda.get_device_name():
                name = measured.get("flash") or name
        torch_attention.restore_flash_attention_impl(_raise_warn=False)
        if name != "FA2":
            torch_attention.activate_flash_attention_impl(name)
    except Exception as error:  # its package is not installed, or raises anything
        message = f"flash_attention {choice}{source}: cannot be activated: {error}; set flash_attention: fa2"
        raise UserError(message) from error


def describe_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """One line for the log: which kernel computes packed attention for these heads."""
    obstacle = _why_not_varlen(device, dtype, head_dim, head_dim)
    if obstacle is None:
        flash = torch_attention.current_flash_attention_impl() or "FA2"
        return f"torch.nn.attention.varlen.varlen_attn ({flash}), all sequences in one call"
    return f"scaled_dot_product_attention, sequence by sequence ({obstacle})"


def _why_not_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    if device.type != "cuda":
        return f"varlen_attn has no {device.type} kernel"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim != value_dim or head_dim % 8 or head_dim > 256:
        return f"varlen_attn takes equal head sizes in steps of 8 up to 256, not {head_dim} and {value_dim}"
    return None


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention function in the form of transformers' AttentionInterface.

    `query` `[1, H, T, D]`, `key` and `value` `[1, H_kv, T, D]`, T = tokens of all sequences; `attention_mask` from
    `boundary_mask`. A query sees itself and the `sliding_window - 1` (or all) tokens before it in its own sequence.
    Returns `[1, T, H, D]` and None. Raises ValueError where the model asks for what the kernels do not compute.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{_model_type(module)}: packed attention has no '{name}'; set padding_free: false")
    if dropout:
        raise ValueError(f"{_model_type(module)}: packed attention has no dropout; set attention_dropout to 0.0")
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise ValueError(f"{_model_type(module)}: packed attention is causal only; set padding_free: false")

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # RoPE in fp32 leaves query and key wider than value; autocast casts for SDPA, not for a custom operator
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    boundaries = attention_mask[0, 0, 0]
    n, _, max_length, _ = attention_mask.shape
    cu_seqlens = cu_keys = boundaries
    if n > 1:  # other keys than queries
        cu_seqlens = boundaries[:n]
        cu_keys = boundaries[n : 2 * n]
        keys = boundaries[2 * n :]
        key = key.transpose(1, 2).index_select(1, keys).transpose(1, 2)
        value = value.transpose(1, 2).index_select(1, keys).transpose(1, 2)
    if _why_not_varlen(query.device, query.dtype, query.shape[-1], value.shape[-1]) is not None:
        by_sequence = _compiled_sdpa_by_sequence if torch.compiler.is_compiling() else _sdpa_by_sequence
        return by_sequence(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window), None
    return _varlen(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window, max_length), None


def _varlen(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window, max_length) -> torch.Tensor:
    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens,
        cu_keys,
        max_length,
        max_length,
        scale=scaling,
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0)


def check_shared_keys(
    device: torch.device, dtype: torch.dtype, head_dim: int, kernel: Callable[..., torch.Tensor] | None = None
) -> None:
    """Compares a small call of the kernel, by default the one in use, if it is not SDPA anyway, with SDPA in fp32,
    forward and backward: more keys than queries, grouped queries, with and without a window.

    `varlen_attn` does not document where it aligns a causal mask that is not square, and step 0 cannot see it: policy
    and reference would be wrong alike. Raises ValueError where they differ.
    """
    if kernel is None:
        if _why_not_varlen(device, dtype, head_dim, head_dim) is not None:
            return
        kernel = _varlen
    generator = torch.Generator().manual_seed(0)
    own = [150, 9, 70, 1]
    seen = [150, 9, 170, 6]
    cu_seqlens, cu_keys = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (own, seen))
    shapes = (4, sum(own)), (2, sum(seen)), (2, sum(seen)), (4, sum(own))
    *qkv, weight = (torch.randn(1, *shape, head_dim, generator=generator).to(device, dtype) for shape in shapes)

    def compute(attend: Callable[..., torch.Tensor], precision: torch.dtype) -> list[torch.Tensor]:
        tensors = [x.to(precision).requires_grad_() for x in qkv]
        output = attend(*tensors, cu_seqlens, cu_keys, None, window)
        return [output, *torch.autograd.grad(output, tensors, weight.transpose(1, 2).to(precision))]

    for window in (None, 16):
        oracle = compute(_sdpa_by_sequence, torch.float32)
        results = compute(partial(kernel, max_length=max(seen)), dtype)
        for expected, got, name in zip(oracle, results, ("output", "d query", "d key", "d value"), strict=True):
            error = ((expected - got).norm() / expected.norm()).item()
            if not error < 0.05:  # rounding to 16 bit: 0.005; a mask that is aligned at the start: 0.7
                raise ValueError(
                    f"prefix_sharing: {describe_kernel(device, dtype, head_dim)} is off SDPA by {error:.0%} (window "
                    f"{window}, {name}) where keys outnumber queries; set prefix_sharing: false"
                )


def _model_type(module: Any) -> str:
    return f"model_type '{module.config.model_type}'"


def _sdpa_by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_keys: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """`[1, H, T, D]` to `[1, T, H, D]`; `key` and `value` may hold more tokens before those of `query`.

    Where a window cuts or keys come before, blocks of queries with the keys they can see: one masked call would
    compute every score (1.9 times the time on the CPU, at 1,024 tokens with a window of 512).
    """
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    own = cu_seqlens.diff().tolist()
    seen = cu_keys.diff().tolist()
    window = max(seen) if sliding_window is None else sliding_window
    # Row i, column i + d: the key d - (window - 1) tokens from query i. Slices of it mask every block
    band = torch.ones(_BLOCK, window + _BLOCK - 1, dtype=torch.bool, device=query.device).triu().tril(window - 1)
    outputs = []
    for q, k, v in zip(query.split(own, 2), key.split(seen, 2), value.split(seen, 2), strict=True):
        n = k.shape[2]
        before = n - q.shape[2]
        if n <= window and not before:
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
            continue
        for part, start in zip(q.split(_BLOCK, 2), range(before, n, _BLOCK), strict=True):
            stop = start + part.shape[2]
            origin = start - window + 1
            first = max(0, origin)
            mask = band[: stop - start, first - origin : stop - origin]
            k_seen = k[:, :, first:stop]
            v_seen = v[:, :, first:stop]
            outputs.append(F.scaled_dot_product_attention(part, k_seen, v_seen, attn_mask=mask, scale=scaling))
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1)


# For torch.compile an operator that it does not look into: the lengths are Python integers in there, so that each new
# set of them would be a recompilation. (With torch.compiler.disable a layer under gradient checkpointing is not
# compiled at all: no graph may break inside a checkpoint.) The backward computes the attention once more.
_compiled_sdpa_by_sequence: Any = torch.library.custom_op(
    "sfm_dpo::sdpa_by_sequence", _sdpa_by_sequence, mutates_args=()
)


@_compiled_sdpa_by_sequence.register_fake
def _(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window):
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


@torch.library.custom_op("sfm_dpo::sdpa_by_sequence_backward", mutates_args=())
def _compiled_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_keys: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def attend(query, key, value):
        return _sdpa_by_sequence(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window)

    backward = torch.func.vjp(attend, query, key, value)[1]  # autograd's tape is off inside an operator
    d_query, d_key, d_value = backward(grad)
    return d_query.contiguous(), d_key.contiguous(), d_value.contiguous()


@_compiled_backward.register_fake
def _(grad, query, key, value, *args):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scaling, ctx.sliding_window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    gradients = _compiled_backward(grad, *ctx.saved_tensors, ctx.scaling, ctx.sliding_window)
    return *gradients, None, None, None, None


_compiled_sdpa_by_sequence.register_autograd(_backward, setup_context=_setup_context)
