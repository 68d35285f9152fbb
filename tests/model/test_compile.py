"""torch_compile: the same results, no graph for each batch, the same names in a checkpoint."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

from bench.count import ByteCounter
from sfm_dpo.model.attention import PACKED, _sdpa_by_sequence, boundary_arguments
from sfm_dpo.model.loading import blocks, compile_layers
from sfm_dpo.model.packing import enable_padding_free
from tests.model.test_packing import make_pairs
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.grid]
KINDS_OF_LAYER = {"gpt_neox": 1, "llama": 1, "olmo3": 2}

GRAPHS = []


@torch._dynamo.register_backend
def counting(graph, example_inputs):
    """The name of a backend, for `torch_compile_backend`: runs the graph as it is, and remembers it."""
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture
def graphs():
    """Each graph that a backend is asked to compile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    GRAPHS.clear()
    yield GRAPHS
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
def test_the_branch_of_a_gpu_has_no_break_and_equals_eager(
    architecture, packed, sharing, checkpointing, graphs, monkeypatch
):
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


def test_generate_compiles_nothing(graphs):
    compiled = make_model("olmo3", backend="counting").eval()
    plain = make_model("olmo3").eval()
    prompt = torch.arange(12)[None]
    expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert graphs == []
    loss_and_gradients(compiled, make_pairs(BATCHES[0]))
    assert graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", KINDS_OF_LAYER)
def test_on_cuda_in_bfloat16(architecture, checkpointing):
    """varlen_attn inside the compiled layer; log-probs within bf16's rounding, recompilations bounded."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
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


COMPILED_BYTES = []


@torch._dynamo.register_backend
def counting_bytes(graph, example_inputs):
    """Inductor up to its fused kernels, whose bytes it counts, without code for them; the graph runs eagerly."""
    return compile_fx.compile_fx(graph, example_inputs, inner_compile=_count_fused_bytes)


def _count_fused_bytes(graph, example_inputs, **kwargs):
    fake_mode = torch._dynamo.utils.detect_fake_mode(example_inputs)
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(graph, False)
        compile_fx.record_original_output_strides(graph)
        lowering = GraphLowering(graph, example_inputs=example_inputs, shape_env=fake_mode.shape_env)
        with V.set_graph_handler(lowering):
            lowering.run(*example_inputs)
            lowering._update_scheduler()
            kernels = [node for node in lowering.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
            COMPILED_BYTES.append(sum(kernel.get_read_write_buffers_sizes() for kernel in kernels))
    return make_boxed_func(graph.forward)


def layer_bytes(shape: str, backend: str | None) -> list[float]:
    """Of a layer in bf16 at its full width: what eager operators move in forward and backward, or, with a backend,
    what Inductor's kernels do in each, in units of tokens x hidden size x 2 bytes."""
    tokens = 8192
    config = AutoConfig.from_pretrained(f"bench/shapes/{shape}", vocab_size=16, pad_token_id=None)
    kinds = getattr(config, "layer_types", None) or []
    config.num_hidden_layers = 1
    config.layer_types = kinds[-1:] or None
    COMPILED_BYTES.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):  # no memory, no arithmetic
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.bfloat16).train()
        if backend:
            compile_layers(model, backend, None)
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        rope = model.base_model.rotary_emb(hidden, ids, *kinds[-1:])
        boundaries = boundary_arguments(torch.empty(9, dtype=torch.int32), 2048)
        forward = ByteCounter()
        backward = ByteCounter()
        with contextlib.nullcontext() if backend else forward:  # torch.compile is off inside of such a mode
            output = blocks(model)[0](hidden, position_ids=ids, position_embeddings=rope, **boundaries)
        with contextlib.nullcontext() if backend else backward:
            output.backward(torch.empty_like(output))
    counted = COMPILED_BYTES if backend else [forward.total, backward.total]
    return [count / (tokens * config.hidden_size * 2) for count in counted]


@pytest.mark.parametrize(
    ("shape", "eager", "compiled"),
    [("gpt_neox_6.9b", (29, 70), (25, 40)), ("olmo3_7b", (136, 321), (30, 55))],
)
def test_bytes_that_a_layer_moves_beside_products_and_attention(shape, eager, compiled, monkeypatch, graphs):
    """The ratios of docs/memory-and-speed.md. The CPU's fusions: Inductor has none for a GPU where there is no GPU."""
    monkeypatch.setattr("sfm_dpo.model.attention._takes_varlen", lambda *_: True)
    found = layer_bytes(shape, None), layer_bytes(shape, "counting_bytes")
    print(f"{shape}: forward, backward {found[0]}; compiled {found[1]}")
    assert found[0] == pytest.approx(eager, rel=0.03)
    assert found[1] == pytest.approx(compiled, rel=0.1)
