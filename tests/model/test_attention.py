"""Packed attention alone: against attention written out, what it refuses, and what it leaves to SDPA."""

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.model.attention import PACKED, boundary_mask, describe_kernel, packed_attention_forward, register
from sfm_dpo.model.packing import enable_padding_free
from tests.tiny_models import ARCHITECTURES, tiny_model

LENGTHS = [5, 1, 23, 12]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def written_out(query, key, value, lengths, window):
    """softmax(q k^T / sqrt(d)) v with one [T, T] mask: same sequence, not later, inside the window. Float64."""
    query, key, value = (x.double() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    position = torch.arange(sum(lengths), device=query.device)
    distance = position[:, None] - position[None]
    seen = (sequence[:, None] == sequence[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs(lengths, heads=4, kv_heads=4, head_dim=16, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, sum(lengths), head_dim) for h in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return tensors, boundary_mask(cu_seqlens, max(lengths))


def check_against_written_out(device, dtype, tolerance, kv_heads, window, head_dim=16, lengths=LENGTHS):
    qkv, mask = inputs(lengths, kv_heads=kv_heads, head_dim=head_dim, device=device, dtype=dtype)
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    output, weights = packed_attention_forward(module, *qkv, mask, scaling=head_dim**-0.5, sliding_window=window)
    expected = written_out(*qkv, lengths, window)
    assert weights is None and output.dtype == dtype and output.shape == expected.shape
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    grads = torch.autograd.grad((output * weight.to(dtype)).sum(), qkv)
    expected_grads = torch.autograd.grad((expected * weight).sum(), qkv)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(grads, expected_grads, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "window"),
    [
        *((LENGTHS, kv_heads, window) for kv_heads in (4, 2, 1) for window in (None, 1, 8, 12, 100)),
        *(
            ([300, 7, 128, 129, 256], 2, window) for window in (1, 100, 128, 129, 200, 299)
        ),  # several blocks of queries
        ([4, 0, 3], 4, None),
    ],
)
def test_equals_attention_written_out(lengths, kv_heads, window):
    check_against_written_out("cpu", torch.float32, 1e-5, kv_heads, window, lengths=lengths)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 8, 12, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 1e-4)]
)
def test_equals_attention_written_out_on_cuda(kv_heads, window, dtype, tolerance):
    check_against_written_out("cuda", dtype, tolerance, kv_heads, window, head_dim=64)


def test_boundaries_take_no_memory_and_carry_both_numbers():
    mask = boundary_mask(torch.tensor([0, 5, 9], dtype=torch.int32), 5)
    assert mask.shape == (1, 1, 5, 3) and mask.untyped_storage().nbytes() == 3 * 4
    assert mask[0, 0, 0].tolist() == [0, 5, 9]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *(
            ({name: torch.ones(4)}, f"'demo': packed attention has no '{name}'; set padding_free: false")
            for name in ("softcap", "s_aux", "sinks", "position_bias", "head_mask")
        ),
        ({"dropout": 0.1}, "no dropout; set attention_dropout to"),
        ({"is_causal": False}, "causal only"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error(asked, message):
    qkv, mask = inputs(LENGTHS)
    module = SimpleNamespace(config=SimpleNamespace(model_type="demo"), is_causal=True)
    with pytest.raises(ValueError, match=message):
        packed_attention_forward(module, *qkv, mask, **asked)
    with pytest.raises(ValueError, match="causal only"):
        packed_attention_forward(SimpleNamespace(config=module.config, is_causal=False), *qkv, mask)


def test_autocast_gives_what_it_gives_sdpa():
    """RoPE leaves q and k in fp32 under autocast; the result must be as if all three had been cast."""
    (q, k, v), mask = inputs(LENGTHS)
    module = SimpleNamespace(is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = packed_attention_forward(module, q, k, v.bfloat16(), mask, scaling=0.25)
    cast, _ = packed_attention_forward(module, q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, scaling=0.25)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, cast)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_boundaries_it_is_sdpa(architecture):
    """Padded forwards (right and left padding, none) and generate are exactly those of attn_implementation sdpa."""
    # transformers' own `generate` of a MoE model with padding fails while router logits are asked for
    router = {"output_router_logits": False} if architecture == "olmoe" else {}
    plain = tiny_model(architecture, **router).eval()
    packed = tiny_model(architecture, **router).eval()
    add_fused_lm_head(packed)
    enable_padding_free(packed)  # sets attn_implementation PACKED
    ids = torch.randint(0, 250, (3, 20), generator=torch.Generator().manual_seed(0))
    right = (torch.arange(20) < torch.tensor([[20], [3], [11]])).long()
    for mask in (None, torch.ones_like(ids), right, right.flip(1)):
        with torch.no_grad():
            expected, got = (m(input_ids=ids, attention_mask=mask).logits for m in (plain, packed))
        assert torch.equal(expected, got)
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    for mask in (torch.ones_like(ids), right.flip(1)):
        expected, got = (m.generate(ids, attention_mask=mask, **arguments) for m in (plain, packed))
        assert got.shape == (3, 32) and torch.equal(expected, got)


def test_the_kernel_is_named():
    line = describe_kernel(torch.device("cpu"), torch.bfloat16, 128)
    assert line == "scaled_dot_product_attention, sequence by sequence (varlen_attn has no cpu kernel)"
    assert "varlen_attn (FA" in describe_kernel(torch.device("cuda"), torch.bfloat16, 128)
    assert "not float32" in describe_kernel(torch.device("cuda"), torch.float32, 128)
    assert "not 80 and" not in describe_kernel(torch.device("cuda"), torch.bfloat16, 80)
    assert "not 60 and 60" in describe_kernel(torch.device("cuda"), torch.bfloat16, 60)


@pytest.mark.slow
def test_the_varlen_branch_compiles_once_for_every_shape(monkeypatch):
    """The branch taken on CUDA, on the meta device (shapes without a GPU): checkpointed layers compiled one by one as
    whole graphs, forward and backward, are not compiled again for another total, count or longest of the sequences."""
    monkeypatch.setattr("sfm_dpo.model.attention._why_not_varlen", lambda *_: None)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # unknown for the meta device
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    register()
    model = tiny_model("olmo3", attn_implementation=PACKED, dtype=torch.bfloat16).to("meta").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.base_model.layers:
        layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    graphs = []
    for total, sequences, longest in ((40, 4, 20), (41, 4, 21), (100, 7, 90), (64, 4, 9), (16, 2, 8)):
        ids = torch.empty(1, total, dtype=torch.long, device="meta")
        mask = boundary_mask(torch.empty(sequences + 1, dtype=torch.int32, device="meta"), longest)
        hidden = model.base_model(ids, mask, position_ids=ids).last_hidden_state
        hidden.sum().backward()
        assert hidden.shape == (1, total, 64)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[0]
