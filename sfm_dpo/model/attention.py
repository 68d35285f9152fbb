"""Packed causal attention: many sequences in one row, no attention across their boundaries.

The boundaries are keyword arguments of the model's forward (`boundary_arguments`): transformers passes them on to
every attention call, and gradient checkpointing calls a layer again with the same arguments. Under prefix sharing a
rejected sequence holds only the tokens after the shared ones; its queries see the prompt's keys in the chosen
sequence. Keys and values are gathered, with their own boundaries, and the causal mask is aligned at the end.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_3_available, is_flash_attn_4_available

from sfm_dpo.common.errors import UserError

log = logging.getLogger(__name__)

PACKED = "packed"
FA4 = "4.0.0b17"  # of flash-attn-4: the release that PyTorch 2.13 calls; from b19 on it returns more
_BLOCK = 128  # queries in one call if a window cuts keys off

# Arguments that transformers' models pass to an attention function and varlen_attn does not support
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")


def boundary_arguments(cu_seqlens: torch.Tensor, max_length: int, **shared: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a model's forward for n sequences in a row of T tokens, named as for FlashAttention.

    `cu_seqlens`: int32 `[n + 1]`, the starts of the sequences, then T; `max_length`: the longest sequence, with its
    keys. `shared`, if keys differ from queries, all int32: sequence i sees the tokens `shared_keys[cu_seq_lens_k[i]:
    cu_seq_lens_k[i + 1]]` of the row, ending with its own; `shared_order` as in `GatherKeys`.
    """
    arguments = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return arguments | {"max_length_q": max_length, "max_length_k": max_length} | shared


class GatherKeys(torch.autograd.Function):
    """`states[:, keys]` of keys or values `[1, T, H, D]`, for prefix sharing.

    autograd's own backward adds every element atomically, which is slow in 16 bit and not deterministic. But each
    token is a key once in its own sequence, and a shared prompt token once more in the other. `order` `[T_k]`: the
    positions in `keys` of all tokens in their own sequences, by token, then the positions of the second copies.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(keys, order)
        ctx.tokens = states.shape[1]
        return states.index_select(1, keys)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        keys, order = ctx.saved_tensors
        own = order[: ctx.tokens]
        copies = order[ctx.tokens :]
        prompts = keys.index_select(0, copies).long()
        result = gradient.index_select(1, own)
        total = result.index_select(1, prompts) + gradient.index_select(1, copies)
        return result.index_copy_(1, prompts, total), None, None


def usable_kernels(choice: str) -> list[str]:
    """The kernels besides FA2 that `flash_attention: choice` may use: those installed that fit the GPU, or itself."""
    if choice != "auto":
        return [choice] if choice in ("fa3", "fa4") else []
    capability = torch.cuda.get_device_capability()
    fitting = {
        "fa3": capability == (9, 0) and is_flash_attn_3_available(),
        "fa4": capability[0] in (9, 10) and is_flash_attn_4_available(),
    }
    usable = [kernel for kernel, fits in fitting.items() if fits]
    if capability[0] in (9, 10) and not usable:
        extra = "[cu13]" if str(torch.version.cuda).startswith("13") else ""
        remedy = f'pip install "flash-attn-4{extra}=={FA4}"; the next run compares and times it'
        log.info(f"attention by FA2, which is slow on sm_{capability[0]}0; FA4 is not installed: {remedy}")
    return usable


# Upstream: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, select_sdp_backend: takes cuDNN 9.20. The
# gradient of the queries is NaN there with a mask, a length of 64 modulo 128 and a logsumexp below -88.7, and greedy
# decoding is wrong on B200 for models with few KV heads. Canary: test_canary_cudnn_attention
def disable_cudnn_attention() -> None:
    """For padded attention and `generate`; packed attention never takes it."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def activate_flash(choice: str) -> None:
    """Makes `varlen_attn` use fa2 (PyTorch's own), fa3 or fa4. Raises UserError if it cannot be activated."""
    name = choice.upper()
    torch_attention.restore_flash_attention_impl(_raise_warn=False)
    if name == "FA2":
        return
    try:
        torch_attention.activate_flash_attention_impl(name)
    except Exception as error:  # its package is not installed, or raises any other error
        message = f"flash_attention {choice}: {name} cannot be activated: {error}; set flash_attention: fa2"
        raise UserError(message) from error


