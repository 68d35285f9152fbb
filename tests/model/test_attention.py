"""Packed attention alone: against attention written out, what it refuses, and what it leaves to SDPA."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, register_flash_attention_impl, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.common.errors import UserError
from sfm_dpo.model import attention
from sfm_dpo.model.attention import GatherKeys, boundary_arguments, packed_attention_forward
from sfm_dpo.model.packing import enable_padding_free
from tests.tiny_models import ARCHITECTURES, tiny_model

LENGTHS = [5, 1, 23, 12]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_CPU = ("cpu", torch.float32, 1e-5)  # device, dtype, tolerance
ON_GPU = pytest.param("cuda", torch.bfloat16, 3e-2, marks=GPU)
ON_GPU_ALONE = [
    pytest.param("cuda", dtype, error, marks=GPU) for dtype, error in ((torch.float16, 5e-3), (torch.float32, 1e-4))
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_canary_cudnn_attention():
    query, key, value = (torch.randn(1, 1, 704, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query[..., 0] = 1
    key[..., 0] = -120 * 8  # each logit is about -120
    query.requires_grad_()
    mask = torch.ones(704, 704, dtype=torch.bool, device="cuda").tril()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None]).sum().backward()
    assert query.grad.isnan().any()


def inputs(lengths, heads=4, kv_heads=4, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    head_dim = 16 if device == "cpu" else 64
    shapes = [(1, h, sum(lengths), head_dim) for h in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return tensors, boundary_arguments(cu_seqlens, max(lengths))


def written_out(qkv, own, seen, window):
    """softmax(q k^T / sqrt(d)) v of each sequence alone, float64: its queries stand at the end of its keys `seen`."""
    query, key, value = (x.double() for x in qkv)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    outputs = []
    for q, keys in zip(query.split(own, 2), seen, strict=True):
        distance = torch.arange(len(keys) - q.shape[2], len(keys))[:, None] - torch.arange(len(keys))[None]
        visible = (distance >= 0) & (distance < (window or len(keys) + 1))
        scores = q @ key[:, :, keys].transpose(2, 3) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
        outputs.append((scores.softmax(-1) @ value[:, :, keys]).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def assert_written_out(qkv, boundaries, own, seen, window, tolerance):
    module = SimpleNamespace(num_key_value_groups=qkv[0].shape[1] // qkv[1].shape[1], is_causal=True)
    scaling = qkv[0].shape[-1] ** -0.5
    options = {"scaling": scaling, "sliding_window": window, **boundaries}
    output, weights = packed_attention_forward(module, *qkv, None, **options)
    expected = written_out(qkv, own, seen, window)
    assert weights is None and output.dtype == qkv[0].dtype and output.shape == expected.shape
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(output.device)
    grads = torch.autograd.grad((output * weight.to(output.dtype)).sum(), qkv)
    expected_grads = torch.autograd.grad((expected * weight).sum(), qkv)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(grads, expected_grads, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [ON_CPU, ON_GPU, *ON_GPU_ALONE])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "window"),
    [
        *((LENGTHS, kv_heads, window) for kv_heads in (4, 2, 1) for window in (None, 1, 8, 12, 100)),
        *(([300, 7, 128, 129, 256], 2, window) for window in (1, 128, 129, 299)),  # several blocks of queries
        ([4, 0, 3], 4, None),
    ],
)
def test_equals_attention_written_out(lengths, kv_heads, window, device, dtype, tolerance):
    qkv, boundaries = inputs(lengths, kv_heads=kv_heads, device=device, dtype=dtype)
    assert_written_out(qkv, boundaries, lengths, torch.arange(sum(lengths)).split(lengths), window, tolerance)


# Own and seen tokens of each sequence: [7 of a prompt and 5 of its chosen answer] is seen by a rejected one of 4, ...
SHARED = [([12, 4, 9, 1], [0, 0, 7, 0]), ([300, 140, 150], [0, 130, 0]), ([300, 1], [0, 299]), ([5, 5], [0, 4])]


def shared_inputs(own, before, device, dtype):
    """Queries and 2 heads of keys of a row in which every sequence also sees the first `before` tokens of the row."""
    qkv, _ = inputs(own, kv_heads=2, device=device, dtype=dtype)
    seen = [count + shared for count, shared in zip(own, before, strict=True)]
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (own, seen)]
    keys, order = keys_and_order(own, before)
    cu_seqlens, cu_keys, shared_keys, order = [x.to(device) for x in (*bounds, keys, order)]
    shared = {"cu_seq_lens_k": cu_keys, "shared_keys": shared_keys, "shared_order": order}
    return qkv, keys.split(seen), boundary_arguments(cu_seqlens, max(seen), **shared)


def keys_and_order(own, before):
    """The tokens that all sequences see, and GatherKeys' order: own tokens, then second copies."""
    keys = []
    is_copy = []
    for number, (count, seen) in enumerate(zip(own, before, strict=True)):
        start = sum(own[:number])
        keys += [*range(seen), *range(start, start + count)]
        is_copy += [True] * seen + [False] * count
    return torch.tensor(keys).int(), torch.tensor(is_copy).byte().argsort(stable=True).int()


class OpCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("own", "before"), SHARED)
def test_gathered_keys_have_autograd_s_gradient_without_atomics(own, before):
    keys, order = keys_and_order(own, before)
    states = torch.randn(1, sum(own), 2, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, len(keys), 2, 8, dtype=torch.float64)
    (expected,) = torch.autograd.grad(states.index_select(1, keys), states, weight)
    gathered = GatherKeys.apply(states, keys, order)
    with OpCounter() as ops:
        (gradient,) = torch.autograd.grad(gathered, states, weight)
    assert torch.equal(gathered, states[:, keys]) and torch.equal(gradient, expected)
    assert ops.names["index_copy_"] == 1 and not [name for name in ops.names if "add_" in name or "put" in name]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [ON_CPU, ON_GPU])
@pytest.mark.parametrize(("own", "before"), SHARED)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 129, 200, 1000])
def test_more_keys_than_queries_equal_attention_written_out(own, before, window, device, dtype, tolerance):
    qkv, keys, boundaries = shared_inputs(own, before, device, dtype)
    assert_written_out(qkv, boundaries, own, keys, window, tolerance)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0, "sinks": torch.ones(4)}, "softcap, sinks"),
        ({"is_causal": False}, "is_causal false"),
        ({"cu_seq_lens_q": None}, "layers that drop cu_seq_lens_q"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error(arguments, words):
    qkv, boundaries = inputs(LENGTHS)
    module = SimpleNamespace(config=SimpleNamespace(model_type="demo"), is_causal=True)
    with pytest.raises(ValueError, match=f"'demo': .* does not support {words}"):
        packed_attention_forward(module, *qkv, torch.empty(0), **boundaries | arguments)
    with pytest.raises(UserError, match="does not support dropout; set its rate"):
        packed_attention_forward(module, *qkv, torch.empty(0), dropout=0.1, **boundaries)


def test_autocast_gives_what_it_gives_sdpa():
    """RoPE leaves q and k in fp32 under autocast; the result must be as if all three had been cast."""
    qkv, boundaries = inputs(LENGTHS)
    q, k, v = qkv
    module = SimpleNamespace(is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = packed_attention_forward(module, q, k, v.bfloat16(), None, scaling=0.25, **boundaries)
    cast, _ = packed_attention_forward(module, *[x.bfloat16() for x in qkv], None, scaling=0.25, **boundaries)
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


def test_the_flash_kernel_is_the_one_asked_for(monkeypatch, capsys):
    removed = []
    register_flash_attention_impl("FA9", register_fn=lambda: SimpleNamespace(remove=lambda: removed.append(True)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))

    def kernel(choice: str) -> str:
        attention.activate_flash(choice)
        return attention.kernel_name(torch.device("cuda"), torch.bfloat16, 64)

    assert kernel("fa2") == "FA2"
    for major, cuda, package in ((10, "13.0", "flash-attn-4[cu13]"), (9, "12.6", "flash-attn-4")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda given=major: (given, 0))
        assert attention.usable_kernels("auto") == []
        out = capsys.readouterr().out
        assert f'slow on sm_{major}0; FA4 is not installed: pip install "{package}' in out and "==4.0.0b17" in out
    assert kernel("fa9") == "FA9" and not removed
    assert kernel("fa2") == "FA2" and removed
    for number in (3, 4):
        monkeypatch.setattr(attention, f"is_flash_attn_{number}_available", lambda: True)
    for capability, usable in (((10, 0), ["fa4"]), ((9, 0), ["fa3", "fa4"]), ((8, 0), [])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda given=capability: given)
        assert attention.usable_kernels("auto") == usable and attention.usable_kernels("fa2") == []
    with pytest.raises(UserError, match=r"^flash_attention fa3: FA3 cannot be activated: No module named .+: fa2$"):
        kernel("fa3")
