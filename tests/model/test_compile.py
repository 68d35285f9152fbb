"""torch_compile: the same results, no graph for each batch, the same names in a checkpoint."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.model.attention import _sdpa_by_sequence
from sfm_dpo.model.loading import compile_layers
from sfm_dpo.model.packing import enable_padding_free
from tests.model.test_packing import make_pairs
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.grid]
KINDS_OF_LAYER = {"gpt_neox": 1, "llama": 1, "olmo3": 2}


@pytest.fixture(autouse=True)
def no_graphs():
    """None that an earlier test has compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# (prompt, chosen, rejected) tokens of the pairs of each batch
BATCHES = [
    [(3, 20, 41)],
    [(3, 5, 9), (3, 50, 33)],
    [(4, 30, 7), (9, 14, 15), (3, 1, 50)],
    [(3, 44, 2), (5, 5, 6)],
    [(6, 11, 12), (3, 27, 13), (8, 40, 2)],
    [(7, 35, 21)],
]


def make_model(
    architecture: str, *, packed=True, sharing=False, checkpointing=False, backend=None, device="cpu", **kwargs
):
    model = tiny_model(architecture, **kwargs).to(device).train()
    add_fused_lm_head(model)
    if packed:
        enable_padding_free(model, sharing)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if backend:
        compile_layers(model, backend, None)
    return model


def loss_and_gradients(model, batch) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = (model(**batch, fused_lm_head=True).log_probs ** 2).mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def attend(q, k, v, cu_q, cu_k, scale, window):
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return _sdpa_by_sequence(*rows, cu_q, cu_k, scale, None if window[0] < 0 else window[0] + 1)[0].contiguous()


def forward_on_cpu(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *_):
    output = attend(q, k, v, cu_q, cu_k, scale, window_size)
    return output, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def backward_on_cpu(gradient, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, state, scale=None, window=None):
    def differentiate():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*inputs, cu_q, cu_k, scale, window), inputs, gradient)

    with ThreadPoolExecutor(1) as thread:  # in this one the kernel is below autograd
        return thread.submit(differentiate).result()


@pytest.mark.parametrize(
    ("architecture", "packed", "sharing", "checkpointing"),
    [
        ("gpt_neox", True, False, True),
        ("gpt_neox", True, True, False),
        ("llama", True, True, True),
        ("llama", False, False, True),
        ("olmo2", True, False, False),
        ("olmo3", True, True, True),
        ("olmoe", True, True, False),
    ],
)
def test_a_gpus_path_has_no_break_and_equals_eager(architecture, packed, sharing, checkpointing, monkeypatch):
    """6 batches, and a forward without gradients of each, need no graph of their own. `varlen_attn` in the compiled
    layer has a kernel for the CPU; the uncompiled model takes SDPA by sequence."""
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward_on_cpu)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward_on_cpu)
    options = {"packed": packed, "sharing": sharing, "checkpointing": checkpointing}
    plain = make_model(architecture, **options)
    compiled = make_model(architecture, **options, backend="aot_eager")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    counters = torch._dynamo.utils.counters
    counts = []
    for batch in map(make_pairs, BATCHES):
        expected_loss, expected = loss_and_gradients(plain, batch)
        with monkeypatch.context() as patch:
            patch.setattr("sfm_dpo.model.attention._takes_varlen", lambda *_: True)
            loss, gradients = loss_and_gradients(compiled, batch)
            with torch.no_grad():
                compiled(**batch, fused_lm_head=True)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert (gradients - expected).norm() <= 1e-5 * expected.norm()
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[-1] == counts[0] > 0
    assert bool(counters["graph_break"]) == (architecture == "olmoe")  # transformers' hook at its router


def test_generate_compiles_nothing():
    counter = CompileCounter()
    compiled = make_model("olmo3", backend=counter).eval()
    plain = make_model("olmo3").eval()
    prompt = torch.arange(12)[None]
    expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert counter.frame_count == 0
    loss_and_gradients(compiled, make_pairs(BATCHES[0]))
    assert counter.frame_count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", KINDS_OF_LAYER)
def test_on_cuda_in_bfloat16(architecture, checkpointing):
    """varlen_attn inside the compiled layer; log-probs within bf16's rounding, recompilations bounded."""
    size = {"hidden_size": 256, "initializer_range": 0.02, "dtype": torch.bfloat16, "device": "cuda"}
    plain = make_model(architecture, checkpointing=checkpointing, **size)
    compiled = make_model(architecture, checkpointing=checkpointing, backend="inductor", **size)
    assert sum(isinstance(m, GradientCheckpointingLayer) for m in compiled.modules()) == 3
    for pairs in BATCHES:
        batch = {name: tensor.cuda() for name, tensor in make_pairs(pairs).items()}
        expected = loss_and_gradients(plain, batch)
        got = loss_and_gradients(compiled, batch)
        assert got[0] == pytest.approx(expected[0], rel=1e-2)
        assert torch.nn.functional.cosine_similarity(got[1].float(), expected[1].float(), dim=0) > 0.99
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * KINDS_OF_LAYER[architecture]
    assert torch._dynamo.utils.counters["graph_break"] == {}