def kernel_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel that computes packed attention for these heads: FA2, FA3, FA4, or SDPA sequence by sequence."""
    if _takes_varlen(device, dtype, head_dim, head_dim):
        return torch_attention.current_flash_attention_impl() or "FA2"
    return "SDPA"


def _takes_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    is_half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and is_half and head_dim == value_dim and head_dim % 8 == 0 and head_dim <= 256


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    varlen: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_k: int | None = None,
    shared_keys: torch.Tensor | None = None,
    shared_order: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function with the signature of transformers' AttentionInterface.

    `query` `[1, H, T, D]`, `key` and `value` `[1, H_kv, T, D]`, T = tokens of all sequences; boundaries from
    `boundary_arguments`. A query sees itself and the `sliding_window - 1` (or all) tokens before it in its own
    sequence. `varlen`: use `varlen_attn`; by default if it has a kernel. Returns `[1, T, H, D]` and None. Raises
    ValueError if the model passes an argument that the kernels do not support, or drops the boundaries.
    """
    if cu_seq_lens_q is None and (attention_mask is None or attention_mask.numel()):  # padded evaluation, `generate`
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if cu_seq_lens_q is None:
        unsupported.append("layers that drop cu_seq_lens_q")
    if dropout:  # in training only; step 0 would refuse it on the padded path, too
        raise UserError("packed attention does not support dropout; set its rate to 0.0 in model_init_kwargs")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        unsupported.append("is_causal false")
    if unsupported:
        config: Any = module.config
        what = f"packed attention does not support {', '.join(unsupported)}"
        raise ValueError(f"model_type '{config.model_type}': {what}")

    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # RoPE in fp32 leaves query and key in fp32; autocast casts them for SDPA, but not for a custom operator
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (x.to(dtype) for x in (query, key, value))

    if shared_keys is not None:
        key = GatherKeys.apply(key.transpose(1, 2), shared_keys, shared_order).transpose(1, 2)
        value = GatherKeys.apply(value.transpose(1, 2), shared_keys, shared_order).transpose(1, 2)
    if varlen or _takes_varlen(query.device, query.dtype, query.shape[-1], value.shape[-1]):
        return _varlen(query, key, value, cu_seq_lens_q, cu_seq_lens_k, scaling, sliding_window, max_length_k), None
    return _sdpa_by_sequence(query, key, value, cu_seq_lens_q, cu_seq_lens_k, scaling, sliding_window), None


def _varlen(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window, max_length) -> torch.Tensor:
    # FA3 and FA4 return a contiguous output, but torch.compile assumes the query's strides, which are not contiguous
    # after GPT-NeoX's RoPE: make the query contiguous instead of the output
    q = query[0].transpose(0, 1).contiguous()
    k, v = [x[0].transpose(0, 1) for x in (key, value)]
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    options = {"scale": scaling, "window_size": window, "enable_gqa": query.shape[1] != key.shape[1]}
    output: Any = varlen_attn(q, k, v, cu_seqlens, cu_keys, max_length, max_length, **options)
    return output.unsqueeze(0)


@torch.compiler.disable  # the lengths are Python integers here: each new set would cause a recompilation
def _sdpa_by_sequence(query, key, value, cu_seqlens, cu_keys, scaling, sliding_window) -> torch.Tensor:
    """`[1, H, T, D]` to `[1, T, H, D]`. If a window cuts keys off or shared keys come first, it computes blocks of
    queries with the keys they can see: one masked call would compute every score."""
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    own = cu_seqlens.diff().tolist()
    seen = cu_keys.diff().tolist()
    window = max(seen) if sliding_window is None else sliding_window
    # Row i, column i + d: the key d - (window - 1) tokens from query i. Each block's mask is a slice of it
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


AttentionInterface.register(PACKED, packed_attention_forward)
AttentionMaskInterface.register(PACKED, sdpa_mask)
